//! The short convolution that a layer has in place of attention (LFM2): each channel of `B * x` is mixed with that of
//! the last few tokens, and multiplied with `C`, where `B`, `C` and `x` are products of the layer's input.

use super::mixer::{Mixer, MixerLayer, MixerParts, MixerRows};
use crate::spec::conv::ShortConvSpec;
use crate::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{ConvWeights, Pools, short_conv, short_conv_write};

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
    let mixer = ConvWeights {
        taps,
        bias: bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?,
    };
    let (name, shape) = (parts.at("conv.in_proj"), (3 * channels, parts.inputs));
    let in_proj = weights.linear(&name, shape, spec.has_bias)?;
    let out_proj = ("conv.out_proj", channels, spec.has_bias);
    parts.layer(weights, (in_proj, mixer), out_proj)
}

impl Mixer for ConvWeights {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        self.write_kv(rows)?;
        let channels = self.taps.dim(1)?;
        let c = rows.products.narrow(1, channels, channels)?;
        let (k, v) = rows.pool.tokens()?;
        Ok(short_conv(&rows.pick(&c)?, (k, v), self, rows.step.spans)?)
    }

    fn write_kv(&self, rows: &MixerRows<'_>) -> Result<()> {
        let (k, v) = rows.pool.tokens()?;
        let pools = Pools {
            k,
            v,
            slots: rows.step.slots,
        };
        Ok(short_conv_write(&rows.products, pools)?)
    }
}
