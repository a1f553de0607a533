//! Builds the response object, and its events.

use crate::error::Error;
use crate::http::blocks::{Block, Blocks, Change};
use crate::http::choice::{Choice, Finish, FinishKind, Piece};
use crate::http::reply::{Header, now};
use crate::http::reply_objects::{CachedTokens, Speculation};
use crate::http::stream::Shape;
use crate::text::Text;
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(in crate::http) struct ResponseObject<'a> {
    id: &'a str,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    created_at: u64,
    model: &'a str,
    status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_at: Option<u64>,
    error: Option<Failure>,
    incomplete_details: Option<Incomplete>,
    /// Reasoning, messages and calls, one after the other.
    output: Vec<Item<'a>>,
    usage: Option<Usage>,
    /// What it repeats of its request.
    #[serde(flatten)]
    shown: &'a Map<String, Value>,
}

#[derive(Clone, Copy, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ResponseStatus")]
enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseFailure")]
struct Failure {
    code: &'static str,
    message: String,
}

#[derive(Serialize, JsonSchema)]
struct Incomplete {
    reason: &'static str,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OutputItem")]
struct Item<'a> {
    id: &'a str,
    status: Status,
    #[serde(flatten)]
    kind: ItemKind<'a>,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ItemKind<'a> {
    Reasoning {
        summary: [(); 0],
        content: Vec<Part<'a>>,
    },
    Message {
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        content: Vec<Part<'a>>,
    },
    FunctionCall {
        call_id: &'a str,
        name: &'a str,
        /// JSON text, as the model wrote it.
        arguments: &'a str,
    },
}

/// The part with an item's text.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "OutputPart")]
enum Part<'a> {
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
#[schemars(rename = "ResponseUsage")]
struct Usage {
    input_tokens: usize,
    input_tokens_details: CachedTokens,
    output_tokens: usize,
    output_tokens_details: ReasoningTokens,
    total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculative_decoding: Option<Speculation>,
}

#[derive(Serialize, JsonSchema)]
struct ReasoningTokens {
    reasoning_tokens: usize,
}

/// The state of a reply.
pub(in crate::http) struct Reply {
    header: Header,
    id: String,
    /// What the response repeats of its request.
    shown: Map<String, Value>,
    blocks: Blocks,
    /// The ids of the items.
    ids: Vec<String>,
    finish: Option<Finish>,
    /// The number of the next event.
    sequence_number: u64,
}

impl Reply {
    /// `shown` is what the response repeats of its request.
    pub(super) fn new(header: &Header, shown: Map<String, Value>) -> Self {
        Self {
            header: header.clone(),
            id: new_id("resp"),
            shown,
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
    fn unfinished(&self, status: Status) -> ResponseObject<'_> {
        ResponseObject {
            id: &self.id,
            object: "response",
            created_at: self.header.created,
            model: &self.header.model,
            status,
            completed_at: None,
            error: None,
            incomplete_details: None,
            output: Vec::new(),
            usage: None,
            shown: &self.shown,
        }
    }

    fn finished(&self, choices: &[Choice]) -> ResponseObject<'_> {
        let status = self.status();
        let is_whole = status == Status::Completed;
        let reason = "max_output_tokens";
        ResponseObject {
            completed_at: is_whole.then(now),
            incomplete_details: (!is_whole).then_some(Incomplete { reason }),
            output: self.items(),
            usage: Some(self.usage(choices)),
            ..self.unfinished(status)
        }
    }

    /// How the response ended.
    fn status(&self) -> Status {
        match &self.finish {
            Some(finish) if finish.reason == FinishKind::Length => Status::Incomplete,
            _ => Status::Completed,
        }
    }

    fn items(&self) -> Vec<Item<'_>> {
        (0..self.ids.len()).map(|i| self.item(i)).collect()
    }

    /// An item that has ended; only the last one may be incomplete.
    fn item(&self, index: usize) -> Item<'_> {
        let block = &self.blocks.list()[index];
        let status = if index + 1 == self.ids.len() {
            self.status()
        } else {
            Status::Completed
        };
        item(&self.ids[index], block, block.written(), status)
    }

    fn usage(&self, choices: &[Choice]) -> Usage {
        let of_chat = self.header.usage(choices);
        Usage {
            input_tokens: of_chat.prompt_tokens,
            input_tokens_details: of_chat.prompt_tokens_details,
            output_tokens: of_chat.completion_tokens,
            output_tokens_details: ReasoningTokens {
                reasoning_tokens: choices.iter().map(Choice::reasoning_tokens).sum(),
            },
            total_tokens: of_chat.total_tokens,
            speculative_decoding: of_chat.speculative_decoding,
        }
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
        let text = block.written();
        let field = match block {
            Block::Text(_) => "output_text",
            Block::Reasoning(_) => "reasoning_text",
            Block::Call { .. } => "function_call_arguments",
        };
        let (delta, done) = (
            format!("response.{field}.delta"),
            format!("response.{field}.done"),
        );
        let item = |item: Item<'_>| json!({"output_index": index, "item": item});
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
fn new_item<'a>(id: &'a str, block: &'a Block) -> Item<'a> {
    let mut item = item(id, block, "", Status::InProgress);
    match &mut item.kind {
        ItemKind::Reasoning { content, .. } | ItemKind::Message { content, .. } => content.clear(),
        ItemKind::FunctionCall { .. } => {}
    }
    item
}

fn item<'a>(id: &'a str, block: &'a Block, text: &'a str, status: Status) -> Item<'a> {
    let content = part(block, text).into_iter().collect();
    let kind = match block {
        Block::Reasoning(_) => ItemKind::Reasoning {
            summary: [],
            content,
        },
        Block::Text(_) => ItemKind::Message {
            role: "assistant",
            content,
        },
        Block::Call { head, .. } => ItemKind::FunctionCall {
            call_id: &head.id,
            name: &head.name,
            arguments: text,
        },
    };
    Item { id, status, kind }
}

/// The part with an item's text; calls have none.
fn part<'a>(block: &Block, text: &'a str) -> Option<Part<'a>> {
    match block {
        Block::Reasoning(_) => Some(Part::ReasoningText { text }),
        Block::Text(_) => Some(Part::OutputText {
            text,
            annotations: [],
            logprobs: [],
        }),
        Block::Call { .. } => None,
    }
}

impl Shape for Reply {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(mut self, _: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        for piece in pieces {
            self.add(piece);
        }
        Json(self.finished(choices)).into_response()
    }

    fn begin(&mut self) -> Vec<Event> {
        let response = json!({"response": self.unfinished(Status::InProgress)});
        let names = ["response.created", "response.in_progress"];
        names.map(|name| self.event(name, response.clone())).into()
    }

    fn piece(&mut self, _: &Text, _: usize, piece: Piece, _: &[Choice]) -> Vec<Event> {
        let changes = self.add(piece).into_iter();
        changes
            .flat_map(|(index, change)| self.show(index, change))
            .collect()
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        let name = match self.status() {
            Status::Completed => "response.completed",
            _ => "response.incomplete",
        };
        let response = json!({"response": self.finished(choices)});
        vec![self.event(name, response)]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let response = json!({"response": ResponseObject {
            error: Some(Failure {
                code: "server_error",
                message: error.to_string(),
            }),
            output: self.items(),
            ..self.unfinished(Status::Failed)
        }});
        vec![self.event("response.failed", response)]
    }
}
