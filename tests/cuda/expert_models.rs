//! Models with experts on a GPU: their logits, and texts.

use super::texts::start;
use super::{
    BLOCK_SIZE, Log, configured, difference, gpu, loaded, logits, members, tokens,
    verified_as_plain,
};
use crate::common::{assert_idle, collect, greedy, run};
use candle_core::{DType, Device};
use foretoken::kernels::quant::BlockType;
use foretoken::model::{LoadOptions, ModelSource};
use serde_json::json;
use std::path::Path;

/// Models of classes with experts: Qwen3's; one expert of all rows with a factor; GLM's with groups, a correction and
/// dense layers first; gpt-oss with biases.
pub(super) fn sources(folder: &Path) -> Vec<ModelSource> {
    let configs = [
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
            "norm_topk_prob": true
        }),
        json!({
            "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 128
        }),
        json!({
            "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 16, "num_experts_per_tok": 3,
            "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7, "norm_topk_prob": true
        }),
        json!({
            "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
            "intermediate_size": 128, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": true
        }),
    ];
    let write = |(i, own): (usize, serde_json::Value)| {
        let mut config = json!({
            "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128,
            "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "hidden_act": "silu"
        });
        if own["architectures"][0] == "GptOssForCausalLM" {
            config
                .as_object_mut()
                .unwrap()
                .remove("moe_intermediate_size");
        }
        configured(&folder.join(i.to_string()), config, members(&own))
    };
    configs.into_iter().enumerate().map(write).collect()
}

/// In f32, in which a row has the experts that it has on the CPU.
#[test]
fn models_with_experts_have_the_logits_of_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(200);
    for source in sources(folder.path()) {
        let on = |device: &Device| {
            let options = LoadOptions {
                dtype: Some(DType::F32),
                device: device.clone(),
                seed: 1,
                ..LoadOptions::default()
            };
            logits(
                &mut *loaded(&source, options),
                &tokens,
                &[150, 40, 1, 6, 1, 2],
            )
        };
        let off = difference(&on(&Device::Cpu), &on(&gpu));
        assert!(off < 1e-4, "{source:?}: off by {off}");
    }
}

/// With weights in bf16 and quantized, with graphs (kernel by kernel, also if one launch is asked for) and without, and
/// for prompts with batch invariance.
#[test]
fn models_with_experts_verify_with_the_bits_of_plain_decoding() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(60);
    for source in sources(folder.path()) {
        for quantize in [None, Some(BlockType::Q4_0)] {
            let options = LoadOptions {
                dtype: Some(DType::BF16),
                device: gpu.clone(),
                seed: 2,
                quantize,
                one_launch: true,
                ..LoadOptions::default()
            };
            let before = Log::of_this_thread().len();
            let mut model = loaded(&source, options.clone());
            let name = format!("{source:?}, {quantize:?}");
            let plain = verified_as_plain(&mut *model, &tokens, 30, &[2, 5, 15], &name);
            let log = Log::of_this_thread().split_off(before).join("\n");
            // Of 1, 2, 5 and 15 rows.
            assert!(log.matches("is recorded").count() >= 3, "{log}");
            assert!(!log.contains("not recorded"), "{log}");
            assert!(log.contains("are not in one launch"), "{log}");
            let eager = LoadOptions {
                enforce_eager: true,
                ..options.clone()
            };
            let eager = logits(&mut *loaded(&source, eager), &tokens, &[30, 15, 15]);
            assert!(eager == plain, "{source:?}, {quantize:?}: without graphs");
            let invariant = LoadOptions {
                batch_invariant: true,
                ..options
            };
            let mut model = loaded(&source, invariant);
            let whole = logits(&mut *model, &tokens, &[60]);
            let parts = logits(&mut *model, &tokens, &[17, 1, 8, 34]);
            assert!(parts == whole, "{source:?}, {quantize:?}: batch-invariant");
        }
    }
}

/// Texts are the same with a draft that is right, with one that is hardly ever right, and in a batch.
#[test]
fn texts_of_models_with_experts_depend_on_neither_drafts_nor_batches() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for source in sources(folder.path()) {
        let one = |seed| {
            let options = LoadOptions {
                dtype: Some(DType::BF16),
                device: gpu.clone(),
                seed,
                ..LoadOptions::default()
            };
            loaded(&source, options)
        };
        let plain = start(one(3), None, 0);
        let prompts: Vec<Vec<u32>> = [4, 9, 13].map(tokens).into();
        let request = |prompt: &Vec<u32>| greedy(prompt, BLOCK_SIZE);
        let alone = prompts.iter().map(|prompt| run(&plain, request(prompt)));
        let alone: Vec<Vec<u32>> = alone.map(|text| text.ids()).collect();
        for seed in [3, 4] {
            let engine = start(one(3), Some(one(seed)), 4);
            for (prompt, want) in prompts.iter().zip(&alone) {
                let got = run(&engine, request(prompt));
                assert_eq!(got.ids(), *want, "{source:?}");
                assert!(seed == 4 || got.spec.accepted > 0, "{:?}", got.spec);
            }
            let prompts = prompts.iter();
            let events: Vec<_> = prompts
                .map(|prompt| engine.submit(request(prompt)))
                .collect();
            for (events, want) in events.into_iter().zip(&alone) {
                assert_eq!(collect(events.unwrap()).ids(), *want, "{source:?}");
            }
            assert_idle(&engine);
        }
    }
}
