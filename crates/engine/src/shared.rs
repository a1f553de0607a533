//! What the engine's thread shares with those who send requests to it and receive their events.

use super::cache_key::CacheKey;
use super::limits::RequestLimits;
use super::stats::Stats;
use foretoken_core::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tokio::sync::{Semaphore, watch};

/// The limits, counters and flags of an engine.
#[derive(Debug)]
pub struct EngineShared {
    pub limits: RequestLimits,
    pub eos_token_ids: Vec<u32>,
    pub stats: Arc<Stats>,
    pub cache_key: CacheKey,
    /// The number of the next request.
    pub next_group: AtomicU64,
    /// Number of messages that were sent to the thread and that it has not received.
    pub unread: AtomicUsize,
    /// The rights to wait in the queue. A request holds one until it is first admitted, or ends.
    pub permits: Arc<Semaphore>,
    /// Refuses new requests; the thread ends when the accepted ones are done.
    pub draining: AtomicBool,
    /// Number of accepted requests of which further parts may come; see [`Series`](super::Series).
    pub series: AtomicUsize,
    /// The thread ends now and drops running requests.
    pub aborting: AtomicBool,
    /// Set when the thread has dropped the models and is about to end: an error unless it was asked to end.
    pub ended: watch::Sender<Option<Result<()>>>,
    /// Taken by who waits for its end.
    pub thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineShared {
    /// Whether nothing comes any more.
    pub fn is_drained(&self) -> bool {
        self.draining.load(Ordering::SeqCst) && self.series.load(Ordering::SeqCst) == 0
    }

    /// The error for a request that arrives after the end, or that nobody takes any more.
    pub fn gone(&self) -> Error {
        // Read first: a thread that fails sets it last.
        let was_asked = self.draining.load(Ordering::SeqCst);
        match self.ended.borrow().clone() {
            Some(Err(error)) => error,
            // It fails, and has yet to tell why.
            None if !was_asked => Error::internal("the engine has ended"),
            _ => Error::shutting_down(),
        }
    }
}
