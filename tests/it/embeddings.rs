//! Embeddings against transformers and sentence-transformers: a tiny random model, made by
//! scripts/make-embedding-fixture.py.

use crate::common::hooked::hooked;
use crate::common::tiny::{HEADS, HIDDEN, noise, open, tensors, write_config};
use crate::common::tiny_gguf::write_gguf_with;
use crate::common::{assert_has, process};
use crate::common::{
    assert_idle, chains, collect, fixed_budget, greedy, read_json, reference, run, sampled,
    toy_model,
};
use candle_core::quantized::{GgmlDType, gguf_file};
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineHandle, EngineOptions, Events, Request};
use foretoken::model::{EmbeddingSpec, ForwardOutput, Model, ModelSource, Pooling};
use foretoken::spec::{Drafter, Tables};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Maximum difference of a value.
const TOLERANCE: f32 = 1e-4;

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embeddings")
}

/// A text or token ids, and what they become.
#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    last: Vec<f32>,
    mean: Vec<f32>,
    text: Option<String>,
    /// Of a text: what sentence-transformers encodes.
    embedding: Option<Vec<f32>>,
}

fn expected() -> Vec<Expected> {
    let text = std::fs::read_to_string(folder().join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// All texts of the fixture, pooled in both ways, and what they become.
fn requests() -> Vec<(Request, Vec<f32>)> {
    let both = |one: Expected| {
        [(Pooling::Last, one.last), (Pooling::Mean, one.mean)]
            .map(|(pooling, values)| (Request::embedding(one.ids.clone(), pooling), values))
    };
    expected().into_iter().flat_map(both).collect()
}

fn start(model: Box<dyn Model>, rows: usize, blocks: usize) -> EngineHandle {
    let options = EngineOptions {
        max_num_seqs: 6,
        max_num_batched_tokens: rows,
        ..fixed_budget(chains(4))
    };
    let tables: Box<dyn Drafter> = Box::new(Tables::new(1 << 20));
    let drafter = model.generates().then_some(tables);
    engine::spawn(model, drafter, blocks, 4, options).unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0., f32::max)
}

/// The model of the fixture under the names of `Qwen3ForCausalLM`, with an output layer.
fn with_head() -> (tempfile::TempDir, Box<dyn Model>) {
    let target = tempfile::tempdir().unwrap();
    let mut config = read_json(folder().join("config.json"));
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    write_config(target.path(), &config);
    let stored = candle_core::safetensors::load(folder().join("model.safetensors"), &Device::Cpu);
    let mut tensors: std::collections::HashMap<String, Tensor> = (stored.unwrap().into_iter())
        .map(|(name, tensor)| (format!("model.{name}"), tensor))
        .collect();
    let head = noise("lm_head.weight", &[257, 48]).to_dtype(DType::BF16);
    tensors.insert("lm_head.weight".into(), head.unwrap());
    candle_core::safetensors::save(&tensors, target.path().join("model.safetensors")).unwrap();
    let model = open(target.path()).unwrap();
    (target, model)
}

/// The embedding of each request, by itself and read at once.
fn alone() -> Vec<Vec<f32>> {
    let engine = start(open(&folder()).unwrap(), 2048, 64);
    let embed = |(request, _)| run(&engine, request).embedding;
    requests().into_iter().map(embed).collect()
}

#[test]
fn values_are_those_of_transformers() {
    for ((request, want), got) in requests().into_iter().zip(alone()) {
        let (far, len) = (distance(&got, &want), request.prompt.len());
        assert!(far <= TOLERANCE, "{:?} of {len}: {far}", request.pooling);
    }
}

/// In chunks, beside texts that are drafted, with preemption and without a prefix cache or with one: the same
/// bits. The other way round, no text changes.
#[test]
fn company_and_chunks_change_no_bit() {
    let (_folder, mut model) = with_head();
    let alone = alone();
    let prompt: Vec<u32> = (0..30).map(|i| i * i % 200).collect();
    let mut texts = [
        greedy(&prompt, 40),
        sampled(&prompt[..20], 40, 3),
        greedy(&[7, 8, 7, 8, 7], 60),
    ];
    for text in &mut texts {
        text.params.ignore_eos = true;
    }
    let wanted: Vec<Vec<u32>> = texts.iter().map(|r| reference(&mut *model, r)).collect();
    let (mut accepted, mut preempted) = (0, 0);
    for rows in [5, 20, 2048] {
        let (_folder, model) = with_head();
        let engine = start(model, rows, 51);
        // Whether requests meet in the pool depends on how fast they come.
        let mut rounds = 0;
        while rounds < 3 || rounds < 100 && preempted + engine.stats().preemptions.get() == 0 {
            rounds += 1;
            let embeddings = requests();
            let mut all: Vec<Request> = texts.to_vec();
            all.extend(embeddings.into_iter().map(|(request, _)| request));
            let answers = all.into_iter().map(|one| engine.submit(one).unwrap());
            let answers: Vec<Events> = answers.collect();
            let mut answers: Vec<_> = answers.into_iter().map(collect).collect();
            let vectors = answers.split_off(texts.len());
            for (text, want) in answers.iter().zip(&wanted) {
                assert_eq!(&text.ids(), want, "{rows} rows");
                accepted += text.spec.accepted;
            }
            for (i, (vector, want)) in vectors.iter().zip(&alone).enumerate() {
                assert_eq!(&vector.embedding, want, "{i}, {rows} rows");
                assert!(vector.tokens.is_empty() && vector.spec.drafted == 0);
            }
        }
        assert_idle(&engine);
        let stats = engine.stats();
        preempted += stats.preemptions.get();
        // What texts got; embeddings count as ended, and as prompts.
        assert_eq!(stats.generation_tokens.get(), rounds * (40 + 40 + 60));
        let ended = |reason| stats.requests_finished.with_label_values(&[reason]).get();
        assert_eq!((ended("stop"), ended("length")), (rounds * 16, rounds * 3));
        assert_eq!(stats.requests.prefill_time.get_sample_count(), rounds * 19);
        assert_eq!(stats.requests.max_tokens.get_sample_count(), rounds * 3);
    }
    assert!(accepted > 0 && preempted > 0, "{accepted}, {preempted}");
}

/// The last hidden state needs the last row, whose others may be cached; the mean needs all.
#[test]
fn the_prefix_cache_serves_what_needs_no_row_of_it() {
    let engine = start(open(&folder()).unwrap(), 64, 128);
    let prompt = expected().pop().unwrap().ids;
    for pooling in [Pooling::Mean, Pooling::Last] {
        let request = Request::embedding(prompt.clone(), pooling);
        let first = run(&engine, request.clone());
        let second = run(&engine, request);
        assert_eq!(first.embedding, second.embedding);
        let cached = match pooling {
            Pooling::Mean => 0,
            Pooling::Last => prompt.len() / 4 * 4 - 4,
        };
        assert_eq!(second.cached_tokens, cached);
    }
    assert_idle(&engine);
}

#[test]
fn a_model_without_an_output_layer_generates_nothing() {
    let model = open(&folder()).unwrap();
    assert!(!model.generates());
    let engine = start(model, 64, 64);
    let error = engine.submit(greedy(&[1], 1)).unwrap_err().to_string();
    assert!(error.contains("no output layer (lm_head)"), "{error}");
    // With the same names, but an embedding that is the output layer, too.
    let (folder, _) = with_head();
    let file = folder.path().join("model.safetensors");
    let text = std::fs::read_to_string(self::folder().join("config.json")).unwrap();
    let tied = text.replace(
        "\"tie_word_embeddings\": false",
        "\"tie_word_embeddings\": true",
    );
    assert_ne!(tied, text);
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(folder.path().join("config.json"), tied).unwrap();
    std::fs::copy(self::folder().join("model.safetensors"), &file).unwrap();
    assert!(open(folder.path()).unwrap().generates());
    // Without the layer and with the names of a whole model, something is missing.
    std::fs::write(folder.path().join("config.json"), text).unwrap();
    std::fs::write(&file, whole).unwrap();
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    tensors.remove("lm_head.weight");
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("lm_head.weight"), "{error}");
}

