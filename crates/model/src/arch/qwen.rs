//! Qwen 2, 2.5 and 3, MiMo, dots.llm1 and Mellum 2.

use super::experts::{self, experts};
use super::parts::{
    by_kind, drop_further_layers, mtp_apart, plain, windows, with_attention_bias, with_ropes,
    with_windows,
};
use super::rope::{rope, ropes_by_kind};
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::RopeSpec;
use crate::spec::{ExpertsSpec, LayerSpec, MlpSpec, ModelSpec, QkNorm, SharedExpert};
use std::collections::HashSet;

pub fn qwen2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(true),
        ..plain(keys, shape, rope)?
    };
    layers(keys, shape, &layer)
}

/// MiMo is a Qwen 2 with layers for further tokens, which are not read.
pub fn mimo(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("attention_bias", true)?;
    keys.ignore("num_nextn_predict_layers");
    Ok(ModelSpec {
        unread: vec!["model.mtp_layers.".to_owned()],
        ..qwen2(keys, shape)?
    })
}

pub fn qwen3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer_of_qwen3(keys, shape)?;
    layers(keys, shape, &layer)
}

fn layer_of_qwen3(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    let rope = rope(keys, shape)?;
    rotated_by(keys, shape, rope)
}

/// The layer of a Qwen 3 with this position embedding.
fn rotated_by(keys: &mut Keys, shape: &ModelShape, rope: RopeSpec) -> Result<LayerSpec, String> {
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    };
    with_attention_bias(keys, layer, false)
}

/// Sets what the class assumes.
pub fn qwen3_moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 128, 8);
    keys.default("moe_intermediate_size", 768);
}

/// Qwen 3 with experts: a window is one of all layers.
pub fn qwen3_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer_of_qwen3(keys, shape)?;
    // llama.cpp always divides by the sum.
    let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(keys.is_gguf());
    let windows = windows(keys, shape, false, |_| true)?;
    let mut layers = with_windows(&layer, windows, shape);
    add_experts(keys, &mut layers, is_normalized, None)?;
    Ok(layers.into())
}

/// Sets what the class assumes.
pub fn qwen3_vl_moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 60, 4);
    keys.default("moe_intermediate_size", 1408);
}

/// The decoder of Qwen3-VL with experts, whose class always divides weights by their sum.
pub fn qwen3_vl_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("norm_topk_prob", true)?;
    keys.set("norm_topk_prob", true);
    let mut model = qwen3_moe(keys, shape)?;
    for layer in &mut model.layers {
        if let MlpSpec::Experts(experts) = &mut layer.mlp {
            experts.is_transposed = true;
        }
    }
    Ok(model)
}

/// Sets what the class assumes.
pub fn qwen2_moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 60, 4);
    keys.default("moe_intermediate_size", 1408);
    keys.default("shared_expert_intermediate_size", 5632);
}

/// Qwen 2 with experts, of which one is that of all tokens. Every second layer may have a window.
pub fn qwen2_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let bias = keys.flag("qkv_bias")?.unwrap_or(true);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(bias),
        ..plain(keys, shape, rope)?
    };
    let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(false);
    let full = keys.size("max_window_layers")?.unwrap_or(28);
    let windows = windows(keys, shape, false, |i| i.is_multiple_of(2) && i < full)?;
    let mut layers = with_windows(&layer, windows, shape);
    let width = keys.size("shared_expert_intermediate_size")?;
    // As in llama.cpp.
    let width = width.unwrap_or(shape.intermediate_size);
    let shared = SharedExpert {
        has_gate: true,
        ..SharedExpert::new("mlp.shared_expert", width)
    };
    add_experts(keys, &mut layers, is_normalized, Some(shared))?;
    Ok(layers.into())
}

/// Sets what the class assumes.
pub fn mellum_defaults(keys: &mut Keys) {
    experts::defaults(keys, 64, 8);
    keys.default("head_dim", 128);
    keys.default("max_position_embeddings", 131_072);
    keys.default("moe_intermediate_size", 896);
    keys.default("norm_topk_prob", true);
    keys.default("num_key_value_heads", 4);
    keys.default("sliding_window", 1024);
    keys.rename("num_mtp_layers", "num_nextn_predict_layers");
    drop_further_layers(keys);
}

