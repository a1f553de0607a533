//! LFM2: short convolutions in most layers, attention in the others.

use super::experts::{self, experts_by};
use super::parts::{LAYER_TYPES, attending, by_kind, plain, set_kinds};
use super::rope::{default_theta, rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::conv::ShortConvSpec;
use crate::spec::{ExpertsSpec, LayerSpec, MixerSpec, ModelSpec, QkNorm, RouterScores};
use foretoken_core::kv::KvHeads;
use serde_json::Value;

/// Parts of the names of tensors: ours, and those of the classes.
const NAMES: &[(&str, &str)] = &[
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    // Not those of all experts in one.
    (".down_proj.weight", ".w2.weight"),
    ("mlp.", "feed_forward."),
];

/// Keys of published files that say the same as others, or are about training.
const REDUNDANT: &str = "
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init
    conv_dim conv_dim_out conv_use_xavier_init num_heads";

/// Gives the key `ours` the value of `older`, if there is one: the class reads that first.
fn replace(keys: &mut Keys, older: &str, ours: &str) {
    match keys.take(older) {
        Value::Null => {}
        value => keys.set(ours, value),
    }
}

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    replace(keys, "block_ff_dim", "intermediate_size");
    keys.default("intermediate_size", 12_288);
    let width = keys.peek("intermediate_size").as_u64();
    // What cannot be read is left, and refused.
    if let Some(adjusted) = width.and_then(|width| adjusted_width(keys, width)) {
        keys.set("intermediate_size", adjusted);
        keys.ignore("block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of");
    }
    common_defaults(keys);
}

/// The width of the MLP as the class computes it from `intermediate_size`; `None` = a key cannot be read.
fn adjusted_width(keys: &Keys, width: u64) -> Option<u64> {
    match keys.peek("block_auto_adjust_ff_dim") {
        _ if keys.is_gguf() => return Some(width),
        Value::Null | Value::Bool(true) => {}
        Value::Bool(false) => return Some(width),
        _ => return None,
    }
    let two_thirds = (2. * width as f64 / 3.) as u64;
    let factor = match keys.peek("block_ffn_dim_multiplier") {
        Value::Null if keys.has("block_ffn_dim_multiplier") => return Some(two_thirds),
        Value::Null => 1.,
        value => value
            .as_f64()
            .filter(|factor| (0. ..1e3).contains(factor))?,
    };
    let multiple = match keys.peek("block_multiple_of") {
        Value::Null => 256,
        value => value.as_u64().filter(|&multiple| multiple > 0)?,
    };
    ((factor * two_thirds as f64) as u64).checked_next_multiple_of(multiple)
}

/// Sets what the class with experts assumes.
pub fn moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 32, 4);
    keys.rename("num_dense_layers", "first_k_dense_replace");
    keys.default("first_k_dense_replace", 2);
    keys.default("intermediate_size", 7168);
    keys.default("moe_intermediate_size", 1792);
    common_defaults(keys);
}

fn common_defaults(keys: &mut Keys) {
    keys.rename("norm_eps", "rms_norm_eps");
    keys.default("rms_norm_eps", 1e-5);
    replace(keys, "tie_embedding", "tie_word_embeddings");
    replace(keys, "theta", "rope_theta");
    keys.default("tie_word_embeddings", true);
    keys.default("num_key_value_heads", 8);
    keys.default("max_position_embeddings", 128_000);
    keys.rename("shortconv.l_cache", "conv_L_cache");
    keys.default("conv_L_cache", 3);
    default_theta(keys, 1e6);
    keys.ignore(REDUNDANT);
    if let Some(attends) = attending(keys) {
        set_kinds(keys, attends, "conv");
    }
}

/// Layers with an MLP.
pub fn lfm2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("block_use_swiglu", true)?;
    let layer = attention(keys, shape)?;
    spec(keys, shape, layer)
}

/// An LFM2 model with experts has them in all but the first layers, by the sigmoids of their logits.
pub fn lfm2_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = attention(keys, shape)?;
    let is_normalized = keys.flag("norm_topk_prob")?.unwrap_or(true);
    let width = keys.needed_size("moe_intermediate_size")?;
    let kind = (RouterScores::Sigmoid, is_normalized);
    let experts = experts_by(keys, layer.mlp, width, kind)?;
    let has_bias = keys.flag("use_expert_bias")?.unwrap_or(true);
    let scale = keys.number("routed_scaling_factor")?;
    let dense = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let experts = ExpertsSpec {
        correction: has_bias.then_some("mlp.gate.e_score_correction_bias"),
        min_sum: 1e-6,
        scale: scale.unwrap_or(1.) as f32,
        ..experts
    };
    let mut spec = spec(keys, shape, layer)?;
    experts::set(&mut spec.layers, experts, |i| i >= dense);
    Ok(spec)
}

/// A layer with attention.
fn attention(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    keys.only("use_pos_enc", true)?;
    let rope = rope(keys, shape)?;
    Ok(LayerSpec {
        qk_norm: Some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    })
}

/// The layers like `layer`, of which some have convolutions.
fn spec(keys: &mut Keys, shape: &ModelShape, layer: LayerSpec) -> Result<ModelSpec, String> {
    let conv = ShortConvSpec {
        taps: keys.needed_size("conv_L_cache")?,
        has_bias: keys.flag("conv_bias")?.unwrap_or(false),
    };
    conv.check(shape.hidden_size)?;
    let with_conv = LayerSpec {
        mixer: MixerSpec::ShortConv(conv),
        kv_heads: Some(KvHeads::new(1, shape.hidden_size / 2)),
        rope: None,
        qk_norm: None,
        ..layer.clone()
    };
    let accepted = "only conv and full_attention are";
    let have_convs = by_kind(keys, shape, LAYER_TYPES, accepted, |kind| match kind {
        "conv" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    })?;
    let attending = keys.sizes("full_attn_idxs")?;
    let by_default = |i: usize| attending.as_ref().is_some_and(|all| !all.contains(&i));
    let have_convs = have_convs.unwrap_or_else(|| (0..shape.num_layers).map(by_default).collect());
    let of_layer = |has_conv| if has_conv { &with_conv } else { &layer }.clone();
    Ok(ModelSpec {
        layers: have_convs.into_iter().map(of_layer).collect(),
        names: NAMES,
        ..ModelSpec::default()
    })
}
