//! The processes of all models: carries out what the policy decides.

use super::catalog::Catalog;
use super::metrics::FleetMetrics;
use super::policy::{Action, Phase, Policy, RefusedBy, Waiter};
use super::process::{LastLines, Launcher, ModelSource, ModelSpec, Process};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_engine::EngineThread;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, sleep_until, timeout};

/// The time beyond `--shutdown-timeout` in which a process must have ended: as much as its engine's thread has, which may
/// write a prefix cache to disk.
const END_TIMEOUT: Duration = EngineThread::PATIENCE;

/// Maximum time until the failure of a process that broke off an answer is known: more than it takes to read the last lines
/// of its log on a machine that does much else.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum time between two looks for models that came or went.
const BETWEEN_REFRESHES: Duration = Duration::from_secs(1);

/// The models, and the processes that serve them.
pub(super) struct Fleet {
    pub catalog: Catalog,
    /// Reads which models there are; `None` = they stay.
    source: Option<ModelSource>,
    refreshed: tokio::sync::Mutex<Refreshed>,
    /// The right to load or unload an adapter.
    pub adapter_turn: tokio::sync::Mutex<()>,
    launcher: Launcher,
    /// Maximum time from asking a process to end to its end.
    patience: Duration,
    runtime: Handle,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    aborted: watch::Sender<bool>,
    metrics: FleetMetrics,
}

struct State {
    policy: Policy<Waiting>,
    runs: Vec<Run>,
}

/// The last look for models that came or went.
#[derive(Default)]
struct Refreshed {
    at: Option<Instant>,
    /// Why they could not be read, which is logged once.
    failure: Option<String>,
}

/// A model's process, or how the last one failed.
#[derive(Default)]
struct Run {
    address: Option<SocketAddr>,
    /// Asks it to end when this is dropped.
    stop: Option<oneshot::Sender<()>>,
    failure: Option<String>,
}

/// A request that waits for its process.
struct Waiting(oneshot::Sender<Result<Lease>>);

impl Waiter for Waiting {
    fn is_gone(&self) -> bool {
        self.0.is_closed()
    }
}

/// The right of a request to use a process; it ends when this is dropped.
pub(super) struct Lease {
    fleet: Arc<Fleet>,
    model: usize,
    generation: u64,
    address: SocketAddr,
}

/// What is known of a model.
pub(super) struct ModelState {
    pub phase: Phase,
    /// How the last process failed, if it did.
    pub failure: Option<String>,
    /// The address of a loaded one.
    pub address: Option<SocketAddr>,
}

/// How many processes there are, and when they end.
#[derive(Debug, Clone, Copy)]
pub(super) struct FleetLimits {
    pub max_loaded: usize,
    /// Time after which an unused process ends; `None` = never.
    pub idle: Option<Duration>,
    /// Time in which running requests may finish.
    pub shutdown_timeout: Duration,
}

impl Fleet {
    /// The fleet of `specs`, of which no model is loaded yet, and of those that `source` finds later. It must be made in a
    /// runtime.
    pub fn new(
        specs: Vec<ModelSpec>,
        source: Option<ModelSource>,
        launcher: Launcher,
        limits: FleetLimits,
        metrics: FleetMetrics,
    ) -> Arc<Self> {
        let FleetLimits {
            max_loaded, idle, ..
        } = limits;
        let policy = Policy::new(specs.len(), max_loaded, idle, Instant::now());
        let runs = specs.iter().map(|_| Run::default()).collect();
        Arc::new(Self {
            catalog: Catalog::new(specs),
            source,
            refreshed: tokio::sync::Mutex::default(),
            adapter_turn: tokio::sync::Mutex::default(),
            launcher,
            patience: limits.shutdown_timeout + END_TIMEOUT,
            runtime: Handle::current(),
            state: Mutex::new(State { policy, runs }),
            changed: watch::Sender::new(()),
            aborted: watch::Sender::new(false),
            metrics,
        })
    }

    /// The name of a model.
    pub fn name(&self, model: usize) -> String {
        self.catalog.spec(model).name.clone()
    }

    /// The place of the model that requests call `name`; one that has just come is found, too.
    ///
    /// # Errors
    /// `NotFound`, with the names that there are.
    pub async fn find(self: &Arc<Self>, name: &str) -> Result<usize> {
        if let Some(place) = self.catalog.called(name) {
            return Ok(place);
        }
        self.refresh().await;
        self.catalog.find(name)
    }

    /// Looks which models came and went, unless that was done a moment ago. The process of one that is gone ends when no
    /// request uses it. If the models cannot be read, they stay as they were.
    pub async fn refresh(self: &Arc<Self>) {
        let Some(source) = self.source.clone() else {
            return;
        };
        let mut refreshed = self.refreshed.lock().await;
        let is_recent = |at: Instant| at.elapsed() < BETWEEN_REFRESHES;
        if refreshed.at.is_some_and(is_recent) {
            return;
        }
        // First, because a client that leaves ends this.
        refreshed.at = Some(Instant::now());
        let read = self.runtime.spawn_blocking(move || source()).await;
        let read = read.unwrap_or_else(|e| Err(Error::internal(format!("models: {e}"))));
        let failure = match read {
            Ok(specs) => {
                self.replace(specs);
                None
            }
            Err(e) => Some(e.to_string()),
        };
        if let Some(how) = failure.as_ref().filter(|_| failure != refreshed.failure) {
            tracing::warn!("the models stay as they were: {how}");
        }
        refreshed.failure = failure;
    }

