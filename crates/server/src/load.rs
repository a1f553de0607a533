//! Number of requests that are being answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the requests that generate. Clones count the same ones.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestsInFlight(Arc<AtomicUsize>);

impl RequestsInFlight {
    /// Counts one more, until the value is dropped.
    pub fn enter(&self) -> InFlight {
        self.0.fetch_add(1, Ordering::Relaxed);
        InFlight(self.clone())
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One of the requests.
#[derive(Debug)]
pub(super) struct InFlight(RequestsInFlight);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
