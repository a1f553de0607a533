//! The shapes of attention in training.

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

    /// What a product of query and key is multiplied by.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
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
