//! Adapters that are not supported, broken or hostile: each is refused in one line that names what is wrong.

use crate::architectures::fixture;
use crate::common::refusals::rows;
use crate::common::safetensors::Stored;
use crate::common::{assert_has, read_json};
use crate::lora::adapter_folder;
use candle_core::{DType, Device, Tensor};
use foretoken::model::AdapterLoader;
use foretoken::model::LoadedModel;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use tempfile::TempDir;

type Tensors = HashMap<String, Tensor>;

const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";

/// A copy of the fixture, changed.
fn changed(config: impl FnOnce(&mut Value), tensors: impl FnOnce(&mut Tensors)) -> TempDir {
    let (from, to) = (adapter_folder("llama-all"), tempfile::tempdir().unwrap());
    let mut json = read_json(from.join("adapter_config.json"));
    config(&mut json);
    std::fs::write(to.path().join("adapter_config.json"), json.to_string()).unwrap();
    let file = "adapter_model.safetensors";
    let mut all = candle_core::safetensors::load(from.join(file), &Device::Cpu).unwrap();
    tensors(&mut all);
    candle_core::safetensors::save(&all, to.path().join(file)).unwrap();
    to
}

fn refused(model: &dyn LoadedModel, folder: &Path, max_rank: usize) -> String {
    let target = model.lora_target().unwrap();
    let error = target.load("a", folder, max_rank).map(drop).unwrap_err();
    let error = error.to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn what_the_configuration_asks_for_is_named() {
    let model = fixture("llama").open();
    for (key, value, needle) in [
        ("bias", json!("lora_only"), "bias \"lora_only\""),
        ("use_dora", json!(true), "use_dora true"),
        ("modules_to_save", json!(["lm_head"]), "modules_to_save"),
        ("peft_type", json!("IA3"), "peft_type \"IA3\""),
        ("r", json!(8), "[4, 48], but the base model"),
    ] {
        let folder = changed(|config| config[key] = value, |_| ());
        let error = refused(&*model, folder.path(), 16);
        assert!(error.contains(needle), "{needle}: {error}");
    }
    let error = refused(&*model, &adapter_folder("llama-all"), 3);
    assert_has(&error, &["rank 4", "raise --max-lora-rank"]);
}

/// Tensors of the first layer's queries (`{q}`) and others, the shape that they are given, and what an error says.
const TENSORS: &str = "
{q}.lora_magnitude_vector | [32] | lora_magnitude_vector is not supported: only those that end with
{q}.lora_B.bias | [32] | lora_B.bias is not supported
base_model.model.lm_head.lora_A.weight | [4, 32] | lm_head.lora_A.weight is not supported: adapters of this model can change down_proj, gate_proj, k_proj
base_model.model.model.embed_tokens.lora_embedding_A | [4, 256] | lora_embedding_A is not supported
base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight | [4, 32] | layers.2.self_attn.q_proj.lora_A.weight is not supported
model.layers.0.self_attn.q_proj.lora_A.weight | [4, 32] | lora_B.weight is missing
{q}.lora_A.weight | [4, 33] | lora_A.weight has shape [4, 33]
{q}.lora_B.weight | [16, 4] | lora_B.weight has shape [16, 4]
{q}.lora_B.weight | missing | lora_B.weight is missing
{q}.lora_A.weight | missing | lora_A.weight is missing
";

#[test]
fn tensors_that_are_not_used_or_do_not_fit_are_named() {
    let model = fixture("llama").open();
    let refused_with = |change: &dyn Fn(&mut Tensors), needle: &str| {
        let folder = changed(|_| (), change);
        let error = refused(&*model, folder.path(), 16);
        assert!(error.contains(needle), "{needle}: {error}");
    };
    for [name, dims, needle] in rows::<3>(TENSORS) {
        let name = name.replace("{q}", Q);
        let dims: Option<Vec<usize>> =
            (dims != "missing").then(|| serde_json::from_str(dims).unwrap());
        let change = |all: &mut Tensors| match &dims {
            Some(dims) => drop(all.insert(name.clone(), zeros(dims))),
            None => drop(all.remove(&name)),
        };
        refused_with(&change, needle);
    }
    let first = format!("{Q}.lora_A.weight");
    let set = |all: &mut Tensors, value: Tensor| drop(all.insert(first.clone(), value));
    let wide = zeros(&[4, 32]).to_dtype(DType::F64).unwrap();
    let nan = (zeros(&[4, 32]) + f64::NAN).unwrap();
    refused_with(&|all| all.clear(), "it has no tensors");
    refused_with(&|all| set(all, wide.clone()), "has dtype F64");
    refused_with(&|all| set(all, nan.clone()), "contains NaN");
}

/// Of experts, of gated delta nets and of what makes keys and values of latent vectors there are no adapters.
#[test]
fn layers_without_adapters_are_named() {
    for (base, module) in [
        ("qwen3_moe", "mlp.experts.0.gate_proj"),
        ("qwen3_moe", "mlp.gate"),
        ("qwen3_next", "linear_attn.out_proj"),
        ("deepseek_v3", "self_attn.kv_b_proj"),
    ] {
        let model = fixture(base).open();
        let name = format!("base_model.model.model.layers.0.{module}.lora_A.weight");
        let only = |all: &mut Tensors| *all = [(name.clone(), zeros(&[4, 32]))].into();
        let folder = changed(|_| (), only);
        let error = refused(&*model, folder.path(), 16);
        assert!(
            error.contains(&format!("{module}.lora_A.weight is not supported")),
            "{error}"
        );
    }
}

#[test]
fn broken_files_are_refused() {
    let model = fixture("llama").open();
    let empty = tempfile::tempdir().unwrap();
    let error = refused(&*model, empty.path(), 16);
    assert!(error.contains("it has no adapter_config.json"), "{error}");
    let nowhere = empty.path().join("nowhere");
    let error = refused(&*model, &nowhere, 16);
    assert!(error.contains("it has no adapter_config.json"), "{error}");

    let folder = changed(|_| (), |_| ());
    let file = folder.path().join("adapter_model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    for len in [0, 7, 20, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..len]).unwrap();
        let error = refused(&*model, folder.path(), 16);
        assert!(
            error.contains("adapter_model.safetensors"),
            "{len}: {error}"
        );
    }
    let mut odd = whole.clone();
    odd[12] ^= 0xff;
    std::fs::write(&file, &odd).unwrap();
    refused(&*model, folder.path(), 16);
    // What follows the tensors is not read, however long it is.
    let sparse = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    std::fs::write(&file, &whole).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let error = refused(&*model, folder.path(), 16);
    assert!(error.contains("bytes"), "{error}");
    std::fs::remove_file(&file).unwrap();
    let error = refused(&*model, folder.path(), 16);
    assert!(error.contains("it is missing"), "{error}");
    std::fs::create_dir(&file).unwrap();
    let error = refused(&*model, folder.path(), 16);
    assert!(error.contains("or not a file"), "{error}");

    let config = folder.path().join("adapter_config.json");
    for text in ["", "{", "[]", "{\"r\": 1}"] {
        std::fs::write(&config, text).unwrap();
        let error = refused(&*model, folder.path(), 16);
        assert!(error.contains("adapter_config.json"), "{error}");
    }
}

/// A header may say that two tensors share bytes, or that one is larger than the file.
#[test]
fn a_header_that_lies_is_refused() {
    let model = fixture("llama").open();
    let folder = changed(|_| (), |_| ());
    let file = folder.path().join("adapter_model.safetensors");
    let stored = Stored::read(&file);
    let bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let first = stored.tensors.keys().next().unwrap();
    header[first]["data_offsets"] = json!([0, 1u64 << 50]);
    let text = header.to_string();
    let lying = [
        &(text.len() as u64).to_le_bytes()[..],
        text.as_bytes(),
        &bytes[8 + header_len..],
    ];
    std::fs::write(&file, lying.concat()).unwrap();
    let error = refused(&*model, folder.path(), 16);
    assert!(error.contains("that the file has"), "{error}");
}
