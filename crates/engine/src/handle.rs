//! The interface to the engine: the bounded queue, shutdown.

use super::cache_key::CacheKey;
use super::events::Events;
use super::limits::RequestLimits;
use super::request::{Event, Request, queue_cost};
use super::shared::EngineShared;
use super::stats::Stats;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub request: Request,
    pub events: UnboundedSender<Event>,
    /// The tokens of a text that its receiver has ended.
    pub text_tokens: Arc<OnceLock<usize>>,
    pub arrived: Instant,
    /// The right to wait in the queue.
    pub permit: Option<OwnedSemaphorePermit>,
    /// The request that it belongs to.
    pub group: u64,
    /// The cost of what its request has before it, in tokens.
    pub tokens_before: u64,
}

/// A message to the engine thread.
pub(super) enum EngineMessage {
    /// Requests that belong together: all of them are queued, or none.
    Submit(Vec<Submission>),
    /// A flag in [`EngineShared`] has changed: look.
    Wake,
    /// Forget the cached prefixes, then say so.
    ResetPrefixCache(oneshot::Sender<()>),
    /// Let the drafter of this index draft from the next step on.
    UseDrafter(usize),
}

/// Sends requests to the engine thread. Clones share one engine; when the last one is dropped, the
/// engine finishes its requests and ends.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) sender: Sender<EngineMessage>,
    pub(super) shared: Arc<EngineShared>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.has_ended() {
            "ended"
        } else if self.is_draining() {
            "draining"
        } else {
            "running"
        };
        write!(f, "EngineHandle({state})")
    }
}

impl EngineHandle {
    /// Queues one request. Dropping its events cancels it.
    ///
    /// # Errors
    /// See [`EngineHandle::submit_all`].
    pub fn submit(&self, request: Request) -> Result<Events> {
        Ok(self.submit_all(vec![request])?.remove(0))
    }

