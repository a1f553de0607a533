//! What distinguishes layers with multi-head latent attention.

use foretoken_kernels::{GPU_HEAD_DIM_STEP, MAX_GPU_LATENT_KEY, MAX_GPU_LATENT_RANK};

/// Maximum width of queries before their heads are made of them.
const MAX_Q_RANK: usize = 1 << 16;
/// Maximum width of a part of a head.
const MAX_WIDTH: usize = 1 << 12;

/// The widths of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1): keys and
/// values of all heads are products of one latent vector of a token, beside one rotated key that all heads share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentSpec {
    /// Width of the latent vector that queries are products of; `None` = they are products of the layer's input.
    pub q_rank: Option<usize>,
    /// Width of the latent vector that keys and values are products of.
    pub rank: usize,
    /// Width of the part without a position of a head's queries and keys.
    pub nope: usize,
    /// Width of the part with a position of a head's queries and keys.
    pub rope: usize,
    /// Width of a head's values.
    pub value: usize,
}

impl LatentSpec {
    /// Number of values that are kept of a token.
    pub fn kept(&self) -> usize {
        self.rank + self.rope
    }

    /// Width of a head's queries and keys.
    pub fn key(&self) -> usize {
        self.nope + self.rope
    }

    /// Number of outputs that `heads` heads have of the layer's input.
    pub fn products(&self, heads: usize) -> usize {
        self.q_rank.unwrap_or(heads * self.key()) + self.kept()
    }

    /// Number of weights of `heads` heads between a stream of `hidden` values and itself.
    pub fn weights(&self, heads: usize, hidden: usize) -> usize {
        let of_hidden = self.products(heads) + heads * self.value;
        let of_queries = self.q_rank.unwrap_or(0) * heads * self.key();
        hidden * of_hidden + of_queries + heads * (self.nope + self.value) * self.rank
    }

    /// Whether a GPU has kernels for these widths.
    pub(crate) fn fits_gpu(&self) -> bool {
        let widths = [self.rank, self.kept()];
        self.rank <= MAX_GPU_LATENT_RANK
            && self.kept() <= MAX_GPU_LATENT_KEY
            && widths
                .iter()
                .all(|width| width.is_multiple_of(GPU_HEAD_DIM_STEP))
    }

    /// Checks that no product of them overflows.
    pub(crate) fn check(&self) -> Result<(), String> {
        let sizes = [
            ("q_lora_rank", self.q_rank.unwrap_or(1), MAX_Q_RANK),
            ("kv_lora_rank", self.rank, MAX_WIDTH),
            ("qk_nope_head_dim", self.nope, MAX_WIDTH),
            ("qk_rope_head_dim", self.rope, MAX_WIDTH),
            ("v_head_dim", self.value, MAX_WIDTH),
        ];
        let wrong = sizes
            .iter()
            .find(|(_, size, max)| !(1..=*max).contains(size));
        match wrong {
            None => Ok(()),
            Some((name, size, max)) => Err(format!(
                "{name} {size} is not supported: only 1 to {max} is"
            )),
        }
    }
}
