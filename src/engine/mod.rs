//! One engine thread owns the models; all other code holds a cloneable [`EngineHandle`].

mod chunk;
mod embedding;
mod events;
mod handle;
mod queue;
mod request;
pub mod scheduler;
pub mod sequence;
mod stats;
mod step;

use crate::error::{Error, Result, panic_message};
use crate::kv::BlockAllocator;
use crate::model::Model;
use crate::sampling::Acceptance;
use crate::spec::{BudgetMode, Drafter, SeqId, SpeculativeRunner, StepResult};
use chunk::PromptChunk;
use handle::{EngineMessage, EngineShared, Submission};
use scheduler::{ScheduledSequence, Scheduler};
use sequence::Sequence;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};
use step::{Stepped, committed, emit, no_token, step_inputs};
use tokio::sync::{Semaphore, watch};

pub use crate::sampling::TokenLogprobs;
pub use events::{CollectedEvents, Events};
pub use handle::{
    EngineHandle, EngineOptions, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, RequestLimits, SpecLimits,
    StepLimits,
};
pub use request::{
    EndObserver, Event, FinishReason, Request, SequenceEnd, SpecUsage, TokenOutput, VerifiedDraft,
};
pub use stats::{RequestTimes, Stats};

/// How many times the pool the prompts of one request's sequences may fill together.
const PROMPT_POOLS: usize = 8;
/// They may have as many tokens as this in any case.
const MIN_PROMPT_TOKENS: usize = 1 << 17;

/// The thread's state: waiting and running sequences, and the models.
struct Engine {
    inbox: Receiver<EngineMessage>,
    shared: Arc<EngineShared>,
    scheduler: Scheduler,
    runner: SpeculativeRunner,
    spec: SpecLimits,
    acceptance: Acceptance,
    eos_token_ids: Vec<u32>,
    next_id: SeqId,
    /// Who gets the error if the current step fails; empty if that is not known.
    concerned: Vec<SeqId>,
    /// Whether something failed since the pools were last checked.
    has_failed: bool,
    /// Whether the pools were checked while idle since the last request arrived.
    checked: bool,
}

/// Starts the engine thread over `target` and `drafter`, with a target pool of `num_blocks` blocks
/// of `block_size` tokens. A draft model's own pool must have at least as many tokens.
///
/// # Errors
/// `Setup` if the options are incompatible or there is no memory for the pool.
pub fn spawn(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<EngineHandle> {
    let (engine, handle) = build(target, drafter, num_blocks, block_size, options)?;
    start(engine)?;
    Ok(handle)
}

/// Starts the thread, which tells how it ends.
fn start(engine: Engine) -> Result<()> {
    let ending = engine.shared.clone();
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            let end = catch_unwind(AssertUnwindSafe(|| engine.run()))
                .unwrap_or_else(|panic| Err(panicked("the engine thread", &*panic)));
            if let Err(error) = &end {
                tracing::error!("the engine has ended: {error}");
            }
            ending.draining.store(true, Ordering::SeqCst);
            ending.ended.send_replace(Some(end));
        })
        .map_err(|e| Error::setup(format!("cannot start the engine thread: {e}")))?;
    Ok(())
}

