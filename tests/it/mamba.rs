//! Models with Mamba 2 layers: published configurations, random and quantized weights.

use crate::architectures::fixture;
use crate::common::refusals::{assert_refused, merge};
use crate::common::rig::{Rig, Seq};
use crate::common::tiny::dummy;
use foretoken::kernels::quant::BlockType;
use foretoken::model::{
    LoadOptions, MambaSpec, MixerSpec, MlpSpec, ModelConfig, ModelSource, inspect_mtp, load,
};
use serde_json::{Value as Json, json};
use std::path::Path;

/// Reads a configuration as Python writes it: with infinite numbers.
fn read(folder: &Path, config: &Json) -> Result<ModelConfig, String> {
    let text = config.to_string().replace("\"inf\"", "Infinity");
    std::fs::write(folder.join("config.json"), text).unwrap();
    ModelConfig::from_json(folder).map_err(|e| e.to_string())
}

fn with(config: &Json, change: Json) -> Json {
    let mut config = config.clone();
    merge(&mut config, &change);
    config
}

fn mambas(config: &ModelConfig) -> Vec<MambaSpec> {
    let layers = config.spec.layers.iter();
    let mambas = layers.filter_map(|layer| match layer.mixer {
        MixerSpec::Mamba(mamba) => Some(mamba),
        _ => None,
    });
    mambas.collect()
}

/// Granite-4.0-H-tiny.
fn granite() -> Json {
    let kinds = (0..40).map(|i| if i % 10 == 5 { "attention" } else { "mamba" });
    let text = r#"{
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "initializer_range": 0.1,
        "intermediate_size": 512, "logits_scaling": 6,
        "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": false,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
        "num_local_experts": 64, "output_router_logits": false, "pad_token_id": 100256,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": null,
        "rope_theta": 10000, "router_aux_loss_coef": 0.0, "shared_intermediate_size": 1024,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": true,
        "vocab_size": 100352
    }"#;
    let config = serde_json::from_str(text).unwrap();
    with(&config, json!({ "layer_types": kinds.collect::<Vec<_>>() }))
}

#[test]
fn granites_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let read = |change: Json| read(folder.path(), &with(&granite(), change));
    let tiny = read(json!({})).unwrap();
    let found = mambas(&tiny);
    let MambaSpec {
        shape, step_limits, ..
    } = found[0];
    assert_eq!((found.len(), tiny.ropes().count()), (36, 0));
    assert_eq!((shape.heads, shape.head_dim), (48, 64));
    assert_eq!((shape.groups, shape.state_dim, shape.taps), (1, 128, 4));
    assert_eq!(step_limits, (0., f32::INFINITY));
    assert!(found[0].has_conv_bias && !found[0].has_bias);
    let experts = *tiny.spec.layers[0].experts().unwrap();
    let shared = experts.shared.unwrap();
    assert_eq!((experts.count, experts.per_token), (64, 6));
    assert_eq!(experts.width, 512);
    assert_eq!(shared.width, 1024);
    assert_eq!(shared.name, "shared_mlp");
    // Granite-4.0-H-micro has one MLP.
    let micro = read(json!({
        "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192, "mamba_n_heads": 64,
        "num_local_experts": 0, "num_experts_per_tok": 0, "num_attention_heads": 32, "num_key_value_heads": 8
    }))
    .unwrap();
    assert!(matches!(micro.spec.layers[5].mlp, MlpSpec::Fused { .. }));
    assert_eq!(micro.intermediate_size, 8192);
    assert_eq!(mambas(&micro)[0].shape.heads, 64);
    // What transformers 5 writes, and classes assume.
    let mut newer = with(
        &granite(),
        json!({"time_step_limit": [0.1, 2.0], "mamba_d_head": "auto"}),
    );
    newer.as_object_mut().unwrap().remove("mamba_d_conv");
    let newer = crate::mamba::read(folder.path(), &newer).unwrap();
    let newer = mambas(&newer)[0];
    assert_eq!((newer.shape, newer.step_limits), (shape, (0.1, 2.0)));
    let table = r#"
        {"layer_types": ["mamba"]} | 1 entries for 40 layers
        {"mamba_n_heads": 40} | it must be mamba_expand times
        {"mamba_n_heads": 0} | number of heads 0
        {"mamba_n_groups": 5} | 48 Mamba heads in 5 groups
        {"mamba_d_state": 5000} | state size 5000
        {"mamba_d_conv": 17} | convolution size 17
        {"mamba_d_head": "many"} | mamba_d_head
        {"mamba_expand": 18446744073709551615} | it must be mamba_expand times
        {"time_step_limit": [2.0, 1.0]} | a Mamba step from 2 to 1
        {"time_step_limit": [-1.0, 1.0]} | a Mamba step from -1 to 1
        {"time_step_limit": 3} | a list of two numbers
        {"hidden_act": "gelu"} | only hidden_act silu
        {"mamba_norm_before_gate": true} | mamba_norm_before_gate
    "#;
    for (kind, message) in [
        ("mamba", "models without any layer of attention"),
        ("mamba2", "only attention and mamba are"),
    ] {
        let error = read(json!({"layer_types": vec![kind; 40]})).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    assert_refused(table, read);
}

