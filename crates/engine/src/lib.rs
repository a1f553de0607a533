//! One engine thread owns the models; all other code holds a cloneable [`EngineHandle`].

#![forbid(unsafe_code)]

mod adapter_stats;
mod cache_key;
mod chunk;
mod cost_cache;
mod disk;
mod embedding;
mod events;
mod handle;
mod interruption;
mod limits;
mod options;
mod prefix_disk;
mod queue;
mod records;
mod request;
pub mod scheduler;
pub mod sequence;
mod series;
mod shared;
pub mod spec;
mod start;
mod stats;
mod step;
mod thread;

use crate::spec::{SeqId, SpeculativeRunner, StepResult};
use cost_cache::CostWriter;
use disk::EngineBeginnings;
use foretoken_core::error::{Error, Result, panic_message};
use foretoken_core::model::GiveUp;
use foretoken_core::sampling::Acceptance;
use handle::{EngineMessage, Submission};
use prefix_disk::PrefixDisk;
use scheduler::{ScheduledSequence, Scheduler};
use sequence::Sequence;
use shared::EngineShared;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;
use step::{Stepped, committed, emit, no_token, step_inputs};

pub use cache_key::CacheKey;
pub use cost_cache::CostCache;
pub use events::{CollectedEvents, Events};
pub use foretoken_core::sampling::TokenLogprobs;
pub use handle::EngineHandle;
pub use limits::{MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, RequestLimits};
pub use options::{EngineOptions, SpecLimits, StepLimits};
pub use request::{
    EndObserver, Event, Fate, FinishReason, MAX_RANKS, RankCount, Request, SequenceEnd, SpecUsage,
    TokenOutput, VerifiedDraft, VerifiedNode,
};
pub use series::Series;
pub use start::{spawn, spawn_with};
pub use stats::{RequestTimes, Stats};
pub use thread::EngineThread;

/// The thread's state: waiting and running sequences, and the models.
struct Engine {
    inbox: Receiver<EngineMessage>,
    shared: Arc<EngineShared>,
    scheduler: Scheduler,
    runner: SpeculativeRunner,
    /// `None` = the prefix cache is in memory alone.
    disk: Option<PrefixDisk>,
    spec: SpecLimits,
    acceptance: Acceptance,
    next_id: SeqId,
    /// Who gets the error if the current step fails; empty if that is not known.
    concerned: Vec<SeqId>,
    /// Whether something failed since the pools were last checked.
    has_failed: bool,
    /// Whether the pools were checked while idle since the last request arrived.
    checked: bool,
    /// Keeps what speculation learns.
    costs: Option<CostWriter>,
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
        self.keep_costs(true);
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
        self.take_from_disk();
        let (plan, preempted) = self.schedule();
        let running = &self.scheduler.running;
        let planned = plan.iter().map(|planned| running[planned.index].state.id);
        self.concerned.extend(planned);
        self.note_plan(&plan, &preempted);
        if plan.is_empty() {
            self.wait_for_disk();
            return Ok(());
        }
        let started = Instant::now();
        let interruption = self.interruption(&plan);
        let is_due = interruption.map(|interruption| move |done| interruption.is_due(done));
        let mut inputs = step_inputs(&mut self.scheduler.running, &plan);
        let gives_up = is_due.as_ref().map(|is_due| is_due as &GiveUp<'_>);
        let Some((outputs, target_time)) = self.runner.step(&mut inputs, gives_up)? else {
            self.note_interruption(&plan);
            return Ok(());
        };
        self.costs.iter_mut().for_each(CostWriter::note_step);
        self.note_step(&plan, target_time);
        self.note_chunk(&plan, &outputs, started.elapsed());
        self.commit_and_emit(&plan, outputs);
        Ok(())
    }

    /// Keeps what speculation has learned, now and then and as the thread `ends`.
    fn keep_costs(&mut self, ends: bool) {
        if let Some(costs) = self.costs.as_mut().filter(|costs| costs.is_due(ends))
            && !self.runner.drafter_is_off()
        {
            costs.write(self.runner.learned());
        }
    }

    fn schedule(&mut self) -> (Vec<ScheduledSequence>, Vec<SeqId>) {
        self.scheduler.schedule(EngineBeginnings {
            runner: &mut self.runner,
            disk: self.disk.as_mut(),
            stats: &self.shared.stats,
            concerned: &mut self.concerned,
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
            // Read before the inbox: a series that is over has sent all of its parts.
            let is_drained = self.shared.is_drained();
            let message = match self.inbox.try_recv() {
                Err(TryRecvError::Empty) if !idle => return Ok(true),
                Err(TryRecvError::Empty) if is_drained => return Ok(false),
                Err(TryRecvError::Empty) => self.inbox.recv().ok(),
                Err(TryRecvError::Disconnected) => None,
                Ok(message) => Some(message),
            };
            if message.is_some() {
                self.shared.unread.fetch_sub(1, Ordering::SeqCst);
            }
            match message {
                Some(EngineMessage::Submit(submissions)) => {
                    submissions.into_iter().for_each(|one| self.enqueue(one));
                }
                Some(EngineMessage::Wake) => {}
                Some(EngineMessage::ResetPrefixCache(done)) => {
                    self.reset_prefix_cache();
                    // Whoever asked may be gone.
                    let _ = done.send(());
                }
                Some(EngineMessage::UseDrafter(index)) => self.runner.use_drafter(index),
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
            &self.shared.eos_token_ids,
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
                        parents: if output.candidates.is_empty() {
                            Vec::new()
                        } else {
                            output.draft.parents.clone()
                        },
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
            self.keep_blocks(planned.index);
        }
        self.runner
            .observe(&committed(&self.scheduler.running, &stepped));
        self.keep_drafts(plan);
        self.check_step(plan);
        for sequence in self.scheduler.remove(|sequence| sequence.ended.is_some()) {
            self.end(sequence);
        }
        self.keep_states();
        self.scheduler.running.iter_mut().for_each(Sequence::flush);
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

    /// The thread ends: the remaining requests get the error, also those that nobody has taken from the inbox.
    fn fail_all(&mut self, error: &Error) {
        while let Ok(message) = self.inbox.try_recv() {
            if let EngineMessage::Submit(submissions) = message {
                submissions.into_iter().for_each(|one| self.enqueue(one));
            }
        }
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
        let states = self.runner.num_states();
        if states > 0 {
            return Err(Error::internal(format!(
                "{states} states are held while idle"
            )));
        }
        if self.runner.draft_kv_usage() > 0.0 {
            return Err(Error::internal("draft pool: blocks are held while idle"));
        }
        self.keep_costs(false);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
