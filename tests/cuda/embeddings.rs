//! Embeddings on a GPU: those that sentence-transformers computes, alone and beside others, also of tokens that see those
//! after them.

use super::architectures::fixture;
use super::logits::difference;
use super::{BLOCK_SIZE, BLOCKS, configured, gpu, model};
use crate::common::project::file;
use crate::common::{assert_idle, collect, run};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineOptions, EngineThread, Request};
use foretoken::model::{LoadOptions, LoadedModel, ModelSource, Pooling, load};
use serde_json::Value;
use std::path::Path;

/// Maximum difference of a value.
const TOLERANCE: f32 = 1e-4;

#[track_caller]
fn compare(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    let off = off.fold(0., f32::max);
    assert!(off <= TOLERANCE, "off by {off}");
}

fn read(file: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// The texts of a file of expected values, with these poolings and what becomes of them.
fn requests(file: &Path, poolings: &[(Pooling, &str)]) -> Vec<(Request, Vec<f32>)> {
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let floats = |value: &Value| -> Vec<f32> { serde_json::from_value(value.clone()).unwrap() };
    let expected = read(file);
    let mut requests = Vec::new();
    for text in expected.as_array().unwrap() {
        for &(pooling, name) in poolings {
            let request = Request::embedding(ids(&text["ids"]), pooling);
            requests.push((request, floats(&text[name])));
        }
    }
    assert!(!requests.is_empty());
    requests
}

fn start(model: Box<dyn LoadedModel>, rows: usize) -> EngineThread {
    let options = EngineOptions {
        max_num_seqs: 3,
        max_num_batched_tokens: rows,
        ..EngineOptions::default()
    };
    let engine = engine::spawn(model, None, BLOCKS, BLOCK_SIZE, options).unwrap();
    EngineThread::new(engine, EngineThread::PATIENCE)
}

/// Compares the values of a model in f32, in steps of up to `rows` rows, with those that are expected, of each text alone
/// and of all at once.
#[track_caller]
fn assert_embeds(
    source: &ModelSource,
    gpu: &Device,
    rows: usize,
    requests: &[(Request, Vec<f32>)],
) {
    let options = LoadOptions {
        dtype: Some(DType::F32),
        device: gpu.clone(),
        ..LoadOptions::default()
    };
    let engine = start(load(source, &options).unwrap(), rows);
    for (request, want) in requests {
        compare(&run(&engine, request.clone()).embedding, want);
    }
    let events: Vec<_> = (requests.iter())
        .map(|(request, _)| engine.submit(request.clone()).unwrap())
        .collect();
    for (events, (_, want)) in events.into_iter().zip(requests) {
        compare(&collect(events).embedding, want);
    }
    assert_idle(&engine);
}

#[test]
fn embeddings_are_those_of_the_fixture() {
    let gpu = gpu();
    let (Some(weights), Some(expected)) = (
        file("tests/fixtures/embeddings/model.safetensors"),
        file("tests/fixtures/embeddings/expected.json"),
    ) else {
        return;
    };
    let poolings = [(Pooling::Last, "last"), (Pooling::Mean, "mean")];
    let requests = requests(&expected, &poolings);
    let source = ModelSource::Folder(weights.parent().unwrap().to_owned());
    // Steps of a few rows divide texts.
    for rows in [8, 512] {
        assert_embeds(&source, &gpu, rows, &requests);
    }
}

/// Within a window on either side and in layers without one, and by `is_causal` false.
#[test]
fn embeddings_of_tokens_that_see_later_ones_are_those_of_the_fixtures() {
    let gpu = gpu();
    let (Some(gemma), Some(causal)) = (
        file("tests/fixtures/embedding_gemma/model.safetensors"),
        file("tests/fixtures/embeddings/model.safetensors"),
    ) else {
        return;
    };
    let mean = [(Pooling::Mean, "mean")];
    let gemma = gemma.parent().unwrap();
    let expected = requests(&gemma.join("expected.json"), &mean);
    let source = ModelSource::Folder(gemma.to_owned());
    assert_embeds(&source, &gpu, 256, &expected);
    let (made, folder) = (tempfile::tempdir().unwrap(), causal.parent().unwrap());
    std::fs::copy(&causal, made.path().join("model.safetensors")).unwrap();
    let config = read(&folder.join("config.json"));
    let source = configured(made.path(), config, [("is_causal", Value::Bool(false))]);
    let expected = requests(&folder.join("bidirectional.json"), &mean);
    assert_embeds(&source, &gpu, 256, &expected);
}

/// Of texts that take the kernel for few rows, that for prompts and those between, alone and several in a step.
#[test]
fn tokens_that_see_later_ones_have_the_embeddings_of_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let text = |len: u32| -> Vec<u32> { (0..len).map(|i| (i * 37 + len) % 251).collect() };
    let texts = [1, 12, 33, 65, 130].map(text);
    for dim in [64, 256] {
        let Some(source) = fixture(folder.path(), "embedding_gemma", dim) else {
            return;
        };
        for (dtype, within) in [(DType::F32, 1e-4), (DType::F16, 5e-2)] {
            let embed = |device: &Device| -> Vec<Vec<f32>> {
                let engine = start(model(&source, device, Some(dtype), 1), 256);
                let request = |text: &Vec<u32>| Request::embedding(text.clone(), Pooling::Mean);
                let alone = texts.iter().map(|text| run(&engine, request(text)));
                let alone: Vec<_> = alone.map(|one| one.embedding).collect();
                let together = engine.submit_all(texts.iter().map(request).collect());
                let together = together.unwrap().into_iter();
                let together = together.map(|events| collect(events).embedding);
                let all = alone.into_iter().chain(together).collect();
                assert_idle(&engine);
                all
            };
            let off = difference(&embed(&Device::Cpu), &embed(&gpu));
            println!("heads of {dim}, {dtype:?}: off by {off:.1e}");
            assert!(off < within, "heads of {dim}, {dtype:?}: off by {off}");
        }
    }
}
