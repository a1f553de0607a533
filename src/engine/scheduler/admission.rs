//! Who gets into the batch, and who makes way for it.
//!
//! What every request can rely on:
//! - It waits for those before it in the [`Queue`](super::Queue), and for others that came later only as far
//!   as their cost together is no more than its own ([`Sequence::can_be_overtaken_by`]).
//! - If none of its sequences runs, it does not wait for a request that holds [`PREEMPT_RATIO`] times what it needs,
//!   be it places in the batch or blocks: that one gives some of it up. What it gave up it has in the prefix
//!   cache when it comes back. A request's last sequence makes way only as it can be overtaken.
//! - If it is small ([`BACKFILL_RATIO`]), it need not wait for a large one to end either: it gets in as a guest, who
//!   makes way as soon as one of those that it passed has room without it.

use super::Scheduler;
use crate::engine::queue::QueueKey;
use crate::engine::sequence::Sequence;
use crate::kv::{BlockAllocator, CachedPrefix};
use crate::spec::SeqId;

/// How many times what another one needs a request must hold to make way for it.
const PREEMPT_RATIO: usize = 4;

/// How many times smaller a guest must be than each of those that it passes, and than one that runs. So what
/// they compute in vain is little.
const BACKFILL_RATIO: usize = 16;

/// Why a sequence cannot be admitted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// The batch has as many sequences as it may have.
    Places,
    /// There are not enough free blocks.
    Blocks,
    /// Guests have what it needs.
    Guests,
    /// A running sequence computes what it can share.
    Prefix,
    /// It may not go before those that wait.
    Turn,
}

/// What one look through the queue has found so far.
#[derive(Default)]
struct Look {
    /// Those for whom there is no room, and of whose request nothing runs.
    passed: Vec<QueueKey>,
    /// Requests of which no other sequence can be admitted now.
    done: Vec<u64>,
    preempted: Vec<SeqId>,
    /// The request that holds most blocks of its own, and their number, until that changes.
    largest: Option<(u64, usize)>,
}

impl Scheduler {
    /// Admits from the queue. The sequences that made way are returned.
    pub(super) fn admit(
        &mut self,
        mut resume: impl FnMut(&Sequence, usize) -> usize,
    ) -> Vec<SeqId> {
        let mut look = Look::default();
        let (mut next, mut looks) = (self.waiting.after(None), 0);
        while let Some(place) = next
            && looks < self.limits.looks
        {
            next = self.waiting.after(Some(place));
            let Some(sequence) = self.waiting.get(place) else {
                continue;
            };
            let (group, cost) = (sequence.group, sequence.queue_cost());
            if look.done.contains(&group) || look.preempted.contains(&sequence.state.id) {
                continue;
            }
            looks += 1;
            let mut result = self.admit_or_make_way(place, cost, &mut look, &mut resume);
            if matches!(result, Err(Obstacle::Blocks | Obstacle::Turn))
                && self.may_be_guest(&look.passed, cost)
            {
                result = self.try_admit(place, true, &mut resume).or(result);
            }
            match result {
                Ok(()) => {
                    looks -= 1;
                    look.largest = None;
                }
                Err(Obstacle::Turn) => {}
                Err(Obstacle::Blocks) if !self.runs(group) => look.passed.push(place),
                // Nobody makes way for this request, so nobody would for another one that needs a place.
                Err(Obstacle::Places) if !self.runs(group) => break,
                Err(_) => look.done.push(group),
            }
        }
        look.preempted
    }

