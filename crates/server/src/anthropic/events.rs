//! Builds the message, and its events.

use super::error;
use crate::blocks::{Blocks, Change, OutputBlock};
use crate::choice;
use crate::piece::{Finish, FinishKind, Piece, StopReason};
use crate::reply::{ReplyHeader, json_text, new_id, typed_event};
use crate::reply_objects::Speculation;
use crate::stream::{Shape, sse};
use axum::Json;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use foretoken_text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio_stream::Stream;

/// The signature of a thought: nothing proves here whose it is.
const UNSIGNED: &str = "";

/// A message in Anthropic's form.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "message"))]
    kind: &'static str,
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    model: &'a str,
    content: Vec<Content<'a>>,
    #[serde(flatten)]
    end: End<'a>,
    usage: MessageUsage,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ContentBlock")]
enum Content<'a> {
    Text {
        text: &'a str,
    },
    Thinking {
        thinking: &'a str,
        signature: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Map<String, Value>,
        caller: Caller,
    },
}

/// Who calls: the model itself, as no program that it wrote runs here. Clients with types of their own require it.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Caller {
    Direct,
}

/// How a message ended; null while it is generated.
#[derive(Serialize, JsonSchema)]
struct End<'a> {
    stop_reason: Option<EndKind>,
    stop_sequence: Option<&'a str>,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "MessageStop")]
enum EndKind {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
}

/// Cached tokens are not among `input_tokens` here.
#[derive(Serialize, JsonSchema)]
struct MessageUsage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculative_decoding: Option<Speculation>,
}

/// The state of a reply.
pub(crate) struct MessageReply {
    header: ReplyHeader,
    id: String,
    blocks: Blocks,
    /// Whether the first event was sent.
    begun: bool,
}

impl MessageReply {
    pub(super) fn new(header: &ReplyHeader) -> Self {
        Self {
            header: header.clone(),
            id: new_id("msg_"),
            blocks: Blocks::default(),
            begun: false,
        }
    }

    fn message<'a>(&'a self, content: Vec<Content<'a>>, choices: &[choice::Choice]) -> Message<'a> {
        Message {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.header.model,
            content,
            end: self.ending(),
            usage: self.usage(choices),
        }
    }

    fn ending(&self) -> End<'_> {
        let finish = self.blocks.finish.as_ref();
        let stop_sequence = match finish.and_then(|finish| finish.stop.as_ref()) {
            Some(StopReason::Text(text)) => Some(text.as_str()),
            Some(StopReason::Token(_)) | None => None,
        };
        let kind = |finish: &Finish| match finish.reason {
            FinishKind::Length => EndKind::MaxTokens,
            _ if stop_sequence.is_some() => EndKind::StopSequence,
            _ if self.blocks.calls() => EndKind::ToolUse,
            _ => EndKind::EndTurn,
        };
        End {
            stop_reason: finish.map(kind),
            stop_sequence,
        }
    }

    fn usage(&self, choices: &[choice::Choice]) -> MessageUsage {
        let of_chat = self.header.usage(choices);
        let cached = of_chat.prompt_tokens_details.cached_tokens;
        MessageUsage {
            input_tokens: of_chat.prompt_tokens.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: of_chat.completion_tokens,
            speculative_decoding: of_chat.speculative_decoding,
        }
    }

    fn show(&self, index: usize, change: &Change) -> Vec<Event> {
        let block = &self.blocks.list()[index];
        let delta = |delta: Value| {
            typed_event(
                "content_block_delta",
                json!({"index": index, "delta": delta}),
            )
        };
        match change {
            Change::Begin => {
                let data = json!({"index": index, "content_block": content(block, "")});
                vec![typed_event("content_block_start", data)]
            }
            Change::Extend(text) => vec![delta(match block {
                OutputBlock::Reasoning(_) => {
                    json!({"type": "thinking_delta", "thinking": text})
                }
                OutputBlock::Text(_) => json!({"type": "text_delta", "text": text}),
                OutputBlock::Call { .. } => {
                    json!({"type": "input_json_delta", "partial_json": text})
                }
            })],
            Change::End => {
                // Some clients send a thought back only if an event has signed it.
                let signed = matches!(block, OutputBlock::Reasoning(_))
                    .then(|| delta(json!({"type": "signature_delta", "signature": UNSIGNED})));
                let ended = typed_event("content_block_stop", json!({"index": index}));
                signed.into_iter().chain([ended]).collect()
            }
        }
    }
}

fn ping() -> Event {
    typed_event("ping", json!({}))
}

/// A block of which `text` is written.
fn content<'a>(block: &'a OutputBlock, text: &'a str) -> Content<'a> {
    match block {
        OutputBlock::Reasoning(_) => Content::Thinking {
            thinking: text,
            signature: UNSIGNED,
        },
        OutputBlock::Text(_) => Content::Text { text },
        OutputBlock::Call { head, .. } => Content::ToolUse {
            id: &head.id,
            name: &head.name,
            // Those of a call that was cut off may be no JSON.
            input: serde_json::from_str(text).unwrap_or_default(),
            caller: Caller::Direct,
        },
    }
}

impl Shape for MessageReply {
    type Event = Event;

    fn id(&self) -> &str {
        &self.id
    }

    fn whole(mut self, _: Arc<Text>, pieces: Vec<Piece>, choices: &[choice::Choice]) -> Response {
        for piece in pieces {
            self.blocks.push(piece);
        }
        let blocks = self.blocks.list().iter();
        let content = blocks
            .map(|block| content(block, block.written()))
            .collect();
        Json(self.message(content, choices)).into_response()
    }

    fn piece(
        &mut self,
        _: &Text,
        _: usize,
        piece: Piece,
        choices: &[choice::Choice],
    ) -> Vec<Event> {
        let mut events = Vec::new();
        if !self.begun {
            self.begun = true;
            // Not earlier: how much of the prompt was cached is known only now.
            let message = self.message(Vec::new(), choices);
            events.push(typed_event("message_start", json!({"message": message})));
            events.push(ping());
        }
        let changes = self.blocks.push(piece).into_iter();
        events.extend(changes.flat_map(|(index, change)| self.show(index, &change)));
        events
    }

    fn end(&mut self, choices: &[choice::Choice]) -> Vec<Event> {
        let data = json!({"delta": self.ending(), "usage": self.usage(choices)});
        vec![
            typed_event("message_delta", data),
            typed_event("message_stop", json!({})),
        ]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let data = json_text(&error::body(error));
        vec![Event::default().event("error").data(data)]
    }

    fn sent(events: impl Stream<Item = Event> + Send + 'static) -> Response {
        sse(events, KeepAlive::new().event(ping()))
    }
}
