//! Architectures with LayerNorm: Cohere's, StableLM 2, StarCoder 2 and Nemotron.

use super::parts::{activation_or, plain, windows, with_attention_bias, with_ropes, with_windows};
use super::rope::{default_theta, partial_rope, rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, NormSpec, Norms, RopeRows};
use foretoken_kernels::Activation;

/// Sets what the class assumes.
pub fn cohere_defaults(keys: &mut Keys) {
    default_theta(keys, 5e5);
    cohere2_defaults(keys);
}

/// Sets what both of Cohere's classes assume.
pub fn cohere2_defaults(keys: &mut Keys) {
    keys.rename("layer_norm_eps", "rms_norm_eps");
    keys.default("rms_norm_eps", 1e-5);
    keys.default("tie_word_embeddings", true);
    keys.default("logit_scale", 0.0625);
    keys.default("sliding_window", 4096);
}

/// A Cohere model has attention and MLP side by side, after one norm, and scaled logits.
pub fn cohere(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    // A key of Cohere 2.
    keys.ignore("sliding_window");
    let layer = cohere_layer(keys, shape)?;
    cohere_model(keys, vec![layer; shape.num_layers])
}

/// A Cohere 2 model has windows on three of four layers; the others do not rotate.
pub fn cohere2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = cohere_layer(keys, shape)?;
    let pattern = keys.size("sliding_window_pattern")?.unwrap_or(4).max(1);
    keys.only("layer_switch", pattern)?;
    let windows = windows(keys, shape, true, |i| !(i + 1).is_multiple_of(pattern))?;
    let rope = |_, slides| layer.rope.as_ref().filter(|_| slides);
    cohere_model(keys, with_ropes(&layer, windows, shape, rope))
}

fn cohere_layer(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    // transformers does not read them.
    keys.only("position_embedding_type", "rope_gptj")?;
    keys.only("order_of_interleaved_layers", "local_attn_first")?;
    for key in [
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
    ] {
        keys.only(key, true)?;
    }
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        rope_rows: RopeRows::Neighbours,
        parallel: true,
        norms: Norms::FIRST,
        ..plain(keys, shape, rope)?
    };
    with_attention_bias(keys, layer, false)
}

fn cohere_model(keys: &mut Keys, layers: Vec<LayerSpec>) -> Result<ModelSpec, String> {
    Ok(ModelSpec {
        layers,
        norm: NormSpec::LAYER,
        logit_scale: keys.float("logit_scale")?,
        ..ModelSpec::default()
    })
}

/// Sets what the class assumes.
pub fn stablelm_defaults(keys: &mut Keys) {
    keys.rename("layer_norm_eps", "rms_norm_eps");
    keys.default("rms_norm_eps", 1e-5);
}

/// A StableLM model has norms with biases, and a position embedding of a quarter of each head.
pub fn stablelm(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, 0.25)?;
    let parallel = keys.flag("use_parallel_residual")?.unwrap_or(false);
    let bias = keys.flag("use_qkv_bias")?.unwrap_or(false);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(bias),
        parallel,
        norms: if parallel {
            Norms::FIRST
        } else {
            Norms::BEFORE
        },
        ..plain(keys, shape, rope)?
    };
    Ok(ModelSpec {
        norm: NormSpec::LAYER_WITH_BIAS,
        ..vec![layer; shape.num_layers].into()
    })
}

/// Sets what the class assumes.
pub fn starcoder2_defaults(keys: &mut Keys) {
    keys.rename("norm_epsilon", "rms_norm_eps");
    // Keys of GGUF files.
    keys.rename("layer_norm_eps", "rms_norm_eps");
    keys.default("rms_norm_eps", 1e-5);
    keys.default("tie_word_embeddings", true);
}

/// A StarCoder2 model has biases everywhere, windows, and an MLP without a gate.
pub fn starcoder2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let bias = keys.flag("use_bias")?.unwrap_or(true);
    keys.only("mlp_type", "default")?;
    keys.only("norm_type", "layer_norm")?;
    // transformers reads `hidden_act`.
    keys.ignore("activation_function");
    let layer = LayerSpec {
        mlp: MlpSpec::Plain {
            activation: activation_or(keys, Activation::GeluTanh)?,
            up: "mlp.c_fc",
            down: "mlp.c_proj",
        },
        qkv_bias: bias,
        o_bias: bias,
        mlp_bias: bias,
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    let windows = windows(keys, shape, true, |_| true)?;
    Ok(ModelSpec {
        norm: NormSpec::LAYER_WITH_BIAS,
        ..with_windows(&layer, windows, shape).into()
    })
}

/// Sets what the class assumes.
pub fn nemotron_defaults(keys: &mut Keys) {
    keys.rename("norm_eps", "rms_norm_eps");
    // Keys of GGUF files.
    keys.rename("layer_norm_eps", "rms_norm_eps");
    keys.default("rms_norm_eps", 1e-5);
}

/// A Nemotron model has norms stored less 1, an MLP without a gate, and a position embedding of half of each head.
pub fn nemotron(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, 0.5)?;
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    let layer = LayerSpec {
        mlp: MlpSpec::Plain {
            activation: activation_or(keys, Activation::Relu2)?,
            up: "mlp.up_proj",
            down: "mlp.down_proj",
        },
        mlp_bias: keys.has_tensor("ffn_up.bias").unwrap_or(mlp_bias),
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    let layer = with_attention_bias(keys, layer, false)?;
    Ok(ModelSpec {
        norm: NormSpec {
            offset: if keys.is_gguf() { 0. } else { 1. },
            ..NormSpec::LAYER_WITH_BIAS
        },
        ..vec![layer; shape.num_layers].into()
    })
}
