//! Refuses, by name, properties of a checkpoint that the decoder does not implement: ignoring them would
//! give wrong outputs.

use candle_core::quantized::gguf_file::Value as GgufValue;
use serde_json::Value;

/// Keys of `config.json` that must be absent, null, false, 0 or empty.
const ABSENT: [&str; 33] = [
    "add_cross_attention",
    "attention_bias",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "clip_qkv",
    "compression_config",
    "final_logit_softcapping",
    "is_encoder_decoder",
    "kv_lora_rank",
    "mlp_bias",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_local_experts",
    "num_nextn_predict_layers",
    "parallel_residual",
    "q_lora_rank",
    "qk_layernorm",
    "quantization",
    "quantization_config",
    "rope_interleave",
    "rope_interleaved",
    "rope_local_base_freq",
    "rope_local_theta",
    "scale_depth",
    "scale_emb",
    "use_bidirectional_attention",
    "use_mrope",
    "use_parallel_residual",
    "use_qk_norm",
    "use_sliding_window_layers",
];

/// Keys of `config.json` that must be absent or have this value.
const NEUTRAL: [(&str, f64); 9] = [
    ("embedding_multiplier", 1.),
    ("embedding_scale", 1.),
    ("logit_scale", 1.),
    ("logits_scaling", 1.),
    ("lm_head_multiplier", 1.),
    ("partial_rotary_factor", 1.),
    ("residual_multiplier", 1.),
    ("residual_scale", 1.),
    ("rotary_pct", 1.),
];

/// The parts of a model's shape that decide whether a property has no effect.
pub struct Shape {
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    /// Whether `sliding_window` applies if `use_sliding_window` is not given.
    pub slides_by_default: bool,
}

/// Refuses a `config.json` that asks for something the decoder does not implement.
///
/// # Errors
/// A message that names the key, its value and what would be accepted.
pub fn check_json(config: &Value, shape: &Shape) -> Result<(), String> {
    for key in ABSENT {
        if !says_no(&config[key]) {
            return Err(refused(key, &config[key], "it must be absent"));
        }
    }
    // transformers 5 stores some of them beside the RoPE base.
    for within in [config, &config["rope_parameters"], &config["rope_scaling"]] {
        for (key, neutral) in NEUTRAL {
            only(within, key, neutral)?;
        }
        if let Some((key, value)) = within.as_object().and_then(nested_rope) {
            return Err(refused(key, value, "all layers must have the same RoPE"));
        }
    }
    only(
        config,
        "attention_multiplier",
        1. / (shape.head_dim as f64).sqrt(),
    )?;
    for key in ["query_pre_attn_scalar", "rotary_dim", "v_head_dim"] {
        only(config, key, shape.head_dim as f64)?;
    }
    for key in ["hidden_act", "hidden_activation", "activation_function"] {
        let act = &config[key];
        if !act.is_null() && act != "silu" && act != "swish" {
            return Err(refused(key, act, "only silu is supported"));
        }
    }
    all_are(config, "layer_types", |kind| kind == "full_attention")?;
    all_are(config, "no_rope_layers", |has_rope| has_rope == 1)?;
    let window = &config["sliding_window"];
    let slides = config["use_sliding_window"].as_bool();
    let slides = slides.unwrap_or(shape.slides_by_default && !window.is_null());
    let covers = window.as_u64() >= Some(shape.max_position_embeddings as u64);
    match slides && !covers {
        false => Ok(()),
        true => Err(refused(
            "sliding_window",
            window,
            "a window that is used must be as long as max_position_embeddings",
        )),
    }
}

/// An entry of the RoPE parameters that applies to one kind of layers only.
fn nested_rope(entries: &serde_json::Map<String, Value>) -> Option<(&str, &Value)> {
    let kinds = ["full_attention", "sliding_attention", "chunked_attention"];
    let mut found = entries
        .iter()
        .filter(|(key, _)| kinds.contains(&key.as_str()));
    found.next().map(|(key, value)| (key.as_str(), value))
}

fn says_no(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.),
        Value::Array(list) => list.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

