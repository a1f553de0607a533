//! Which processes run. A pure state machine: it knows no process, no client and no clock.

use std::time::{Duration, Instant};

/// A process that ran for this long has not failed at its start, so that its failure is counted as the first one.
const STABLE: Duration = Duration::from_secs(60);

/// Maximum time for which a model that fails again and again is not started.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A request that waits for a process.
pub(super) trait Waiter {
    /// Whether nobody waits any more.
    fn is_gone(&self) -> bool;
}

/// The state of a model's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is none.
    Unloaded,
    Loading,
    Loaded,
    /// It was asked to end.
    Stopping,
}

/// Why a process is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopReason {
    Idle,
    /// Another model needs its place.
    Evicted,
    /// A client, or the end of the router, asks for it.
    Unloaded,
}

/// Why a request that waited is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefusedBy {
    /// The process failed, a moment ago.
    Failure,
    Unload,
    Shutdown,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub(super) enum Action<W> {
    /// Starts the process of a model.
    Start(usize),
    /// Asks it to end.
    Stop(usize, StopReason),
    /// Lets a request use it, until it is released.
    Grant(usize, W),
    Refuse(usize, W, RefusedBy),
}

/// What is known of a model's process.
struct Slot<W> {
    phase: Phase,
    /// The number of this process, so that requests of earlier ones are not counted.
    generation: u64,
    /// Number of requests that use it.
    running: usize,
    /// Requests that wait for it, in their order among all.
    waiting: Vec<(u64, W)>,
    /// Whether it takes no further requests, because another model needs its place.
    draining: bool,
    last_used: Instant,
    ready_at: Option<Instant>,
    /// Number of times in a row that it ended by itself.
    failures: u32,
    /// Whether the last process ended by itself.
    failed: bool,
    not_before: Option<Instant>,
    /// Whether the model is gone, so that no process of it stays.
    is_gone: bool,
}

/// The processes of all models, by the place of the model.
pub(super) struct Policy<W> {
    slots: Vec<Slot<W>>,
    max_loaded: usize,
    /// `None` = for ever.
    idle: Option<Duration>,
    arrivals: u64,
    closing: bool,
    /// What a change decided at once.
    decided: Vec<Action<W>>,
}

impl<W: Waiter> Policy<W> {
    /// No process runs. At most `max_loaded` will at a time, each until no request has used it for `idle`.
    pub fn new(models: usize, max_loaded: usize, idle: Option<Duration>, now: Instant) -> Self {
        Self {
            slots: (0..models).map(|_| Slot::new(now)).collect(),
            max_loaded,
            idle,
            arrivals: 0,
            closing: false,
            decided: Vec::new(),
        }
    }

    /// Says of each model whether it is gone; there may be further ones. The process of one that is gone ends as soon as no
    /// request uses it or waits for it.
    pub fn set_models(&mut self, is_gone: &[bool], now: Instant) {
        self.slots.resize_with(is_gone.len(), || Slot::new(now));
        for (slot, &is_gone) in self.slots.iter_mut().zip(is_gone) {
            slot.is_gone = is_gone;
        }
    }

    /// A request for a model arrives.
    pub fn request(&mut self, model: usize, waiter: W, now: Instant) {
        let closing = self.closing;
        let slot = &mut self.slots[model];
        let pauses = slot.phase == Phase::Unloaded && slot.not_before.is_some_and(|at| now < at);
        if closing || pauses {
            let by = if closing {
                RefusedBy::Shutdown
            } else {
                RefusedBy::Failure
            };
            return self.decided.push(Action::Refuse(model, waiter, by));
        }
        self.arrivals += 1;
        slot.waiting.push((self.arrivals, waiter));
    }

    /// A request arrives for which no process starts. Returns whether it is granted: the model is loaded, and need not make
    /// room for another.
    pub fn request_loaded(&mut self, model: usize, waiter: W, now: Instant) -> bool {
        let slot = &mut self.slots[model];
        let takes_requests = slot.takes_requests();
        if takes_requests {
            self.arrivals += 1;
            slot.waiting.push((self.arrivals, waiter));
            Self::grant(&mut self.decided, slot, model, now);
        }
        takes_requests
    }

