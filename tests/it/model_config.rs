//! What is read of `config.json`: the keys of published files, windows, and errors in one line.

use crate::common::assert_has;
use crate::common::refusals::{assert_refused, change, merge, rows};
use crate::common::tiny::*;
use candle_core::DType;
use foretoken::model::{KvSource, RopeScaling};
use serde_json::{Value as Json, json};
use std::path::Path;

/// transformers 5 writes the kind of RoPE under its new and its old name.
#[test]
fn rope_type_may_have_both_names() {
    let folder = tempfile::tempdir().unwrap();
    let read = |new: &str, old: &str| {
        let mut config = llama_config(16);
        config["rope_scaling"]["rope_type"] = json!(new);
        config["rope_scaling"]["type"] = json!(old);
        write_config(folder.path(), &config);
        foretoken::model::ModelConfig::from_json(folder.path())
    };
    let config = read("llama3", "llama3").unwrap();
    let rope = config.plain_rope().unwrap();
    let Some(RopeScaling::Llama3(scaling)) = &rope.scaling else {
        panic!("{rope:?}");
    };
    assert_eq!(scaling.factor, 8.0);
    let error = read("llama3", "linear").unwrap_err().to_string();
    assert!(
        error.contains("config.json: rope_type 'llama3' and type 'linear' must be the same"),
        "{error}"
    );
}

#[test]
fn the_ready_shapes_are_those_of_llama_3_2() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    for (name, millions) in [("llama-3.2-1b", 1236), ("llama-3.2-3b", 3213)] {
        let c = foretoken::model::ModelConfig::from_json(&root.join(name)).unwrap();
        let attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim;
        let layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size;
        let all = c.num_layers() * layer + c.vocab_size * c.hidden_size + c.hidden_size;
        assert_eq!(
            all.div_ceil(1_000_000),
            millions,
            "{name}: {all} parameters"
        );
        assert_eq!(c.eos_token_ids, [128_001, 128_008, 128_009]);
        assert!(c.tie_word_embeddings);
        assert!(c.plain_rope().unwrap().scaling.is_some());
    }
}

