//! The fields of request bodies, typed but not yet validated. Absent and null are the same. Other fields
//! are checked by [`unsupported`](super::unsupported).

pub(super) use super::checks::{required, wrong};

use super::content::{ContentPart, TextOr};
use super::conversation::{ChatMessage, PromptEnd};
use super::others::NoOthers;
use super::tool_choice::ToolChoice;
use super::tools::Tool;
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::de::value::Error as Never;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Unexpected, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;

/// The `max_tokens` of a request that asks for as many as the context has room for.
pub(super) const NO_LIMIT: usize = usize::MAX;

/// Fields that both APIs have.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Common {
    pub model: Option<String>,
    /// -1 = as many as the context has room for.
    #[serde(default, deserialize_with = "limit")]
    #[schemars(with = "Option<i64>")]
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
    /// Texts of the same seed are the same; -1 is a random one, as is none.
    pub seed: Option<i64>,
    pub stop: Option<TextOr<String>>,
    #[serde(default, deserialize_with = "ids")]
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<usize>,
    #[serde(default, deserialize_with = "ids")]
    pub allowed_token_ids: Option<Vec<u32>>,
    pub bad_words: Option<TextOr<String>>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub spec_length: Option<usize>,
    pub acceptance: Option<AcceptanceName>,
    pub posterior_threshold: Option<f64>,
    pub posterior_alpha: Option<f64>,
    pub lenience: Option<f64>,
    pub prediction: Option<Prediction>,
    pub cache_salt: Option<String>,
}

impl Common {
    /// Refuses what only the streams of completions and chats can show.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn refuse_chunk_options(&self) -> Result<()> {
        let Some(options) = &self.stream_options else {
            return Ok(());
        };
        let asked = [
            ("include_speculation", options.include_speculation),
            ("continuous_usage_stats", options.continuous_usage_stats),
        ];
        match asked.iter().find(|(_, wanted)| *wanted == Some(true)) {
            Some((name, _)) => wrong(
                FieldPath::from("stream_options").key(*name),
                "is possible for completions and chats only: leave it out",
            ),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
    pub include_obfuscation: Option<bool>,
    pub include_speculation: Option<bool>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub _others: NoOthers,
}

/// A text that the client expects as the answer, or most of it.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Prediction {
    #[serde(rename = "type")]
    pub _kind: PredictionKind,
    pub content: TextOr<ContentPart>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub _others: NoOthers,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum PredictionKind {
    Content,
}

impl Prediction {
    /// The text, its parts one after the other.
    pub fn text(&self) -> Cow<'_, str> {
        match &self.content {
            TextOr::Text(text) => text.into(),
            TextOr::List(parts) => {
                let texts = parts.iter().map(|part| part.text.as_str());
                texts.collect::<String>().into()
            }
        }
    }
}

/// A rule by its name. A server's own rule is always lossless; the lossy ones must be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum AcceptanceName {
    Coupled,
    Rejection,
    Typical,
    Lenient,
}

/// When a beam search ends: true, false or `"never"`.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected true, false or \"never\"")]
pub(super) enum EarlyStoppingField {
    Flag(bool),
    Never(NeverWord),
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum NeverWord {
    Never,
}

/// Fields that only `/v1/completions` has.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Completion {
    #[schemars(required)]
    pub prompt: Option<PromptInput>,
    pub echo: Option<bool>,
    pub best_of: Option<usize>,
    pub suffix: Option<String>,
    pub logprobs: Option<usize>,
    pub add_special_tokens: Option<bool>,
    pub truncate_prompt_tokens: Option<i64>,
    pub return_token_ids: Option<bool>,
    pub use_beam_search: Option<bool>,
    pub length_penalty: Option<f64>,
    pub early_stopping: Option<EarlyStoppingField>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
pub(super) enum PromptInput {
    Text(String),
    Texts(Vec<String>),
    Ids(#[serde(deserialize_with = "ids")] Vec<u32>),
    IdLists(#[serde(deserialize_with = "ids")] Vec<Vec<u32>>),
}

/// The body of `/v1/embeddings`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "EmbeddingRequest")]
pub(super) struct EmbeddingFields {
    pub model: Option<String>,
    #[schemars(required)]
    pub input: Option<PromptInput>,
    pub dimensions: Option<usize>,
    /// Whether vectors have the length 1; else as the model has it.
    pub normalize: Option<bool>,
    pub encoding_format: Option<EncodingFormat>,
    /// What the texts are, such as `query` or `passage`: the model's prompt for these comes before each.
    pub input_type: Option<String>,
    /// The name of the model's prompt that comes before each text.
    pub prompt_name: Option<String>,
    pub add_special_tokens: Option<bool>,
    /// What is cut off an input that is too long.
    pub truncate: Option<CutOff>,
    pub truncate_prompt_tokens: Option<i64>,
    pub cache_salt: Option<String>,
}

/// What is cut off an input that is too long, as NIM and Cohere call it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum CutOff {
    /// Such an input is refused.
    #[default]
    None,
    Start,
    End,
}

/// How an embedding is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// The bytes of f32 in little-endian order.
    Base64,
}

/// Fields that only `/v1/chat/completions` has.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "ChatCompletion")]
pub(super) struct ChatFields {
    #[schemars(required)]
    pub messages: Option<Vec<ChatMessage>>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<usize>,
    #[serde(default, deserialize_with = "limit")]
    #[schemars(with = "Option<i64>")]
    pub max_completion_tokens: Option<usize>,
    /// The name of `max_tokens` in responses, which Jan sends in chats, too.
    #[serde(default, deserialize_with = "limit")]
    #[schemars(with = "Option<i64>")]
    pub max_output_tokens: Option<usize>,
    /// llama.cpp's name of `max_tokens`. 0 = the prompt is only read into the cache.
    #[serde(default, deserialize_with = "limit")]
    #[schemars(with = "Option<i64>")]
    pub n_predict: Option<usize>,
    pub add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message, which must be of the assistant.
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub parallel_tool_calls: Option<bool>,
    pub include_reasoning: Option<bool>,
    /// For the chat template, if it has such a variable. `none` asks for no thought.
    pub reasoning_effort: Option<String>,
    /// For the chat template, as in `chat_template_kwargs`.
    pub enable_thinking: Option<bool>,
    pub thinking: Option<ThinkingField>,
    /// Maximum number of tokens of the thought; -1 = no limit.
    pub thinking_token_budget: Option<i64>,
    /// As `budget_tokens` of `thinking`; clients of Alibaba's API send it so.
    pub thinking_budget: Option<usize>,
    pub truncate_prompt_tokens: Option<i64>,
    pub return_token_ids: Option<bool>,
    pub use_beam_search: Option<bool>,
    pub length_penalty: Option<f64>,
    pub early_stopping: Option<EarlyStoppingField>,
}

/// `thinking` of Anthropic's messages, which clients of DeepSeek and Z.ai send in chats, too.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "Thinking")]
pub(super) struct ThinkingField {
    #[serde(rename = "type")]
    pub kind: ThinkingKind,
    /// Maximum number of tokens of the thought.
    pub budget_tokens: Option<usize>,
    pub display: Option<ThinkingDisplay>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ThinkingKind {
    Enabled,
    Adaptive,
    Disabled,
}

/// Whether the reply has what the model thinks. It is never summarized.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ThinkingDisplay {
    Summarized,
    Omitted,
}

impl ThinkingField {
    /// Whether the reply is to have no thought.
    pub fn is_hidden(&self) -> bool {
        self.display == Some(ThinkingDisplay::Omitted)
    }