fn only(config: &Value, key: &str, neutral: f64) -> Result<(), String> {
    let value = &config[key];
    let fits = |x: f64| (x - neutral).abs() <= 1e-6 * neutral;
    match value.is_null() || value.as_f64().is_some_and(fits) {
        true => Ok(()),
        false => Err(refused(key, value, &format!("only {neutral} is supported"))),
    }
}

fn all_are(config: &Value, key: &str, fits: impl Fn(&Value) -> bool) -> Result<(), String> {
    let value = &config[key];
    let odd = value.as_array().into_iter().flatten().find(|&v| !fits(v));
    match odd {
        None if value.is_null() || value.is_array() => Ok(()),
        odd => Err(refused(
            key,
            odd.unwrap_or(value),
            "all layers must be alike",
        )),
    }
}

fn refused(key: &str, value: &Value, accepted: &str) -> String {
    let mut value = value.to_string();
    if value.len() > 60 {
        value = value.chars().take(60).chain("..".chars()).collect();
    }
    format!("{key} {value} is not supported: {accepted}")
}

/// Keys of GGUF metadata, under the architecture's name, that must be absent or have this value; `None`
/// stands for `head_dim`.
const GGUF_NEUTRAL: [(&str, Option<f64>); 17] = [
    ("attention.clamp_kqv", Some(0.)),
    ("attention.value_length", None),
    ("attn_logit_softcapping", Some(0.)),
    ("embedding_scale", Some(1.)),
    ("expert_count", Some(0.)),
    ("expert_used_count", Some(0.)),
    ("final_logit_softcapping", Some(0.)),
    ("leading_dense_block_count", Some(0.)),
    ("logit_scale", Some(1.)),
    ("nextn_predict_layers", Some(0.)),
    ("residual_scale", Some(1.)),
    ("rope.dimension_count", None),
    ("rope.scale_linear", Some(1.)),
    ("rope.scaling.attn_factor", Some(1.)),
    ("rope.scaling.factor", Some(1.)),
    ("rope.scaling.yarn_log_multiplier", Some(0.)),
    ("attention.sliding_window_pattern", Some(0.)),
];

/// Refuses GGUF metadata that ask for something the decoder does not implement. `get` looks up a key
/// under the architecture's name.
///
/// # Errors
/// A message that names the key, its value and what would be accepted.
pub fn check_gguf<'a>(
    get: impl Fn(&str) -> Option<&'a GgufValue>,
    shape: &Shape,
) -> Result<(), String> {
    let head_dim = shape.head_dim as f64;
    let scale = ("attention.scale", Some(1. / head_dim.sqrt()));
    for (key, neutral) in GGUF_NEUTRAL.into_iter().chain([scale]) {
        let neutral = neutral.unwrap_or(head_dim);
        let Some(value) = get(key) else { continue };
        let fits = |x: f64| (x - neutral).abs() <= 1e-6 * neutral;
        // In llama.cpp, 0 means "none" for each of these keys.
        if !gguf_number(value).is_some_and(|x| x == 0. || fits(x)) {
            return Err(format!(
                "{key} {} is not supported: only {neutral} is",
                gguf_text(value)
            ));
        }
    }
    if let Some(GgufValue::String(kind)) = get("rope.scaling.type").filter(|kind| !is_none(kind)) {
        return Err(format!(
            "rope scaling '{kind}' is not supported: only none is"
        ));
    }
    if let Some(GgufValue::Bool(false)) = get("attention.causal") {
        return Err("attention.causal false is not supported: only true is".into());
    }
    let window = get("attention.sliding_window").and_then(gguf_number);
    match window {
        Some(window) if window > 0. && window < shape.max_position_embeddings as f64 => {
            Err(format!(
                "attention.sliding_window {window} is not supported: a window must be as long as \
                 context_length"
            ))
        }
        _ => Ok(()),
    }
}

fn is_none(kind: &GgufValue) -> bool {
    matches!(kind, GgufValue::String(kind) if kind == "none")
}

fn gguf_number(value: &GgufValue) -> Option<f64> {
    let float = value.to_f64().ok().or(value.to_f32().ok().map(f64::from));
    float.or(value.to_u64().ok().map(|x| x as f64))
}

fn gguf_text(value: &GgufValue) -> String {
    gguf_number(value).map_or(String::from("of another type"), |x| x.to_string())
}
