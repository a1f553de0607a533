//! Where the time of a step goes, for benches: wall time of the calling thread by part.
//!
//! Off unless a thread asks for it; then each kernel adds its time to its part.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// What a kernel's time is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Products with weights, the quantization of their inputs included.
    Matmul,
    Attention,
    /// Norms and residual sums.
    Norm,
    /// Rope, and the writing of K and V.
    KvWrite,
    /// The gated activation of the MLP.
    Activation,
    /// Waiting for the threads of a parallel loop to end. Also counted in the part that waits.
    Wait,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 6] = [
        Self::Matmul,
        Self::Attention,
        Self::Norm,
        Self::KvWrite,
        Self::Activation,
        Self::Wait,
    ];
}

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static SPENT: RefCell<[Duration; Part::ALL.len()]> = const { RefCell::new([Duration::ZERO; Part::ALL.len()]) };
}

/// Runs `work`, and counts its time as `part` if this thread's clock is on.
#[inline]
pub(crate) fn time<R>(part: Part, work: impl FnOnce() -> R) -> R {
    if !ON.get() {
        return work();
    }
    let started = Instant::now();
    let result = work();
    SPENT.with_borrow_mut(|spent| spent[part as usize] += started.elapsed());
    result
}

/// Runs `work` with this thread's clock on: its result, and the time of each part, in the order of
/// [`Part::ALL`].
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, [Duration; Part::ALL.len()]) {
    SPENT.set([Duration::ZERO; Part::ALL.len()]);
    ON.set(true);
    let result = work();
    ON.set(false);
    (result, SPENT.take())
}
