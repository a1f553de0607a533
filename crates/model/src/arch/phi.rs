//! Phi-3, Phi-3.5 and Phi-4, without experts.

use super::parts::{activation_or, windows, with_windows};
use super::rope::partial_rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec};
use foretoken_kernels::Activation;

/// A Llama with fused tensors, windows, and a position embedding of a part of each head.
pub fn phi3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, 1.)?;
    let layer = LayerSpec {
        fused_qkv: true,
        mlp: MlpSpec::fused(activation_or(keys, Activation::Silu)?),
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    let windows = windows(keys, shape, true, |_| true)?;
    Ok(with_windows(&layer, windows, shape).into())
}
