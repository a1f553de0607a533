//! Configurations as models are published with them.

use crate::common::refusals::{change, merge, rows};
use crate::common::tiny::write_config;
use foretoken::model::{MixerSpec, ModelConfig, RopeScaling, RopeSpec};
use serde_json::{Value as Json, json};

/// The configuration of a small model whose `config.json` has `change` besides the sizes.
pub fn read(change: Json) -> ModelConfig {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &with_sizes(&change));
    ModelConfig::from_json(folder.path()).unwrap()
}

/// A `config.json` that has `change` besides the sizes of a small model.
fn with_sizes(change: &Json) -> Json {
    let mut config = json!({
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 2, "use_cache": true,
        "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.3", "pad_token_id": 0
    });
    merge(&mut config, change);
    config
}

/// Asserts that `config` is refused with an error that contains `message`.
pub fn assert_refused(config: &Json, message: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), config);
    let error = ModelConfig::from_json(folder.path()).unwrap_err();
    assert!(error.to_string().contains(message), "{error}");
}

/// The same with each change of a table: a key and its value, and the message.
fn assert_changes_refused(config: &Json, table: &str) {
    for [asked, message] in rows::<2>(table) {
        let mut changed = config.clone();
        change(&mut changed, asked);
        assert_refused(&changed, message);
    }
}

/// The frequencies of the first layer with RoPE.
pub fn frequencies(config: &ModelConfig) -> Vec<f32> {
    config.ropes().next().unwrap().frequencies()
}

#[test]
fn phi4_mini_is_read() {
    let phi4_mini = read(json!({
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": false, "embd_pdrop": 0.0,
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false, "resid_pdrop": 0.0,
        "auto_map": { "AutoConfig": "configuration_phi3.Phi3Config" }, "hidden_act": "silu",
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
        "rope_scaling": { "type": "longrope", "short_factor": vec![1.0; 24], "long_factor": vec![2.0; 24] }
    }));
    let rope = phi4_mini.spec.layers[0].rope.clone().unwrap();
    let half = 1. / (2. * 10000f32.powf(2. / 48.));
    assert!(
        rope.width == 48 && rope.frequencies()[1] == half,
        "{rope:?}"
    );
    assert_eq!(phi4_mini.spec.layers[0].window, None);
}

#[test]
fn gemma2_is_read() {
    let gemma2 = read(json!({
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": false,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "sliding_window": 4096
    }));
    let [even, odd] = &gemma2.spec.layers[..2] else {
        panic!()
    };
    assert_eq!((even.window, odd.window), (Some(4096), None));
    assert_eq!((even.soft_cap, even.attention_scale), (Some(50.), 1. / 12.));
    assert!(gemma2.tie_word_embeddings && gemma2.head_dim == 256);
    assert_eq!(gemma2.spec.logit_soft_cap, Some(30.));
}

#[test]
fn gemma3_is_read() {
    let gemma3 = read(json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false,
        "attn_logit_softcapping": null, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 2
    }));
    let thetas = gemma3
        .ropes()
        .map(|rope| (rope.theta, rope.scaling.is_some()));
    let (local, global) = ((1e4, false), (1e6, true));
    assert_eq!(thetas.collect::<Vec<_>>(), [local, global, local, global]);
}

/// A window has half of its tokens on either side.
#[test]
fn embedding_gemma_is_read() {
    let gemma = read(json!({
        "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text",
        "attention_bias": false, "attn_logit_softcapping": null, "dtype": "float32", "eos_token_id": 1,
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 2048, "num_attention_heads": 3, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": null,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": true
    }));
    let layers = gemma.spec.layers.iter();
    assert!(layers.clone().all(|layer| layer.is_bidirectional));
    let windows: Vec<_> = layers.map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(257), Some(257), Some(257), None]);
}

