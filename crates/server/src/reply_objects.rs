//! The objects of completions and chats, as they are sent and as the OpenAPI document describes them.

use super::conversation::CallKind;
use super::piece::{FinishKind, Scored, StopReason};
use super::speculation::RoundText;
use foretoken_text::Text;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// The smallest log-probability that clients get, as with vLLM, because JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// A completion or a chat, or a chunk of one.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "{C}")]
pub(super) struct Reply<'a, C> {
    pub id: &'a str,
    pub object: ObjectName,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: Option<&'a str>,
    pub choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: ChunkUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

/// The cost in a reply or a chunk: no field, null, or the cost.
pub(super) type ChunkUsage = Option<Option<Usage>>;

#[derive(Clone, Copy, Serialize, JsonSchema)]
pub(super) enum ObjectName {
    #[serde(rename = "text_completion")]
    Completion,
    #[serde(rename = "chat.completion")]
    Chat,
    #[serde(rename = "chat.completion.chunk")]
    Chunk,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Completion", inline)]
pub(super) struct CompletionChoice<'a> {
    pub index: usize,
    pub text: Cow<'a, str>,
    pub logprobs: Option<CompletionLogprobs<'a>>,
    pub finish_reason: Option<FinishKind>,
    pub stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Vec<RoundText<'a>>>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatCompletion", inline)]
pub(super) struct ChatChoice<'a> {
    pub index: usize,
    pub message: AssistantMessage<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: Option<FinishKind>,
    pub stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "ChatCompletionChunk", inline)]
pub(super) struct ChunkChoice<'a> {
    pub index: usize,
    pub delta: Delta<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: Option<FinishKind>,
    pub stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Vec<RoundText<'a>>>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct AssistantMessage<'a> {
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    pub content: Option<Cow<'a, str>>,
    pub refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall<'a>>>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ToolCall<'a> {
    pub id: &'a str,
    #[serde(flatten)]
    pub call: CalledTool<'a>,
}

/// A call by the type of its tool.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(super) enum CalledTool<'a> {
    Function { function: FunctionCall<'a> },
    Custom { custom: CustomCall<'a> },
}

#[derive(Serialize, JsonSchema)]
pub(super) struct CustomCall<'a> {
    pub name: &'a str,
    pub input: &'a str,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct FunctionCall<'a> {
    pub name: &'a str,
    /// JSON text, as the model wrote it.
    pub arguments: &'a str,
}

/// What a chunk adds to a message.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[CallDelta<'a>; 1]>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ToolCallDelta")]
pub(super) struct CallDelta<'a> {
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<CallKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<FunctionDelta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomDelta<'a>>,
}

/// What a chunk adds to a call of a custom tool.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CustomToolDelta")]
pub(super) struct CustomDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    pub input: &'a str,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    pub arguments: &'a str,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ChatLogprobs<'a> {
    pub content: List<'a, TokenLogprob<'a>>,
    refusal: Option<Vec<TokenLogprob<'a>>>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct TokenLogprob<'a> {
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
    top_logprobs: Vec<TopLogprob<'a>>,
}

#[derive(Serialize, JsonSchema)]
struct TopLogprob<'a> {
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
}

/// Lists with an entry for each token.
#[derive(Serialize, JsonSchema)]
pub(super) struct CompletionLogprobs<'a> {
    tokens: List<'a, Cow<'a, str>>,
    token_logprobs: List<'a, Option<f64>>,
    top_logprobs: List<'a, Option<Map<String, Value>>>,
    text_offset: List<'a, usize>,
}

/// Tokens of a request, and what speculation did.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub(super) struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculative_decoding: Option<Speculation>,
}

/// What the tokens of a prompt are.
#[derive(Clone, Copy, Serialize, JsonSchema)]
#[schemars(rename = "PromptTokensDetails")]
pub(super) struct PromptDetails {
    pub cached_tokens: usize,
    /// Always 0. Clients with types of their own read no usage without it.
    pub audio_tokens: usize,
}

