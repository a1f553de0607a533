//! The rows of one sequence in a forward, from the scheduler to the kernels.

use std::ops::Range;

/// The rows of one sequence in a forward.
#[derive(Debug, Clone)]
pub struct Span {
    /// The rows of the forward that belong to the sequence.
    pub rows: Range<usize>,
    /// The number of the sequence's tokens in the pool before these rows.
    pub context: usize,
    /// Block table: position `p` of the sequence is in block `blocks[p / block_size]`. The K and V of
    /// row `i` of the span are at position `context + i`.
    pub blocks: Vec<u32>,
    /// Ancestor mask: bit `j` of entry `i` is set if row `i` of the span sees row `j` of it; a row sees
    /// itself, and may see later rows. All rows see the whole context. `None` = causal. At most 64 rows.
    pub tree: Option<Vec<u64>>,
}

impl Span {
    /// Whether row `row` of this span sees row `other` of it.
    pub fn sees(&self, row: usize, other: usize) -> bool {
        match &self.tree {
            None => other <= row,
            Some(mask) => mask[row] >> other & 1 == 1,
        }
    }
}
