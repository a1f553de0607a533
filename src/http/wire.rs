//! The fields of request bodies, typed but not yet validated. Absent and null are the same. Other fields
//! are checked by [`unsupported`](super::unsupported).

use crate::error::{Error, Result};
use crate::sampling::Acceptance;
use serde::de::value::Error as Never;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Fields that both APIs have.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Common {
    pub model: Option<String>,
    pub max_tokens: Option<usize>,
    pub n: Option<usize>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub logit_bias: Option<Map<String, Value>>,
    pub seed: Option<i64>,
    pub stop: Option<OneOrMany>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<usize>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub spec_length: Option<usize>,
    pub acceptance: Option<Acceptance>,
    pub prediction: Option<Prediction>,
    pub cache_salt: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
    pub include_obfuscation: Option<bool>,
}

/// A text that the client expects as the answer, or most of it.
#[derive(Debug, Deserialize)]
pub(super) struct Prediction {
    #[serde(rename = "type")]
    pub _kind: PredictionKind,
    pub content: PredictionContent,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PredictionKind {
    Content,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of text parts")]
pub(super) enum PredictionContent {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(super) enum TextPart {
    Text { text: String },
}

impl Prediction {
    /// The text, its parts one after the other.
    pub fn text(&self) -> Cow<'_, str> {
        match &self.content {
            PredictionContent::Text(text) => text.into(),
            PredictionContent::Parts(parts) => {
                let texts = parts.iter().map(|TextPart::Text { text }| text.as_str());
                texts.collect::<String>().into()
            }
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Fields that only `/v1/completions` has.
#[derive(Debug, Deserialize)]
pub(super) struct Completion {
    pub prompt: Option<Prompt>,
    pub echo: Option<bool>,
    pub best_of: Option<usize>,
    pub suffix: Option<String>,
    pub logprobs: Option<usize>,
    pub add_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
pub(super) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

/// Fields that only `/v1/chat/completions` has.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Chat {
    pub messages: Option<Vec<Value>>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<usize>,
    pub max_completion_tokens: Option<usize>,
    pub add_generation_prompt: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub include_reasoning: Option<bool>,
}

/// The body of `/tokenize`: either a prompt or messages.
#[derive(Debug, Deserialize)]
pub(super) struct Tokenize {
    pub model: Option<String>,
    pub prompt: Option<String>,
    pub messages: Option<Vec<Value>>,
    pub tools: Option<Vec<Value>>,
    pub add_special_tokens: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize)]
pub(super) struct Detokenize {
    pub model: Option<String>,
    pub tokens: Option<Vec<u32>>,
}

/// Parses a JSON object. Integers in its fields and their lists may be written as 4.0.
///
/// # Errors
/// `Invalid`, if the body is not JSON or not an object.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>> {
    let malformed =
        |message: String| Error::request(crate::error::RequestErrorKind::Invalid, None, message);
    let value: Value = serde_json::from_slice(body)
        .map_err(|e| malformed(format!("the body is not valid JSON: {e}")))?;
    let Value::Object(mut fields) = value else {
        return Err(malformed("the body must be a JSON object".into()));
    };
    fields.values_mut().for_each(whole_to_integer);
    Ok(fields)
}

/// Converts whole numbers such as 4.0 to integers. Objects stay as they are: messages and a template's
/// variables are rendered unchanged.
fn whole_to_integer(value: &mut Value) {
    /// Beyond it f64 cannot represent every integer.
    const EXACT: f64 = (1_u64 << 53) as f64;
    match value {
        Value::Array(list) => list.iter_mut().for_each(whole_to_integer),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(x) if x.fract() == 0.0 && x.abs() <= EXACT => *value = (x as i64).into(),
            _ => {}
        },
        _ => {}
    }
}

/// The names that the fields of `T`, a struct, have in a body.
pub(super) fn names<T: DeserializeOwned>() -> &'static [&'static str] {
    /// A deserializer that records the field names that a struct asks for.
    struct Names<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Names<'_> {
        type Error = Never;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Never> {
            *self.0 = fields;
            Err(Never::custom("there is nothing to read"))
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Never> {
            Err(Never::custom("not a struct"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    // Always returns an error, but after the names were recorded.
    let _ = T::deserialize(Names(&mut names));
    names
}

/// Reads the fields of `T` from `body`.
///
/// # Errors
/// `Invalid`, naming the field and what it accepts.
pub(super) fn fields<T: DeserializeOwned>(body: &Map<String, Value>) -> Result<T> {
    serde_path_to_error::deserialize(body).map_err(|e| {
        let param = e.path().to_string();
        let message = readable(&e.into_inner().to_string());
        Error::invalid(&param, format!("{param}: {message}"))
    })
}

/// Replaces Rust's type names in serde's messages by plain ones.
fn readable(message: &str) -> String {
    let names = [
        ("expected f64", "expected a number"),
        ("expected i64", "expected an integer"),
        ("expected usize", "expected a non-negative integer"),
        ("expected u32", "expected a non-negative integer"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
        ("expected struct StreamOptions", "expected an object"),
        ("expected struct Prediction", "expected an object"),
    ];
    names
        .iter()
        .find_map(|(rust, plain)| Some(message.strip_suffix(rust)?.to_owned() + plain))
        .unwrap_or_else(|| message.to_owned())
}
