//! Builds the response object and its events.

use super::object::{
    Incomplete, InputTokens, ItemKind, OutputItem, OutputPart, ReasoningTokens, ResponseFailure,
    ResponseObject, ResponseUsage, Status,
};
use super::options::RequestEcho;
use super::storing::Storing;
use super::tools::ToolNames;
use crate::blocks::{Blocks, Change, OutputBlock};
use crate::choice::Choice;
use crate::error::Refusal;
use crate::piece::{FinishKind, Piece};
use crate::reply::{ReplyHeader, new_id, now, typed_event};
use crate::stream::{Shape, blank_lines, sse};
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use foretoken_text::Text;
use futures_util::stream;
use serde::Serialize;
use serde_json::{Value, json};
use std::cell::Cell;
use std::sync::Arc;
use tokio_stream::Stream;

/// The data of the event that ends a stream of a response of which no more is known than why it failed.
#[derive(Serialize)]
pub(crate) struct FailedEvent {
    #[serde(rename = "type")]
    pub name: &'static str,
    response: FailedResponse,
    sequence_number: u64,
}

#[derive(Serialize)]
struct FailedResponse {
    id: String,
    object: &'static str,
    created_at: u64,
    status: Status,
    error: ResponseFailure,
    output: [(); 0],
}

impl FailedEvent {
    pub fn of(error: &Error) -> Self {
        Self {
            name: "response.failed",
            response: FailedResponse {
                id: new_id("resp_"),
                object: "response",
                created_at: now(),
                status: Status::Failed,
                error: ResponseFailure::of(error),
                output: [],
            },
            sequence_number: 0,
        }
    }
}

/// Whether `path` is this API's.
pub(crate) fn has_route(path: &str) -> bool {
    path == "/v1/responses"
}

/// The data of an event of a stream, with the event's number.
#[derive(Serialize)]
struct Numbered<T> {
    #[serde(flatten)]
    data: T,
    sequence_number: u64,
}

/// The data of an event about the whole response.
#[derive(Serialize)]
struct Shown<'a> {
    response: ResponseObject<'a>,
}

/// A change of an item, or of its only part.
#[derive(Serialize)]
struct ItemChange<'a> {
    item_id: &'a str,
    output_index: usize,
    /// Calls have no parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(flatten)]
    change: Value,
}

/// The state of a reply.
pub(crate) struct ResponseReply {
    header: ReplyHeader,
    id: String,
    echo: RequestEcho,
    names: ToolNames,
    blocks: Blocks,
    /// The ids of the items.
    ids: Vec<String>,
    /// The number of the next event.
    sequence_number: Cell<u64>,
    /// Where the response is stored at its end; `None` = it is not.
    storing: Option<Storing>,
}

impl ResponseReply {
    pub(super) fn new(header: &ReplyHeader, echo: RequestEcho, names: ToolNames) -> Self {
        Self {
            header: header.clone(),
            id: new_id("resp_"),
            echo,
            names,
            blocks: Blocks::default(),
            ids: Vec::new(),
            sequence_number: Cell::default(),
            storing: None,
        }
    }

    /// Sets where the response is stored at its end.
    pub(super) fn storing(self, storing: Option<Storing>) -> Self {
        Self { storing, ..self }
    }

    /// The stream of a response whose request is refused. Some clients read why only in a stream, and only of some errors.
    pub fn refused(mut self, error: &Error) -> Response {
        let mut events = self.begin();
        events.extend(self.failed(error));
        let mut response = Self::sent(stream::iter(events));
        response.extensions_mut().insert(Refusal::of(error));
        response
    }

