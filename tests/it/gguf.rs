//! GGUF files of every block type, compared with candle's Llama on the same weights.

use crate::common::rig::distance;
use crate::common::tiny::*;
use crate::common::tiny_gguf::{llama3_factors, write_gguf, write_gguf_with};
use crate::common::tiny_gguf::{split, with_blocks};
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::quant::BlockType;

#[test]
fn gguf_of_floats_equals_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let factors = llama3_factors(&config);
    assert!(
        factors[0] == 1. && factors[7] == 8.,
        "the scaling shows: {factors:?}"
    );
    let tokens = short_prompt(60);
    let want = candles_logits(&config, &tensors, &tokens);
    let file = folder.path().join("model.gguf");
    for (kind, tolerance) in [(GgmlDType::F32, 1e-4), (GgmlDType::F16, 0.1)] {
        write_gguf(&file, &tensors, kind, &factors);
        let got = logits(open(&file).unwrap(), &tokens);
        let far = distance(&got[59], &want);
        assert!(far < tolerance, "{kind:?}: logits differ by {far}");
    }
}

/// Compares every block type with the same file dequantized. They differ only by the rounding of
/// activations to 8 bits.
#[test]
fn gguf_of_every_block_type() {
    use GgmlDType::*;
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let factors = llama3_factors(&config);
    let file = folder.path().join("model.gguf");
    let tokens = short_prompt(12);
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        write_gguf(&file, &tensors, kind, &factors);
        let got = logits(open(&file).unwrap(), &tokens);
        let rounded = tensors.iter().map(|(name, t)| {
            let t = match t.rank() {
                2 => QTensor::quantize(t, kind)
                    .unwrap()
                    .dequantize(&Device::Cpu)
                    .unwrap(),
                _ => t.clone(),
            };
            (name.clone(), t)
        });
        let want = candles_logits(&config, &rounded.collect(), &tokens);
        let size = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let far = distance(&got[11], &want);
        assert!(
            far < 0.12 * size,
            "{kind:?}: logits up to {size} differ by {far}"
        );
    }
}

/// The same for types that candle does not have.
#[test]
fn gguf_of_block_types_that_candle_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let file = folder.path().join("model.gguf");
    let tokens = short_prompt(12);
    for kind in BlockType::all().filter(|kind| kind.candles().is_none()) {
        write_gguf(&file, &tensors, GgmlDType::Q4_0, &llama3_factors(&config));
        let stored = with_blocks(&file, kind, &tensors);
        let got = logits(open(&file).unwrap(), &tokens);
        let want = candles_logits(&config, &stored, &tokens);
        let size = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let far = distance(&got[11], &want);
        assert!(
            far < 0.06 * size,
            "{kind}: logits up to {size} differ by {far}"
        );
    }
}