/// Nemotron-H-8B.
fn nemotron() -> Json {
    let text = r#"{
        "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_head_dim": 128, "auto_map": {}, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4,
        "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0, "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
        "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": false,
        "max_position_embeddings": 8192, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
        "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8,
        "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
        "rms_norm_eps": 1e-6, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, "inf"], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "torch_dtype": "bfloat16", "transformers_version": "4.48.0.dev0", "use_bias": false,
        "use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 131072
    }"#;
    serde_json::from_str(text).unwrap()
}

#[test]
fn nemotrons_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let read = |change: Json| read(folder.path(), &with(&nemotron(), change));
    let large = read(json!({})).unwrap();
    let layers = &large.spec.layers;
    let attending = layers
        .iter()
        .filter(|layer| layer.mixer == MixerSpec::Attention);
    let feeding = layers.iter().filter(|layer| layer.mlp != MlpSpec::None);
    let found = mambas(&large);
    assert_eq!((layers.len(), found.len()), (52, 24));
    assert_eq!((attending.count(), feeding.count()), (4, 24));
    let MambaSpec {
        shape, step_limits, ..
    } = found[0];
    assert_eq!((shape.heads, shape.head_dim, shape.groups), (128, 64, 8));
    assert_eq!((large.head_dim, large.rms_norm_eps), (128, 1e-5));
    assert_eq!(step_limits, (0.001, f32::INFINITY));
    // Only layers with attention keep K and V, only those with Mamba a state.
    let kept = large.kv_shape(candle_core::DType::F16);
    assert_eq!((kept.layers.len(), kept.states.len()), (4, 24));
    assert_eq!(kept.bytes_per_token(), 4 * 2 * 2 * 8 * 128);
    // Nemotron-Nano-9B-v2.
    let nano = read(json!({
        "head_dim": 128, "hidden_size": 4480, "intermediate_size": 15680, "mamba_head_dim": 80,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 56
    }))
    .unwrap();
    assert_eq!((nano.num_layers(), mambas(&nano).len()), (56, 27));
    // Nemotron 3 Nano has experts; only they and the expert of all tokens have widths.
    let three = read(json!({
        "hybrid_override_pattern": "MEM*E", "intermediate_size": 1856, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_eps": 1e-5, "norm_topk_prob": true, "num_experts_per_tok": 6, "num_hidden_layers": 5,
        "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "topk_group": 1
    }))
    .unwrap();
    let experts = three.spec.layers[1].experts().unwrap();
    assert_eq!(experts.count, 128);
    assert_eq!(experts.per_token, 6);
    assert_eq!(experts.scale, 2.5);
    assert!(!experts.is_gated && experts.shared.unwrap().width == 3712);
    // As transformers 5 writes it, which counts the layers.
    let mut newer = with(
        &nemotron(),
        json!({
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "time_step_limit": [0.0, {"__float__": "Infinity"}]
        }),
    );
    for key in ["hybrid_override_pattern", "num_hidden_layers"] {
        newer.as_object_mut().unwrap().remove(key);
    }
    let newer = crate::mamba::read(folder.path(), &newer).unwrap();
    assert_eq!((newer.num_layers(), mambas(&newer).len()), (3, 1));
    let table = r#"
        {"hybrid_override_pattern": "M-X"} | only mamba, attention, mlp and moe are
        {"hybrid_override_pattern": null} | layers_block_type is missing
        {"hybrid_override_pattern": "ME*", "moe_latent_size": 64} | moe_latent_size
        {"mamba_hidden_act": "gelu"} | mamba_hidden_act
        {"n_groups": 7} | 128 Mamba heads in 7 groups
        {"time_step_limit": [0.0, 1.0]} | time_step_limit is not supported
        {"attention_bias": true} | attention_bias
    "#;
    assert_refused(table, read);
}