    /// Whether a process of a model takes requests, or will without a further one.
    pub fn is_coming(&self, model: usize) -> bool {
        let slot = &self.slots[model];
        let is_waited_for = slot.waiting.iter().any(|(_, waiter)| !waiter.is_gone());
        slot.phase == Phase::Loading || slot.takes_requests() || is_waited_for
    }

    /// A request that was granted has ended.
    pub fn release(&mut self, model: usize, generation: u64, now: Instant) {
        let slot = &mut self.slots[model];
        if slot.generation == generation {
            slot.running = slot.running.saturating_sub(1);
            slot.last_used = now;
        }
    }

    /// The process of a model takes requests from now on. All that wait get it, even if another model needs its place.
    pub fn ready(&mut self, model: usize, now: Instant) {
        let slot = &mut self.slots[model];
        if slot.phase != Phase::Loading {
            return;
        }
        (slot.phase, slot.failed) = (Phase::Loaded, false);
        (slot.ready_at, slot.last_used) = (Some(now), now);
        Self::grant(&mut self.decided, slot, model, now);
    }

    /// The process of a model has ended, by itself if it was not asked to.
    pub fn ended(&mut self, model: usize, now: Instant) {
        let slot = &mut self.slots[model];
        let was = std::mem::replace(&mut slot.phase, Phase::Unloaded);
        slot.generation += 1;
        (slot.running, slot.draining) = (0, false);
        let ready_at = slot.ready_at.take();
        let was_stable = ready_at.is_some_and(|at| now.duration_since(at) >= STABLE);
        if was_stable {
            slot.failures = 0;
        }
        slot.failed = was != Phase::Stopping;
        if !slot.failed {
            return;
        }
        slot.failures = slot.failures.saturating_add(1);
        slot.not_before = pause(slot.failures).map(|pause| now + pause);
        if was == Phase::Loading || slot.not_before.is_some() {
            self.refuse_waiting(model, RefusedBy::Failure);
        }
    }

    /// A client asks that the process of a model ends; requests that use it may end first, and those that wait for it, or
    /// for its next one, are refused. Returns whether there is one.
    pub fn unload(&mut self, model: usize) -> bool {
        let runs = matches!(self.slots[model].phase, Phase::Loading | Phase::Loaded);
        if runs {
            self.stop(model, StopReason::Unloaded);
        }
        self.refuse_waiting(model, RefusedBy::Unload);
        runs
    }

    /// All processes are to end, and no request is taken any more.
    pub fn shut_down(&mut self) {
        self.closing = true;
        for model in 0..self.slots.len() {
            self.refuse_waiting(model, RefusedBy::Shutdown);
            if matches!(self.slots[model].phase, Phase::Loading | Phase::Loaded) {
                self.stop(model, StopReason::Unloaded);
            }
        }
    }

    /// What is to be done after one or several changes.
    pub fn actions(&mut self, now: Instant) -> Vec<Action<W>> {
        for slot in &mut self.slots {
            slot.waiting.retain(|(_, waiter)| !waiter.is_gone());
        }
        self.stop_idle(now);
        let missing = self.start();
        self.make_room(missing);
        for (model, slot) in self.slots.iter_mut().enumerate() {
            if slot.takes_requests() {
                Self::grant(&mut self.decided, slot, model, now);
            }
        }
        std::mem::take(&mut self.decided)
    }

    /// Whether all processes are to end.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// When [`Policy::actions`] will have something to do though nothing changes.
    pub fn next_change(&self) -> Option<Instant> {
        let idle = self.idle?;
        let unused = self.slots.iter().filter(|slot| slot.is_unused());
        unused.map(|slot| slot.last_used + idle).min()
    }

    /// The state of a model, and whether its last process ended by itself.
    pub fn state(&self, model: usize) -> (Phase, bool) {
        let slot = &self.slots[model];
        (slot.phase, slot.failed)
    }

    /// The number of a model's process.
    pub fn generation(&self, model: usize) -> u64 {
        self.slots[model].generation
    }

    /// Number of processes.
    pub fn processes(&self) -> usize {
        let runs = |slot: &&Slot<W>| slot.phase != Phase::Unloaded;
        self.slots.iter().filter(runs).count()
    }

