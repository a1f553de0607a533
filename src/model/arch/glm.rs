//! GLM-4 and its successor of 2025, without experts.

use super::super::keys::{Keys, ModelShape};
use super::super::layer_spec::{LayerSpec, MlpSpec, ModelSpec, Norms};
use super::parts::activation_or;
use super::rope::partial_rope;
use crate::kernels::Activation;

/// Sets what the classes assume.
pub fn defaults(keys: &mut Keys) {
    keys.default("head_dim", 128);
    keys.default("rms_norm_eps", 1.5625e-7);
}

/// With a fused gate, and a position embedding of half of each head, whose pairs are neighbours.
pub fn glm(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer(keys, shape)?;
    Ok(vec![layer; shape.num_layers].into())
}

/// With norms of the outputs, too.
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
    Ok(LayerSpec {
        interleaved: true,
        fused_qkv,
        mlp: MlpSpec::fused(activation_or(keys, Activation::Silu)?),
        qkv_bias: keys.has_tensor(name).unwrap_or(bias),
        ..LayerSpec::llama(rope, shape.head_dim)
    })
}