/// Falcon-H1-34B, whose Mamba layers have a norm.
fn falcon() -> Json {
    let text = r#"{
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attention_in_multiplier": 0.5, "attention_out_multiplier": 0.25, "attn_layer_indices": null,
        "bos_token_id": 1, "embedding_multiplier": 5.5, "eos_token_id": 11, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 21504, "key_multiplier": 0.125,
        "lm_head_multiplier": 0.0625, "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4,
        "mamba_d_head": 128, "mamba_d_ssm": 4096, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 2,
        "mamba_n_heads": 32, "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": true,
        "mamba_use_mlp": true, "max_position_embeddings": 262144, "mlp_bias": false, "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.75, 0.5], "model_type": "falcon_h1", "num_attention_heads": 20,
        "num_hidden_layers": 72, "num_key_value_heads": 4, "num_logits_to_keep": 1, "pad_token_id": 0,
        "projectors_bias": false, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 2.0, "ssm_multipliers": [0.5, 0.25, 1.0, 0.75, 1.5], "ssm_out_multiplier": 0.375,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0",
        "use_cache": true, "vocab_size": 261120
    }"#;
    serde_json::from_str(text).unwrap()
}

#[test]
fn falcons_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let read = |change: Json| read(folder.path(), &with(&falcon(), change));
    let large = read(json!({})).unwrap();
    let [recurrent, attending] = &large.spec.layers[..2] else {
        panic!("a layer has two mixers");
    };
    assert_eq!((large.num_layers(), mambas(&large).len()), (144, 72));
    assert!(!recurrent.is_beside_last && attending.is_beside_last);
    assert!(recurrent.mlp == MlpSpec::None && recurrent.rope.is_none());
    assert_eq!(recurrent.residual_scale, 0.375);
    assert_eq!(attending.mixer, MixerSpec::Attention);
    let scale = 0.5 * 0.5 * 0.125 / 128f32.sqrt();
    assert!((attending.attention_scale - scale).abs() < 1e-6 * scale);
    assert_eq!(attending.residual_scale, 0.125);
    // What the MLP adds is multiplied by 0.125, too.
    assert_eq!(attending.mlp_scales, [0.75, 4.]);
    assert_eq!(large.spec.embedding_scale, Some(5.5));
    assert_eq!(large.spec.logit_scale, Some(0.0625));
    let mamba = mambas(&large)[0];
    assert!(mamba.has_norm && mamba.has_conv_bias && !mamba.has_bias);
    assert_eq!(mamba.scales, [1., 0.5, 2., 1.5, 3.]);
    assert_eq!((mamba.shape.heads, mamba.shape.head_dim), (32, 128));
    // Without a norm, its place does not matter. The width may follow from that of the model.
    let other = read(json!({
        "mamba_rms_norm": false, "mamba_norm_before_gate": true, "mamba_d_ssm": null, "mamba_d_head": "auto",
        "ssm_multipliers": null
    }))
    .unwrap();
    let mamba = mambas(&other)[0];
    assert!(!mamba.has_norm);
    assert_eq!((mamba.shape.head_dim, mamba.scales), (320, [2.; 5]));
    let table = r#"
        {"mamba_norm_before_gate": true} | only false is, where mamba_rms_norm is true
        {"mamba_norm_before_gate": null} | only false is, where mamba_rms_norm is true
        {"mamba_d_ssm": 2048} | it must be mamba_d_ssm
        {"mamba_d_ssm": null} | it must be mamba_d_ssm
        {"mamba_use_mlp": false} | mamba_use_mlp false is not supported
        {"hidden_act": "gelu"} | hidden_act "gelu" is not supported
        {"attention_bias": true} | attention_bias
        {"mamba_proj_bias": true} | mamba_proj_bias
        {"projectors_bias": true} | projectors_bias
        {"mlp_bias": true} | mlp_bias
        {"key_multiplier": 0} | only a number above 0 is
        {"ssm_out_multiplier": -1.5} | ssm_out_multiplier -1.5
        {"lm_head_multiplier": "one"} | lm_head_multiplier
        {"mlp_multipliers": [1.0]} | only a list of 2 numbers above 0 is
        {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]} | only a list of 5 numbers above 0 is
        {"ssm_in_multiplier": 1e30, "ssm_multipliers": [1.0, 1.0, 1e30, 1.0, 1.0]} | ssm_multipliers is inf
        {"attention_in_multiplier": 1e-30, "attention_out_multiplier": 1e-30} | the factor of the MLP
    "#;
    assert_refused(table, read);
}

