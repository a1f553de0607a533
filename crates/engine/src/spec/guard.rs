//! The one place through which a drafter is called.

use super::drafter::Drafter;
use super::pool::DraftPool;
use foretoken_core::error::panic_message;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A drafter that is called no more once it has panicked. A draft is advice: from then on the server works as
/// without one, and the drafter's pool is gone with it.
pub struct Guard {
    /// `None` once it has panicked.
    drafter: RefCell<Option<Box<dyn Drafter>>>,
    /// The drafter's `taps`, `candidates`, `learns` and `observes_late`: what it needs of the target never changes.
    taps: Vec<usize>,
    candidates: usize,
    learns: bool,
    observes_late: bool,
}

impl Guard {
    pub fn new(drafter: Box<dyn Drafter>) -> Self {
        let mut guard = Self {
            drafter: RefCell::new(Some(drafter)),
            taps: Vec::new(),
            candidates: 0,
            learns: false,
            observes_late: false,
        };
        let taps = guard.call("taps", |drafter| drafter.taps().to_vec());
        let candidates = guard.call("candidates", |drafter| drafter.candidates());
        let learns = guard.call("learns", |drafter| drafter.learns());
        let observes_late = guard.call("observes_late", |drafter| drafter.observes_late());
        guard.observes_late = observes_late.unwrap_or_default();
        guard.learns = learns.unwrap_or_default();
        guard.taps = taps.unwrap_or_default();
        guard.candidates = candidates.unwrap_or_default();
        guard
    }

    /// The result of `work` with the drafter; `None` if it panics in this `call`, or did before.
    pub fn call<R>(&self, call: &str, work: impl FnOnce(&mut dyn Drafter) -> R) -> Option<R> {
        let mut slot = self.drafter.borrow_mut();
        let drafter = slot.as_mut()?;
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut **drafter)));
        let Err(panic) = result else {
            return result.ok();
        };
        let why = panic_message(&*panic);
        tracing::error!("no more drafts until the server starts again: {call} panicked: {why}");
        let broken = slot.take();
        // Its state may be such that this panics, too.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
        None
    }

    /// The result of `work` with the drafter's pool; `None` also if it has none.
    pub fn pool<R>(&self, work: impl FnOnce(&mut DraftPool) -> R) -> Option<R> {
        self.call("its pool", |drafter| drafter.pool().map(work))?
    }

    /// Whether it has panicked.
    pub fn is_off(&self) -> bool {
        self.drafter.borrow().is_none()
    }

    /// See [`Drafter::taps`].
    pub fn taps(&self) -> &[usize] {
        if self.is_off() { &[] } else { &self.taps }
    }

    /// See [`Drafter::learns`].
    pub fn learns(&self) -> bool {
        self.learns && !self.is_off()
    }

    /// See [`Drafter::observes_late`].
    pub fn observes_late(&self) -> bool {
        self.observes_late && !self.is_off()
    }

    /// See [`Drafter::candidates`].
    pub fn candidates(&self) -> usize {
        if self.is_off() { 0 } else { self.candidates }
    }
}
