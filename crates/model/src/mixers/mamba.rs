//! The Mamba 2 layer that a layer has in place of attention (Granite 4, Nemotron-H), or beside it (Falcon-H1).

use super::mixer::{Mixer, MixerLayer, MixerParts, MixerRows};
use crate::spec::mamba::MambaSpec;
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::{MambaWeights, mamba};
use std::sync::Arc;

/// Reads such a layer.
///
/// # Errors
/// A setup error that names a tensor that is missing or has a wrong shape.
pub fn load(parts: &MixerParts<'_>, weights: &mut Weights, spec: MambaSpec) -> Result<MixerLayer> {
    let shape = spec.shape;
    let (channels, heads, values) = (shape.channels(), shape.heads, shape.values());
    let at = |part: &str| parts.at(&format!("mamba.{part}"));
    let conv = weights.convolution(&at("conv1d"), channels, shape.taps)?;
    let conv_bias = (spec.has_conv_bias)
        .then(|| weights.vector(&at("conv1d.bias"), channels))
        .transpose()?;
    let mixer = MambaWeights {
        shape,
        conv: conv.flatten_all()?.to_vec1()?,
        conv_bias,
        decay: weights.decay(&at("A_log"), heads)?,
        dt_bias: weights.vector(&at("dt_bias"), heads)?,
        skip: weights.vector(&at("D"), heads)?,
        step_limits: spec.step_limits,
        norm: (spec.has_norm)
            .then(|| weights.vector(&at("norm.weight"), values))
            .transpose()?,
        eps: parts.config.rms_norm_eps as f32,
        on_device: None,
    };
    let mixer = Arc::new(mixer.on(weights.device())?);
    let in_proj = weights.linear(&at("in_proj"), (shape.width(), parts.inputs), spec.has_bias)?;
    let shared = shape.groups * shape.state_dim;
    let widths = [values, values, shared, shared, heads];
    let scales: Vec<(f32, usize)> = spec.scales.into_iter().zip(widths).collect();
    let in_proj = in_proj.scaled(weights.scales(&scales)?);
    let out_proj = ("mamba.out_proj", values, spec.has_bias);
    parts.layer(weights, (in_proj, mixer), out_proj)
}

impl Mixer for Arc<MambaWeights> {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        let states = &mut rows.pool.states()?;
        let y = mamba(&rows.products, self, rows.step.states, states)?;
        Ok(rows.pick(&y)?.contiguous()?)
    }
}
