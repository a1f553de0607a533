//! What the engine says of its work: metrics, and a log line for each request.

use super::Engine;
use super::request::SequenceEnd;
use super::scheduler::ScheduledSequence;
use super::sequence::Sequence;
use crate::spec::{SeqId, StepResult};
use foretoken_core::sampling::LossyRule;
use std::time::Duration;

impl Engine {
    /// Records and sends the end of a sequence whose blocks are already free.
    pub(super) fn end(&mut self, mut sequence: Sequence) {
        let state = &sequence.state;
        self.guard("the end of a sequence", |engine| engine.runner.end(state));
        sequence.permit = None;
        let stats = &self.shared.stats;
        let times = sequence.times;
        let seconds = times.arrived.elapsed().as_secs_f64();
        stats.e2e_request_latency.observe(seconds);
        (stats.requests).note_end(times, sequence.state.prompt_len, sequence.output_len());
        if !sequence.single_round {
            log_end(&sequence, seconds);
        }
        if let Some(watch) = sequence.watch.take() {
            let end = SequenceEnd {
                times,
                prompt_tokens: sequence.state.prompt_len,
                cached_tokens: sequence.cached_tokens,
                output_tokens: sequence.output_len(),
                spec: sequence.usage,
            };
            self.guard("the watch of a sequence", |_| watch.ended(end));
        }
        sequence.flush();
    }

    /// Records a plan: first admissions, preemptions, gauges.
    pub(super) fn note_plan(&mut self, plan: &[ScheduledSequence], preempted: &[SeqId]) {
        let stats = &self.shared.stats;
        let has_prefix_cache = self.scheduler.has_prefix_cache();
        for planned in plan {
            let sequence = &mut self.scheduler.running[planned.index];
            if sequence.permit.take().is_some() {
                let tokens = sequence.state.prompt_len as u64;
                stats.prompt_tokens.inc_by(tokens);
                if let Some(disk) = &self.disk {
                    let (blocks, sequence) = self.scheduler.cached(planned.index);
                    let count = sequence.cached_tokens / disk.block_size();
                    disk.note_use(blocks, &sequence.state.table, count);
                }
                let sequence = &self.scheduler.running[planned.index];
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

    pub(super) fn note_usage(&self) {
        let stats = &self.shared.stats;
        let draft_kv_usage = self.runner.draft_kv_usage();
        (stats.drafter_off).set(i64::from(self.runner.drafter_is_off()));
        stats
            .requests_running
            .set(self.scheduler.running.len() as i64);
        stats
            .requests_waiting
            .set(self.scheduler.waiting.sequences.len() as i64);
        if let Some(adapters) = stats.adapters.get() {
            let running = self.scheduler.running.iter();
            let waiting = self.scheduler.waiting.sequences.values();
            adapters.note(
                running.filter_map(Sequence::adapter),
                waiting.filter_map(Sequence::adapter),
            );
        }
        stats.kv_cache_usage.set(self.scheduler.kv_usage());
        stats.draft_kv_cache_usage.set(draft_kv_usage);
    }

    /// Records the cost of a step, unless it contained prompt rows, which would hide the cost of a
    /// round.
    pub(super) fn note_step(&self, plan: &[ScheduledSequence], target_time: Duration) {
        if plan.iter().all(|planned| planned.rows == 1) {
            let stats = &self.shared.stats;
            stats.target_steps.inc();
            stats.target_seconds.inc_by(target_time.as_secs_f64());
        }
        (self.shared.stats).note_experts_read(self.runner.experts_read());
        if let Some(speed_up) = self.runner.speed_up() {
            self.shared.stats.note_draft_cost(self.runner.draft_cost());
            self.shared.stats.spec_speed_up.set(speed_up);
            self.shared.stats.note_pruned(self.runner.pruned());
        }
    }

    /// Records a step's wall time, drafts and sampling included, to adjust the prompt rows of the
    /// next steps.
    pub(super) fn note_chunk(
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

/// The line of a request in the log.
fn log_end(sequence: &Sequence, seconds: f64) {
    let (usage, times) = (sequence.usage, sequence.times);
    // What came after a stop string is no part of the text.
    let output_tokens = sequence.text_tokens.get().copied();
    let output_tokens = output_tokens.unwrap_or(sequence.output_len());
    tracing::info!(
        id = sequence.state.id,
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
        lossy_acceptance = sequence.state.lossy.map(LossyRule::name),
        lossy = sequence.state.lossy.map(|_| usage.lossy),
        acceptance_rate = thousandths(usage.acceptance_rate()),
        mean_accepted_length = thousandths(usage.mean_accepted_length()),
        "request done"
    );
}

/// A number as log lines show it, which in JSON is a number, too.
fn thousandths(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}
