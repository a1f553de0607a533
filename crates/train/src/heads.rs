//! The shapes of attention in training.

use foretoken_core::error::{Error, Result};
use foretoken_model::ModelConfig;
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
    /// The attention of layers of shape `config` that rotate to positions below `positions`.
    ///
    /// # Errors
    /// `Setup`, if the layers are not like Llama's.
    pub fn of(config: &ModelConfig, positions: usize) -> Result<Self> {
        let frequencies = config.plain_rope().map_err(Error::setup)?.frequencies();
        let table = |turn: fn(f32) -> f32| -> Arc<Vec<f32>> {
            let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
            Arc::new(angles.map(turn).collect())
        };
        Ok(Self {
            queries: config.num_heads,
            keys: config.num_kv_heads,
            head_dim: config.head_dim,
            cos: table(f32::cos),
            sin: table(f32::sin),
        })
    }

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

/// The keys that each query row sees: the first ones of its text, and some of its own.
///
/// Q, K and V of the own rows stand in one tensor, in parts of `prefix.len()` rows each. The rows of the last part
/// have the queries. In a part, the rows of a text stand side by side, in blocks of `size` rows.
#[derive(Debug, Clone)]
pub struct KeyLayout {
    /// Number of texts, and positions of each.
    pub texts: usize,
    pub len: usize,
    /// The number of keys of its text that each query row sees.
    pub prefix: Vec<usize>,
    /// The position of each own row.
    pub positions: Vec<usize>,
    /// Rows of a block.
    pub size: usize,
    /// The number of own keys that a query row sees: those of its block in all parts; or 0.
    pub own: usize,
}

impl KeyLayout {
    /// The keys of the last of `passes + 1` passes of an unrolled head, which runs over `positions` of texts of `len`
    /// positions, as many of each text. A row of pass `s` is rotated as if it were `s` positions further. It sees the
    /// text of the first pass up to its position, and what the later passes have drafted from there.
    pub fn of_pass(passes: usize, positions: &[Vec<usize>], len: usize) -> Self {
        let all = positions.concat();
        let of_pass = |pass| all.iter().map(move |position| position + pass);
        Self {
            texts: positions.len(),
            len,
            prefix: all.iter().map(|position| position + 1).collect(),
            positions: (passes.min(1)..=passes).flat_map(of_pass).collect(),
            size: 1,
            own: passes,
        }
    }

    /// The keys of blocks of `size` rows in texts of `len` positions, as many in each text. A block begins at its
    /// anchor: its rows see the text before the anchor, and one another.
    pub fn of_blocks(size: usize, anchors: &[Vec<usize>], len: usize) -> Self {
        let all = || anchors.iter().flatten();
        Self {
            texts: anchors.len(),
            len,
            prefix: all()
                .flat_map(|&at| std::iter::repeat_n(at, size))
                .collect(),
            positions: all().flat_map(|&at| at..at + size).collect(),
            size,
            own: size,
        }
    }

    /// Query rows of a text.
    pub fn count(&self) -> usize {
        self.prefix.len() / self.texts.max(1)
    }

    /// The number of the first own row with a query.
    pub fn first_query(&self) -> usize {
        self.positions.len() - self.prefix.len()
    }
}
