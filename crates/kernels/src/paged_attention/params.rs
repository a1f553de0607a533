//! How the scores of keys become weights.

use candle_core::{DType, Result, Tensor};

/// What attention does with the product of a query and a key, the same for all rows of a call.
#[derive(Debug, Clone, Copy)]
pub struct AttentionParams<'a> {
    /// Factor of the products.
    pub scale: f32,
    /// Number of keys up to its own position that a row sees, at least 1; `None` = all. A row of a tree has
    /// the position after its ancestors.
    pub window: Option<usize>,
    /// Whether a row of a causal span sees the rows of its span after it, too: as many as before it, with a window. A span is
    /// a whole text then.
    pub bidirectional: bool,
    /// Scores become `cap * tanh(score / cap)`, with a cap above 0.
    pub soft_cap: Option<f32>,
    /// `[heads]` f32: a further score of each head's softmax, without a value (Xiao et al. 2023, "Efficient
    /// streaming language models with attention sinks").
    pub sinks: Option<&'a Tensor>,
}

impl AttentionParams<'_> {
    /// Plain attention: only `scale`.
    pub fn scaled(scale: f32) -> Self {
        Self {
            scale,
            window: None,
            bidirectional: false,
            soft_cap: None,
            sinks: None,
        }
    }

    /// The number of keys up to its own that a row sees, and of those of its causal span after it.
    pub(super) fn reach(&self) -> (usize, usize) {
        let window = self.window.unwrap_or(usize::MAX);
        (window, if self.bidirectional { window - 1 } else { 0 })
    }

    /// Checks them for queries with `heads` heads.
    pub(crate) fn check(&self, heads: usize) -> Result<()> {
        let sinks_fit =
            (self.sinks).is_none_or(|sinks| sinks.dims() == [heads] && sinks.dtype() == DType::F32);
        let cap_fits = self.soft_cap.is_none_or(|cap| cap.is_finite() && cap > 0.);
        if self.window == Some(0) || !cap_fits || !sinks_fit {
            candle_core::bail!("paged-attention: {self:?} does not fit {heads} heads");
        }
        Ok(())
    }
}
