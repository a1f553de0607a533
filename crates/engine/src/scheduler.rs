//! Which sequences run in the next step, and with how many rows. No tensors.

mod admission;

use super::chunk::PromptChunk;
use super::options::StepLimits;
use super::queue::Queue;
use super::sequence::Sequence;
use crate::spec::SeqId;
use foretoken_core::kv::BlockAllocator;

/// Where a sequence begins that is about to be admitted.
pub trait Beginnings {
    /// Number of its first tokens that need not be computed, of the `cached` ones that are in the prefix cache. What they
    /// begin with is held for it.
    fn resume(&mut self, sequence: &Sequence, cached: usize) -> usize;

    /// Lets go of what is held for it: it is not admitted now.
    fn release(&mut self, sequence: &Sequence);

    /// Whether it waits for blocks that are read from elsewhere into the prefix cache, which has the first `cached` tokens.
    /// Of these, `resumed` need not be computed.
    fn awaits(&mut self, _sequence: &mut Sequence, _cached: usize, _resumed: usize) -> bool {
        false
    }
}

/// The share of one running sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledSequence {
    /// Index into [`Scheduler::running`].
    pub index: usize,
    /// Number of pending tokens to feed.
    pub rows: usize,
    /// Maximum number of draft tokens: those for which there are rows and blocks.
    pub nodes: usize,
}

/// Requests come in turn, over one pool of blocks (see `Queue` and `admission.rs`). A draft pool with as many
/// blocks needs no scheduling of its own: a sequence never drafts more than it has blocks for here, and of those that wait only
/// one that waits for the disk holds some.
#[derive(Debug)]
pub struct Scheduler {
    /// The sequences that wait for admission.
    pub waiting: Queue,
    /// The running sequences, in order of arrival. Sequences of one request have the same [`Sequence::group`].
    pub running: Vec<Sequence>,
    /// The pool to which all block tables belong.
    blocks: BlockAllocator,
    /// Limits the prompt rows of a step in which other sequences decode.
    pub prompt_chunk: PromptChunk,
    /// Maximum number of sequences that run in a step that can be interrupted by those who arrive; 0 = no step can.
    max_interruptible: usize,
    /// Whether the last plan is a chunk that takes longer than others may wait for it: it is to be interrupted for them.
    pub may_be_interrupted: bool,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// Whether each text is read in one step.
    reads_whole_texts: bool,
    limits: StepLimits,
    /// The first sequence that received no rows in the last step; it comes first in the next one.
    /// [`PROMPTS`] stands for all sequences that read their prompts; 0 means that all received
    /// rows.
    next: SeqId,
}

/// A value of [`Scheduler::next`] that is larger than every sequence's id.
const PROMPTS: SeqId = SeqId::MAX;

impl Scheduler {
    /// A scheduler over an empty pool. A step has at most `max_num_batched_tokens` rows, at least 1.
    pub fn new(
        blocks: BlockAllocator,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        prompt_chunk: PromptChunk,
        limits: StepLimits,
    ) -> Self {
        Self {
            blocks,
            waiting: Queue::default(),
            running: Vec::new(),
            prompt_chunk,
            max_interruptible: 0,
            may_be_interrupted: false,
            max_num_seqs,
            max_num_batched_tokens,
            reads_whole_texts: false,
            limits,
            next: 0,
        }
    }

    /// Lets each text be read in one step, of a model whose tokens see those after them. None has more tokens than a step has
    /// rows.
    pub fn with_whole_texts(self, reads_whole_texts: bool) -> Self {
        Self {
            reads_whole_texts,
            ..self
        }
    }

