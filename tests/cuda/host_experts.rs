//! Experts in the host's memory: logits have the bits of experts in the GPU's.

use super::expert_models::sources;
use super::{Log, gpu, loaded, logits, model_by, tokens, verified_as_plain};
use candle_core::{DType, Device};
use foretoken::kernels::quant::BlockType;
use foretoken::model::{LoadFormat, LoadOptions, ModelSource, inspect};

/// The options for a model whose experts of so many layers are in the host's memory.
fn options(device: &Device, layers: usize, quantize: Option<BlockType>) -> LoadOptions {
    LoadOptions {
        dtype: Some(DType::BF16),
        device: device.clone(),
        seed: 5,
        host_expert_layers: layers,
        quantize,
        ..LoadOptions::default()
    }
}

/// Dense and quantized weights; a prompt of more rows than a graph has, decoding and verification, with graphs and without.
#[test]
fn experts_on_the_host_have_the_bits_of_those_on_the_gpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let (tokens, cuts) = (tokens(76), [66, 1, 6, 1, 2]);
    for source in sources(folder.path()) {
        for (dtype, quantize) in [
            (DType::BF16, None),
            (DType::F16, Some(BlockType::Q4K)),
            (DType::F32, None),
        ] {
            let of = |layers, eager| {
                let options = LoadOptions {
                    dtype: Some(dtype),
                    enforce_eager: eager,
                    ..options(&gpu, layers, quantize)
                };
                let before = Log::of_this_thread().len();
                let found = logits(&mut *loaded(&source, options), &tokens, &cuts);
                let log = Log::of_this_thread().split_off(before).join("\n");
                assert_eq!(log.contains("is recorded"), !eager, "{log}");
                assert!(!log.contains("not recorded"), "{log}");
                found
            };
            let wanted = of(0, false);
            for (layers, eager) in [(1, true), (usize::MAX, false)] {
                assert!(
                    of(layers, eager) == wanted,
                    "{source:?}, {dtype:?}, {quantize:?}, {layers} layers, eager: {eager}"
                );
            }
        }
    }
}

#[test]
fn a_model_with_experts_on_the_host_verifies_as_it_decodes() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(60);
    for source in sources(folder.path()) {
        let mut model = loaded(&source, options(&gpu, 2, None));
        let name = format!("{source:?}");
        verified_as_plain(&mut *model, &tokens, 30, &[2, 5, 15], &name);
    }
}

/// The memory of the GPU that a model takes, and what headers say of it.
#[test]
fn the_host_has_what_the_gpu_does_not() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for source in sources(folder.path()) {
        for quantize in [None, Some(BlockType::Q4_0)] {
            let planned = |layers| {
                let options = LoadOptions {
                    format: LoadFormat::Dummy,
                    ..options(&gpu, layers, quantize)
                };
                inspect(&source, &options).unwrap().1.loaded_bytes()
            };
            let ((all, none), (rest, host)) = (planned(0), planned(2));
            assert_eq!((none, rest + host), (0, all));
            let experts_of_one = planned(1).1;
            // GLM's first layer has none.
            assert!(
                experts_of_one == 0 || 2 * experts_of_one == host,
                "{source:?}"
            );
            assert!(host > all / 3, "{source:?}: {host} of {all}");
        }
    }
}

/// The emulated GPU's driver locks 128 MiB.
#[test]
fn a_host_without_memory_to_lock_is_told_in_one_line() {
    if std::env::var_os("FORETOKEN_EMULATED_GPU").is_none() {
        return;
    }
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 17, "num_experts_per_tok": 2,
        "vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64,
        "moe_intermediate_size": 2048, "max_position_embeddings": 64, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "hidden_act": "silu"
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let source = ModelSource::Folder(folder.path().to_owned());
    let error = model_by(&source, &options(&gpu, 1, None)).err().unwrap();
    let said = error.to_string();
    assert!(said.contains("lower --n-cpu-moe"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}
