//! Threads that compute one micro-batch each.
//!
//! candle runs everything except matrix products on one thread, and in a small model that takes most of
//! the time. So each thread computes whole micro-batches. A micro-batch is computed the same way for any
//! number of threads, and results are returned in order: the number of threads does not change a bit.

use foretoken_core::error::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A pool of one thread, which has this name: whatever candle spreads over "the" pool inside it stays on its thread.
///
/// # Errors
/// `Setup`, if the thread cannot be started.
pub fn one_thread(name: String) -> Result<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(1)
        .thread_name(move |_| name.clone())
        .build()
        .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))
}

/// Pools of one thread each.
pub struct Workers(Vec<ThreadPool>);

impl Workers {
    /// `count` threads, at least one.
    ///
    /// # Errors
    /// `Setup`, if a thread cannot be started.
    pub fn new(count: usize) -> Result<Self> {
        let pools = (0..count.max(1)).map(|number| one_thread(format!("train-{number}")));
        pools.collect::<Result<_>>().map(Self)
    }

    /// No threads: the one that asks for the work does it. Others would have streams of their own on a GPU.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Micro-batches that are computed at once.
    pub fn len(&self) -> usize {
        self.0.len().max(1)
    }

    /// The results of `work` for each of `items`, in order.
    pub fn map<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
        if self.0.is_empty() {
            return items.iter().map(work).collect();
        }
        let mut results = Vec::new();
        for items in items.chunks(self.len()) {
            let mut places: Vec<Option<Result<R>>> = items.iter().map(|_| None).collect();
            std::thread::scope(|scope| {
                for ((pool, item), place) in self.0.iter().zip(items).zip(&mut places) {
                    let work = &work;
                    scope.spawn(move || *place = Some(pool.install(|| work(item))));
                }
            });
            results.extend(places.into_iter().flatten());
        }
        results
    }
}
