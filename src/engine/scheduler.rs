//! Who runs in the next step, and with how many rows. No tensors.

use super::sequence::Sequence;
use crate::kv::BlockAllocator;
use crate::spec::SeqId;
use std::collections::VecDeque;

/// Rows of prompt log-probabilities in one step at most: each costs a row of logits over the whole
/// vocabulary.
const MAX_SCORED_ROWS: usize = 256;

/// What one running sequence does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledSequence {
    /// Index into [`Scheduler::running`].
    pub index: usize,
    /// Pending tokens to feed.
    pub rows: usize,
    /// Draft tokens to ask for.
    pub draft: usize,
}

/// First come, first served, over one pool of blocks. A draft pool of as many blocks needs no
/// scheduling of its own: what a sequence drafts is never more than what it has room for here.
#[derive(Debug)]
pub struct Scheduler {
    /// In order of arrival; preempted ones come first.
    pub waiting: VecDeque<Sequence>,
    /// In order of arrival.
    pub running: Vec<Sequence>,
    /// The pool, which all tables are of.
    blocks: BlockAllocator,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

impl Scheduler {
    /// Schedules over an empty pool. `max_num_batched_tokens` must have room for a full round of
    /// `max_num_seqs` sequences.
    pub fn new(blocks: BlockAllocator, max_num_seqs: usize, max_num_batched_tokens: usize) -> Self {
        Self {
            blocks,
            waiting: VecDeque::new(),
            running: Vec::new(),
            max_num_seqs,
            max_num_batched_tokens,
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Takes out every sequence that `gone` says is to go and frees its blocks.
    pub fn remove(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed: Vec<Sequence> = self.running.extract_if(.., |s| gone(s)).collect();
        for sequence in &mut removed {
            self.blocks.release(&mut sequence.state.table);
        }
        for _ in 0..self.waiting.len() {
            if let Some(sequence) = self.waiting.pop_front() {
                if gone(&sequence) {
                    removed.push(sequence);
                } else {
                    self.waiting.push_back(sequence);
                }
            }
        }
        removed
    }

    /// Plans a step: makes room for what must run, admits, and hands out what is left to drafts.
    /// The second value names the sequences that were preempted for it.
    pub fn schedule(&mut self) -> (Vec<ScheduledSequence>, Vec<SeqId>) {
        let preempted = self.make_room();
        if preempted.is_empty() {
            self.admit();
        }
        let mut plan = self.share_budget();
        self.extend_drafts(&mut plan);
        (plan, preempted)
    }

    /// Gives back the blocks of a running sequence that no token of it needs.
    pub fn trim(&mut self, index: usize) {
        let state = &mut self.running[index].state;
        self.blocks
            .truncate_to(&mut state.table, state.tokens.len());
    }

    /// Blocks that `tokens` tokens take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        self.blocks.blocks_for(tokens)
    }

    /// Fraction of the pool in use, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.blocks.usage()
    }

    /// Checks that the pool is held by the running sequences and by nobody else; looks at every block.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.blocks
            .check(self.running.iter().map(|sequence| &sequence.state.table))
    }

    /// Room for every running sequence's tokens and firm drafts, oldest first; the youngest is
    /// preempted where the pool runs out.
    fn make_room(&mut self) -> Vec<SeqId> {
        let mut preempted = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let len = sequence.state.tokens.len() + sequence.firm_draft();
            if (self.blocks.reserve(&mut sequence.state.table, len)).is_ok() {
                index += 1;
            } else if let Some(mut youngest) = self.running.pop() {
                self.blocks.release(&mut youngest.state.table);
                youngest.restart();
                preempted.push(youngest.state.id);
                self.waiting.push_front(youngest);
            }
        }
        preempted
    }

    /// Admits from the queue while there is room for the whole sequence and a block to grow for
    /// everyone who runs (or else the newcomer would be preempted next).
    fn admit(&mut self) {
        let blocks = &mut self.blocks;
        while self.running.len() < self.max_num_seqs {
            let Some(sequence) = self.waiting.front_mut() else {
                return;
            };
            let len = sequence.state.tokens.len() + sequence.firm_draft();
            let spare = blocks.num_free().saturating_sub(blocks.blocks_for(len));
            let fits = self.running.is_empty() || spare >= self.running.len();
            if !fits || blocks.reserve(&mut sequence.state.table, len).is_err() {
                return;
            }
            if let Some(sequence) = self.waiting.pop_front() {
                let place = self
                    .running
                    .partition_point(|other| other.state.id < sequence.state.id);
                self.running.insert(place, sequence);
            }
        }
    }

    /// Divides the rows of a step: first everyone who only decodes, then prompts by age, in chunks.
    fn share_budget(&self) -> Vec<ScheduledSequence> {
        let mut budget = self.max_num_batched_tokens;
        let mut scored = MAX_SCORED_ROWS;
        let mut plan = Vec::with_capacity(self.running.len());
        let (decoding, prompts): (Vec<usize>, Vec<usize>) =
            (0..self.running.len()).partition(|&i| self.running[i].pending() == 1);
        for index in decoding.into_iter().chain(prompts) {
            let sequence = &self.running[index];
            let pending = sequence.pending();
            let draft = sequence.firm_draft();
            let mut rows = pending.min(budget);
            let scores = sequence.unscored(rows).len();
            rows -= scores.saturating_sub(scored);
            // The last row comes with the whole draft or waits for a step that has room for it.
            if rows == pending && rows + draft > budget {
                rows -= 1;
            }
            if rows > 0 {
                let draft = if rows == pending { draft } else { 0 };
                scored -= sequence.unscored(rows).len();
                budget -= rows + draft;
                plan.push(ScheduledSequence { index, rows, draft });
            }
        }
        plan
    }

    /// Gives greedy sequences drafts from the rows and blocks that nobody needs, oldest first.
    fn extend_drafts(&mut self, plan: &mut [ScheduledSequence]) {
        let used: usize = plan
            .iter()
            .map(|planned| planned.rows + planned.draft)
            .sum();
        let mut budget = self.max_num_batched_tokens - used;
        for planned in plan {
            let sequence = &mut self.running[planned.index];
            if planned.rows < sequence.pending() || !sequence.draft_is_elastic() {
                continue;
            }
            let len = sequence.state.tokens.len();
            let wanted = len + sequence.draft_len().min(budget);
            let table = &mut sequence.state.table;
            let longest = self.blocks.longest(table, wanted);
            if self.blocks.reserve(table, longest).is_ok() {
                planned.draft = longest - len;
                budget -= planned.draft;
            }
        }
    }
}
