//! An EAGLE-3 head in training (Li et al. 2025, arXiv 2503.01840, sections 3.1 and 3.2).
//!
//! At position `i` the head reads the hidden states that the target computed there (`fc` fuses three of
//! its layers) and the token after it, and predicts the token after that. In a draft, its own output takes
//! the place of the hidden states that the target has not computed. It is trained as it drafts
//! ("training-time test"): it runs several passes, each on the outputs of the one before, and the loss is
//! that of all passes.

use super::attention::attend;
use super::head_weights::{GATE_UP, HeadWeights, QKV, variables};
use super::heads::KeyLayout;
use super::optimizer::ByName;
use super::spec::{EAGLE_LAYER, Unrolling};
use super::student::{Student, TrainBatch, published};
use candle_core::{Device, Tensor, Var};
use foretoken_core::error::Result;
use std::collections::HashMap;

/// Weight of the loss of a pass, relative to that of the pass before it.
pub const DECAY: f64 = 0.8;

/// A trainable head in f32.
pub struct TrainHead {
    weights: HeadWeights,
    unrolling: Unrolling,
}

impl TrainHead {
    /// A head of `weights` that is unrolled as `unrolling` says.
    pub fn new(weights: HeadWeights, unrolling: Unrolling) -> Self {
        Self { weights, unrolling }
    }

    /// Returns the same head with a copy of `weights` as its weights.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn with(&self, weights: &ByName<Tensor>) -> Result<Self> {
        let vars = variables(weights)?;
        let others = self.weights.clone();
        Ok(Self::new(HeadWeights { vars, ..others }, self.unrolling))
    }

    /// The embeddings of the tokens that pass `pass` reads at `positions` of each row, `[all positions, hidden]`.
    /// After the end of a row its last token is repeated; nothing is learnt there.
    fn embeddings(&self, rows: &[&[u32]], positions: &[Vec<usize>], pass: usize) -> Result<Tensor> {
        let ids = rows.iter().zip(positions).flat_map(|(row, positions)| {
            let read = move |position: &usize| row[(position + 1 + pass).min(row.len() - 1)];
            positions.iter().map(read)
        });
        self.weights.embed(ids.collect())
    }
}

impl Student for TrainHead {
    fn vars(&self) -> &ByName<Var> {
        &self.weights.vars
    }

    /// The published layout, where `t2d` says of each id whether it has a row.
    fn weights(&self) -> Result<HashMap<String, Tensor>> {
        let mut weights = published(&self.weights.vars, Some(&self.weights.ids))?;
        let mut kept = vec![0u8; self.weights.config.vocab_size];
        for &id in &self.weights.ids {
            kept[id as usize] = 1;
        }
        weights.insert("t2d".into(), Tensor::new(kept, &Device::Cpu)?);
        Ok(weights)
    }

    fn depths(&self) -> (usize, f64) {
        (self.unrolling.passes, DECAY)
    }

    fn target_offset(&self) -> usize {
        1
    }

    /// One of every `stride` positions. The random number chooses the first, so that it differs from step to step.
    fn later_positions(&self, positions: &[usize], random: u64) -> Option<Vec<usize>> {
        let stride = self.unrolling.stride.min(positions.len());
        (stride > 1).then(|| {
            let starts = stride + positions.len() % stride;
            let first = (random % starts as u64) as usize;
            let some = positions.iter().skip(first).step_by(stride);
            some.take(positions.len() / stride).copied().collect()
        })
    }

    fn logits(&self, batch: &TrainBatch<'_>) -> Result<Tensor> {
        let (features, len) = batch.known()?;
        let mut positions = vec![(0..len).collect::<Vec<_>>(); batch.tokens.len()];
        let weights = &self.weights;
        let at = |part: &str| format!("{EAGLE_LAYER}.{part}");
        let qkv = weights.joined(EAGLE_LAYER, &QKV)?;
        let gate_up = weights.joined(EAGLE_LAYER, &GATE_UP)?;
        let mut feature = weights.linear(features, weights.var("fc"))?;
        let (mut known, mut outputs) = (Vec::new(), Vec::new());
        for pass in 0..self.unrolling.passes {
            if let (1, Some(later)) = (pass, &batch.later) {
                positions.clone_from(later);
                let rows = later.iter().enumerate();
                let at = rows.flat_map(|(row, later)| later.iter().map(move |i| row * len + i));
                let at: Vec<u32> = at.map(|at| at as u32).collect();
                feature = feature.index_select(&Tensor::new(at, feature.device())?, 0)?;
            }
            let embedded = self.embeddings(&batch.tokens, &positions, pass)?;
            let embedded = weights.norm(&embedded, &at("input_layernorm"))?;
            let hidden = weights.norm(&feature, &at("hidden_norm"))?;
            known.push(weights.linear(&Tensor::cat(&[embedded, hidden], 1)?, &qkv)?);
            let keys = KeyLayout::of_pass(pass, &positions, len);
            let own = Tensor::cat(&known[pass.min(1)..], 0)?;
            let y = attend(&known[0], &own, &weights.heads, &keys)?;
            feature = weights.after(feature, &y, EAGLE_LAYER, &gate_up)?;
            outputs.push(weights.norm(&feature, "norm")?);
        }
        weights.linear(&Tensor::cat(&outputs, 0)?, weights.var("lm_head"))
    }
}

#[cfg(test)]
mod tests;
