//! Which slots of a target's recurrent states belong to which sequences and prefixes. No tensors.
//!
//! A state takes in the tokens that are certain: those of prompts, and of a step without drafts; the accepted nodes of a
//! draft with the next step. So nothing is ever taken back. A prefix of a text can be shared where a copy of the state
//! was kept: after the whole blocks of a text, after those that a repeated prompt needs not compute, and where another
//! text had the same blocks.

use super::draft::SeqId;
use super::step::{SequenceState, StepInput, StepResult};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::PrefixRoot;
use foretoken_core::model::{KeptState, StateStart};
use std::collections::HashMap;

/// Bytes for copies of states, and the number of copies in any case and at most.
const STATE_COPY_BYTES: usize = 1 << 30;
const MIN_STATE_COPIES: usize = 4;
const MAX_STATE_COPIES: usize = 256;

/// Number of copies of states, of `bytes` bytes each, that are kept for prefixes that no sequence has.
pub fn max_state_copies(bytes: usize) -> usize {
    (STATE_COPY_BYTES / bytes).clamp(MIN_STATE_COPIES, MAX_STATE_COPIES)
}

/// The slots of a pool of states.
#[derive(Debug)]
pub struct StateSlots {
    block_size: usize,
    /// Maximum number of known copies; 0 = prefixes are not shared.
    max_copies: usize,
    /// Slots that nobody has, of `num_slots` that were ever used.
    free: Vec<u32>,
    num_slots: u32,
    sequences: HashMap<SeqId, SequenceSlots>,
    /// The copies that are known to all sequences.
    copies: Vec<StateCopy>,
    /// The beginnings of sequences that have not begun.
    beginnings: HashMap<SeqId, Beginning>,
    /// The copies that the step under way makes. A step that fails leaves them.
    planned: Vec<PlannedCopy>,
    /// What the sequences of the step under way had before it, if it may be taken back.
    before: Vec<(SeqId, Before)>,
    clock: u64,
}

/// What belongs to a running sequence.
#[derive(Debug)]
struct SequenceSlots {
    slot: u32,
    /// Number of tokens that its state has taken in.
    len: usize,
    /// The nodes that were accepted since.
    accepted: Vec<u16>,
    /// A length at which others share its blocks, but no state.
    wanted: Option<usize>,
    /// The copy after its last whole block, which becomes known when the sequence ends.
    last: Option<StateCopy>,
}

/// What a sequence had before a step that may be taken back.
#[derive(Debug, Clone, Copy)]
enum Before {
    /// Another slot, which the step does not change.
    Slot(u32),
    /// No slot: it begins with the step.
    Nothing(Option<Beginning>),
}

/// How a sequence is to begin.
#[derive(Debug, Clone, Copy)]
struct Beginning {
    /// Slot and number of tokens of the copy with which the sequence begins.
    copy: Option<(u32, usize)>,
    wanted: Option<usize>,
}

/// The state after a prefix.
#[derive(Debug)]
struct StateCopy {
    slot: u32,
    root: PrefixRoot,
    tokens: Box<[u32]>,
    /// When it was last used.
    used: u64,
    /// Whether nobody has to keep it elsewhere any more, or nobody may.
    is_kept: bool,
}

/// A copy that the step under way makes of the state of `id`.
#[derive(Debug)]
struct PlannedCopy {
    id: SeqId,
    copy: StateCopy,
    /// Whether it is known afterwards.
    is_shared: bool,
}

impl Before {
    /// The slot before.
    fn slot(self) -> Option<u32> {
        match self {
            Self::Slot(slot) => Some(slot),
            Self::Nothing(_) => None,
        }
    }
}

impl StateCopy {
    /// Whether it is that after all of `tokens`.
    fn is_of(&self, root: PrefixRoot, tokens: &[u32]) -> bool {
        self.root == root && *self.tokens == *tokens
    }
}

impl StateSlots {
    /// Slots for a pool with blocks of `block_size` tokens, with at most `max_copies` copies for prefixes that no
    /// sequence has.
    pub fn new(block_size: usize, max_copies: usize) -> Self {
        Self {
            block_size,
            max_copies,
            free: Vec::new(),
            num_slots: 0,
            sequences: HashMap::new(),
            copies: Vec::new(),
            beginnings: HashMap::new(),
            planned: Vec::new(),
            before: Vec::new(),
            clock: 0,
        }
    }

