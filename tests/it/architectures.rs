//! Every architecture against transformers: tiny random checkpoints, made by scripts/make-arch-fixtures.py.

use crate::common::hooked::interrupted;
use crate::common::rig::{Rig, Seq, argmax, distance};
use crate::common::tiny::{Tensors, open};
use crate::common::{
    assert_has, assert_idle, chains, collect, crowded, greedy, read_json, reference, run, sampled,
};
use crate::trees::RandomTrees;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineOptions, Request, SpecLimits};
use foretoken::model::LoadedModel;
use foretoken::model::{LoadOptions, Model, ModelSource, inspect};
use foretoken::spec::{Drafter, Tables};
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Maximum difference of a log-probability.
pub const TOLERANCE: f32 = 1e-4;

/// A checkpoint, and what transformers computes with it.
pub struct Fixture {
    pub folder: PathBuf,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    /// Log-probabilities after some tokens of the prompt.
    logprobs: Vec<(usize, Vec<f32>)>,
}

impl Fixture {
    pub fn read(folder: &Path) -> Self {
        let file = folder.join("expected.safetensors");
        let all = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let ids = |name: &str| {
            let ids: &Tensor = &all[name];
            ids.to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap()
        };
        let rows = ids("rows").into_iter().map(|row| row as usize);
        Self {
            folder: folder.to_owned(),
            prompt: ids("prompt"),
            greedy: ids("greedy"),
            logprobs: rows.zip(all["logprobs"].to_vec2().unwrap()).collect(),
        }
    }

    pub fn name(&self) -> String {
        let name = self.folder.file_name().unwrap();
        name.to_string_lossy().into_owned()
    }

    pub fn open(&self) -> Box<dyn LoadedModel> {
        open(&self.folder).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The tensors of the checkpoint.
    pub fn stored(&self) -> Tensors {
        let file = self.folder.join("model.safetensors");
        candle_core::safetensors::load(file, &Device::Cpu).unwrap()
    }

    /// A copy of the checkpoint with other tensors.
    pub fn with_tensors(&self, tensors: &Tensors) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::copy(self.folder.join("config.json"), at("config.json")).unwrap();
        candle_core::safetensors::save(tensors, at("model.safetensors")).unwrap();
        folder
    }

    /// How llama.cpp converts the checkpoint.
    pub fn conversion(&self) -> Json {
        read_json(self.folder.join("gguf.json"))
    }

    /// The file into which it is converted so, and its folder.
    pub fn converted(&self, how: &Json) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        write_gguf(self, how, &file, |all| all);
        (folder, file)
    }

    /// What differs from the log-probabilities of the prompt and the greedy text after it.
    pub fn compare(&self, model: Box<dyn Model>, tolerance: f32) -> Result<(), String> {
        self.compare_with(model, Seq::default(), tolerance)
    }

    /// The same of a sequence that has not begun.
    pub fn compare_with(
        &self,
        model: Box<dyn Model>,
        mut seq: Seq,
        tolerance: f32,
    ) -> Result<(), String> {
        let mut rig = Rig::new(model, 32, 4);
        let mut logits = rig.feed(&mut seq, &self.prompt);
        for (row, want) in &self.logprobs {
            let far = distance(&log_softmax(&logits[*row]), want);
            if far.is_nan() || far > tolerance {
                return Err(format!("row {row} differs by {far}"));
            }
        }
        let mut text = Vec::new();
        while text.len() < self.greedy.len() {
            let next = argmax(logits.last().unwrap());
            text.push(next);
            logits = rig.feed(&mut seq, &[next]);
        }
        match text == self.greedy {
            true => Ok(()),
            false => Err(format!("{text:?} should be {:?}", self.greedy)),
        }
    }
}

pub fn fixtures() -> Vec<Fixture> {
    fixtures_in(&folder_of_fixtures())
}

/// Those in the folders of a folder.
pub fn fixtures_in(folder: &Path) -> Vec<Fixture> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders.iter().map(|folder| Fixture::read(folder)).collect()
}

/// The fixture with this name.
pub fn fixture(name: &str) -> Fixture {
    Fixture::read(&folder_of_fixtures().join(name))
}

pub fn folder_of_fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures")
}

pub fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let log_sum = sum.ln();
    (logits.iter().map(|&x| (f64::from(x) - log_sum) as f32)).collect()
}

