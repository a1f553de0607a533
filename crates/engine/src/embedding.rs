//! The embedding of a text, collected from the hidden states of its tokens. No tensors.

use foretoken_core::model::Pooling;
use std::ops::Range;

/// Adds up hidden states as steps compute them. However a text is divided into steps, the sum has the same
/// bits, also after a preemption: what is in it is not needed again.
#[derive(Debug)]
pub struct PooledStates {
    pooling: Pooling,
    /// Tokens whose hidden states are in the sum, from the first on.
    pooled: usize,
    /// `[hidden_size]`; empty before the first hidden state.
    sum: Vec<f64>,
}

impl PooledStates {
    /// An empty sum.
    pub fn new(pooling: Pooling) -> Self {
        Self {
            pooling,
            pooled: 0,
            sum: Vec::new(),
        }
    }

    /// The positions of `computed`, of a text of `len` tokens, whose hidden states are needed and not there.
    pub fn needed(&self, computed: Range<usize>, len: usize) -> Range<usize> {
        let first = match self.pooling {
            Pooling::Last => len - 1,
            Pooling::Mean => self.pooled,
        };
        first.clamp(computed.start, computed.end)..computed.end
    }

    /// Number of tokens that need not be computed if their keys and values are there. For the last hidden state
    /// these are all tokens but one, for the mean the tokens that are in the sum.
    pub fn max_cached(&self) -> usize {
        match self.pooling {
            Pooling::Last => usize::MAX,
            Pooling::Mean => self.pooled,
        }
    }

    /// Adds the hidden states of the positions `needed`, one after the other.
    pub fn add(&mut self, needed: Range<usize>, states: &[f32]) {
        if needed.is_empty() {
            return;
        }
        let width = states.len() / needed.len();
        self.sum.resize(width, 0.0);
        for state in states.chunks(width) {
            let values = self.sum.iter_mut().zip(state);
            values.for_each(|(sum, &x)| *sum += f64::from(x));
        }
        self.pooled = needed.end;
    }

    /// The embedding of a text of `len` tokens, all of which were computed; not normalized.
    pub fn embedding(&self, len: usize) -> Vec<f32> {
        let count = match self.pooling {
            Pooling::Last => 1.0,
            Pooling::Mean => len as f64,
        };
        self.sum.iter().map(|sum| (sum / count) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The embedding of states `[i, 0.1 * i]`, computed up to each of `ends` in turn; a part that ends before
    /// its predecessor's end is what a preemption computes again.
    fn embed(pooling: Pooling, ends: &[(usize, usize)]) -> Vec<f32> {
        let len = ends.last().expect("not empty").1;
        let mut pool = PooledStates::new(pooling);
        for &(start, end) in ends {
            assert!(start <= pool.max_cached());
            let needed = pool.needed(start..end, len);
            let states: Vec<f32> = needed
                .clone()
                .flat_map(|i| [i as f32, 0.1 * i as f32])
                .collect();
            pool.add(needed, &states);
        }
        pool.embedding(len)
    }

    #[test]
    fn chunks_and_preemptions_change_nothing() {
        let whole = [(0, 7)];
        assert_eq!(embed(Pooling::Last, &whole), [6.0, 0.6]);
        assert_eq!(embed(Pooling::Mean, &whole)[0], 3.0);
        for parts in [
            &[(0, 3), (3, 7)][..],
            &[(0, 6), (6, 7)],
            &[(0, 4), (0, 2), (2, 5), (5, 7)],
            &[(0, 4), (4, 6), (2, 6), (6, 7)],
        ] {
            for pooling in [Pooling::Last, Pooling::Mean] {
                assert_eq!(embed(pooling, parts), embed(pooling, &whole), "{parts:?}");
            }
        }
    }
}