    /// Reserves blocks for every running sequence's tokens, oldest first. When the pool runs out, the
    /// youngest is preempted, or the youngest of the request that holds most.
    pub(super) fn make_room(&mut self) -> Vec<SeqId> {
        let mut preempted = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            let state = &mut self.running[index].state;
            if (self.blocks.reserve(&mut state.table, state.tokens.len())).is_ok() {
                index += 1;
                continue;
            }
            let victim = self.victim_of_growth();
            preempted.push(self.preempt(victim));
            index -= usize::from(victim < index);
        }
        preempted
    }

    fn admit_or_make_way(
        &mut self,
        place: QueueKey,
        cost: usize,
        look: &mut Look,
        resume: &mut impl FnMut(&Sequence, usize) -> usize,
    ) -> Result<(), Obstacle> {
        if !self.can_overtake(&look.passed, cost) {
            return Err(Obstacle::Turn);
        }
        loop {
            match self.try_admit(place, false, resume) {
                Err(Obstacle::Guests) => {
                    let guest = self.guests_of(place).next_back();
                    let guest = guest.ok_or(Obstacle::Blocks)?;
                    look.preempted.push(self.preempt(guest));
                }
                Err(obstacle @ (Obstacle::Places | Obstacle::Blocks)) => {
                    self.make_way(place, cost, obstacle, look).ok_or(obstacle)?;
                }
                Ok(()) => {
                    self.note_overtaken(&look.passed, cost);
                    return Ok(());
                }
                result => return result,
            }
        }
    }

    /// Admits the sequence at `place` if it fits as a whole and a free block remains for each running sequence
    /// to grow into: otherwise it would be preempted next, which only a guest may be. It begins after its
    /// longest cached prefix, and waits while a running one computes its next block: so the choices of a
    /// request share its prompt.
    fn try_admit(
        &mut self,
        place: QueueKey,
        as_guest: bool,
        resume: &mut impl FnMut(&Sequence, usize) -> usize,
    ) -> Result<(), Obstacle> {
        // The guests who would make way, and their blocks.
        let (mut guests, mut lent) = (0, 0);
        if !as_guest {
            for index in self.guests_of(place) {
                guests += 1;
                lent += self.blocks.num_own(&self.running[index].state.table);
            }
        }
        let (running, blocks) = (self.running.len(), &mut self.blocks);
        if running - guests >= self.max_num_seqs {
            return Err(Obstacle::Places);
        }
        let spared = |running: usize| if as_guest { 0 } else { running };
        let room = |needed: usize, free: usize, running: usize| needed + spared(running) <= free;
        // It needs at least one; a long prompt is looked up only if that is there.
        let with_guests = blocks.num_free() + lent;
        if running > guests && !room(1, with_guests, running - guests) {
            return Err(Obstacle::Blocks);
        }
        let sequence = self.waiting.get_mut(place).ok_or(Obstacle::Prefix)?;
        let (root, tokens) = (sequence.state.prefix_root(), &sequence.state.tokens);
        let mut prefix = blocks.find(root, &tokens[..sequence.max_cached()]);
        if is_computed(blocks, &self.running, sequence, &prefix) {
            return Err(Obstacle::Prefix);
        }
        let block_size = blocks.block_size();
        let cached = resume(sequence, prefix.blocks().len() * block_size);
        prefix.truncate(cached / block_size);
        let len = sequence.state.tokens.len();
        let needed = blocks.blocks_after(&prefix, len);
        if !room(needed, with_guests, running - guests) {
            return Err(Obstacle::Blocks);
        }
        if guests > 0 && (running >= self.max_num_seqs || !room(needed, blocks.num_free(), running))
        {
            return Err(Obstacle::Guests);
        }
        let cached = blocks.adopt(&mut sequence.state.table, &prefix);
        if blocks.reserve(&mut sequence.state.table, len).is_err() {
            blocks.release(&mut sequence.state.table);
            return Err(Obstacle::Blocks);
        }
        sequence.begin_after(cached);
        sequence.is_guest = as_guest;
        if let Some(sequence) = self.waiting.take(place) {
            let id = sequence.state.id;
            let place = self.running.partition_point(|other| other.state.id < id);
            self.running.insert(place, sequence);
        }
        Ok(())
    }

    /// Whether a sequence of this cost may go before all of `passed`.
    fn can_overtake(&self, passed: &[QueueKey], cost: usize) -> bool {
        let mut waiting = passed.iter().filter_map(|&place| self.waiting.get(place));
        waiting.all(|sequence| sequence.can_be_overtaken_by(cost))
    }

    /// Whether a sequence of this cost is small enough to be a guest before all of `passed`.
    fn may_be_guest(&self, passed: &[QueueKey], cost: usize) -> bool {
        let is_large = |sequence: &Sequence| sequence.queue_cost() >= BACKFILL_RATIO * cost;
        let mut waiting = passed.iter().filter_map(|&place| self.waiting.get(place));
        waiting.all(is_large) && self.running.iter().any(is_large)
    }

    /// The indices of the guests who have passed the sequence at `place`, oldest first.
    fn guests_of(&self, place: QueueKey) -> impl DoubleEndedIterator<Item = usize> {
        let running = self.running.iter().enumerate();
        let is_guest = move |s: &Sequence| s.is_guest && (s.start, s.state.id) > place;
        running.filter_map(move |(index, sequence)| is_guest(sequence).then_some(index))
    }

    fn note_overtaken(&mut self, passed: &[QueueKey], cost: usize) {
        for &place in passed {
            if let Some(sequence) = self.waiting.get_mut(place) {
                sequence.overtaken += cost;
            }
        }
    }

    /// Whether a sequence of the request runs.
    fn runs(&self, group: u64) -> bool {
        self.running.iter().any(|sequence| sequence.group == group)
    }

    /// Preempts the youngest sequence of the request that holds most of what the one at `place` lacks; `None`
    /// if nobody has to make way.
    fn make_way(
        &mut self,
        place: QueueKey,
        cost: usize,
        obstacle: Obstacle,
        look: &mut Look,
    ) -> Option<()> {
        let sequence = self.waiting.get(place)?;
        if self.runs(sequence.group) {
            return None;
        }
        let (need, (group, held)) = match obstacle {
            Obstacle::Places => (1, self.largest_holder(|_| 1)?),
            _ => {
                let largest = match look.largest {
                    Some(largest) => largest,
                    None => self.holder_of_most_blocks()?,
                };
                look.largest = Some(largest);
                let need = self.blocks.blocks_for(sequence.state.tokens.len());
                (need, largest)
            }
        };
        if held < PREEMPT_RATIO * need {
            return None;
        }
        let victim = self.youngest_of(group)?;
        if self.is_alone(group) {
            let sequence = &mut self.running[victim];
            // Without a prefix cache all that it has would be computed again.
            if !self.blocks.has_prefix_cache() || !sequence.can_be_overtaken_by(cost) {
                return None;
            }
            sequence.overtaken += cost;
        }
        look.largest = None;
        look.preempted.push(self.preempt(victim));
        Some(())
    }

    /// The running request that holds most, if each sequence holds `amount`, and how much.
    fn largest_holder(&self, amount: impl Fn(&Sequence) -> usize) -> Option<(u64, usize)> {
        let mut held: Vec<(u64, usize)> = Vec::new();
        for sequence in &self.running {
            match held.iter_mut().find(|(group, _)| *group == sequence.group) {
                Some((_, sum)) => *sum += amount(sequence),
                None => held.push((sequence.group, amount(sequence))),
            }
        }
        held.into_iter().max_by_key(|&(_, amount)| amount)
    }

    fn holder_of_most_blocks(&self) -> Option<(u64, usize)> {
        self.largest_holder(|sequence| self.blocks.num_own(&sequence.state.table))
    }

    /// Whether only one sequence of the request runs.
    fn is_alone(&self, group: u64) -> bool {
        self.running.iter().filter(|s| s.group == group).count() == 1
    }

    /// The index of the sequence that is preempted when running ones grow: the youngest, unless another
    /// request with several sequences holds far more than it.
    fn victim_of_growth(&self) -> usize {
        let last = self.running.len() - 1;
        let youngest = &self.running[last];
        let own = self.blocks.num_own(&youngest.state.table).max(1);
        self.holder_of_most_blocks()
            .filter(|&(group, held)| held >= PREEMPT_RATIO * own && !self.is_alone(group))
            .and_then(|(group, _)| self.youngest_of(group))
            .unwrap_or(last)
    }

    /// The index of the youngest running sequence of a request.
    fn youngest_of(&self, group: u64) -> Option<usize> {
        self.running.iter().rposition(|s| s.group == group)
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
