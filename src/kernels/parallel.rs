//! Sharing work among threads.

use rayon::prelude::*;

/// Runs `forward` on a thread of the pool that [`for_each`] shares work with, so that no kernel of
/// it has to change threads.
pub fn on_pool<R: Send>(forward: impl FnOnce() -> R + Send) -> R {
    candle_core::utils::with_threadpool(forward)
}

/// Calls `work` once for each of `0..items`, in parallel where `heavy`.
///
/// Stealing, not candle's barrier: a barrier waits for every thread to come, and where another
/// process holds a core that is a time slice for each of a step's hundreds of calls. Here the
/// caller does itself what nobody takes.
pub(super) fn for_each(items: usize, heavy: bool, work: impl Fn(usize) + Sync) {
    if heavy && items > 1 {
        let pieces = rayon::current_num_threads() * 4;
        (0..items)
            .into_par_iter()
            .with_min_len(items.div_ceil(pieces))
            .for_each(&work);
    } else {
        (0..items).for_each(work);
    }
}

/// A buffer whose disjoint parts are written by several threads.
pub(super) struct Shared<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: `slice` is the only access, and its contract forbids overlap.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// A view of `buffer`, which must outlive it (the callers are one function each).
    pub(super) fn new(buffer: &mut [T]) -> Self {
        Self {
            start: buffer.as_mut_ptr(),
            len: buffer.len(),
        }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No two live slices may overlap, and the buffer must be alive.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start + len <= self.len, "outside the shared buffer");
        // SAFETY: inside the buffer, and disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
