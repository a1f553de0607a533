//! Threads for kernels.
//!
//! A decode step is hundreds of short parallel loops, on machines where other programs run too. So
//! threads spin for a moment between loops instead of sleeping, and no loop waits for a thread that has
//! not started on it: the caller works on all items that no other thread takes. (candle's pool and a
//! plain barrier wait for every thread. A thread that the system has descheduled then stops everything
//! for a time slice, hundreds of times per step.)

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, TryLockError};
use std::thread::{Builder, Thread};
use tracing::trace_span;

/// Iterations that an idle thread spins before it sleeps: about a tenth of a millisecond.
const SPINS: usize = if cfg!(miri) { 10 } else { 4000 };

/// Number of threads that kernels use, including the calling one.
static THREADS: OnceLock<usize> = OnceLock::new();

/// Sets the number of threads that kernels use, including the calling one, before the first kernel runs.
///
/// # Errors
/// This process has another number already.
pub fn set_threads(threads: usize) -> Result<(), String> {
    let used = *THREADS.get_or_init(|| threads.max(1));
    if used == threads {
        return Ok(());
    }
    Err(format!(
        "--threads {threads} is not possible: this process computes with {used} threads since its first model"
    ))
}

/// Number of threads that kernels use: the value given to [`set_threads`], otherwise
/// [`default_threads`].
pub fn threads() -> usize {
    *THREADS.get_or_init(default_threads)
}

/// The most threads that may be asked for: many more than cores only slow a step down, and at some number
/// the system refuses them.
pub fn max_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    (4 * allowed).max(64)
}

/// The number of physical cores, limited to what this process may use by its affinity mask and its
/// cgroup's quota.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    num_cpus::get_physical().clamp(1, allowed)
}

/// The results of `work` for each of `items`, in order. Several items run in parallel.
pub fn map<T: Send, R: Send>(items: &mut [T], work: impl Fn(&mut T) -> R + Sync) -> Vec<R> {
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let count = items.len();
    let (inputs, outputs) = (Shared::new(items), Shared::new(&mut results));
    for_each(count, true, |i| {
        // SAFETY: each item and its result are accessed once.
        let (item, result) = unsafe { (&mut inputs.slice(i, 1)[0], &mut outputs.slice(i, 1)[0]) };
        *result = Some(work(item));
    });
    results.into_iter().flatten().collect()
}

/// Number of threads that share a loop of [`for_each`]. Unlike [`threads`], it never asks the system.
pub(super) fn sharers() -> usize {
    Pool::get().workers.len() + 1
}

/// Calls `work` once for each of `0..items`, in parallel if `parallelize` is set. Inside `work`, and
/// while another thread uses the pool, the caller runs all items alone.
///
/// # Panics
/// If `work` panics, on any thread. Some items are then not done. Later loops are not affected.
pub(super) fn for_each(items: usize, parallelize: bool, work: impl Fn(usize) + Sync) {
    match parallelize {
        true => Pool::get().for_each(items, work),
        false => (0..items).for_each(work),
    }
}

/// The ranges of the current loop, one per thread. Each thread first works on a range of its own, then helps
/// with what is left of the others. Each thread reads memory in long runs that way, which is faster
/// than two threads reading alternate items (measured with weights: a third more bytes per second).
struct Ranges {
    /// The first item of each range that no thread has taken.
    next: Box<[Counter]>,
    /// Threads that have started on the loop.
    entered: Counter,
}

/// A counter whose cache lines nothing else shares: CPUs fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

impl Ranges {
    fn new(threads: usize) -> Self {
        Self {
            next: (0..threads).map(|_| Counter::default()).collect(),
            entered: Counter::default(),
        }
    }

    /// Divides `items` items, while no thread is at work.
    fn divide(&self, items: usize) {
        for (i, next) in self.next.iter().enumerate() {
            let first = items * i / self.next.len();
            next.0.store(first, Ordering::Relaxed);
        }
        self.entered.0.store(0, Ordering::Relaxed);
    }

    /// Works until none of the `items` is left. Each time, it takes half of what remains of a range: so there
    /// are few pieces, and all threads end at about the same time.
    fn work_off(&self, items: usize, work: &impl Fn(usize)) {
        let count = self.next.len();
        let first = self.entered.0.fetch_add(1, Ordering::Relaxed);
        for range in (first..first + count).map(|i| i % count) {
            let end = items * (range + 1) / count;
            let after = |start: usize| start + (end - start).div_ceil(2);
            let take = |start: usize| (start < end).then(|| after(start));
            let next = &self.next[range].0;
            while let Ok(start) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                (start..after(start)).for_each(work);
            }
        }
    }
}