    /// Whether it limits the thought.
    pub fn has_budget(&self) -> bool {
        self.budget_tokens.is_some()
    }
}

/// The body of `/tokenize`: either a prompt or messages.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "TokenizeRequest")]
pub(super) struct Tokenize {
    pub model: Option<String>,
    pub prompt: Option<String>,
    pub messages: Option<Vec<ChatMessage>>,
    pub tools: Option<Vec<Tool>>,
    pub add_special_tokens: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    /// Whether the prompt ends within the last message, which must be of the assistant.
    pub continue_final_message: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub reasoning_effort: Option<String>,
    pub enable_thinking: Option<bool>,
    pub thinking: Option<ThinkingField>,
}

impl ChatFields {
    /// The end of the prompt.
    pub fn prompt_end(&self) -> PromptEnd {
        PromptEnd {
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
        }
    }
}

impl Tokenize {
    /// The end of a chat's prompt.
    pub fn prompt_end(&self) -> PromptEnd {
        PromptEnd {
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
        }
    }
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "DetokenizeRequest")]
pub(super) struct Detokenize {
    pub model: Option<String>,
    #[schemars(required)]
    #[serde(default, deserialize_with = "ids")]
    pub tokens: Option<Vec<u32>>,
}

/// An integer that may be written as 4.0.
struct Id(u32);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Ids;

        impl Visitor<'_> for Ids {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("u32")
            }

            fn visit_u64<E: serde::de::Error>(self, n: u64) -> Result<Id, E> {
                let id = u32::try_from(n).map(Id);
                id.map_err(|_| E::invalid_value(Unexpected::Unsigned(n), &self))
            }

            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<Id, E> {
                let id = u32::try_from(n).map(Id);
                id.map_err(|_| E::invalid_value(Unexpected::Signed(n), &self))
            }

            fn visit_f64<E: serde::de::Error>(self, x: f64) -> Result<Id, E> {
                match whole(x) {
                    Some(n) => self.visit_i64(n),
                    None => Err(E::invalid_type(Unexpected::Float(x), &self)),
                }
            }
        }

        deserializer.deserialize_any(Ids)
    }
}

/// A type that is read as ids, and made from them.
trait FromIds {
    type Ids;
    fn from_ids(ids: Self::Ids) -> Self;
}

impl FromIds for Vec<u32> {
    type Ids = Vec<Id>;
    fn from_ids(ids: Vec<Id>) -> Self {
        ids.into_iter().map(|Id(id)| id).collect()
    }
}

impl FromIds for Vec<Vec<u32>> {
    type Ids = Vec<Vec<Id>>;
    fn from_ids(lists: Vec<Vec<Id>>) -> Self {
        lists.into_iter().map(Vec::from_ids).collect()
    }
}

impl FromIds for Option<Vec<u32>> {
    type Ids = Option<Vec<Id>>;
    fn from_ids(ids: Option<Vec<Id>>) -> Self {
        ids.map(Vec::from_ids)
    }
}

fn ids<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromIds<Ids: Deserialize<'de>>,
    D: Deserializer<'de>,
{
    T::Ids::deserialize(deserializer).map(T::from_ids)
}

/// A number of tokens; -1 is [`NO_LIMIT`], as llama.cpp's clients have it.
fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let limit = match Option::<i64>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(-1) => NO_LIMIT,
        Some(limit) => usize::try_from(limit)
            .map_err(|_| D::Error::invalid_value(Unexpected::Signed(limit), &"usize"))?,
    };
    Ok(Some(limit))
}

/// The integer that `x` is, if f64 can represent all integers up to it.
pub(super) fn whole(x: f64) -> Option<i64> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    (x.fract() == 0.0 && x.abs() <= EXACT).then_some(x as i64)
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