/// Keys beside those of a small Llama, and what errors say of them.
const WRONG_KEYS: &str = r#"
{"architectures": ["MambaForCausalLM"]} | only LlamaForCausalLM, 
{"num_key_value_heads": 3} | 16 attention heads are not divisible by 3
{"num_attention_heads": 0} | num_attention_heads is 0
{"hidden_act": "relu"} | hidden_act "relu"
{"rope_scaling": {"type": "mrope", "factor": 2.0}} | 'mrope' is not supported
{"rope_scaling": {"type": "yarn"}} | lacks factor
{"rope_scaling": {"type": "linear", "factor": 0.0}} | factor 0 must be
{"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}} | 1 factors for 8 pairs
{"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": -1.0}} | llama_4_scaling_beta -1
{"architectures": ["Gemma2ForCausalLM"], "rope_scaling": null, "hidden_act": null, "final_logit_softcapping": 0.0} | final_logit_softcapping 0 must be
{"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]} | no_rope_layers has 1 entries for 2
{"architectures": ["GraniteForCausalLM"], "logits_scaling": -1.0} | the scale of the logits -1 must be
{"rope_scaling": {"rope_type": "llama3"}} | lacks factor
{"rope_scaling": {"factor": 2.0}} | lacks rope_type
{"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}} | 5 and 6
{"vocab_size": "many"} | vocab_size "many"
{"vocab_size": null} | vocab_size is missing
{"eos_token_id": -1} | eos_token_id -1
{"never_heard_of": "it"} | never_heard_of "it"
{"scale_emb": 12} | scale_emb 12
{"rope_parameters": {"rope_type": "default", "new_factor": 0.5}} | new_factor 0.5
{"layer_types": ["full_attention"]} | 1 entries for 2
{"quantization_config": {"quant_method": "quip"}} | quantization_config
{"partial_rotary_factor": 0.5} | partial_rotary_factor 0.5
{"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}} | partial_rotary_factor 0.5
{"rope_parameters": {"full_attention": {"rope_type": "default"}}} | must have the same RoPE
{"sliding_window": 128} | sliding_window 128
{"sliding_window": 128, "use_sliding_window": true} | sliding_window 128
{"use_sliding_window": true} | sliding_window null
{"layer_types": ["full_attention", "sliding_attention"]} | layer_types "sliding_attention"
{"no_rope_layers": [1, 0]} | no_rope_layers [1,0]
{"num_local_experts": 8} | num_local_experts 8
{"embedding_multiplier": 12.0} | embedding_multiplier 12.0
{"attention_multiplier": 0.015625} | attention_multiplier 0.015625
{"residual_multiplier": 0.22} | residual_multiplier 0.22
{"logits_scaling": 8.0} | logits_scaling 8.0
{"final_logit_softcapping": 30.0} | final_logit_softcapping
{"rope_theta": 0.0} | rope_theta 0 must be
{"rope_theta": -1.0} | rope_theta -1 must be
{"rope_theta": 1e300} | rope_theta inf must be
{"rope_theta": 1e-44} | rope_theta 1e-44 makes angles infinite
{"rope_scaling": {"rope_type": "llama3", "factor": 1e-38, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}} | makes angles infinite
{"rms_norm_eps": -1e-5} | rms_norm_eps -0.00001
{"rope_scaling": {"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}} | rope_scaling: factor 0
{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}} | high_freq_factor 4 must be more
{"head_dim": 15} | head_dim 15 is odd
{"head_dim": null, "hidden_size": 250} | hidden_size 250 is not divisible
{"intermediate_size": 1099511627776} | intermediate_size 1099511627776 is over the limit
"#;

#[test]
fn errors_in_a_config_are_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let read = |change: Json| {
        let mut config = llama_config(16);
        merge(&mut config, &change);
        write_config(folder.path(), &config);
        open(folder.path()).map(drop).inspect_err(|error| {
            assert!(matches!(error, foretoken::error::Error::Setup(_)));
            assert!(error.to_string().contains("config.json"), "{error}");
        })
    };
    let many = vec![1.0; 2049];
    let long = json!({ "type": "longrope", "short_factor": many, "long_factor": many });
    let long = json!({ "rope_scaling": long });
    assert_refused(&format!("{long} | _factor has 2049 values"), read);
    assert_refused(WRONG_KEYS, read);
}

/// Keys whose values ask for nothing that the decoder does not do are accepted.
#[test]
fn harmless_properties_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path(), &tensors(16, DType::F32));
    let mut config = llama_config(16);
    let harmless = json!({
        "_name_or_path": "a/b", "transformers.js_config": { "dtype": "q4" },
        "transformers_version": "4.51.0", "rope_interleaved": false, "is_llama_config": true,
        "use_cache": true, "initializer_range": 0.02, "attention_dropout": 0.1,
        "max_window_layers": 28, "task_specific_params": null, "rope_theta": 10000.0,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0 }, "rope_scaling": null,
        "pad_token_id": -1, "unsloth_version": "2024.9", "activation": "swiglu", "unknown": false,
        "attention_bias": false, "mlp_bias": false, "quantization_config": null,
        "partial_rotary_factor": 1.0, "sliding_window": null, "logits_scaling": 1,
        "attention_multiplier": 0.25, "num_local_experts": 0, "pretraining_tp": 1,
        "layer_types": ["full_attention", "full_attention"], "no_rope_layers": [1, 1]
    });
    merge(&mut config, &harmless);
    for window in [json!(null), json!(256), json!(4096)] {
        config["sliding_window"] = window;
        write_config(folder.path(), &config);
        open(folder.path()).unwrap();
    }
    config["sliding_window"] = json!(128);
    config["use_sliding_window"] = json!(false);
    write_config(folder.path(), &config);
    open(folder.path()).unwrap();
}

