//! Llama, and what differs from it in little.

use super::experts::{self, with_experts};
use super::parts::{
    activation_or, eps_5, plain, windows, with_attention_bias, with_ropes, with_windows,
};
use super::rope::{default_rope, default_theta, rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{ExpertsSpec, LayerSpec, MlpSpec, ModelSpec, Norms, QkNorm, RopeRows};
use foretoken_kernels::Activation;
use serde_json::{Value, json};

/// Llama, and the draft heads whose layers are like its layers.
pub fn llama(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = biased(keys, shape)?;
    let has_norms = keys.has_tensor("attn_q_norm.weight").unwrap_or(false);
    let layer = LayerSpec {
        qk_norm: has_norms.then_some(QkNorm::Head),
        ..layer
    };
    let windows = windows(keys, shape, true, |_| true)?;
    let mut layers = with_windows(&layer, windows, shape);
    // So is Mixtral.
    let count = keys.peek("num_experts");
    if keys.is_gguf() && count.as_u64().is_some_and(|count| count > 0) {
        layers = with_experts(keys, layers, shape.intermediate_size, true)?;
    }
    match layers.iter().find_map(|layer| layer.window) {
        // Mistral is a Llama in GGUF files.
        Some(window) if !keys.is_gguf() => Err(keys.refused(
            "sliding_window",
            &window.into(),
            "a window that is used must be as long as max_position_embeddings",
        )),
        _ => Ok(layers.into()),
    }
}

/// Sets what NVIDIA's class of embedding models assumes.
pub fn bidirectional_defaults(keys: &mut Keys) {
    keys.set("is_causal", false);
}

/// A Llama for embeddings. The pooling that `modules.json` or `--pooling` says must be the class's.
pub fn bidirectional(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("pooling", "avg")?;
    llama(keys, shape)
}

/// Sets what the classes of Mistral and Ministral assume.
pub fn mistral_defaults(keys: &mut Keys) {
    keys.default("sliding_window", 4096);
    keys.default("num_key_value_heads", 8);
}

/// Sets what the class assumes.
pub fn ministral3_defaults(keys: &mut Keys) {
    eps_5(keys);
    keys.default("num_key_value_heads", 8);
    default_rope(
        keys,
        json!({
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }),
    );
}

/// A Llama with windows, whose queries may be scaled.
pub fn mistral(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        rope_rows: RopeRows::NeighboursInGguf,
        ..plain(keys, shape, rope)?
    };
    let windows = windows(keys, shape, true, |_| true)?;
    Ok(with_windows(&layer, windows, shape).into())
}

/// Sets what the class assumes.
pub fn mixtral_defaults(keys: &mut Keys) {
    eps_5(keys);
    keys.default("num_key_value_heads", 8);
    default_theta(keys, 1e6);
    experts::defaults(keys, 8, 2);
}

/// A Mistral with experts.
pub fn mixtral(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layers = mistral(keys, shape)?.layers;
    Ok(with_experts(keys, layers, shape.intermediate_size, true)?.into())
}

/// Sets what the class assumes.
pub fn smollm3_defaults(keys: &mut Keys) {
    keys.default("tie_word_embeddings", true);
    default_theta(keys, 2e6);
}

/// A Llama of which some layers do not rotate.
pub fn smollm3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = biased(keys, shape)?;
    let interval = keys.size("no_rope_layer_interval")?.unwrap_or(4).max(1);
    let listed = keys.numbers("no_rope_layers")?;
    if let Some(listed) = listed.as_ref().filter(|l| l.len() < shape.num_layers) {
        return Err(format!(
            "no_rope_layers has {} entries for {} layers",
            listed.len(),
            shape.num_layers
        ));
    }
    let has_rope = |i: usize| match &listed {
        Some(listed) => listed[i] != 0.,
        None => !(i + 1).is_multiple_of(interval),
    };
    let windows = windows(keys, shape, false, |i| !has_rope(i))?;
    let rope = |i, _| layer.rope.as_ref().filter(|_| has_rope(i));
    Ok(with_ropes(&layer, windows, shape, rope).into())
}

/// A Llama with factors.
pub fn granite(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = biased(keys, shape)?;
    let attention = keys.float("attention_multiplier")?;
    let residual = keys.float("residual_multiplier")?;
    let logits = keys.float("logits_scaling")?;
    // llama.cpp's name, of which 0 means "none".
    let logits = logits.or(keys.float("logit_scale")?);
    let logits = logits.filter(|&by| by != 0.);
    // transformers multiplies by 1 if nothing is specified.
    let by_default = if keys.is_gguf() {
        layer.attention_scale
    } else {
        1.
    };
    let layer = LayerSpec {
        attention_scale: attention.unwrap_or(by_default),
        residual_scale: residual.unwrap_or(1.),
        ..layer
    };
    Ok(ModelSpec {
        layers: vec![layer; shape.num_layers],
        embedding_scale: keys.float("embedding_multiplier")?,
        logit_scale: logits.map(|by| 1. / by),
        ..ModelSpec::default()
    })
}

