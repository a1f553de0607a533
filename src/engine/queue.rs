//! The order in which sequences get into the batch. No tensors.

use super::sequence::Sequence;
use crate::spec::SeqId;
use std::collections::BTreeMap;
use std::ops::Bound;

/// A place in the queue, lower first: the start tag in tokens, then the order of arrival.
pub type QueueKey = (u64, SeqId);

/// The waiting sequences in the order of start-time fair queueing (Goyal, Vin, Cheng 1996, section 2), whose
/// flows are the requests.
///
/// The virtual time is the start tag of the last sequence that was admitted. A sequence's start tag is the
/// virtual time at its arrival plus the cost of what its own request has before it. So requests of one
/// sequence come in the order of their arrival, and those of many let others go between.
#[derive(Debug, Default)]
pub struct Queue {
    sequences: BTreeMap<QueueKey, Sequence>,
    /// The virtual time, in tokens.
    now: u64,
}

impl Queue {
    /// Adds a sequence that has arrived.
    pub fn push(&mut self, mut sequence: Sequence) {
        sequence.start = self.now + sequence.tokens_before;
        self.put_back(sequence);
    }

    /// Adds a sequence that was in the batch, at its old place.
    pub fn put_back(&mut self, sequence: Sequence) {
        let place = (sequence.start, sequence.state.id);
        self.sequences.insert(place, sequence);
    }

    /// The first place after `place`; `None` = the first of all.
    pub fn after(&self, place: Option<QueueKey>) -> Option<QueueKey> {
        let from = place.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.sequences.range((from, Bound::Unbounded));
        rest.next().map(|(&place, _)| place)
    }

    /// The sequence at `place`.
    pub fn get(&self, place: QueueKey) -> Option<&Sequence> {
        self.sequences.get(&place)
    }

    /// The sequence at `place`.
    pub fn get_mut(&mut self, place: QueueKey) -> Option<&mut Sequence> {
        self.sequences.get_mut(&place)
    }

    /// All sequences, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values()
    }

    /// Takes out the sequence at `place`, which is admitted.
    pub fn take(&mut self, place: QueueKey) -> Option<Sequence> {
        self.now = self.now.max(place.0);
        self.sequences.remove(&place)
    }

    /// Number of waiting sequences.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Removes every sequence for which `gone` is true.
    pub fn remove(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        // The queue may be long, and nearly always nobody in it is gone.
        let waiting = self.sequences.iter();
        let left = waiting.filter(|(_, sequence)| gone(sequence));
        let left: Vec<QueueKey> = left.map(|(&place, _)| place).collect();
        let take = |place| self.sequences.remove(place);
        left.iter().filter_map(take).collect()
    }
}
