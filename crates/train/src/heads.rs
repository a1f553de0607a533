//! The shapes of attention in training.

use std::ops::Range;
use std::sync::Arc;

/// The shapes of the attention.
#[derive(Debug, Clone)]
pub struct Heads {
    /// Query heads, and heads of K and V.
    pub queries: usize,
    pub keys: usize,
    pub head_dim: usize,
    /// `[positions, head_dim / 2]`, for all positions that a pass may rotate to.
    pub cos: Arc<Vec<f32>>,
    pub sin: Arc<Vec<f32>>,
}

impl Heads {
    /// Width of Q, K and V of one position side by side.
    pub fn width(&self) -> usize {
        (self.queries + 2 * self.keys) * self.head_dim
    }

    /// Cosines and sines of the angles at `position`.
    pub fn rotation(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.head_dim / 2;
        let at = position * half..(position + 1) * half;
        (&self.cos[at.clone()], &self.sin[at])
    }

    /// Returns the factor of the products of queries and keys.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Where the drafts of a few rows begin. The first pass of an unrolled head runs over all positions, the later
/// ones over these.
#[derive(Debug, Clone)]
pub struct Drafts {
    pub rows: usize,
    /// Positions of a row.
    pub len: usize,
    /// The positions at which drafts begin, row after row, as many in each; `None` = all.
    pub starts: Option<Arc<Vec<usize>>>,
}

impl Drafts {
    /// Positions of a row in pass `pass`.
    pub fn count(&self, pass: usize) -> usize {
        match &self.starts {
            Some(starts) if pass > 0 => starts.len() / self.rows.max(1),
            _ => self.len,
        }
    }

    /// The position of number `i` of row `row` in pass `pass`.
    pub fn position(&self, pass: usize, row: usize, i: usize) -> usize {
        match &self.starts {
            Some(starts) if pass > 0 => starts[row * self.count(pass) + i],
            _ => i,
        }
    }

    /// The positions of all rows in pass `pass`, one row after the other.
    pub fn positions(&self, pass: usize) -> Vec<usize> {
        let of_row = |row| (0..self.count(pass)).map(move |i| self.position(pass, row, i));
        (0..self.rows).flat_map(of_row).collect()
    }

    /// Where pass `pass` is if the passes stand one after the other.
    pub fn places(&self, pass: usize) -> Range<usize> {
        let size = |pass| self.rows * self.count(pass);
        let start: usize = (0..pass).map(size).sum();
        start..start + size(pass)
    }
}

/// The blocks of a few rows.
#[derive(Debug, Clone)]
pub struct BlockLayout {
    /// Positions of a row in the context.
    pub len: usize,
    /// Rows of a block.
    pub size: usize,
    /// Position of the first row of each block, row after row; all rows have as many blocks.
    pub anchors: Vec<usize>,
}
