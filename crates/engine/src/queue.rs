//! The order in which sequences get into the batch. No tensors.

use super::sequence::{QueueKey, Sequence};
use std::collections::BTreeMap;
use std::ops::Bound;

/// The waiting sequences in the order of start-time fair queueing (Goyal, Vin, Cheng 1996, section 2), whose
/// flows are the requests.
///
/// The virtual time is the start tag of the last sequence that was admitted. A sequence's start tag is the
/// virtual time at its arrival plus the cost of what its own request has before it. So requests of one
/// sequence come in the order of their arrival, and those of many let others go between.
#[derive(Debug, Default)]
pub struct Queue {
    pub sequences: BTreeMap<QueueKey, Sequence>,
    /// The virtual time, in tokens.
    now: u64,
}

impl Queue {
    /// Adds a sequence that has arrived.
    pub fn push(&mut self, mut sequence: Sequence) {
        sequence.start = self.now + sequence.tokens_before;
        self.put_back(sequence);
    }

    /// Adds a sequence that was in the batch, where it was before.
    pub fn put_back(&mut self, sequence: Sequence) {
        self.sequences.insert(sequence.queue_key(), sequence);
    }

    /// The first key after `key`; `None` = the first of all.
    pub fn after(&self, key: Option<QueueKey>) -> Option<QueueKey> {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.sequences.range((from, Bound::Unbounded));
        rest.next().map(|(&key, _)| key)
    }

    /// Takes out the sequence with this key, which is admitted.
    pub fn take(&mut self, key: QueueKey) -> Option<Sequence> {
        self.now = self.now.max(key.0);
        self.sequences.remove(&key)
    }

    /// Removes every sequence for which `gone` is true.
    pub fn remove(&mut self, mut gone: impl FnMut(&Sequence) -> bool) -> Vec<Sequence> {
        // The queue may be long, and nearly always nobody in it is gone.
        let waiting = self.sequences.iter();
        let left = waiting.filter(|(_, sequence)| gone(sequence));
        let left: Vec<QueueKey> = left.map(|(&key, _)| key).collect();
        let take = |key| self.sequences.remove(key);
        left.iter().filter_map(take).collect()
    }
}