#[test]
fn llama_embed_nemotron_is_read() {
    let nemotron = json!({
        "architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "attention_bias": false,
        "auto_map": { "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel" }, "hidden_act": "silu",
        "max_position_embeddings": 131072, "mlp_bias": false, "pooling": "avg", "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"
        }
    });
    assert!(read(nemotron.clone()).spec.is_bidirectional());
    let mut other = with_sizes(&nemotron);
    other["pooling"] = json!("last");
    assert_refused(&other, "pooling \"last\" is not supported: only \"avg\" is");
}

#[test]
fn attention_in_both_directions_needs_attention_to_all_tokens() {
    let config = with_sizes(&json!({
        "architectures": ["MistralForCausalLM"], "sliding_window": 16, "max_position_embeddings": 512,
        "is_causal": false
    }));
    assert_refused(&config, "is_causal false: attention in both directions");
}

#[test]
fn smollm3_is_read() {
    let smollm3 = read(json!({
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": false, "mlp_bias": false,
        "hidden_act": "silu", "layer_types": vec!["full_attention"; 4], "max_position_embeddings": 65536,
        "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null,
        "use_sliding_window": false
    }));
    assert!(smollm3.ropes().count() == 3 && smollm3.tie_word_embeddings);
}

#[test]
fn olmo3_is_read() {
    let olmo3 = read(json!({
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": false, "hidden_act": "silu",
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"
        }
    }));
    let scaled = olmo3.ropes().map(|rope| rope.scaling.is_some());
    assert_eq!(scaled.collect::<Vec<_>>(), [false, false, false, true]);
}

/// Its further factor undoes that of YaRN: DeepSeek's models have none.
#[test]
fn deepseek_r1_0528_qwen3_8b_is_read() {
    let qwen3 = read(json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 131072, "max_window_layers": 36, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "sliding_window": null, "use_sliding_window": false,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419
        }
    }));
    let rope = qwen3.ropes().next().unwrap();
    let Some(RopeScaling::Yarn(yarn)) = &rope.scaling else {
        panic!("{rope:?}");
    };
    let factor = yarn.attention_factor;
    assert!((factor - 1.).abs() < 1e-6, "{factor}");
}

#[test]
fn exaone_3_5_is_read() {
    let exaone = read(json!({
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "activation_function": "silu",
        "auto_map": { "AutoConfig": "configuration_exaone.ExaoneConfig" }, "embed_dropout": 0.0, "eos_token_id": 361,
        "head_dim": 64, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 32768, "num_layers": 4,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"
        },
        "rope_theta": 1000000, "tie_word_embeddings": false
    }));
    let rope = exaone.ropes().next().unwrap();
    assert!(matches!(rope.scaling, Some(RopeScaling::Llama3(_))));
    assert_eq!((rope.theta, exaone.rms_norm_eps), (1e6, 1e-5));
}

/// MiniCPM4-8B.
#[test]
fn minicpm_4_is_read() {
    let minicpm = read(json!({
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "dim_model_base": 64, "hidden_act": "silu",
        "eos_token_id": [2, 73], "max_position_embeddings": 32768, "mup_denominator": 32, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "rope_type": "longrope", "long_factor": vec![2.0; 32], "short_factor": vec![1.0; 32],
            "original_max_position_embeddings": 32768
        },
        "scale_depth": 1.4, "scale_emb": 12, "tie_word_embeddings": false
    }));
    let layer = &minicpm.spec.layers[0];
    assert_eq!((layer.residual_scale, layer.attention_scale), (0.7, 0.125));
    let ends = (minicpm.spec.embedding_scale, minicpm.spec.logit_scale);
    assert_eq!(ends, (Some(12.), Some(0.25)));
    assert_eq!(frequencies(&minicpm)[0], 1.);
    let wrong = json!({
        "architectures": ["MiniCPMForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "dim_model_base": 0
    });
    assert_refused(
        &wrong,
        "dim_model_base 0.0 is not supported: it must not be 0",
    );
}

