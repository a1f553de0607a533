//! Builds the message, and its events.

use super::error;
use crate::error::Error;
use crate::http::blocks::{Block, Blocks, Change};
use crate::http::choice::{self, Finish, Piece, StopReason};
use crate::http::reply::Header;
use crate::http::stream::Shape;
use crate::text::Text;
use axum::Json;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// The state of a reply.
pub(in crate::http) struct Reply {
    header: Header,
    id: String,
    blocks: Blocks,
    finish: Option<Finish>,
    /// Whether the first event was sent.
    begun: bool,
}

impl Reply {
    pub(super) fn new(header: &Header) -> Self {
        Self {
            header: header.clone(),
            id: format!("msg_{:032x}", rand::random::<u128>()),
            blocks: Blocks::default(),
            finish: None,
            begun: false,
        }
    }

    fn add(&mut self, piece: Piece) -> Vec<(usize, Change)> {
        self.finish = piece.finish.clone();
        self.blocks.push(piece)
    }

    fn message(&self, content: Vec<Value>, choices: &[choice::Choice]) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.header.model,
            "content": content,
            "stop_reason": self.stop_reason(),
            "stop_sequence": self.stop_sequence(),
            "usage": self.usage(choices),
        })
    }

    /// `None` while it is generated.
    fn stop_reason(&self) -> Option<&'static str> {
        let finish = self.finish.as_ref()?;
        Some(match (finish.reason, self.stop_sequence()) {
            ("length", _) => "max_tokens",
            (_, Some(_)) => "stop_sequence",
            _ if self.blocks.calls() => "tool_use",
            _ => "end_turn",
        })
    }

    fn stop_sequence(&self) -> Option<&str> {
        match self.finish.as_ref()?.stop.as_ref()? {
            StopReason::Text(text) => Some(text),
            StopReason::Token(_) => None,
        }
    }

    /// Cached tokens are not among `input_tokens` here.
    fn usage(&self, choices: &[choice::Choice]) -> Value {
        let of_chat = self.header.usage(choices);
        let cached = self.header.cached_tokens(choices);
        let mut usage = json!({
            "input_tokens": self.header.prompt_tokens.saturating_sub(cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": of_chat["completion_tokens"],
        });
        if let Some(speculation) = of_chat.get("speculative_decoding") {
            usage["speculative_decoding"] = speculation.clone();
        }
        usage
    }

    fn show(&self, index: usize, change: Change) -> Event {
        let block = &self.blocks.list()[index];
        match change {
            Change::Begin => {
                let fields = json!({"index": index, "content_block": new_content(block)});
                event("content_block_start", fields)
            }
            Change::Extend(text) => {
                let delta = match block {
                    Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": text}),
                    Block::Text(_) => json!({"type": "text_delta", "text": text}),
                    Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                };
                event(
                    "content_block_delta",
                    json!({"index": index, "delta": delta}),
                )
            }
            Change::End => event("content_block_stop", json!({"index": index})),
        }
    }
}

fn event(name: &str, mut fields: Value) -> Event {
    fields["type"] = name.into();
    Event::default().event(name).data(fields.to_string())
}

fn content(block: &Block) -> Value {
    match block {
        Block::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Block::Text(text) => json!({"type": "text", "text": text}),
        Block::Call { head, arguments } => {
            // Those of a call that was cut off may be no JSON.
            let input: Option<Value> = serde_json::from_str(arguments).ok();
            let input = input.filter(Value::is_object).unwrap_or_else(|| json!({}));
            json!({"type": "tool_use", "id": head.id, "name": head.name, "input": input})
        }
    }
}

/// A block that has just begun.
fn new_content(block: &Block) -> Value {
    content(&match block {
        Block::Reasoning(_) => Block::Reasoning(String::new()),
        Block::Text(_) => Block::Text(String::new()),
        Block::Call { head, .. } => Block::Call {
            head: head.clone(),
            arguments: String::new(),
        },
    })
}

impl Shape for Reply {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(mut self, _: Arc<Text>, pieces: Vec<Piece>, choices: &[choice::Choice]) -> Response {
        for piece in pieces {
            self.add(piece);
        }
        let content = self.blocks.list().iter().map(content).collect();
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
            let message = json!({"message": self.message(Vec::new(), choices)});
            events.push(event("message_start", message));
            events.push(event("ping", json!({})));
        }
        let changes = self.add(piece).into_iter();
        events.extend(changes.map(|(index, change)| self.show(index, change)));
        events
    }

    fn end(&mut self, choices: &[choice::Choice]) -> Vec<Event> {
        let delta = json!({
            "stop_reason": self.stop_reason(),
            "stop_sequence": self.stop_sequence(),
        });
        let fields = json!({"delta": delta, "usage": self.usage(choices)});
        vec![
            event("message_delta", fields),
            event("message_stop", json!({})),
        ]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let body = error::body(error).to_string();
        vec![Event::default().event("error").data(body)]
    }

    fn keep_alive() -> KeepAlive {
        KeepAlive::new().event(event("ping", json!({})))
    }
}
