//! OLMo 2 and 3.

use super::super::keys::{Keys, ModelShape};
use super::super::layer_spec::{LayerSpec, ModelSpec, Norms, QkNorm};
use super::super::rope::RopeSpec;
use super::parts::{eps_5, plain, windows, with_attention_bias, with_ropes};
use super::rope::{rope, ropes_by_kind};

/// With norms of the outputs of attention and MLP, and of all heads together. In a GGUF file it may be an OLMo 3.
pub fn olmo2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    if keys.is_gguf() {
        return olmo3(keys, shape);
    }
    let rope = rope(keys, shape)?;
    let layer = layer(keys, shape, rope)?;
    Ok(vec![layer; shape.num_layers].into())
}

/// With windows on three of four layers, whose position embedding is not scaled.
pub fn olmo3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let (full, sliding) = ropes_by_kind(keys, shape, 500_000., None)?;
    let layer = layer(keys, shape, full.clone())?;
    let windows = windows(keys, shape, true, |i| !(i + 1).is_multiple_of(4))?;
    let rope = |_, slides| Some(if slides { &sliding } else { &full });
    Ok(with_ropes(&layer, windows, shape, rope).into())
}

pub fn defaults3(keys: &mut Keys) {
    keys.default("sliding_window", 4096);
    eps_5(keys);
}

fn layer(keys: &mut Keys, shape: &ModelShape, rope: RopeSpec) -> Result<LayerSpec, String> {
    let layer = LayerSpec {
        norms: Norms::AFTER,
        qk_norm: Some(QkNorm::Whole),
        ..plain(keys, shape, rope)?
    };
    with_attention_bias(keys, layer, false)
}
