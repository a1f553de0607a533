//! Every architecture: its fixture's config with heads that a GPU has kernels for, and random weights.

use super::{difference, gpu, logits, model, verified_as_plain};
use crate::common::project::file;
use candle_core::{DType, Device};
use foretoken::kernels::quant::BlockType;
use foretoken::model::{LoadFormat, LoadOptions, ModelSource, inspect};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Values of a head, by turns: those of published models.
const HEAD_DIMS: [usize; 4] = [64, 80, 96, 112];
/// More than the windows of the fixtures (9) and than the context before their ropes were scaled (16).
const TOKENS: usize = 60;
/// A prompt of more rows than decoding has, one that continues it, decoding and verification.
const CUTS: [usize; 6] = [34, 17, 1, 5, 1, 2];

/// The names of the fixtures and the folders of their widened configs, in `folder`; `None`: they were not packed.
fn widened(folder: &Path) -> Option<Vec<(String, ModelSource)>> {
    let all = file("tests/fixtures/architectures")?;
    let entries = std::fs::read_dir(all).unwrap();
    let mut fixtures: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    fixtures.sort();
    assert!(!fixtures.is_empty());
    let widened = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        // Not by its place among the fixtures, so that a new one changes no other.
        let turn: usize = name.bytes().map(usize::from).sum();
        // The scores of Gemma 4 grow with the heads, and with them the error; of its layers without a window, heads have
        // twice as many values.
        let dim = match &name {
            gemma4 if gemma4.starts_with("gemma4") => 40,
            gemma if gemma.starts_with("gemma") => 256,
            _ => HEAD_DIMS[turn % HEAD_DIMS.len()],
        };
        let source = fixture(folder, &format!("architectures/{name}"), dim).unwrap();
        (name, source)
    };
    Some(fixtures.into_iter().map(widened).collect())
}

/// The folder of the widened config of the fixture `name`, such as `architectures/llama`, in `folder`, with heads of `dim`
/// values; `None`: it was not packed.
pub(super) fn fixture(folder: &Path, name: &str, dim: usize) -> Option<ModelSource> {
    let path = file(&format!("tests/fixtures/{name}/config.json"))?;
    let text = std::fs::read_to_string(path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    widen(
        match config.get_mut("text_config") {
            Some(inner) => inner,
            None => &mut config,
        },
        dim,
    );
    // An assistant has the width of its target beside its own.
    if config.get("backbone_hidden_size").is_some() {
        config["backbone_hidden_size"] = config["text_config"]["hidden_size"].clone();
    }
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Some(ModelSource::Folder(folder))
}

/// Gives `config` heads of `dim` values, and layers with heads of another size in proportion.
fn widen(config: &mut Value, dim: usize) {
    let before = config["head_dim"].as_u64().unwrap_or(1) as usize;
    if let Some(wide) = config["global_head_dim"].as_u64() {
        config["global_head_dim"] = (wide as usize / before * dim).into();
    }
    let layers = config
        .get_mut("per_layer_config")
        .and_then(Value::as_object_mut);
    for layer in layers.into_iter().flat_map(|layers| layers.values_mut()) {
        if let Some(wide) = layer["head_dim"].as_u64() {
            layer["head_dim"] = (wide as usize / before * dim).into();
        }
    }
    let heads = config["num_attention_heads"].as_u64().unwrap() as usize;
    config["hidden_size"] = (heads * dim).into();
    config["head_dim"] = dim.into();
    if config.get("qk_rope_head_dim").is_some() {
        config["qk_rope_head_dim"] = dim.into();
        config["kv_lora_rank"] = (2 * dim).into();
        config.as_object_mut().unwrap().remove("qk_head_dim");
        // Products of other widths are a library's.
        config["qk_nope_head_dim"] = 32.into();
        config["v_head_dim"] = 32.into();
        if config["q_lora_rank"].is_u64() {
            config["q_lora_rank"] = 64.into();
        }
    }
    config["intermediate_size"] = 192.into();
    // Products of other widths are a library's.
    if config["hidden_size_per_layer_input"]
        .as_u64()
        .is_some_and(|width| width > 0)
    {
        config["hidden_size_per_layer_input"] = 32.into();
    }
    // Otherwise larger heads would have larger scores.
    if config.get("query_pre_attn_scalar").is_some() {
        config["query_pre_attn_scalar"] = dim.into();
    }
    if let (Some(expand), Some(count)) = (
        config["mamba_expand"].as_u64(),
        config["mamba_n_heads"].as_u64(),
    ) {
        let width = heads as u64 * dim as u64 * expand;
        config["mamba_d_head"] = (width / count).into();
        if config.get("mamba_d_ssm").is_some() {
            config["mamba_d_ssm"] = width.into();
        }
    }
    // States of several registers a thread, and outputs that our products take.
    for (key, size) in [
        ("linear_key_head_dim", 40),
        ("linear_value_head_dim", 48),
        ("mamba_d_state", 40),
        ("ssm_state_size", 136),
        ("mamba_head_dim", 5),
        ("mamba_num_heads", 32),
    ] {
        if config.get(key).is_some() {
            config[key] = size.into();
        }
    }
    // One factor for each pair of values that is rotated.
    let rope = &mut config["rope_parameters"];
    let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.);
    let pairs = (dim as f64 * share) as usize / 2;
    for key in ["short_factor", "long_factor"] {
        if let Some(factors) = rope.get(key).and_then(Value::as_array) {
            let factors: Vec<Value> = (0..pairs)
                .map(|i| factors[i % factors.len()].clone())
                .collect();
            rope[key] = json!(factors);
        }
    }
}

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| i * 37 % 251).collect()
}

