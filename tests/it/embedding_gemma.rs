//! Models whose tokens see those after them, against transformers: a tiny EmbeddingGemma, and a
//! Qwen 3 that says `is_causal` false.

use crate::architectures::{Named, write_gguf_of};
use crate::common::process;
use crate::common::tiny::{open, write_config};
use crate::common::{assert_idle, collect, greedy, read_json, run};
use crate::embeddings;
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineHandle, EngineOptions, Events, Request};
use foretoken::model::{Model, ModelSource, Pooling, embedding_spec};
use serde::Deserialize;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Maximum difference of a value.
const TOLERANCE: f32 = 1e-4;

/// Token ids, and what they become.
#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    mean: Vec<f32>,
    /// What the dense layers make of the mean, normalized.
    #[serde(default)]
    embedding: Vec<f32>,
    text: Option<String>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embedding_gemma")
}

fn expected(file: &Path) -> Vec<Expected> {
    serde_json::from_value(read_json(file)).unwrap()
}

fn start(model: Box<dyn Model>, rows: usize, blocks: usize) -> EngineHandle {
    let options = EngineOptions {
        max_num_seqs: 3,
        max_num_batched_tokens: rows,
        ..EngineOptions::default()
    };
    engine::spawn(model, None, blocks, 8, options).unwrap()
}

fn mean(one: &Expected) -> Request {
    Request::embedding(one.ids.clone(), Pooling::Mean)
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let far = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    let far = far.fold(0., f32::max);
    assert!(far <= TOLERANCE, "{far}");
}

/// Asserts that the model of `path` embeds as the fixture says.
#[track_caller]
fn assert_embeds(path: &Path, source: &ModelSource) {
    let spec = embedding_spec(source, None).unwrap().unwrap();
    assert!(spec.normalize);
    assert_eq!((spec.size(48), spec.check(48)), (40, Ok(())));
    let engine = start(open(path).unwrap(), 256, 64);
    for one in expected(&folder().join("expected.json")) {
        let pooled = run(&engine, mean(&one)).embedding;
        assert_close(&pooled, &one.mean);
        let mut values = spec.project(pooled);
        let length = values.iter().map(|x| x * x).sum::<f32>().sqrt();
        values.iter_mut().for_each(|x| *x /= length);
        assert_close(&values, &one.embedding);
    }
    assert_idle(&engine);
}

#[test]
fn values_are_those_of_transformers() {
    let source = ModelSource::Folder(folder());
    assert_embeds(&folder(), &source);
    let spec = embedding_spec(&source, None).unwrap().unwrap();
    let said = spec.to_string();
    assert_eq!(
        said,
        "the mean of the hidden states, 2 dense layers to 40 values, normalized"
    );
}

