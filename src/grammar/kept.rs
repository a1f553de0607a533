//! The outcomes of sources: of those that requests asked for last, and of those that are being compiled.

use super::compiled::{Grammar, WeakGrammar, lock};
use super::place;
use crate::error::{Error, RequestErrorKind, Result, caught_here};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of sources whose outcome is kept.
const MAX_KEPT: usize = 64;
/// Maximum bytes of the grammars that are kept, approximately. Their lexers grow with use.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Maximum bytes of all grammars, approximately: of those that are kept and of those that requests hold.
const MAX_BYTES: usize = 512 << 20;
/// How long a source may be compiled.
const MAX_COMPILE: Duration = Duration::from_secs(10);
/// How long a request waits for its source's turn.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// A grammar, or what is wrong with its source, in words that follow the name of its field; an error if the
/// source is not at fault.
pub(super) type Outcome = Result<Result<Grammar, String>>;

/// The error that asks a client to try again, because of `why`.
pub(super) fn overloaded(why: &str) -> Error {
    let message = format!("{why}; try again later");
    Error::request(RequestErrorKind::Overloaded, None, message)
}

/// The sources that were asked for last.
#[derive(Default)]
pub(super) struct Kept {
    /// As llguidance reads them, those used last at the end.
    sources: VecDeque<(String, Arc<Pending>)>,
    /// Grammars that are no longer kept, and which requests may still hold.
    evicted: Vec<WeakGrammar>,
}

/// A source that is asked for.
pub(super) enum Entry {
    /// It was asked for before.
    Known(Arc<Pending>),
    /// It must be compiled.
    New(Arc<Pending>),
}

impl Kept {
    /// The entry of the source `key`, which is kept from now on.
    ///
    /// # Errors
    /// `Overloaded`, if it is new and the memory for grammars is taken.
    pub fn entry(&mut self, key: String) -> Result<Entry> {
        self.sources.retain(|(_, pending)| pending.is_good());
        let known = self.sources.iter().position(|(known, _)| *known == key);
        if let Some(entry) = known.and_then(|place| self.sources.remove(place)) {
            let pending = entry.1.clone();
            self.sources.push_back(entry);
            return Ok(Entry::Known(pending));
        }
        self.make_room()?;
        let pending: Arc<Pending> = Arc::default();
        self.sources.push_back((key, pending.clone()));
        Ok(Entry::New(pending))
    }

    fn make_room(&mut self) -> Result<()> {
        let bytes = |pending: &Pending| pending.grammar().map_or(0, |grammar| grammar.bytes());
        let mut kept: usize = self.sources.iter().map(|(_, pending)| bytes(pending)).sum();
        while self.sources.len() >= MAX_KEPT || kept > MAX_KEPT_BYTES {
            let is_done = |(_, pending): &(String, Arc<Pending>)| pending.is_done();
            let oldest = self.sources.iter().position(is_done);
            // The lane bounds how many are not done.
            let Some((_, oldest)) = oldest.and_then(|place| self.sources.remove(place)) else {
                break;
            };
            kept -= bytes(&oldest).min(kept);
            self.evicted
                .extend(oldest.grammar().map(|grammar| grammar.downgrade()));
        }
        self.evicted.retain(|grammar| grammar.bytes().is_some());
        let held: usize = self.evicted.iter().filter_map(WeakGrammar::bytes).sum();
        if kept + held > MAX_BYTES {
            return Err(overloaded(
                "the grammars of other requests take all the memory for grammars",
            ));
        }
        Ok(())
    }
}

/// The outcome of a source, which several requests may wait for.
#[derive(Default)]
pub(super) struct Pending {
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Default)]
enum Stage {
    #[default]
    Waiting,
    /// Since when it is compiled.
    Compiling(Instant),
    Done(Outcome),
}

impl Pending {
    /// The outcome, as soon as there is one. `begins` is called before it waits.
    ///
    /// # Errors
    /// `Overloaded`, if the turn of the source does not come.
    pub fn outcome(&self, begins: &dyn Fn()) -> Outcome {
        let asked = Instant::now();
        let mut stage = lock(&self.stage);
        if !matches!(*stage, Stage::Done(_)) {
            begins();
        }
        loop {
            let left = match &*stage {
                Stage::Done(outcome) => return outcome.clone(),
                Stage::Waiting => MAX_WAIT.checked_sub(asked.elapsed()),
                Stage::Compiling(since) => MAX_COMPILE.checked_sub(since.elapsed()),
            };
            let Some(left) = left else {
                return match *stage {
                    Stage::Waiting => Err(overloaded("other grammars are compiled first")),
                    _ => Ok(Err(too_slow())),
                };
            };
            let waited = self.changed.wait_timeout(stage, left);
            stage = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn enter(&self, stage: Stage) {
        *lock(&self.stage) = stage;
        self.changed.notify_all();
    }

    fn grammar(&self) -> Option<Grammar> {
        match &*lock(&self.stage) {
            Stage::Done(Ok(Ok(grammar))) => Some(grammar.clone()),
            _ => None,
        }
    }

    fn is_done(&self) -> bool {
        matches!(*lock(&self.stage), Stage::Done(_))
    }

    /// Whether the next request gets this outcome.
    fn is_good(&self) -> bool {
        !matches!(*lock(&self.stage), Stage::Done(Err(_)))
    }
}

fn too_slow() -> String {
    let seconds = MAX_COMPILE.as_secs();
    format!("takes longer than {seconds} s to compile: make it smaller")
}

/// The promise of an outcome: if it is dropped, those who wait are told.
pub(super) struct Promise(pub Arc<Pending>);

impl Promise {
    /// Compiles the source with `build`.
    pub fn keep(self, build: impl FnOnce() -> Outcome) {
        self.0.enter(Stage::Compiling(Instant::now()));
        let built = caught_here(build);
        let built = built.unwrap_or_else(|why| Ok(Err(place::panicked(&why))));
        self.0.enter(Stage::Done(built));
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.0.is_done() {
            let error = overloaded("too many grammars wait to be compiled");
            self.0.enter(Stage::Done(Err(error)));
        }
    }
}
