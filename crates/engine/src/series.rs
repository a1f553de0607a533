//! Requests that are submitted in parts.

use super::events::Events;
use super::handle::EngineHandle;
use super::request::Request;
use foretoken_core::error::Result;
use std::sync::atomic::Ordering;

/// A request that is submitted in parts, as the steps of a search are. Once it has begun it is accepted as a whole:
/// an engine that [drains](EngineHandle::drain) takes its further parts, too, and a full queue does not refuse them.
#[derive(Debug)]
pub struct Series {
    engine: EngineHandle,
    has_begun: bool,
}

impl Series {
    /// A series of which nothing was submitted so far.
    ///
    /// # Errors
    /// `ShuttingDown`, or the reason why the thread has ended.
    pub fn begin(engine: &EngineHandle) -> Result<Self> {
        // Before the flag is read: who sets the flag later, and the thread, sees the series.
        engine.shared.series.fetch_add(1, Ordering::SeqCst);
        let series = Self {
            engine: engine.clone(),
            has_begun: false,
        };
        if engine.is_draining() {
            return Err(engine.shared.gone());
        }
        Ok(series)
    }

    /// The engine that it is submitted to.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Queues all of `requests` or none. Further parts than the first wait for places in the queue.
    ///
    /// # Errors
    /// Those of [`EngineHandle::submit_all`], but `QueueFull` of the first part only.
    pub async fn submit_all(&mut self, requests: Vec<Request>) -> Result<Vec<Events>> {
        let engine = &self.engine;
        engine.check(&requests)?;
        let permits = if self.has_begun {
            let permits = engine.shared.permits.clone();
            let taken = permits.acquire_many_owned(requests.len() as u32).await;
            taken.map_err(|_| engine.shared.gone())?
        } else {
            engine.permits(requests.len())?
        };
        let events = engine.queue(requests, permits)?;
        self.has_begun = true;
        Ok(events)
    }
}

impl Drop for Series {
    fn drop(&mut self) {
        self.engine.shared.series.fetch_sub(1, Ordering::SeqCst);
        // The thread may wait for it alone.
        if self.engine.is_draining() {
            self.engine.wake();
        }
    }
}
