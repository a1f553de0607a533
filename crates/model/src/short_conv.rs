//! The short convolution that a layer has in place of attention (LFM2): each channel of `B * x` is mixed with that of
//! the last few tokens, and multiplied with `C`, where `B`, `C` and `x` are products of the layer's input.

use super::conv_spec::ShortConvSpec;
use super::layer_step::Step;
use super::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{AttentionBatch, Pools, short_conv, short_conv_write};

/// The weights of a convolution.
#[derive(Clone)]
pub(super) struct ShortConv {
    /// `[taps, channels]` f32, that of the row's own token first.
    weights: Tensor,
    /// `[channels]` f32.
    bias: Option<Tensor>,
}

impl ShortConv {
    /// Reads the convolution `name` of `channels`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        weights: &mut Weights,
        name: &str,
        channels: usize,
        spec: ShortConvSpec,
    ) -> Result<Self> {
        let taps = weights.convolution(name, channels, spec.taps)?;
        let bias = if spec.has_bias {
            let bias = weights.tensor(&format!("{name}.bias"), &[channels])?;
            Some(bias.to_dtype(DType::F32)?)
        } else {
            None
        };
        Ok(Self {
            weights: taps,
            bias,
        })
    }

    /// Writes what other rows read of rows with the products `bcx`, `[rows, 3 * channels]`; returns their `C`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write(
        &self,
        bcx: &Tensor,
        step: &Step<'_>,
        (k, v): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let channels = self.weights.dim(1)?;
        let part = |i: usize| bcx.narrow(1, i * channels, channels);
        let pools = Pools {
            k,
            v,
            slots: step.slots,
        };
        short_conv_write(&(part(0)? * part(2)?)?, pools)?;
        Ok(part(1)?)
    }

    /// The convolution of the rows of `batch`, whose `C` is `c`, `[rows, channels]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(
        &self,
        c: &Tensor,
        batch: &AttentionBatch<'_>,
        (k, v): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let mixed = short_conv(k, v, &self.weights, batch)?;
        let mixed = match &self.bias {
            Some(bias) => mixed.broadcast_add(bias)?,
            None => mixed,
        };
        Ok((c * mixed)?)
    }
}