thread_local! {
    /// Whether this thread is inside a loop of the pool.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// What the workers run while the gate is open.
type JobPointer = *const (dyn Fn() + Sync);

/// Flag of [`Pool::gate`]: workers may enter. The bits above it are the loop's number, the bits below
/// it the number of workers inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

struct Pool {
    workers: Vec<Worker>,
    gate: AtomicU64,
    /// Written by the caller while the gate is closed and no worker is inside.
    job: UnsafeCell<Option<JobPointer>>,
    callers: Mutex<()>,
    /// Divided by the caller while the gate is closed and no worker is inside.
    ranges: Ranges,
    /// Whether a worker has panicked in the current loop.
    panicked: AtomicBool,
}

#[derive(Default)]
struct Worker {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

// SAFETY: `job` is the only field that is not `Sync`; its comment and `run` say when it is accessed.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Pool {}

impl Pool {
    /// The pool of all kernels.
    fn get() -> &'static Self {
        static POOL: OnceLock<&'static Pool> = OnceLock::new();
        POOL.get_or_init(|| Self::start(threads() - 1))
    }

    /// A pool with that many workers, which live as long as the process.
    fn start(workers: usize) -> &'static Self {
        let pool: &'static Self = Box::leak(Box::new(Self {
            workers: (0..workers).map(|_| Worker::default()).collect(),
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            callers: Mutex::new(()),
            ranges: Ranges::new(workers + 1),
            panicked: AtomicBool::new(false),
        }));
        for (i, worker) in pool.workers.iter().enumerate() {
            // If a thread cannot be started, the others do its share.
            let _ = Builder::new()
                .name(format!("kernel-{i}"))
                .spawn(move || pool.serve(worker));
        }
        pool
    }

    /// See [`for_each`].
    fn for_each(&self, items: usize, work: impl Fn(usize) + Sync) {
        if items < 2 || self.workers.is_empty() || BUSY.get() {
            return (0..items).for_each(work);
        }
        let _caller = match self.callers.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..items).for_each(work),
        };
        self.ranges.divide(items);
        self.run(&|| self.ranges.work_off(items, &work));
    }

    /// Runs `job` here and on every worker that enters in time. The caller holds `callers`.
    fn run(&self, job: &(dyn Fn() + Sync)) {
        // SAFETY: only the lifetime changes. Workers use the job only inside the gate. `Leave` closes
        // the gate and waits for them before this function ends, also if it panics.
        let job: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(job) };
        // SAFETY: the gate is closed and no worker is inside: the last `Leave` has ensured that.
        unsafe { *self.job.get() = Some(std::ptr::from_ref(job)) };
        // If the caller of the last loop panicked itself, it has not cleared the flag.
        self.panicked.store(false, Ordering::Relaxed);
        let number = (self.gate.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        self.gate.store(number << 32 | OPEN, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.asleep.swap(false, Ordering::SeqCst)
                && let Some(thread) = worker.thread.get()
            {
                thread.unpark();
            }
        }
        let leave = Leave(self);
        BUSY.set(true);
        job();
        trace_span!("wait").in_scope(|| drop(leave));
        if self.panicked.load(Ordering::Relaxed) {
            panic!("a kernel thread has panicked");
        }
    }

    /// A worker's main loop.
    fn serve(&self, me: &Worker) {
        // Set before it first sleeps, so that a caller that sees it asleep can wake it.
        let _ = me.thread.set(std::thread::current());
        BUSY.set(true);
        let mut last = 0;
        loop {
            let gate = self.wait(me, last);
            let enter =
                self.gate
                    .compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed);
            if enter.is_err() {
                continue;
            }
            last = gate >> 32;
            // SAFETY: inside the gate the job is set and valid, see `run`.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job
                && let Err(payload) = catch_unwind(AssertUnwindSafe(job))
            {
                // Dropping the payload could panic again, outside any catch, and this worker would
                // never leave the gate.
                std::mem::forget(payload);
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.gate.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until the gate is open for a loop other than `last`: spins, then sleeps.
    fn wait(&self, me: &Worker, last: u64) -> u64 {
        let mut spins = 0;
        let mut seen = last;
        loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if gate & OPEN != 0 && gate >> 32 != last {
                me.asleep.store(false, Ordering::Relaxed);
                return gate;
            }
            if gate >> 32 != seen {
                // It missed a loop, so more loops are likely to follow.
                (seen, spins) = (gate >> 32, 0);
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else if !me.asleep.swap(true, Ordering::SeqCst) {
                // Check once more: the gate may have opened before the caller saw the flag.
            } else {
                std::thread::park();
                spins = 0;
            }
        }
    }
}

/// Closes the gate and waits for the workers inside.
struct Leave<'a>(&'a Pool);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        BUSY.set(false);
        self.0.gate.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0;
        while self.0.gate.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // A worker inside may be waiting for this core.
                std::thread::yield_now();
            }
        }
    }
}

