//! Multi-head latent attention: its configurations, what its pool keeps, and what is refused. What it computes is
//! compared with transformers among all [architectures](crate::architectures).

use crate::architectures::{TOLERANCE, fixture};
use crate::common::read_json;
use crate::common::refusals::assert_refused;
use crate::common::rig::{Rig, Seq};
use crate::common::tiny::{logits, open, write_config};
use crate::glm_moe::{experts, read};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::quant::BlockType;
use foretoken::model::{
    ExpertGroups, LatentSpec, LoadFormat, LoadOptions, MixerSpec, ModelConfig, ModelSource,
    RopeRows, RouterScores, inspect, load,
};
use serde_json::{Value as Json, json};
use std::path::Path;

/// The text of a file.
fn published(text: &str) -> Json {
    serde_json::from_str(text).unwrap()
}

/// DeepSeek-V2-Lite's.
fn v2_lite() -> Json {
    published(
        r#"{
            "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "auto_map": { "AutoConfig": "configuration_deepseek.DeepseekV2Config" }, "aux_loss_alpha": 0.001,
            "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
            "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
            "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6, "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096, "type": "yarn"
            },
            "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
            "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400
        }"#,
    )
}

/// DeepSeek-V3's, which is R1's, too.
fn v3() -> Json {
    published(
        r#"{
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
            },
            "rms_norm_eps": 1e-6, "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn"
            },
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
            "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
            "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
        }"#,
    )
}

/// Moonlight 16B-A3B's.
fn moonlight() -> Json {
    published(
        r#"{
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264,
            "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts_per_tok": 6,
            "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_scaling": null, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
            "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16", "transformers_version": "4.48.3", "use_cache": true, "v_head_dim": 128,
            "vocab_size": 163840
        }"#,
    )
}

/// GLM-4.7-Flash's.
fn glm_flash() -> Json {
    published(
        r#"{
            "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
            "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536,
            "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
            "num_nextn_predict_layers": 1, "pad_token_id": 154820, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": null,
            "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": false, "topk_group": 1,
            "topk_method": "noaux_tc", "transformers_version": "5.0.0rc0", "v_head_dim": 256, "vocab_size": 154880
        }"#,
    )
}

fn latent(config: &ModelConfig) -> LatentSpec {
    let first = config.spec.layers[0].mixer;
    assert!(config.spec.layers.iter().all(|l| l.mixer == first));
    match first {
        MixerSpec::Latent(latent) => latent,
        other => panic!("{other:?}"),
    }
}

#[test]
fn published_configs_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: Json| read(folder.path(), config, json!({})).unwrap();
    let widths = LatentSpec {
        q_rank: None,
        rank: 512,
        nope: 128,
        rope: 64,
        value: 128,
    };

    let config = read(v2_lite());
    let (found, dense) = experts(&config);
    assert_eq!((latent(&config), dense), (widths, 1));
    assert_eq!((found.scores, found.groups), (RouterScores::Softmax, None));
    assert!(!found.is_normalized && found.shared.unwrap().width == 2816);
    let layer = &config.spec.layers[0];
    // The square of 0.1 * 0.707 * ln(40) + 1.
    let want = 1.589_6 / 192f32.sqrt();
    assert!((layer.attention_scale - want).abs() < 1e-4, "{layer:?}");
    assert_eq!(layer.rope.as_ref().unwrap().width, 64);
    assert_eq!(layer.rope_rows, RopeRows::Neighbours);
    // 576 values of each layer, of two bytes.
    let bytes = config.kv_shape(DType::BF16).bytes_per_token();
    assert_eq!(bytes, 27 * 576 * 2);

    let config = read(v3());
    let (found, dense) = experts(&config);
    let with_rank = |rank| LatentSpec {
        q_rank: Some(rank),
        ..widths
    };
    assert_eq!((latent(&config), dense), (with_rank(1536), 3));
    let groups = ExpertGroups {
        count: 8,
        per_token: 4,
        best: 2,
    };
    assert_eq!(found.groups, Some(groups));
    assert_eq!((found.scores, found.scale), (RouterScores::Sigmoid, 2.5));
    assert!(found.is_normalized && found.correction.is_some());
    assert_eq!(config.spec.unread, ["model.layers.61."]);
    let bytes = config.kv_shape(DType::BF16).bytes_per_token();
    assert_eq!(bytes, 61 * 576 * 2);

    let config = read(moonlight());
    let (found, dense) = experts(&config);
    assert_eq!((latent(&config), dense), (widths, 1));
    assert_eq!((found.groups, found.scale), (None, 2.446));
    assert!(config.spec.unread.is_empty());
    let scale = config.spec.layers[0].attention_scale;
    assert_eq!(scale, 1. / 192f32.sqrt());

    let config = read(glm_flash());
    let (found, dense) = experts(&config);
    let wide = LatentSpec {
        nope: 192,
        value: 256,
        ..with_rank(768)
    };
    assert_eq!((latent(&config), dense), (wide, 1));
    assert_eq!((found.count, found.per_token), (64, 4));
    assert_eq!(config.spec.unread, ["model.layers.47."]);
}

