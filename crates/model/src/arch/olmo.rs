//! OLMo 2 and 3, and OLMoE.

use super::experts::{self, with_experts};
use super::parts::{eps_5, plain, windows, with_attention_bias, with_ropes};
use super::rope::{rope, ropes_by_kind};
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::RopeSpec;
use crate::spec::{LayerSpec, ModelSpec, Norms, QkNorm};

/// An OLMo 2 model has norms of the outputs of attention and MLP, and of all heads together. In a GGUF file it may be
/// an OLMo 3.
pub fn olmo2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    if keys.is_gguf() {
        return olmo3(keys, shape);
    }
    let rope = rope(keys, shape)?;
    let layer = layer(keys, shape, rope)?;
    Ok(vec![layer; shape.num_layers].into())
}

/// An OLMo 3 model has windows on three of four layers, whose position embedding is not scaled.
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

/// Sets what the class assumes.
pub fn olmoe_defaults(keys: &mut Keys) {
    eps_5(keys);
    experts::defaults(keys, 64, 8);
}

/// A Llama with norms of all heads together, and experts.
pub fn olmoe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::Whole),
        ..plain(keys, shape, rope)?
    };
    let layer = with_attention_bias(keys, layer, false)?;
    let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(false);
    let layers = vec![layer; shape.num_layers];
    Ok(with_experts(keys, layers, shape.intermediate_size, is_normalized)?.into())
}
