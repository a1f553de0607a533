//! Nemotron-H and Nemotron 3 Nano: each layer is one of Mamba 2, attention, an MLP and experts.

use super::experts::corrected;
use super::mamba::{self, gguf_sizes, step_limits};
use super::parts::{LAYER_TYPES, activation_or, attending, layer_kinds};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{ExpertsSpec, LayerSpec, MixerSpec, MlpSpec, ModelSpec, Norms, SharedExpert};
use foretoken_kernels::Activation;
use serde_json::Value;

/// Parts of the names of tensors: ours, and those of the class.
const NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    (".input_layernorm.", ".norm."),
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
];

/// Names of keys in the class, and in Granite 4 or other classes.
const RENAMED: [(&str, &str); 14] = [
    ("attention_head_dim", "head_dim"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("layers_block_type", "layer_types"),
    ("mlp_hidden_act", "hidden_act"),
    ("conv_kernel", "mamba_d_conv"),
    ("mamba_dt_limit", "time_step_limit"),
    ("mamba_dt_min", "time_step_min"),
    ("mamba_head_dim", "mamba_d_head"),
    ("mamba_num_heads", "mamba_n_heads"),
    ("n_groups", "mamba_n_groups"),
    ("n_routed_experts", "num_experts"),
    ("num_local_experts", "num_experts"),
    ("ssm_state_size", "mamba_d_state"),
    ("use_conv_bias", "mamba_conv_bias"),
];

/// Keys that the class does not read, or that are about training and caches.
const UNREAD: &str = "
    chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_expand
    mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type norm_eps num_logits_to_keep output_router_logits partial_rotary_factor
    rescale_prenorm_residual residual_in_fp32 rope_parameters rope_theta time_step_floor
    time_step_max time_step_rank use_mamba_kernels";

/// Keys that say how experts are chosen.
const OF_EXPERTS: &str = "
    expert_weights_norm n_group norm_topk_prob routed_scaling_factor topk_group";

/// The least step of the class. llama.cpp's files do not have it.
const MIN_STEP: f64 = 1e-3;

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    if keys.is_gguf() {
        gguf_defaults(keys);
        return;
    }
    // The class reads only its own name.
    keys.ignore("rms_norm_eps");
    for (theirs, ours) in RENAMED {
        keys.rename(theirs, ours);
    }
    keys.ignore(UNREAD);
    if let Some(pattern) = keys.take("hybrid_override_pattern").as_str()
        && !keys.has("layer_types")
    {
        let kinds = pattern.chars().map(|letter| match letter {
            'M' => "mamba".to_owned(),
            '*' => "attention".to_owned(),
            '-' => "mlp".to_owned(),
            'E' => "moe".to_owned(),
            other => other.to_string(),
        });
        keys.set("layer_types", kinds.collect::<Vec<String>>());
    }
    if let Some(count) = keys.peek("layer_types").as_array().map(Vec::len) {
        // The class counts them.
        keys.set("num_hidden_layers", count);
    }
    for (key, by_default) in [
        ("head_dim", 128),
        ("intermediate_size", 21_504),
        ("mamba_d_conv", 4),
        ("mamba_d_head", 64),
        ("mamba_d_state", 128),
        ("mamba_n_groups", 8),
        ("mamba_n_heads", 128),
        ("max_position_embeddings", 4096),
        ("moe_intermediate_size", 7688),
        ("moe_shared_expert_intermediate_size", 7688),
        ("num_experts", 8),
        ("num_experts_per_tok", 2),
        ("num_key_value_heads", 8),
    ] {
        keys.default(key, by_default);
    }
    keys.default("rms_norm_eps", 1e-5);
    keys.default("time_step_min", MIN_STEP);
}

