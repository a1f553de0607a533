//! Embeddings on a GPU: those that sentence-transformers computes, alone and beside others.

use super::{BLOCK_SIZE, BLOCKS, gpu};
use crate::common::project::file;
use crate::common::{assert_idle, collect, run};
use candle_core::DType;
use foretoken::engine::{self, EngineOptions, EngineThread, Request};
use foretoken::model::{LoadOptions, ModelSource, Pooling, load};
use serde_json::Value;

/// Maximum difference of a value.
const TOLERANCE: f32 = 1e-4;

#[track_caller]
fn compare(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    let off = off.fold(0., f32::max);
    assert!(off <= TOLERANCE, "off by {off}");
}

#[test]
fn embeddings_are_those_of_the_fixture() {
    let gpu = gpu();
    let (Some(folder), Some(expected)) = (
        file("tests/fixtures/embeddings/model.safetensors"),
        file("tests/fixtures/embeddings/expected.json"),
    ) else {
        return;
    };
    let source = ModelSource::Folder(folder.parent().unwrap().to_owned());
    let options = LoadOptions {
        dtype: Some(DType::F32),
        device: gpu.clone(),
        ..LoadOptions::default()
    };
    let expected: Value =
        serde_json::from_str(&std::fs::read_to_string(expected).unwrap()).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let floats = |value: &Value| -> Vec<f32> { serde_json::from_value(value.clone()).unwrap() };
    let both = |text: &Value| {
        [(Pooling::Last, "last"), (Pooling::Mean, "mean")].map(|(pooling, name)| {
            let request = Request::embedding(ids(&text["ids"]), pooling);
            (request, floats(&text[name]))
        })
    };
    let requests: Vec<(Request, Vec<f32>)> =
        expected.as_array().unwrap().iter().flat_map(both).collect();
    assert!(!requests.is_empty());
    // Steps of a few rows divide texts.
    for rows in [8, 512] {
        let engine = engine::spawn(
            load(&source, &options).unwrap(),
            None,
            BLOCKS,
            BLOCK_SIZE,
            EngineOptions {
                max_num_seqs: 3,
                max_num_batched_tokens: rows,
                ..EngineOptions::default()
            },
        );
        let engine = EngineThread::new(engine.unwrap(), EngineThread::PATIENCE);
        for (request, want) in &requests {
            compare(&run(&engine, request.clone()).embedding, want);
        }
        let events: Vec<_> = (requests.iter())
            .map(|(request, _)| engine.submit(request.clone()).unwrap())
            .collect();
        for (events, (_, want)) in events.into_iter().zip(&requests) {
            compare(&collect(events).embedding, want);
        }
        assert_idle(&engine);
    }
}