/// The thread's state before it runs, and a handle; see [`spawn`].
fn build(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<(Engine, EngineHandle)> {
    let mut spec = options.spec;
    if drafter.is_none() {
        spec.length = 0;
    }
    if options.max_num_batched_tokens == 0 {
        return Err(Error::setup("max-num-batched-tokens must be at least 1"));
    }
    let config = target.config();
    let eos_token_ids = config.eos_token_ids.clone();
    let longest = config.max_position_embeddings.min(num_blocks * block_size);
    let max_model_len = options
        .max_model_len
        .map_or(longest, |len| len.min(longest));
    if max_model_len < 2 {
        return Err(Error::setup(format!(
            "the KV pool holds {} tokens, too few for any request: raise --kv-cache-memory or --num-blocks",
            num_blocks * block_size
        )));
    }
    // The semaphore's permits are acquired as 32-bit counts.
    let max_waiting = options.max_waiting.min(u32::MAX as usize);
    let limits = RequestLimits {
        max_model_len,
        vocab_size: config.vocab_size,
        max_logprobs: options.max_logprobs,
        max_waiting,
        max_prompt_tokens: (num_blocks * block_size)
            .saturating_mul(PROMPT_POOLS)
            .max(MIN_PROMPT_TOKENS),
        spec_length: spec.length,
        generates: target.generates(),
        embedding_size: config.hidden_size,
    };
    let shared = Arc::new(EngineShared {
        limits,
        stats: Arc::new(Stats::new(&options.model_name)),
        next_group: AtomicU64::new(0),
        permits: Arc::new(Semaphore::new(max_waiting)),
        draining: AtomicBool::new(false),
        aborting: AtomicBool::new(false),
        ended: watch::Sender::new(None),
    });
    let caches = !options.no_prefix_caching;
    (shared.stats).set_cache_config(num_blocks, block_size, caches);
    let (sender, inbox) = channel();
    let mut runner =
        SpeculativeRunner::new(target, drafter, options.spec_budget, num_blocks, block_size)?;
    if options.calibrate && options.spec_budget == BudgetMode::Adaptive {
        log_costs(&runner.calibrate()?);
    }
    let engine = Engine {
        inbox,
        shared: shared.clone(),
        scheduler: Scheduler::new(
            BlockAllocator::new(num_blocks, block_size).with_prefix_cache(caches),
            options.max_num_seqs,
            options.max_num_batched_tokens,
            PromptChunk::new(options.max_prompt_wait),
            options.step_limits,
        ),
        runner,
        spec,
        acceptance: options.acceptance,
        eos_token_ids,
        next_id: 0,
        concerned: Vec::new(),
        has_failed: false,
        checked: true,
    };
    Ok((engine, EngineHandle { sender, shared }))
}

fn log_costs(measured: &[(usize, f64)]) {
    if !measured.is_empty() {
        let costs = measured.iter();
        let costs = costs.map(|(rows, seconds)| format!("{rows}: {:.2} ms", 1e3 * seconds));
        let costs: Vec<String> = costs.collect();
        tracing::info!("a step by its number of rows: {}", costs.join(", "));
    }
}

/// The error for a panic of `what`.
fn panicked(what: &str, panic: &(dyn Any + Send)) -> Error {
    Error::internal(format!("{what} panicked: {}", panic_message(panic)))
}

impl Engine {
    /// Runs until the thread ends.
    ///
    /// # Errors
    /// The reason it ends, unless it was asked to end.
    fn run(mut self) -> Result<()> {
        let end = self.work();
        self.fail_all(&end.clone().err().unwrap_or_else(Error::shutting_down));
        end.and_then(|()| self.check_idle())
    }

    fn work(&mut self) -> Result<()> {
        while self.receive()? {
            let step = catch_unwind(AssertUnwindSafe(|| self.step()));
            let step = step.unwrap_or_else(|panic| Err(panicked("the step", &*panic)));
            if let Err(error) = step {
                self.fail_step(&error);
            }
            if std::mem::take(&mut self.has_failed) {
                // Without order in the pools, nobody can continue.
                self.check_invariants()?;
            }
        }
        Ok(())
    }

    /// Plans a step, runs it, and sends what it gave.
    ///
    /// # Errors
    /// If the device failed.
    fn step(&mut self) -> Result<()> {
        self.concerned.clear();
        self.cancel();
        let (plan, preempted) = self.schedule();
        let running = &self.scheduler.running;
        let planned = plan.iter().map(|planned| running[planned.index].state.id);
        self.concerned.extend(planned);
        self.note_plan(&plan, &preempted);
        if plan.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let mut inputs = step_inputs(&mut self.scheduler.running, &plan);
        let (outputs, target_time) = self.runner.step(&mut inputs)?;
        self.note_step(&plan, target_time);
        self.note_chunk(&plan, &outputs, started.elapsed());
        self.commit_and_emit(&plan, outputs);
        Ok(())
    }

    fn schedule(&mut self) -> (Vec<ScheduledSequence>, Vec<SeqId>) {
        let (runner, concerned) = (&mut self.runner, &mut self.concerned);
        self.scheduler.schedule(|sequence, cached| {
            if !sequence.may_draft() {
                return cached;
            }
            concerned.push(sequence.state.id);
            let cached = runner.resume(&sequence.state, cached);
            concerned.clear();
            cached
        })
    }

    /// Handles the messages that have arrived; sleeps while idle. Returns false when the
    /// thread must end.
    ///
    /// # Errors
    /// See [`Engine::check_idle`].
    fn receive(&mut self) -> Result<bool> {
        loop {
            if self.shared.aborting.load(Ordering::SeqCst) {
                return Ok(false);
            }
            let idle = self.scheduler.is_idle();
            if idle {
                self.check_idle()?;
            }
            let message = match self.inbox.try_recv() {
                Err(TryRecvError::Empty) if !idle => return Ok(true),
                Err(TryRecvError::Empty) if self.shared.draining.load(Ordering::SeqCst) => {
                    return Ok(false);
                }
                Err(TryRecvError::Empty) => self.inbox.recv().ok(),
                Err(TryRecvError::Disconnected) => None,
                Ok(message) => Some(message),
            };
            match message {
                Some(EngineMessage::Submit(submission)) => self.enqueue(*submission),
                Some(EngineMessage::Wake) => {}
                Some(EngineMessage::ResetPrefixCache(done)) => {
                    self.reset_prefix_cache();
                    // Whoever asked may be gone.
                    let _ = done.send(());
                }
                // No sender is left; finish the running sequences.
                None => return Ok(!idle),
            }
        }
    }

    fn enqueue(&mut self, submission: Submission) {
        let request = &submission.request;
        if let Some(max_tokens) = request.max_tokens.filter(|_| request.pooling.is_none()) {
            let asked = &self.shared.stats.requests.max_tokens;
            asked.observe(max_tokens as f64);
        }
        let sequence = Sequence::new(
            self.next_id,
            submission,
            self.shared.limits.max_model_len,
            self.spec,
            self.acceptance,
            &self.eos_token_ids,
        );
        self.next_id += 1;
        self.scheduler.waiting.push(sequence);
        self.checked = false;
    }

    fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
        self.runner.reset_prefix_cache();
        self.checked = false;
    }

    /// Drops every request whose receiver is gone.
    fn cancel(&mut self) {
        for mut sequence in self.scheduler.remove(Sequence::is_cancelled) {
            // The receiver ended the text at a stop string, or was dropped by its owner.
            sequence.ended = Some(match sequence.text_tokens.get() {
                Some(_) => "stop",
                None => "released",
            });
            self.end(sequence);
        }
    }

    /// Applies the step's results: frees the target's blocks after the committed tokens, sends the
    /// tokens, and removes finished sequences.
    fn commit_and_emit(&mut self, plan: &[ScheduledSequence], outputs: Vec<StepResult>) {
        let now = Instant::now();
        let mut stepped = Vec::with_capacity(plan.len());
        for (planned, output) in plan.iter().zip(outputs) {
            let sequence = &mut self.scheduler.running[planned.index];
            sequence.ended = match output {
                Ok(mut output) => {
                    stepped.push(Stepped {
                        index: planned.index,
                        kv_len: sequence.state.kv_len,
                        hidden: output.hidden.take(),
                        candidates: std::mem::take(&mut output.candidates),
                    });
                    emit(&self.shared.stats, sequence, planned.rows, output, now)
                }
                Err(reason) => {
                    self.shared.stats.note_no_token(reason);
                    sequence.queue_event(Event::Failed(no_token(reason)));
                    Some("error")
                }
            };
            self.scheduler.settle(planned.index);
        }
        self.runner
            .observe(&committed(&self.scheduler.running, &stepped));
        self.check_step(plan);
        for sequence in self.scheduler.remove(|sequence| sequence.ended.is_some()) {
            self.end(sequence);
        }
        self.scheduler.running.iter_mut().for_each(Sequence::flush);
    }

    /// Records and sends the end of a sequence whose blocks are already free.
    fn end(&mut self, mut sequence: Sequence) {
        let id = sequence.state.id;
        self.guard("the end of a sequence", |engine| engine.runner.end(id));
        sequence.permit = None;
        let stats = &self.shared.stats;
        let seconds = sequence.arrived.elapsed().as_secs_f64();
        stats.e2e_request_latency.observe(seconds);
        let times = RequestTimes {
            arrived: sequence.arrived,
            admitted: sequence.admitted,
            first_token: sequence.first_token,
            last_token: sequence.last_token,
        };
        (stats.requests).note_end(times, sequence.state.prompt_len, sequence.output_len());
        let usage = sequence.usage;
        // What came after a stop string is no part of the text.
        let output_tokens = sequence.text_tokens.get().copied();
        let output_tokens = output_tokens.unwrap_or(sequence.output_len());
        tracing::info!(
            id,
            request_id = sequence.name.as_deref(),
            reason = sequence.ended,
            prompt_tokens = sequence.state.prompt_len,
            cached_tokens = sequence.cached_tokens,
            output_tokens,
            seconds = thousandths(seconds),
            ttft_seconds = times.first_token_seconds().map(thousandths),
            tokens_per_second = times
                .tokens_per_second(sequence.output_len())
                .map(thousandths),
            rounds = usage.rounds,
            drafted = usage.drafted,
            synthetic_acceptance = sequence.state.synthetic_acceptance,
            accepted = usage.accepted,
            acceptance_rate = thousandths(usage.acceptance_rate()),
            mean_accepted_length = thousandths(usage.mean_accepted_length()),
            "request done"
        );
        if let Some(watch) = sequence.watch.take() {
            let end = SequenceEnd {
                times,
                prompt_tokens: sequence.state.prompt_len,
                cached_tokens: sequence.cached_tokens,
                output_tokens: sequence.output_len(),
                spec: usage,
            };
            self.guard("the watch of a sequence", |_| watch.ended(end));
        }
        sequence.flush();
    }

    /// Does what fails no request: a panic is logged, and the pools are checked after the step.
    fn guard(&mut self, what: &str, act: impl FnOnce(&mut Self)) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| act(self))) {
            tracing::error!("{}", panicked(what, &*panic));
            self.has_failed = true;
        }
    }

    /// A step failed: the sequences concerned get the error, and the others continue if the pools are in
    /// order. If it is not known whom it concerns, it is those that run, or else those that wait.
    fn fail_step(&mut self, error: &Error) {
        tracing::error!("engine step failed: {error}");
        self.has_failed = true;
        let mut concerned = std::mem::take(&mut self.concerned);
        if concerned.is_empty() {
            let running = self.scheduler.running.iter();
            concerned.extend(running.map(|sequence| sequence.state.id));
        }
        let all = concerned.is_empty();
        self.fail(
            |sequence| all || concerned.contains(&sequence.state.id),
            error,
            "error",
        );
        // A plan that failed does not tell whom it has preempted.
        for sequence in self.scheduler.waiting.sequences.values() {
            self.runner.forget(sequence.state.id);
        }
    }

    /// The thread ends: the remaining requests get the error.
    fn fail_all(&mut self, error: &Error) {
        let reason = match error {
            Error::Request { .. } => "abort",
            Error::Setup(_) | Error::Internal(_) => "error",
        };
        self.fail(|_| true, error, reason);
    }

    fn fail(&mut self, which: impl FnMut(&Sequence) -> bool, error: &Error, reason: &'static str) {
        for mut sequence in self.scheduler.remove(which) {
            if sequence.ended.is_none() {
                sequence.queue_event(Event::Failed(error.clone()));
                sequence.ended = Some(reason);
            }
            self.end(sequence);
        }
    }

    /// Checks the target's pool after a step, while all sequences of the step are still present.
    /// Debug builds only, because it looks at every block.
    fn check_step(&self, plan: &[ScheduledSequence]) {
        if cfg!(debug_assertions) {
            if let Err(wrong) = self.check_invariants() {
                panic!("after a step: {wrong}");
            }
            for planned in plan {
                let state = &self.scheduler.running[planned.index].state;
                let held = state.table.blocks().len();
                let needed = self.scheduler.blocks_for(state.tokens.len());
                debug_assert!(
                    held <= needed,
                    "{held} blocks for {needed} blocks of tokens"
                );
            }
        }
    }

    /// Checks both pools: each block is free, cached or held by a running sequence.
    ///
    /// # Errors
    /// The inconsistency found.
    fn check_invariants(&self) -> Result<()> {
        let wrong = |pool: &str, what: String| Error::internal(format!("{pool} pool: {what}"));
        self.scheduler
            .check_invariants()
            .map_err(|what| wrong("target", what))?;
        self.runner
            .check_invariants()
            .map_err(|what| wrong("draft", what))
    }

    /// Checks that all blocks of both pools are free or cached when no request is alive.
    ///
    /// # Errors
    /// The inconsistency found.
    fn check_idle(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.checked, true) {
            return Ok(());
        }
        self.note_usage();
        self.check_invariants()?;
        if self.runner.draft_kv_usage() > 0.0 {
            return Err(Error::internal("draft pool: blocks are held while idle"));
        }
        Ok(())
    }

    /// Records a plan: first admissions, preemptions, gauges.
    fn note_plan(&mut self, plan: &[ScheduledSequence], preempted: &[SeqId]) {
        let stats = &self.shared.stats;
        let has_prefix_cache = self.scheduler.has_prefix_cache();
        for planned in plan {
            let sequence = &mut self.scheduler.running[planned.index];
            if sequence.permit.take().is_some() {
                let tokens = sequence.state.prompt_len as u64;
                stats.prompt_tokens.inc_by(tokens);
                if has_prefix_cache {
                    stats.prefix_cache_queries.inc_by(tokens);
                    stats
                        .prefix_cache_hits
                        .inc_by(sequence.cached_tokens as u64);
                }
            }
        }
        stats.preemptions.inc_by(preempted.len() as u64);
        for &id in preempted {
            tracing::debug!(id, "preempted");
            self.runner.forget(id);
        }
        self.note_usage();
    }

    fn note_usage(&self) {
        let stats = &self.shared.stats;
        let draft_kv_usage = self.runner.draft_kv_usage();
        (stats.drafter_off).set(i64::from(self.runner.drafter_is_off()));
        stats
            .requests_running
            .set(self.scheduler.running.len() as i64);
        stats
            .requests_waiting
            .set(self.scheduler.waiting.sequences.len() as i64);
        stats.kv_cache_usage.set(self.scheduler.kv_usage());
        stats.draft_kv_cache_usage.set(draft_kv_usage);
    }

    /// Records the cost of a step, unless it contained prompt rows, which would hide the cost of a
    /// round.
    fn note_step(&self, plan: &[ScheduledSequence], target_time: Duration) {
        if plan.iter().all(|planned| planned.rows == 1) {
            let stats = &self.shared.stats;
            stats.target_steps.inc();
            stats.target_seconds.inc_by(target_time.as_secs_f64());
        }
        if let Some(speculation) = self.runner.speculation() {
            self.shared.stats.note_draft_cost(speculation.cost());
            self.shared.stats.spec_speed_up.set(speculation.speed_up());
            self.shared.stats.note_pruned(speculation.pruned());
        }
    }

    /// Records a step's wall time, drafts and sampling included, to adjust the prompt rows of the
    /// next steps.
    fn note_chunk(
        &mut self,
        plan: &[ScheduledSequence],
        outputs: &[StepResult],
        step_time: Duration,
    ) {
        let rows: usize = plan.iter().map(|planned| planned.rows).sum();
        let prompts = plan.iter().filter(|planned| planned.rows > 1);
        let prompt_rows = prompts.map(|planned| planned.rows).sum();
        let drafts = outputs.iter().flatten().map(|output| output.draft.len());
        let drafted: usize = drafts.sum();
        let chunk = &mut self.scheduler.prompt_chunk;
        chunk.note(rows + drafted, prompt_rows, step_time);
    }
}

/// A number as log lines show it, which in JSON is a number, too.
fn thousandths(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests;
