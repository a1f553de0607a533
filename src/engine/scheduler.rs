//! Which sequences run in the next step, and with how many rows. No tensors.

use super::chunk::PromptChunk;
use super::sequence::Sequence;
use crate::kv::{BlockAllocator, CachedPrefix};
use crate::spec::SeqId;
use std::collections::VecDeque;

/// Maximum number of prompt log-probability rows in one step: each costs a row of logits over the
/// whole vocabulary.
const MAX_SCORED_ROWS: usize = 256;

/// Maximum number of draft rows in one step, for the same reason.
pub const MAX_DRAFT_ROWS: usize = 256;

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

/// First come, first served, over one pool of blocks. A draft pool with as many blocks needs no
/// scheduling of its own: a sequence never drafts more than it has blocks for here.
#[derive(Debug)]
pub struct Scheduler {
    /// In order of arrival; preempted sequences come first.
    pub waiting: VecDeque<Sequence>,
    /// In order of arrival.
    pub running: Vec<Sequence>,
    /// The pool to which all block tables belong.
    blocks: BlockAllocator,
    /// Limits the prompt rows of a step in which other sequences decode.
    pub prompt_chunk: PromptChunk,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
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
    ) -> Self {
        Self {
            blocks,
            waiting: VecDeque::new(),
            running: Vec::new(),
            prompt_chunk,
            max_num_seqs,
            max_num_batched_tokens,
            next: 0,
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Removes every sequence for which `gone` is true and frees its blocks.
    pub fn remove(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed: Vec<Sequence> = self.running.extract_if(.., |s| gone(s)).collect();
        for sequence in &mut removed {
            self.blocks.release(&mut sequence.state.table);
        }
        // The queue may be long, and nearly always nobody in it is gone.
        if self.waiting.iter().any(&mut gone) {
            let (left, waiting): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(gone);
            self.waiting = waiting.into();
            removed.extend(left);
        }
        removed
    }

    /// Plans a step: makes room for running sequences, admits new ones, and gives the remaining
    /// rows to drafts. The second value lists the sequences preempted for this.
    ///
    /// `resume` says how many of a new sequence's first tokens need not be computed, of those that are in
    /// the prefix cache, whose number it is given.
    pub fn schedule(
        &mut self,
        resume: impl FnMut(&Sequence, usize) -> usize,
    ) -> (Vec<ScheduledSequence>, Vec<SeqId>) {
        let preempted = self.make_room();
        if preempted.is_empty() {
            self.admit(resume);
        }
        let mut plan = self.share_budget();
        self.extend_drafts(&mut plan);
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

    /// Reserves blocks for every running sequence's tokens, oldest first; preempts the youngest when
    /// the pool runs out.
    fn make_room(&mut self) -> Vec<SeqId> {
        let mut preempted = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            let state = &mut self.running[index].state;
            if (self.blocks.reserve(&mut state.table, state.tokens.len())).is_ok() {
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

    /// Admits from the queue while the whole sequence fits and a free block remains for each
    /// running sequence to grow into (otherwise the new sequence would be preempted next). A sequence
    /// begins after its longest cached prefix, and waits while a running one computes its next block: so
    /// the choices of a request share its prompt.
    fn admit(&mut self, mut resume: impl FnMut(&Sequence, usize) -> usize) {
        while self.running.len() < self.max_num_seqs {
            let (running, blocks) = (self.running.len(), &mut self.blocks);
            let Some(sequence) = self.waiting.front_mut() else {
                return;
            };
            // It needs at least one; a long prompt is looked up only if that is there.
            if running > 0 && blocks.num_free() <= running {
                return;
            }
            let (root, tokens) = (sequence.state.prefix_root(), &sequence.state.tokens);
            let mut prefix = blocks.find(root, &tokens[..sequence.max_cached()]);
            if is_computed(blocks, &self.running, sequence, &prefix) {
                return;
            }
            let block_size = blocks.block_size();
            let cached = resume(sequence, prefix.blocks().len() * block_size);
            prefix.truncate(cached / block_size);
            let len = sequence.state.tokens.len();
            let needed = blocks.blocks_after(&prefix, len);
            let spare = blocks.num_free().checked_sub(needed);
            if spare.is_none_or(|spare| spare < running) {
                return;
            }
            let cached = blocks.adopt(&mut sequence.state.table, &prefix);
            if blocks.reserve(&mut sequence.state.table, len).is_err() {
                return blocks.release(&mut sequence.state.table);
            }
            sequence.begin_after(cached);
            if let Some(sequence) = self.waiting.pop_front() {
                let place = self
                    .running
                    .partition_point(|other| other.state.id < sequence.state.id);
                self.running.insert(place, sequence);
            }
        }
    }

    /// Divides the rows of a step: first among decoding sequences, then among prompts by age, in
    /// short chunks if other sequences would wait for them. When the rows run out, the first
    /// sequence without any comes first in the next step, so every sequence gets its turn, prompts
    /// included.
    fn share_budget(&mut self) -> Vec<ScheduledSequence> {
        let running = &self.running;
        let (decoding, prompts): (Vec<usize>, Vec<usize>) =
            (0..running.len()).partition(|&i| running[i].pending() == 1);
        let (later, first) =
            decoding.split_at(decoding.partition_point(|&i| running[i].state.id < self.next));
        let chunk = match decoding.is_empty() {
            true => self.max_num_batched_tokens,
            false => self.prompt_chunk.rows(),
        };
        let mut share = Share {
            running,
            rows: self.max_num_batched_tokens,
            scored: MAX_SCORED_ROWS,
            plan: Vec::with_capacity(running.len()),
        };
        self.next = share
            .decoding(first)
            .or_else(|| share.prompts(&prompts, chunk))
            .or_else(|| share.decoding(later))
            .unwrap_or(0);
        share.plan
    }

    /// Gives sequences room for drafts from the remaining rows and blocks, in equal shares.
    fn extend_drafts(&mut self, plan: &mut [ScheduledSequence]) {
        let used: usize = plan.iter().map(|planned| planned.rows).sum();
        let mut budget = (self.max_num_batched_tokens - used).min(MAX_DRAFT_ROWS);
        let mut left = plan.len();
        for planned in plan {
            let sequence = &mut self.running[planned.index];
            let share = budget.div_ceil(left);
            left -= 1;
            if planned.rows < sequence.pending() || sequence.draft_depth() == 0 {
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

/// Whether one of `running` computes the block that `sequence` needs after `prefix`, and could share.
fn is_computed(
    blocks: &BlockAllocator,
    running: &[Sequence],
    sequence: &Sequence,
    prefix: &CachedPrefix,
) -> bool {
    let state = &sequence.state;
    let wanted = &state.tokens[..sequence.max_cached()];
    let wanted = blocks.next_block(prefix.blocks(), state.prefix_root(), wanted);
    wanted.is_some()
        && running.iter().any(|other| {
            let state = &other.state;
            let known = state.table.known();
            let is_next = state.kv_len / blocks.block_size() == known.len();
            is_next && blocks.next_block(known, state.prefix_root(), &state.tokens) == wanted
        })
}

/// The remaining rows of a step, and the rows already assigned.
struct Share<'a> {
    running: &'a [Sequence],
    rows: usize,
    /// Remaining rows of prompt log-probabilities.
    scored: usize,
    plan: Vec<ScheduledSequence>,
}

impl Share<'_> {
    /// Assigns rows to decoding sequences in this order; returns the first one that does not fit.
    fn decoding(&mut self, indices: &[usize]) -> Option<SeqId> {
        let full = indices.iter().find(|&&index| self.give(index, 1) == 0);
        full.map(|&index| self.running[index].state.id)
    }

    /// Assigns at most `chunk` rows to prompts in this order; [`PROMPTS`] if no rows are left for
    /// them.
    fn prompts(&mut self, indices: &[usize], mut chunk: usize) -> Option<SeqId> {
        if !indices.is_empty() && self.rows == 0 {
            return Some(PROMPTS);
        }
        for &index in indices {
            chunk -= self.give(index, chunk);
        }
        None
    }

    /// Assigns at most `limit` of its pending rows to sequence `index`; returns their number.
    fn give(&mut self, index: usize, limit: usize) -> usize {
        let sequence = &self.running[index];
        let mut rows = sequence.pending().min(self.rows).min(limit);
        let scores = sequence.unscored(rows).len();
        rows -= scores.saturating_sub(self.scored);
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
mod tests {
    use super::super::handle::{SpecLimits, Submission};
    use super::super::request::Request;
    use super::*;
    use crate::sampling::{Acceptance, SamplingParams};
    use crate::spec::StepOutput;
    use std::time::{Duration, Instant};

    const DRAFT: usize = 5;

    /// A scheduler with enough blocks for everything, and steps that only count.
    struct Schedule {
        scheduler: Scheduler,
        /// How often each sequence received rows.
        turns: Vec<usize>,
    }

    impl Schedule {
        fn new(max_num_batched_tokens: usize) -> Self {
            let chunk = PromptChunk::new(Duration::from_secs(1));
            Self {
                scheduler: Scheduler::new(
                    BlockAllocator::new(4096, 16),
                    64,
                    max_num_batched_tokens,
                    chunk,
                ),
                turns: Vec::new(),
            }
        }

        fn add(&mut self, prompt_len: usize) {
            let request = Request {
                prompt: vec![1; prompt_len],
                max_tokens: Some(10_000),
                params: SamplingParams::default(),
                ..Request::default()
            };
            let submission = Submission {
                request,
                events: tokio::sync::mpsc::unbounded_channel().0,
                arrived: Instant::now(),
                place: None,
            };
            let id = self.turns.len() as SeqId;
            let rule = Acceptance::Coupled;
            let spec = SpecLimits {
                length: DRAFT,
                nodes: 2 * DRAFT,
                topk: 1,
            };
            let sequence = Sequence::new(id, submission, 20_000, spec, rule, &[]);
            self.scheduler.waiting.push_back(sequence);
            self.turns.push(0);
        }

        /// One step, in which no draft token is accepted.
        fn step(&mut self) -> Vec<ScheduledSequence> {
            let (plan, _) = self.scheduler.schedule(|_, cached| cached);
            assert!(!plan.is_empty(), "a step without rows");
            let rows: usize = plan.iter().map(|turn| turn.rows + turn.nodes).sum();
            assert!(rows <= self.scheduler.max_num_batched_tokens, "{plan:?}");
            for turn in &plan {
                let sequence = &mut self.scheduler.running[turn.index];
                self.turns[sequence.state.id as usize] += 1;
                let tokens = match turn.rows == sequence.pending() {
                    true => vec![1],
                    false => Vec::new(),
                };
                let output = StepOutput {
                    tokens,
                    ..StepOutput::default()
                };
                sequence.advance(turn.rows, output);
                self.scheduler.settle(turn.index);
            }
            plan
        }
    }

    /// Six rows are six of twenty sequences; drafts wait.
    #[test]
    fn who_finds_no_room_is_next() {
        for rows in [1, DRAFT + 1, 19] {
            let mut schedule = Schedule::new(rows);
            (0..20).for_each(|_| schedule.add(1));
            for _ in 0..400 {
                schedule.step();
                let (least, most) = (schedule.turns.iter().min(), schedule.turns.iter().max());
                assert!(
                    most <= least.map(|n| n + 1).as_ref(),
                    "{:?}",
                    schedule.turns
                );
            }
        }
    }

    /// Decoding sequences fill every step, and a prompt is still read.
    #[test]
    fn prompts_have_their_turn() {
        for (rows, decoding) in [(DRAFT + 1, 10), (2 * DRAFT + 2, 4), (17, 9)] {
            let mut schedule = Schedule::new(rows);
            for _ in 0..decoding {
                schedule.add(1);
            }
            (0..2 * decoding).for_each(|_| drop(schedule.step()));
            schedule.add(50);
            // Between two turns of a sequence, every other sequence has one.
            let enough = 50 * (decoding + 1);
            let read = (0..enough).position(|_| {
                schedule.step();
                let newest = schedule.scheduler.running.last();
                newest.is_some_and(|s| s.state.prompt_len == 50 && s.output_len() > 0)
            });
            assert!(read.is_some(), "{rows} rows: not read in {enough} steps");
        }
    }

    /// With enough rows, all sequences decode in every step beside a chunk within the time limit; a
    /// prompt alone takes all rows.
    #[test]
    fn prompts_keep_nobody_waiting() {
        let mut schedule = Schedule::new(500);
        schedule.add(2000);
        assert_eq!(schedule.step()[0].rows, 500);
        (0..10).for_each(|_| schedule.add(1));
        schedule.step();
        let plan = schedule.step();
        let rows: Vec<usize> = plan.iter().map(|turn| turn.rows).collect();
        let mut want = vec![1; 11];
        want[10] = schedule.scheduler.prompt_chunk.rows();
        assert_eq!(rows, want);
        assert!(want[10] < 100);
        assert!(
            plan[..10].iter().all(|turn| turn.nodes == DRAFT),
            "{plan:?}"
        );
    }
}