#[test]
fn what_a_class_cannot_do_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = r#"
        {"topk_method": "noaux_tc"} | topk_method "noaux_tc"
        {"norm_topk_prob": true} | norm_topk_prob true
        {"num_experts_per_tok": null} | num_experts_per_tok is missing
        {"kv_lora_rank": 0} | kv_lora_rank 0
        {"kv_lora_rank": 4090} | head_dim 4154 is over the limit
        {"v_head_dim": 1152921504606846976} | v_head_dim 1152921504606846976 is not supported
        {"num_key_value_heads": 4} | num_key_value_heads 4 is not supported: only 16 is
        {"head_dim": 128} | head_dim 128 is not supported: it must be qk_rope_head_dim 64
        {"qk_head_dim": 128} | qk_head_dim 128 is not supported: only 192 is
    "#;
    assert_refused(table, |change| read(folder.path(), v2_lite(), change));
    let table = r#"
        {"moe_layer_freq": 2} | moe_layer_freq 2
        {"scoring_func": "softmax"} | scoring_func "softmax"
        {"topk_method": "greedy"} | topk_method "greedy"
        {"n_group": 7} | 7 groups of 256 experts
        {"qk_rope_head_dim": 63} | head_dim 63 is odd
    "#;
    assert_refused(table, |change| read(folder.path(), v3(), change));
    for (kinds, want) in [
        (vec!["dense"], "mlp_layer_types has 1 entries for 47 layers"),
        (vec!["sparser"; 47], "mlp_layer_types \"sparser\""),
    ] {
        let change = json!({ "mlp_layer_types": kinds });
        let error = read(folder.path(), glm_flash(), change)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{error}"
        );
    }
}

/// The checkpoint of the fixture `name` with a change of its tensors.
fn changed(name: &str, folder: &Path, change: impl Fn(&str, Tensor) -> Tensor) {
    let fixture = fixture(name);
    let stored = fixture.stored().into_iter().map(|(name, tensor)| {
        let tensor = change(&name, tensor);
        (name, tensor)
    });
    let at = |name: &str| folder.join(name);
    std::fs::copy(fixture.folder.join("config.json"), at("config.json")).unwrap();
    let stored: std::collections::HashMap<String, Tensor> = stored.collect();
    candle_core::safetensors::save(&stored, at("model.safetensors")).unwrap();
}

/// The comparison with transformers sees the bias of the router, and the norms of latent vectors.
#[test]
fn every_part_counts() {
    let folder = tempfile::tempdir().unwrap();
    for (name, part) in [
        ("deepseek_v3", "e_score_correction_bias"),
        ("deepseek_v3", "q_a_layernorm.weight"),
        ("deepseek_v3", "kv_a_layernorm.weight"),
        ("glm4_moe_lite", "e_score_correction_bias"),
        ("deepseek_v3_plain", "kv_a_proj_with_mqa.bias"),
        ("deepseek_v2_groups", "q_a_proj.bias"),
        ("deepseek_v2_groups", "shared_experts.up_proj.bias"),
    ] {
        changed(name, folder.path(), |name, tensor| {
            if name.ends_with(part) {
                tensor.zeros_like().unwrap()
            } else {
                tensor
            }
        });
        let found = fixture(name).compare(open(folder.path()).unwrap(), TOLERANCE);
        assert!(found.is_err(), "{name} without {part}");
    }
}

/// One latent vector and one rotated key of each layer, and no values.
#[test]
fn the_pool_keeps_latent_vectors_alone() {
    for (name, layers, kept) in [("deepseek_v2", 3, 16 + 4), ("deepseek_v3", 3, 24 + 8)] {
        let model = fixture(name).open();
        let shape = model.kv_shape();
        let width = shape.dtype.size_in_bytes();
        assert_eq!(shape.bytes_per_token(), layers * kept * width, "{name}");
        let pool = foretoken::kv::KvStore::new(shape, 2, 4, &Device::Cpu).unwrap();
        for (k, v) in &pool.layers {
            assert_eq!((k.dims(), v.elem_count()), (&[8, 1, kept][..], 0), "{name}");
        }
    }
}

