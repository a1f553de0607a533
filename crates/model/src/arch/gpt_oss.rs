//! gpt-oss.

use super::experts::{self, with_experts};
use super::parts::{eps_5, windows, with_attention_bias, with_windows};
use super::rope::{default_rope, default_theta, rope};
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::{RopeScaling, RopeSpec};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec};
use foretoken_kernels::Activation;
use serde_json::json;

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    eps_5(keys);
    experts::defaults(keys, 128, 4);
    keys.default("head_dim", 64);
    keys.default("sliding_window", 128);
    keys.default("max_position_embeddings", 131_072);
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": false, "original_max_position_embeddings": 4096,
    });
    default_rope(keys, yarn);
    default_theta(keys, 150_000.);
}

/// Layers with sinks, of which every second one has a window, and experts with biases and a gate of their own.
pub fn gpt_oss(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let mut rope = rope(keys, shape)?;
    if let Some(RopeScaling::Yarn(yarn)) = &mut rope.scaling
        && keys.is_gguf()
    {
        // The model was trained so, and llama.cpp has no key that says it.
        yarn.truncate = false;
    }
    let is_mxfp4 = checked(keys, &rope)?;
    let layer = LayerSpec {
        sinks: true,
        mlp: MlpSpec::Gated(Activation::ClampedSwish),
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    let layer = with_attention_bias(keys, layer, true)?;
    let windows = windows(keys, shape, true, |i| i.is_multiple_of(2))?;
    let layers = with_windows(&layer, windows, shape);
    let mut layers = with_experts(keys, layers, shape.intermediate_size, true)?;
    for layer in &mut layers {
        if let MlpSpec::Experts(experts) = &mut layer.mlp {
            experts.has_bias = true;
            experts.is_mxfp4 = is_mxfp4;
        }
    }
    Ok(layers.into())
}

/// Takes keys that can only be what the rest says, and that of the published files, whose tensors tell the same: whether
/// experts are in MXFP4.
fn checked(keys: &mut Keys, rope: &RopeSpec) -> Result<bool, String> {
    for (key, only) in [("swiglu_alpha", 1.702), ("swiglu_limit", 7.)] {
        if let Some(value) = keys.number(key)?.filter(|&value| value != only) {
            return Err(keys.refused(key, &value.into(), &format!("only {only} is")));
        }
    }
    keys.only("experts_per_token", keys.peek("num_experts_per_tok"))?;
    if let Some(RopeScaling::Yarn(yarn)) = &rope.scaling {
        keys.only(
            "initial_context_length",
            yarn.original_max_position_embeddings,
        )?;
    }
    keys.only("hidden_act", "silu")?;
    let key = "quantization_config";
    let value = keys.peek(key);
    let inner = keys.nested(key)?;
    let is_mxfp4 = inner.is_some();
    if let Some(mut inner) = inner {
        if inner.text("quant_method")?.as_deref() != Some("mxfp4") {
            return Err(keys.refused(key, &value, "only a quant_method of mxfp4 is"));
        }
        inner.ignore("dequantize modules_to_not_convert");
        inner.finish(&ModelShape::default())?;
    }
    Ok(is_mxfp4)
}
