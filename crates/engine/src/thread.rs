//! The end of the engine's thread.

use super::handle::EngineHandle;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Whether a thread did not end in time.
static HANGS: AtomicBool = AtomicBool::new(false);

/// A handle of an engine whose thread has ended when this is dropped. Whoever starts an engine keeps it until nothing is
/// asked of the engine any more.
///
/// When a process ends, libraries are torn down, CUDA's among them. A thread that still frees a GPU's memory then ends the
/// process in a segmentation fault.
#[derive(Debug)]
pub struct EngineThread {
    engine: EngineHandle,
    patience: Duration,
}

impl EngineThread {
    /// Time for the thread to end: more than a step takes. A device that hangs does not keep the process.
    pub const PATIENCE: Duration = Duration::from_secs(30);

    /// Waits for the thread of `engine` up to `patience` when this is dropped.
    pub fn new(engine: EngineHandle, patience: Duration) -> Self {
        Self { engine, patience }
    }

    /// Whether a thread of this process did not end in time. Then libraries must not be torn down under it: the process
    /// ends by `_exit`.
    pub fn one_hangs() -> bool {
        HANGS.load(Ordering::SeqCst)
    }
}

impl Deref for EngineThread {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        &self.engine
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        if self.engine.join(self.patience) {
            tracing::debug!("the engine thread has ended");
        } else {
            let patience = self.patience;
            tracing::warn!("the engine thread has not ended in {patience:?}");
            HANGS.store(true, Ordering::SeqCst);
        }
    }
}
