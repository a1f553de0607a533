//! The scheduling policy: which waiting sequences are admitted, and which running sequences are preempted for them.
//!
//! 1. Fair queueing: [`Queue`](super::Queue) orders the sequences. A sequence is admitted if all its blocks fit and
//!    each running sequence keeps one block to grow into.
//! 2. Head: the first sequence that does not fit is the head of the queue. No sequence behind the head delays it.
//! 3. Backfill: a sequence behind the head that is [`SMALL_RATIO`] times smaller is admitted if it fits. It is
//!    preempted as soon as the head fits without it.
//! 4. Preemption for a small request: if a request has no running sequence, and another request holds
//!    [`SMALL_RATIO`] times the blocks or places in the batch that the first one needs, the youngest sequence of the
//!    other request is preempted. The requests that overtake a preempted sequence in this way cost at most what that
//!    sequence costs. The requests that overtake the head, backfills among them, cost at most what the head costs.
//! 5. Preemption for memory: when the running sequences outgrow the pool, the youngest is preempted. A preempted
//!    sequence goes back to its place in the queue. The prefix cache has what it computed.

use super::{Beginnings, Scheduler};
use crate::sequence::{QueueKey, Sequence};
use crate::spec::SeqId;
use foretoken_core::kv::{BlockAllocator, CachedPrefix};
use std::collections::HashMap;

/// A request is small beside one that costs, or holds, so many times what it costs, or needs.
const SMALL_RATIO: usize = 4;

/// Why a sequence cannot be admitted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// The batch has as many sequences as it may have.
    BatchFull,
    /// There are not enough free blocks.
    Blocks,
    /// Backfills have what it needs.
    Backfills,
    /// A running sequence computes what it can share.
    Prefix,
    /// Blocks with which it can begin are read from a disk. Nobody else waits for that.
    Disk,
}

impl Scheduler {
    /// Admits sequences from the queue; returns the preempted ones.
    pub(super) fn admit(&mut self, beginnings: &mut impl Beginnings) -> Vec<SeqId> {
        let mut preempted = Vec::new();
        // The head, and requests of which no other sequence can be admitted now.
        let (mut head, mut blocked): (Option<QueueKey>, Vec<u64>) = (None, Vec::new());
        let (mut next, mut looks) = (self.waiting.after(None), 0);
        while let Some(key) = next
            && looks < self.limits.looks
        {
            next = self.waiting.after(Some(key));
            let sequence = &self.waiting.sequences[&key];
            let (id, group, cost) = (sequence.state.id, sequence.group, sequence.queue_cost());
            if preempted.contains(&id) {
                // The room that it left is for the sequence that it was preempted for.
                head = head.or(Some(key));
                continue;
            }
            if blocked.contains(&group) {
                continue;
            }
            let is_beside = |head| SMALL_RATIO * cost <= self.waiting.sequences[&head].queue_cost();
            let result = if head.is_none_or(is_beside) {
                self.admit_or_preempt(key, head, &mut preempted, beginnings)
            } else {
                Err(Obstacle::Blocks)
            };
            let Err(obstacle) = result else {
                if head.is_none() && !preempted.is_empty() {
                    let ahead = self.waiting.sequences.range(..key);
                    let mut ahead = ahead.map(|(&key, _)| key);
                    head = ahead.find(|(_, id)| preempted.contains(id));
                }
                continue;
            };
            looks += 1;
            blocked.push(group);
            let waits = matches!(obstacle, Obstacle::Prefix | Obstacle::Disk);
            if !waits && !self.runs(group) {
                // Nobody makes way for it, so nobody would for another one that needs a place.
                if obstacle == Obstacle::BatchFull {
                    break;
                }
                head = head.or(Some(key));
            }
        }
        preempted
    }

    /// Admits the sequence at `key`, behind `head`, and preempts sequences for it.
    fn admit_or_preempt(
        &mut self,
        key: QueueKey,
        head: Option<QueueKey>,
        preempted: &mut Vec<SeqId>,
        beginnings: &mut impl Beginnings,
    ) -> Result<(), Obstacle> {
        while let Err(obstacle) = self.try_admit(key, head, beginnings) {
            let victim = match obstacle {
                Obstacle::Backfills => self.backfills_behind(key).next_back(),
                Obstacle::BatchFull | Obstacle::Blocks => self.victim(key, head, obstacle),
                Obstacle::Prefix | Obstacle::Disk => None,
            };
            preempted.push(self.preempt(victim.ok_or(obstacle)?));
        }
        Ok(())
    }