    fn replace(self: &Arc<Self>, specs: Vec<ModelSpec>) {
        self.change(|state, now| {
            let is_gone = self.catalog.replace(specs);
            state.runs.resize_with(is_gone.len(), Run::default);
            state.policy.set_models(&is_gone, now);
        });
    }

    /// Waits for a process of this model, which is started if there is none. Dropping the future gives up.
    ///
    /// # Errors
    /// `ModelUnavailable` if the process failed, or `ShuttingDown`.
    pub async fn acquire(self: &Arc<Self>, model: usize) -> Result<Lease> {
        let (sender, lease) = oneshot::channel();
        self.change(|state, now| state.policy.request(model, Waiting(sender), now));
        lease.await.unwrap_or_else(|_| Err(Error::shutting_down()))
    }

    /// The right to use the process of this model if it is loaded, and need not make room for another; otherwise none is
    /// started.
    ///
    /// # Errors
    /// `ShuttingDown`.
    pub async fn acquire_loaded(self: &Arc<Self>, model: usize) -> Result<Option<Lease>> {
        self.ready()?;
        let (sender, lease) = oneshot::channel();
        self.change(|state, now| {
            let waiting = Waiting(sender);
            state.policy.request_loaded(model, waiting, now)
        });
        // The sender of one that is not granted is gone.
        lease.await.map_or(Ok(None), |lease| lease.map(Some))
    }

    /// Starts the process of this model, unless it takes requests or will anyway.
    pub fn preload(self: &Arc<Self>, model: usize) {
        let (sender, lease) = oneshot::channel();
        let is_new = self.change(|state, now| {
            let is_new = !state.policy.is_coming(model);
            if is_new {
                state.policy.request(model, Waiting(sender), now);
            }
            is_new
        });
        if is_new {
            let fleet = self.clone();
            self.runtime.spawn(async move {
                if let Ok(Err(e)) = lease.await {
                    tracing::warn!("loading {}: {e}", fleet.name(model));
                }
            });
        }
    }

    /// Whether requests are taken.
    ///
    /// # Errors
    /// `ShuttingDown`.
    pub fn ready(&self) -> Result<()> {
        if self.lock().policy.is_closing() {
            return Err(Error::shutting_down());
        }
        Ok(())
    }

    /// Asks the process of this model to end, and refuses those who wait for it.
    pub fn unload(self: &Arc<Self>, model: usize) {
        self.change(|state, _| state.policy.unload(model));
    }

    /// Notes that a client has loaded the adapter `name` into the process of this model, or unloaded it; nothing if that
    /// process, the one of `generation`, has ended.
    pub fn note_adapter(&self, model: usize, generation: u64, name: String, is_loaded: bool) {
        let state = self.lock();
        if state.policy.generation(model) == generation {
            self.catalog.set_adapter(model, name, is_loaded);
        }
    }

    /// What is known of a model.
    pub fn state(&self, model: usize) -> ModelState {
        let state = self.lock();
        let (phase, failed) = state.policy.state(model);
        let run = &state.runs[model];
        ModelState {
            phase,
            failure: run.failure.clone().filter(|_| failed),
            address: run.address.filter(|_| phase == Phase::Loaded),
        }
    }

    /// Number of requests that are being answered or wait for a process.
    pub fn load(&self) -> usize {
        let (running, waiting) = self.lock().policy.requests();
        running + waiting
    }

    /// Refuses requests from now on, and asks all processes to end.
    pub fn shut_down(self: &Arc<Self>) {
        self.change(|state, _| state.policy.shut_down());
    }

    /// Ends all processes that were asked to end at once.
    pub fn abort(&self) {
        self.aborted.send_replace(true);
    }

    /// Waits until there are no processes.
    pub async fn all_ended(&self) {
        let mut changed = self.changed.subscribe();
        while self.processes() > 0 && changed.changed().await.is_ok() {}
    }