/// Texts are read whole, however many there are, and however few rows a step has: the same bits.
#[test]
fn company_changes_no_bit() {
    let all = expected(&folder().join("expected.json"));
    let engine = start(open(&folder()).unwrap(), 256, 64);
    let alone: Vec<Vec<f32>> = all
        .iter()
        .map(|one| run(&engine, mean(one)).embedding)
        .collect();
    for (rows, blocks) in [(256, 64), (200, 64), (256, 26)] {
        let engine = start(open(&folder()).unwrap(), rows, blocks);
        for _ in 0..3 {
            let answers = engine.submit_all(all.iter().map(mean).collect()).unwrap();
            let answers: Vec<Events> = answers.into_iter().collect();
            for (answer, want) in answers.into_iter().zip(&alone) {
                let answer = collect(answer);
                assert_eq!(&answer.embedding, want, "{rows} rows, {blocks} blocks");
                assert_eq!(answer.cached_tokens, 0);
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn it_generates_nothing_and_takes_no_longer_text_than_a_step() {
    let model = open(&folder()).unwrap();
    assert!(!model.generates() && model.info().is_bidirectional);
    let engine = start(model, 200, 64);
    let error = engine.submit(greedy(&[1], 1)).unwrap_err().to_string();
    assert!(error.contains("use /v1/embeddings"), "{error}");
    let long = Request::embedding(vec![1; 201], Pooling::Mean);
    let error = engine.submit(long).unwrap_err().to_string();
    assert!(
        error.contains("maximum context length is 200 tokens"),
        "{error}"
    );
    let spawn = |options: EngineOptions| {
        let spawned = engine::spawn(open(&folder()).unwrap(), None, 64, 8, options);
        spawned.err().unwrap().to_string()
    };
    let error = spawn(EngineOptions {
        max_model_len: Some(256),
        max_num_batched_tokens: 200,
        ..EngineOptions::default()
    });
    assert!(
        error.contains("--max-model-len is 256 and --max-num-batched-tokens 200"),
        "{error}"
    );
    let disk = tempfile::tempdir().unwrap();
    let error = spawn(EngineOptions {
        prefix_cache_disk: Some(disk.path().to_owned()),
        max_num_batched_tokens: 256,
        ..EngineOptions::default()
    });
    assert!(error.contains("--prefix-cache-disk"), "{error}");
}

/// The binary, with the tokenizer, the pooling and the dense layers of the folder.
#[test]
fn texts_become_embeddings() {
    let server = process::Server::start(&format!("--model {}", folder().display()));
    assert!(server.startup_line().contains("/v1/embeddings"));
    let all = expected(&folder().join("expected.json")).into_iter();
    let (texts, wanted): (Vec<_>, Vec<_>) = all
        .filter_map(|one| Some((one.text?, one.embedding)))
        .unzip();
    let reply = server.json("/v1/embeddings", &json!({"input": texts}));
    let data = reply["data"].as_array().unwrap();
    assert_eq!(data.len(), wanted.len());
    for (one, want) in data.iter().zip(&wanted) {
        let values: Vec<f32> = serde_json::from_value(one["embedding"].clone()).unwrap();
        assert_close(&values, want);
    }
    // The scores of documents are of embeddings, too.
    let reply = server.json(
        "/v1/rerank",
        &json!({"query": texts[0], "documents": texts}),
    );
    for one in reply["results"].as_array().unwrap() {
        let document = &wanted[one["index"].as_u64().unwrap() as usize];
        let products = wanted[0].iter().zip(document).map(|(a, b)| a * b);
        let far = one["relevance_score"].as_f64().unwrap() as f32 - products.sum::<f32>();
        assert!(far.abs() <= TOLERANCE, "{far}");
    }
    let wide = json!({"input": "a", "dimensions": 48}).to_string();
    let refused = server.post("/v1/embeddings", &wide);
    assert!(
        refused.starts_with("HTTP/1.1 400") && refused.contains("dimensions"),
        "{refused}"
    );
    let refused = server.post("/v1/completions", r#"{"prompt": "a"}"#);
    assert!(
        refused.starts_with("HTTP/1.1 400") && refused.contains("/v1/embeddings"),
        "{refused}"
    );
}

/// Adds the dense layers, under llama.cpp's names.
fn with_dense(mut tensors: Named) -> Named {
    for (name, part) in [("dense_2", "2_Dense"), ("dense_3", "3_Dense")] {
        let file = folder().join(part).join("model.safetensors");
        let stored = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let weight = stored["linear.weight"].to_dtype(DType::F32).unwrap();
        tensors.push((format!("{name}.weight"), weight));
    }
    tensors
}

#[test]
fn gguf_files_compute_the_same() {
    let how = read_json(folder().join("gguf.json"));
    let made = tempfile::tempdir().unwrap();
    let file = made.path().join("model.gguf");
    let source = ModelSource::Gguf(file.as_path().into());
    write_gguf_of(&folder(), &how, &file, with_dense);
    assert_embeds(&file, &source);
    // As llama.cpp converts it by default.
    write_gguf_of(&folder(), &how, &file, |tensors| tensors);
    assert!(open(&file).unwrap().info().is_bidirectional);
    let error = embedding_spec(&source, None).unwrap_err().to_string();
    assert!(
        error.contains("lacks dense_2.weight and dense_3.weight"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
    let chosen = embedding_spec(&source, Some(Pooling::Mean)).unwrap();
    assert!(chosen.unwrap().layers.is_empty());
}

/// What other configurations say, with or without an output layer.
#[test]
fn is_causal_false_is_followed() {
    let causal = embeddings::folder();
    let made = tempfile::tempdir().unwrap();
    let mut config = read_json(causal.join("config.json"));
    config["is_causal"] = json!(false);
    // An output layer would be the embedding.
    for tied in [false, true] {
        config["tie_word_embeddings"] = json!(tied);
        write_config(made.path(), &config);
        let weights = "model.safetensors";
        std::fs::copy(causal.join(weights), made.path().join(weights)).unwrap();
        let model = open(made.path()).unwrap();
        assert!(!model.generates());
        let engine = start(model, 256, 64);
        for one in expected(&causal.join("bidirectional.json")) {
            assert_close(&run(&engine, mean(&one)).embedding, &one.mean);
        }
    }
}