/// What the tokens of an answer are.
#[derive(Clone, Copy, Serialize, JsonSchema)]
#[schemars(rename = "CompletionTokensDetails")]
pub(super) struct CompletionTokens {
    /// Tokens of reasoning and its marks, where the model marks it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_tokens: Option<usize>,
    #[serde(flatten)]
    pub predicted: Option<PredictedTokens>,
}

/// Draft tokens that came from the request's `prediction`, where there are drafts.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub(super) struct PredictedTokens {
    pub accepted_prediction_tokens: usize,
    pub rejected_prediction_tokens: usize,
}

#[derive(Clone, Copy, Serialize, JsonSchema)]
pub(super) struct Speculation {
    pub num_drafts: usize,
    pub num_draft_tokens: usize,
    pub num_accepted_tokens: usize,
    pub acceptance_rate: f64,
    pub mean_acceptance_length: f64,
    /// The name of the request's lossy rule: `typical` or `lenient`. The text is then not the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lossy_acceptance: Option<&'static str>,
    /// Accepted tokens that the model did not draw itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_lossy_tokens: Option<usize>,
}

/// A list that a function makes of tokens: it leaves out the tokens for which the function returns nothing. The
/// entries are made while they are written, because all entries together take much more memory than their tokens.
pub(super) struct List<'a, T> {
    tokens: &'a [Scored],
    entry: Box<dyn Fn(&'a Scored) -> Option<T> + Send + 'a>,
}

impl<'a, T> List<'a, T> {
    fn new(tokens: &'a [Scored], entry: impl Fn(&'a Scored) -> Option<T> + Send + 'a) -> Self {
        let entry = Box::new(entry);
        Self { tokens, entry }
    }
}

impl<T: Serialize> Serialize for List<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().filter_map(&self.entry))
    }
}

impl<T: JsonSchema> JsonSchema for List<'_, T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        Vec::<T>::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Vec::<T>::json_schema(generator)
    }
}

impl<'a> ChatLogprobs<'a> {
    /// The log-probabilities of `tokens`, each with at most `top` alternatives.
    pub fn new(text: &'a Text, tokens: &'a [Scored], top: usize) -> Self {
        let alternative = |&(id, logprob): &(u32, f32)| TopLogprob {
            token: text.token_text(id),
            logprob: finite(logprob),
            bytes: text.token_bytes(id),
        };
        let entry = move |token: &'a Scored| {
            let logprobs = token.logprobs.as_ref()?;
            Some(TokenLogprob {
                token: text.token_text(token.id),
                logprob: finite(logprobs.logprob),
                bytes: text.token_bytes(token.id),
                top_logprobs: logprobs.top.iter().take(top).map(alternative).collect(),
            })
        };
        Self {
            content: List::new(tokens, entry),
            refusal: None,
        }
    }
}

impl<'a> CompletionLogprobs<'a> {
    pub fn new(text: &'a Text, tokens: &'a [Scored]) -> Self {
        let logprob = |token: &Scored| token.logprobs.as_ref().map(|l| finite(l.logprob));
        Self {
            tokens: List::new(tokens, |token| Some(text.token_text(token.id))),
            token_logprobs: List::new(tokens, move |token| Some(logprob(token))),
            top_logprobs: List::new(tokens, |token| Some(alternatives(text, token))),
            text_offset: List::new(tokens, |token| Some(token.offset)),
        }
    }
}

/// A completion's alternatives of a token. The token itself is always among them, so that clients can see
/// whether it was the most probable one.
fn alternatives(text: &Text, token: &Scored) -> Option<Map<String, Value>> {
    let logprobs = token.logprobs.as_ref()?;
    let mut top = Map::new();
    for &(id, logprob) in logprobs.top.iter().chain([&(token.id, logprobs.logprob)]) {
        // Best first: of two ids with the same text, the more probable one stays.
        top.entry(text.token_text(id))
            .or_insert_with(|| finite(logprob).into());
    }
    Some(top)
}

fn finite(logprob: f32) -> f64 {
    logprob.max(MIN_LOGPROB).into()
}
