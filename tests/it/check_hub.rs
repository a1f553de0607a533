//! `check` of models of the Hub that are not in the cache: only their headers are fetched.

use crate::common::hub::Hub;
use crate::common::process::{foretoken, refusal_line, stdout_of};
use crate::common::tiny::*;
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::common::tiny_gguf::{split, write_gguf_with};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Meta;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

const DEMO: &str = "models/default/foretoken-demo.Q5_1.gguf";

/// Runs `check` with the cache in `home`.
fn check(args: &[&str], hub: &str, home: &Path) -> Output {
    let mut command = foretoken();
    command.env("HF_HOME", home).env("HF_ENDPOINT", hub);
    command.env("HF_TOKEN", "hf_test");
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.arg("check").args(args).output().unwrap()
}

#[track_caller]
fn report(args: &[&str], hub: &str, home: &Path) -> Value {
    let output = check(
        &[args, &["--json", "--num-blocks", "64"]].concat(),
        hub,
        home,
    );
    serde_json::from_str(&stdout_of(&output)).unwrap()
}

/// Asserts that `check` ends with one line that contains `needle`.
#[track_caller]
fn refused(args: &[&str], hub: &str, needle: &str) {
    let home = tempfile::tempdir().unwrap();
    let said = refusal_line(&check(args, hub, home.path()));
    assert!(said.contains(needle) && said.len() < 1_000, "{said}");
}

/// Asserts that what was found at the Hub is what is found in files.
#[track_caller]
fn assert_same(hub: &Value, files: &Value) {
    let differ = [
        "model",
        "downloaded",
        "free_memory_bytes",
        "decode",
        "known_draft",
        "command",
    ];
    for (key, value) in files.as_object().unwrap() {
        if !differ.contains(&key.as_str()) {
            assert_eq!(&hub[key], value, "{key}");
        }
    }
    assert_eq!(
        (&hub["downloaded"], &files["downloaded"]),
        (&false.into(), &true.into())
    );
}

fn files_of(folder: &Path, id: &str, files: &mut HashMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        files.insert(format!("{id}/{name}"), std::fs::read(&path).unwrap());
    }
}

/// The place of the first tensor of a GGUF file.
fn header_bytes(file: &[u8]) -> usize {
    let content = candle_core::quantized::gguf_file::Content::read(&mut std::io::Cursor::new(file));
    content.unwrap().tensor_data_offset as usize
}

#[test]
fn the_header_of_a_gguf_file_is_enough() {
    let home = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("demo-Q5_1.gguf");
    std::fs::copy(DEMO, &whole).unwrap();
    let demo = std::fs::read(DEMO).unwrap();
    let mut files = HashMap::from([("org/demo/demo-Q5_1.gguf".to_owned(), demo.clone())]);
    for part in split(&whole, 3) {
        let name = part.file_name().unwrap().to_str().unwrap().to_owned();
        files.insert(format!("org/parts/{name}"), std::fs::read(part).unwrap());
    }
    let (hub, address) = Hub::of(files).start();
    let local = report(&[DEMO], &address, home.path());
    assert_eq!(hub.asked.load(Ordering::SeqCst), 0);
    for name in ["org/demo:Q5_1", "org/demo/demo-Q5_1.gguf", "org/demo"] {
        let before = hub.sent.load(Ordering::SeqCst);
        assert_same(&report(&[name], &address, home.path()), &local);
        // Lists of files are not counted.
        let sent = hub.sent.load(Ordering::SeqCst) - before;
        let header = header_bytes(&demo);
        assert!(
            sent >= header && sent < 2 * header + (64 << 10),
            "{sent} for {header}"
        );
    }
    let ranges = hub.ranges.lock().unwrap().clone();
    let have_ends = ranges.iter().all(|range| !range.ends_with('-'));
    assert!(have_ends && !ranges.is_empty(), "{ranges:?}");
    let parts = report(&["org/parts:Q5_1"], &address, home.path());
    assert_same(&parts, &local);
    let table = check(&["org/demo:Q5_1"], &address, home.path()).stdout;
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("(not downloaded)"), "{table}");
    // A connection that is lost is opened again.
    hub.cuts.store(2, Ordering::SeqCst);
    assert_same(&report(&["org/demo:Q5_1"], &address, home.path()), &local);
    assert_eq!(hub.cuts.load(Ordering::SeqCst), 0);
    // Nothing that other tools could take for a model is left.
    let blobs = home.path().join("hub/models--org--demo/blobs");
    assert!(!blobs.exists() || std::fs::read_dir(blobs).unwrap().count() == 0);
}

