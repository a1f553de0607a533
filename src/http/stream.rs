//! A running reply: merges the engine's events of all its choices, and collects them or sends them as
//! SSE.

use super::choice::{Choice, Piece};
use super::connection::Client;
use super::error;
use super::openai::Job;
use super::reply::Header;
use crate::engine::{EngineHandle, Events};
use crate::error::Result;
use crate::text::Text;
use axum::body::Body;
use axum::http::header;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use tokio_stream::{StreamExt, StreamMap};

/// A job that the engine runs. Dropping it cancels the choices that are not finished.
pub(super) struct Running {
    text: Arc<Text>,
    header: Header,
    /// The events of each choice that is not finished.
    events: StreamMap<usize, Events>,
    choices: Vec<Choice>,
}

impl Running {
    /// Queues the job.
    ///
    /// # Errors
    /// As [`EngineHandle::submit_all`].
    pub fn start(engine: &EngineHandle, text: Arc<Text>, job: Job) -> Result<Self> {
        let events = engine.submit_all(job.requests)?;
        Ok(Self {
            text,
            header: job.header,
            events: events.into_iter().enumerate().collect(),
            choices: job.choices,
        })
    }

    /// The next piece, with the index of its choice; `None` when all are finished.
    async fn next(&mut self) -> Option<Result<(usize, Piece)>> {
        let (index, event) = self.events.next().await?;
        let piece = self.choices[index].on_event(&self.text, event);
        if let Ok(Piece {
            finish: Some(finish),
            ..
        }) = &piece
            && let Some(events) = self.events.remove(&index)
            && finish.reason != "length"
        {
            events.stop();
        }
        Some(piece.map(|piece| (index, piece)))
    }

    /// Waits for all choices, and returns the reply.
    ///
    /// # Errors
    /// The error of the engine.
    pub async fn collect(mut self) -> Result<Response> {
        let mut pieces: Vec<Piece> = self.choices.iter().map(|_| Piece::default()).collect();
        while let Some(next) = self.next().await {
            let (index, piece) = next?;
            pieces[index].append(piece);
        }
        let streams = self.header.logprobs.is_some();
        let usage = self.header.usage(&self.choices);
        let mut parts = self.header.reply(self.text, pieces, &usage);
        let body = match streams {
            // The text of log-probabilities takes many times their memory.
            true => Body::from_stream(stream::iter(parts.map(Ok::<_, Infallible>))),
            false => {
                let mut whole = parts.next().unwrap_or_default();
                parts.for_each(|part| whole.extend(part));
                Body::from(whole)
            }
        };
        Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
    }

    /// Sends each piece as it arrives.
    pub fn sse(self, include_usage: bool, client: Option<Client>) -> impl IntoResponse {
        let sender = Sender {
            pending: self.choices.iter().map(|_| None).collect(),
            running: self,
            include_usage,
            client,
            ready: VecDeque::new(),
            ended: false,
        };
        let events = stream::unfold(sender, |mut sender| async {
            let event = sender.next().await?;
            Some((Ok::<_, Infallible>(event), sender))
        });
        Sse::new(events).keep_alive(KeepAlive::default())
    }
}

/// The state of a stream.
struct Sender {
    running: Running,
    include_usage: bool,
    /// The client, until it has ended its side.
    client: Option<Client>,
    /// For each choice, what waits to be sent with text; `None` before its first chunk.
    pending: Vec<Option<Piece>>,
    ready: VecDeque<sse::Event>,
    ended: bool,
}

impl Sender {
    async fn next(&mut self) -> Option<sse::Event> {
        while self.ready.is_empty() && !self.ended {
            let next = tokio::select! {
                biased;
                next = self.running.next() => next,
                () = half_closed(&mut self.client) => {
                    self.client = None;
                    // Shows whether it still reads.
                    return Some(sse::Event::default().comment(""));
                }
            };
            match next {
                Some(Ok((index, piece))) => self.add(index, piece),
                Some(Err(error)) => {
                    self.ended = true;
                    tracing::warn!("stream failed: {error}");
                    self.ready.push_back(data(&error::body(&error)));
                }
                None => self.end(),
            }
        }
        self.ready.pop_front()
    }

    fn add(&mut self, index: usize, piece: Piece) {
        if self.pending[index].is_none()
            && let Some(opening) = self.running.header.opening(index)
        {
            self.push(opening);
        }
        let pending = self.pending[index].get_or_insert_default();
        pending.append(piece);
        if pending.is_visible() {
            let piece = std::mem::take(pending);
            let chunks = (self.running.header).chunks(&self.running.text, index, piece);
            chunks.into_iter().for_each(|chunk| self.push(chunk));
        }
    }

    fn push(&mut self, mut chunk: Value) {
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(data(&chunk));
    }

    fn end(&mut self) {
        self.ended = true;
        if self.include_usage {
            let usage = self.running.header.usage_chunk(&self.running.choices);
            self.ready.push_back(data(&usage));
        }
        self.ready.push_back(sse::Event::default().data("[DONE]"));
    }
}

async fn half_closed(client: &mut Option<Client>) {
    match client {
        Some(client) => client.half_closed().await,
        None => std::future::pending().await,
    }
}

fn data(json: &Value) -> sse::Event {
    sse::Event::default().data(json.to_string())
}
