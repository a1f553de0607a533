//! The rows of one sequence, from scheduler to kernel.

use std::ops::Range;

/// The rows of one sequence in a forward.
#[derive(Debug, Clone)]
pub struct Span {
    /// Rows of the forward.
    pub rows: Range<usize>,
    /// Tokens of this sequence that are in the pool before these rows.
    pub context: usize,
    /// Block table: pool position `p` lives in `blocks[p / block_size]`. Row `i` of the span has its
    /// K and V at pool position `context + i`.
    pub blocks: Vec<u32>,
    /// Ancestor mask: bit `j` of entry `i` says that row `i` sees row `j` of the same span, itself
    /// included; all rows see the whole context. `None` = causal. At most 64 rows.
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
