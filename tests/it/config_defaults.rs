//! What a class assumes where its configuration says nothing, and the bases of newer files.

use crate::common::tiny::write_config;
use crate::published_configs::{assert_refused, frequencies, read};
use foretoken::model::{ModelConfig, RopeSpec};
use serde_json::{Value as Json, json};

#[test]
fn the_class_says_what_a_file_omits() {
    let cases = [
        ("CohereForCausalLM", 5e5, 1e-5),
        ("Cohere2ForCausalLM", 1e4, 1e-5),
        ("Ernie4_5ForCausalLM", 5e5, 1e-5),
        ("Olmo2ForCausalLM", 1e4, 1e-5),
        ("Exaone4ForCausalLM", 1e4, 1e-5),
        ("Phi3ForCausalLM", 1e4, 1e-5),
        ("MistralForCausalLM", 1e4, 1e-6),
        ("SmolLM3ForCausalLM", 2e6, 1e-6),
        ("SeedOssForCausalLM", 1e4, 1e-6),
    ];
    for (class, theta, eps) in cases {
        let bare = read(json!({ "architectures": [class], "head_dim": 64 }));
        let plain = RopeSpec::plain(64, theta);
        assert_eq!(frequencies(&bare), plain.frequencies(), "{class}");
        assert_eq!(bare.rms_norm_eps, eps, "{class}");
    }
}

/// Null says that there is none.
#[test]
fn mistral_has_a_window_and_eight_heads_of_keys_by_default() {
    let folder = tempfile::tempdir().unwrap();
    let layers = |class: &str, window: Option<Json>| {
        let mut config = json!({
            "architectures": [class], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 16, "max_position_embeddings": 32768
        });
        if let Some(window) = window {
            config["sliding_window"] = window;
        }
        write_config(folder.path(), &config);
        let config = ModelConfig::from_json(folder.path()).unwrap();
        let windows: Vec<_> = config.spec.layers.iter().map(|l| l.window).collect();
        (windows, config.num_kv_heads)
    };
    for class in ["MistralForCausalLM", "MinistralForCausalLM"] {
        assert_eq!(layers(class, None), (vec![Some(4096); 2], 8), "{class}");
        let none = layers(class, Some(Json::Null));
        assert_eq!(none, (vec![None; 2], 8), "{class}");
        let own = layers(class, Some(json!(512)));
        assert_eq!(own, (vec![Some(512); 2], 8), "{class}");
    }
    for class in ["Ministral3ForCausalLM", "MixtralForCausalLM"] {
        assert_eq!(layers(class, None), (vec![None; 2], 8), "{class}");
    }
}

#[test]
fn ministral3_scales_queries_by_default() {
    let ministral3 = read(json!({ "architectures": ["Ministral3ForCausalLM"], "head_dim": 64 }));
    let rope = ministral3.ropes().next().unwrap();
    assert_eq!(rope.query_scaling.map(|scaling| scaling.beta), Some(0.1));
    assert_ne!(rope.frequencies(), RopeSpec::plain(64, 1e6).frequencies());
}

/// Of two position embeddings, it scales that of layers without a window.
#[test]
fn a_base_in_rope_scaling_is_read_where_there_are_two() {
    let mut config = json!({
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 6, "head_dim": 64,
        "rope_scaling": { "rope_type": "linear", "factor": 8.0, "rope_theta": 5e5 }
    });
    let gemma3 = read(config.clone());
    let theta = |layer: usize| gemma3.spec.layers[layer].rope.as_ref().unwrap().theta;
    assert_eq!((theta(0), theta(5)), (1e4, 5e5));
    config["rope_theta"] = json!(1e6);
    assert_refused(&config, "rope_theta is both 1000000 and 500000");
    config["rope_scaling"] =
        json!({ "rope_type": "yarn", "factor": 8.0, "llama_4_scaling_beta": 0.5 });
    assert_refused(&config, "llama_4_scaling_beta 0.5 is not supported");
}

#[test]
fn the_base_of_newer_files_is_read() {
    // A base in the place of newer files is that of the model.
    let cohere = read(json!({
        "architectures": ["CohereForCausalLM"], "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}
    }));
    let plain = RopeSpec::plain(64, 7e5);
    assert_eq!(frequencies(&cohere), plain.frequencies());
}
