//! How completions and chats show a reply: one object, or chunks of each choice.

use super::choice::{Choice, Piece};
use super::error;
use super::openai::Job;
use super::reply::Header;
use super::stream::Shape;
use crate::error::Error;
use crate::text::Text;
use axum::body::Body;
use axum::http::header;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;

/// The state of a reply.
pub(super) struct Chunks {
    header: Header,
    include_usage: bool,
    /// For each choice, what waits to be sent with text; `None` before its first chunk.
    pending: Vec<Option<Piece>>,
}

impl Chunks {
    pub fn new(job: &Job) -> Self {
        Self {
            header: job.header.clone(),
            include_usage: job.include_usage,
            pending: job.choices.iter().map(|_| None).collect(),
        }
    }

    fn event(&self, mut chunk: Value) -> Event {
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        data(&chunk)
    }
}

impl Shape for Chunks {
    fn whole(self, text: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        let streams = self.header.logprobs.is_some();
        let usage = self.header.usage(choices);
        let mut parts = self.header.reply(text, pieces, &usage);
        let body = match streams {
            // The text of log-probabilities takes many times their memory.
            true => Body::from_stream(stream::iter(parts.map(Ok::<_, Infallible>))),
            false => {
                let mut whole = parts.next().unwrap_or_default();
                parts.for_each(|part| whole.extend(part));
                Body::from(whole)
            }
        };
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }

    fn piece(&mut self, text: &Text, index: usize, piece: Piece, _: &[Choice]) -> Vec<Event> {
        let mut chunks = Vec::new();
        if self.pending[index].is_none() {
            chunks.extend(self.header.opening(index));
        }
        let pending = self.pending[index].get_or_insert_default();
        pending.append(piece);
        if pending.is_visible() {
            let piece = std::mem::take(pending);
            chunks.extend(self.header.chunks(text, index, piece));
        }
        chunks.into_iter().map(|chunk| self.event(chunk)).collect()
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        let usage = (self.include_usage).then(|| data(&self.header.usage_chunk(choices)));
        let done = Event::default().data("[DONE]");
        usage.into_iter().chain([done]).collect()
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        vec![data(&error::body(error))]
    }
}

fn data(json: &Value) -> Event {
    Event::default().data(json.to_string())
}
