//! Threads that compute one micro-batch each.
//!
//! candle runs all but matrix products on one thread, and in a small model those others take most of
//! the time. So the threads share out micro-batches, not products. A micro-batch is computed the
//! same whatever their number, and their results come in order: the number changes no bit.

use crate::error::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Pools of one thread each: what candle gives to "the" pool inside of one stays on its thread.
pub struct Workers(Vec<ThreadPool>);

impl Workers {
    /// `count` threads, one at least.
    ///
    /// # Errors
    /// `Setup`, where the system gives no thread.
    pub fn new(count: usize) -> Result<Self> {
        (0..count.max(1))
            .map(|number| {
                ThreadPoolBuilder::new()
                    .num_threads(1)
                    .thread_name(move |_| format!("train-{number}"))
                    .build()
                    .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))
            })
            .collect::<Result<_>>()
            .map(Self)
    }

    /// How many work at once.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// `work` of each of `items`, in their order.
    pub fn map<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
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