/// Mellum 2: Qwen 3 with experts, and with windows in layers that have their own position embedding. A layer for further
/// tokens has one of its own kinds.
pub fn mellum(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    // Files of llama.cpp have one base of both, if they do not say otherwise.
    let (is_gguf, local) = (keys.is_gguf(), (!keys.is_gguf()).then_some(1e4));
    let (full, sliding) = ropes_by_kind(keys, shape, 500_000., local)?;
    let layer = rotated_by(keys, shape, full.clone())?;
    let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(is_gguf);
    let slides = |i: usize| is_gguf && !(i + 1).is_multiple_of(4);
    let window = keys.peek("sliding_window").as_u64();
    let window = window.and_then(|window| usize::try_from(window).ok());
    let mut windows = windows(keys, shape, true, slides)?;
    let accepted = "only dense and sparse are";
    let is_dense = |kind: &str| match kind {
        "dense" => Some(true),
        "sparse" => Some(false),
        _ => None,
    };
    let dense = by_kind(keys, shape, "mlp_layer_types", accepted, is_dense)?;
    let mut dense = dense.unwrap_or_else(|| vec![false; shape.num_layers]);
    let count = "num_nextn_predict_layers";
    if !is_gguf && keys.peek(count).as_u64() > Some(0) {
        keys.only(count, 1)?;
        keys.set(count, 1);
        let accepted_kinds = "only full_attention is, and sliding_attention with a sliding_window";
        let of = |kind: &str| match kind {
            "full_attention" => Some(None),
            "sliding_attention" => window.map(Some),
            _ => None,
        };
        let kinds = ("mtp_layer_types", "sliding_attention");
        windows.extend(further_kind(keys, shape, kinds, accepted_kinds, of)?);
        let kinds = ("mtp_mlp_layer_types", "sparse");
        dense.extend(further_kind(keys, shape, kinds, accepted, is_dense)?);
    }
    keys.ignore("mtp_layer_types mtp_mlp_layer_types");
    let rope = |_, slides| Some(if slides { &sliding } else { &full });
    let mut layers = with_ropes(&layer, windows, shape, rope);
    add_experts(keys, &mut layers, is_normalized, None)?;
    for (own, is_dense) in layers.iter_mut().zip(dense) {
        if is_dense {
            own.mlp = layer.mlp;
        }
    }
    let last = layers.split_off(shape.num_layers).pop();
    let last = last.or_else(|| layers.last().cloned());
    let (unread, mtp) = mtp_apart(keys, shape, last)?;
    Ok(ModelSpec {
        unread,
        mtp,
        ..layers.into()
    })
}

/// What `of` makes of the kind of the only layer for further tokens: the one that the list `key` names, or else
/// `by_default`.
fn further_kind<T>(
    keys: &mut Keys,
    shape: &ModelShape,
    (key, by_default): (&str, &str),
    accepted: &str,
    of: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, String> {
    if keys.peek(key).is_null() {
        keys.set(key, vec![by_default]);
    }
    let one = ModelShape {
        num_layers: 1,
        ..*shape
    };
    Ok(by_kind(keys, &one, key, accepted, of)?.unwrap_or_default())
}

/// Sets what the class assumes, besides the numbers of experts, for which it has no defaults.
pub fn dots1_defaults(keys: &mut Keys) {
    keys.rename("n_routed_experts", "num_experts");
    keys.rename("num_local_experts", "num_experts");
    keys.default("max_position_embeddings", 2048);
    keys.default("max_window_layers", 62);
    keys.default("moe_intermediate_size", 1408);
    keys.default("norm_topk_prob", false);
    keys.default("sliding_window", 4096);
    // The class does not read it.
    keys.ignore("use_sliding_window");
    // Published files have the other key's value here, too.
    if keys.peek("scoring_func") == "noaux_tc" {
        keys.ignore("scoring_func");
    }
}

/// dots.llm1: the attention of Qwen 3, and the experts of DeepSeek-V3.
pub fn dots1(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer_of_qwen3(keys, shape)?;
    // A key of DeepSeek's, which other programs read in published files.
    keys.only("moe_layer_freq", 1)?;
    keys.only("scoring_func", "sigmoid")?;
    let experts = experts::corrected(keys, layer.mlp)?;
    let dense = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let full = keys.size("max_window_layers")?.unwrap_or(shape.num_layers);
    let windows = windows(keys, shape, true, |i| i >= full)?;
    let mut layers = with_windows(&layer, windows, shape);
    experts::set(&mut layers, experts, |i| i >= dense);
    Ok(layers.into())
}

/// Gives the layers that have experts theirs; the others keep their MLP.
pub fn add_experts(
    keys: &mut Keys,
    layers: &mut [LayerSpec],
    is_normalized: bool,
    shared: Option<SharedExpert>,
) -> Result<(), String> {
    let width = keys.needed_size("moe_intermediate_size")?;
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        let accepted = "it must be 1 or more";
        return Err(keys.refused("decoder_sparse_step", &0.into(), accepted));
    }
    let without = keys.sizes("mlp_only_layers")?.unwrap_or_default();
    let without: HashSet<usize> = without.into_iter().collect();
    let Some(layer) = layers.first() else {
        return Ok(());
    };
    let experts = ExpertsSpec {
        shared,
        ..experts(keys, layer.mlp, width, is_normalized)?
    };
    experts::set(layers, experts, |i| {
        (i + 1).is_multiple_of(step) && !without.contains(&i)
    });
    Ok(())
}

/// Layers like `layer`, of which those from `max_window_layers` on may have a window.
fn layers(keys: &mut Keys, shape: &ModelShape, layer: &LayerSpec) -> Result<ModelSpec, String> {
    // The default of transformers' `Qwen2Config`.
    let full = keys.size("max_window_layers")?.unwrap_or(28);
    let windows = windows(keys, shape, false, |layer| layer >= full)?;
    Ok(with_windows(layer, windows, shape).into())
}