    /// Lets steps that only read prompts of one request take longer while no other request is there and at most
    /// `max_interruptible` sequences run, because such steps can be interrupted.
    pub fn with_interruptions(self, max_interruptible: usize) -> Self {
        Self {
            max_interruptible,
            ..self
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.sequences.is_empty() && self.running.is_empty()
    }

    /// Removes every sequence for which `gone` is true and frees its blocks.
    pub fn remove(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed: Vec<Sequence> = self.running.extract_if(.., |s| gone(s)).collect();
        for sequence in &mut removed {
            self.blocks.release(&mut sequence.state.table);
        }
        removed.extend(self.waiting.remove(gone));
        removed
    }

    /// Plans a step: makes room for running sequences, admits waiting ones, and gives the remaining
    /// rows to drafts. The second value lists the sequences preempted for this.
    pub fn schedule(
        &mut self,
        mut beginnings: impl Beginnings,
    ) -> (Vec<ScheduledSequence>, Vec<SeqId>) {
        let mut preempted = self.make_room();
        if preempted.is_empty() {
            preempted = self.admit(&mut beginnings);
        }
        let mut plan = self.share_budget();
        if !self.may_be_interrupted {
            self.extend_drafts(&mut plan);
        }
        (plan, preempted)
    }

    /// Caches the full blocks of what is in the pool of a running sequence, and frees those that none of its
    /// tokens needs.
    pub fn settle(&mut self, index: usize) {
        let state = &mut self.running[index].state;
        let (root, len) = (state.prefix_root(), state.tokens.len());
        self.blocks
            .cache(&mut state.table, root, &state.tokens[..state.kv_len]);
        self.blocks.truncate_to(&mut state.table, len);
    }

    /// The pool's blocks, and the running sequence at `index`, which has some of them.
    pub fn cached(&mut self, index: usize) -> (&mut BlockAllocator, &Sequence) {
        (&mut self.blocks, &self.running[index])
    }

    /// The pool's blocks.
    pub fn blocks_mut(&mut self) -> &mut BlockAllocator {
        &mut self.blocks
    }

    /// Whether prefixes are cached.
    pub fn has_prefix_cache(&self) -> bool {
        self.blocks.has_prefix_cache()
    }

    /// Forgets the cached prefixes. Running sequences go on, but nobody will share what they have computed.
    pub fn reset_prefix_cache(&mut self) {
        self.blocks.reset_prefix_cache();
    }

    /// Blocks that `tokens` tokens take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        self.blocks.blocks_for(tokens)
    }

    /// Fraction of the pool in use, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.blocks.usage()
    }

    /// Checks that only the running sequences hold blocks of the pool; looks at every block.
    ///
    /// # Errors
    /// The inconsistency found.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.blocks
            .check_invariants(self.running.iter().map(|sequence| &sequence.state.table))
    }

    /// Reserves blocks for every running sequence's tokens, oldest first. When the pool runs out, the
    /// youngest is preempted.
    fn make_room(&mut self) -> Vec<SeqId> {
        let mut preempted = Vec::new();
        let mut index = 0;
        while let Some(sequence) = self.running.get_mut(index) {
            let state = &mut sequence.state;
            if (self.blocks.reserve(&mut state.table, state.tokens.len())).is_ok() {
                index += 1;
            } else {
                preempted.push(self.preempt(self.running.len() - 1));
            }
        }
        preempted
    }

    /// Puts the running sequence at `index` back into the queue.
    fn preempt(&mut self, index: usize) -> SeqId {
        let mut sequence = self.running.remove(index);
        self.blocks.release(&mut sequence.state.table);
        sequence.restart();
        let id = sequence.state.id;
        self.waiting.put_back(sequence);
        id
    }

    /// Whether all sequences are of one request, and steps that read its prompts can be interrupted.
    fn is_one_request(&self) -> bool {
        let mut all = (self.running.iter()).chain(self.waiting.sequences.values());
        let group = self.running.first().map(|first| first.group);
        self.running.len() <= self.max_interruptible
            && all.all(|sequence| Some(sequence.group) == group && sequence.has_simple_prompt())
    }

    /// Divides the rows of a step: first among decoding sequences, then among prompts, in chunks that
    /// nobody waits for long. When the rows run out, the first sequence without any comes first in the
    /// next step, so every sequence gets its turn, prompts included.
    fn share_budget(&mut self) -> Vec<ScheduledSequence> {
        if self.reads_whole_texts {
            let mut share = StepRows::new(&self.running, self.max_num_batched_tokens, self.limits);
            share.whole_texts();
            return share.plan;
        }
        let is_one_request = self.is_one_request();
        let running = &self.running;
        let (decoding, prompts): (Vec<usize>, Vec<usize>) =
            (0..running.len()).partition(|&i| running[i].pending() == 1);
        let (later, first) =
            decoding.split_at(decoding.partition_point(|&i| running[i].state.id < self.next));
        let chunk = self.prompt_chunk.rows();
        let is_short = |&index: &usize| running[index].pending() <= chunk;
        let are_short = prompts.iter().all(is_short);
        let is_undisturbed = is_one_request && decoding.is_empty() && !are_short;
        let alone = self.prompt_chunk.rows_alone();
        let chunk = if is_undisturbed {
            self.prompt_chunk.next_undisturbed()
        } else if !decoding.is_empty() {
            chunk
        } else if are_short {
            // None of them waits for more than others like it, and together they make a full batch.
            self.max_num_batched_tokens
        } else {
            alone
        };
        if !is_undisturbed {
            self.prompt_chunk.note_others();
        }
        let mut share = StepRows::new(running, self.max_num_batched_tokens, self.limits);
        self.next = share
            .decoding(first)
            .or_else(|| share.prompts(&prompts, chunk))
            .or_else(|| share.decoding(later))
            .unwrap_or(0);
        let plan = share.plan;
        let rows: usize = plan.iter().map(|planned| planned.rows).sum();
        self.may_be_interrupted = is_undisturbed && rows > alone;
        plan
    }

    /// Gives sequences room for drafts from the remaining rows and blocks, in equal shares.
    fn extend_drafts(&mut self, plan: &mut [ScheduledSequence]) {
        let used: usize = plan.iter().map(|planned| planned.rows).sum();
        let mut budget = (self.max_num_batched_tokens - used).min(self.limits.draft_rows);
        let mut left = plan.len();
        for planned in plan {
            let sequence = &mut self.running[planned.index];
            let share = budget.div_ceil(left);
            left -= 1;
            if planned.rows < sequence.pending() || sequence.draft_length() == 0 {
                continue;
            }
            let len = sequence.state.tokens.len();
            let wanted = len + sequence.draft_nodes().min(share);
            let table = &mut sequence.state.table;
            let longest = self.blocks.longest(table, wanted);
            if self.blocks.reserve(table, longest).is_ok() {
                planned.nodes = longest - len;
                budget -= planned.nodes;
            }
        }
    }
}

