//! The response object.

use super::options::RequestEcho;
use crate::error::CONTEXT;
use crate::reply_objects::Speculation;
use foretoken_core::error::{Error, RequestErrorKind as Kind};
use schemars::JsonSchema;
use serde::Serialize;

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(crate) struct ResponseObject<'a> {
    pub(super) id: &'a str,
    #[schemars(extend("const" = "response"))]
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    pub(super) model: &'a str,
    pub(super) status: Status,
    pub(super) completed_at: Option<u64>,
    pub(super) error: Option<ResponseFailure>,
    pub(super) incomplete_details: Option<Incomplete>,
    /// Reasoning, messages and calls, one after the other.
    pub(super) output: Vec<OutputItem<'a>>,
    pub(super) usage: Option<ResponseUsage>,
    #[serde(flatten)]
    pub(super) echo: &'a RequestEcho,
}

#[derive(Clone, Copy, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ResponseStatus")]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ResponseFailure {
    pub code: &'static str,
    pub message: String,
}

impl ResponseFailure {
    /// Clients decide by the code, which is one of OpenAI's, whether they send less, try again or give up.
    pub fn of(error: &Error) -> Self {
        let code = match error {
            Error::Request { kind, .. } => match kind {
                Kind::ContextLengthExceeded => CONTEXT,
                Kind::QueueFull => "rate_limit_exceeded",
                Kind::Timeout | Kind::Overloaded | Kind::ShuttingDown | Kind::ModelUnavailable => {
                    "server_error"
                }
                Kind::Invalid
                | Kind::Unauthorized
                | Kind::NotFound
                | Kind::Forbidden
                | Kind::MethodNotAllowed
                | Kind::TooLarge
                | Kind::UnsupportedEncoding => "invalid_prompt",
            },
            Error::Setup(_) | Error::Internal(_) => "server_error",
        };
        Self {
            code,
            message: error.to_string(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Incomplete {
    pub reason: &'static str,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct OutputItem<'a> {
    pub id: &'a str,
    pub status: Status,
    #[serde(flatten)]
    pub kind: ItemKind<'a>,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ItemKind<'a> {
    Reasoning {
        summary: [(); 0],
        content: Vec<OutputPart<'a>>,
    },
    Message {
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        content: Vec<OutputPart<'a>>,
    },
    FunctionCall {
        call_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        /// JSON text, as the model wrote it.
        arguments: &'a str,
    },
    CustomToolCall {
        call_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        input: &'a str,
    },
}

/// The part with an item's text.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputPart<'a> {
    ReasoningText {
        text: &'a str,
    },
    OutputText {
        text: &'a str,
        annotations: [(); 0],
        logprobs: [(); 0],
    },
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ResponseUsage {
    pub input_tokens: usize,
    pub input_tokens_details: InputTokens,
    pub output_tokens: usize,
    pub output_tokens_details: ReasoningTokens,
    pub total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculative_decoding: Option<Speculation>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "InputTokensDetails")]
pub(super) struct InputTokens {
    pub cached_tokens: usize,
    /// Always 0: no token costs more because it is cached. OpenAI's schema requires it.
    pub cache_write_tokens: usize,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ReasoningTokens {
    pub reasoning_tokens: usize,
}