#[test]
fn minimax_m2_is_read() {
    let config = json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1, 1, 1, 1],
        "eos_token_id": null, "head_dim": 128, "hidden_act": "silu", "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_experts_per_tok": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": false, "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"], "weight_block_size": [128, 128]
        },
        "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid", "sliding_window": null, "tie_word_embeddings": false, "use_mtp": true,
        "use_qk_norm": true, "use_routing_bias": true
    });
    let m2 = read(config.clone());
    let rope = m2.ropes().next().unwrap();
    assert_eq!((rope.width, rope.theta), (64, 5e6));
    let experts = m2.spec.layers[3].experts().unwrap();
    let sizes = (experts.count, experts.per_token, experts.width);
    assert_eq!(sizes, (256, 8, 512));
    assert!(experts.is_normalized && experts.correction.is_some() && m2.packed.is_some());
    assert_eq!(m2.spec.unread.len(), 3);
    let linear = "attn_type_list = [1, 0, 1, 1] | attn_type_list [1,0,1,1] is not supported";
    assert_changes_refused(&with_sizes(&config), linear);
}

#[test]
fn dots_llm1_is_read() {
    let config = json!({
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": false, "eos_token_id": null,
        "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 62,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2,
        "norm_topk_prob": true, "num_experts_per_tok": 6, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
        "sliding_window": null, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
        "use_sliding_window": false
    });
    let dots = read(config.clone());
    let [dense, sparse] = &dots.spec.layers[..2] else {
        panic!()
    };
    let experts = sparse.experts().unwrap();
    let sizes = (experts.count, experts.per_token, experts.width);
    assert_eq!(sizes, (128, 6, 1408));
    assert_eq!(experts.shared.unwrap().width, 2 * 1408);
    assert!(experts.is_normalized && experts.groups.is_none() && experts.scale == 2.5);
    assert!(dense.experts().is_none() && dense.window.is_none());
    // The class gives the layers after these a window, whatever use_sliding_window says.
    let mut windows = config.clone();
    windows["sliding_window"] = json!(4096);
    windows["max_window_layers"] = json!(3);
    let layers = read(windows).spec.layers;
    let windows: Vec<_> = layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [None, None, None, Some(4096)]);
    let softmax = r#"scoring_func = "softmax" | scoring_func "softmax" is not supported"#;
    assert_changes_refused(&with_sizes(&config), softmax);
}

#[test]
fn ling_mini_2_is_read() {
    let config = json!({
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "embedding_dropout": 0.0,
        "auto_map": { "AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config" }, "eos_token_id": null,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768,
        "max_window_layers": 20, "moe_intermediate_size": 512, "moe_router_enable_expert_bias": true,
        "moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_topk_prob": true, "num_experts": 256,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_dropout": 0.0,
        "output_router_logits": false, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 600000, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
        "tie_word_embeddings": false, "topk_group": 4, "use_bias": false, "use_qk_norm": true, "use_qkv_bias": false,
        "use_rmsnorm": true
    });
    let ling = read(config.clone());
    let rope = ling.ropes().next().unwrap();
    assert_eq!((rope.width, rope.theta), (64, 6e5));
    let experts = ling.spec.layers[1].experts().unwrap();
    let groups = experts.groups.unwrap();
    assert_eq!((groups.count, groups.per_token, groups.best), (8, 4, 2));
    assert!(ling.spec.layers[0].experts().is_none() && experts.is_normalized);
    assert_eq!(ling.spec.unread.len(), 1);
    let changes = r#"
        score_function = "softmax" | only "sigmoid" is
        norm_head = true | only false is
        moe_shared_expert_intermediate_size = 1024 | only 512 is
    "#;
    assert_changes_refused(&with_sizes(&config), changes);
}

#[test]
fn command_r7b_is_read() {
    let command_r7b = read(json!({
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": false, "head_dim": 64,
        "cache_implementation": "hybrid", "hidden_act": "silu", "layer_norm_eps": 1e-5, "layer_switch": 4,
        "logit_scale": 0.25, "max_position_embeddings": 132096, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": null, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": true,
        "use_gated_activation": true, "use_parallel_block": true, "use_parallel_embedding": false, "use_qk_norm": false
    }));
    assert!(command_r7b.ropes().count() == 3 && command_r7b.rms_norm_eps == 1e-5);
}

