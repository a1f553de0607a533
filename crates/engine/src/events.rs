//! The receiving end of a request: its events.

use super::request::{Event, FinishReason, SpecUsage, TokenOutput};
use super::shared::EngineShared;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_core::sampling::TokenLogprobs;
use futures_util::Stream;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::UnboundedReceiver;

/// The events of one request, in order. The last one has `finish` set, or is `Embedding` or `Failed`, even if the
/// engine thread has ended. Dropping this cancels the request.
///
/// [`Stats::requests_finished`](super::Stats::requests_finished) counts the request when this is dropped, because the
/// receiver may end the text at a stop string that the engine does not know.
#[derive(Debug)]
pub struct Events {
    receiver: UnboundedReceiver<Event>,
    shared: Arc<EngineShared>,
    /// `finished_reason` of the metrics; `None` before the last event.
    reason: Option<&'static str>,
    /// The tokens of a text that ended here.
    text_tokens: Arc<OnceLock<usize>>,
}

impl Events {
    pub(super) fn new(
        receiver: UnboundedReceiver<Event>,
        shared: Arc<EngineShared>,
        text_tokens: Arc<OnceLock<usize>>,
    ) -> Self {
        Self {
            receiver,
            shared,
            reason: None,
            text_tokens,
        }
    }

    /// The next event; `None` after the last one.
    pub async fn recv(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Like [`Events::recv`], for a thread that may block.
    ///
    /// # Panics
    /// Within an async runtime, whose threads may not block.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        let event = self.receiver.blocking_recv();
        self.note(event)
    }

    /// Collects all events up to the end of the request.
    ///
    /// # Errors
    /// The error with which the request failed.
    pub async fn collect(mut self) -> Result<CollectedEvents> {
        let mut all = CollectedEvents::default();
        while all.finish.is_none()
            && let Some(event) = self.recv().await
        {
            all.add(event)?;
        }
        Ok(all)
    }

    /// Like [`Events::collect`], for a thread that may block.
    ///
    /// # Errors
    /// See [`Events::collect`].
    ///
    /// # Panics
    /// See [`Events::blocking_recv`].
    pub fn blocking_collect(mut self) -> Result<CollectedEvents> {
        let mut all = CollectedEvents::default();
        while all.finish.is_none()
            && let Some(event) = self.blocking_recv()
        {
            all.add(event)?;
        }
        Ok(all)
    }

    /// Ends the request because its text is complete with its first `tokens` tokens: it counts as `stop`, not
    /// `abort`.
    pub fn stop(mut self, tokens: usize) {
        self.reason = Some("stop");
        let _ = self.text_tokens.set(tokens);
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.receiver.poll_recv(cx));
        Poll::Ready(self.note(event))
    }

    fn note(&mut self, event: Option<Event>) -> Option<Event> {
        let gone = || Event::Failed(self.shared.gone());
        let event = event.or_else(|| self.reason.is_none().then(gone));
        match &event {
            Some(Event::Tokens {
                finish: Some(finish),
                ..
            }) => self.reason = Some(finish.name()),
            Some(Event::Embedding { .. }) => self.reason = Some("stop"),
            Some(Event::Failed(error)) => {
                let shutdown = matches!(error, Error::Request { kind, .. } if *kind == RequestErrorKind::ShuttingDown);
                self.reason = Some(if shutdown { "abort" } else { "error" });
            }
            _ => {}
        }
        event
    }
}

/// The collected events of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CollectedEvents {
    /// All tokens of the request so far, in order.
    pub tokens: Vec<TokenOutput>,
    /// See [`Event::Prompt`].
    pub prompt: Vec<Option<TokenLogprobs>>,
    /// See [`Event::Embedding`].
    pub embedding: Vec<f32>,
    /// `None` before the last event, and of an embedding.
    pub finish: Option<FinishReason>,
    /// Speculation counts of the request so far.
    pub spec: SpecUsage,
    /// See [`Event::Tokens`].
    pub cached_tokens: usize,
}

impl CollectedEvents {
    /// Adds the next event.
    ///
    /// # Errors
    /// The error of a `Failed` event.
    pub fn add(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Prompt(scores) => self.prompt = scores,
            Event::Tokens {
                tokens,
                finish,
                spec,
                cached_tokens,
                ..
            } => {
                self.tokens.extend(tokens);
                (self.finish, self.spec) = (finish, spec);
                self.cached_tokens = cached_tokens;
            }
            Event::Embedding {
                values,
                cached_tokens,
            } => {
                self.embedding = values;
                self.cached_tokens = cached_tokens;
            }
            Event::Failed(error) => return Err(error),
        }
        Ok(())
    }

    /// The token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        self.poll_recv(cx)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let reason = self.reason.unwrap_or("abort");
        (self.shared.stats.requests_finished)
            .with_label_values(&[reason])
            .inc();
    }
}