#[test]
fn who_leaves_is_cancelled_and_what_is_not_finite_fails_alone() {
    let engine = start(open(&folder()).unwrap(), 16, 64);
    let all = requests().into_iter().map(|(request, _)| request);
    drop(engine.submit_all(all.collect()).unwrap());
    assert_idle(&engine);

    let broken = hooked(toy_model(0.0), |toy, batch, kv| {
        let output = toy.forward(batch, kv)?;
        let Some(states) = &output.last_hidden else {
            return Ok(output);
        };
        let mut values: Vec<f32> = states.flatten_all()?.to_vec1()?;
        for (value, &row) in values.iter_mut().zip(&batch.last_hidden) {
            if batch.tokens[row as usize] == 13 {
                *value = f32::NAN;
            }
        }
        let states = Tensor::from_vec(values, states.dims(), &Device::Cpu)?;
        Ok(ForwardOutput {
            last_hidden: Some(states),
            ..output
        })
    });
    let engine = engine::spawn(broken, None, 64, 4, EngineOptions::default()).unwrap();
    let embed = |ids: &[u32]| Request::embedding(ids.to_vec(), Pooling::Mean);
    let answers = engine.submit_all(vec![embed(&[1, 2, 3]), embed(&[1, 13]), embed(&[4])]);
    let answers = answers.unwrap().into_iter();
    let ended: Vec<bool> = answers.map(|a| a.blocking_collect().is_ok()).collect();
    assert_eq!(ended, [true, false, true]);
    assert_eq!(engine.stats().nonfinite_logits.get(), 1);
    assert_idle(&engine);
}

