//! The Mamba 2 layer that a layer has in place of attention (Granite 4, Nemotron-H).

use super::mamba_spec::MambaSpec;
use super::weights::Weights;
use foretoken_core::error::Result;
use foretoken_kernels::MambaWeights;

/// Reads the weights of such a layer besides its products; `at` names the layer's parts.
///
/// # Errors
/// A setup error that names a tensor that is missing or has a wrong shape.
pub fn load(
    weights: &mut Weights,
    at: impl Fn(&str) -> String,
    spec: &MambaSpec,
    eps: f32,
) -> Result<MambaWeights> {
    let shape = spec.shape;
    let (channels, heads, values) = (shape.channels(), shape.heads, shape.values());
    let at = |part: &str| at(&format!("mamba.{part}"));
    let conv = weights.convolution(&at("conv1d"), channels, shape.taps)?;
    let conv_bias = (spec.has_conv_bias)
        .then(|| weights.vector(&at("conv1d.bias"), channels))
        .transpose()?;
    Ok(MambaWeights {
        shape,
        conv: conv.flatten_all()?.to_vec1()?,
        conv_bias,
        decay: weights.decay(&at("A_log"), heads)?,
        dt_bias: weights.vector(&at("dt_bias"), heads)?,
        skip: weights.vector(&at("D"), heads)?,
        step_limits: spec.step_limits,
        norm: weights.vector(&at("norm.weight"), values)?,
        eps,
    })
}