/// The remaining rows of a step, and the rows already assigned.
struct StepRows<'a> {
    running: &'a [Sequence],
    rows: usize,
    /// Remaining rows of prompt log-probabilities.
    scored: usize,
    plan: Vec<ScheduledSequence>,
}

impl<'a> StepRows<'a> {
    /// The rows of a step of at most `rows`, none of which is assigned.
    fn new(running: &'a [Sequence], rows: usize, limits: StepLimits) -> Self {
        Self {
            running,
            rows,
            scored: limits.scored_rows,
            plan: Vec::with_capacity(running.len()),
        }
    }

    /// Assigns rows to the texts that fit, the oldest first: it always fits.
    fn whole_texts(&mut self) {
        for index in 0..self.running.len() {
            let pending = self.running[index].pending();
            if pending <= self.rows {
                self.give(index, pending);
            }
        }
    }

    /// Assigns rows to decoding sequences in this order; returns the first one that does not fit.
    fn decoding(&mut self, indices: &[usize]) -> Option<SeqId> {
        let full = indices.iter().find(|&&index| self.give(index, 1) == 0);
        full.map(|&index| self.running[index].state.id)
    }

    /// Assigns at most `chunk` rows to prompts; [`PROMPTS`] if no rows are left for them. The oldest one has
    /// a right to half of the rows, and of those that score, and leaves the others to those with the fewest
    /// left to read: so a short prompt does not wait for a long one, nor a long one for ever.
    fn prompts(&mut self, indices: &[usize], chunk: usize) -> Option<SeqId> {
        let (&oldest, others) = indices.split_first()?;
        if self.rows == 0 {
            return Some(PROMPTS);
        }
        let pending = |index: usize| self.running[index].pending();
        let chunk = chunk.min(self.rows);
        let sequence = &self.running[oldest];
        let half = pending(oldest).min(chunk.div_ceil(2));
        let kept = sequence.rows_within(half, self.scored.div_ceil(2));
        let kept_scores = sequence.unscored(kept).len();
        self.scored -= kept_scores;
        let mut left = chunk - kept;
        let mut others = others.to_vec();
        others.sort_by_key(|&index| pending(index));
        let mut given = 0;
        for index in others {
            let rows = self.give(index, left);
            left -= rows;
            given += rows;
        }
        self.scored += kept_scores;
        self.give(oldest, chunk - given);
        None
    }

    /// Assigns at most `limit` of its pending rows to sequence `index`; returns their number.
    fn give(&mut self, index: usize, limit: usize) -> usize {
        let sequence = &self.running[index];
        let rows = sequence.pending().min(self.rows).min(limit);
        let rows = sequence.rows_within(rows, self.scored);
        if rows > 0 {
            self.scored -= sequence.unscored(rows).len();
            self.rows -= rows;
            self.plan.push(ScheduledSequence {
                index,
                rows,
                nodes: 0,
            });
        }
        rows
    }
}

#[cfg(test)]
mod tests;