/// Except where activations are rounded beside blocks, so that routers may choose other experts: of these,
/// [`gpt_oss`](crate::gpt_oss) compares the values.
#[test]
fn log_probabilities_and_greedy_texts_are_those_of_transformers() {
    let mut wrong = Vec::new();
    let exact = |fixture: &Fixture| fixture.name() != "gpt_oss_mxfp4";
    for fixture in fixtures().into_iter().filter(exact) {
        let model = open(&fixture.folder).map_err(|e| e.to_string());
        if let Err(what) = model.and_then(|model| fixture.compare(model, TOLERANCE)) {
            wrong.push(format!("{}: {what}", fixture.name()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Tensors and their names.
pub type Named = Vec<(String, Tensor)>;

/// Writes the checkpoint of a fixture as llama.cpp's conversion would, in f32. `change` has the last word on its tensors.
pub fn write_gguf(fixture: &Fixture, how: &Json, file: &Path, change: fn(Named) -> Named) {
    write_gguf_of(&fixture.folder, how, file, change);
}

/// As [`write_gguf`], of the checkpoint in `folder`.
pub fn write_gguf_of(folder: &Path, how: &Json, file: &Path, change: fn(Named) -> Named) {
    let stored = folder.join("model.safetensors");
    let stored = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
    let mut tensors = Named::new();
    let parts = how["tensors"].as_object().unwrap().iter();
    // One tensor may become several.
    let parts = parts.flat_map(|(name, how)| match how {
        Json::Array(parts) => parts.iter().map(|how| (name, how)).collect(),
        how => vec![(name, how)],
    });
    for (name, how) in parts {
        let mut tensor = stored[name].to_dtype(DType::F32).unwrap();
        if let Some(runs) = how["factors"].as_array() {
            // Of so many rows each.
            let factors = runs.iter().flat_map(|run| {
                let rows = run[0].as_u64().unwrap() as usize;
                std::iter::repeat_n(run[1].as_f64().unwrap() as f32, rows)
            });
            let factors = Tensor::new(factors.collect::<Vec<_>>(), &Device::Cpu).unwrap();
            tensor = tensor
                .broadcast_mul(&factors.unsqueeze(1).unwrap())
                .unwrap();
        }
        if let Some(heads) = how["heads"].as_u64() {
            let inputs = tensor.dims()[1];
            tensor = tensor.reshape((heads as usize, (), inputs)).unwrap();
        }
        if let Some(rows) = how["rows"].as_array() {
            let [start, count] = [0, 1].map(|i| rows[i].as_u64().unwrap() as usize);
            tensor = tensor.narrow(tensor.rank() - 2, start, count).unwrap();
        }
        if let Some(columns) = how["columns"].as_array() {
            let [start, step] = [0, 1].map(|i| columns[i].as_u64().unwrap() as u32);
            let count = tensor.dims()[tensor.rank() - 1] as u32;
            let columns: Vec<u32> = (start..count).step_by(step as usize).collect();
            let columns = Tensor::new(columns, &Device::Cpu).unwrap();
            tensor = tensor.index_select(&columns, tensor.rank() - 1).unwrap();
        }
        if how["squeezed"] == true {
            tensor = tensor.squeeze(1).unwrap();
        }
        for (dim, key) in ["order", "column_order"].into_iter().enumerate() {
            if let Some(order) = how[key].as_array() {
                let order: Vec<u32> = order.iter().map(|i| i.as_u64().unwrap() as u32).collect();
                let order = Tensor::new(order, &Device::Cpu).unwrap();
                tensor = tensor.index_select(&order, dim).unwrap();
            }
        }
        if how["decay"] == true {
            tensor = tensor.exp().unwrap().neg().unwrap();
        }
        if how["transposed"] == true {
            tensor = tensor.transpose(1, 2).unwrap().contiguous().unwrap();
        }
        let heads = how["interleaved_heads"].as_u64().unwrap() as usize;
        if heads > 0 {
            let dims = tensor.dims().to_vec();
            let halves = tensor.reshape((heads, 2, dims[0] / heads / 2, ())).unwrap();
            let pairs = halves.transpose(1, 2).unwrap().contiguous().unwrap();
            tensor = pairs.reshape(dims).unwrap();
        }
        if let Some(dims) = how["dims"].as_array() {
            let dims = dims.iter().map(|dim| dim.as_u64().unwrap() as usize);
            tensor = tensor.reshape(dims.collect::<Vec<_>>()).unwrap();
        }
        // The conversion makes a vector of a matrix of one row.
        if tensor.dims()[0] == 1 {
            tensor = tensor.flatten_all().unwrap();
        }
        tensor = (tensor + how["offset"].as_f64().unwrap()).unwrap();
        let name = how["name"].as_str().unwrap().to_owned();
        tensors.push((name, tensor));
    }
    // The matrices of all experts are one tensor.
    for (name, parts) in how["stacked"].as_object().into_iter().flatten() {
        let parts = parts.as_array().unwrap().iter();
        let parts: Vec<&Tensor> = parts.map(|part| &stored[part.as_str().unwrap()]).collect();
        let stacked = Tensor::stack(&parts, 0).unwrap();
        tensors.push((name.clone(), stacked.to_dtype(DType::F32).unwrap()));
    }
    for (name, values) in how["extra"].as_object().unwrap() {
        let values: Vec<f32> = serde_json::from_value(values.clone()).unwrap();
        let values = Tensor::new(values, &Device::Cpu).unwrap();
        tensors.push((name.clone(), values));
    }
    let quantized = |t: &Tensor| QTensor::quantize(t, GgmlDType::F32).unwrap();
    let tensors: Vec<(String, QTensor)> = (change(tensors).iter())
        .map(|(name, tensor)| (name.clone(), quantized(tensor)))
        .collect();
    fn value(json: &Json) -> Value {
        match json {
            Json::Bool(flag) => Value::Bool(*flag),
            Json::String(text) => Value::String(text.clone()),
            Json::Array(list) => Value::Array(list.iter().map(value).collect()),
            number => match number.as_u64() {
                Some(whole) => Value::U32(whole as u32),
                None => Value::F32(number.as_f64().unwrap() as f32),
            },
        }
    }
    let mut metadata: Vec<(&str, Value)> = (how["metadata"].as_object().unwrap().iter())
        .map(|(key, json)| (key.as_str(), value(json)))
        .collect();
    metadata.push(("general.architecture", value(&how["architecture"])));
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut out = std::fs::File::create(file).unwrap();
    gguf_file::write(&mut out, &metadata, &tensors).unwrap();
}

/// Requests of which most begin alike, for a pool that does not hold all.
fn requests(fixture: &Fixture) -> Vec<Request> {
    let prompt = |kept: usize, other: u32| [&fixture.prompt[..kept], &[other, 7, other]].concat();
    let len = fixture.greedy.len();
    vec![
        greedy(&fixture.prompt, len),
        greedy(&prompt(40, 3), len),
        sampled(&prompt(40, 4), len, 5),
        greedy(&prompt(13, 3), len),
        sampled(&fixture.prompt, len, 6),
        sampled(&prompt(21, 4), len, 8),
    ]
}

/// Trees of drafts and chains of tables, in batches, with chunks, preemption and a prefix cache: the texts are those
/// that the model generates alone, from scratch.
#[test]
fn the_engine_changes_no_text() {
    for fixture in fixtures() {
        fixture.drive_engine();
    }
}

/// A prompt is read in chunks of which some are given up after some layers, with recurrent states and without: the text
/// is that of the model alone, also when it begins after what was cached then.
#[test]
fn chunks_that_are_given_up_change_no_text() {
    for fixture in fixtures() {
        let (what, mut interrupted_tokens) = (fixture.name(), 0);
        for seed in 1..4 {
            let options = EngineOptions {
                max_prompt_wait: Duration::ZERO,
                ..EngineOptions::default()
            };
            let model = interrupted(fixture.open(), seed);
            let engine = engine::spawn(model, None, 64, 4, options).unwrap();
            for _ in 0..2 {
                let answer = run(&engine, greedy(&fixture.prompt, 6));
                assert_eq!(answer.ids(), fixture.greedy[..6], "{what}");
            }
            assert_idle(&engine);
            assert!(engine.stats().prefix_cache_hits.get() > 0, "{what}");
            interrupted_tokens += engine.stats().interrupted_tokens.get();
        }
        assert!(interrupted_tokens > 0, "{what}: no chunk was given up");
    }
}

impl Fixture {
    /// Checks what [`the_engine_changes_no_text`] says.
    pub fn drive_engine(&self) {
        let (fixture, what) = (self, self.name());
        let requests = requests(fixture);
        let mut model = fixture.open();
        let wanted = requests.iter().map(|r| reference(&mut *model, r));
        let wanted: Vec<Vec<u32>> = wanted.collect();
        assert_eq!(wanted[0], fixture.greedy, "{what}");
        let trees = || {
            let part = model.subset(&[0]).unwrap();
            Box::new(RandomTrees::new(fixture.open(), part)) as Box<dyn Drafter>
        };
        let tree = SpecLimits {
            nodes: 6,
            topk: 3,
            ..chains(4)
        };
        let tables: Box<dyn Drafter> = Box::new(Tables::new(1 << 20));
        for (drafter, spec) in [(trees(), tree), (tables, chains(4))] {
            let options = crowded(spec, 20);
            let engine = engine::spawn(fixture.open(), Some(drafter), 24, 4, options).unwrap();
            let mut accepted = 0;
            for _ in 0..2 {
                let answers = engine.submit_all(requests.clone()).unwrap();
                for (answer, want) in answers.into_iter().zip(&wanted) {
                    let answer = collect(answer);
                    assert_eq!(&answer.ids(), want, "{what}");
                    accepted += answer.spec.accepted;
                }
            }
            assert_idle(&engine);
            let stats = engine.stats();
            let (preempted, cached) = (stats.preemptions.get(), stats.prefix_cache_hits.get());
            assert!(
                preempted > 0 && cached > 0 && accepted > 0,
                "{what}: {preempted} preemptions, {cached} cached tokens, {accepted} accepted"
            );
        }
    }
}

/// A draft of some layers needs those whose K and V they read.
#[test]
fn a_draft_has_the_layers_that_it_reads() {
    let fixture = fixture("gemma4");
    let model = fixture.open();
    let error = model.subset(&[0, 2, 5]).map(drop).unwrap_err().to_string();
    assert_has(&error, &["layer 5 reads K and V of layer 3"]);
    let part = model.subset(&[0, 3, 5]).unwrap();
    let bytes = part.kv_shape().bytes_per_token();
    assert_eq!(bytes, 2 * 4 * (2 * 8 + 2 * 16));
    // Chunks give what one forward gives.
    let feed = |parts: &[&[u32]]| {
        let mut rig = Rig::new(model.subset(&[0, 3, 5]).unwrap(), 32, 4);
        let mut seq = Seq::default();
        let rows = parts.iter().map(|part| rig.feed(&mut seq, part));
        rows.collect::<Vec<_>>().concat()
    };
    let (start, end) = fixture.prompt.split_at(17);
    assert_eq!(feed(&[start, end]), feed(&[&fixture.prompt]));
}

/// Of a class for images and texts only the decoder of texts is loaded and counted; what is neither is refused.
#[test]
fn tensors_of_images_are_skipped() {
    let all = fixtures().into_iter().filter(|fixture| {
        let text = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
        text.contains("ForConditionalGeneration")
    });
    let mut count = 0;
    for fixture in all {
        let source = ModelSource::Folder(fixture.folder.clone());
        let (_, inventory) = inspect(&source, &LoadOptions::default()).unwrap();
        let mut stored = fixture.stored();
        let of_images = |name: &str| {
            let parts = ["vision", "visual", "projector"];
            // Layers that predict further tokens are not read, either.
            parts.iter().any(|part| name.contains(part)) || name.starts_with("mtp.")
        };
        let texts = stored.iter().filter(|(name, _)| !of_images(name));
        let elements: usize = texts.map(|(_, tensor)| tensor.elem_count()).sum();
        assert_eq!(inventory.sum(|entry| entry.elements), elements as u64);
        assert!(!inventory.entries.iter().any(|entry| of_images(&entry.name)));

        let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        stored.insert("audio_tower.weight".into(), other);
        let folder = fixture.with_tensors(&stored);
        let error = open(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.contains("tensor audio_tower.weight"), "{error}");
        count += 1;
    }
    assert!(count >= 4);
    // Elsewhere, the same names are not known.
    let qwen = fixture("qwen3");
    let mut stored = qwen.stored();
    let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    stored.insert("model.visual.weight".into(), other);
    let folder = qwen.with_tensors(&stored);
    let error = open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("tensor model.visual.weight"), "{error}");
}

/// The documentation names the class of every fixture.
#[test]
fn the_documentation_has_a_row_for_each() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("docs/models.md")).unwrap();
    for fixture in fixtures() {
        let config = read_json(fixture.folder.join("config.json"));
        let class = config["architectures"][0].as_str().unwrap();
        assert!(readme.contains(&format!("`{class}`")), "{class}");
    }
}
