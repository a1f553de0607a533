//! What an event adds to a choice: parts of a message, tokens, and the end.

use super::speculation::Round;
use foretoken_engine::TokenLogprobs;
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;

/// The addition of one event to a choice.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Piece {
    /// The additions to the message, in their order.
    pub parts: Vec<MessagePart>,
    pub logprobs: Vec<Scored>,
    /// The ids of all tokens, if requested.
    pub token_ids: Vec<u32>,
    /// The rounds of speculation, if requested.
    pub rounds: Vec<Round>,
    pub finish: Option<Finish>,
}

/// A part of a message, or what is added to the last one.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MessagePart {
    Reasoning(String),
    Text(String),
    Call(CallPiece),
}

/// An addition to a tool call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CallPiece {
    /// The call's position in the message.
    pub index: usize,
    /// The first piece of a call has its id and the function's name.
    pub head: Option<CallHead>,
    /// Whether it is a call of a custom tool.
    pub is_custom: bool,
    /// Part of the JSON text of the arguments, or of a custom tool's input.
    pub arguments: String,
}

#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct CallHead {
    pub id: String,
    pub name: String,
}

/// A token with its log-probabilities; the first of a prompt has none.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scored {
    pub id: u32,
    /// Number of characters of the choice's text before this token.
    pub offset: usize,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "FinishReason")]
pub(super) enum FinishKind {
    Stop,
    Length,
    ToolCalls,
}

impl FinishKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The end of a choice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finish {
    pub reason: FinishKind,
    /// The stop string or stop id that ended the text; `None` for EOS.
    pub stop: Option<StopReason>,
}

/// The stop string, or the id of the stop token, that ended the text.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum StopReason {
    Text(String),
    Token(u32),
}

impl Piece {
    pub fn append(&mut self, other: Piece) {
        other.parts.into_iter().for_each(|part| self.push(part));
        self.logprobs.extend(other.logprobs);
        self.token_ids.extend(other.token_ids);
        self.rounds.extend(other.rounds);
        self.finish = self.finish.take().or(other.finish);
    }

    /// Adds to the last part, if it is of the same kind, or begins another one.
    pub fn push(&mut self, part: MessagePart) {
        use MessagePart::{Call, Reasoning, Text};
        match (self.parts.last_mut(), part) {
            (_, Reasoning(more) | Text(more)) if more.is_empty() => {}
            (Some(Reasoning(last)), Reasoning(more)) | (Some(Text(last)), Text(more)) => {
                last.push_str(&more);
            }
            (Some(Call(last)), Call(more)) if more.head.is_none() => {
                last.arguments.push_str(&more.arguments);
            }
            (_, part) => self.parts.push(part),
        }
    }

    /// The content, without what stands between.
    pub fn text(&self) -> Cow<'_, str> {
        joined(self.parts.iter().filter_map(|part| match part {
            MessagePart::Text(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    /// Returns the text of the reasoning parts, without the parts between them.
    pub fn reasoning(&self) -> Cow<'_, str> {
        joined(self.parts.iter().filter_map(|part| match part {
            MessagePart::Reasoning(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    pub fn calls(&self) -> impl Iterator<Item = &CallPiece> {
        self.parts.iter().filter_map(|part| match part {
            MessagePart::Call(call) => Some(call),
            _ => None,
        })
    }

    /// Whether it has something to send to the client now.
    pub fn is_visible(&self) -> bool {
        !self.parts.is_empty() || self.finish.is_some()
    }
}

/// Texts, one after the other; mostly there is one.
fn joined<'a>(mut texts: impl Iterator<Item = &'a str>) -> Cow<'a, str> {
    let first = Cow::from(texts.next().unwrap_or_default());
    texts.fold(first, |all, text| all + text)
}