    /// Admits the sequence at `key` if there is room. The sequence begins after its longest cached prefix. It waits
    /// while a running sequence computes its next block, so that the choices of a request share its prompt.
    fn try_admit(
        &mut self,
        key: QueueKey,
        head: Option<QueueKey>,
        beginnings: &mut impl Beginnings,
    ) -> Result<(), Obstacle> {
        // Blocks that are free once the backfills behind `key` are preempted.
        let tables = |index: usize| &self.running[index].state.table;
        let backfills = self.backfills_behind(key).count();
        let lent = self
            .blocks
            .num_own_of(self.backfills_behind(key).map(tables));
        let (all, blocks) = (self.running.len(), &mut self.blocks);
        let (others, free) = (all - backfills, blocks.num_free() + lent);
        if others >= self.max_num_seqs {
            return Err(Obstacle::BatchFull);
        }
        // It needs at least one block; a long prompt is looked up only if that is there.
        if others > 0 && 1 + others > free {
            return Err(Obstacle::Blocks);
        }
        let waiting = &mut self.waiting.sequences;
        let sequence = waiting.get_mut(&key).ok_or(Obstacle::Prefix)?;
        let (root, tokens) = (sequence.state.prefix_root(), &sequence.state.tokens);
        let (len, block_size) = (tokens.len(), blocks.block_size());
        let mut prefix = blocks.find(root, &tokens[..sequence.max_cached()]);
        if is_computed(blocks, &self.running, sequence, &prefix) {
            return Err(Obstacle::Prefix);
        }
        let found = prefix.blocks().len() * block_size;
        let cached = beginnings.resume(sequence, found);
        prefix.truncate(cached / block_size);
        let needed = blocks.blocks_after(&prefix, len);
        let waits_for_backfills = all >= self.max_num_seqs || needed + all > blocks.num_free();
        let obstacle = if needed + others > free {
            Some(Obstacle::Blocks)
        } else if backfills > 0 && waits_for_backfills {
            Some(Obstacle::Backfills)
        } else {
            None
        };
        if let Some(obstacle) = obstacle {
            beginnings.release(sequence);
            return Err(obstacle);
        }
        if beginnings.awaits(sequence, found, cached) {
            // It is held while something is read, which continues it.
            return Err(Obstacle::Disk);
        }
        let cached = blocks.adopt(&mut sequence.state.table, &prefix);
        if blocks.reserve(&mut sequence.state.table, len).is_err() {
            blocks.release(&mut sequence.state.table);
            beginnings.release(sequence);
            return Err(Obstacle::Blocks);
        }
        sequence.begin_after(cached);
        sequence.passed = head;
        let cost = sequence.queue_cost();
        if let Some(head) = head.and_then(|head| waiting.get_mut(&head)) {
            head.overtaken += cost;
        }
        if let Some(sequence) = self.waiting.take(key) {
            let id = sequence.state.id;
            let index = self.running.partition_point(|other| other.state.id < id);
            self.running.insert(index, sequence);
        }
        Ok(())
    }

    /// The indices of the backfills that are preempted for the sequence at `key`, the oldest first. That sequence is
    /// the head that they passed, or it stands between that head and them.
    fn backfills_behind(&self, key: QueueKey) -> impl DoubleEndedIterator<Item = usize> {
        let passed =
            move |s: &Sequence| s.passed.is_some_and(|head| head <= key) && key < s.queue_key();
        (0..self.running.len()).filter(move |&index| passed(&self.running[index]))
    }

    /// Whether a sequence of the request runs.
    fn runs(&self, group: u64) -> bool {
        self.running.iter().any(|sequence| sequence.group == group)
    }

    /// The index of the running sequence to preempt for the one at `key`, which lacks blocks or a place in the batch
    /// and is behind `head`; `None` if none is to be preempted.
    fn victim(
        &mut self,
        key: QueueKey,
        head: Option<QueueKey>,
        obstacle: Obstacle,
    ) -> Option<usize> {
        let waiting = &self.waiting.sequences;
        let sequence = &waiting[&key];
        let cost = sequence.queue_cost();
        let may_overtake = head.is_none_or(|head| waiting[&head].can_be_overtaken(cost));
        if !may_overtake || self.runs(sequence.group) {
            return None;
        }
        let group = if obstacle == Obstacle::Blocks {
            let need = self.blocks.blocks_for(sequence.state.tokens.len());
            self.large_holder(need, |s| self.blocks.num_own(&s.state.table))?
        } else {
            self.large_holder(1, |_| 1)?
        };
        // What is not cached is computed again.
        let caches = self.blocks.has_prefix_cache();
        let price = |s: &Sequence| cost + if caches { 0 } else { s.state.kv_len };
        let can = |s: &Sequence| s.group == group && s.can_be_overtaken(price(s));
        let index = self.running.iter().rposition(can)?;
        self.running[index].overtaken += price(&self.running[index]);
        Some(index)
    }

    /// The running request whose sequences hold most, by `amount`; `None` if that is less than [`SMALL_RATIO`] times
    /// `need`.
    fn large_holder(&self, need: usize, amount: impl Fn(&Sequence) -> usize) -> Option<u64> {
        let mut held: HashMap<u64, usize> = HashMap::new();
        for sequence in &self.running {
            *held.entry(sequence.group).or_default() += amount(sequence);
        }
        let most = held.into_iter().max_by_key(|&(group, held)| (held, group));
        most.and_then(|(group, held)| (held >= SMALL_RATIO * need).then_some(group))
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
