//! The replies of completions and chats: one object, or chunks of each choice.

use super::choice::Choice;
use super::error;
use super::openai::Job;
use super::piece::Piece;
use super::reply::{ReplyHeader, event};
use super::reply_objects::ChunkUsage;
use super::stream::{Shape, blank_lines, sse};
use axum::body::Body;
use axum::http::header;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use foretoken_text::Text;
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use tokio_stream::Stream;

/// The state of a reply.
pub(super) struct Chunks {
    header: ReplyHeader,
    include_usage: bool,
    /// Whether each chunk says what the reply has cost so far.
    continuous_usage: bool,
    pending: Vec<Pending>,
}

/// The part of a choice that waits to be sent.
#[derive(Default)]
struct Pending {
    /// Whether the choice has had an event.
    begun: bool,
    /// Whether the choice has had a piece.
    shown: bool,
    /// The piece that waits to be sent with text.
    piece: Piece,
}

impl Chunks {
    pub fn new(job: &Job) -> Self {
        Self {
            header: job.header.clone(),
            include_usage: job.include_usage,
            continuous_usage: job.continuous_usage,
            pending: job.choices.iter().map(|_| Pending::default()).collect(),
        }
    }

    /// The usage field of a chunk.
    fn usage(&self, choices: &[Choice]) -> ChunkUsage {
        let so_far = self.continuous_usage.then(|| self.header.usage(choices));
        (self.include_usage || self.continuous_usage).then_some(so_far)
    }
}

impl Shape for Chunks {
    type Event = Event;

    fn id(&self) -> &str {
        &self.header.id
    }

    fn whole(self, text: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        let streams = self.header.logprobs.is_some();
        let usage = self.header.usage(choices);
        let pieces = self.header.best(pieces, choices);
        let mut parts = self.header.whole(text, pieces, usage);
        let body = if streams {
            // So that only one choice's text is in memory.
            Body::from_stream(stream::iter(parts.map(Ok::<_, Infallible>)))
        } else {
            let mut whole = parts.next().unwrap_or_default();
            parts.for_each(|part| whole.extend(part));
            Body::from(whole)
        };
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }

    fn piece(&mut self, text: &Text, index: usize, piece: Piece, choices: &[Choice]) -> Vec<Event> {
        let mut chunks = Vec::new();
        let usage = self.usage(choices);
        let pending = &mut self.pending[index];
        let begins = !std::mem::replace(&mut pending.begun, true);
        if begins {
            chunks.extend(self.header.opening(index, usage));
        }
        pending.piece.append(piece);
        // By its first chunk, clients time the first token, which may show no text. A chat has its opening.
        let is_opening = begins && chunks.is_empty();
        if pending.piece.is_visible() || is_opening {
            let piece = std::mem::take(&mut pending.piece);
            let first = !std::mem::replace(&mut pending.shown, true);
            chunks.extend(self.header.chunks(text, index, &piece, first, usage));
        }
        chunks
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        let usage = (self.include_usage).then(|| self.header.usage_chunk(choices));
        let done = Event::default().data("[DONE]");
        usage.into_iter().chain([done]).collect()
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        vec![event(&error::body(error))]
    }

    fn sent(events: impl Stream<Item = Event> + Send + 'static) -> Response {
        sse(events, blank_lines())
    }
}
