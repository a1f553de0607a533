//! The target's hidden states that a draft head reads.

use candle_core::Tensor;
use foretoken_core::error::Result;
use std::collections::VecDeque;
use std::ops::Range;

/// With more states of a sequence to read, a head's forward says little about the cost of others: it reads
/// a prompt.
pub const MAX_NEW_STATES: usize = 16;

/// While others may share what a head has read, it leaves no more states of a text unread: the next request
/// with that text gets so much less of it from the prefix cache.
pub const MAX_UNREAD: usize = 64;

/// The hidden states of one sequence's committed tokens that the head may still have to read: row `i` has
/// those of position `start + i`, where the first ones came. In an EAGLE head that row has the token of the
/// position after it.
#[derive(Debug, Default)]
pub struct Features {
    /// Position of the first token whose hidden states came.
    start: Option<usize>,
    /// The head's row of the first states that are kept, and the row after the last.
    kept: Range<usize>,
    /// `[rows, layers * hidden_size]` each, in order.
    parts: VecDeque<Tensor>,
}

impl Features {
    /// The features of a sequence of which the head has `rows` rows in its pool. The states of these rows are
    /// not needed.
    pub fn after(rows: usize) -> Self {
        Self {
            start: Some(0),
            kept: rows..rows,
            parts: VecDeque::new(),
        }
    }

    /// Adds the states of the positions from `position` on, without those that came before. Returns false
    /// if they do not continue those: then they are not added.
    pub fn add(&mut self, position: usize, states: Tensor) -> Result<bool> {
        let start = *self.start.get_or_insert(position);
        let (end, count) = (start + self.kept.end, states.dim(0)?);
        if position > end {
            return Ok(false);
        }
        let known = end - position;
        if known < count {
            self.kept.end += count - known;
            self.parts
                .push_back(states.narrow(0, known, count - known)?);
        }
        Ok(true)
    }

    /// Whether the first states were those of the first position, so that others with the same tokens can
    /// share what a head makes of them.
    pub fn are_whole(&self) -> bool {
        self.start == Some(0)
    }

    /// The tokens of a head's rows, which are `token_offset` of their states, of all `tokens` of the sequence.
    pub fn tokens_of<'a>(&self, tokens: &'a [u32], token_offset: usize) -> &'a [u32] {
        let first = self
            .start
            .map_or(tokens.len(), |start| start + token_offset);
        tokens.get(first..).unwrap_or_default()
    }

    /// The rows whose states are kept.
    pub fn kept(&self) -> Range<usize> {
        self.kept.clone()
    }

    /// The states of some of the [kept](Self::kept) rows.
    ///
    /// # Errors
    /// If the device fails.
    pub fn of_rows(&self, rows: Range<usize>) -> Result<Tensor> {
        let (mut first, mut found) = (self.kept.start, Vec::new());
        for part in &self.parts {
            let len = part.dim(0)?;
            let (from, to) = (rows.start.max(first), rows.end.min(first + len));
            if from < to {
                found.push(part.narrow(0, from - first, to - from)?);
            }
            first += len;
        }
        joined(found)
    }

    /// Drops states of rows before `row`, as far as no other states share their memory.
    pub fn drop_before(&mut self, row: usize) {
        while let Some(len) = self.parts.front().map(|part| part.dims()[0])
            && self.kept.start + len <= row
        {
            self.parts.pop_front();
            self.kept.start += len;
        }
    }
}

/// `[rows, width]` of tensors with so many rows together.
///
/// # Errors
/// If the device fails.
pub fn joined(parts: Vec<Tensor>) -> Result<Tensor> {
    Ok(match parts.as_slice() {
        [one] => one.clone(),
        parts => Tensor::cat(parts, 0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn states_are_kept_until_they_are_dropped() {
        let states = |from: u32, to: u32| {
            let rows: Vec<Vec<f32>> = (from..to).map(|i| vec![i as f32; 2]).collect();
            Tensor::new(rows, &Device::Cpu).unwrap()
        };
        let mut features = Features::default();
        assert!(features.tokens_of(&[1, 2, 3], 0).is_empty());
        assert!(features.add(5, states(0, 3)).unwrap());
        assert!(features.add(8, states(3, 4)).unwrap());
        assert!(!features.add(10, states(4, 5)).unwrap(), "a gap");
        assert!(
            features.add(8, states(3, 6)).unwrap(),
            "the first one is known"
        );
        let tokens = [0, 1, 2, 3, 4, 5, 6, 7];
        assert_eq!(features.tokens_of(&tokens, 1), [6, 7]);
        assert_eq!(features.tokens_of(&tokens, 0), [5, 6, 7]);
        let first = |rows: Range<usize>| {
            let rows = features.of_rows(rows).unwrap().to_vec2::<f32>().unwrap();
            rows.into_iter().map(|row| row[0]).collect::<Vec<_>>()
        };
        assert_eq!(first(1..5), [1., 2., 3., 4.]);
        assert_eq!(first(2..3), [2.]);
        features.drop_before(4);
        assert_eq!(features.kept(), 4..6);
        features.drop_before(5);
        assert_eq!(features.kept(), 4..6, "a part is dropped as a whole");
    }

    /// States of rows that the head has in its pool do not come, or come again.
    #[test]
    fn states_go_on_after_a_cached_prefix() {
        let mut features = Features::after(4);
        assert_eq!(features.tokens_of(&[5, 6, 7], 1), [6, 7]);
        let states =
            |count: usize| Tensor::zeros((count, 2), candle_core::DType::F32, &Device::Cpu);
        assert!(!features.add(5, states(1).unwrap()).unwrap(), "a gap");
        assert!(features.add(2, states(2).unwrap()).unwrap());
        assert_eq!(features.kept(), 4..4);
        assert!(features.add(2, states(5).unwrap()).unwrap());
        assert_eq!(features.kept(), 4..7);
        assert_eq!(features.of_rows(4..7).unwrap().dims(), [3, 2]);
    }
}
