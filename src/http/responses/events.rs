//! Builds the response object, and its events.

use crate::error::Error;
use crate::http::blocks::{Block, Blocks, Change};
use crate::http::choice::{Choice, Finish, Piece};
use crate::http::reply::Header;
use crate::http::stream::Shape;
use crate::text::Text;
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// The state of a reply.
pub(in crate::http) struct Reply {
    header: Header,
    /// The response object, with what it repeats of its request.
    response: Value,
    blocks: Blocks,
    /// The ids of the items.
    ids: Vec<String>,
    finish: Option<Finish>,
    /// The number of the next event.
    sequence_number: u64,
}

impl Reply {
    /// `shown` is an object: what the response repeats of its request.
    pub(super) fn new(header: &Header, shown: Value) -> Self {
        let mut response = shown;
        response["id"] = new_id("resp").into();
        response["object"] = "response".into();
        response["created_at"] = header.created.into();
        response["model"] = header.model.as_str().into();
        Self {
            header: header.clone(),
            response,
            blocks: Blocks::default(),
            ids: Vec::new(),
            finish: None,
            sequence_number: 0,
        }
    }

    /// Adds a piece; returns the changes of items.
    fn add(&mut self, mut piece: Piece) -> Vec<(usize, Change)> {
        self.finish = piece.finish.clone();
        piece.logprobs.clear();
        let changes = self.blocks.push(piece);
        let new = &self.blocks.list()[self.ids.len()..];
        let ids = new.iter().map(|block| new_id(kind(block)));
        self.ids.extend(ids);
        changes
    }

    /// The response while it is generated.
    fn unfinished(&self, status: &str) -> Value {
        let mut response = self.response.clone();
        response["status"] = status.into();
        response["error"] = Value::Null;
        response["incomplete_details"] = Value::Null;
        response["output"] = json!([]);
        response["usage"] = Value::Null;
        response
    }

    fn finished(&self, choices: &[Choice]) -> Value {
        let status = self.status();
        let mut response = self.unfinished(status);
        if status == INCOMPLETE {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        } else {
            response["completed_at"] = crate::http::reply::now().into();
        }
        response["output"] = self.items();
        response["usage"] = self.usage(choices);
        response
    }

    /// How the response ended.
    fn status(&self) -> &'static str {
        match &self.finish {
            Some(finish) if finish.reason == "length" => INCOMPLETE,
            _ => COMPLETED,
        }
    }

    /// The items; only the last one may be incomplete.
    fn items(&self) -> Value {
        (0..self.ids.len()).map(|i| self.item(i)).collect()
    }

    fn item_status(&self, index: usize) -> &'static str {
        match index + 1 == self.ids.len() {
            true => self.status(),
            false => COMPLETED,
        }
    }

    fn item(&self, index: usize) -> Value {
        let block = &self.blocks.list()[index];
        item(&self.ids[index], block, self.item_status(index))
    }

    fn usage(&self, choices: &[Choice]) -> Value {
        let of_chat = self.header.usage(choices);
        let reasoning_tokens: usize = choices.iter().map(Choice::reasoning_tokens).sum();
        let mut usage = json!({
            "input_tokens": of_chat["prompt_tokens"],
            "input_tokens_details": of_chat["prompt_tokens_details"],
            "output_tokens": of_chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": of_chat["total_tokens"],
        });
        if let Some(speculation) = of_chat.get("speculative_decoding") {
            usage["speculative_decoding"] = speculation.clone();
        }
        usage
    }

    fn event(&mut self, name: &str, mut fields: Value) -> Event {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence_number.into();
        self.sequence_number += 1;
        Event::default().event(name).data(fields.to_string())
    }

    /// The events of a change of an item.
    fn show(&mut self, index: usize, change: Change) -> Vec<Event> {
        let block = &self.blocks.list()[index];
        let (field, text) = match block {
            Block::Text(text) => ("output_text", text),
            Block::Reasoning(text) => ("reasoning_text", text),
            Block::Call { arguments, .. } => ("function_call_arguments", arguments),
        };
        let (delta, done) = (
            format!("response.{field}.delta"),
            format!("response.{field}.done"),
        );
        let item = |item: Value| json!({"output_index": index, "item": item});
        let events = match change {
            Change::Extend(text) => vec![(delta, self.within(index, json!({"delta": text})))],
            Change::Begin => {
                let new = item(new_item(&self.ids[index], block));
                let mut events = vec![("response.output_item.added".into(), new)];
                if let Some(part) = part(block, "") {
                    let part = self.within(index, json!({"part": part}));
                    events.push(("response.content_part.added".into(), part));
                }
                events
            }
            Change::End => {
                let whole = match block {
                    Block::Call { head, .. } => json!({"name": head.name, "arguments": text}),
                    _ => json!({"text": text}),
                };
                let mut events = vec![(done, self.within(index, whole))];
                if let Some(part) = part(block, text) {
                    let part = self.within(index, json!({"part": part}));
                    events.push(("response.content_part.done".into(), part));
                }
                events.push(("response.output_item.done".into(), item(self.item(index))));
                events
            }
        };
        let events = events.into_iter();
        events
            .map(|(name, fields)| self.event(&name, fields))
            .collect()
    }

    /// Fields of an event, with those that say where it happened: in an item, or in its only part.
    fn within(&self, index: usize, mut fields: Value) -> Value {
        let block = &self.blocks.list()[index];
        fields["item_id"] = self.ids[index].as_str().into();
        fields["output_index"] = index.into();
        if !matches!(block, Block::Call { .. }) {
            fields["content_index"] = 0.into();
        }
        if matches!(block, Block::Text(_)) && fields.get("part").is_none() {
            fields["logprobs"] = json!([]);
        }
        fields
    }
}

