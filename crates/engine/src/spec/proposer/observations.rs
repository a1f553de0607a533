//! What the drafter observes of committed tokens, and when: in time for its drafts, or beside the next forward.

use super::Proposer;
use crate::spec::draft::Committed;
use crate::spec::step::{SequenceState, StepInput};

impl Proposer {
    /// See [`Drafter::observe`](crate::spec::Drafter::observe). Of sequences that were not asked for a draft in this step, a drafter that
    /// [observes late](crate::spec::Drafter::observes_late) hears later.
    pub fn observe(&mut self, committed: &[Committed<'_>]) {
        if self.drafter.observes_late() {
            let (now, later): (Vec<_>, Vec<_>) =
                (committed.iter().cloned()).partition(|one| self.asked.contains(&one.id));
            for one in later {
                let late = &mut self.sequence(one.id).late;
                late.get_or_insert(one.new.start);
            }
            if !now.is_empty() {
                (self.drafter).call("observe", |drafter| drafter.observe(&now));
            }
            return;
        }
        if !self.drafter.learns() {
            (self.drafter).call("observe", |drafter| drafter.observe(committed));
            return;
        }
        // What is learned from need not be read.
        let read = committed.iter().map(|one| {
            let sequence = self.sequences.get(&one.id);
            let is_read = sequence.is_some_and(|sequence| sequence.is_read);
            Committed {
                hidden: one.hidden.clone().filter(|_| is_read),
                ..one.clone()
            }
        });
        let read: Vec<Committed<'_>> = read.collect();
        self.drafter.call("observe", |drafter| {
            drafter.learn(committed);
            drafter.observe(&read);
        });
    }

    /// Lets the drafter observe the sequences that it has not observed so far, beside the forward of a step with these
    /// inputs; see [`Drafter::observes_late`](crate::spec::Drafter::observes_late).
    pub fn observe_late(&mut self, inputs: &[StepInput<'_>]) {
        if self.drafter.observes_late() {
            let late: Vec<_> = (inputs.iter())
                .filter_map(|input| self.take_late(input.state))
                .collect();
            // Also without any: with each step more of what has ended is learned.
            (self.drafter).call("observe", |drafter| drafter.observe(&late));
        }
    }

    /// Lets the drafter observe what it has not of the sequences that are about to be `asked`.
    pub(super) fn observe_asked(&mut self, inputs: &[StepInput<'_>], asked: &[bool]) {
        let asked = inputs.iter().zip(asked).filter(|(_, asked)| **asked);
        let asked: Vec<&SequenceState> = asked.map(|(input, _)| &*input.state).collect();
        self.asked = asked.iter().map(|state| state.id).collect();
        let late: Vec<_> = (asked.into_iter())
            .filter_map(|state| self.take_late(state))
            .collect();
        if !late.is_empty() {
            (self.drafter).call("observe", |drafter| drafter.observe(&late));
        }
    }

    /// What the drafter has not observed of a sequence.
    pub(super) fn take_late<'a>(&mut self, state: &'a SequenceState) -> Option<Committed<'a>> {
        let sequence = self.sequences.get_mut(&state.id)?;
        Some(state.committed(sequence.late.take()?..state.kv_len))
    }
}