/// Sets the defaults of GGUF files. A layer with heads of keys has attention, a layer with the width of an MLP has an
/// MLP or experts, and any other layer has Mamba.
fn gguf_defaults(keys: &mut Keys) {
    gguf_sizes(keys);
    keys.set("time_step_min", MIN_STEP);
    let widths = keys.peek("intermediate_size");
    let has_experts = keys.peek("num_experts").as_u64() > Some(0);
    if let (Some(attends), Some(widths)) = (attending(keys), widths.as_array()) {
        let kind = |(attends, width): (bool, &Value)| match width.as_u64() {
            _ if attends => "attention",
            Some(0) => "mamba",
            _ if has_experts => "moe",
            _ => "mlp",
        };
        let kinds: Vec<&str> = attends.into_iter().zip(widths).map(kind).collect();
        keys.set(LAYER_TYPES, kinds);
        let most = widths.iter().filter_map(Value::as_u64).max();
        keys.set("intermediate_size", most.unwrap_or(0));
    }
    if has_experts {
        let width = keys.peek("intermediate_size");
        keys.set("moe_intermediate_size", width);
        keys.rename(
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
        );
    }
    // Nothing is rotated.
    keys.ignore("rope.dimension_count rope.scaling.finetuned rope_theta");
}

/// Layers with one norm and one half each, which do not rotate.
pub fn nemotron_h(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("mamba_hidden_act", "silu")?;
    let kinds = layer_kinds(keys, shape, LAYER_TYPES)?;
    let kinds = kinds.ok_or_else(|| keys.missing("layers_block_type"))?;
    let has = |kind: &str| kinds.iter().any(|other| other == kind);
    let activation = activation_or(keys, Activation::Relu2)?;
    let mlp = MlpSpec::Plain {
        activation,
        up: "mlp.up_proj",
        down: "mlp.down_proj",
    };
    let layer = LayerSpec {
        rope: None,
        norms: Norms::FIRST,
        parallel: true,
        mlp: MlpSpec::None,
        mlp_bias: keys.flag("mlp_bias")?.unwrap_or(false),
        ..LayerSpec::without_rope(shape.head_dim)
    };
    let recurrent = recurrent(keys)?;
    let experts = of_experts(keys, mlp)?;
    if experts.is_none() && has("moe") {
        return Err("layers with experts need experts".into());
    }
    let of_layer = |kind: &String| match kind.as_str() {
        "attention" | "full_attention" => Ok(layer.clone()),
        "mamba" | "linear_attention" => Ok(LayerSpec {
            mixer: recurrent,
            ..layer.clone()
        }),
        "mlp" => Ok(LayerSpec {
            mixer: MixerSpec::None,
            mlp,
            ..layer.clone()
        }),
        "moe" => Ok(LayerSpec {
            mixer: MixerSpec::None,
            mlp: experts.map_or(MlpSpec::None, MlpSpec::Experts),
            ..layer.clone()
        }),
        _ => {
            let accepted = "only mamba, attention, mlp and moe are";
            Err(keys.refused("layers_block_type", &kind.clone().into(), accepted))
        }
    };
    let layers = kinds.iter().take(shape.num_layers).map(of_layer);
    Ok(ModelSpec {
        layers: layers.collect::<Result<_, _>>()?,
        names: NAMES,
        ..ModelSpec::default()
    })
}

/// The mixer of layers with Mamba.
fn recurrent(keys: &mut Keys) -> Result<MixerSpec, String> {
    let least = keys.number("time_step_min")?.unwrap_or(0.);
    if step_limits(keys)? != (0., f32::INFINITY) {
        return Err("time_step_limit is not supported: only [0, Infinity] is".into());
    }
    let has_bias = keys.flag("use_bias")?.unwrap_or(false);
    let mut spec = mamba::spec(keys, (least as f32, f32::INFINITY))?;
    spec.has_bias |= has_bias;
    Ok(MixerSpec::Mamba(spec))
}

/// The experts of layers that have some, which are like `mlp`, with one of all tokens.
fn of_experts(keys: &mut Keys, mlp: MlpSpec) -> Result<Option<ExpertsSpec>, String> {
    // Their width says how wide the one of all tokens is.
    keys.ignore("n_shared_experts");
    let shared = keys.size("moe_shared_expert_intermediate_size")?;
    if matches!(keys.peek("num_experts").as_u64(), None | Some(0)) {
        keys.ignore(OF_EXPERTS);
        return Ok(None);
    }
    Ok(Some(ExpertsSpec {
        shared: shared.map(|width| SharedExpert::new("mlp.shared_experts", width)),
        ..corrected(keys, mlp)?
    }))
}