    /// Shares no prefixes.
    pub fn share_nothing(&mut self) {
        self.max_copies = 0;
    }

    /// Number of the first `len` tokens of a sequence, whose K and V are cached, that have a state, too. If the
    /// sequence begins after so many tokens, it begins with this state.
    pub fn resume(&mut self, state: &SequenceState, len: usize) -> usize {
        let (root, tokens) = (state.prefix_root(), &state.tokens[..len]);
        self.clock += 1;
        let found = self.copies.iter_mut();
        let found = found.filter(|copy| copy.root == root && tokens.starts_with(&copy.tokens));
        let copy = found.max_by_key(|copy| copy.tokens.len()).map(|copy| {
            copy.used = self.clock;
            (copy.slot, copy.tokens.len())
        });
        let known = copy.map_or(0, |(_, len)| len);
        let wanted = (known < len).then_some(len);
        self.beginnings.insert(state.id, Beginning { copy, wanted });
        known
    }

    /// The states of the inputs of a step. After it, call [`StateSlots::finish`], or [`StateSlots::take_back`] if the step
    /// `is_tentative`: then it leaves the states before it as they are.
    ///
    /// # Errors
    /// If a sequence begins where there is no state, or a tentative step comes after one with drafts.
    pub fn plan(&mut self, inputs: &[StepInput<'_>], is_tentative: bool) -> Result<Vec<KeptState>> {
        // What a step that failed has left.
        self.take_back();
        let starts = inputs.iter().map(|input| {
            let start = self.start(input.state, is_tentative)?;
            if is_tentative && start == StateStart::Kept {
                return self.in_another_slot(input.state.id);
            }
            Ok(start)
        });
        let starts = starts.collect::<Result<Vec<_>>>()?;
        let states = inputs.iter().zip(starts);
        states
            .map(|(input, start)| self.kept(input, start, is_tentative))
            .collect()
    }

    /// Lets a sequence go on in another slot, with a copy of its state.
    fn in_another_slot(&mut self, id: SeqId) -> Result<StateStart> {
        let slot = self.take_slot();
        let sequence = self.sequences.get_mut(&id);
        // A copy has no nodes.
        let Some(sequence) = sequence.filter(|sequence| sequence.accepted.is_empty()) else {
            self.free.push(slot);
            return Err(Error::internal("a tentative step after one with drafts"));
        };
        let before = std::mem::replace(&mut sequence.slot, slot);
        self.before.push((id, Before::Slot(before)));
        Ok(StateStart::CopyOf(before))
    }

    /// Where the state of a sequence comes from; gives a slot to one that begins.
    fn start(&mut self, state: &SequenceState, is_tentative: bool) -> Result<StateStart> {
        if let Some(sequence) = self.sequences.get_mut(&state.id) {
            let count = state.kv_len.checked_sub(sequence.len);
            let count = count.filter(|&count| count <= sequence.accepted.len());
            let count = count.ok_or_else(|| {
                let (taken, len) = (sequence.len, state.kv_len);
                Error::internal(format!("a state of {taken} tokens, of {len} in the pool"))
            })?;
            sequence.accepted.truncate(count);
            return Ok(StateStart::Kept);
        }
        let beginning = self.beginnings.remove(&state.id);
        let copy = beginning.as_ref().and_then(|beginning| beginning.copy);
        let start = match copy {
            _ if state.kv_len == 0 => StateStart::Empty,
            Some((slot, len)) if len == state.kv_len => StateStart::CopyOf(slot),
            _ => return Err(Error::internal("a sequence begins without its state")),
        };
        let sequence = SequenceSlots {
            slot: self.take_slot(),
            len: state.kv_len,
            accepted: Vec::new(),
            wanted: beginning.and_then(|beginning| beginning.wanted),
            last: None,
        };
        self.sequences.insert(state.id, sequence);
        if is_tentative {
            self.before.push((state.id, Before::Nothing(beginning)));
        }
        Ok(start)
    }

    /// The state of an input, and which copies are made of it.
    fn kept(
        &mut self,
        input: &StepInput<'_>,
        start: StateStart,
        is_tentative: bool,
    ) -> Result<KeptState> {
        let (state, block_size) = (&*input.state, self.block_size);
        let end = state.kv_len + input.rows;
        let sequence = self.sequences.get_mut(&state.id);
        let sequence = sequence.ok_or_else(|| Error::internal("a sequence has no state"))?;
        let first = sequence.len;
        let last = end / block_size * block_size;
        // Others may have the same prompt, whose last token each computes.
        let of_prompt = state.prompt_len.saturating_sub(1) / block_size * block_size;
        let shared = [Some(of_prompt), sequence.wanted].into_iter().flatten();
        let own = (end != state.prompt_len).then_some((last, false));
        let mut copies: Vec<_> = shared.map(|len| (len, true)).chain(own).collect();
        // Of equal lengths the shared one stays.
        copies.sort_by_key(|&(len, _)| len);
        copies.dedup_by_key(|(len, _)| *len);
        copies.retain(|&(len, _)| {
            let known = |copy: &StateCopy| copy.is_of(state.prefix_root(), &state.tokens[..len]);
            let is_new = self.max_copies > 0 && len > first && len <= end;
            // Another sequence of the step may begin with the same tokens.
            let planned = self.planned.iter().filter(|planned| planned.is_shared);
            let planned = planned.map(|planned| &planned.copy);
            is_new && !self.copies.iter().chain(planned).any(known)
        });
        let mut kept = KeptState {
            slot: sequence.slot,
            start,
            accepted: std::mem::take(&mut sequence.accepted),
            copies: Vec::new(),
        };
        // The copy at an earlier block makes room for that of a later one. A tentative step makes room when it is done.
        let before = sequence
            .last
            .take_if(|_| !is_tentative && copies.iter().any(|(_, is_shared)| !is_shared));
        self.free.extend(before.map(|copy| copy.slot));
        for (len, is_shared) in copies {
            if is_shared && !is_tentative && !self.make_room() {
                continue;
            }
            let slot = self.take_slot();
            kept.copies.push((len - first, slot));
            let copy = StateCopy {
                slot,
                root: state.prefix_root(),
                tokens: state.tokens[..len].into(),
                used: self.clock,
                is_kept: !state.draft_context.may_persist,
            };
            let id = state.id;
            self.planned.push(PlannedCopy {
                id,
                copy,
                is_shared,
            });
        }
        Ok(kept)
    }

    /// Notes what a planned step has done.
    pub fn finish(&mut self, inputs: &[StepInput<'_>], outputs: &[StepResult]) {
        let before = self.before.drain(..);
        self.free
            .extend(before.filter_map(|(_, before)| before.slot()));
        for (input, output) in inputs.iter().zip(outputs) {
            if let Some(sequence) = self.sequences.get_mut(&input.state.id) {
                sequence.len = input.state.kv_len + input.rows;
                let path = output.iter().flat_map(|output| &output.path);
                sequence.accepted = path.map(|&node| node as u16).collect();
            }
        }
        let results = inputs.iter().zip(outputs);
        let failed = results.filter(|(_, output)| output.is_err());
        let failed: Vec<SeqId> = failed.map(|(input, _)| input.state.id).collect();
        for PlannedCopy {
            id,
            copy,
            is_shared,
        } in std::mem::take(&mut self.planned)
        {
            match self.sequences.get_mut(&id) {
                // What a model made of it may not be what it should be.
                _ if failed.contains(&id) => self.free.push(copy.slot),
                Some(sequence) if !is_shared => {
                    let before = sequence.last.replace(copy);
                    self.free.extend(before.map(|copy| copy.slot));
                }
                _ => self.publish(copy),
            }
        }
    }

    /// Takes back a planned step: frees the slots of its copies, and gives sequences what they had if it was tentative.
    pub fn take_back(&mut self) {
        let planned = self.planned.drain(..);
        self.free.extend(planned.map(|planned| planned.copy.slot));
        for (id, before) in std::mem::take(&mut self.before) {
            let freed = match (self.sequences.remove(&id), before) {
                (Some(mut sequence), Before::Slot(slot)) => {
                    let freed = std::mem::replace(&mut sequence.slot, slot);
                    self.sequences.insert(id, sequence);
                    Some(freed)
                }
                (Some(sequence), Before::Nothing(beginning)) => {
                    self.beginnings
                        .extend(beginning.map(|beginning| (id, beginning)));
                    Some(sequence.slot)
                }
                // It has ended since.
                (None, before) => before.slot(),
            };
            self.free.extend(freed);
        }
    }

    /// Frees the state of a sequence that ended, or was preempted; the copy after its last whole block becomes known.
    pub fn release(&mut self, id: SeqId) {
        self.beginnings.remove(&id);
        if let Some(sequence) = self.sequences.remove(&id) {
            self.free.push(sequence.slot);
            if let Some(copy) = sequence.last {
                self.publish(copy);
            }
        }
    }

    /// Forgets all copies but those with which sequences are to begin.
    pub fn reset_prefix_cache(&mut self) {
        let chosen = self.chosen();
        let (kept, others) = (self.copies.drain(..)).partition(|copy| chosen.contains(&copy.slot));
        self.copies = kept;
        let of_sequences = self.sequences.values_mut();
        let last = of_sequences.filter_map(|sequence| sequence.last.take());
        let all = last.chain(others);
        self.free.extend(all.map(|copy: StateCopy| copy.slot));
    }

    /// Calls `keep` with what each known copy is of, and its slot, unless it was kept before. It returns whether it is.
    pub fn keep_copies(&mut self, mut keep: impl FnMut(PrefixRoot, &[u32], u32) -> bool) {
        for copy in self.copies.iter_mut().filter(|copy| !copy.is_kept) {
            copy.is_kept = keep(copy.root, &copy.tokens, copy.slot);
        }
    }

    /// Makes the state after `tokens`, which `write` writes to a slot, known to all sequences. Returns whether it is
    /// known.
    pub fn add_copy(
        &mut self,
        root: PrefixRoot,
        tokens: &[u32],
        write: impl FnOnce(u32) -> bool,
    ) -> bool {
        if self.max_copies == 0 {
            return false;
        }
        let slot = self.take_slot();
        if !write(slot) {
            self.free.push(slot);
            return false;
        }
        self.clock += 1;
        self.publish(StateCopy {
            slot,
            root,
            tokens: tokens.into(),
            used: self.clock,
            is_kept: true,
        });
        true
    }

    /// The slots of the copies with which sequences are to begin.
    fn chosen(&self) -> Vec<u32> {
        let copies = self
            .beginnings
            .values()
            .filter_map(|beginning| beginning.copy);
        copies.map(|(slot, _)| slot).collect()
    }

    /// Makes a copy known, in place of the one that was used longest ago if there are too many.
    fn publish(&mut self, copy: StateCopy) {
        let is_known = self
            .copies
            .iter()
            .any(|other| other.is_of(copy.root, &copy.tokens));
        if !is_known && self.copies.len() < self.max_copies {
            return self.copies.push(copy);
        }
        let freed = match self.oldest().filter(|_| !is_known) {
            Some(oldest) => std::mem::replace(&mut self.copies[oldest], copy),
            None => copy,
        };
        self.free.push(freed.slot);
    }

    /// Makes room for one more known copy, beside those that the step under way makes. Returns whether there is room: not
    /// if these are all, or sequences are to begin with the others.
    fn make_room(&mut self) -> bool {
        let planned = self.planned.iter().filter(|planned| planned.is_shared);
        if self.copies.len() + planned.count() < self.max_copies {
            return true;
        }
        let oldest = self.oldest();
        let freed = oldest.map(|oldest| self.copies.swap_remove(oldest).slot);
        self.free.extend(freed);
        freed.is_some()
    }

    /// The copy that was used longest ago, of those with which no sequence is to begin.
    fn oldest(&self) -> Option<usize> {
        let chosen = self.chosen();
        let copies = self.copies.iter().enumerate();
        let others = copies.filter(|(_, copy)| !chosen.contains(&copy.slot));
        others.min_by_key(|(_, copy)| copy.used).map(|(i, _)| i)
    }

    fn take_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.num_slots += 1;
            self.num_slots - 1
        })
    }

    /// Checks that each slot has one owner.
    ///
    /// # Errors
    /// The inconsistency found.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        let own = self.sequences.values().flat_map(|sequence| {
            let last = sequence.last.iter().map(|copy| copy.slot);
            last.chain([sequence.slot])
        });
        let planned = self.planned.iter().map(|planned| planned.copy.slot);
        let before = self.before.iter().filter_map(|(_, before)| before.slot());
        let planned = planned.chain(before);
        let copies = self.copies.iter().map(|copy| copy.slot);
        let others = planned.chain(copies).chain(self.free.iter().copied());
        let mut all: Vec<u32> = own.chain(others).collect();
        all.sort_unstable();
        if all.iter().copied().eq(0..self.num_slots) {
            return Ok(());
        }
        Err(format!(
            "{} slots of states have the owners of {all:?}",
            self.num_slots
        ))
    }

    /// Number of sequences that have a state.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }
}

#[cfg(test)]
mod tests;