    /// Number of requests that use a process, and of those that wait for one.
    pub fn requests(&self) -> (usize, usize) {
        let running = self.slots.iter().map(|slot| slot.running).sum();
        let waiting = self.slots.iter().map(|slot| slot.waiting.len()).sum();
        (running, waiting)
    }

    fn stop_idle(&mut self, now: Instant) {
        for model in 0..self.slots.len() {
            let slot = &self.slots[model];
            let is_late = |idle| now >= slot.last_used + idle;
            if slot.is_unused() && (slot.is_gone || self.idle.is_some_and(is_late)) {
                self.stop(model, StopReason::Idle);
            }
        }
    }

    /// Starts the models that requests wait for, in the order of their first one, while there is room. Returns for how many
    /// there is none, even after the processes that are ending have ended.
    fn start(&mut self) -> usize {
        let is_wanted = |model: &usize| {
            let slot = &self.slots[*model];
            slot.phase == Phase::Unloaded && !slot.waiting.is_empty()
        };
        let mut wanted: Vec<usize> = (0..self.slots.len()).filter(is_wanted).collect();
        wanted.sort_by_key(|&model| self.slots[model].waiting.first().map(|(order, _)| *order));
        let room = self.max_loaded.saturating_sub(self.processes());
        for &model in wanted.iter().take(room) {
            self.slots[model].phase = Phase::Loading;
            self.decided.push(Action::Start(model));
        }
        let stopping = |slot: &&Slot<W>| slot.phase == Phase::Stopping;
        let ending = self.slots.iter().filter(stopping).count();
        wanted.len().saturating_sub(room + ending)
    }

    /// Stops `missing` processes, or lets them take no further requests: unused ones first, and those whose last request
    /// is longest ago. One that takes no requests any more stays the choice until another is unused.
    fn make_room(&mut self, missing: usize) {
        let is_loaded = |model: &usize| self.slots[*model].phase == Phase::Loaded;
        let mut loaded: Vec<usize> = (0..self.slots.len()).filter(is_loaded).collect();
        loaded.sort_by_key(|&model| {
            let slot = &self.slots[model];
            (slot.running > 0, !slot.draining, slot.last_used)
        });
        for (place, model) in loaded.into_iter().enumerate() {
            let slot = &mut self.slots[model];
            slot.draining = place < missing;
            if slot.draining && slot.running == 0 {
                self.stop(model, StopReason::Evicted);
            }
        }
    }

    fn stop(&mut self, model: usize, reason: StopReason) {
        self.slots[model].phase = Phase::Stopping;
        self.decided.push(Action::Stop(model, reason));
    }

    fn grant(decided: &mut Vec<Action<W>>, slot: &mut Slot<W>, model: usize, now: Instant) {
        if slot.waiting.is_empty() {
            return;
        }
        slot.last_used = now;
        slot.running += slot.waiting.len();
        let waiting = slot.waiting.drain(..);
        decided.extend(waiting.map(|(_, waiter)| Action::Grant(model, waiter)));
    }

    fn refuse_waiting(&mut self, model: usize, by: RefusedBy) {
        let waiting = self.slots[model].waiting.drain(..);
        let refused = waiting.map(|(_, waiter)| Action::Refuse(model, waiter, by));
        self.decided.extend(refused);
    }
}

impl<W> Slot<W> {
    /// A model that has no process yet.
    fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Unloaded,
            generation: 0,
            running: 0,
            waiting: Vec::new(),
            draining: false,
            last_used: now,
            ready_at: None,
            failures: 0,
            failed: false,
            not_before: None,
            is_gone: false,
        }
    }

    /// Whether requests get the process at once.
    fn takes_requests(&self) -> bool {
        self.phase == Phase::Loaded && !self.draining
    }

    /// Whether there is a process that no request uses or waits for.
    fn is_unused(&self) -> bool {
        self.phase == Phase::Loaded && self.running == 0 && self.waiting.is_empty()
    }
}

/// How long a model is not started after this many failures in a row; after the first one the next request starts it.
fn pause(failures: u32) -> Option<Duration> {
    let doublings = failures.checked_sub(2)?;
    let seconds = 1u64.checked_shl(doublings).unwrap_or(u64::MAX);
    Some(Duration::from_secs(seconds).min(MAX_PAUSE))
}

#[cfg(test)]
mod tests;