/// The difference that nine of ten rows do not exceed. A row whose experts have almost the same scores gets others where
/// activations are rounded.
fn difference_of_most(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let rows = a.chunks(1).zip(b.chunks(1));
    let mut rows: Vec<f32> = rows.map(|(a, b)| difference(a, b)).collect();
    rows.sort_by(f32::total_cmp);
    rows[rows.len() * 9 / 10]
}

#[test]
fn every_architecture_has_the_logits_of_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let Some(all) = widened(folder.path()) else {
        return;
    };
    let gpu = gpu();
    let tokens = tokens();
    let mut wrong = Vec::new();
    // Beside blocks of MXFP4 the CPU rounds activations, so that routers may choose other experts there.
    let exact = |name: &str| !name.contains("gpt_oss_mxfp4");
    for (name, source) in all.into_iter().filter(|(name, _)| exact(name)) {
        for (dtype, within) in [(DType::F32, 1e-4), (DType::F16, 5e-2)] {
            let mut there = model(&source, &gpu, Some(dtype), 1);
            let mut here = model(&source, &Device::Cpu, Some(dtype), 1);
            let rounds = dtype != DType::F32 && !here.info().experts.is_empty();
            let here = logits(&mut *here, &tokens, &CUTS);
            let there = logits(&mut *there, &tokens, &CUTS);
            let off = if rounds {
                difference_of_most(&here, &there)
            } else {
                difference(&here, &there)
            };
            println!("{name}, {dtype:?}: off by {off:.1e}");
            if off.is_nan() || off >= within {
                wrong.push(format!("{name}, {dtype:?}: off by {off}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// With windows, soft caps, partial ropes and norms around layers, too.
#[test]
fn every_architecture_verifies_with_the_bits_of_plain_decoding() {
    let folder = tempfile::tempdir().unwrap();
    let Some(all) = widened(folder.path()) else {
        return;
    };
    let gpu = gpu();
    let tokens = tokens();
    for (name, source) in all {
        let mut model = model(&source, &gpu, Some(DType::BF16), 2);
        verified_as_plain(&mut *model, &tokens[..30], 20, &[5, 10], &name);
    }
}

/// What `check --gpu` says without a GPU.
#[test]
fn headers_say_of_a_gpu_what_they_say_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(all) = widened(folder.path()) else {
        return;
    };
    let gpu = gpu();
    for (name, source) in all {
        for quantize in [None, Some(BlockType::Q4K), Some(BlockType::Q8_0)] {
            let read = |device: &Device, for_gpu| {
                let options = LoadOptions {
                    device: device.clone(),
                    for_gpu,
                    quantize,
                    format: LoadFormat::Dummy,
                    ..LoadOptions::default()
                };
                let (model, inventory) = inspect(&source, &options).unwrap();
                let kv = model.kv_shape();
                let per_token = (kv.bytes_per_token(), kv.bytes_per_state());
                format!("{per_token:?} {:?}", inventory.entries)
            };
            let planned = read(&Device::Cpu, true);
            assert_eq!(planned, read(&gpu, false), "{name}, {quantize:?}");
            assert_ne!(planned, read(&Device::Cpu, false), "{name}, {quantize:?}");
        }
    }
}
