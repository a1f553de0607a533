//! A model's configuration: shapes, RoPE, special ids. Architectures differ by flags, not by types.

mod refuse;

use crate::error::{Error, Result};
use crate::files;
use crate::kv::KvShape;
use candle_core::DType;
use candle_core::quantized::gguf_file::{Content, Value};
use refuse::{Shape, check_gguf, check_json};
use serde::Deserialize;
use std::path::Path;

pub use candle_transformers::models::llama::{Llama3RopeConfig, Llama3RopeType};

/// The shapes and constants of a decoder, from `config.json` or GGUF metadata.
#[derive(Debug, Clone, Default)]
pub struct ModelConfig {
    /// `llama`, `qwen2` or `qwen3`.
    pub architecture: String,
    /// Number of ids of the embedding and, in most models, of the output layer.
    pub vocab_size: usize,
    /// Number of ids of the output layer, if a draft predicts only some ids; the tensor `d2t` says which.
    pub draft_vocab_size: Option<usize>,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// Key/value heads (grouped-query attention); divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head: as given, otherwise `hidden_size / num_heads`.
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f32,
    /// Llama 3's frequency scaling, if the model has it.
    pub rope_scaling: Option<Llama3RopeConfig>,
    /// The longest sequence that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have a bias (Qwen2).
    pub qkv_bias: bool,
    /// Whether each head of q and k has an RMSNorm (Qwen3).
    pub qk_norm: bool,
    /// Ids that end a text; zero or more.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
}

/// The values of [`ModelConfig::architecture`], each with its Hugging Face class.
const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];

/// Tokens that end a turn or a text if a GGUF's vocabulary has them.
const END_TOKENS: [&str; 5] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
];

/// The architecture of an EAGLE-3 head in a GGUF file.
pub const GGUF_EAGLE3: &str = "eagle3";
/// That of a parallel head.
pub const GGUF_DFLASH: &str = "dflash";
/// Those of all draft heads.
pub const GGUF_HEADS: [&str; 2] = [GGUF_EAGLE3, GGUF_DFLASH];

/// The fields of `config.json` that we read.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    vocab_size: usize,
    draft_vocab_size: Option<usize>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f32>,
    rope_scaling: Option<RawRope>,
    /// transformers 5 stores `rope_theta` and the scaling here.
    rope_parameters: Option<RawRope>,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<Ids>,
    bos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    /// The old name; transformers 5 may write both.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<usize>,
}

