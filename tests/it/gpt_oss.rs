//! gpt-oss: its configurations, and the blocks of MXFP4 in which its experts are published. What it computes is compared
//! with transformers among all [architectures](crate::architectures).

use crate::architectures::{Fixture, TOLERANCE, fixture};
use crate::common::refusals::{assert_refused, merge};
use crate::common::tiny::{dummy, logits, open, write_config};
use crate::common::tiny_gguf::put_blocks;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use foretoken::error::Error;
use foretoken::kernels::quant::BlockType;
use foretoken::model::{
    LoadFormat, LoadOptions, MlpSpec, ModelConfig, ModelSource, RopeScaling, inspect, load,
};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

/// gpt-oss-20b's, with these changes.
fn read(folder: &Path, change: Json) -> Result<ModelConfig, Error> {
    let kinds = ["sliding_attention", "full_attention"].repeat(12);
    let mut config = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4"
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088
    });
    merge(&mut config, &change);
    config
        .as_object_mut()
        .unwrap()
        .retain(|_, value| *value != "absent");
    write_config(folder, &config);
    ModelConfig::from_json(folder)
}

#[test]
fn the_published_config_is_read_and_says_what_the_class_assumes() {
    let folder = tempfile::tempdir().unwrap();
    let published = read(folder.path(), json!({})).unwrap();
    let layers = &published.spec.layers;
    let windows: Vec<_> = layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(128), None].repeat(12));
    for layer in layers {
        assert!(layer.sinks && layer.qkv_bias && layer.o_bias);
        let experts = layer.experts().unwrap();
        let sizes = (experts.count, experts.per_token, experts.width);
        assert_eq!(sizes, (32, 4, 2880));
        assert!(experts.has_bias && experts.is_normalized);
        let rope = layer.rope.as_ref().unwrap();
        let Some(RopeScaling::Yarn(yarn)) = &rope.scaling else {
            panic!("{rope:?}");
        };
        assert!(!yarn.truncate && rope.theta == 150_000.);
    }
    let absent = "attention_bias experts_per_token head_dim hidden_act initial_context_length layer_types \
        max_position_embeddings num_experts_per_tok quantization_config rms_norm_eps \
        rope_scaling rope_theta sliding_window swiglu_limit";
    let absent: serde_json::Map<_, _> = (absent.split(' '))
        .map(|key| (key.to_owned(), json!("absent")))
        .collect();
    let bare = read(folder.path(), absent.into()).unwrap();
    assert!(layers.iter().all(|layer| layer.experts().unwrap().is_mxfp4));
    let mut spec = bare.spec.clone();
    for layer in &mut spec.layers {
        if let MlpSpec::Experts(experts) = &mut layer.mlp {
            assert!(!experts.is_mxfp4);
            experts.is_mxfp4 = true;
        }
    }
    assert_eq!(spec, published.spec);
    assert_eq!(bare.rms_norm_eps, published.rms_norm_eps);
}

#[test]
fn what_it_does_not_compute_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = r#"
        {"swiglu_limit": 5.0} | swiglu_limit 5.0 is not supported: only 7 is
        {"swiglu_alpha": 1.0} | swiglu_alpha 1.0 is not supported: only 1.702 is
        {"hidden_act": "gelu"} | hidden_act "gelu"
        {"experts_per_token": 2} | experts_per_token 2 is not supported: only 4 is
        {"initial_context_length": 8192} | initial_context_length 8192
        {"quantization_config": {"quant_method": "fp8"}} | quantization_config {"quant_method":"fp8"} is not supported: only a quant_method of mxfp4 is
        {"quantization_config": {"quant_method": "mxfp4", "group_size": 16}} | group_size 16
        {"sliding_window": null} | sliding_attention
        {"shared_experts": 1} | shared_experts 1
    "#;
    assert_refused(table, |change| read(folder.path(), change));
}

