//! The keys of a checkpoint's configuration. Whoever acts on a key takes it; what is left at the end is refused,
//! unless it is known to change nothing: ignoring it could give wrong outputs.

mod neutral;

use candle_core::quantized::gguf_file::Value as GgufValue;
use foretoken_core::error::clipped;
use foretoken_core::gguf::Header;
use neutral::{is_harmless, is_neutral};
use serde_json::{Map, Value};
use std::collections::HashSet;

pub use neutral::ModelShape;

/// The keys that nobody has taken yet, by the names of `config.json`.
#[derive(Default)]
pub struct Keys {
    left: Map<String, Value>,
    /// Facts of a GGUF file; `None` if the keys are from JSON.
    gguf: Option<GgufFacts>,
}

struct GgufFacts {
    architecture: String,
    /// The names of all tensors.
    tensors: HashSet<String>,
    /// Whether there are divisors of the frequencies of a LongRoPE.
    rope_factors: bool,
}

/// Keys of GGUF metadata, after the architecture's name, and of `config.json`.
const GGUF_KEYS: [(&str, &str); 25] = [
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.scale", "attention_multiplier"),
    ("attention.sliding_window", "sliding_window"),
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_scale", "embedding_multiplier"),
    ("embedding_length", "hidden_size"),
    ("expert_count", "num_experts"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("expert_shared_count", "n_shared_experts"),
    (
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
    ),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("feed_forward_length", "intermediate_size"),
    ("interleave_moe_layer_step", "moe_layer_interval"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("nextn_predict_layers", "num_nextn_predict_layers"),
    ("residual_scale", "residual_multiplier"),
    ("rope.freq_base", "rope_theta"),
];

impl Keys {
    /// The keys of a JSON object.
    ///
    /// # Errors
    /// If `json` is not an object.
    pub fn of_json(json: Value) -> Result<Self, String> {
        match json {
            Value::Object(left) => Ok(Self { left, gguf: None }),
            _ => Err("it must be a JSON object".into()),
        }
    }

    /// The keys of GGUF metadata under the name of `architecture`.
    pub fn of_gguf(header: &Header, architecture: &str) -> Self {
        let prefix = format!("{architecture}.");
        let under = header.metadata.iter().filter_map(|(key, value)| {
            let key = key.strip_prefix(&prefix)?;
            let known = GGUF_KEYS.iter().find(|(gguf, _)| *gguf == key);
            let key = known.map_or(key, |(_, ours)| ours);
            Some((key.to_owned(), json_of(value)))
        });
        Self {
            left: under.collect(),
            gguf: Some(GgufFacts {
                architecture: architecture.to_owned(),
                tensors: header.tensors.keys().cloned().collect(),
                rope_factors: header.tensors.contains_key("rope_factors_long.weight"),
            }),
        }
    }

    /// Sets a key that the configuration says in another way.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.left.insert(key.to_owned(), value.into());
    }

    /// Sets a key that is missing, as a class of transformers does; not of a GGUF file.
    pub fn default(&mut self, key: &str, value: impl Into<Value>) {
        if !self.is_gguf() {
            self.default_of_both(key, value);
        }
    }

    /// Sets a key that is missing, as a class of transformers does, and llama.cpp for a GGUF file.
    pub fn default_of_both(&mut self, key: &str, value: impl Into<Value>) {
        let entry = self.left.entry(key.to_owned());
        entry.or_insert_with(|| value.into());
    }

    /// Gives a key the name that other architectures have for it.
    pub fn rename(&mut self, from: &str, to: &str) {
        if let Some(value) = self.left.remove(from) {
            self.left.entry(to.to_owned()).or_insert(value);
        }
    }

    /// Whether `key` is there, if only as null.
    pub fn has(&self, key: &str) -> bool {
        self.left.contains_key(key)
    }

    /// Leaves only the keys for which `keep` holds.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.left.retain(|key, _| keep(key));
    }

    /// Adds the keys of `others` that are missing here, and all that `others` has of `first`.
    pub fn add(&mut self, others: Self, first: &[&str]) {
        for (key, value) in others.left {
            if first.contains(&key.as_str()) && !value.is_null() {
                self.set(&key, value)
            } else {
                self.default(&key, value)
            }
        }
    }

    /// Takes a key that must be `only` if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn only(&mut self, key: &str, only: impl Into<Value>) -> Result<(), String> {
        let (value, only) = (self.take(key), only.into());
        if value.is_null() || value == only {
            Ok(())
        } else {
            Err(self.refused(key, &value, &format!("only {only} is")))
        }
    }

    /// Takes keys that someone else reads, or that change nothing: their names, with spaces between them.
    pub fn ignore(&mut self, keys: &str) {
        for key in keys.split_whitespace() {
            self.left.remove(key);
        }
    }

    /// Whether a GGUF file has the tensor `part`, llama.cpp's name, in its first layer; `None` = it is no GGUF
    /// file, and the configuration says it.
    pub fn has_tensor(&self, part: &str) -> Option<bool> {
        self.has_tensor_in(0, part)
    }

    /// As [`Keys::has_tensor`], but in layer `index`.
    pub fn has_tensor_in(&self, index: usize, part: &str) -> Option<bool> {
        let name = format!("blk.{index}.{part}");
        (self.gguf.as_ref()).map(|facts| facts.tensors.contains(&name))
    }

    /// Whether a GGUF file was read that has divisors of the frequencies of a LongRoPE.
    pub fn has_rope_factors(&self) -> bool {
        self.gguf.as_ref().is_some_and(|facts| facts.rope_factors)
    }

    /// Whether a GGUF file was read.
    pub fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// The name of `key` in the file.
    fn shown(&self, key: &str) -> String {
        match &self.gguf {
            None => key.to_owned(),
            Some(GgufFacts { architecture, .. }) => {
                let known = GGUF_KEYS.iter().find(|(_, ours)| *ours == key);
                format!("{architecture}.{}", known.map_or(key, |(gguf, _)| gguf))
            }
        }
    }

    /// Takes `key`; null if there is none.
    pub fn take(&mut self, key: &str) -> Value {
        self.left.remove(key).unwrap_or_default()
    }

    /// A copy of `key`; null if there is none.
    pub fn peek(&self, key: &str) -> Value {
        self.left.get(key).cloned().unwrap_or_default()
    }

    /// Takes `key`, which must be `what` if it is there.
    fn typed<T>(
        &mut self,
        key: &str,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        match self.take(key) {
            Value::Null => Ok(None),
            value => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(self.refused(key, &value, &format!("it must be {what}"))),
            },
        }
    }

    /// Takes a size.
    ///
    /// # Errors
    /// If it is something else.
    pub fn size(&mut self, key: &str) -> Result<Option<usize>, String> {
        self.typed(key, "a whole number", |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// Takes a size that must be there.
    ///
    /// # Errors
    /// If it is missing or something else.
    pub fn needed_size(&mut self, key: &str) -> Result<usize, String> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// Takes a number.
    ///
    /// # Errors
    /// If it is something else.
    pub fn number(&mut self, key: &str) -> Result<Option<f64>, String> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// As [`Keys::number`], in f32.
    ///
    /// # Errors
    /// If it is something else.
    pub fn float(&mut self, key: &str) -> Result<Option<f32>, String> {
        Ok(self.number(key)?.map(|number| number as f32))
    }

    /// Takes a flag.
    ///
    /// # Errors
    /// If it is something else.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Takes a text.
    ///
    /// # Errors
    /// If it is something else.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        self.typed(key, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// Takes a list of texts.
    ///
    /// # Errors
    /// If it is something else.
    pub fn texts(&mut self, key: &str) -> Result<Option<Vec<String>>, String> {
        self.typed(key, "a list of strings", |value| {
            let list = value.as_array()?.iter();
            list.map(|item| item.as_str().map(str::to_owned)).collect()
        })
    }

    /// Takes a list of numbers.
    ///
    /// # Errors
    /// If it is something else.
    pub fn numbers(&mut self, key: &str) -> Result<Option<Vec<f64>>, String> {
        self.typed(key, "a list of numbers", |value| {
            value.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    /// Takes a list of sizes.
    ///
    /// # Errors
    /// If it is something else.
    pub fn sizes(&mut self, key: &str) -> Result<Option<Vec<usize>>, String> {
        self.typed(key, "a list of whole numbers", |value| {
            let sizes = value.as_array()?.iter().map(Value::as_u64);
            sizes.map(|n| usize::try_from(n?).ok()).collect()
        })
    }

    /// Takes a token id or a list of them.
    ///
    /// # Errors
    /// If it is something else.
    pub fn ids(&mut self, key: &str) -> Result<Vec<u32>, String> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Takes the keys of an object.
    ///
    /// # Errors
    /// If it is something else.
    pub fn nested(&mut self, key: &str) -> Result<Option<Self>, String> {
        self.typed(key, "an object", |value| {
            let left = value.as_object()?.clone();
            Some(Self { left, gguf: None })
        })
    }

    /// Refuses what is left.
    ///
    /// # Errors
    /// A message that names a key that may change what the decoder computes, and its value.
    pub fn finish(self, shape: &ModelShape) -> Result<(), String> {
        let mut odd = self.left.iter().filter(|(key, value)| {
            !is_harmless(key) && !is_neutral(key, value, shape, self.is_gguf())
        });
        match odd.next() {
            None => Ok(()),
            Some((key, value)) => Err(self.refused(key, value, "no layer acts on it")),
        }
    }

    /// The message that `key` is missing.
    pub fn missing(&self, key: &str) -> String {
        format!("{} is missing", self.shown(key))
    }

    /// The message that `key` cannot have this value.
    pub fn refused(&self, key: &str, value: &Value, accepted: &str) -> String {
        let (key, value) = (self.shown(key), value.to_string());
        format!(
            "{} {} is not supported: {accepted}",
            short(&key),
            short(&value)
        )
    }
}

/// Whether `key` is one of the names in `list`, which has spaces between them.
pub fn is_one_of(key: &str, list: &str) -> bool {
    list.split_whitespace().any(|one| one == key)
}

/// The beginning of a text that strangers wrote.
fn short(text: &str) -> String {
    let mut short = clipped(text);
    if let Some((end, _)) = short.char_indices().nth(60) {
        short.truncate(end);
        short.push_str("..");
    }
    short
}

/// A value of GGUF metadata. JSON has no NaN or infinity: they become strings.
fn json_of(value: &GgufValue) -> Value {
    let float = |x: f64| {
        if x.is_finite() {
            Value::from(x)
        } else {
            x.to_string().into()
        }
    };
    match value {
        GgufValue::U8(n) => (*n).into(),
        GgufValue::I8(n) => (*n).into(),
        GgufValue::U16(n) => (*n).into(),
        GgufValue::I16(n) => (*n).into(),
        GgufValue::U32(n) => (*n).into(),
        GgufValue::I32(n) => (*n).into(),
        GgufValue::U64(n) => (*n).into(),
        GgufValue::I64(n) => (*n).into(),
        GgufValue::F32(x) => float(f64::from(*x)),
        GgufValue::F64(x) => float(*x),
        GgufValue::Bool(flag) => (*flag).into(),
        GgufValue::String(text) => text.as_str().into(),
        GgufValue::Array(list) => list.iter().map(json_of).collect(),
    }
}
