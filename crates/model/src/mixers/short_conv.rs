//! The short convolution that a layer has in place of attention (LFM2): each channel of `B * x` is mixed with that of
//! the last few tokens, and multiplied with `C`, where `B`, `C` and `x` are products of the layer's input.

use super::mixer::{Mixer, MixerLayer, MixerParts, MixerRows};
use crate::spec::conv::ShortConvSpec;
use crate::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{Pools, short_conv, short_conv_write};

/// The weights of a convolution.
#[derive(Clone)]
pub(crate) struct ShortConv {
    /// `[taps, channels]` f32, that of the row's own token first.
    weights: Tensor,
    /// `[channels]` f32.
    bias: Option<Tensor>,
}

impl ShortConv {
    /// Reads such a layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        parts: &MixerParts<'_>,
        weights: &mut Weights,
        spec: ShortConvSpec,
    ) -> Result<MixerLayer> {
        let (name, channels) = (parts.at("conv.conv"), parts.config.hidden_size);
        let taps = weights.convolution(&name, channels, spec.taps)?;
        let bias = weights.bias(&name, channels, spec.has_bias)?;
        let mixer = Self {
            weights: taps,
            bias: bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?,
        };
        let (name, shape) = (parts.at("conv.in_proj"), (3 * channels, parts.inputs));
        let in_proj = weights.linear(&name, shape, spec.has_bias)?;
        let out_proj = ("conv.out_proj", channels, spec.has_bias);
        parts.layer(weights, (in_proj, mixer), out_proj)
    }

    /// Part `i` of the products `[B, C, x]` of all rows.
    fn part(&self, rows: &MixerRows<'_>, i: usize) -> Result<Tensor> {
        let channels = self.weights.dim(1)?;
        Ok(rows.products.narrow(1, i * channels, channels)?)
    }
}

impl Mixer for ShortConv {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        self.write_kv(rows)?;
        let c = rows.pick(&self.part(rows, 1)?)?;
        let (k, v) = rows.pool.tokens()?;
        let mixed = short_conv(k, v, &self.weights, rows.step.spans)?;
        let mixed = match &self.bias {
            Some(bias) => mixed.broadcast_add(bias)?,
            None => mixed,
        };
        Ok((c * mixed)?)
    }

    fn write_kv(&self, rows: &MixerRows<'_>) -> Result<()> {
        let (k, v) = rows.pool.tokens()?;
        let pools = Pools {
            k,
            v,
            slots: rows.step.slots,
        };
        let bx = (self.part(rows, 0)? * self.part(rows, 2)?)?;
        Ok(short_conv_write(&bx, pools)?)
    }
}