/// A copy of the fixture with these tensors.
fn stored_as(folder: &Path, tensors: &HashMap<String, Tensor>) -> Result<(), String> {
    let fixture = fixture("gpt_oss_mxfp4");
    std::fs::copy(
        fixture.folder.join("config.json"),
        folder.join("config.json"),
    )
    .unwrap();
    candle_core::safetensors::save(tensors, folder.join("model.safetensors")).unwrap();
    open(folder).map(drop).map_err(|e| e.to_string())
}

#[test]
fn tensors_of_blocks_are_checked() {
    let stored = fixture("gpt_oss_mxfp4").stored();
    let folder = tempfile::tempdir().unwrap();
    stored_as(folder.path(), &stored).unwrap();
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let blocks = "model.layers.1.mlp.experts.down_proj_blocks";
    let largest = |exponent: u8| {
        let mut values = stored[scales]
            .flatten_all()
            .unwrap()
            .to_vec1::<u8>()
            .unwrap();
        values[77] = exponent;
        Tensor::from_vec(values, stored[scales].dims(), &Device::Cpu).unwrap()
    };
    let cases = [
        (
            scales,
            None,
            "tensor model.layers.1.mlp.experts.down_proj_scales",
        ),
        (
            blocks,
            Some(stored[blocks].narrow(1, 0, 16).unwrap()),
            "has shape [4, 16, 1, 16]",
        ),
        (
            scales,
            Some(stored[scales].narrow(0, 0, 3).unwrap()),
            "has shape [3, 32, 1]",
        ),
        (
            scales,
            Some(stored[scales].to_dtype(DType::F32).unwrap()),
            "has dtype F32",
        ),
        (
            scales,
            Some(largest(255)),
            "down_proj_blocks contains NaN or infinity",
        ),
        (
            scales,
            Some(largest(253)),
            "down_proj_blocks contains NaN or infinity",
        ),
    ];
    for (name, tensor, want) in cases {
        let mut other = stored.clone();
        match tensor {
            Some(tensor) => other.insert(name.into(), tensor.contiguous().unwrap()),
            None => other.remove(name),
        };
        let error = stored_as(folder.path(), &other).unwrap_err();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{want}: {error}"
        );
    }
}

/// The values of MXFP4 without a sign.
const SIZES: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];

/// The values of the bytes `blocks` `[experts, outputs, blocks, 16]` and their `scales`: `[experts, inputs, outputs]`.
fn values(blocks: &Tensor, scales: &Tensor) -> Tensor {
    let (experts, outputs, count, _) = blocks.dims4().unwrap();
    let bytes = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let (bytes, scales) = (bytes(blocks), bytes(scales));
    let value = |i: usize| {
        let number = bytes[i / 2] >> (i % 2 * 4) & 15;
        let size = SIZES[usize::from(number & 7)] * 2f32.powi(i32::from(scales[i / 32]) - 127);
        if number < 8 { size } else { -size }
    };
    let values: Vec<f32> = (0..2 * bytes.len()).map(value).collect();
    let rows = Tensor::from_vec(values, (experts, outputs, 32 * count), &Device::Cpu).unwrap();
    rows.transpose(1, 2).unwrap().contiguous().unwrap()
}

/// Blocks as GGUF files have them, with exactly these values and the smallest scales.
fn blocks_of(values: &[f32]) -> Vec<u8> {
    let blocks = values.chunks_exact(32).flat_map(|values| {
        let scale = |exponent: u8| 2f32.powi(i32::from(exponent) - 127);
        let fits = |exponent: &u8| {
            values
                .iter()
                .all(|value| value.abs() <= 6. * scale(*exponent))
        };
        let exponent = (1..=252).find(fits).unwrap();
        let number = |value: f32| {
            let size = SIZES
                .iter()
                .position(|size| size * scale(exponent) == value.abs());
            size.unwrap() as u8 | u8::from(value < 0.) << 3
        };
        let byte = |k: usize| number(values[k]) | number(values[k + 16]) << 4;
        [vec![exponent], (0..16).map(byte).collect()].concat()
    });
    blocks.collect()
}