    /// Adds a piece; returns the changes of items.
    fn add(&mut self, piece: Piece) -> Vec<(usize, Change)> {
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
            echo: &self.echo,
        }
    }

    /// The response at its end, which is then stored.
    fn finished(&self, choices: &[Choice]) -> ResponseObject<'_> {
        let status = self.status();
        let is_whole = status == Status::Completed;
        let reason = "max_output_tokens";
        let response = ResponseObject {
            completed_at: is_whole.then(now),
            incomplete_details: (!is_whole).then_some(Incomplete { reason }),
            output: self.items(),
            usage: Some(self.usage(choices)),
            ..self.unfinished(status)
        };
        if let Some(storing) = &self.storing {
            storing.store(&response);
        }
        response
    }

    /// Returns the status with which the response ended.
    fn status(&self) -> Status {
        match &self.blocks.finish {
            Some(finish) if finish.reason == FinishKind::Length => Status::Incomplete,
            _ => Status::Completed,
        }
    }

    fn items(&self) -> Vec<OutputItem<'_>> {
        (0..self.ids.len()).map(|i| self.item(i)).collect()
    }

    /// An item that has ended; only the last one may be incomplete.
    fn item(&self, index: usize) -> OutputItem<'_> {
        let block = &self.blocks.list()[index];
        let status = if index + 1 == self.ids.len() {
            self.status()
        } else {
            Status::Completed
        };
        self.shown(index, block.written(), status)
    }

    /// An item that has just begun.
    fn new_item(&self, index: usize) -> OutputItem<'_> {
        let mut item = self.shown(index, "", Status::InProgress);
        match &mut item.kind {
            ItemKind::Reasoning { content, .. } | ItemKind::Message { content, .. } => {
                content.clear();
            }
            ItemKind::FunctionCall { .. } | ItemKind::CustomToolCall { .. } => {}
        }
        item
    }

    fn shown<'a>(&'a self, index: usize, text: &'a str, status: Status) -> OutputItem<'a> {
        let block = &self.blocks.list()[index];
        let content = part(block, text).into_iter().collect();
        let kind = match block {
            OutputBlock::Reasoning(_) => ItemKind::Reasoning {
                summary: [],
                content,
            },
            OutputBlock::Text(_) => ItemKind::Message {
                role: "assistant",
                content,
            },
            OutputBlock::Call {
                head, is_custom, ..
            } => {
                let call_id = &head.id;
                match (self.names.of(&head.name), is_custom) {
                    ((namespace, name), true) => ItemKind::CustomToolCall {
                        call_id,
                        namespace,
                        name,
                        input: text,
                    },
                    ((namespace, name), false) => ItemKind::FunctionCall {
                        call_id,
                        namespace,
                        name,
                        arguments: text,
                    },
                }
            }
        };
        let id = &self.ids[index];
        OutputItem { id, status, kind }
    }

    fn usage(&self, choices: &[Choice]) -> ResponseUsage {
        let of_chat = self.header.usage(choices);
        ResponseUsage {
            input_tokens: of_chat.prompt_tokens,
            input_tokens_details: InputTokens {
                cached_tokens: of_chat.prompt_tokens_details.cached_tokens,
                cache_write_tokens: 0,
            },
            output_tokens: of_chat.completion_tokens,
            output_tokens_details: ReasoningTokens {
                reasoning_tokens: choices.iter().map(Choice::reasoning_tokens).sum(),
            },
            total_tokens: of_chat.total_tokens,
            speculative_decoding: of_chat.speculative_decoding,
        }
    }

    fn event(&self, name: &str, data: impl Serialize) -> Event {
        let sequence_number = self.sequence_number.get();
        self.sequence_number.set(sequence_number + 1);
        let data = Numbered {
            data,
            sequence_number,
        };
        typed_event(&format!("response.{name}"), data)
    }

    /// The events of a change of an item. They are numbered in the order in which they are made.
    fn show(&self, output_index: usize, change: &Change) -> Vec<Event> {
        let (item_id, block) = (&self.ids[output_index], &self.blocks.list()[output_index]);
        let of_item = |name, item: OutputItem<'_>| {
            self.event(name, json!({"output_index": output_index, "item": item}))
        };
        let changed = |name: &str, change| {
            let is_call = matches!(block, OutputBlock::Call { .. });
            let content_index = (!is_call).then_some(0);
            let change = ItemChange {
                item_id,
                output_index,
                content_index,
                change,
            };
            self.event(name, change)
        };
        let of_part = |name, text| Some(changed(name, json!({"part": part(block, text)?})));
        let of_block = match block {
            OutputBlock::Text(_) => "output_text",
            OutputBlock::Reasoning(_) => "reasoning_text",
            OutputBlock::Call {
                is_custom: true, ..
            } => "custom_tool_call_input",
            OutputBlock::Call { .. } => "function_call_arguments",
        };
        let events = match change {
            Change::Begin => {
                let added = of_item("output_item.added", self.new_item(output_index));
                [Some(added), of_part("content_part.added", ""), None]
            }
            Change::Extend(delta) => {
                let delta = match block {
                    OutputBlock::Text(_) => json!({"delta": delta, "logprobs": []}),
                    _ => json!({"delta": delta}),
                };
                [
                    Some(changed(&format!("{of_block}.delta"), delta)),
                    None,
                    None,
                ]
            }
            Change::End => {
                let done = match block {
                    OutputBlock::Text(text) => json!({"text": text, "logprobs": []}),
                    OutputBlock::Reasoning(text) => json!({"text": text}),
                    OutputBlock::Call {
                        is_custom: true,
                        arguments: input,
                        ..
                    } => json!({"input": input}),
                    OutputBlock::Call {
                        head, arguments, ..
                    } => {
                        let (_, name) = self.names.of(&head.name);
                        json!({"name": name, "arguments": arguments})
                    }
                };
                let done = changed(&format!("{of_block}.done"), done);
                let part = of_part("content_part.done", block.written());
                let ended = of_item("output_item.done", self.item(output_index));
                [Some(done), part, Some(ended)]
            }
        };
        events.into_iter().flatten().collect()
    }
}

/// The beginning of an item's id.
fn kind(block: &OutputBlock) -> &'static str {
    match block {
        OutputBlock::Reasoning(_) => "rs_",
        OutputBlock::Text(_) => "msg_",
        OutputBlock::Call {
            is_custom: true, ..
        } => "ctc_",
        OutputBlock::Call { .. } => "fc_",
    }
}

/// The part with an item's text; calls have none.
fn part<'a>(block: &OutputBlock, text: &'a str) -> Option<OutputPart<'a>> {
    match block {
        OutputBlock::Reasoning(_) => Some(OutputPart::ReasoningText { text }),
        OutputBlock::Text(_) => Some(OutputPart::OutputText {
            text,
            annotations: [],
            logprobs: [],
        }),
        OutputBlock::Call { .. } => None,
    }
}

impl Shape for ResponseReply {
    type Event = Event;

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
        let event = |name| {
            let response = self.unfinished(Status::InProgress);
            self.event(name, Shown { response })
        };
        vec![event("created"), event("in_progress")]
    }

    fn piece(&mut self, _: &Text, _: usize, piece: Piece, _: &[Choice]) -> Vec<Event> {
        let changes = self.add(piece);
        let changes = changes.iter();
        changes
            .flat_map(|(index, change)| self.show(*index, change))
            .collect()
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        let response = self.finished(choices);
        let name = match response.status {
            Status::Incomplete => "incomplete",
            _ => "completed",
        };
        vec![self.event(name, Shown { response })]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let response = ResponseObject {
            error: Some(ResponseFailure::of(error)),
            output: self.items(),
            ..self.unfinished(Status::Failed)
        };
        vec![self.event("failed", Shown { response })]
    }

    fn sent(events: impl Stream<Item = Event> + Send + 'static) -> Response {
        sse(events, blank_lines())
    }
}