/// A tokenizer of single letters.
fn letters() -> Vec<(&'static str, Meta)> {
    let string = |text: &str| Meta::String(text.to_owned());
    let tokens: Vec<Meta> = ["<s>", "</s>", "<end>", "ab"]
        .map(str::to_owned)
        .into_iter()
        .chain(('a'..='z').map(String::from))
        .map(Meta::String)
        .collect();
    let types = (0..tokens.len()).map(|id| Meta::I32(if id < 3 { 3 } else { 1 }));
    vec![
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("llama-bpe")),
        ("tokenizer.ggml.token_type", Meta::Array(types.collect())),
        ("tokenizer.ggml.tokens", Meta::Array(tokens)),
        ("tokenizer.ggml.merges", Meta::Array(vec![string("a b")])),
    ]
}

/// The factors of a rope are among the tensors, and they are checked.
#[test]
fn factors_of_ropes_are_fetched() {
    let home = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let stored = tensors(16, candle_core::DType::F32);
    let mut files = HashMap::new();
    let mut local = Vec::new();
    for (name, factor) in [("good", 2.), ("bad", 0.)] {
        let file = folder.path().join(format!("{name}.gguf"));
        write_gguf_with(&file, &stored, GgmlDType::Q8_0, &[factor; 8], &letters());
        let bytes = std::fs::read(&file).unwrap();
        assert!(
            bytes.len() > 1_000_000,
            "the factors are far from the header"
        );
        files.insert(format!("org/model/{name}.gguf"), bytes);
        local.push(file);
    }
    let (hub, address) = Hub::of(files).start();
    let local = report(&[local[0].to_str().unwrap()], &address, home.path());
    let found = report(&["org/model/good.gguf"], &address, home.path());
    assert_same(&found, &local);
    assert!(hub.sent.load(Ordering::SeqCst) < 100_000);
    refused(&["org/model/bad.gguf"], &address, "makes angles infinite");
}

/// A folder as the Hub has it, with shards.
fn repository(id: &str, files: &mut HashMap<String, Vec<u8>>) -> TempDir {
    let folder = tiny_folder(byte_level());
    files_of(folder.path(), id, files);
    folder
}

#[test]
fn the_headers_of_safetensors_are_enough() {
    let home = tempfile::tempdir().unwrap();
    let mut files = HashMap::new();
    let folder = repository("org/model", &mut files);
    // A store elsewhere has the weights.
    repository("org/stored", &mut files);
    let (store, elsewhere) = Hub::of(files.clone()).start();
    let is_weights = |name: &String| name.ends_with(".safetensors");
    let weights: usize = (files.iter())
        .filter(|(name, _)| is_weights(name))
        .map(|(_, bytes)| bytes.len())
        .sum();
    let (hub, address) = Hub {
        files,
        store: Some(elsewhere),
        ..Hub::default()
    }
    .start();
    let local = report(&[folder.path().to_str().unwrap()], &address, home.path());
    assert_eq!(hub.asked.load(Ordering::SeqCst), 0);
    for id in ["org/model", "org/stored"] {
        let found = report(&[id], &address, home.path());
        assert_same(&found, &local);
    }
    let sent = hub.sent.load(Ordering::SeqCst) + store.sent.load(Ordering::SeqCst);
    assert!(sent < weights / 4, "{sent} of {weights}");
    assert!(!store.ranges.lock().unwrap().is_empty());
    let tokens = store.tokens.lock().unwrap().clone();
    let has_token = tokens.iter().any(Option::is_some);
    assert!(!has_token && !tokens.is_empty(), "{tokens:?}");
    // It is also a draft, although it is none that wins.
    let drafted = report(
        &["org/model", "--draft-model", "org/stored"],
        &address,
        home.path(),
    );
    assert_eq!(drafted["draft"]["parameters"], local["parameters"]);
    // Without weights, the shapes are those of the config.
    let dummy = report(
        &["org/model", "--load-format", "dummy"],
        &address,
        home.path(),
    );
    assert_eq!(
        (&dummy["downloaded"], &dummy["file_bytes"]),
        (&false.into(), &Value::Null)
    );
}