/// Experts of safetensors and of a GGUF file with the same values have the same bits: neither is rounded. Transformers computes
/// with these values.
#[test]
fn blocks_compute_what_those_of_a_gguf_file_compute() {
    let published = fixture("gpt_oss_mxfp4");
    let stored = published.stored();
    let dense = stored.iter().filter_map(|(name, tensor)| {
        let Some(name) = name.strip_suffix("_blocks") else {
            return (!name.ends_with("_scales")).then(|| (name.clone(), tensor.clone()));
        };
        Some((
            name.to_owned(),
            values(tensor, &stored[&format!("{name}_scales")]),
        ))
    });
    let dense: HashMap<String, Tensor> = dense.collect();
    let folder = tempfile::tempdir().unwrap();
    let expected = "expected.safetensors";
    std::fs::copy(
        published.folder.join(expected),
        folder.path().join(expected),
    )
    .unwrap();
    candle_core::safetensors::save(&dense, folder.path().join("model.safetensors")).unwrap();
    let config = fixture("gpt_oss").folder.join("config.json");
    std::fs::copy(config, folder.path().join("config.json")).unwrap();
    let values = open(folder.path()).unwrap();
    published.compare(values, TOLERANCE).unwrap();
    let how = fixture("gpt_oss").conversion();
    let (_folder, file) = Fixture::read(folder.path()).converted(&how);

    let mut bytes = std::fs::read(&file).unwrap();
    let mut reader = std::io::Cursor::new(bytes.clone());
    let content = Content::read(&mut reader).unwrap();
    let experts = content.tensor_infos.keys();
    let experts: Vec<_> = experts
        .filter(|name| name.ends_with("_exps.weight"))
        .collect();
    assert_eq!(experts.len(), 2 * 3);
    for name in experts {
        let values = content.tensor(&mut reader, name, &Device::Cpu).unwrap();
        let values = values.dequantize(&Device::Cpu).unwrap();
        let values = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        put_blocks(
            &mut bytes,
            &content,
            name,
            BlockType::Mxfp4,
            &blocks_of(&values),
        );
    }
    std::fs::write(&file, bytes).unwrap();
    let of = |path: &Path| logits(open(path).unwrap(), &published.prompt);
    assert_eq!(of(&file), of(&published.folder));
}

/// `check` counts blocks as they are stored and the matrices that they become: on the CPU, and on a GPU that need not be here,
/// of files and of random weights.
#[test]
fn headers_tell_what_blocks_become() {
    let source = ModelSource::Folder(fixture("gpt_oss_mxfp4").folder);
    // A matrix of an expert is two units of 16 outputs: on the CPU with 16 exponents for each of four blocks, and on a GPU
    // with 64 inputs.
    for (for_gpu, bytes) in [(false, 4 * 2 * (64 + 4 * 256)), (true, 4 * 2 * 544)] {
        for format in [LoadFormat::Auto, LoadFormat::Dummy] {
            let options = LoadOptions {
                for_gpu,
                format,
                ..LoadOptions::default()
            };
            let (_, inventory) = inspect(&source, &options).unwrap();
            let entries = inventory.entries.iter();
            let blocks: Vec<_> = entries.filter(|entry| entry.stored == "MXFP4").collect();
            assert_eq!(blocks.len(), 4);
            let down = blocks
                .iter()
                .find(|entry| entry.name.contains("down_proj"))
                .unwrap();
            assert_eq!(down.elements, 4 * 32 * 32);
            assert_eq!(down.stored_bytes, 4 * 32 * 17);
            assert_eq!((&*down.loaded, down.loaded_bytes), ("MXFP4", bytes));
            assert!(down.is_of_experts());
        }
    }
    let options = dummy();
    let random = logits(load(&source, &options).unwrap(), &[3, 1, 4]);
    assert!(random.iter().flatten().all(|x| x.is_finite()));
}