/// Arcee (AFM): a Llama whose MLP has no gate.
pub fn arcee(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let activation = activation_or(keys, Activation::Relu2)?;
    let layer = biased(keys, shape)?;
    let layer = LayerSpec {
        mlp: MlpSpec::Plain {
            activation,
            up: "mlp.up_proj",
            down: "mlp.down_proj",
        },
        mlp_bias: keys.has_tensor("ffn_up.bias").unwrap_or(layer.mlp_bias),
        ..layer
    };
    Ok(vec![layer; shape.num_layers].into())
}

/// Sets what the class assumes.
pub fn minicpm_defaults(keys: &mut Keys) {
    keys.default("tie_word_embeddings", true);
}

/// MiniCPM: a Granite whose factors follow from other numbers.
pub fn minicpm(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let (width, root) = (shape.hidden_size as f64, (shape.num_layers as f64).sqrt());
    if keys.is_gguf() {
        // What older files do not say.
        keys.default_of_both("embedding_multiplier", 12.);
        keys.default_of_both("residual_multiplier", 1.4 / root);
        keys.default_of_both("logit_scale", width / 256.);
        return granite(keys, shape);
    }
    let embedding = keys.number("scale_emb")?.unwrap_or(1.);
    let depth = keys.number("scale_depth")?.unwrap_or(1.);
    let base = keys.number("dim_model_base")?.unwrap_or(1.);
    if base == 0. {
        return Err(keys.refused("dim_model_base", &base.into(), "it must not be 0"));
    }
    keys.set("embedding_multiplier", embedding);
    keys.set("residual_multiplier", depth / root);
    keys.set("logits_scaling", width / base);
    keys.set(
        "attention_multiplier",
        (shape.head_dim as f64).sqrt().recip(),
    );
    // A number of training.
    keys.ignore("mup_denominator");
    granite(keys, shape)
}

/// Sets what the class assumes.
pub fn granite_moe_defaults(keys: &mut Keys) {
    experts::defaults(keys, 8, 2);
}

/// A Granite with experts.
pub fn granite_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let model = granite(keys, shape)?;
    Ok(ModelSpec {
        layers: with_experts(keys, model.layers, shape.intermediate_size, true)?,
        ..model
    })
}

/// Sets what a GGUF file of a Granite 4 has otherwise, of which llama.cpp's conversion makes a Granite.
pub fn granite_defaults(keys: &mut Keys) {
    if keys.is_gguf() {
        // Keys of the experts and the state spaces, which would have tensors.
        keys.ignore("shared_expert_intermediate_size");
        keys.retain(|key| !key.starts_with("ssm."));
    }
}

/// Sets what the class assumes.
pub fn hunyuan_defaults(keys: &mut Keys) {
    keys.rename("attention_head_dim", "head_dim");
    keys.default("rms_norm_eps", 1e-5);
    // Keys of the classes with images and experts, and of the first code of this class.
    keys.ignore("attention_head_dim cla_share_factor dense_list");
    keys.ignore("eod_token_id im_end_id im_newline_id im_start_id");
    keys.ignore("mask_init_id org_vocab_size pad_id pool_type");
    keys.ignore("num_media_embeds text_end_id text_start_id video_end_id video_start_id");
    keys.retain(|key| !key.starts_with("vit_") && !key.starts_with("anyres_"));
}

/// Hunyuan: a Llama with norms of heads after the rotation.
pub fn hunyuan(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    // One expert is none.
    for key in ["num_experts", "num_shared_expert", "moe_topk"] {
        keys.only(key, 1)?;
    }
    let layer = layer_of_hunyuan(keys, shape)?;
    Ok(vec![layer; shape.num_layers].into())
}

fn layer_of_hunyuan(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    keys.only("norm_type", "rms")?;
    keys.only("use_qk_norm", true)?;
    keys.only("use_rotary_pos_emb", true)?;
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::RotatedHead),
        ..plain(keys, shape, rope)?
    };
    with_attention_bias(keys, layer, false)
}

/// Parts of the names of tensors: ours, and those of Hunyuan with experts.
const HUNYUAN_MOE_NAMES: &[(&str, &str)] = &[
    ("mlp.gate.weight", "mlp.gate.wg.weight"),
    ("mlp.shared_experts.", "mlp.shared_mlp."),
];