/// Classes for images and texts: the keys of published files, and what is refused of them.
#[test]
fn the_texts_of_multimodal_configs_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: &Json| {
        write_config(folder.path(), config);
        foretoken::model::ModelConfig::from_json(folder.path())
    };
    let gemma3 = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024
        },
        "vision_config": { "hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": false }
    });
    let config = read(&gemma3).unwrap();
    let heads = (config.num_heads, config.num_kv_heads, config.head_dim);
    assert_eq!((heads, config.vocab_size), ((8, 4, 256), 262_208));
    assert_eq!(config.eos_token_ids, [1, 106]);
    assert!(config.tie_word_embeddings && config.max_position_embeddings == 131_072);
    let windows = config.spec.layers.iter().filter_map(|layer| layer.window);
    assert_eq!(windows.collect::<Vec<_>>(), [1024; 29]);

    let sizes = json!({
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6
    });
    // Flat, with the window that is not used.
    let mut qwen = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 43,
        "eos_token_id": 45, "vision_start_token_id": 52, "vision_end_token_id": 53, "vision_token_id": 54,
        "image_token_id": 55, "video_token_id": 56, "hidden_act": "silu", "initializer_range": 0.02,
        "max_window_layers": 70, "model_type": "qwen2_5_vl", "sliding_window": 32768, "tie_word_embeddings": true,
        "rope_theta": 1000000.0, "use_cache": true, "use_sliding_window": false,
        "vision_config": { "depth": 32, "model_type": "qwen2_5_vl" },
        "rope_scaling": { "type": "mrope", "mrope_section": [16, 24, 24] }
    });
    merge(&mut qwen, &sizes);
    let config = read(&qwen).unwrap();
    let layer = &config.spec.layers[0];
    assert!(layer.qkv_bias && layer.window.is_none());
    assert_eq!(layer.rope.as_ref().unwrap().scaling, None);

    let mut mistral = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "vision_config": { "model_type": "pixtral" }, "text_config": sizes
    });
    mistral["text_config"]["model_type"] = json!("mistral");
    mistral["text_config"]["rope_theta"] = json!(1e9);
    assert_eq!(read(&mistral).unwrap().architecture, "mistral");
    for (key, value, why) in [
        ("text_config", json!(4), "text_config 4"),
        (
            "quantization_config",
            json!({ "quant_method": "quip" }),
            "quantization_config",
        ),
        ("audio_config", json!({ "depth": 2 }), "audio_config"),
    ] {
        let mut other = mistral.clone();
        other[key] = value;
        let error = read(&other).unwrap_err().to_string();
        assert!(error.contains(why) && error.lines().count() == 1, "{error}");
    }
    mistral["text_config"]["model_type"] = json!("mistral4");
    let error = read(&mistral).unwrap_err().to_string();
    assert_has(&error, &["architecture 'mistral4' is not supported"]);
}

#[test]
fn windows_are_of_the_layers_that_the_config_names() {
    let folder = tempfile::tempdir().unwrap();
    let windows = |change: Json| -> Vec<Option<usize>> {
        let mut config = llama_config(16);
        config["architectures"] = json!(["Qwen2ForCausalLM"]);
        config["sliding_window"] = json!(64);
        config["max_window_layers"] = json!(1);
        config["use_sliding_window"] = json!(true);
        merge(&mut config, &change);
        write_config(folder.path(), &config);
        let config = foretoken::model::ModelConfig::from_json(folder.path()).unwrap();
        config
            .spec
            .layers
            .iter()
            .map(|layer| layer.window)
            .collect()
    };
    assert_eq!(windows(json!({})), [None, Some(64)]);
    assert_eq!(windows(json!({ "max_window_layers": null })), [None, None]);
    let kinds = json!(["sliding_attention", "full_attention"]);
    assert_eq!(windows(json!({ "layer_types": kinds })), [Some(64), None]);
    assert_eq!(windows(json!({ "use_sliding_window": false })), [None; 2]);
    // It hides nothing.
    assert_eq!(windows(json!({ "sliding_window": 256 })), [None; 2]);
}

