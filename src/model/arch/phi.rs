//! Phi-3, Phi-3.5 and Phi-4, without experts.

use super::super::keys::{Keys, Shape};
use super::super::layer_spec::{LayerSpec, ModelSpec};
use super::parts::{plain, windows, with_windows};
use super::rope::partial_rope;

/// A Llama with fused tensors, windows, and a position embedding of a part of each head.
pub fn phi3(keys: &mut Keys, shape: &Shape) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, 1.)?;
    let layer = LayerSpec {
        fused_qkv: true,
        fused_gate_up: true,
        ..plain(keys, shape, rope)?
    };
    let windows = windows(keys, shape, true, |_| true)?;
    Ok(with_windows(&layer, windows, shape).into())
}
