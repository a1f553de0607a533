//! What a class assumes where its configuration says nothing, and the bases of newer files.

use crate::common::refusals::{change, rows};
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

/// The class rotates layers without a window only if the configuration names none.
#[test]
fn layers_of_exaone4_rotate_beside_a_named_window_if_they_have_it() {
    let layers = |keys: Json| {
        let mut config = json!({
            "architectures": ["Exaone4ForCausalLM"], "head_dim": 64, "num_hidden_layers": 4,
            "max_position_embeddings": 32768
        });
        for (key, value) in keys.as_object().unwrap() {
            config[key] = value.clone();
        }
        let layers = read(config).spec.layers;
        let layers = layers.iter().map(|l| (l.window, l.rope.is_some()));
        layers.collect::<Vec<_>>()
    };
    let full = json!([
        "full_attention",
        "full_attention",
        "full_attention",
        "full_attention"
    ]);
    let all_full =
        |window: Json| layers(json!({ "sliding_window": window, "layer_types": full.clone() }));
    assert_eq!(all_full(json!(512)), [(None, false); 4]);
    assert_eq!(all_full(Json::Null), [(None, true); 4]);
    let slides = (Some(4096), true);
    assert_eq!(layers(json!({})), [slides, slides, slides, (None, false)]);
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

/// Every fourth layer, counted from the last, has neither a window nor a position embedding.
#[test]
fn muse_glimmer_has_the_numbers_of_its_class() {
    let config = json!({
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer", "image_token_id": 500,
        "out_hidden_size": 64, "projector_hidden_act": "gelu", "projector_hidden_size": 32, "video_token_id": 501,
        "vision_config": { "model_type": "muse_glimmer_vision", "hidden_size": 16 },
        "text_config": {
            "model_type": "muse_glimmer_text", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_activation": "silu", "attention_bias": false
        }
    });
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &config);
    let muse = ModelConfig::from_json(folder.path()).unwrap();
    let numbers = (muse.head_dim, muse.num_kv_heads, muse.rms_norm_eps);
    assert_eq!(numbers, (128, 2, 1e-5));
    let (full, sliding) = ((None, false), (Some(2048), true));
    let layers = muse.spec.layers.iter();
    let kinds: Vec<_> = layers.map(|l| (l.window, l.rope.is_some())).collect();
    assert_eq!(kinds, [sliding, full, sliding, sliding, sliding, full]);
    let scale = muse.spec.layers[0].attention_scale;
    assert!((scale - 3.87 / 128f32.sqrt()).abs() < 1e-6, "{scale}");
    let ends = (muse.spec.logit_scale, muse.spec.logit_soft_cap);
    assert_eq!(ends, (Some(0.196_116_13), Some(20.)));
    assert_eq!(muse.spec.output_norm.unwrap().eps, Some(1e-8));

    let table = r#"
        text_config.attention_bias = true | attention_bias true is not supported: only false is
        text_config.layer_rope_theta = [0, 1e4] | layer_rope_theta has 2 entries for 6 layers
        text_config.layer_rope_theta = [1e4, 0, 1e4, 5e5, 1e4, 0] | layer_rope_theta 500000.0 is not supported: only 0 and the rope_theta 10000 are
        text_config.post_norm_eps = -1 | post_norm_eps -1.0 is not supported: only a number from 0 to below 1 is
        text_config.hidden_activation = "tanh" | hidden_activation "tanh" is not supported: only "silu" is
    "#;
    for [asked, message] in rows::<2>(table) {
        let mut changed = config.clone();
        change(&mut changed, asked);
        assert_refused(&changed, message);
    }
}
