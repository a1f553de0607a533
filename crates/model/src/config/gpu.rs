//! What a GPU has kernels for: a model that needs others is refused before its weights are read.

use super::ModelConfig;
use crate::mixers;
use crate::spec::{ExpertsSpec, LayerSpec, MixerSpec, MlpSpec};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::{
    GPU_HEAD_DIM_STEP, MAX_GPU_HEAD_DIM, MAX_GPU_HEADS_PER_KV_HEAD, has_expert_gpu_kernel,
};

/// Checks that a GPU has kernels for all of the model.
///
/// # Errors
/// `Setup`, in one line: what it has none for, and what it takes instead.
pub fn check(config: &ModelConfig) -> Result<()> {
    let mut results = (config.spec.layers.iter()).map(|layer| check_layer(config, layer));
    let checked = results.find(Result::is_err).unwrap_or(Ok(()));
    checked.map_err(|what| Error::setup(format!("{what}; --device cpu serves this model")))
}

fn refuse(what: &str, instead: &str) -> std::result::Result<(), String> {
    Err(format!("{what} not supported on a GPU: {instead}"))
}

fn check_layer(config: &ModelConfig, layer: &LayerSpec) -> std::result::Result<(), String> {
    if let Some((what, instead)) = mixers::lack_on_gpu(layer) {
        return refuse(&what, &instead);
    }
    if layer.mixer == MixerSpec::Attention {
        check_heads(config, layer)?;
    }
    match layer.mlp {
        MlpSpec::Experts(experts) => check_experts(&experts),
        _ => Ok(()),
    }
}

fn check_heads(config: &ModelConfig, layer: &LayerSpec) -> std::result::Result<(), String> {
    let kv = layer.kv_heads.unwrap_or(config.kv_heads());
    if !kv.dim.is_multiple_of(GPU_HEAD_DIM_STEP) || kv.dim > MAX_GPU_HEAD_DIM {
        let instead =
            format!("multiples of {GPU_HEAD_DIM_STEP} up to {MAX_GPU_HEAD_DIM} values are");
        return refuse(&format!("heads of {} values are", kv.dim), &instead);
    }
    let group = config.num_heads / kv.count;
    if group > MAX_GPU_HEADS_PER_KV_HEAD {
        return refuse(
            &format!("{group} query heads for each head of keys and values are"),
            &format!("up to {MAX_GPU_HEADS_PER_KV_HEAD} are"),
        );
    }
    Ok(())
}

fn check_experts(experts: &ExpertsSpec) -> std::result::Result<(), String> {
    let activation = experts.activation;
    if !has_expert_gpu_kernel(activation) {
        return Err(format!(
            "experts with {activation:?} are not supported on a GPU: only those with SiLU, GELU, squared ReLU and gpt-oss's are"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn checked(change: Value) -> std::result::Result<(), String> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64
        });
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
        }
        let config = ModelConfig::parse(&config.to_string()).unwrap();
        check(&config).map_err(|e| e.to_string())
    }

    /// DeepSeek-V3's latent attention, with this change.
    fn latent(change: Value) -> Value {
        let mut all = json!({
            "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64
        });
        for (key, value) in change.as_object().unwrap() {
            all[key] = value.clone();
        }
        all
    }

    #[test]
    fn what_a_gpu_takes_passes() {
        checked(json!({})).unwrap();
        for dim in [8, 80, 96, 112, 128, 192, 256, 512] {
            checked(json!({"head_dim": dim})).unwrap();
        }
        checked(json!({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1})).unwrap();
        checked(json!({"hidden_act": "relu2"})).unwrap();
        checked(json!({"is_causal": false})).unwrap();
        for class in [
            "Phi3ForCausalLM",
            "CohereForCausalLM",
            "StableLmForCausalLM",
            "Starcoder2ForCausalLM",
            "NemotronForCausalLM",
            "HunYuanDenseV1ForCausalLM",
            "Gemma4ForCausalLM",
            "Qwen3MoeForCausalLM",
        ] {
            checked(json!({ "architectures": [class] })).unwrap();
        }
        checked(latent(json!({}))).unwrap();
        let heads = json!({"num_attention_heads": 128, "num_key_value_heads": 128});
        checked(latent(heads)).unwrap();
        checked(json!({"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1]})).unwrap();
        checked(json!({"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba", "mamba"]})).unwrap();
        checked(json!({"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 8, "mamba_d_ssm": 512})).unwrap();
        for layers in ["-*", "*-M"] {
            checked(json!({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": layers})).unwrap();
        }
    }

    #[test]
    fn what_it_does_not_take_is_named_in_one_line() {
        let experts = json!({"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 8, "mamba_d_state": 512, "layer_types": ["mamba", "attention", "mamba", "mamba"]});
        let heads = json!({"num_attention_heads": 66, "num_key_value_heads": 2});
        let rank = latent(json!({"kv_lora_rank": 516}));
        for (change, what, instead) in [
            (json!({"head_dim": 100}), "of 100 values", "multiples of 8"),
            (json!({"head_dim": 640}), "heads of 640 values", "up to 512"),
            (heads, "33 query heads", "up to 32"),
            (experts, "states of heads with 512 rows", "up to 256"),
            (rank, "latent attention of this shape", "up to 512 values"),
        ] {
            let error = checked(change.clone()).expect_err(&change.to_string());
            assert!(error.contains(what) && error.contains(instead), "{error}");
            let is_line = error.ends_with("; --device cpu serves this model");
            assert!(is_line && error.lines().count() == 1, "{error}");
        }
    }
}
