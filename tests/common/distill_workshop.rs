//! A tiny target, prompts and options: what the tests of `distill` share.

use super::rig::{Rig, Seq};
use super::tiny_folder::tokenizer_of;
use candle_core::{DType, Device, Tensor};
use foretoken::error::Error;
use foretoken::model::LoadedModel;
use foretoken::model::{LoadFormat, LoadOptions, ModelConfig, ModelSource, load};
use foretoken::train::features::Precision;
use foretoken::train::model::TrainModel;
use foretoken::train::{DistillOptions, Method, Objective, Products, run};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

pub const VOCAB: usize = 32;
pub const EOS: u32 = 30;

/// Writes a tokenizer of `VOCAB` tokens: letters, a space, a line break and special tokens.
pub fn write_tokenizer(folder: &Path) {
    let mut names: Vec<String> = ('a'..='z').map(String::from).collect();
    names.extend(["Ġ", "Ċ", "Ã", "©", "<|end|>", "<|start|>"].map(String::from));
    let tokenizer = tokenizer_of(&names, &["<|end|>", "<|start|>"]);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({
        "eos_token": "<|end|>",
        "chat_template": "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}<|start|>"
    });
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

pub fn config(vocab: usize, layers: usize, tied: bool) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "tie_word_embeddings": tied, "torch_dtype": "float32", "eos_token_id": EOS
    })
}

/// Writes a target with random weights. Its deeper matrices are large enough for peaked distributions.
pub fn write_target(folder: &Path) {
    write_target_of(folder, &config(VOCAB, 2, false));
}

/// The same, of another shape.
pub fn write_target_of(folder: &Path, config: &Value) {
    fs::create_dir_all(folder).unwrap();
    write_tokenizer(folder);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let config = ModelConfig::from_json(folder).unwrap();
    let model = TrainModel::new(config, None, 5, 4, &Device::Cpu).unwrap();
    let tensors = model.vars().iter().map(|(name, var)| {
        let scale = match name.as_str() {
            "lm_head.weight" => 25.0,
            name if name.contains("norm") => 1.0,
            _ => 8.0,
        };
        (name.clone(), (var.as_tensor() * scale).unwrap())
    });
    let tensors = tensors.collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

/// A folder with a target, a draft's config, a corpus of JSON lines and one of plain text.
pub struct Workshop {
    folder: tempfile::TempDir,
}

impl Workshop {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let this = Self { folder };
        write_target(&this.at("target"));
        fs::write(this.at("draft.json"), config(VOCAB, 1, true).to_string()).unwrap();
        let line = |n: u32| {
            let ids = |salt: u32, len: u32| -> Vec<u32> {
                (0..len)
                    .map(|i| (i * i * 5 + i * (n + 1) + salt * n) % 26)
                    .collect()
            };
            let mut written = ids(7, 20 + n % 9);
            written.push(EOS);
            json!({
                "id": n.to_string(), "category": "all", "sample": 0, "prompt": "abc",
                "prompt_ids": ids(3, 5), "text": "def", "ids": written, "finish_reason": "stop"
            })
        };
        let lines: Vec<String> = (0..40).map(|n| line(n).to_string()).collect();
        fs::write(this.at("corpus.jsonl"), lines.join("\n")).unwrap();
        let text = "the cat sat on the mat\nand the dog sat\n\n".repeat(40);
        fs::write(this.at("corpus.txt"), text).unwrap();
        this
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn options(&self, out: &str) -> DistillOptions {
        DistillOptions {
            model: self.at("target").display().to_string(),
            revision: None,
            method: Method::Draft,
            draft_config: Some(self.at("draft.json")),
            draft_size: None,
            draft_vocab_size: 8000,
            taps: Vec::new(),
            layers: None,
            block_size: 5,
            mask_token_id: None,
            markov_rank: None,
            init_from: None,
            corpus: vec![self.at("corpus.jsonl")],
            retokenize: false,
            out: self.at(out),
            resume: false,
            objective: Objective::Kl,
            top_k: 8,
            overlap_share: 0.0,
            ttt_steps: 3,
            ttt_stride: 1,
            products: Products::F32,
            features: Precision::F16,
            seq_len: 16,
            holdout: 0.1,
            batch_size: 4,
            micro_batch: Some(3),
            steps: 60,
            stop_after: None,
            learning_rate: 1e-2,
            warmup: None,
            weight_decay: 0.01,
            clip: 1.0,
            eval_every: 30,
            checkpoint_every: 20,
            seed: 3,
            device: "cpu".into(),
            threads: None,
        }
    }
}

/// The one-line error for `options`.
#[track_caller]
pub fn refused(options: &DistillOptions) -> String {
    match run(options) {
        Err(Error::Setup(line)) => {
            assert_eq!(line.lines().count(), 1, "{line}");
            line
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub fn refused_with(options: &DistillOptions, needle: &str) {
    let line = refused(options);
    assert!(line.contains(needle), "{line}");
}

pub fn weights(out: &Path) -> std::collections::HashMap<String, Tensor> {
    candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu).unwrap()
}

#[track_caller]
pub fn assert_same_weights(a: &Path, b: &Path) {
    let (a, b) = (weights(a), weights(b));
    assert_eq!(a.len(), b.len());
    for (name, a) in &a {
        assert_eq!(a.dtype(), b[name].dtype(), "{name}");
        let values = |t: &Tensor| -> Vec<f64> {
            let wide = t.to_dtype(DType::F64).unwrap();
            wide.flatten_all().unwrap().to_vec1().unwrap()
        };
        assert_eq!(values(a), values(&b[name]), "{name}");
    }
}

/// Loads a model in f32.
pub fn load_f32(path: &Path) -> Box<dyn LoadedModel> {
    let source = ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto).unwrap();
    let options = LoadOptions::of(DType::F32);
    load(&source, &options).unwrap()
}

/// All logits of `tokens`, from the serving decoder.
pub fn served_logits(path: &Path, tokens: &[u32]) -> Vec<Vec<f32>> {
    Rig::new(load_f32(path), 16, 4).feed(&mut Seq::default(), tokens)
}
