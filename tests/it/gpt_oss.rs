//! gpt-oss: its configurations, and the blocks of MXFP4 in which its experts are published. What it computes is compared
//! with transformers among all [architectures](crate::architectures).

use crate::architectures::{TOLERANCE, fixture};
use crate::common::tiny::{open, write_config};
use candle_core::{DType, Device, Tensor};
use foretoken::error::Error;
use foretoken::model::{LoadOptions, ModelConfig, ModelSource, RopeScaling, inspect};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

/// gpt-oss-20b's, with these changes.
fn read(folder: &Path, change: Json) -> Result<ModelConfig, Error> {
    let kinds = ["sliding_attention", "full_attention"].repeat(12);
    let mut config = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4"
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088
    });
    for (key, value) in change.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
        .as_object_mut()
        .unwrap()
        .retain(|_, value| *value != "absent");
    write_config(folder, &config);
    ModelConfig::from_json(folder)
}

#[test]
fn the_published_config_is_read_and_says_what_the_class_assumes() {
    let folder = tempfile::tempdir().unwrap();
    let published = read(folder.path(), json!({})).unwrap();
    let layers = &published.spec.layers;
    let windows: Vec<_> = layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(128), None].repeat(12));
    for layer in layers {
        assert!(layer.sinks && layer.qkv_bias && layer.o_bias);
        let experts = layer.experts().unwrap();
        let sizes = (experts.count, experts.per_token, experts.width);
        assert_eq!(sizes, (32, 4, 2880));
        assert!(experts.has_bias && experts.is_normalized);
        let rope = layer.rope.as_ref().unwrap();
        let Some(RopeScaling::Yarn(yarn)) = &rope.scaling else {
            panic!("{rope:?}");
        };
        assert!(!yarn.truncate && rope.theta == 150_000.);
    }
    let absent = [
        "attention_bias",
        "experts_per_token",
        "head_dim",
        "hidden_act",
        "initial_context_length",
        "layer_types",
        "max_position_embeddings",
        "num_experts_per_tok",
        "quantization_config",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "swiglu_limit",
    ];
    let absent: serde_json::Map<_, _> = (absent.iter())
        .map(|key| ((*key).to_owned(), json!("absent")))
        .collect();
    let bare = read(folder.path(), absent.into()).unwrap();
    assert_eq!(bare.spec, published.spec);
    assert_eq!(bare.rms_norm_eps, published.rms_norm_eps);
}

#[test]
fn what_it_does_not_compute_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        (
            json!({ "swiglu_limit": 5.0 }),
            "swiglu_limit 5.0 is not supported: only 7 is",
        ),
        (
            json!({ "swiglu_alpha": 1.0 }),
            "swiglu_alpha 1.0 is not supported: only 1.702 is",
        ),
        (json!({ "hidden_act": "gelu" }), "hidden_act \"gelu\""),
        (
            json!({ "experts_per_token": 2 }),
            "experts_per_token 2 is not supported: only 4 is",
        ),
        (
            json!({ "initial_context_length": 8192 }),
            "initial_context_length 8192",
        ),
        (
            json!({ "quantization_config": { "quant_method": "fp8" } }),
            "quantization_config {\"quant_method\":\"fp8\"} is not supported: only a quant_method of mxfp4 is",
        ),
        (
            json!({ "quantization_config": { "quant_method": "mxfp4", "group_size": 16 } }),
            "group_size 16",
        ),
        (json!({ "sliding_window": null }), "sliding_attention"),
        (json!({ "shared_experts": 1 }), "shared_experts 1"),
    ];
    for (change, want) in cases {
        let error = read(folder.path(), change).unwrap_err().to_string();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{error}"
        );
    }
}

/// A copy of the fixture with these tensors.
fn stored_as(folder: &Path, tensors: &HashMap<String, Tensor>) -> Result<(), String> {
    let fixture = fixture("gpt_oss_mxfp4");
    std::fs::copy(
        fixture.folder.join("config.json"),
        folder.join("config.json"),
    )
    .unwrap();
    candle_core::safetensors::save(tensors, folder.join("model.safetensors")).unwrap();
    let model = open(folder).map_err(|e| e.to_string())?;
    fixture.compare(model, TOLERANCE)
}

#[test]
fn tensors_of_blocks_are_checked() {
    let file = fixture("gpt_oss_mxfp4").folder.join("model.safetensors");
    let stored = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    stored_as(folder.path(), &stored).unwrap();
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let blocks = "model.layers.1.mlp.experts.down_proj_blocks";
    let largest = |exponent: u8| {
        let mut values = stored[scales]
            .flatten_all()
            .unwrap()
            .to_vec1::<u8>()
            .unwrap();
        values[77] = exponent;
        Tensor::from_vec(values, stored[scales].dims(), &Device::Cpu).unwrap()
    };
    let cases = [
        (
            scales,
            None,
            "tensor model.layers.1.mlp.experts.down_proj_scales",
        ),
        (
            blocks,
            Some(stored[blocks].narrow(1, 0, 16).unwrap()),
            "has shape [4, 16, 1, 16]",
        ),
        (
            scales,
            Some(stored[scales].narrow(0, 0, 3).unwrap()),
            "has shape [3, 32, 1]",
        ),
        (
            scales,
            Some(stored[scales].to_dtype(DType::F32).unwrap()),
            "has dtype F32",
        ),
        (
            scales,
            Some(largest(255)),
            "down_proj_blocks contains NaN or infinity",
        ),
        (
            scales,
            Some(largest(253)),
            "down_proj_blocks contains NaN or infinity",
        ),
    ];
    for (name, tensor, want) in cases {
        let mut other = stored.clone();
        match tensor {
            Some(tensor) => other.insert(name.into(), tensor.contiguous().unwrap()),
            None => other.remove(name),
        };
        let error = stored_as(folder.path(), &other).unwrap_err();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{want}: {error}"
        );
    }
}

/// `check` counts blocks as they are stored and the matrices that they become: on the CPU, and on a GPU that need not be here.
#[test]
fn headers_tell_what_blocks_become() {
    let source = ModelSource::Folder(fixture("gpt_oss_mxfp4").folder);
    // A matrix of an expert is two units of 16 outputs and 64 inputs on a GPU.
    for (for_gpu, loaded, bytes) in [
        (false, "bf16", 2 * 4 * 32 * 32),
        (true, "MXFP4", 4 * 2 * 544),
    ] {
        let options = LoadOptions {
            for_gpu,
            ..LoadOptions::default()
        };
        let (_, inventory) = inspect(&source, &options).unwrap();
        let entries = inventory.entries.iter();
        let blocks: Vec<_> = entries.filter(|entry| entry.stored == "MXFP4").collect();
        assert_eq!(blocks.len(), 4);
        let down = blocks
            .iter()
            .find(|entry| entry.name.contains("down_proj"))
            .unwrap();
        assert_eq!(
            (down.elements, down.stored_bytes),
            (4 * 32 * 32, 4 * 32 * 17)
        );
        assert_eq!((down.loaded.as_str(), down.loaded_bytes), (loaded, bytes));
        assert!(down.is_of_experts());
    }
}