/// Random weights of heads with whole blocks, as blocks, and in each dtype of the pool: rows have the bits that they have
/// in other chunks. What is listed before is what is loaded.
#[test]
fn chunks_change_no_bits_whatever_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = v3();
    for (key, value) in [
        ("vocab_size", 256),
        ("hidden_size", 64),
        ("intermediate_size", 64),
        ("moe_intermediate_size", 32),
        ("num_hidden_layers", 4),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 6),
        ("n_routed_experts", 16),
        ("q_lora_rank", 32),
        ("kv_lora_rank", 64),
        ("qk_nope_head_dim", 32),
        ("qk_rope_head_dim", 16),
        ("v_head_dim", 32),
    ] {
        config[key] = value.into();
    }
    config
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    write_config(folder.path(), &config);
    let source = ModelSource::Folder(folder.path().to_owned());
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 251).collect();
    for quantize in [None, Some(BlockType::Q8_0), Some(BlockType::Q4_0)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let options = LoadOptions {
                dtype: Some(dtype),
                format: LoadFormat::Dummy,
                seed: 3,
                quantize,
                ..LoadOptions::default()
            };
            let feed = |parts: &[&[u32]]| {
                let mut rig = Rig::new(load(&source, &options).unwrap(), 32, 4);
                let mut seq = Seq::default();
                let rows = parts.iter().map(|part| rig.feed(&mut seq, part));
                rows.collect::<Vec<_>>().concat()
            };
            let (start, end) = tokens.split_at(17);
            let (middle, end) = end.split_at(1);
            let whole = feed(&[&tokens]);
            assert!(whole.iter().flatten().all(|x| x.is_finite()));
            assert!(
                whole == feed(&[start, middle, end]),
                "{quantize:?} {dtype:?}"
            );
            let (listed, inventory) = inspect(&source, &options).unwrap();
            let of_heads = inventory.entries.iter();
            let of_heads = of_heads.filter(|entry| entry.name.contains("kv_b_proj"));
            let loaded: Vec<&str> = of_heads.map(|entry| &*entry.loaded).collect();
            let want = quantize.map_or(dtype.as_str().to_owned(), |kind| kind.to_string());
            assert_eq!(loaded, vec![want; 4]);
            assert_eq!(
                listed.kv_shape().bytes_per_token(),
                4 * 80 * dtype.size_in_bytes()
            );
        }
    }
}

/// In FP8 with a scale for each tile, as DeepSeek-V3 is published.
#[test]
fn packed_products_of_heads_are_unpacked() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let fixture = fixture("deepseek_v3");
    let stored = fixture.stored();
    let mut config = read_json(fixture.folder.join("config.json"));
    write_config(folders[1].path(), &config);
    config["quantization_config"] = v3()["quantization_config"].clone();
    write_config(folders[0].path(), &config);
    let [mut packed, mut dense] = [stored.clone(), stored];
    let mut names: Vec<String> = packed.keys().cloned().collect();
    names.retain(|name| name.contains("kv_b_proj"));
    assert!(!names.is_empty());
    for name in &names {
        let small = packed[name].to_dtype(DType::F8E4M3).unwrap();
        let scale = Tensor::new(&[[0.75f32]], &Device::Cpu).unwrap();
        let values = small
            .to_dtype(DType::F32)
            .unwrap()
            .broadcast_mul(&scale)
            .unwrap();
        dense.insert(name.clone(), values);
        packed.insert(name.replace("weight", "weight_scale_inv"), scale);
        packed.insert(name.clone(), small);
    }
    let compute = |folder: &Path, tensors| {
        candle_core::safetensors::save(tensors, folder.join("model.safetensors")).unwrap();
        let options = LoadOptions::of(DType::F32);
        let source = ModelSource::Folder(folder.to_owned());
        // What it takes in memory is forecast.
        let (_, inventory) = inspect(&source, &options).unwrap();
        let loaded = inventory.entries.iter();
        assert!(loaded.map(|entry| &*entry.loaded).all(|form| form == "f32"));
        logits(load(&source, &options).unwrap(), &fixture.prompt)
    };
    let [of_packed, of_dense] = [(&folders[0], &packed), (&folders[1], &dense)]
        .map(|(folder, tensors)| compute(folder.path(), tensors));
    assert!(of_packed == of_dense);
}