#[test]
fn tensors_that_do_not_fit_the_config_are_named() {
    let mut files = HashMap::new();
    repository("org/model", &mut files);
    let config = files["org/model/config.json"].clone();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["num_hidden_layers"] = 3.into();
    files.insert("org/model/config.json".into(), config.to_string().into());
    repository("org/broken", &mut files);
    repository("org/few", &mut files);
    repository("org/none", &mut files);
    let mut names: Vec<String> = files.keys().cloned().collect();
    names.retain(|name| name.ends_with(".safetensors"));
    for name in names {
        if name.starts_with("org/broken") {
            files.insert(name, b"{\"a\": not safetensors}".to_vec());
        } else if name.starts_with("org/few") {
            files.remove(&name);
        }
    }
    files.retain(|name, _| !name.starts_with("org/none/model"));
    let (_, address) = Hub::of(files).start();
    refused(&["org/model"], &address, "model.layers.2.");
    refused(&["org/broken"], &address, "not a readable safetensors file");
    refused(&["org/few"], &address, "is missing");
    refused(&["org/none"], &address, "it has neither");
}

/// A server that has no ranges, or others than were asked for, and files that are none.
#[test]
fn a_hub_without_ranges_is_told_in_one_line() {
    let demo = std::fs::read(DEMO).unwrap();
    let mut files = HashMap::from([("org/demo/demo-Q5_1.gguf".to_owned(), demo)]);
    repository("org/model", &mut files);
    files.insert("org/text/m-Q8_0.gguf".into(), b"Not GGUF".to_vec());
    files.insert("org/empty/m-Q8_0.gguf".into(), Vec::new());
    // It claims a string of a gibibyte, and to be long enough for it.
    let mut long = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes()].concat();
    long.extend(1u64.to_le_bytes());
    long.extend((1u64 << 30).to_le_bytes());
    long.resize(3 << 20, b'x');
    files.insert("org/long/m-Q8_0.gguf".into(), long);
    let whole = Hub {
        files: files.clone(),
        whole_only: true,
        ..Hub::default()
    };
    let (_, address) = whole.start();
    for name in ["org/demo:Q5_1", "org/model"] {
        refused(&[name], &address, "ignores HTTP ranges");
    }
    let other = Hub {
        files: files.clone(),
        content_range: Some("bytes 5-9/10"),
        ..Hub::default()
    };
    let (_, address) = other.start();
    refused(&["org/demo:Q5_1"], &address, "but sent");
    let (hub, address) = Hub::of(files).start();
    refused(&["org/text:Q8_0"], &address, "does not begin with GGUF");
    refused(&["org/empty:Q8_0"], &address, "not a readable GGUF file");
    refused(&["org/long:Q8_0"], &address, "no room for");
    refused(&["org/demo:Q4_0"], &address, "no GGUF file of it ends with");
    let sent = hub.sent.load(Ordering::SeqCst);
    assert!(sent < 100_000, "{sent}");
    hub.gone.store(true, Ordering::SeqCst);
    refused(&["org/demo:Q5_1"], &address, "cannot be reached");
}