/// Hunyuan with experts in all layers, by the softmax of their logits, and one of all tokens.
pub fn hunyuan_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    // Each may be one number, or one of each layer.
    for (theirs, ours) in [
        ("moe_intermediate_size", "moe_intermediate_size"),
        ("moe_topk", "num_experts_per_tok"),
        ("num_experts", "num_experts"),
        ("num_shared_expert", "n_shared_experts"),
    ] {
        let mut given = keys.peek(theirs);
        if let Value::Array(of_layers) = &given {
            let first = of_layers.first().cloned().unwrap_or_default();
            if of_layers.iter().any(|other| *other != first) {
                return Err(keys.refused(theirs, &given, "only one number for all layers is"));
            }
            given = first;
        }
        if !given.is_null() {
            keys.ignore(theirs);
            keys.set(ours, given);
        }
    }
    keys.only("norm_topk_prob", true)?;
    let factor = keys.peek("routed_scaling_factor");
    if (keys.number("routed_scaling_factor")?).is_some_and(|factor| factor != 1.) {
        return Err(keys.refused("routed_scaling_factor", &factor, "only 1 is"));
    }
    // Whether there is an expert of all tokens, which the class always has.
    keys.only("use_mixed_mlp_moe", true)?;
    keys.only("shared_expert_intermediate_size", shape.intermediate_size)?;
    let layer = layer_of_hunyuan(keys, shape)?;
    let width = keys.size("moe_intermediate_size")?;
    let width = width.unwrap_or(shape.intermediate_size);
    let count = keys.size("n_shared_experts")?.unwrap_or(1);
    let experts = ExpertsSpec {
        shared: experts::shared(count, shape.intermediate_size)?,
        ..experts::experts(keys, layer.mlp, width, true)?
    };
    let mut layers = vec![layer; shape.num_layers];
    experts::set(&mut layers, experts, |_| true);
    Ok(ModelSpec {
        names: HUNYUAN_MOE_NAMES,
        ..layers.into()
    })
}

/// A Llama whose biases of attention have their own flags.
pub fn seed_oss(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let qkv_bias = keys.flag("attention_bias")?.unwrap_or(true);
    let o_bias = keys.flag("attention_out_bias")?.unwrap_or(false);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(qkv_bias),
        o_bias: keys.has_tensor("attn_output.bias").unwrap_or(o_bias),
        mlp_bias: keys.flag("mlp_bias")?.unwrap_or(false),
        ..plain(keys, shape, rope)?
    };
    Ok(vec![layer; shape.num_layers].into())
}

/// Parts of the names of tensors: ours, and those of EXAONE 3.
const EXAONE3_NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens", "transformer.wte"),
    ("model.layers.", "transformer.h."),
    ("model.norm", "transformer.ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.o_proj", "attn.attention.out_proj"),
    ("self_attn.", "attn.attention."),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
];

/// Gives the keys of EXAONE 3 the names of Llama's, and sets what the class assumes.
pub fn exaone3_defaults(keys: &mut Keys) {
    keys.rename("activation_function", "hidden_act");
    keys.rename("layer_norm_epsilon", "rms_norm_eps");
    keys.rename("num_layers", "num_hidden_layers");
    eps_5(keys);
}

/// EXAONE 3, 3.5 and Deep: a Llama under other names.
pub fn exaone3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = plain(keys, shape, rope)?;
    Ok(ModelSpec {
        names: EXAONE3_NAMES,
        ..vec![layer; shape.num_layers].into()
    })
}

/// What EXAONE 4 assumes: its large model, which has windows.
pub fn exaone4_defaults(keys: &mut Keys) {
    keys.default("sliding_window", 4096);
    eps_5(keys);
}

/// EXAONE 4: norms of outputs and of heads. Where a window is named, layers without it do not rotate, also if no layer
/// has it.
pub fn exaone4(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        norms: Norms::AFTER,
        qk_norm: Some(QkNorm::Head),
        ..plain(keys, shape, rope)?
    };
    // A number, or letters of which the last is that of the others.
    let key = "sliding_window_pattern";
    let pattern = match keys.take(key) {
        Value::Null => 4,
        Value::String(letters) => letters.len(),
        number => match number.as_u64().map(usize::try_from) {
            Some(Ok(number)) => number,
            _ => return Err(keys.refused(key, &number, "only a whole number or letters are")),
        },
    };
    // In llama.cpp, 0 means "none".
    let is_hybrid = match keys.peek("sliding_window") {
        Value::Null => false,
        window => !keys.is_gguf() || window != 0,
    };
    let windows = windows(keys, shape, true, |i| {
        !(i + 1).is_multiple_of(pattern.max(1))
    })?;
    let rope = |_, slides| layer.rope.as_ref().filter(|_| slides || !is_hybrid);
    Ok(with_ropes(&layer, windows, shape, rope).into())
}

/// The layer of a Llama that may have biases.
pub fn biased(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = plain(keys, shape, rope)?;
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    let layer = LayerSpec {
        rope_rows: RopeRows::NeighboursInGguf,
        mlp_bias: keys.has_tensor("ffn_gate.bias").unwrap_or(mlp_bias),
        ..layer
    };
    with_attention_bias(keys, layer, false)
}
