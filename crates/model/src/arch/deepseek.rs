//! DeepSeek-V2 and V3, and others with their multi-head latent attention.

use super::experts::{self, experts_by};
use super::parts::{
    by_kind, drop_further_layers, eps_5, plain, with_attention_bias, with_mtp_after,
};
use super::rope::rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::latent::LatentSpec;
use crate::spec::{
    ExpertGroups, ExpertsSpec, LayerSpec, MixerSpec, ModelSpec, RopeRows, RouterScores,
};
use foretoken_core::kv::KvHeads;
use serde_json::Value;

/// Keys of published files about training.
const OF_TRAINING: &str = "aux_loss_alpha ep_size seq_aux";

/// Widths of attention in GGUF metadata, and their names elsewhere.
const GGUF_WIDTHS: [(&str, &str); 4] = [
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("attention.key_length_mla", "qk_head_dim"),
    ("attention.value_length_mla", "v_head_dim"),
];

/// Sets what the class assumes, besides the number of experts of a token, for which it has no default.
pub fn v2_defaults(keys: &mut Keys) {
    keys.rename("n_routed_experts", "num_experts");
    experts::defaults(keys, 64, 0);
    keys.default("moe_intermediate_size", 1407);
    keys.default("n_shared_experts", 2);
    keys.default("q_lora_rank", 1536);
    keys.default("v_head_dim", 128);
    keys.default("qk_nope_head_dim", 128);
    latent_defaults(keys);
}

/// Sets what the class assumes.
pub fn v3_defaults(keys: &mut Keys) {
    keys.rename("n_routed_experts", "num_experts");
    experts::defaults(keys, 256, 8);
    keys.default("max_position_embeddings", 4096);
    keys.default("moe_intermediate_size", 2048);
    keys.default("n_shared_experts", 1);
    keys.default("first_k_dense_replace", 3);
    keys.default("n_group", 8);
    keys.default("topk_group", 4);
    keys.default("routed_scaling_factor", 2.5);
    keys.default("q_lora_rank", 1536);
    keys.default("v_head_dim", 128);
    keys.default("qk_nope_head_dim", 128);
    with_further_layers(keys);
    latent_defaults(keys);
}

/// Sets what the class of GLM-4.7-Flash assumes.
pub fn glm4_lite_defaults(keys: &mut Keys) {
    keys.rename("n_routed_experts", "num_experts");
    experts::defaults(keys, 64, 4);
    eps_5(keys);
    keys.default("max_position_embeddings", 202_752);
    keys.default("moe_intermediate_size", 1536);
    keys.default("n_shared_experts", 1);
    keys.default("first_k_dense_replace", 1);
    keys.default("routed_scaling_factor", 1.8);
    keys.default("q_lora_rank", 768);
    keys.default("v_head_dim", 256);
    keys.default("qk_nope_head_dim", 192);
    with_further_layers(keys);
    latent_defaults(keys);
}

fn with_further_layers(keys: &mut Keys) {
    keys.rename("num_mtp_layers", "num_nextn_predict_layers");
    keys.default("num_nextn_predict_layers", 1);
}

fn latent_defaults(keys: &mut Keys) {
    keys.ignore(OF_TRAINING);
    keys.default("kv_lora_rank", 512);
    keys.default("qk_rope_head_dim", 64);
    // That which is rotated.
    let rotated = keys.peek("qk_rope_head_dim");
    keys.default("head_dim", rotated);
    if keys.is_gguf() {
        drop_further_layers(keys);
        gguf_widths(keys);
    }
}

/// Gives the widths of a GGUF file, where attention is over one head of latent vectors, the names that they have
/// elsewhere.
fn gguf_widths(keys: &mut Keys) {
    let kept = keys.take("head_dim");
    keys.set("attention.key_length", kept);
    for (theirs, ours) in GGUF_WIDTHS {
        keys.rename(theirs, ours);
    }
    let rotated = keys.take("rope.dimension_count");
    let key = keys.peek("qk_head_dim").as_u64();
    let nope = key
        .zip(rotated.as_u64())
        .map(|(all, own)| all.saturating_sub(own));
    keys.set("qk_nope_head_dim", nope);
    keys.set("head_dim", rotated.clone());
    keys.set("qk_rope_head_dim", rotated);
    // A tenth of the number of `mscale_all_dim`, beside an equal `mscale`: angles have no factor.
    let log = "rope.scaling.yarn_log_multiplier";
    if let Some(tenth) = keys.peek(log).as_f64().filter(|&tenth| tenth != 0.) {
        keys.set(log, 10. * tenth);
        keys.set("rope.scaling.yarn_attn_factor", 1.);
    }
}