/// A buffer of which several threads write disjoint parts.
pub(super) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: `slice` is the only access, and its contract forbids overlap.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// A view of `buffer`.
    pub(super) fn new(buffer: &'a mut [T]) -> Self {
        Self {
            start: buffer.as_mut_ptr(),
            len: buffer.len(),
            buffer: PhantomData,
        }
    }

    /// Elements `start..start + len`.
    ///
    /// # Panics
    /// If they are not in the buffer.
    ///
    /// # Safety
    /// No two live slices may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        let fits = start <= self.len && len <= self.len - start;
        assert!(fits, "outside the shared buffer");
        // SAFETY: inside the buffer, and disjoint by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// `many` rounds, or few under Miri, where each is slow.
    const fn rounds(many: usize) -> usize {
        if cfg!(miri) { many / 500 + 1 } else { many }
    }

    /// Several callers at once, with pauses in which the workers fall asleep.
    #[test]
    fn every_item_is_done_once() {
        let pool = Pool::start(3);
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for round in 0..rounds(2000) {
                        let items = 1 + (round * 7 + caller) % 100;
                        let done: Vec<AtomicUsize> = (0..items).map(|_| 0.into()).collect();
                        pool.for_each(items, |i| {
                            done[i].fetch_add(1, Ordering::Relaxed);
                            for_each(2, true, |_| ());
                        });
                        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                        if round % 500 == 0 {
                            std::thread::sleep(Duration::from_millis(2));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_breaks_nothing() {
        let pool = Pool::start(3);
        for _ in 0..rounds(100) {
            let last = || pool.for_each(64, |i| assert_ne!(i, 63, "on purpose"));
            assert!(catch_unwind(AssertUnwindSafe(last)).is_err());
            pool.for_each(64, |_| ());
        }
    }

    /// The caller and a worker both panic: the caller's own panic ends the loop, and the worker's panic
    /// does not reach the next one.
    #[test]
    fn after_a_caller_and_a_worker_have_panicked_the_next_loop_is_healthy() {
        let pool = Pool::start(3);
        for _ in 0..rounds(200) {
            let inside = AtomicUsize::new(0);
            // Two items, held by two threads at once, one of which is the caller.
            let both = || {
                pool.for_each(2, |_| {
                    inside.fetch_add(1, Ordering::SeqCst);
                    while inside.load(Ordering::SeqCst) < 2 {
                        std::thread::yield_now();
                    }
                    panic!("on purpose");
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(both)).is_err());
            let done = AtomicUsize::new(0);
            pool.for_each(8, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 8);
        }
    }

    /// Many callers whose loops may panic anywhere, and workers that fall asleep: a loop panics if and
    /// only if one of its own items did, and otherwise does all of its items.
    #[test]
    fn callers_see_their_own_panics_and_no_others() {
        let pool = Pool::start(3);
        std::thread::scope(|scope| {
            for caller in 0..6 {
                scope.spawn(move || {
                    let mut state = caller as u64 + 1;
                    for _ in 0..rounds(1500) {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        let (items, at) =
                            ((state >> 33) as usize % 50, (state >> 45) as usize % 100);
                        let (done, panicked) = (AtomicUsize::new(0), AtomicUsize::new(0));
                        let result = catch_unwind(AssertUnwindSafe(|| {
                            pool.for_each(items, |i| {
                                if i == at || i + 7 == at {
                                    panicked.fetch_add(1, Ordering::SeqCst);
                                    std::panic::resume_unwind(Box::new("on purpose"));
                                }
                                done.fetch_add(1, Ordering::SeqCst);
                            });
                        }));
                        assert_eq!(result.is_err(), panicked.into_inner() > 0);
                        if result.is_ok() {
                            assert_eq!(done.into_inner(), items);
                        }
                        if state >> 60 == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_shared_buffer_gives_no_slice_beyond_its_end() {
        let mut buffer = [0u8; 8];
        let shared = Shared::new(&mut buffer);
        // SAFETY: one slice at a time.
        let slice = |start, len| unsafe { shared.slice(start, len) }.len();
        assert_eq!((slice(8, 0), slice(3, 5)), (0, 5));
        for (start, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2), (2, usize::MAX)] {
            let outside = catch_unwind(AssertUnwindSafe(|| slice(start, len)));
            assert!(outside.is_err(), "{len} from {start}");
        }
    }
}