#[test]
fn a_model_in_several_files_is_named_by_its_first() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let whole = folder.path().join("whole.gguf");
    write_gguf(&whole, &tensors, GgmlDType::Q8_0, &llama3_factors(&config));
    let parts = split(&whole, 3);
    std::fs::rename(&whole, folder.path().join("whole")).unwrap();
    let tokens = short_prompt(12);
    // The folder has one model.
    let got = logits(open(folder.path()).unwrap(), &tokens);
    assert_eq!(logits(open(&parts[0]).unwrap(), &tokens), got);
    std::fs::rename(folder.path().join("whole"), &whole).unwrap();
    assert_eq!(logits(open(&whole).unwrap(), &tokens), got);

    let refused = |path: &std::path::Path, needles: &[&str]| {
        let error = open(path).err().unwrap().to_string();
        for needle in needles {
            assert!(error.contains(needle), "{error}");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let names = ["whole-00001-of-00003.gguf", "whole-00002-of-00003.gguf"];
    refused(&parts[1], &["part 2 of 3", "name the first", names[0]]);
    let away = folder.path().join("away");
    std::fs::rename(&parts[1], &away).unwrap();
    refused(&parts[0], &[names[1], "missing"]);
    // Another part under its name, and a part under the name of a model.
    std::fs::copy(&parts[2], &parts[1]).unwrap();
    refused(&parts[0], &[names[1], "it is part 3 of 3"]);
    std::fs::rename(&away, &parts[1]).unwrap();
    let alone = folder.path().join("alone.gguf");
    std::fs::copy(&parts[0], &alone).unwrap();
    refused(&alone, &["NAME-00001-of-00003.gguf"]);
    // Tensors that are there twice, or in no part.
    let bytes = std::fs::read(&parts[1]).unwrap();
    std::fs::write(&parts[1], &bytes[..bytes.len() / 2]).unwrap();
    refused(&parts[0], &[names[1], "more than the file has"]);
    std::fs::write(&parts[1], "").unwrap();
    refused(&parts[0], &[names[1], "not a readable GGUF file"]);
}

/// Metadata and tensors that ask for something the decoder does not do, or that are invalid.
#[test]
fn unsupported_properties_of_a_gguf_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let all = tensors(16, DType::F32);
    let factors = llama3_factors(&llama_config(16));
    let attempt = |tensors: &Tensors, key: &str, value: Value| {
        let more = [(key, value)];
        write_gguf_with(&file, tensors, GgmlDType::Q8_0, &factors, &more);
        open(&file).map(|_| ()).map_err(|error| {
            assert!(matches!(error, foretoken::error::Error::Setup(_)));
            error.to_string()
        })
    };
    let refused = [
        ("llama.expert_count", Value::U32(8)),
        ("llama.attention.value_length", Value::U32(32)),
        ("llama.attention.scale", Value::F32(0.5)),
        ("llama.embedding_scale", Value::F32(12.)),
        ("llama.residual_scale", Value::F32(0.22)),
        ("llama.never_heard_of", Value::U32(1)),
        ("llama.never_heard_of", Value::String("it".into())),
        ("llama.logit_scale", Value::F32(8.)),
        ("llama.final_logit_softcapping", Value::F32(30.)),
        ("llama.rope.dimension_count", Value::U32(8)),
        ("llama.rope.scaling.type", Value::String("mrope".into())),
        ("llama.rope.freq_base", Value::F32(f32::NAN)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(-1e-5)),
        (
            "llama.attention.head_count_kv",
            Value::Array(vec![Value::U32(4), Value::U32(2)]),
        ),
        ("general.architecture", Value::String("mamba".into())),
        ("tokenizer.ggml.eos_token_id", Value::U32(VOCAB as u32)),
        ("tokenizer.ggml.eot_token_id", Value::U32(u32::MAX)),
    ];
    for (key, value) in refused {
        let error = attempt(&all, key, value).expect_err(key);
        let words = [
            ("rms_epsilon", "rms_norm_eps"),
            // A Mixtral that lacks the others.
            ("expert_count", "expert_used_count is missing"),
            ("general.architecture", "'mamba'"),
        ];
        let word = words.iter().find(|(end, _)| key.ends_with(end));
        let word = word.map_or(key.trim_start_matches("llama."), |(_, word)| word);
        assert!(
            error.contains(word) && error.contains("model.gguf"),
            "{error}"
        );
    }
    // Such a model embeds texts.
    attempt(&all, "llama.attention.causal", Value::Bool(false)).unwrap();
    for (base, why) in [
        (0., "rope_theta 0 must be"),
        (1e-44, "rope_theta 1e-44 makes angles infinite"),
    ] {
        let error = attempt(&all, "llama.rope.freq_base", Value::F32(base)).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let harmless = [
        ("llama.vocab_size", Value::U32(VOCAB as u32)),
        ("llama.rope.scaling.factor", Value::F32(0.)),
        ("llama.attention.value_length", Value::U32(16)),
        ("llama.expert_count", Value::U32(0)),
        ("llama.attention.sliding_window", Value::U32(256)),
        ("llama.attention.sliding_window", Value::U32(0)),
        // Mistral is a Llama in GGUF files.
        ("llama.attention.sliding_window", Value::U32(128)),
        ("llama.rope.scaling.type", Value::String("none".into())),
        ("llama.attention.scale", Value::F32(0.25)),
    ];
    for (key, value) in harmless {
        attempt(&all, key, value).expect(key);
    }

    let name = "model.layers.1.post_attention_layernorm.weight";
    let mut bad = all.clone();
    let nan = Tensor::full(f32::NAN, HIDDEN, &Device::Cpu).unwrap();
    bad.insert(name.into(), nan);
    let error = attempt(&bad, "llama.expert_count", Value::U32(0)).unwrap_err();
    assert!(
        error.contains("blk.1.ffn_norm.weight contains NaN"),
        "{error}"
    );
    // An infinite f16 scale of a block.
    let name = "model.layers.0.mlp.down_proj.weight";
    let mut bad = all.clone();
    bad.insert(name.into(), (&all[name] * 1e9).unwrap());
    let error = attempt(&bad, "llama.expert_count", Value::U32(0)).unwrap_err();
    assert!(
        error.contains("blk.0.ffn_down.weight contains NaN"),
        "{error}"
    );

    let mut more = all.clone();
    let name = "model.layers.0.mlp.up_proj.scale";
    more.insert(name.into(), noise(name, &[16]));
    let error = attempt(&more, "llama.expert_count", Value::U32(0)).unwrap_err();
    assert!(error.contains("ffn_up.scale"), "{error}");
}
