//! Folders of tiny Llamas with a tokenizer.

use super::tiny::*;
use candle_core::DType;
use serde_json::{Map, Value, json};
use std::path::Path;
use tempfile::TempDir;

const TEMPLATE: &str = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}";

/// A tiny Llama with a byte-level tokenizer whose texts are split by `pre`.
pub fn tiny_folder(pre: Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &llama_config(16));
    write_shards(folder.path(), &tensors(16, DType::F32));
    write_tokenizer(folder.path(), pre);
    folder
}

/// An adapter of such a Llama, as PEFT writes it.
#[allow(dead_code, reason = "each test binary uses its part")]
pub fn tiny_adapter() -> TempDir {
    let adapter = tempfile::tempdir().unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["down_proj"], "bias": "none"});
    std::fs::write(
        adapter.path().join("adapter_config.json"),
        config.to_string(),
    )
    .unwrap();
    let tensor = |name: &str, dims: &[usize]| {
        let full = format!("base_model.model.model.layers.1.mlp.down_proj.{name}.weight");
        let noise = noise(&full, dims);
        (full, noise)
    };
    let tensors: std::collections::HashMap<_, _> =
        [tensor("lora_A", &[2, 512]), tensor("lora_B", &[256, 2])].into();
    let file = adapter.path().join("adapter_model.safetensors");
    candle_core::safetensors::save(&tensors, file).unwrap();
    adapter
}

/// Writes a tokenizer of fewer than [`VOCAB`] tokens and its chat template.
pub fn write_tokenizer(folder: &Path, pre: Value) {
    let special = ["<|pad|>", "<|bos|>", "<|end|>", "<|start|>"];
    let mut names: Vec<String> = special.map(String::from).to_vec();
    names.extend(('a'..='z').chain('0'..='9').map(String::from));
    names.extend(["Ġ", "Ċ", "H", "W", "L", "12", "he", "ll", "Ġhe"].map(String::from));
    assert!(names.len() < VOCAB);
    let mut tokenizer = tokenizer_of(&names, &special);
    tokenizer["added_tokens"][3]["special"] = false.into();
    tokenizer["pre_tokenizer"] = pre;
    tokenizer["model"]["merges"] = json!(["1 2", "h e", "l l", "Ġ he"]);
    let config = json!({"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE});
    for (name, json) in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
    ] {
        std::fs::write(folder.join(name), json.to_string()).unwrap();
    }
}

/// A `tokenizer.json` of byte-level BPE without merges, with the tokens `names` from id 0 on, some of them `special`.
pub fn tokenizer_of(names: &[String], special: &[&str]) -> Value {
    let added = special.iter().map(|&name| {
        let id = names.iter().position(|one| one == name).expect("a token");
        json!({"id": id, "content": name, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let added: Vec<Value> = added.collect();
    let ids = names.iter().cloned().zip((0..).map(Value::from));
    let vocab: Map<String, Value> = ids.collect();
    json!({
        "version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level(), "decoder": byte_level(),
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    })
}

pub fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}