/// DeepSeek-V2: experts by the softmax of all logits, in groups that are chosen by their best. In GGUF files so is what
/// V3 is.
pub fn v2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    if keys.is_gguf() && has_sigmoids(keys) {
        return v3(keys, shape);
    }
    let layer = LayerSpec {
        mlp_bias: keys.flag("mlp_bias")?.unwrap_or(false),
        ..layer(keys, shape)?
    };
    keys.only("scoring_func", "softmax")?;
    if !keys.is_gguf() {
        // The class reads it not.
        keys.only("norm_topk_prob", false)?;
    }
    let width = keys.needed_size("moe_intermediate_size")?;
    let experts = experts_by(keys, layer.mlp, width, (RouterScores::Softmax, false))?;
    let groups = ExpertGroups {
        count: keys.size("n_group")?.unwrap_or(1),
        per_token: keys.size("topk_group")?.unwrap_or(1),
        best: 1,
    };
    let method = keys.text("topk_method")?;
    let is_grouped = match method.as_deref() {
        Some("group_limited_greedy") => true,
        Some("greedy") => false,
        None => keys.is_gguf() && groups.count > 1,
        Some(other) => {
            let accepted = "only greedy and group_limited_greedy are";
            return Err(keys.refused("topk_method", &other.into(), accepted));
        }
    };
    let scale = keys.number("routed_scaling_factor")?;
    let shared = keys.size("n_shared_experts")?.unwrap_or(0);
    let experts = ExpertsSpec {
        groups: is_grouped.then_some(groups),
        scale: scale.unwrap_or(1.) as f32,
        shared: experts::shared(shared, width)?,
        ..experts
    };
    spec(keys, shape, layer, experts)
}

/// DeepSeek-V3 and GLM-4.7-Flash: experts by the sigmoids of their logits.
pub fn v3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer(keys, shape)?;
    keys.only("scoring_func", "sigmoid")?;
    let experts = experts::corrected(keys, layer.mlp)?;
    spec(keys, shape, layer, experts)
}

/// Sets what the class assumes.
pub fn youtu_defaults(keys: &mut Keys) {
    keys.default("max_position_embeddings", 131_072);
    keys.default("tie_word_embeddings", true);
    keys.default("q_lora_rank", 1536);
    keys.default("v_head_dim", 128);
    keys.default("qk_nope_head_dim", 128);
    keys.ignore("embedding_initializer_range");
    latent_defaults(keys);
}

/// Youtu-LLM: the attention of DeepSeek-V3, without experts.
pub fn youtu(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer(keys, shape)?;
    Ok(vec![layer; shape.num_layers].into())
}

/// Whether a GGUF file has experts by sigmoids: it says so, or has what is added to them.
fn has_sigmoids(keys: &Keys) -> bool {
    let dense = keys.peek("first_k_dense_replace").as_u64().unwrap_or(0);
    let has_bias = keys.has_tensor_in(dense as usize, "exp_probs_b.bias");
    match keys.peek("expert_gating_func").as_u64() {
        Some(kind) if kind > 0 => kind == 2,
        _ => has_bias == Some(true),
    }
}

/// Layers with these experts but for the first ones.
fn spec(
    keys: &mut Keys,
    shape: &ModelShape,
    layer: LayerSpec,
    experts: ExpertsSpec,
) -> Result<ModelSpec, String> {
    keys.only("moe_layer_freq", 1)?;
    let first = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let (key, accepted) = ("mlp_layer_types", "only dense and sparse are");
    let are_sparse = by_kind(keys, shape, key, accepted, |kind| match kind {
        "sparse" => Some(true),
        "dense" => Some(false),
        _ => None,
    })?;
    let mut layers = vec![layer; shape.num_layers];
    experts::set(&mut layers, experts, |i| {
        are_sparse.as_ref().map_or(i >= first, |are| are[i])
    });
    with_mtp_after(keys, shape, layers)
}

/// A layer without experts.
fn layer(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    let latent = latent(keys, shape)?;
    let rope = rope(keys, shape)?;
    if rope.query_scaling.is_some() {
        return Err("llama_4_scaling_beta is not supported for this architecture".into());
    }
    // In GGUF files all are.
    let is_interleaved = keys.flag("rope_interleave")?.unwrap_or(true);
    let layer = LayerSpec {
        mixer: MixerSpec::Latent(latent),
        kv_heads: Some(KvHeads {
            has_values: false,
            ..KvHeads::new(1, latent.kept())
        }),
        rope_rows: if is_interleaved {
            RopeRows::Neighbours
        } else {
            RopeRows::Halves
        },
        attention_scale: rope.score_factor() / (latent.key() as f32).sqrt(),
        ..plain(keys, shape, rope)?
    };
    with_attention_bias(keys, layer, false)
}

/// The widths of attention.
fn latent(keys: &mut Keys, shape: &ModelShape) -> Result<LatentSpec, String> {
    if keys.is_gguf() && keys.peek("qk_head_dim") == Value::Null {
        return Err(keys.missing("attention.key_length_mla")
            + ": files from before latent attention in llama.cpp must be converted again");
    }
    let spec = LatentSpec {
        q_rank: keys.size("q_lora_rank")?,
        rank: keys.needed_size("kv_lora_rank")?,
        nope: keys.needed_size("qk_nope_head_dim")?,
        rope: keys.needed_size("qk_rope_head_dim")?,
        value: keys.needed_size("v_head_dim")?,
    };
    spec.check()?;
    keys.only("qk_head_dim", spec.key())?;
    if shape.head_dim != spec.rope {
        let accepted = format!("it must be qk_rope_head_dim {}", spec.rope);
        return Err(keys.refused("head_dim", &shape.head_dim.into(), &accepted));
    }
    let heads = if keys.is_gguf() { 1 } else { shape.num_heads };
    if shape.num_kv_heads != heads {
        let accepted = format!("only {heads} is");
        let given = shape.num_kv_heads.into();
        return Err(keys.refused("num_key_value_heads", &given, &accepted));
    }
    keys.only("attention.key_length", spec.kept())?;
    keys.only("attention.value_length", spec.rank)?;
    Ok(spec)
}
