//! Builds the response object, and its events.

use super::options::RequestEcho;
use crate::blocks::{Blocks, Change, OutputBlock};
use crate::choice::{Choice, Finish, FinishKind, Piece};
use crate::reply::{ReplyHeader, now, typed_event};
use crate::reply_objects::{CachedTokens, Speculation};
use crate::stream::Shape;
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use foretoken_text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use std::cell::Cell;
use std::sync::Arc;

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(crate) struct ResponseObject<'a> {
    id: &'a str,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    created_at: u64,
    model: &'a str,
    status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_at: Option<u64>,
    error: Option<ResponseFailure>,
    incomplete_details: Option<Incomplete>,
    /// Reasoning, messages and calls, one after the other.
    output: Vec<OutputItem<'a>>,
    usage: Option<ResponseUsage>,
    #[serde(flatten)]
    echo: &'a RequestEcho,
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
struct ResponseFailure {
    code: &'static str,
    message: String,
}

#[derive(Serialize, JsonSchema)]
struct Incomplete {
    reason: &'static str,
}

#[derive(Serialize, JsonSchema)]
struct OutputItem<'a> {
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
        content: Vec<OutputPart<'a>>,
    },
    Message {
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        content: Vec<OutputPart<'a>>,
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
enum OutputPart<'a> {
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
struct ResponseUsage {
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

/// An event of a stream, with its number.
#[derive(Serialize)]
struct StreamEvent<'a> {
    #[serde(flatten)]
    event: EventData<'a>,
    sequence_number: u64,
}

/// The data of an event. The name of the event is the data's type.
#[derive(Serialize)]
#[serde(tag = "type")]
enum EventData<'a> {
    #[serde(rename = "response.created")]
    Created { response: ResponseObject<'a> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: ResponseObject<'a> },
    #[serde(rename = "response.completed")]
    Completed { response: ResponseObject<'a> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: ResponseObject<'a> },
    #[serde(rename = "response.failed")]
    Failed { response: ResponseObject<'a> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded {
        output_index: usize,
        item: OutputItem<'a>,
    },
    #[serde(rename = "response.output_item.done")]
    ItemDone {
        output_index: usize,
        item: OutputItem<'a>,
    },
    #[serde(rename = "response.content_part.added")]
    PartAdded(ItemChange<'a, Whole<'a>>),
    #[serde(rename = "response.content_part.done")]
    PartDone(ItemChange<'a, Whole<'a>>),
    #[serde(rename = "response.output_text.delta")]
    TextDelta(ItemChange<'a, ItemDelta<'a>>),
    #[serde(rename = "response.output_text.done")]
    TextDone(ItemChange<'a, Done<'a>>),
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta(ItemChange<'a, ItemDelta<'a>>),
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone(ItemChange<'a, Done<'a>>),
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta(ItemChange<'a, ItemDelta<'a>>),
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone(ItemChange<'a, DoneCall<'a>>),
}

/// A change of an item, or of its only part.
#[derive(Serialize)]
struct ItemChange<'a, T> {
    item_id: &'a str,
    output_index: usize,
    /// Calls have no parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(flatten)]
    change: T,
}

#[derive(Serialize)]
struct Whole<'a> {
    part: OutputPart<'a>,
}

#[derive(Serialize)]
struct ItemDelta<'a> {
    delta: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
struct Done<'a> {
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
struct DoneCall<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// The state of a reply.
pub(crate) struct ResponseReply {
    header: ReplyHeader,
    id: String,
    echo: RequestEcho,
    blocks: Blocks,
    /// The ids of the items.
    ids: Vec<String>,
    finish: Option<Finish>,
    /// The number of the next event.
    sequence_number: Cell<u64>,
}