const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";

/// The beginning of an item's id.
fn kind(block: &Block) -> &'static str {
    match block {
        Block::Reasoning(_) => "rs",
        Block::Text(_) => "msg",
        Block::Call { .. } => "fc",
    }
}

fn new_id(kind: &str) -> String {
    format!("{kind}_{:032x}", rand::random::<u128>())
}

/// An item that has just begun.
fn new_item(id: &str, block: &Block) -> Value {
    let mut item = item(id, block, "in_progress");
    match block {
        Block::Call { .. } => item["arguments"] = "".into(),
        _ => item["content"] = json!([]),
    }
    item
}

fn item(id: &str, block: &Block, status: &str) -> Value {
    let mut item = match block {
        Block::Reasoning(text) => {
            json!({"type": "reasoning", "summary": [], "content": [part(block, text)]})
        }
        Block::Text(text) => {
            json!({"type": "message", "role": "assistant", "content": [part(block, text)]})
        }
        Block::Call { head, arguments } => json!({
            "type": "function_call",
            "call_id": head.id,
            "name": head.name,
            "arguments": arguments,
        }),
    };
    item["id"] = id.into();
    item["status"] = status.into();
    item
}

/// The part with an item's text; calls have none.
fn part(block: &Block, text: &str) -> Option<Value> {
    match block {
        Block::Reasoning(_) => Some(json!({"type": "reasoning_text", "text": text})),
        Block::Text(_) => {
            Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}))
        }
        Block::Call { .. } => None,
    }
}

impl Shape for Reply {
    fn id(&self) -> &str {
        self.response["id"].as_str().unwrap_or_default()
    }

    fn whole(mut self, _: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        for piece in pieces {
            self.add(piece);
        }
        Json(self.finished(choices)).into_response()
    }

    fn begin(&mut self) -> Vec<Event> {
        let response = self.unfinished("in_progress");
        let names = ["response.created", "response.in_progress"];
        names
            .map(|name| self.event(name, json!({"response": response})))
            .into()
    }

    fn piece(&mut self, _: &Text, _: usize, piece: Piece, _: &[Choice]) -> Vec<Event> {
        let changes = self.add(piece).into_iter();
        changes
            .flat_map(|(index, change)| self.show(index, change))
            .collect()
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        let name = format!("response.{}", self.status());
        let response = self.finished(choices);
        vec![self.event(&name, json!({"response": response}))]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let mut response = self.unfinished("failed");
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        response["output"] = self.items();
        vec![self.event("response.failed", json!({"response": response}))]
    }
}