#[test]
fn starcoder2_is_read() {
    let starcoder2 = read(json!({
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu",
        "attention_softmax_in_fp32": true, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true, "sliding_window": 4096, "use_bias": true
    }));
    assert!(starcoder2.tie_word_embeddings && starcoder2.spec.layers[0].window == Some(4096));
}

#[test]
fn granite4_is_read() {
    let granite4 = json!({
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": false,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup",
        "layer_types": vec!["attention"; 4], "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 131072,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_local_experts": 0,
        "output_router_logits": false, "position_embedding_type": "rope", "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 640, "tie_word_embeddings": true
    });
    let read4 = read(granite4.clone());
    assert!(read4.intermediate_size == 640 && read4.ropes().count() == 4);
    let mut plain = granite4.clone();
    plain["position_embedding_type"] = json!("nope");
    assert_eq!(read(plain).ropes().count(), 0);
    // The name of older files.
    let mut older = granite4.clone();
    older["layers_block_type"] = older["layer_types"].take();
    older.as_object_mut().unwrap().remove("layer_types");
    assert_eq!(read(older).ropes().count(), 4);
}

#[test]
fn lfm2_is_read() {
    let lfm2 = json!({
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 256,
        "block_ff_dim": 768, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true,
        "conv_L_cache": 3, "conv_bias": false, "conv_dim": 256, "conv_dim_out": 256, "conv_use_xavier_init": true,
        "full_attn_idxs": [2], "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "num_heads": 4, "rope_theta": 1000000.0, "use_pos_enc": true
    });
    let read_lfm2 = read(lfm2.clone());
    let convs = read_lfm2.spec.layers.iter().map(|layer| match layer.mixer {
        MixerSpec::ShortConv(conv) => Some(conv.taps),
        _ => None,
    });
    assert_eq!(convs.collect::<Vec<_>>(), [Some(3), Some(3), None, Some(3)]);
    // Two thirds of 768.
    assert!(read_lfm2.intermediate_size == 512 && read_lfm2.tie_word_embeddings);
    let changes = r#"
        conv_L_cache = 17 | a convolution over 17 tokens
        layer_types = ["conv"] | 1 entries for 4 layers
        layer_types = ["conv", "conv", "conv", "mamba"] | only conv and full_attention are
    "#;
    assert_changes_refused(&with_sizes(&lfm2), changes);
}

#[test]
fn qwen3_5_is_read() {
    let qwen = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 500, "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
            "eos_token_id": 5, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 256,
            "initializer_range": 0.02, "intermediate_size": 768,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 4,
            "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "use_cache": true,
            "vocab_size": 512, "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default"
            }
        },
        "tie_word_embeddings": true, "transformers_version": "4.57.0.dev0", "video_token_id": 501,
        "vision_config": {"depth": 12}, "vision_end_token_id": 502, "vision_start_token_id": 503
    });
    let read_qwen = read(qwen.clone());
    let layers = read_qwen.spec.layers.iter();
    let heads = layers.map(|layer| match layer.mixer {
        MixerSpec::Delta(delta) => Some(delta.shape.value_heads),
        _ => None,
    });
    assert_eq!(heads.collect::<Vec<_>>(), [Some(6), Some(6), Some(6), None]);
    assert!(read_qwen.ropes().all(|rope| rope.width == 64) && read_qwen.spec.is_recurrent());
    let changes = r#"
        text_config.attn_output_gate = false | attn_output_gate
        text_config.linear_num_value_heads = 5 | linear_num_value_heads 5
        text_config.linear_num_key_heads = 0 | linear_num_key_heads 0
        text_config.linear_key_head_dim = 1048576 | linear_key_head_dim 1048576
        text_config.layer_types = ["full_attention"] | 1 entries for 4 layers
    "#;
    assert_changes_refused(&qwen, changes);
}

