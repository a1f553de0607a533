//! A parallel head in training (DFlash, arXiv 2602.06036), with a Markov head (DSpark, arXiv 2607.05147) or
//! without.
//!
//! A block is the token at its anchor and a mask token for each position after it; its rows see one
//! another, and what the target made of the tokens before the anchor. The row of a mask predicts the token
//! at its own position. In training many blocks of a row are computed at once: they share the context, and
//! do not see one another.

use super::attention::attend;
use super::head_weights::{GATE_UP, HeadWeights, QKV};
use super::heads::KeyLayout;
use super::optimizer::ByName;
use super::spec::MARKOV;
use super::student::{Student, TrainBatch, published};
use candle_core::{Tensor, Var};
use foretoken_core::error::Result;
use foretoken_core::model::MaskedBlock;
use std::collections::HashMap;

/// Weight of the loss of a mask, relative to that of the mask before it. The token of the mask before must stand
/// first.
const DECAY: f64 = 0.8;
/// Positions from one anchor to the next.
pub const ANCHOR_STRIDE: usize = 4;

/// A trainable head in f32.
pub struct TrainParallelHead {
    weights: HeadWeights,
    block: MaskedBlock,
    has_markov: bool,
}

impl TrainParallelHead {
    /// A head of `weights` that reads blocks like `block`, and has a Markov head or not.
    pub fn new(weights: HeadWeights, block: MaskedBlock) -> Self {
        Self {
            has_markov: weights.vars.keys().any(|name| name.starts_with(MARKOV[0])),
            weights,
            block,
        }
    }

    /// The tokens of all blocks.
    fn tokens(&self, batch: &TrainBatch<'_>) -> Vec<u32> {
        let rows = batch.tokens.iter().zip(&batch.positions);
        let lasts = rows.flat_map(|(row, anchors)| anchors.iter().map(|&anchor| row[anchor]));
        let masks = self.block.size - 1;
        lasts
            .flat_map(|last| {
                std::iter::once(last).chain(std::iter::repeat_n(self.block.mask, masks))
            })
            .collect()
    }

    /// The token of the text before each mask, in the order of the logits. After the end of a row its last
    /// token is repeated; nothing is learnt there.
    fn tokens_before(&self, batch: &TrainBatch<'_>) -> Vec<u32> {
        let of_mask = |mask: usize| {
            let rows = batch.tokens.iter().zip(&batch.positions);
            rows.flat_map(move |(row, anchors)| {
                let before = move |&anchor: &usize| row[(anchor + mask - 1).min(row.len() - 1)];
                anchors.iter().map(before)
            })
        };
        (1..self.block.size).flat_map(of_mask).collect()
    }
}

impl Student for TrainParallelHead {
    fn vars(&self) -> &ByName<Var> {
        &self.weights.vars
    }

    fn weights(&self) -> Result<HashMap<String, Tensor>> {
        published(&self.weights.vars, Some(&self.weights.ids))
    }

    fn depths(&self) -> (usize, f64) {
        (self.block.size - 1, DECAY)
    }

    fn follows_paths(&self) -> bool {
        self.has_markov
    }

    /// Anchors at regular distances, after a context of at least one token.
    fn positions(&self, len: usize, random: u64) -> Vec<usize> {
        let first = 1 + (random % ANCHOR_STRIDE as u64) as usize;
        let count = len.saturating_sub(1) / ANCHOR_STRIDE;
        (0..count).map(|n| first + n * ANCHOR_STRIDE).collect()
    }

    fn logits(&self, batch: &TrainBatch<'_>) -> Result<Tensor> {
        let (features, len) = batch.known()?;
        let (weights, size) = (&self.weights, self.block.size);
        let blocks = KeyLayout::of_blocks(size, &batch.positions, len);
        let context = weights.linear(features, weights.var("fc"))?;
        let context = weights.norm(&context, "hidden_norm")?;
        let mut x = weights.embed(self.tokens(batch))?;
        for layer in 0..weights.config.num_layers() {
            let layer = format!("layers.{layer}");
            let normed = weights.norm(&x, &format!("{layer}.input_layernorm"))?;
            let of_context = weights.linear(&context, &weights.joined(&layer, &QKV[1..])?)?;
            let of_blocks = weights.linear(&normed, &weights.joined(&layer, &QKV)?)?;
            let y = attend(&of_context, &of_blocks, &weights.heads, &blocks)?;
            x = weights.after(x, &y, &layer, &weights.joined(&layer, &GATE_UP)?)?;
        }
        let blocks = blocks.prefix.len() / size;
        let masks = (1..size).flat_map(|mask| (0..blocks).map(move |at| (at * size + mask) as u32));
        let masks = Tensor::new(masks.collect::<Vec<_>>(), x.device())?;
        let normed = weights.norm(&x.index_select(&masks, 0)?, "norm")?;
        let logits = weights.linear(&normed, weights.var("lm_head"))?;
        if !self.has_markov {
            return Ok(logits);
        }
        let [of_token, to_outputs] = MARKOV.map(|name| weights.var(name));
        let before = Tensor::new(self.tokens_before(batch), x.device())?;
        let before = of_token.index_select(&before, 0)?;
        Ok((logits + weights.linear(&before, to_outputs)?)?)
    }
}

#[cfg(test)]
mod tests;
