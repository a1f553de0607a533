//! Which texts the drafter reads, and from which token on.

use super::Proposer;
use crate::spec::step::{SequenceState, StepInput};
use foretoken_core::error::Result;

impl Proposer {
    /// Measures what a head that reads costs the target's forwards, of which `target` runs one and returns its seconds. If it
    /// cannot be measured, and of other drafters, it counts as nothing.
    pub fn measure_displacement(&mut self, target: impl FnMut() -> Result<f64>) {
        if !self.reads_states() {
            return;
        }
        match self.drafter.pool(|pool| pool.measure_displacement(target)) {
            None => (),
            Some(Ok(measured)) => {
                tracing::debug!(
                    share = measured.share(),
                    "the head slows the target's forwards"
                );
                self.reading.displacement = measured;
            }
            Some(Err(error)) => tracing::warn!("the head was not measured: {error}"),
        }
    }

    /// Decides now and then which kinds of texts a head reads, with so many sequences.
    ///
    /// A step that reads a prompt, or whose requests want no drafts, has no draft length. It says nothing of the drafts
    /// of those to come, so that the longest length so far counts.
    pub(super) fn begin_reading(&mut self, sequences: usize, context: usize) {
        if self.reads_states()
            && self.reading.begin_step(sequences)
            && let Some(typical) = self.drafter.pool(|pool| pool.typical(self.longest))
        {
            self.reading.look(&self.budget, &typical, context);
        }
    }

    /// Whether the drafter learns from the target's hidden states of this sequence.
    pub(super) fn learns_from(&self, input: &StepInput<'_>) -> bool {
        input.may_draft && self.drafter.learns() && input.state.draft_context.may_persist
    }

    /// Whether the drafter is a head with a pool, which need not read every text.
    pub(super) fn reads_states(&self) -> bool {
        !self.budget.is_fixed() && !self.drafter.taps().is_empty()
    }

    /// Whether the drafter reads the target's hidden states of this sequence from here on. A sequence that was read is
    /// read on: what follows costs little.
    pub fn is_read(&mut self, state: &SequenceState) -> bool {
        if self.sequence(state.id).is_read {
            return true;
        }
        let is_sampled = !state.sampler.params().is_greedy();
        let is_read = !self.reads_states()
            || state.has_fixed_draft()
            || self.reading.pays(state.id, is_sampled)
            || !self.reading.is_control(state.id, is_sampled) && self.hopes(state, is_sampled);
        self.sequence(state.id).is_read = is_read;
        is_read
    }

    /// Whether the drafter reads a text that is about to begin although that is not expected to pay.
    fn hopes(&mut self, state: &SequenceState, is_sampled: bool) -> bool {
        let seconds = self.reading.hopes(state.tokens.len(), is_sampled);
        let seconds = seconds.filter(|_| state.kv_len == 0);
        seconds.is_some_and(|seconds| self.budget.may_read(seconds))
    }

    /// See [`Drafter::resume`](crate::spec::Drafter::resume). `of_target` gives how many of so many first tokens the target
    /// need not compute: those before a state, if it is recurrent. The target begins where the last call says.
    pub fn resume(
        &mut self,
        state: &SequenceState,
        len: usize,
        mut of_target: impl FnMut(usize) -> usize,
    ) -> usize {
        // Those that begin together are the load of the steps to come.
        self.sequence(state.id).waits = false;
        let begun = self.sequences.values().filter(|one| !one.waits).count();
        self.begin_reading(begun, state.tokens.len());
        let alone = of_target(len);
        if !self.is_read(state) {
            return alone;
        }
        let scope = state.draft_context.scope;
        let mut resumed = alone;
        while let Some(seen) = self.drafter.call("resume", |drafter| {
            drafter.resume(state.id, &state.tokens, scope, resumed)
        }) && seen < resumed
        {
            resumed = of_target(seen);
        }
        let is_sampled = !state.sampler.params().is_greedy();
        let (reading, budget) = (&self.reading, &self.budget);
        if !self.reads_states() || reading.pays_again(budget, resumed..alone, is_sampled) {
            resumed
        } else {
            of_target(len)
        }
    }
}
