//! GLM-4 and its successors of 2025.

use super::experts;
use super::parts::{activation_or, drop_further_layers, eps_5, plain, with_mtp_after};
use super::rope::{default_theta, partial_rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, Norms, QkNorm, RopeRows};
use foretoken_kernels::Activation;

/// Sets what the classes assume.
pub fn defaults(keys: &mut Keys) {
    keys.default("head_dim", 128);
    keys.default("rms_norm_eps", 1.5625e-7);
}

/// A GLM model has a fused gate, and a position embedding of half of each head, whose pairs are neighbours.
pub fn glm(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer(keys, shape)?;
    Ok(vec![layer; shape.num_layers].into())
}

/// As [`glm`], with norms of the outputs, too.
pub fn glm4(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = LayerSpec {
        norms: Norms {
            after_attention: Some("post_self_attn_layernorm"),
            after_mlp: Some("post_mlp_layernorm"),
            ..Norms::BEFORE
        },
        ..layer(keys, shape)?
    };
    Ok(vec![layer; shape.num_layers].into())
}

fn layer(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    let rope = partial_rope(keys, shape, 0.5)?;
    let bias = keys.flag("attention_bias")?.unwrap_or(true);
    // As the first code of GLM-4 had them.
    let fused_qkv = keys.has_tensor("attn_qkv.weight").unwrap_or(false);
    let name = if fused_qkv {
        "attn_qkv.bias"
    } else {
        "attn_q.bias"
    };
    // For positions of three numbers (GLM-4.1V), llama.cpp's conversion puts them into halves.
    let sections = keys.take("rope.dimension_sections");
    let are_halves = sections
        .as_array()
        .is_some_and(|all| all.iter().any(|of| *of != 0));
    Ok(LayerSpec {
        rope_rows: if are_halves {
            RopeRows::HalvesInGguf
        } else {
            RopeRows::Neighbours
        },
        fused_qkv,
        mlp: MlpSpec::fused(activation_or(keys, Activation::Silu)?),
        qkv_bias: keys.has_tensor(name).unwrap_or(bias),
        ..LayerSpec::llama(rope, shape.head_dim)
    })
}

/// Sets what the class assumes.
pub fn moe_defaults(keys: &mut Keys) {
    keys.rename("n_routed_experts", "num_experts");
    experts::defaults(keys, 128, 8);
    eps_5(keys);
    keys.default("max_position_embeddings", 131_072);
    keys.default("moe_intermediate_size", 1408);
    keys.default("n_shared_experts", 1);
    keys.default("first_k_dense_replace", 1);
    keys.rename("num_mtp_layers", "num_nextn_predict_layers");
    keys.default("num_nextn_predict_layers", 1);
    drop_further_layers(keys);
}

/// GLM-4.5 to 4.7: experts in all but the first layers, by the sigmoids of their logits, and one of all tokens.
pub fn glm4_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    rotated_by(keys, shape, 0.5)
}

/// Sets what the class assumes.
pub fn solar_open_defaults(keys: &mut Keys) {
    keys.default("head_dim", 128);
    keys.default("intermediate_size", 10_240);
    keys.default("first_k_dense_replace", 0);
    keys.default("moe_intermediate_size", 1280);
    keys.default("num_nextn_predict_layers", 0);
    keys.default("num_key_value_heads", 8);
    default_theta(keys, 1e6);
    moe_defaults(keys);
}

/// Solar Open: the experts of GLM-4.5 in all layers, and the attention of a Llama.
pub fn solar_open(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("first_k_dense_replace", 0)?;
    keys.only("use_qk_norm", false)?;
    rotated_by(keys, shape, 1.)
}

/// GLM-4.5, of whose heads this share is rotated, if the file does not say otherwise.
fn rotated_by(keys: &mut Keys, shape: &ModelShape, share: f64) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, share)?;
    let bias = keys.flag("attention_bias")?.unwrap_or(false);
    let has_norms = keys.flag("use_qk_norm")?.unwrap_or(false);
    let has_norms = keys.has_tensor("attn_q_norm.weight").unwrap_or(has_norms);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(bias),
        qk_norm: has_norms.then_some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    };
    let experts = experts::corrected(keys, layer.mlp)?;
    let dense = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let mut layers = vec![layer; shape.num_layers];
    experts::set(&mut layers, experts, |i| i >= dense);
    with_mtp_after(keys, shape, layers)
}
