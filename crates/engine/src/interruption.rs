//! When a step that reads prompts alone is given up.

use super::Engine;
use super::request::Event;
use super::scheduler::ScheduledSequence;
use super::shared::EngineShared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// What interrupts a step: a message to the engine thread, such as a request, or that all who wait for the step are gone.
pub struct Interruption {
    shared: Arc<EngineShared>,
    receivers: Vec<UnboundedSender<Event>>,
    started: Instant,
    /// See [`PromptChunk::patience`](super::chunk::PromptChunk::patience).
    patience: f64,
}

impl Interruption {
    /// Whether the step, of which this share is `done`, is to be given up. Who interrupts it waits for the rest of it if that
    /// takes a moment only, because the step's work is lost otherwise.
    pub fn is_due(&self, done: f64) -> bool {
        let left = self.started.elapsed().as_secs_f64() * (1.0 - done) / done;
        let are_gone = || self.receivers.iter().all(UnboundedSender::is_closed);
        left > self.patience && (self.shared.unread.load(Ordering::SeqCst) > 0 || are_gone())
    }
}

impl Engine {
    /// What interrupts the step of `plan`, which starts now; `None` = nothing.
    pub(super) fn interruption(&self, plan: &[ScheduledSequence]) -> Option<Interruption> {
        let running = &self.scheduler.running;
        (self.scheduler.may_be_interrupted).then(|| Interruption {
            shared: self.shared.clone(),
            receivers: plan.iter().map(|one| running[one.index].events()).collect(),
            started: Instant::now(),
            patience: self.scheduler.prompt_chunk.patience(),
        })
    }

    /// The step of `plan` was interrupted: its rows are pending as before.
    pub(super) fn note_interruption(&mut self, plan: &[ScheduledSequence]) {
        let rows: usize = plan.iter().map(|planned| planned.rows).sum();
        self.shared.stats.interrupted_tokens.inc_by(rows as u64);
        self.scheduler.prompt_chunk.note_others();
        self.check_step(plan);
    }
}
