//! Latent attention on a GPU: logits, bits and texts, and the layer for further tokens of such a model.

use super::heads::{ITSELF, test_texts};
use super::texts::start_with;
use super::{
    BLOCK_SIZE, BLOCKS, Log, configured, difference, gpu, loaded, logits, members, tokens,
    verified_as_plain,
};
use crate::common::project::file;
use crate::common::{assert_idle, chains, greedy, run};
use candle_core::{DType, Device};
use foretoken::kernels::quant::BlockType;
use foretoken::kv::KvCacheDtype;
use foretoken::model::{HeadKind, LoadFormat, LoadOptions, ModelSource, load_head, load_mtp};
use foretoken::spec::{BudgetMode, DraftModel, Drafter};
use serde_json::{Value, json};
use std::path::Path;

/// Models of classes with latent attention: published widths, with queries of the layer's input; latent queries, and more
/// heads than a tile has, with a rank of few values; biases and groups of experts.
pub(super) fn sources(folder: &Path) -> Vec<ModelSource> {
    let configs = [
        json!({
            "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": null,
            "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "moe_intermediate_size": 64
        }),
        json!({
            "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 72, "q_lora_rank": 64,
            "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16, "num_attention_heads": 40,
            "num_key_value_heads": 40, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "attention_bias": true,
            "num_nextn_predict_layers": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 64
        }),
    ];
    let write = |(i, own): (usize, Value)| {
        let config = json!({
            "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192,
            "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": false, "torch_dtype": "bfloat16"
        });
        configured(&folder.join(i.to_string()), config, members(&own))
    };
    configs.into_iter().enumerate().map(write).collect()
}

/// With a prompt of more rows than a graph has and one that is continued, verification and plain decoding.
#[test]
fn models_with_latent_attention_have_the_logits_of_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(150);
    let sources = sources(folder.path());
    // The first has experts: rounded activations may choose others.
    let cases = [
        (0, DType::F32, 1e-4),
        (1, DType::F32, 1e-4),
        (1, DType::BF16, 5e-2),
    ];
    for (model, dtype, within) in cases {
        let on = |device: &Device| {
            let options = LoadOptions {
                dtype: Some(dtype),
                device: device.clone(),
                seed: 1,
                ..LoadOptions::default()
            };
            let mut model = loaded(&sources[model], options);
            logits(&mut *model, &tokens, &[100, 40, 1, 6, 1, 2])
        };
        let off = difference(&on(&Device::Cpu), &on(&gpu));
        assert!(off < within, "model {model}, {dtype:?}: off by {off}");
    }
}

/// With weights in bf16 and quantized, with graphs and without; and a prompt at once or in chunks, whose rows all use the
/// kernels of few rows.
#[test]
fn models_with_latent_attention_verify_with_the_bits_of_plain_decoding() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(110);
    for source in sources(folder.path()) {
        for quantize in [None, Some(BlockType::Q8_0)] {
            let options = LoadOptions {
                dtype: Some(DType::BF16),
                device: gpu.clone(),
                seed: 2,
                quantize,
                ..LoadOptions::default()
            };
            let before = Log::of_this_thread().len();
            let mut model = loaded(&source, options.clone());
            let name = format!("{source:?}, {quantize:?}");
            let plain = verified_as_plain(&mut *model, &tokens, 80, &[2, 5, 15], &name);
            let log = Log::of_this_thread().split_off(before).join("\n");
            // Of 1, 2, 5 and 15 rows.
            assert!(log.matches("is recorded").count() >= 3, "{log}");
            assert!(!log.contains("not recorded"), "{log}");
            let eager = LoadOptions {
                enforce_eager: true,
                ..options
            };
            let mut model = loaded(&source, eager);
            for cuts in [vec![80, 15, 15], vec![110], vec![17, 1, 8, 34, 50]] {
                let parts = logits(&mut *model, &tokens, &cuts);
                assert!(parts == plain, "{source:?}, {quantize:?}: {cuts:?}");
            }
        }
    }
}

#[test]
fn texts_of_models_with_latent_attention_depend_on_nothing_but_the_request() {
    let models = [("deepseek_v2_groups", 64), ("glm4_moe_lite", 16)];
    test_texts(&models, KvCacheDtype::Auto, ITSELF);
}

/// The config of a published EAGLE-3 head with latent attention, for a target like the second of [`sources`]; `None`: it
/// was not packed.
fn eagle3(folder: &Path) -> Option<ModelSource> {
    let path = file("tests/fixtures/heads/eagle3_latent/config.json")?;
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let sizes = json!({
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 1024
    });
    Some(configured(&folder.join("eagle3"), config, members(&sizes)))
}

/// The layer for further tokens of a model with latent attention drafts on a GPU, and so does an EAGLE-3 head.
#[test]
fn heads_with_latent_attention_change_no_text() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = &sources(folder.path())[1];
    let options = LoadOptions {
        dtype: Some(DType::BF16),
        device: gpu.clone(),
        seed: 3,
        format: LoadFormat::Dummy,
        ..LoadOptions::default()
    };
    let target = || loaded(source, options.clone());
    let mut heads = vec![load_mtp(source, &options, &*target()).unwrap().unwrap()];
    if let Some(eagle3) = eagle3(folder.path()) {
        heads.push(load_head(&eagle3, HeadKind::Eagle3, &options, &*target()).unwrap());
    }
    let plain = start_with(target(), None, chains(0), BudgetMode::Fixed);
    let requests = [4, 60, 90].map(|len| greedy(&tokens(len), 20));
    let texts = requests.clone().map(|request| run(&plain, request).ids());
    assert_idle(&plain);
    for head in heads {
        let draft = DraftModel::of_head(head, BLOCKS, BLOCK_SIZE, 64).unwrap();
        let drafter = Some(Box::new(draft) as Box<dyn Drafter>);
        let engine = start_with(target(), drafter, chains(3), BudgetMode::Fixed);
        for (request, want) in requests.iter().zip(&texts) {
            let got = run(&engine, request.clone());
            assert_eq!(got.ids(), *want);
            assert!(got.spec.drafted > 0, "{:?}", got.spec);
        }
        assert_idle(&engine);
    }
}
