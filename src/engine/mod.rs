//! One engine thread that owns the models; everyone else holds a cloneable [`EngineHandle`].

mod events;
mod handle;
mod request;
pub mod scheduler;
pub mod sequence;
mod stats;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::spec::{Drafter, Kept, Round, SeqId, SpeculativeRunner, Turn};
use handle::{Message, Shared, Submission};
use scheduler::{Planned, Scheduler};
use sequence::Sequence;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

pub use crate::sampling::TokenLogprobs;
pub use events::Events;
pub use handle::{EngineHandle, EngineOptions, Limits, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS};
pub use request::{Event, FinishReason, Request, SpecUsage, TokenOutput};
pub use stats::Stats;

/// The thread's state: who waits and runs, and the models.
struct Engine {
    inbox: Receiver<Message>,
    shared: Arc<Shared>,
    scheduler: Scheduler,
    runner: SpeculativeRunner,
    spec_length: usize,
    eos_token_ids: Vec<u32>,
    next_id: SeqId,
    /// Whether the books were checked since the last sequence ended.
    checked: bool,
}

/// Starts the engine thread over `target` and `drafter`, with a target pool of `num_blocks` blocks
/// of `block_size` tokens. A draft model's own pool must have at least as many tokens.
///
/// # Errors
/// `Setup`, where the options cannot work together or there is no memory for the pool.
pub fn spawn(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    num_blocks: usize,
    block_size: usize,
    options: EngineOptions,
) -> Result<EngineHandle> {
    let spec_length = if drafter.is_some() {
        options.spec_length
    } else {
        0
    };
    let full_round = options.max_num_seqs * (spec_length + 1);
    if options.max_num_batched_tokens < full_round.max(1) {
        return Err(Error::setup(format!(
            "max-num-batched-tokens ({}) must be at least max-num-seqs times (spec-length + 1) = {full_round}",
            options.max_num_batched_tokens
        )));
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
    let limits = Limits {
        max_model_len,
        vocab_size: config.vocab_size,
        max_logprobs: options.max_logprobs,
        max_waiting: options.max_waiting,
        spec_length,
    };
    let shared = Arc::new(Shared {
        limits,
        stats: Arc::new(Stats::new(&options.model_name)),
        waiting: AtomicUsize::new(0),
        draining: AtomicBool::new(false),
        aborting: AtomicBool::new(false),
        ended: AtomicBool::new(false),
    });
    let (sender, inbox) = channel();
    let engine = Engine {
        inbox,
        shared: shared.clone(),
        scheduler: Scheduler::new(options.max_num_seqs, options.max_num_batched_tokens),
        runner: SpeculativeRunner::new(target, drafter, num_blocks, block_size)?,
        spec_length,
        eos_token_ids,
        next_id: 0,
        checked: true,
    };
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || engine.run())
        .map_err(|e| Error::setup(format!("cannot start the engine thread: {e}")))?;
    Ok(EngineHandle { sender, shared })
}

/// Says that the thread has ended, however it ends.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.draining.store(true, Ordering::SeqCst);
        self.0.ended.store(true, Ordering::SeqCst);
    }
}

impl Engine {
    fn run(mut self) {
        let _ended = Ended(self.shared.clone());
        while self.receive() {
            self.cancel();
            let (plan, preempted) = self.scheduler.schedule(&mut self.runner.pool.blocks);
            self.note_plan(&plan, &preempted);
            if plan.is_empty() {
                continue;
            }
            let turns = turns(&self.scheduler.running, &plan);
            match self.runner.step(&turns) {
                Ok((rounds, target_time)) => {
                    self.note_step(&plan, target_time);
                    self.keep_and_emit(&plan, rounds);
                }
                Err(error) => self.fail_running(error),
            }
        }
        self.fail_all();
    }

