//! Qwen3-Next and Qwen 3.5: the gated delta rule in most layers, attention with gates in the others.

use super::experts;
use super::mamba::head_width;
use super::parts::{LAYER_TYPES, by_kind, drop_further_layers, mtp_apart, plain};
use super::qwen::add_experts;
use super::rope::partial_rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::delta::{DeltaLayout, DeltaSpec};
use crate::spec::{AttentionGate, LayerSpec, MixerSpec, ModelSpec, NormSpec, QkNorm, SharedExpert};
use foretoken_kernels::DeltaShape;

/// Sets what the class of Qwen3-Next assumes.
pub fn next_defaults(keys: &mut Keys) {
    experts::defaults(keys, 512, 10);
    keys.default("moe_intermediate_size", 512);
    keys.default("shared_expert_intermediate_size", 512);
    keys.default("intermediate_size", 5632);
    keys.default("norm_topk_prob", true);
    keys.default("num_key_value_heads", 2);
    defaults(keys);
}

/// Sets what the class of Qwen 3.5 with experts assumes.
pub fn moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 256, 8);
    keys.default("moe_intermediate_size", 512);
    keys.default("shared_expert_intermediate_size", 512);
    // No layer has an MLP besides experts.
    let width = keys.peek("moe_intermediate_size");
    if !keys.has("intermediate_size") {
        keys.set("intermediate_size", width);
    }
    keys.default("num_key_value_heads", 2);
    defaults(keys);
}

/// Sets what the class of Qwen 3.5 assumes.
pub fn dense_defaults(keys: &mut Keys) {
    keys.default("num_key_value_heads", 4);
    defaults(keys);
}

fn defaults(keys: &mut Keys) {
    for (gguf, ours, by_default) in [
        ("ssm.conv_kernel", "linear_conv_kernel_dim", 4),
        ("ssm.group_count", "linear_num_key_heads", 16),
        ("ssm.state_size", "linear_key_head_dim", 128),
        ("ssm.time_step_rank", "linear_num_value_heads", 32),
    ] {
        keys.rename(gguf, ours);
        keys.default(ours, by_default);
    }
    head_width(keys, "linear_num_value_heads", "linear_value_head_dim");
    keys.default("linear_value_head_dim", 128);
    keys.default("head_dim", 256);
    keys.default("max_position_embeddings", 32_768);
    keys.rename("mtp_num_hidden_layers", "num_nextn_predict_layers");
    drop_further_layers(keys);
    // Qwen3-Next does not say it.
    keys.default("num_nextn_predict_layers", 1);
    // With an embedding of its own, such a layer is another one than that which drafts here.
    if keys.peek("mtp_use_dedicated_embeddings") == true {
        keys.set("num_nextn_predict_layers", 0);
    }
    // Keys of layers that are not read, and of the dtype of states, which are in f32 here.
    keys.retain(|key| !key.starts_with("mtp_") && key != "mamba_ssm_dtype");
}

/// Qwen3-Next, with experts in all layers or some.
pub fn next(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layout = if keys.is_gguf() {
        DeltaLayout::GatesByHead
    } else {
        DeltaLayout::ByHead
    };
    let mut layers = layers(keys, shape, layout)?;
    if keys.peek("num_experts") == 0 {
        keys.ignore("num_experts num_experts_per_tok moe_intermediate_size");
        keys.ignore("shared_expert_intermediate_size norm_topk_prob decoder_sparse_step");
    } else {
        let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(true);
        with_experts(keys, &mut layers, is_normalized)?;
    }
    model(keys, shape, layers)
}

/// Qwen 3.5, whose layers have one MLP.
pub fn dense(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layout = apart(keys);
    let layers = layers(keys, shape, layout)?;
    model(keys, shape, layers)
}

/// Qwen 3.5 with experts in all layers.
pub fn moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layout = apart(keys);
    let mut layers = layers(keys, shape, layout)?;
    keys.only("norm_topk_prob", true)?;
    with_experts(keys, &mut layers, true)?;
    model(keys, shape, layers)
}

/// The layout of Qwen 3.5, of whose heads of values llama.cpp changes the order.
fn apart(keys: &Keys) -> DeltaLayout {
    if keys.is_gguf() {
        DeltaLayout::ApartTiled
    } else {
        DeltaLayout::Apart
    }
}

fn with_experts(
    keys: &mut Keys,
    layers: &mut [LayerSpec],
    is_normalized: bool,
) -> Result<(), String> {
    let width = keys.needed_size("shared_expert_intermediate_size")?;
    let shared = SharedExpert {
        has_gate: true,
        ..SharedExpert::new("mlp.shared_expert", width)
    };
    add_experts(keys, layers, is_normalized, Some(shared))
}

/// The layers, all with an MLP.
fn layers(
    keys: &mut Keys,
    shape: &ModelShape,
    layout: DeltaLayout,
) -> Result<Vec<LayerSpec>, String> {
    keys.only("attn_output_gate", true)?;
    let rope = partial_rope(keys, shape, 0.25)?;
    let layer = plain(keys, shape, rope)?;
    let delta = DeltaSpec {
        shape: DeltaShape {
            key_heads: keys.needed_size("linear_num_key_heads")?,
            value_heads: keys.needed_size("linear_num_value_heads")?,
            key_dim: keys.needed_size("linear_key_head_dim")?,
            value_dim: keys.needed_size("linear_value_head_dim")?,
            taps: keys.needed_size("linear_conv_kernel_dim")?,
            is_tiled: layout == DeltaLayout::ApartTiled,
        },
        layout,
    };
    delta.check()?;
    let recurrent = LayerSpec {
        mixer: MixerSpec::Delta(delta),
        rope: None,
        ..layer.clone()
    };
    let bias = keys.flag("attention_bias")?.unwrap_or(false);
    let attending = LayerSpec {
        qk_norm: Some(QkNorm::Head),
        gate: Some(AttentionGate::InQueries),
        qkv_bias: bias,
        o_bias: bias,
        ..layer
    };
    let interval = keys.size("full_attention_interval")?.unwrap_or(4);
    let accepted = "only linear_attention and full_attention are";
    let attends = by_kind(keys, shape, LAYER_TYPES, accepted, |kind| match kind {
        "full_attention" => Some(true),
        "linear_attention" => Some(false),
        _ => None,
    })?;
    let by_default = |i: usize| interval > 0 && (i + 1).is_multiple_of(interval);
    let attends = attends.unwrap_or_else(|| (0..shape.num_layers).map(by_default).collect());
    let layer = |attends| if attends { &attending } else { &recurrent }.clone();
    Ok(attends.into_iter().map(layer).collect())
}

/// The model: norms whose weights are stored less 1, except in GGUF files, and further layers that are not read.
fn model(keys: &mut Keys, shape: &ModelShape, layers: Vec<LayerSpec>) -> Result<ModelSpec, String> {
    let attends = |layer: &&LayerSpec| layer.mixer == MixerSpec::Attention;
    let attending = layers.iter().find(attends).cloned();
    let (unread, mtp) = mtp_apart(keys, shape, attending)?;
    Ok(ModelSpec {
        layers,
        norm: NormSpec {
            offset: if keys.is_gguf() { 0. } else { 1. },
            ..NormSpec::default()
        },
        unread,
        mtp,
        ..ModelSpec::default()
    })
}