/// The binary, with the tokenizer and the pooling of the folder.
#[test]
fn texts_become_what_sentence_transformers_encodes() {
    let mut server = process::Server::start(&format!("--model {}", folder().display()));
    assert!(server.startup_line().contains("/v1/embeddings"));
    let (texts, wanted): (Vec<_>, Vec<_>) = (expected().into_iter())
        .filter_map(|one| Some((one.text?, one.embedding?)))
        .unzip();
    let reply = server.json("/v1/embeddings", &json!({"input": texts}));
    let ids: usize = expected()
        .iter()
        .filter(|one| one.text.is_some())
        .map(|one| one.ids.len())
        .sum();
    assert_eq!(reply["usage"]["prompt_tokens"], ids);
    for (one, want) in reply["data"].as_array().unwrap().iter().zip(&wanted) {
        let values: Vec<f32> = serde_json::from_value(one["embedding"].clone()).unwrap();
        let far = distance(&values, want);
        assert!(far <= TOLERANCE, "{far}");
    }
    let refused = server.post("/v1/completions", r#"{"prompt": "a"}"#);
    assert!(
        refused.starts_with("HTTP/1.1 400") && refused.contains("lm_head"),
        "{refused}"
    );
    assert_eq!(
        server.stop("TERM", std::time::Duration::from_secs(20)),
        Some(0)
    );
}

/// The default prompt of the repository comes before each text, whatever is pooled, unless a request chooses another.
#[test]
fn prompts_are_those_of_sentence_transformers() {
    let wanted = read_json(folder().join("prompted.json"));
    let model = tempfile::tempdir().unwrap();
    std::fs::create_dir(model.path().join("1_Pooling")).unwrap();
    for name in [
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
    ] {
        std::fs::copy(folder().join(name), model.path().join(name)).unwrap();
    }
    let prompts = model.path().join("config_sentence_transformers.json");
    let plain = expected().into_iter().filter_map(|one| one.embedding);
    let plain: Vec<Vec<f32>> = plain.collect();
    let vectors = |value: &Value| serde_json::from_value::<Vec<Vec<f32>>>(value.clone()).unwrap();
    let mut unset = wanted["config"].clone();
    unset["default_prompt_name"] = Value::Null;
    let queries = || vectors(&wanted["lasttoken"]);
    let mean = vectors(&wanted["mean"]);
    for (config, flags, kind, want) in [
        (&wanted["config"], "", None, queries()),
        (&wanted["config"], "--pooling mean", None, mean),
        (&wanted["config"], "", Some("passage"), plain.clone()),
        (&unset, "", None, plain),
        (&unset, "", Some("query"), queries()),
    ] {
        std::fs::write(&prompts, config.to_string()).unwrap();
        let flags = format!("--model {} {flags}", model.path().display());
        let server = process::Server::start(&flags);
        let body = json!({"input": wanted["texts"], "input_type": kind});
        let reply = server.json("/v1/embeddings", &body);
        let data = reply["data"].as_array().unwrap();
        assert_eq!(data.len(), want.len());
        for (one, want) in data.iter().zip(&want) {
            let values: Vec<f32> = serde_json::from_value(one["embedding"].clone()).unwrap();
            let far = distance(&values, want);
            assert!(far <= TOLERANCE, "{flags}: {far}");
        }
    }
}

/// What serves nothing is refused at start.
#[test]
fn without_an_output_layer_the_pooling_must_be_known() {
    let bare = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(folder().join(name), bare.path().join(name)).unwrap();
    }
    let model = bare.path().display();
    let mut command = process::foretoken();
    let error = process::refusal(&command.arg("--model").arg(bare.path()).output().unwrap());
    assert_has(&error, &["set --pooling last or --pooling mean"]);
    let server = process::Server::start(&format!("--model {model} --pooling mean"));
    let reply = server.post("/v1/embeddings", r#"{"input": "a"}"#);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
}

/// llama.cpp's key: 1 is the mean, 3 the last hidden state; 2, that of a first token, is refused at once, and so is 4, a layer
/// for classification, but of a Qwen3.
#[test]
fn gguf_files_say_how_they_pool() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let tensors = tensors(HIDDEN / HEADS, DType::F32);
    let spec = |pooling| {
        let spec = EmbeddingSpec::new(pooling, true);
        Some(spec)
    };
    for (kind, want) in [
        (0, None),
        (1, spec(Pooling::Mean)),
        (2, None),
        (3, spec(Pooling::Last)),
        (4, None),
    ] {
        let more = [("llama.pooling_type", gguf_file::Value::U32(kind))];
        write_gguf_with(&file, &tensors, GgmlDType::F32, &[1.; 8], &more);
        let opened = open(&file).map(drop).map_err(|e| e.to_string());
        match kind {
            2 | 4 => {
                let named = format!("pooling_type {kind}");
                assert!(opened.unwrap_err().contains(&named));
            }
            _ => opened.unwrap(),
        }
        let source = ModelSource::Gguf(file.as_path().into());
        assert_eq!(
            foretoken::model::embedding_spec(&source, None).unwrap(),
            want
        );
        let chosen = foretoken::model::embedding_spec(&source, Some(Pooling::Last)).unwrap();
        assert_eq!(chosen, spec(Pooling::Last));
    }
}