    /// Takes in what has arrived; sleeps while there is nothing to do. False = end.
    fn receive(&mut self) -> bool {
        loop {
            if self.shared.aborting.load(Ordering::SeqCst) {
                return false;
            }
            let idle = self.scheduler.is_idle();
            if idle {
                self.check_books();
            }
            let message = match self.inbox.try_recv() {
                Err(TryRecvError::Empty) if !idle => return true,
                Err(TryRecvError::Empty) if self.shared.draining.load(Ordering::SeqCst) => {
                    return false;
                }
                Err(TryRecvError::Empty) => self.inbox.recv().ok(),
                Err(TryRecvError::Disconnected) => None,
                Ok(message) => Some(message),
            };
            match message {
                Some(Message::Submit(submission)) => self.enqueue(*submission),
                Some(Message::Wake) => {}
                // Nobody is left who could send; finish what runs.
                None => return !idle,
            }
        }
    }

    fn enqueue(&mut self, submission: Submission) {
        let sequence = Sequence::new(
            self.next_id,
            submission,
            self.shared.limits.max_model_len,
            self.spec_length,
            &self.eos_token_ids,
        );
        self.next_id += 1;
        self.scheduler.waiting.push_back(sequence);
        self.checked = false;
    }

    /// Drops every request that nobody waits for.
    fn cancel(&mut self) {
        let blocks = &mut self.runner.pool.blocks;
        for sequence in self.scheduler.remove(blocks, Sequence::is_cancelled) {
            // A stop string, or a reader that has left: its holder knows.
            self.end(sequence, "released");
        }
    }

    /// Takes in what the step gave: rolls the target's pool back to what is certain, sends the
    /// tokens, and lets go of who has finished.
    fn keep_and_emit(&mut self, plan: &[Planned], rounds: Vec<Round>) {
        let now = Instant::now();
        let mut finished = Vec::new();
        for (planned, round) in plan.iter().zip(rounds) {
            let sequence = &mut self.scheduler.running[planned.index];
            let accepted = round.tokens.len().saturating_sub(1);
            self.shared.stats.note_round(round.drafted, accepted);
            let (new, finish) = sequence.advance(planned.rows, round);
            let blocks = &mut self.runner.pool.blocks;
            blocks.truncate_to(&mut sequence.table, sequence.tokens.len());
            self.shared
                .stats
                .note_tokens(sequence.arrived, sequence.last_token, now, new);
            if new > 0 {
                sequence.last_token = Some(now);
            }
            if let Some(reason) = finish {
                finished.push((sequence.id, reason));
            }
        }
        let asked = plan.iter().filter(|planned| planned.draft > 0);
        let kept: Vec<Kept<'_>> = asked
            .map(|planned| &self.scheduler.running[planned.index])
            .map(|sequence| Kept {
                id: sequence.id,
                tokens: &sequence.tokens,
            })
            .collect();
        self.runner.observe(&kept);
        self.check_step(plan);
        let blocks = &mut self.runner.pool.blocks;
        let ended = self
            .scheduler
            .remove(blocks, |s| finished.iter().any(|(id, _)| *id == s.id));
        for sequence in ended {
            let reason = finished.iter().find(|(id, _)| *id == sequence.id);
            let stopped = matches!(reason, Some((_, FinishReason::Stop { .. })));
            self.end(sequence, if stopped { "stop" } else { "length" });
        }
        self.scheduler.running.iter_mut().for_each(Sequence::flush);
    }

