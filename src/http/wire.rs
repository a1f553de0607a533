//! What comes in: fields of the request bodies, typed but not yet checked. Absent and null are
//! the same; unknown fields are ignored.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Fields that both APIs know.
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
    #[serde(rename = "user")]
    pub _user: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Fields of `/v1/completions` alone.
#[derive(Debug, Deserialize)]
pub(super) struct Completion {
    pub prompt: Option<Prompt>,
    pub echo: Option<bool>,
    pub best_of: Option<usize>,
    pub suffix: Option<String>,
    pub logprobs: Option<usize>,
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

/// Fields of `/v1/chat/completions` alone.
#[derive(Debug, Deserialize)]
pub(super) struct Chat {
    pub messages: Option<Vec<Value>>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<usize>,
    pub max_completion_tokens: Option<usize>,
    pub add_generation_prompt: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// The body of `/tokenize`: a prompt, or messages.
#[derive(Debug, Deserialize)]
pub(super) struct Tokenize {
    pub model: Option<String>,
    pub prompt: Option<String>,
    pub messages: Option<Vec<Value>>,
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

/// Reads a JSON object.
///
/// # Errors
/// `Invalid`: no JSON, or no object.
pub(super) fn object(body: &[u8]) -> Result<Value> {
    let malformed =
        |message: String| Error::request(crate::error::RequestErrorKind::Invalid, None, message);
    let value: Value = serde_json::from_slice(body)
        .map_err(|e| malformed(format!("the body is not valid JSON: {e}")))?;
    if !value.is_object() {
        return Err(malformed("the body must be a JSON object".into()));
    }
    Ok(value)
}

/// Takes the fields of `T` out of `body`.
///
/// # Errors
/// `Invalid`, naming the field and what it accepts.
pub(super) fn fields<T: DeserializeOwned>(body: &Value) -> Result<T> {
    serde_path_to_error::deserialize(body).map_err(|e| {
        let param = e.path().to_string();
        let message = readable(&e.into_inner().to_string());
        Error::invalid(&param, format!("{param}: {message}"))
    })
}

/// serde speaks of Rust's types.
fn readable(message: &str) -> String {
    let names = [
        ("expected f64", "expected a number"),
        ("expected i64", "expected an integer"),
        ("expected usize", "expected a non-negative integer"),
        ("expected u32", "expected a non-negative integer"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
        ("expected struct StreamOptions", "expected an object"),
    ];
    names
        .iter()
        .find_map(|(ours, readers)| Some(message.strip_suffix(ours)?.to_owned() + readers))
        .unwrap_or_else(|| message.to_owned())
}
