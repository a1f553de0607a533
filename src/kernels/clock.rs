//! Measures, for benches, how the wall time of a step divides into parts.
//!
//! The clock is per thread and off by default. While it is on, each kernel adds its time to its part.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// The part that a kernel's time is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Products with weights, including the quantization of their inputs.
    Matmul,
    Attention,
    /// Norms and residual sums.
    Norm,
    /// RoPE, and writing K and V to the pool.
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

/// Runs `work`. If this thread's clock is on, adds the time it took to `part`.
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

/// Runs `work` with this thread's clock on. Returns its result and the time of each part, in the
/// order of [`Part::ALL`].
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, [Duration; Part::ALL.len()]) {
    SPENT.set([Duration::ZERO; Part::ALL.len()]);
    ON.set(true);
    let result = work();
    ON.set(false);
    (result, SPENT.take())
}