/// A draft may have one half of a layer, and need not have both.
#[test]
fn halves_of_layers_are_drafts() {
    let fixture = fixture("falcon_h1");
    let model = fixture.open();
    for layers in [&[1][..], &[0, 1], &[1, 2], &[0, 3]] {
        let feed = |cut: usize| {
            let mut rig = Rig::new(model.subset(layers).unwrap(), 32, 4);
            let mut seq = Seq::default();
            let parts = fixture.prompt.chunks(cut);
            let rows = parts.map(|part| rig.feed(&mut seq, part));
            rows.collect::<Vec<_>>().concat()
        };
        assert_eq!(feed(48), feed(7), "{layers:?}");
    }
}

const ALL: [&str; 8] = [
    "bamba",
    "falcon_h1",
    "falcon_h1_norm",
    "granite4_hybrid",
    "granite4_hybrid_moe",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_plain",
];

/// They also have no layer for further tokens, though random weights have every tensor.
#[test]
fn random_weights_need_no_files() {
    for name in ALL {
        let fixture = fixture(name);
        let source = ModelSource::Folder(fixture.folder.clone());
        let options = dummy();
        let model = load(&source, &options).unwrap();
        assert!(inspect_mtp(&source, &options, &*model).unwrap().is_none());
        let mut rig = Rig::new(model, 32, 4);
        let logits = rig.feed(&mut Seq::default(), &fixture.prompt).concat();
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
    }
}

/// The products of Mamba layers are ordinary matrices. How a text is cut into forwards changes no bit of theirs.
#[test]
fn quantized_weights_are_close_and_do_not_know_chunks() {
    for name in ALL {
        let fixture = fixture(name);
        let logits = |quantize, cut: usize| {
            let options = LoadOptions {
                quantize,
                ..LoadOptions::default()
            };
            let source = ModelSource::Folder(fixture.folder.clone());
            let mut rig = Rig::new(load(&source, &options).unwrap(), 32, 4);
            let mut seq = Seq::default();
            let parts = fixture.prompt.chunks(cut);
            let rows = parts.map(|part| rig.feed(&mut seq, part));
            rows.collect::<Vec<_>>().concat()
        };
        let (plain, blocks) = (logits(None, 48), logits(Some(BlockType::Q8_0), 48));
        // A mean: other experts may be chosen.
        let (plain, found) = (plain.concat(), blocks.concat());
        let sum: f32 = plain.iter().map(|x| x.abs()).sum();
        let far: f32 = plain.iter().zip(&found).map(|(a, b)| (a - b).abs()).sum();
        assert!(far > 0. && far < 0.3 * sum, "{name}: {far} of {sum}");
        assert_eq!(blocks, logits(Some(BlockType::Q8_0), 5), "{name}");
    }
}