#[derive(Deserialize, Default)]
struct RawGeneration {
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn list(self) -> Vec<u32> {
        match self {
            Ids::One(id) => vec![id],
            Ids::Many(ids) => ids,
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` (the file, or the folder that contains it), and adds the end tokens of a
    /// `generation_config.json` beside it.
    ///
    /// # Errors
    /// A setup error that names the file and the problem.
    pub fn from_json(path: &Path) -> Result<Self> {
        let file = files::config_of(path);
        let text = files::read_text(&file)?;
        let mut config = Self::parse(&text).map_err(|e| Error::in_file(&file, e))?;
        let generation = file.with_file_name("generation_config.json");
        if let Some(text) = files::read_text_if_any(&generation)? {
            let raw: RawGeneration =
                serde_json::from_str(&text).map_err(|e| Error::in_file(&generation, e))?;
            let ids = raw.eos_token_id.map_or(vec![], Ids::list);
            check_ids("eos_token_id", &ids, config.vocab_size)
                .map_err(|e| Error::in_file(&generation, e))?;
            add_missing(&mut config.eos_token_ids, ids);
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let raw: RawConfig = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let all: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let architecture = raw.architecture()?;
        if raw.head_dim.is_none()
            && !raw
                .hidden_size
                .is_multiple_of(raw.num_attention_heads.max(1))
        {
            return Err(format!(
                "hidden_size {} is not divisible by num_attention_heads {}, and there is no head_dim",
                raw.hidden_size, raw.num_attention_heads
            ));
        }
        let rope = raw.rope_parameters.or(raw.rope_scaling);
        let config = Self {
            vocab_size: raw.vocab_size,
            draft_vocab_size: raw.draft_vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_layers: raw.num_hidden_layers,
            num_heads: raw.num_attention_heads,
            num_kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: match raw.head_dim {
                Some(given) => given,
                None => raw.hidden_size / raw.num_attention_heads.max(1),
            },
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: raw
                .rope_theta
                .or(rope.as_ref().and_then(|r| r.rope_theta))
                .unwrap_or(10_000.),
            rope_scaling: rope.map_or(Ok(None), RawRope::scaling)?,
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(2048),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: architecture == "qwen2",
            qk_norm: architecture == "qwen3",
            eos_token_ids: raw.eos_token_id.map_or(vec![], Ids::list),
            bos_token_id: raw.bos_token_id.and_then(|ids| ids.list().first().copied()),
            architecture,
        };
        config.validate()?;
        check_ids("eos_token_id", &config.eos_token_ids, config.vocab_size)?;
        check_json(&all, &config.shape())?;
        Ok(config)
    }

    /// Reads GGUF metadata. `file` only names the file in errors.
    ///
    /// # Errors
    /// A setup error that names the file and what is missing or unsupported.
    pub fn from_gguf(content: &Content, file: &Path) -> Result<Self> {
        Self::parse_gguf(content).map_err(|e| Error::in_file(file, e))
    }

    fn parse_gguf(content: &Content) -> Result<Self, String> {
        let metadata = Metadata::new(content)?;
        let hidden_size = metadata.size("embedding_length")?;
        let num_heads = metadata.size("attention.head_count")?;
        let architecture = metadata.architecture.clone();
        let vocab_size = metadata.vocab_size()?;
        let config = Self {
            vocab_size,
            draft_vocab_size: match content.tensor_infos.get("d2t") {
                Some(info) => info.shape.dims().first().copied(),
                None => None,
            },
            hidden_size,
            intermediate_size: metadata.size("feed_forward_length")?,
            num_layers: metadata.size("block_count")?,
            num_heads,
            num_kv_heads: metadata.size_or("attention.head_count_kv", num_heads)?,
            head_dim: metadata.size_or("attention.key_length", hidden_size / num_heads.max(1))?,
            rms_norm_eps: f64::from(metadata.float("attention.layer_norm_rms_epsilon")?),
            rope_theta: match metadata.get("rope.freq_base") {
                Some(_) => metadata.float("rope.freq_base")?,
                None => 10_000.,
            },
            // GGUF stores Llama 3's scaling as a tensor, `rope_freqs.weight`.
            rope_scaling: None,
            max_position_embeddings: metadata.size_or("context_length", 2048)?,
            tie_word_embeddings: !content.tensor_infos.contains_key("output.weight"),
            qkv_bias: content.tensor_infos.contains_key("blk.0.attn_q.bias"),
            qk_norm: content
                .tensor_infos
                .contains_key("blk.0.attn_q_norm.weight"),
            eos_token_ids: metadata.end_ids(vocab_size)?,
            bos_token_id: metadata.id("tokenizer.ggml.bos_token_id"),
            architecture,
        };
        config.validate()?;
        check_gguf(|key| metadata.get(key), &config.shape())?;
        Ok(config)
    }

    /// The shape of a pool with K and V in `dtype`.
    pub fn kv_shape(&self, dtype: DType) -> KvShape {
        KvShape {
            num_layers: self.num_layers,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            dtype,
        }
    }

    /// Number of rows of the output layer.
    pub fn output_size(&self) -> usize {
        self.draft_vocab_size.unwrap_or(self.vocab_size)
    }

    fn validate(&self) -> Result<(), String> {
        if self.output_size() > self.vocab_size {
            return Err(format!(
                "draft_vocab_size {} is more than vocab_size {}",
                self.output_size(),
                self.vocab_size
            ));
        }
        // With these limits no product of sizes overflows, and every position fits in u32.
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("draft_vocab_size", self.output_size(), 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 22),
            ("num_hidden_layers", self.num_layers, 1 << 12),
            ("num_attention_heads", self.num_heads, 1 << 12),
            ("num_key_value_heads", self.num_kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                1 << 30,
            ),
        ];
        for (name, size, max) in sizes {
            if size == 0 {
                return Err(format!("{name} is 0"));
            }
            if size > max {
                return Err(format!("{name} {size} is over the limit of {max}"));
            }
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.) {
            return Err(format!(
                "rope_theta {} must be finite and more than 0",
                self.rope_theta
            ));
        }
        if !(self.rms_norm_eps.is_finite() && (0. ..1.).contains(&self.rms_norm_eps)) {
            return Err(format!(
                "rms_norm_eps {} must be from 0 to below 1",
                self.rms_norm_eps
            ));
        }
        if let Some(scaling) = &self.rope_scaling {
            check_scaling(scaling)?;
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(format!(
                "{} attention heads are not divisible by {} key/value heads",
                self.num_heads, self.num_kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {} is odd", self.head_dim));
        }
        Ok(())
    }

    fn shape(&self) -> Shape {
        Shape {
            head_dim: self.head_dim,
            max_position_embeddings: self.max_position_embeddings,
            slides_by_default: self.architecture == "llama",
        }
    }

    /// The rotation per position, in radians, of each pair of a head: `[head_dim / 2]`, with Llama 3's
    /// scaling if the model has it.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let plain = (0..self.head_dim)
            .step_by(2)
            .map(|i| 1. / self.rope_theta.powf(i as f32 / self.head_dim as f32));
        match &self.rope_scaling {
            None => plain.collect(),
            Some(scaling) => plain.map(|f| scale_frequency(f, scaling)).collect(),
        }
    }
}

/// Checks that the factors make no frequency zero, infinite or NaN.
fn check_scaling(scaling: &Llama3RopeConfig) -> Result<(), String> {
    let positive = [
        ("factor", scaling.factor),
        ("low_freq_factor", scaling.low_freq_factor),
        ("high_freq_factor", scaling.high_freq_factor),
        (
            "original_max_position_embeddings",
            scaling.original_max_position_embeddings as f32,
        ),
    ];
    for (name, value) in positive {
        if !(value.is_finite() && value > 0.) {
            return Err(format!(
                "rope_scaling: {name} {value} must be finite and more than 0"
            ));
        }
    }
    match scaling.high_freq_factor > scaling.low_freq_factor {
        true => Ok(()),
        false => Err(format!(
            "rope_scaling: high_freq_factor {} must be more than low_freq_factor {}",
            scaling.high_freq_factor, scaling.low_freq_factor
        )),
    }
}

/// Llama 3's rule: long wavelengths are divided by `factor`, short ones are kept, those in between are
/// interpolated (transformers `modeling_rope_utils.py`, `_compute_llama3_parameters`).
fn scale_frequency(frequency: f32, scaling: &Llama3RopeConfig) -> f32 {
    let original = scaling.original_max_position_embeddings as f32;
    let wavelength = 2. * std::f32::consts::PI / frequency;
    if wavelength < original / scaling.high_freq_factor {
        return frequency;
    }
    if wavelength > original / scaling.low_freq_factor {
        return frequency / scaling.factor;
    }
    let span = scaling.high_freq_factor - scaling.low_freq_factor;
    let smooth = (original / wavelength - scaling.low_freq_factor) / span;
    (1. - smooth) * frequency / scaling.factor + smooth * frequency
}

impl RawConfig {
    fn architecture(&self) -> Result<String, String> {
        let class = self.architectures.iter().flatten().next();
        let found = ARCHITECTURES.iter().find(|(kind, name)| match class {
            Some(class) => class == name,
            None => self.model_type.as_deref() == Some(kind),
        });
        match found {
            Some((kind, _)) => Ok((*kind).to_owned()),
            None => Err(unsupported(
                class.or(self.model_type.as_ref()).map(String::as_str),
            )),
        }
    }
}

impl RawRope {
    fn scaling(self) -> Result<Option<Llama3RopeConfig>, String> {
        if let (Some(new), Some(old)) = (&self.rope_type, &self.old_type)
            && new != old
        {
            return Err(format!(
                "rope_type '{new}' and type '{old}' must be the same"
            ));
        }
        match self.rope_type.or(self.old_type).as_deref() {
            None if self.factor.is_some() => Err("rope_scaling lacks rope_type".into()),
            None | Some("default") => Ok(None),
            Some("llama3") => {
                let need = |value: Option<f32>, name: &str| {
                    value.ok_or(format!("rope_scaling lacks {name}"))
                };
                Ok(Some(Llama3RopeConfig {
                    factor: need(self.factor, "factor")?,
                    low_freq_factor: need(self.low_freq_factor, "low_freq_factor")?,
                    high_freq_factor: need(self.high_freq_factor, "high_freq_factor")?,
                    original_max_position_embeddings: self
                        .original_max_position_embeddings
                        .ok_or("rope_scaling lacks original_max_position_embeddings")?,
                    rope_type: Llama3RopeType::Llama3,
                }))
            }
            Some(other) => Err(format!(
                "rope scaling '{other}' is not supported: only default and llama3 are"
            )),
        }
    }
}

/// GGUF metadata under the architecture's prefix.
struct Metadata<'a> {
    content: &'a Content,
    architecture: String,
}

impl<'a> Metadata<'a> {
    fn new(content: &'a Content) -> Result<Self, String> {
        let architecture = match content.metadata.get("general.architecture") {
            Some(Value::String(name)) => name.clone(),
            _ => return Err("general.architecture is missing".into()),
        };
        let is_known = ARCHITECTURES.iter().any(|(kind, _)| *kind == architecture);
        if !is_known && !GGUF_HEADS.contains(&&*architecture) {
            return Err(unsupported(Some(&architecture)));
        }
        Ok(Self {
            content,
            architecture,
        })
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        let key = format!("{}.{key}", self.architecture);
        self.content.metadata.get(&key)
    }

    fn size(&self, key: &str) -> Result<usize, String> {
        let value = self.get(key).and_then(|v| v.to_u64().ok());
        value.map(|v| v as usize).ok_or(format!(
            "{}.{key} is missing or no number",
            self.architecture
        ))
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, String> {
        match self.get(key) {
            Some(_) => self.size(key),
            None => Ok(default),
        }
    }

    fn float(&self, key: &str) -> Result<f32, String> {
        let value = self.get(key).and_then(|v| v.to_f32().ok());
        value.ok_or(format!(
            "{}.{key} is missing or no number",
            self.architecture
        ))
    }

    fn id(&self, key: &str) -> Option<u32> {
        self.content.metadata.get(key)?.to_u32().ok()
    }

    /// The number of rows of the embedding, which is also that of the logits. The tokenizer may have fewer
    /// ids.
    fn vocab_size(&self) -> Result<usize, String> {
        let embedding = self.content.tensor_infos.get("token_embd.weight");
        let dims = embedding.map(|info| info.shape.dims());
        match dims {
            Some([rows, _]) => Ok(*rows),
            // A head shares the target's embedding.
            None if GGUF_HEADS.contains(&&*self.architecture) => self.size("vocab_size"),
            _ => Err("token_embd.weight is missing or no matrix".into()),
        }
    }

    /// The declared end ids, and the ids of the tokens with which chat templates end turns.
    fn end_ids(&self, vocab_size: usize) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            let key = format!("tokenizer.ggml.{key}");
            let declared: Vec<u32> = self.id(&key).into_iter().collect();
            check_ids(&key, &declared, vocab_size)?;
            add_missing(&mut ids, declared);
        }
        if let Some(Value::Array(tokens)) = self.content.metadata.get("tokenizer.ggml.tokens") {
            let ends = tokens.iter().take(vocab_size).enumerate().filter(
                |(_, token)| matches!(token, Value::String(t) if END_TOKENS.contains(&t.as_str())),
            );
            add_missing(&mut ids, ends.map(|(id, _)| id as u32));
        }
        Ok(ids)
    }
}

/// Checks that a model with `vocab_size` ids can produce all of `ids`, those of `key`.
fn check_ids(key: &str, ids: &[u32], vocab_size: usize) -> Result<(), String> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => Err(format!("{key} {id} must be below vocab_size {vocab_size}")),
    }
}

fn add_missing(ids: &mut Vec<u32>, more: impl IntoIterator<Item = u32>) {
    for id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

fn unsupported(name: Option<&str>) -> String {
    let supported: Vec<&str> = ARCHITECTURES.iter().map(|(_, class)| *class).collect();
    format!(
        "architecture '{}' is not supported: only {} are",
        name.unwrap_or("(none given)"),
        supported.join(", ")
    )
}