impl ResponseReply {
    pub(super) fn new(header: &ReplyHeader, echo: RequestEcho) -> Self {
        Self {
            header: header.clone(),
            id: new_id("resp"),
            echo,
            blocks: Blocks::default(),
            ids: Vec::new(),
            finish: None,
            sequence_number: Cell::default(),
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
            echo: &self.echo,
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

    /// Returns the status with which the response ended.
    fn status(&self) -> Status {
        match &self.finish {
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
        item(&self.ids[index], block, block.written(), status)
    }

    fn usage(&self, choices: &[Choice]) -> ResponseUsage {
        let of_chat = self.header.usage(choices);
        ResponseUsage {
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

    fn event(&self, event: EventData<'_>) -> Event {
        let sequence_number = self.sequence_number.get();
        self.sequence_number.set(sequence_number + 1);
        typed_event(&StreamEvent {
            event,
            sequence_number,
        })
    }

    /// The events of a change of an item.
    fn show(&self, output_index: usize, change: &Change) -> Vec<Event> {
        let block = &self.blocks.list()[output_index];
        let text = block.written();
        let logprobs = matches!(block, OutputBlock::Text(_)).then_some([]);
        let part = |text| {
            let part = part(block, text)?;
            Some(self.within(output_index, Whole { part }))
        };
        let events = match change {
            Change::Begin => {
                let item = new_item(&self.ids[output_index], block);
                let added = EventData::ItemAdded { output_index, item };
                vec![Some(added), part("").map(EventData::PartAdded)]
            }
            Change::Extend(delta) => {
                let delta = self.within(output_index, ItemDelta { delta, logprobs });
                vec![Some(match block {
                    OutputBlock::Text(_) => EventData::TextDelta(delta),
                    OutputBlock::Reasoning(_) => EventData::ReasoningDelta(delta),
                    OutputBlock::Call { .. } => EventData::ArgumentsDelta(delta),
                })]
            }
            Change::End => {
                let done = self.within(output_index, Done { text, logprobs });
                let done = match block {
                    OutputBlock::Text(_) => EventData::TextDone(done),
                    OutputBlock::Reasoning(_) => EventData::ReasoningDone(done),
                    OutputBlock::Call { head, arguments } => {
                        let name = &head.name;
                        let called = DoneCall { name, arguments };
                        EventData::ArgumentsDone(self.within(output_index, called))
                    }
                };
                let item = self.item(output_index);
                let ended = EventData::ItemDone { output_index, item };
                vec![Some(done), part(text).map(EventData::PartDone), Some(ended)]
            }
        };
        let events = events.into_iter().flatten();
        events.map(|event| self.event(event)).collect()
    }

    fn within<T>(&self, output_index: usize, change: T) -> ItemChange<'_, T> {
        let is_call = matches!(self.blocks.list()[output_index], OutputBlock::Call { .. });
        ItemChange {
            item_id: &self.ids[output_index],
            output_index,
            content_index: (!is_call).then_some(0),
            change,
        }
    }
}

/// The beginning of an item's id.
fn kind(block: &OutputBlock) -> &'static str {
    match block {
        OutputBlock::Reasoning(_) => "rs",
        OutputBlock::Text(_) => "msg",
        OutputBlock::Call { .. } => "fc",
    }
}

fn new_id(kind: &str) -> String {
    format!("{kind}_{:032x}", rand::random::<u128>())
}

/// An item that has just begun.
fn new_item<'a>(id: &'a str, block: &'a OutputBlock) -> OutputItem<'a> {
    let mut item = item(id, block, "", Status::InProgress);
    match &mut item.kind {
        ItemKind::Reasoning { content, .. } | ItemKind::Message { content, .. } => content.clear(),
        ItemKind::FunctionCall { .. } => {}
    }
    item
}

fn item<'a>(id: &'a str, block: &'a OutputBlock, text: &'a str, status: Status) -> OutputItem<'a> {
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
        OutputBlock::Call { head, .. } => ItemKind::FunctionCall {
            call_id: &head.id,
            name: &head.name,
            arguments: text,
        },
    };
    OutputItem { id, status, kind }
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
        let response = || self.unfinished(Status::InProgress);
        let created = EventData::Created {
            response: response(),
        };
        let in_progress = EventData::InProgress {
            response: response(),
        };
        vec![self.event(created), self.event(in_progress)]
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
        let is_whole = response.status == Status::Completed;
        vec![self.event(if is_whole {
            EventData::Completed { response }
        } else {
            EventData::Incomplete { response }
        })]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        let response = ResponseObject {
            error: Some(ResponseFailure {
                code: "server_error",
                message: error.to_string(),
            }),
            output: self.items(),
            ..self.unfinished(Status::Failed)
        };
        vec![self.event(EventData::Failed { response })]
    }
}