    /// Queues all of `requests` or none.
    ///
    /// # Errors
    /// `Request` errors: a field out of range (`Invalid`), a full queue (`QueueFull`), or
    /// `ShuttingDown`. On an error nothing was queued.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Events>> {
        self.check(&requests)?;
        if self.is_draining() {
            return Err(self.shared.gone());
        }
        let permits = self.permits(requests.len())?;
        self.queue(requests, permits)
    }

    /// Checks requests that are to be queued together.
    ///
    /// # Errors
    /// `Invalid`: a field out of range, or more than the queue has room for.
    pub(super) fn check(&self, requests: &[Request]) -> Result<()> {
        let limits = &self.shared.limits;
        for request in requests {
            limits.check(request, "prompt")?;
        }
        let (count, max) = (requests.len(), limits.max_waiting);
        if count > max {
            return Err(Error::too_many_sequences(count, 1, max));
        }
        let tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
        if tokens > limits.max_prompt_tokens {
            return Err(Error::too_many_prompt_tokens(
                tokens,
                limits.max_prompt_tokens,
            ));
        }
        Ok(())
    }

    /// Takes so many places in the queue, at most as many as there are.
    ///
    /// # Errors
    /// `QueueFull`.
    pub(super) fn permits(&self, count: usize) -> Result<OwnedSemaphorePermit> {
        let (permits, max) = (&self.shared.permits, self.shared.limits.max_waiting);
        let full = |_| {
            let waiting = max - permits.available_permits();
            let message = format!(
                "the queue is full: {waiting} requests are waiting, at most {max} may; try again later"
            );
            Error::request(RequestErrorKind::QueueFull, None, message)
        };
        let taken = permits.clone().try_acquire_many_owned(count as u32);
        taken.map_err(full)
    }

    /// Queues requests that were checked, with their places.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub(super) fn queue(
        &self,
        requests: Vec<Request>,
        mut permits: OwnedSemaphorePermit,
    ) -> Result<Vec<Events>> {
        let shared = &*self.shared;
        if requests.iter().all(|request| request.pooling.is_none()) {
            shared.stats.requests.n.observe(requests.len() as f64);
        }
        let arrived = Instant::now();
        let group = shared.next_group.fetch_add(1, Ordering::Relaxed);
        let mut tokens_before = 0;
        let (submissions, receivers): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .map(|request| {
                let (events, receiver) = unbounded_channel();
                let cost = queue_cost(
                    request.prompt.len(),
                    request.max_tokens.unwrap_or(usize::MAX),
                ) as u64;
                let text_tokens = Arc::<OnceLock<usize>>::default();
                let submission = Submission {
                    request,
                    events,
                    text_tokens: text_tokens.clone(),
                    arrived,
                    permit: permits.split(1),
                    group,
                    tokens_before,
                };
                tokens_before += cost;
                (submission, (receiver, text_tokens))
            })
            .unzip();
        self.send(EngineMessage::Submit(submissions))?;
        let events = receivers
            .into_iter()
            .map(|(receiver, text_tokens)| Events::new(receiver, self.shared.clone(), text_tokens));
        Ok(events.collect())
    }

    /// Forgets all cached prefixes, of the target and of the drafter, before the next step. Running requests
    /// go on, but nobody will share what they have computed so far.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub async fn reset_prefix_cache(&self) -> Result<()> {
        let (done, is_done) = oneshot::channel();
        self.send(EngineMessage::ResetPrefixCache(done))?;
        is_done.await.map_err(|_| self.shared.gone())
    }

    /// Lets the drafter of this index draft from the engine's next step on; without it, nothing changes.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub fn use_drafter(&self, index: usize) -> Result<()> {
        self.send(EngineMessage::UseDrafter(index))
    }

    /// The limits that requests are checked against.
    pub fn limits(&self) -> &RequestLimits {
        &self.shared.limits
    }

    /// The ids that end a text of this model.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.shared.eos_token_ids
    }

    /// The key of the scopes of requests. A later process with the same prefix cache on disk has it, too.
    pub fn cache_key(&self) -> &CacheKey {
        &self.shared.cache_key
    }

    /// Server-wide counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.shared.stats
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::SeqCst)
    }

    /// Refuses new requests from now on; queued and running ones continue, and so does a [`Series`](super::Series).
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Lets the thread look at what has changed.
    pub(super) fn wake(&self) {
        // It may be idle and asleep. If it has ended, the send fails harmlessly.
        let _ = self.send(EngineMessage::Wake);
    }

    /// Ends the thread after the step in flight; running requests receive `Failed`.
    pub fn abort(&self) {
        // First, so that whoever finds the end knows that it was asked for.
        self.shared.draining.store(true, Ordering::SeqCst);
        self.shared.aborting.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Ends the thread as [`EngineHandle::abort`] does, and waits for its end, up to `patience`. Returns whether it has
    /// ended; the first call alone tells. A process must not end while the thread uses a device, whose library is
    /// torn down then.
    pub fn join(&self, patience: Duration) -> bool {
        const INTERVAL: Duration = Duration::from_millis(2);
        self.abort();
        let thread = self.shared.thread.lock();
        let Some(thread) = thread.unwrap_or_else(PoisonError::into_inner).take() else {
            return self.has_ended();
        };
        let started = Instant::now();
        while !thread.is_finished() {
            if started.elapsed() >= patience {
                return false;
            }
            std::thread::sleep(INTERVAL);
        }
        // It catches its panics, and tells of them by `ended`.
        thread.join().is_ok()
    }

    /// Whether the thread has ended: after [`EngineHandle::drain`] and the last request, after
    /// [`EngineHandle::abort`], or because it failed.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.borrow().is_some()
    }

    /// Waits for the end of the thread.
    ///
    /// # Errors
    /// `Internal`, with the reason, if the thread ended without being asked to.
    pub async fn ended(&self) -> Result<()> {
        let mut ended = self.shared.ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(Ok(())),
            // Cannot happen while this handle is alive.
            Err(_) => Ok(()),
        }
    }

    /// Sends a message to the thread.
    fn send(&self, message: EngineMessage) -> Result<()> {
        // Before it is there: the thread that stops for it must not miss it.
        self.shared.unread.fetch_add(1, Ordering::SeqCst);
        self.sender.send(message).map_err(|_| self.shared.gone())
    }
}
