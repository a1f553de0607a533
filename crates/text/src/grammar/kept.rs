//! The outcomes of sources: of those that requests asked for last, and of those that are being compiled.

use super::compiled::{CompiledGrammar, lock};
use super::lane::ClientId;
use super::place;
use foretoken_core::error::{Error, RequestErrorKind, Result, caught_here};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Maximum number of sources whose outcome is kept.
const MAX_KEPT: usize = 64;
/// Maximum bytes of the grammars that are kept, approximately. Their lexers grow with use.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Maximum bytes of all grammars, approximately: of those that are kept and of those that requests hold.
const MAX_BYTES: usize = 512 << 20;
/// Maximum time that a source may be compiled.
const MAX_COMPILE: Duration = Duration::from_secs(10);
/// Maximum time that a request waits for its source's turn.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// A grammar, or what is wrong with its source, in words that follow the name of its field; an error if the
/// source is not at fault.
pub(super) type Outcome = Result<Result<Arc<CompiledGrammar>, String>>;

/// The error that asks a client to try again, because of `why`.
pub(super) fn overloaded(why: &str) -> Error {
    let message = format!("{why}; try again later");
    Error::request(RequestErrorKind::Overloaded, None, message)
}

/// The sources that were asked for last.
#[derive(Default)]
pub(super) struct Kept {
    /// The sources in the form in which llguidance reads them. Those that were used last are at the end.
    sources: VecDeque<(String, Arc<Pending>)>,
    /// Grammars that are no longer kept, and which requests may still hold.
    evicted: Vec<Weak<CompiledGrammar>>,
}

impl Kept {
    /// The entry of the source `key`, which is kept from now on.
    ///
    /// # Errors
    /// `Overloaded`, if it is new and the memory for grammars is taken.
    pub fn entry(&mut self, key: String) -> Result<Arc<Pending>> {
        self.sources.retain(|(_, pending)| pending.is_good());
        let known = self.sources.iter().position(|(known, _)| *known == key);
        if let Some(entry) = known.and_then(|place| self.sources.remove(place)) {
            let pending = entry.1.clone();
            self.sources.push_back(entry);
            return Ok(pending);
        }
        self.make_room()?;
        let pending: Arc<Pending> = Arc::default();
        self.sources.push_back((key, pending.clone()));
        Ok(pending)
    }

    fn make_room(&mut self) -> Result<()> {
        let bytes = |pending: &Pending| pending.grammar().map_or(0, |grammar| grammar.bytes());
        let mut kept: usize = self.sources.iter().map(|(_, pending)| bytes(pending)).sum();
        while self.sources.len() >= MAX_KEPT || kept > MAX_KEPT_BYTES {
            let is_done = |(_, pending): &(String, Arc<Pending>)| pending.is_done();
            let oldest = self.sources.iter().position(is_done);
            // The lane bounds the sources that are not done.
            let Some((_, oldest)) = oldest.and_then(|place| self.sources.remove(place)) else {
                break;
            };
            kept -= bytes(&oldest).min(kept);
            self.evicted
                .extend(oldest.grammar().as_ref().map(Arc::downgrade));
        }
        self.evicted.retain(|grammar| grammar.strong_count() > 0);
        let held = self.evicted.iter().filter_map(Weak::upgrade);
        let held: usize = held.map(|grammar| grammar.bytes()).sum();
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
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stage: Stage,
    /// The clients that have promised the outcome: the first whose turn comes compiles the source.
    clients: Vec<ClientId>,
    /// Promises that were neither kept nor broken.
    promises: usize,
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
    /// A promise of the outcome on the turn of `client`; `None` if it is not needed.
    pub fn promise(self: &Arc<Self>, client: ClientId) -> Option<Promise> {
        let mut state = lock(&self.state);
        if !matches!(state.stage, Stage::Waiting) || state.clients.contains(&client) {
            return None;
        }
        state.clients.push(client);
        state.promises += 1;
        Some(Promise(self.clone()))
    }

    /// The outcome, as soon as there is one. `begins` is called before it waits, and what it returns is dropped
    /// after that.
    ///
    /// # Errors
    /// `Overloaded`, if the turn of the source does not come; those of `begins`.
    pub fn outcome<T>(&self, begins: impl FnOnce() -> Result<T>) -> Outcome {
        let asked = Instant::now();
        let mut state = lock(&self.state);
        let _place = match state.stage {
            Stage::Done(_) => None,
            _ => Some(begins()?),
        };
        loop {
            let left = match &state.stage {
                Stage::Done(outcome) => return outcome.clone(),
                Stage::Waiting => MAX_WAIT.checked_sub(asked.elapsed()),
                Stage::Compiling(since) => MAX_COMPILE.checked_sub(since.elapsed()),
            };
            let Some(left) = left else {
                return match state.stage {
                    Stage::Waiting => Err(overloaded("other grammars are compiled first")),
                    _ => Ok(Err(too_slow())),
                };
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn grammar(&self) -> Option<Arc<CompiledGrammar>> {
        match &lock(&self.state).stage {
            Stage::Done(Ok(Ok(grammar))) => Some(grammar.clone()),
            _ => None,
        }
    }

    fn is_done(&self) -> bool {
        matches!(lock(&self.state).stage, Stage::Done(_))
    }

    /// Whether the next request gets this outcome.
    fn is_good(&self) -> bool {
        !matches!(lock(&self.state).stage, Stage::Done(Err(_)))
    }
}

fn too_slow() -> String {
    let seconds = MAX_COMPILE.as_secs();
    format!("takes longer than {seconds} s to compile: make it smaller")
}

/// A promise of an outcome: if the last one is dropped, those who wait are told.
pub(super) struct Promise(Arc<Pending>);

impl Promise {
    /// Compiles the source with `build`, unless that is done for another client.
    pub fn keep(self, build: impl FnOnce() -> Outcome) {
        let mut state = lock(&self.0.state);
        if !matches!(state.stage, Stage::Waiting) {
            return;
        }
        state.stage = Stage::Compiling(Instant::now());
        drop(state);
        self.0.changed.notify_all();
        let built = caught_here(build);
        let built = built.unwrap_or_else(|why| Ok(Err(place::panicked(&why))));
        lock(&self.0.state).stage = Stage::Done(built);
        self.0.changed.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.promises -= 1;
        if state.promises == 0 && !matches!(state.stage, Stage::Done(_)) {
            let error = overloaded("too many grammars wait to be compiled");
            state.stage = Stage::Done(Err(error));
            self.0.changed.notify_all();
        }
    }
}
