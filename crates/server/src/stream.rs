//! A running reply: merges the engine's events of all its choices, and collects them or sends them as
//! they come.

use super::caller::Caller;
use super::choice::Choice;
use super::error::Refusal;
use super::load::InFlight;
use super::openai::Job;
use super::piece::{FinishKind, Piece};
use super::request_id::RequestId;
use super::state::AppState;
use super::trace::Trace;
use axum::body::{Body, Bytes};
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, Result};
use foretoken_engine::Events;
use foretoken_text::Text;
use futures_util::stream;
use http_body_util::BodyExt;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use tokio_stream::{Stream, StreamExt, StreamMap};

/// The form in which an API shows a reply: as one body, or as events.
pub(super) trait Shape: Send + 'static {
    /// What a stream consists of.
    type Event: Send + 'static;

    /// The id of the reply.
    fn id(&self) -> &str;

    /// The whole reply, of which there is a piece for each choice.
    fn whole(self, text: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response;

    /// The events before the first piece.
    fn begin(&mut self) -> Vec<Self::Event> {
        Vec::new()
    }

    /// The events for a piece of the choice with this index.
    fn piece(
        &mut self,
        text: &Text,
        index: usize,
        piece: Piece,
        choices: &[Choice],
    ) -> Vec<Self::Event>;

    /// The last events, after all choices have finished.
    fn end(&mut self, choices: &[Choice]) -> Vec<Self::Event>;

    /// The last events of a reply that failed.
    fn failed(&mut self, error: &Error) -> Vec<Self::Event>;

    /// The response that sends `events`.
    fn sent(events: impl Stream<Item = Self::Event> + Send + 'static) -> Response;
}

/// The response that sends `events` as SSE, and `keep_alive` while there is nothing to say.
pub(super) fn sse(
    events: impl Stream<Item = sse::Event> + Send + 'static,
    keep_alive: KeepAlive,
) -> Response {
    let events = events.map(Ok::<_, Infallible>);
    let response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Clients that split a stream at two line breaks would take a single one for the beginning of the next event.
    let doubled = |data: Bytes| {
        if data == "\n" {
            Bytes::from_static(b"\n\n")
        } else {
            data
        }
    };
    response.map(|body| Body::new(body.map_frame(move |frame| frame.map_data(doubled))))
}

/// Blank lines, which every client skips. Many benchmarks read each line that is not blank as an event, and count a
/// request as failed whose stream has a comment.
pub(super) fn blank_lines() -> KeepAlive {
    KeepAlive::new().event(sse::Event::default())
}

/// A job that the engine runs. Dropping it cancels the choices that are not finished.
pub(super) struct Running {
    text: Arc<Text>,
    /// The events of each choice that is not finished.
    events: StreamMap<usize, Events>,
    choices: Vec<Choice>,
    trace: Option<Trace>,
    _in_flight: InFlight,
}

impl Running {
    /// Queues the job.
    ///
    /// # Errors
    /// The errors of [`EngineHandle::submit_all`](foretoken_engine::EngineHandle::submit_all).
    pub fn start(state: &AppState, mut job: Job, caller: &Caller) -> Result<Self> {
        for request in &mut job.requests {
            request.name = Some(caller.id.0.clone());
        }
        let events = state.engine.submit_all(job.requests)?;
        Ok(Self {
            text: state.text.clone(),
            _in_flight: state.load.enter(),
            events: events.into_iter().enumerate().collect(),
            choices: job.choices,
            trace: caller.trace.clone(),
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
        {
            if let Some(trace) = &self.trace {
                let tokens = self.choices[index].completion_tokens();
                trace.finished(index, finish.reason.name(), tokens);
            }
            if let Some(events) = self.events.remove(&index)
                && finish.reason != FinishKind::Length
            {
                events.stop(self.choices[index].completion_tokens());
            }
        }
        Some(piece.map(|piece| (index, piece)))
    }

    /// Waits for all choices, and returns the reply.
    ///
    /// # Errors
    /// The error of the engine.
    pub async fn collect(mut self, shape: impl Shape) -> Result<Response> {
        let mut pieces: Vec<Piece> = self.choices.iter().map(|_| Piece::default()).collect();
        while let Some(next) = self.next().await {
            let (index, piece) = next?;
            pieces[index].append(piece);
        }
        Ok(shape.whole(self.text, pieces, &self.choices))
    }

    /// Sends each piece as it arrives.
    pub fn stream<S: Shape>(self, mut shape: S, caller: Caller) -> Response {
        let sender = Sender {
            ready: shape.begin().into(),
            running: self,
            shape,
            id: caller.id,
            ended: false,
        };
        let events = stream::unfold(sender, |mut sender| async {
            let event = sender.next().await?;
            Some((event, sender))
        });
        let mut response = S::sent(events);
        // nginx would else keep events back until its buffer is full.
        let unbuffered = HeaderName::from_static("x-accel-buffering");
        let headers = response.headers_mut();
        headers.insert(unbuffered, HeaderValue::from_static("no"));
        response
    }
}

/// The state of a stream.
struct Sender<S: Shape> {
    running: Running,
    shape: S,
    id: RequestId,
    ready: VecDeque<S::Event>,
    ended: bool,
}

impl<S: Shape> Sender<S> {
    async fn next(&mut self) -> Option<S::Event> {
        while self.ready.is_empty() && !self.ended {
            let next = self.running.next().await;
            let choices = &self.running.choices;
            let events = match next {
                Some(Ok((index, piece))) => {
                    self.shape.piece(&self.running.text, index, piece, choices)
                }
                Some(Err(error)) => {
                    self.ended = true;
                    tracing::warn!(request_id = &*self.id.0, "stream failed: {error}");
                    if let Some(trace) = &self.running.trace {
                        trace.failed(&Refusal::of(&error));
                    }
                    self.shape.failed(&error)
                }
                None => {
                    self.ended = true;
                    self.shape.end(choices)
                }
            };
            self.ready.extend(events);
        }
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn a_stream_that_waits_has_blank_lines_and_no_comments() {
        let keep_alive = blank_lines().interval(Duration::from_millis(1));
        let mut body = sse(stream::pending(), keep_alive).into_body();
        for _ in 0..2 {
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), "\n\n");
        }
        let one = stream::iter([sse::Event::default().data("{}")]);
        let body = sse(one, blank_lines()).into_body();
        let all = body.collect().await.unwrap().to_bytes();
        assert_eq!(all, "data: {}\n\n");
    }
}
