//! Ling 2.0 and Ring 2.0.

use super::experts;
use super::parts::{drop_further_layers, further_layers, plain};
use super::rope::{default_theta, partial_rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, ModelSpec, QkNorm};

/// Parts of the names of tensors: ours, and those of the class.
const NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens.", "model.word_embeddings."),
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("gate.e_score_correction_bias", "gate.expert_bias"),
];

/// Keys of earlier models and of other programs, with the values that the class assumes.
const ASSUMED: [(&str, bool); 6] = [
    ("moe_router_enable_expert_bias", true),
    ("multi_gate", false),
    ("norm_head", false),
    ("norm_softmax", false),
    ("norm_topk_prob", true),
    ("use_rmsnorm", true),
];

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    experts::defaults(keys, 256, 8);
    default_theta(keys, 6e5);
    keys.rename("num_shared_experts", "n_shared_experts");
    keys.default("first_k_dense_replace", 1);
    keys.default("head_dim", 128);
    keys.default("moe_intermediate_size", 512);
    keys.default("n_group", 8);
    keys.default("n_shared_experts", 1);
    keys.default("topk_group", 4);
    // Of training, and the dtype of a router, which is f32 here.
    keys.ignore("mtp_loss_scaling_factor router_dtype seq_aux");
    drop_further_layers(keys);
}

/// Norms of heads, a position embedding of a part of each head, and the experts of DeepSeek-V3 in all but the first layers.
/// Layers for further tokens are not read.
pub fn bailing_moe_v2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    for (key, value) in ASSUMED {
        keys.only(key, value)?;
    }
    keys.only("score_function", "sigmoid")?;
    let rope = partial_rope(keys, shape, 0.5)?;
    keys.only("rotary_dim", rope.width)?;
    let qkv_bias = keys.flag("use_qkv_bias")?.unwrap_or(false);
    let o_bias = keys.flag("use_bias")?.unwrap_or(false);
    let has_norms = keys.flag("use_qk_norm")?.unwrap_or(true);
    let layer = LayerSpec {
        fused_qkv: true,
        qkv_bias: keys.has_tensor("attn_qkv.bias").unwrap_or(qkv_bias),
        o_bias: keys.has_tensor("attn_output.bias").unwrap_or(o_bias),
        qk_norm: has_norms.then_some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    };
    if !keys.is_gguf() {
        // The class divides weights by their sum where there are several.
        let are_several = keys.peek("num_experts_per_tok") != 1;
        keys.set("norm_topk_prob", are_several);
    }
    // The second is the name of GGUF files.
    for key in [
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
    ] {
        let width = keys.peek("moe_intermediate_size");
        keys.only(key, width)?;
    }
    let experts = experts::corrected(keys, layer.mlp)?;
    let dense = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let mut layers = vec![layer; shape.num_layers];
    experts::set(&mut layers, experts, |i| i >= dense);
    Ok(ModelSpec {
        names: NAMES,
        unread: further_layers(keys, shape)?,
        ..layers.into()
    })
}