    /// Ends unused processes in time.
    pub async fn keep_time(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        loop {
            let next = self.lock().policy.next_change();
            let due = async {
                match next {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => self.change(|_, _| ()),
                changed = changed.changed() => if changed.is_err() { break },
            }
        }
    }

    fn processes(&self) -> usize {
        self.lock().policy.processes()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a change, and carries out what follows from it. Answers are sent after the lock is free, because one that
    /// nobody takes is a change, too.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut State, Instant) -> T) -> T {
        let mut answers = Vec::new();
        let mut state = self.lock();
        let now = Instant::now();
        let result = change(&mut state, now);
        for action in state.policy.actions(now) {
            match action {
                Action::Start(model) => self.start(&mut state, model),
                Action::Stop(model, reason) => {
                    self.metrics.stopped(&self.name(model), reason);
                    state.runs[model].stop = None;
                }
                Action::Grant(model, waiting) => {
                    let lease = state.runs[model].address.map(|address| Lease {
                        fleet: self.clone(),
                        model,
                        generation: state.policy.generation(model),
                        address,
                    });
                    answers.push((waiting, lease.ok_or_else(Error::shutting_down)));
                }
                Action::Refuse(model, waiting, by) => {
                    answers.push((waiting, Err(self.refusal(&state.runs[model], model, by))));
                }
            }
        }
        let (_, waiting) = state.policy.requests();
        self.metrics.set(state.policy.processes(), waiting);
        drop(state);
        self.changed.send_replace(());
        for (Waiting(sender), answer) in answers {
            drop(sender.send(answer));
        }
        result
    }

    fn refusal(&self, run: &Run, model: usize, by: RefusedBy) -> Error {
        match by {
            RefusedBy::Failure => self.failure(model, run.failure.as_deref()),
            RefusedBy::Unload => {
                let message = format!("the model `{}` was unloaded", self.name(model));
                Error::request(RequestErrorKind::ModelUnavailable, None, message)
            }
            RefusedBy::Shutdown => Error::shutting_down(),
        }
    }

    /// The error of a request whose process failed.
    fn failure(&self, model: usize, how: Option<&str>) -> Error {
        let (name, how) = (self.name(model), how.unwrap_or("it broke off"));
        let message = format!("the process of the model `{name}` failed: {how}");
        Error::request(RequestErrorKind::ModelUnavailable, None, message)
    }

    fn start(self: &Arc<Self>, state: &mut State, model: usize) {
        let (stop, stopped) = oneshot::channel();
        let run = &mut state.runs[model];
        (run.address, run.stop) = (None, Some(stop));
        self.metrics.started(&self.name(model));
        tracing::info!("loading {}", self.name(model));
        let fleet = self.clone();
        self.runtime.spawn(async move {
            let failure = fleet.supervise(model, stopped).await;
            fleet.change(|state, now| {
                if let Some(how) = &failure {
                    fleet.metrics.failed(&fleet.name(model));
                    tracing::warn!("the process of {} failed: {how}", fleet.name(model));
                }
                let run = &mut state.runs[model];
                *run = Run {
                    failure,
                    ..Run::default()
                };
                fleet.catalog.forget_adapters(model);
                state.policy.ended(model, now);
            });
        });
    }

    /// Runs the process of a model, and says how it failed; `None` = it was asked to end.
    async fn supervise(
        self: &Arc<Self>,
        model: usize,
        mut stopped: oneshot::Receiver<()>,
    ) -> Option<String> {
        let (started, last) = (Instant::now(), LastLines::default());
        let spec = self.catalog.spec(model);
        let mut process = match Process::start(&spec, &self.launcher, last.clone()) {
            Ok(process) => process,
            Err(e) => {
                let program = self.launcher.program.display();
                return Some(format!("cannot start {program}: {e}"));
            }
        };
        let address = tokio::select! {
            address = process.ready() => address,
            _ = &mut stopped => return self.stop(model, process).await,
        };
        if let Some(address) = address {
            let took = started.elapsed();
            tracing::info!("{} is loaded in {took:.1?}", self.name(model));
            self.change(|state, now| {
                state.runs[model].address = Some(address);
                state.policy.ready(model, now);
            });
        }
        let how = tokio::select! {
            how = process.ended() => how,
            _ = &mut stopped => return self.stop(model, process).await,
        };
        match last.joined() {
            lines if lines.is_empty() => Some(how),
            lines => Some(format!("{how}: {lines}")),
        }
    }

    async fn stop(&self, model: usize, process: Process) -> Option<String> {
        let mut aborted = self.aborted.subscribe();
        let patience = async {
            tokio::select! {
                () = sleep(self.patience) => {}
                _ = aborted.wait_for(|&aborted| aborted) => {}
            }
        };
        process.stop(patience).await;
        tracing::info!("{} is unloaded", self.name(model));
        None
    }
}

impl Lease {
    /// Where the process listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Which of the model's processes it is.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The error of an answer that broke off, with what the process said last if it has ended.
    pub async fn failure(&self) -> Error {
        let (fleet, mut changed) = (&self.fleet, self.fleet.changed.subscribe());
        let has_ended = || fleet.lock().policy.generation(self.model) != self.generation;
        let ended = async { while !has_ended() && changed.changed().await.is_ok() {} };
        let is_known = timeout(FAILURE_TIMEOUT, ended).await.is_ok();
        let how = fleet.state(self.model).failure;
        fleet.failure(self.model, how.as_deref().filter(|_| is_known))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (model, generation) = (self.model, self.generation);
        self.fleet
            .change(|state, now| state.policy.release(model, generation, now));
    }
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
pub(super) mod tests;