    /// Last words about, and to, a sequence whose blocks are free already.
    fn end(&mut self, mut sequence: Sequence, reason: &str) {
        self.runner.forget(sequence.id);
        if !sequence.admitted {
            self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        let stats = &self.shared.stats;
        let seconds = sequence.arrived.elapsed().as_secs_f64();
        stats.e2e_request_latency.observe(seconds);
        let usage = sequence.usage;
        tracing::info!(
            id = sequence.id,
            reason,
            prompt_tokens = sequence.prompt_len,
            output_tokens = sequence.output_len(),
            seconds = format_args!("{seconds:.3}"),
            rounds = usage.rounds,
            drafted = usage.drafted,
            synthetic_acceptance = sequence.synthetic_acceptance,
            accepted = usage.accepted,
            acceptance_rate = format_args!("{:.3}", usage.acceptance_rate()),
            mean_accepted_length = format_args!("{:.2}", usage.mean_accepted_length()),
            "request done"
        );
        sequence.flush();
    }

    /// A step failed: everyone who was in it is told, and the pools start anew.
    fn fail_running(&mut self, error: Error) {
        tracing::error!("engine step failed: {error}");
        let blocks = &mut self.runner.pool.blocks;
        let running: Vec<SeqId> = self.scheduler.running.iter().map(|s| s.id).collect();
        for mut sequence in self.scheduler.remove(blocks, |s| running.contains(&s.id)) {
            sequence.tell(Event::Failed(error.clone()));
            self.end(sequence, "error");
        }
    }

    /// The thread ends: whoever is left is told.
    fn fail_all(&mut self) {
        let blocks = &mut self.runner.pool.blocks;
        for mut sequence in self.scheduler.remove(blocks, |_| true) {
            sequence.tell(Event::Failed(Error::shutting_down()));
            self.end(sequence, "abort");
        }
        self.check_books();
    }

    /// Integrity of the target's pool after a step, while all who were in it are still there; for
    /// tests, as it looks at every block.
    fn check_step(&self, plan: &[Planned]) {
        if cfg!(debug_assertions) {
            let (blocks, running) = (&self.runner.pool.blocks, &self.scheduler.running);
            let checked = blocks.check(running.iter().map(|s| &s.table));
            debug_assert_eq!(checked, Ok(()), "after a step");
            for sequence in plan.iter().map(|planned| &running[planned.index]) {
                let held = sequence.table.blocks().len();
                let certain = blocks.blocks_for(sequence.tokens.len());
                debug_assert!(
                    held <= certain,
                    "{held} blocks for {certain} blocks of tokens"
                );
            }
        }
    }

    /// Integrity: when no request is alive both pools are wholly free.
    fn check_books(&mut self) {
        if std::mem::replace(&mut self.checked, true) {
            return;
        }
        self.note_usage();
        if let Err(leak) = self.runner.check_idle() {
            debug_assert!(false, "idle, but {leak}");
            tracing::error!("idle, but {leak}");
        }
    }

    /// Books of a plan: first admissions, preemptions, gauges.
    fn note_plan(&mut self, plan: &[Planned], preempted: &[SeqId]) {
        let stats = &self.shared.stats;
        for planned in plan {
            let sequence = &mut self.scheduler.running[planned.index];
            if !std::mem::replace(&mut sequence.admitted, true) {
                self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
                stats.prompt_tokens.inc_by(sequence.prompt_len as u64);
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
        stats
            .requests_running
            .set(self.scheduler.running.len() as i64);
        stats
            .requests_waiting
            .set(self.scheduler.waiting.len() as i64);
        stats.kv_cache_usage.set(self.runner.pool.blocks.usage());
        stats.draft_kv_cache_usage.set(self.runner.draft_kv_usage());
    }

    /// Cost of a step, if no prompt was in it: a prompt's rows would hide what a round costs.
    fn note_step(&self, plan: &[Planned], target_time: Duration) {
        if plan.iter().all(|planned| planned.rows == 1) {
            let stats = &self.shared.stats;
            stats.target_steps.inc();
            stats.target_seconds.inc_by(target_time.as_secs_f64());
        }
        self.shared.stats.note_draft_cost(self.runner.draft_cost());
    }
}

/// The plan in the runner's terms.
fn turns<'a>(running: &'a [Sequence], plan: &[Planned]) -> Vec<Turn<'a>> {
    plan.iter()
        .map(|planned| {
            let sequence = &running[planned.index];
            Turn {
                id: sequence.id,
                tokens: &sequence.tokens,
                prompt_len: sequence.prompt_len,
                kv_len: sequence.kv_len,
                rows: planned.rows,
                sample: sequence.wants_tokens() && planned.rows == sequence.pending(),
                draft: planned.draft,
                synthetic_acceptance: sequence.synthetic_acceptance,
                table: &sequence.table,
                params: &sequence.params,
                logprobs: sequence.logprobs,
                prompt_scores: sequence.unscored(planned.rows),
                prompt_logprobs: sequence.prompt_alternatives(),
            }
        })
        .collect()
}
