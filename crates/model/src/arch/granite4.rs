//! Granite 4: Mamba 2 in most layers or in none, with experts or without.

use super::experts;
use super::llama::granite;
use super::mamba;
use super::parts::{LAYER_TYPES, activation_or, attending, by_kind, set_kinds};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{ExpertsSpec, MixerSpec, MlpSpec, ModelSpec, SharedExpert};
use foretoken_kernels::Activation;

/// Parts of the names of tensors: ours, and those of the class.
const NAMES: &[(&str, &str)] = &[
    ("shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("shared_mlp.down_proj", "shared_mlp.output_linear"),
];

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    // The name of older files.
    keys.rename("layers_block_type", "layer_types");
    experts::defaults(keys, 8, 2);
    if keys.is_gguf() {
        gguf_defaults(keys);
        return;
    }
    // That of the experts.
    keys.default("intermediate_size", 11_008);
    keys.rename("intermediate_size", "moe_intermediate_size");
    keys.rename("shared_intermediate_size", "intermediate_size");
    keys.default("intermediate_size", 1024);
    mamba::defaults(keys);
    keys.ignore("init_method");
}

fn gguf_defaults(keys: &mut Keys) {
    if let Some(attends) = attending(keys) {
        set_kinds(keys, attends, "mamba");
    }
    mamba::gguf_sizes(keys);
    // That of the MLP beside the experts, which is the other one without any.
    let shared = keys.take("shared_expert_intermediate_size");
    if keys.peek("num_experts").as_u64() > Some(0) {
        keys.rename("intermediate_size", "moe_intermediate_size");
        keys.set("intermediate_size", shared);
    }
}

/// Layers of a Granite, of which some have Mamba in place of attention, and which may not rotate.
pub fn granite4(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("normalization_function", "rmsnorm")?;
    let attends = attends(keys, shape)?;
    let rotates = rotates(keys)?;
    let activation = activation_or(keys, Activation::Silu)?;
    let mut model = granite(keys, shape)?;
    let mixer = if attends.contains(&false) {
        mamba::mixer(keys, shape, activation)?
    } else {
        keys.retain(|key| !key.starts_with("mamba_"));
        keys.ignore("time_step_limit");
        MixerSpec::Attention
    };
    let experts = of_experts(keys, shape, activation)?;
    for (layer, attends) in model.layers.iter_mut().zip(attends) {
        layer.rope = layer.rope.take().filter(|_| rotates && attends);
        layer.mlp = match (experts, keys.is_gguf()) {
            (Some(experts), _) => MlpSpec::Experts(experts),
            (None, true) => MlpSpec::Gated(activation),
            (None, false) => MlpSpec::Fused {
                activation,
                gate_up: "shared_mlp.gate_up_proj",
                down: "shared_mlp.down_proj",
            },
        };
        if !attends {
            layer.mixer = mixer;
        }
    }
    Ok(ModelSpec {
        names: NAMES,
        ..model
    })
}

/// Which layers have attention.
fn attends(keys: &mut Keys, shape: &ModelShape) -> Result<Vec<bool>, String> {
    let accepted = "only attention and mamba are";
    let attends = by_kind(keys, shape, LAYER_TYPES, accepted, |kind| match kind {
        "attention" | "full_attention" => Some(true),
        "mamba" | "linear_attention" => Some(false),
        _ => None,
    })?;
    Ok(attends.unwrap_or_else(|| vec![false; shape.num_layers]))
}

/// Whether queries and keys are rotated.
fn rotates(keys: &mut Keys) -> Result<bool, String> {
    if keys.is_gguf() {
        // llama.cpp's name for that, and what it takes without it.
        return Ok(keys.flag("rope.scaling.finetuned")?.unwrap_or(true));
    }
    match keys.text("position_embedding_type")?.as_deref() {
        Some("rope") => Ok(true),
        None | Some("nope") => Ok(false),
        Some(other) => {
            let accepted = "only rope and nope are";
            Err(keys.refused("position_embedding_type", &other.into(), accepted))
        }
    }
}

/// The experts of all layers, if they have some, with one of all tokens.
fn of_experts(
    keys: &mut Keys,
    shape: &ModelShape,
    activation: Activation,
) -> Result<Option<ExpertsSpec>, String> {
    if matches!(keys.peek("num_experts").as_u64(), None | Some(0)) {
        keys.ignore("moe_intermediate_size num_experts num_experts_per_tok");
        return Ok(None);
    }
    let width = keys.needed_size("moe_intermediate_size")?;
    let is_gguf = keys.is_gguf();
    let name = if is_gguf {
        "mlp.shared_expert"
    } else {
        "shared_mlp"
    };
    let shared = SharedExpert {
        is_fused: !is_gguf,
        ..SharedExpert::new(name, shape.intermediate_size)
    };
    Ok(Some(ExpertsSpec {
        shared: Some(shared),
        ..experts::experts(keys, MlpSpec::Gated(activation), width, true)?
    }))
}
