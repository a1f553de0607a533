//! Qwen 2, 2.5 and 3, without experts.

use super::super::keys::{Keys, ModelShape};
use super::super::layer_spec::{LayerSpec, ModelSpec, QkNorm};
use super::parts::{plain, windows, with_attention_bias, with_windows};
use super::rope::rope;

pub fn qwen2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(true),
        ..plain(keys, shape, rope)?
    };
    layers(keys, shape, &layer)
}

pub fn qwen3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    };
    let layer = with_attention_bias(keys, layer, false)?;
    layers(keys, shape, &layer)
}

/// Layers like `layer`, of which those from `max_window_layers` on may have a window.
fn layers(keys: &mut Keys, shape: &ModelShape, layer: &LayerSpec) -> Result<ModelSpec, String> {
    // Of transformers' `Qwen2Config`.
    let full = keys.size("max_window_layers")?.unwrap_or(28);
    let windows = windows(keys, shape, false, |layer| layer >= full)?;
    Ok(with_windows(layer, windows, shape).into())
}