/// Gemma 4: the keys of published files, and what is refused of them.
#[test]
fn layers_of_gemma_4_have_heads_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = |sliding: usize, times: usize| -> Vec<&str> {
        let kinds = [vec!["sliding_attention"; sliding], vec!["full_attention"]].concat();
        kinds.repeat(times)
    };
    let mut keys: Json = serde_json::from_str(
        r#"{
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": true,
        "audio_config": { "model_type": "gemma4_audio" }, "audio_token_id": 258881, "boa_token_id": 256000,
        "boi_token_id": 255999, "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106],
        "image_token_id": 258880, "video_token_id": 258884, "vision_config": { "model_type": "gemma4_vision" },
        "vision_soft_tokens_per_image": 280, "text_config": {
            "attention_bias": false, "attention_k_eq_v": false, "enable_moe_block": false,
            "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144, "max_position_embeddings": 131072,
            "model_type": "gemma4_text", "num_attention_heads": 8, "num_experts": null,
            "num_global_key_value_heads": null, "num_hidden_layers": 35, "num_key_value_heads": 1,
            "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6, "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
                },
                "sliding_attention": { "rope_theta": 10000.0, "rope_type": "default" }
            }, "sliding_window": 512, "top_k_experts": null, "use_bidirectional_attention": null,
            "use_double_wide_mlp": true, "vocab_size": 262144, "vocab_size_per_layer_input": 262144
        }
    }"#,
    )
    .unwrap();
    keys["text_config"]["layer_types"] = json!(kinds(4, 7));
    let read = |keys: &Json| {
        write_config(folder.path(), keys);
        foretoken::model::ModelConfig::from_json(folder.path())
    };
    let small = read(&keys).unwrap();
    let layers = &small.spec.layers;
    let shared = |i: usize| (layers[i].kv, layers[i].mlp_width);
    assert_eq!(shared(14), (KvSource::Own, None));
    assert_eq!(shared(33), (KvSource::Layer(13), Some(12288)));
    assert_eq!(shared(34), (KvSource::Layer(14), Some(12288)));
    assert_eq!(small.spec.layer_input_width, Some(256));
    // 12 layers with heads of 256 values, and 3 of 512.
    let bytes = small.kv_shape(DType::BF16).bytes_per_token();
    assert_eq!(bytes, 2 * 2 * (12 * 256 + 3 * 512));
    let rotated = |config: &foretoken::model::ModelConfig| {
        let rope = config.spec.layers[4].rope.as_ref().unwrap();
        let rotated = rope.frequencies().iter().filter(|&&f| f > 0.).count();
        (rope.width, rotated)
    };
    assert_eq!(rotated(&small), (512, 64));
    // As the class has it.
    let mut without = keys.clone();
    without["text_config"]["rope_parameters"] = Json::Null;
    assert_eq!(rotated(&read(&without).unwrap()), (512, 64));
    // The 26B-A4B.
    let mut large = keys.clone();
    for (key, value) in [
        ("enable_moe_block", json!(true)),
        ("hidden_size_per_layer_input", json!(0)),
        ("intermediate_size", json!(2112)),
        ("moe_intermediate_size", json!(704)),
        ("num_experts", json!(128)),
        ("num_kv_shared_layers", json!(0)),
        ("top_k_experts", json!(8)),
        ("use_double_wide_mlp", json!(false)),
    ] {
        large["text_config"][key] = value;
    }
    let experts = *read(&large).unwrap().spec.layers[34].experts().unwrap();
    let sizes = (experts.count, experts.per_token, experts.width);
    assert_eq!(sizes, (128, 8, 704));
    assert_eq!(experts.shared.map(|shared| shared.width), Some(2112));
    assert!(experts.has_norms && experts.is_normalized);

    let refused = r#"
        enable_moe_block = true | moe_intermediate_size is missing
        use_bidirectional_attention = "all" | use_bidirectional_attention "all"
        num_kv_shared_layers = 31 | num_kv_shared_layers 31
        vocab_size_per_layer_input = 1000 | vocab_size_per_layer_input 1000
        global_head_dim = 511 | head_dim 511 is odd
        per_layer_config = {"4": {"head_dim": 512, "window": 3}} | window 3
    "#;
    for [asked, why] in rows::<2>(refused) {
        let mut wrong = keys.clone();
        change(&mut wrong["text_config"], asked);
        let error = read(&wrong).unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    }

    for (key, value) in [
        ("attention_k_eq_v", json!(true)),
        ("hidden_size_per_layer_input", json!(0)),
        ("layer_types", json!(kinds(5, 10))),
        ("num_attention_heads", json!(32)),
        ("num_global_key_value_heads", json!(4)),
        ("num_hidden_layers", json!(60)),
        ("num_key_value_heads", json!(16)),
        ("num_kv_shared_layers", json!(0)),
        ("use_bidirectional_attention", json!("vision")),
        ("use_double_wide_mlp", json!(false)),
    ] {
        keys["text_config"][key] = value;
    }
    let large = read(&keys).unwrap();
    assert_eq!(large.spec.layers[4].kv, KvSource::Own);
    assert_eq!(large.spec.layers[5].kv, KvSource::Keys);
    assert_eq!(large.spec.layer_input_width, None);
    let bytes = large.kv_shape(DType::BF16).bytes_per_token();
    assert_eq!(bytes, 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512));
}
