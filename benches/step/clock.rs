//! Adds up the time that a thread spends in the spans of the kernels.

use std::cell::RefCell;
use std::time::{Duration, Instant};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The names of the spans.
pub const PARTS: [&str; 6] = [
    "matmul",
    "attention",
    "norm",
    "kv_write",
    "activation",
    "wait",
];

#[derive(Default)]
struct Spent {
    parts: [Duration; PARTS.len()],
    /// When the spans that the thread is in began, the innermost last.
    began: Vec<Instant>,
}

thread_local! {
    static SPENT: RefCell<Spent> = RefCell::default();
}

/// Takes the spans in [`PARTS`] and nothing else. A span's id is its place there, from 1.
pub struct Clock;

/// Runs `work`. Returns its result and the time that this thread spent in each of [`PARTS`]: a part within
/// another counts in both.
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, [Duration; PARTS.len()]) {
    SPENT.take();
    let result = tracing::subscriber::with_default(Clock, work);
    (result, SPENT.take().parts)
}

fn place(name: &str) -> Option<usize> {
    PARTS.iter().position(|part| *part == name)
}

impl Subscriber for Clock {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && place(metadata.name()).is_some()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let place = place(span.metadata().name()).expect("only parts are enabled");
        Id::from_u64(place as u64 + 1)
    }

    fn enter(&self, _: &Id) {
        SPENT.with_borrow_mut(|spent| spent.began.push(Instant::now()));
    }

    fn exit(&self, span: &Id) {
        SPENT.with_borrow_mut(|spent| {
            if let Some(began) = spent.began.pop() {
                spent.parts[span.into_u64() as usize - 1] += began.elapsed();
            }
        });
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
}