#[test]
fn hunyuan_is_read() {
    let hunyuan = read(json!({
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "add_classification_head": false,
        "attention_bias": false, "attention_head_dim": 64, "cla_share_factor": 2, "class_num": 0, "dense_list": [256, 0],
        "eod_token_id": 3, "head_dim": 64, "hidden_act": "silu", "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4,
        "mask_init_id": 12, "max_position_embeddings": 32768, "mlp_bias": false, "norm_type": "rms",
        "num_experts": 1, "num_shared_expert": 1, "org_vocab_size": 512, "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"
        },
        "tie_word_embeddings": true, "text_end_id": 7, "text_start_id": 6, "use_cla": false, "use_qk_norm": true,
        "use_rotary_pos_emb": true, "xdrope_section": null
    }));
    let rope = hunyuan.ropes().next().unwrap();
    let last = rope.frequencies()[31];
    let plain = RopeSpec::plain(64, 1e4).frequencies()[31];
    assert!((last * 1000. / plain - 1.).abs() < 1e-3, "{last} {plain}");
}

#[test]
fn hunyuan_a13b_is_read() {
    let config = json!({
        "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "add_classification_head": false,
        "attention_bias": false, "attention_head_dim": 64, "cla_share_factor": 2, "dense_list": [256, 0],
        "group_limited_greedy": false, "hidden_act": "silu", "kv_lora_rank": null, "mlp_bias": false,
        "max_position_embeddings": 32768, "moe_drop_tokens": false, "moe_intermediate_size": [512, 512, 512, 512],
        "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": false, "moe_topk": [8, 8, 8, 8],
        "norm_topk_prob": true, "norm_type": "rms", "num_experts": 64, "num_shared_expert": [1, 1, 1, 1],
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": true,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"
        },
        "use_cla": false, "use_mixed_mlp_moe": true, "use_mla": false, "use_qk_norm": true, "use_rotary_pos_emb": true,
        "anyres_pooling_size": 2, "num_media_embeds": 257, "video_start_id": 9, "vit_norm_type": "fused"
    });
    let hunyuan = read(config.clone());
    let experts = hunyuan.spec.layers[3].experts().unwrap();
    let sizes = (experts.count, experts.per_token, experts.width);
    assert_eq!(sizes, (64, 8, 512));
    assert!(experts.is_normalized && experts.shared.unwrap().width == 512);
    let changes = "
        moe_topk = [8, 8, 8, 4] | only one number for all layers is
        use_mixed_mlp_moe = false | only true is
        routed_scaling_factor = 2.5 | only 1 is
    ";
    assert_changes_refused(&with_sizes(&config), changes);
}

#[test]
fn apertus_is_read_and_its_scaling_is_the_class_default() {
    let apertus = read(json!({
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "attention_bias": false,
        "hidden_act": "xielu", "max_position_embeddings": 65536, "mlp_bias": false, "post_norm": false, "qk_norm": true,
        "rms_norm_eps": 1e-5, "rope_theta": 12000000, "tie_word_embeddings": false,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"
        }
    }));
    assert!(!apertus.tie_word_embeddings);
    let scaled = frequencies(&apertus);

    // What a class assumes if the file does not say it: of Apertus the whole scaling.
    let apertus_of = |theta: Json| {
        read(json!({
            "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "max_position_embeddings": 65536,
            "rope_theta": theta
        }))
    };
    let bare = apertus_of(Json::Null);
    assert_eq!(frequencies(&bare), scaled);
    assert_eq!(bare.rms_norm_eps, 1e-5);
    // The base of the file comes before that of the class. The second frequency is too high for the scaling.
    let (own, plain) = (
        frequencies(&apertus_of(json!(5e5))),
        RopeSpec::plain(64, 5e5).frequencies(),
    );
    assert_eq!(own[1], plain[1]);
    assert_ne!(own.last(), plain.last());
}
