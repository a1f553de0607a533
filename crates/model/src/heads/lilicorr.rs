//! LiLiCorr's correction of a block (arXiv 2608.20530): of each position the most probable tokens are candidates. A small
//! transformer over the candidates of all positions makes two vectors of each. The logit of a candidate after another one
//! is their cosine similarity, that of the vector out of the one and the vector into the other, times a factor.
//!
//! All of it is computed when the block is, and kept in one row for each position: see [`LiLiCorr::correct`].

use super::config::LiLiCorrConfig;
use crate::config::ModelConfig;
use crate::layers::linear::{Embedding, Linear};
use crate::layers::norm::Norm;
use crate::spec::NormSpec;
use crate::weights::Weights;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops::{silu, softmax_last_dim};
use foretoken_core::error::Result;
use foretoken_kernels::sample::top_logits;

/// What is told of a candidate: its log-probability, its probability, how far it is below the best one, its rank from 0
/// to 1, and whether it is the best one.
const FACTS: usize = 5;
/// The epsilon of PyTorch's LayerNorm.
const FACTS_EPS: f32 = 1e-5;

/// Names of parts that early servers numbered.
#[derive(Clone, Copy)]
struct Names {
    facts_norm: &'static str,
    facts_up: &'static str,
    facts_down: &'static str,
    up: &'static str,
    down: &'static str,
}

const NAMES: Names = Names {
    facts_norm: "feature_norm",
    facts_up: "feature_mlp.up_proj",
    facts_down: "feature_mlp.down_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
};
const EARLY_NAMES: Names = Names {
    facts_norm: "feature_mlp.0",
    facts_up: "feature_mlp.1",
    facts_down: "feature_mlp.3",
    up: "mlp.0",
    down: "mlp.2",
};

/// A loaded correction.
pub(crate) struct LiLiCorr {
    of: LiLiCorrConfig,
    eps: f32,
    /// Positions of the largest block.
    slots: usize,
    /// Projects embeddings to the width of the correction; `None` = they have it.
    token: Option<Linear>,
    /// Projects the hidden states of rows.
    row: Linear,
    facts: (Norm, Linear, Linear),
    /// `[slots, 1, width]`.
    slot_embedding: Tensor,
    /// `[1, top_k, width]`.
    rank_embedding: Tensor,
    /// `[heads, 2 * (slots + 1) - 1]`: for each distance between positions, what is added to scores of attention.
    distance_bias: Tensor,
    /// `[heads, 1, 1]`: what is added besides between candidates of a position.
    same_bias: Tensor,
    /// Projects the features of the last committed position.
    anchor: Linear,
    layers: Vec<LatticeLayer>,
    norm: Norm,
    anchor_norm: Norm,
    factor: Linear,
    out: Linear,
    into: Linear,
    anchor_out: Linear,
}

/// A layer of the transformer, whose rows are the candidates of a block.
struct LatticeLayer {
    attention_norm: Norm,
    /// Projects to queries, keys and values: the weight, `[3 * width, width]`, and the bias.
    qkv: (Tensor, Tensor),
    out: Linear,
    mlp_norm: Norm,
    up: Linear,
    down: Linear,
}

impl LiLiCorr {
    /// Reads the weights of the correction of a head whose layers are like `config` and whose largest block has so many
    /// `slots` for tokens.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        of: LiLiCorrConfig,
        config: &ModelConfig,
        slots: usize,
        weights: &mut Weights,
    ) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, of.width);
        let at = |part: &str| format!("lilicorr.{part}");
        let names = if weights.has(&at("feature_norm.weight")) {
            NAMES
        } else {
            EARLY_NAMES
        };
        let mut linear = |part: &str, outputs: usize, inputs: usize| {
            weights.linear(&at(part), (outputs, inputs), true)
        };
        let token = (width != hidden).then(|| linear("token_proj", width, hidden));
        let (row, anchor) = (
            linear("pass_hidden_proj", width, hidden)?,
            linear("context_proj", width, hidden)?,
        );
        let facts = (
            linear(names.facts_up, width, FACTS)?,
            linear(names.facts_down, width, width)?,
        );
        let factor = linear("factor_input_proj", width, 3 * width)?;
        let (out, into) = (
            linear("out_head", of.factor, width)?,
            linear("in_head", of.factor, width)?,
        );
        let anchor_out = linear("anchor_out_head", of.factor, width)?;
        let spec = NormSpec {
            is_centered: true,
            has_bias: true,
            ..NormSpec::default()
        };
        let facts_norm = Norm::load(weights, &at(names.facts_norm), FACTS, spec)?;
        let layers = (0..of.layers)
            .map(|layer| LatticeLayer::load(&at(&format!("layers.{layer}")), of, names, weights))
            .collect::<Result<_>>()?;
        let slot_embedding = weights.tensor(&at("slot_embedding"), &[1, 1, slots, 1, width])?;
        let rank_embedding = weights.tensor(&at("rank_embedding"), &[1, 1, 1, of.top_k, width])?;
        let distances = [of.heads, 2 * slots + 1];
        let same_bias = weights.tensor(&at("same_slot_bias"), &[of.heads])?;
        Ok(Self {
            eps: config.rms_norm_eps as f32,
            slots,
            token: token.transpose()?,
            row,
            facts: (facts_norm, facts.0, facts.1),
            slot_embedding: slot_embedding.reshape((slots, 1, width))?,
            rank_embedding: rank_embedding.reshape((1, of.top_k, width))?,
            distance_bias: weights.tensor(&at("relative_slot_bias"), &distances)?,
            same_bias: same_bias.reshape((of.heads, 1, 1))?,
            anchor,
            layers,
            norm: Norm::rms(weights, &at("output_norm"), width)?,
            anchor_norm: Norm::rms(weights, &at("anchor_norm"), width)?,
            factor,
            out,
            into,
            anchor_out,
            of,
        })
    }

    /// Number of tokens that the largest block predicts.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// What is kept of a block's rows, `[rows, top_k * (top_k + 2)]` f32, whose logits are `logits`, `[rows, vocab_size]`
    /// f32, and hidden states `hidden`. `anchor`, `[1, hidden_size]`, are the features of the last committed position.
    ///
    /// A row has the logits of its candidates after each candidate of the row before, the ids of the latter, and its
    /// own ids. Of the first row, the logits do not depend on what is before, and the ids before it are 0.
    ///
    /// # Errors
    /// If the device fails.
    pub fn correct(
        &self,
        (logits, hidden): (&Tensor, &Tensor),
        anchor: &Tensor,
        embedding: &Embedding,
    ) -> Result<Tensor> {
        let (device, top_k) = (hidden.device(), self.of.top_k);
        let (mut ids, mut facts) = (Vec::new(), Vec::new());
        for row in top_logits(logits, top_k.min(logits.dim(1)?))?.read()? {
            let max = row.logits.first().copied().unwrap_or(0.);
            let own = row.logits.iter().map(|logit| f64::from(logit - max).exp());
            let sum = own.sum::<f64>() + row.rest;
            facts.extend(facts_of(&row.logits, sum.ln() as f32));
            ids.push(row.ids);
        }
        let slots = ids.len();
        let flat = Tensor::new(ids.concat(), device)?;
        let embedded = embedding.forward(&flat)?;
        let facts = Tensor::from_vec(facts, (slots * top_k, FACTS), device)?;
        let facts = facts.to_dtype(embedded.dtype())?;
        let (start, pairs) = self.scores(&embedded, &facts, hidden, anchor)?;
        let none = vec![0.; top_k];
        let as_floats = |ids: &[u32]| ids.iter().map(|&id| id as f32).collect::<Vec<f32>>();
        let mut kept = Vec::with_capacity(slots * top_k * (top_k + 2));
        for slot in 0..slots {
            let before = slot.checked_sub(1);
            match before {
                None => kept.extend(start.repeat(top_k)),
                Some(before) => kept.extend(&pairs[before]),
            }
            kept.extend(before.map_or_else(|| none.clone(), |before| as_floats(&ids[before])));
            kept.extend(as_floats(&ids[slot]));
        }
        Ok(Tensor::from_vec(
            kept,
            (slots, top_k * (top_k + 2)),
            device,
        )?)
    }

    /// The logits of the candidates at the first position, `[top_k]`, and for each further position those after each
    /// candidate before, `[top_k * top_k]`.
    fn scores(
        &self,
        embedded: &Tensor,
        facts: &Tensor,
        hidden: &Tensor,
        anchor: &Tensor,
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let LiLiCorrConfig {
            width,
            top_k,
            factor,
            ..
        } = self.of;
        let slots = hidden.dim(0)?;
        let (norm, up, down) = &self.facts;
        let facts = down.forward(&silu(&up.forward(&norm.forward(facts, FACTS_EPS)?)?)?)?;
        let tokens = match &self.token {
            Some(token) => token.forward(embedded)?,
            None => embedded.clone(),
        };
        let x = (tokens + facts)?.reshape((slots, top_k, width))?;
        let x = x.broadcast_add(&self.row.forward(hidden)?.unsqueeze(1)?)?;
        let x = x.broadcast_add(&self.slot_embedding.narrow(0, 0, slots)?)?;
        let x = x.broadcast_add(&self.rank_embedding)?;
        let mut x = x.reshape((slots * top_k, width))?;
        let bias = self.bias(slots)?;
        for layer in &self.layers {
            x = layer.forward(&x, &bias, self.of.heads, self.eps)?;
        }
        let x = self.norm.forward(&x.contiguous()?, self.eps)?;
        let anchor = self.anchor.forward(anchor)?;
        let anchor = self.anchor_norm.forward(&anchor, self.eps)?;
        let row = anchor.broadcast_as((slots * top_k, width))?.contiguous()?;
        let both = (&x * &row)?;
        let made = silu(&self.factor.forward(&Tensor::cat(&[&x, &row, &both], 1)?)?)?;
        let unit = |x: Tensor| self.unit(&x);
        let shape = (slots, top_k, factor);
        let out = unit(self.out.forward(&made)?)?.reshape(shape)?;
        let into = unit(self.into.forward(&made)?)?.reshape(shape)?;
        let first = unit(self.anchor_out.forward(&anchor)?)?;
        let scale = f64::from(self.of.scale);
        let start = first.matmul(&into.get(0)?.t()?.contiguous()?)?;
        let start = (start * scale)?.flatten_all()?.to_vec1()?;
        let pairs = (1..slots).map(|slot| {
            let after = into.get(slot)?.t()?.contiguous()?;
            let pairs = out.get(slot - 1)?.contiguous()?.matmul(&after)?;
            Ok((pairs * scale)?.flatten_all()?.to_vec1()?)
        });
        Ok((start, pairs.collect::<Result<_>>()?))
    }

    /// `x` in f32 with rows of length 1, but for those that are nearly 0.
    fn unit(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::F32)?;
        let length = x.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
        Ok(x.broadcast_div(&length.maximum(self.of.min_length)?)?)
    }

    /// What is added to the scores of attention between the candidates of so many positions: `[heads, candidates,
    /// candidates]`.
    fn bias(&self, slots: usize) -> Result<Tensor> {
        let (top_k, device) = (self.of.top_k, self.distance_bias.device());
        let count = slots * top_k;
        let slot_of = |i: usize| i / top_k;
        let all = || (0..count * count).map(|i| (slot_of(i / count), slot_of(i % count)));
        let distances: Vec<u32> = all()
            .map(|(own, other)| (own + self.slots - other) as u32)
            .collect();
        let same: Vec<f32> = all().map(|(own, other)| f32::from(own == other)).collect();
        let shape = (self.of.heads, count, count);
        let bias = self
            .distance_bias
            .index_select(&Tensor::new(distances, device)?, 1)?;
        let same = Tensor::from_vec(same, (1, count, count), device)?;
        let same = same
            .to_dtype(bias.dtype())?
            .broadcast_mul(&self.same_bias)?;
        Ok((bias.reshape(shape)? + same)?)
    }

    /// The logits, `[rows, vocab_size]`, after `tokens` of rows of which this is kept, `[rows, top_k * (top_k + 2)]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn after(&self, tokens: &[u32], kept: &Tensor, vocab_size: usize) -> Result<Tensor> {
        let top_k = self.of.top_k;
        let mut logits = vec![f32::NEG_INFINITY; tokens.len() * vocab_size];
        let kept = kept.to_vec2::<f32>()?;
        for ((row, &token), logits) in kept.iter().zip(tokens).zip(logits.chunks_mut(vocab_size)) {
            let (scores, ids) = row.split_at(top_k * top_k);
            let (before, ids) = ids.split_at(top_k);
            // After a token that is no candidate, as after the best one.
            let rank = before.iter().position(|&id| id as u32 == token);
            let scores = &scores[rank.unwrap_or(0) * top_k..][..top_k];
            for (&id, &score) in ids.iter().zip(scores) {
                logits[id as usize] = score;
            }
        }
        let dims = (tokens.len(), vocab_size);
        Ok(Tensor::from_vec(logits, dims, &Device::Cpu)?)
    }
}

/// What is told of the candidates of a position, which have these `logits`, the largest one first. `log_sum` is the
/// logarithm of the sum of all weights of the position, of which the first candidate has 1.
fn facts_of(logits: &[f32], log_sum: f32) -> Vec<f32> {
    let max = logits.first().copied().unwrap_or(0.);
    let last = logits.len().saturating_sub(1).max(1) as f32;
    let of = |(rank, &logit): (usize, &f32)| {
        let gap = logit - max;
        let log_prob = gap - log_sum;
        let is_best = f32::from(u8::from(rank == 0));
        [log_prob, log_prob.exp(), gap, rank as f32 / last, is_best]
    };
    logits.iter().enumerate().flat_map(of).collect()
}

impl LatticeLayer {
    fn load(name: &str, of: LiLiCorrConfig, names: Names, weights: &mut Weights) -> Result<Self> {
        let (width, inner) = (of.width, of.mlp_width);
        let at = |part: &str| format!("{name}.{part}");
        let weight = weights.tensor(&at("attn.in_proj_weight"), &[3 * width, width])?;
        let bias = weights.tensor(&at("attn.in_proj_bias"), &[3 * width])?;
        let mut linear = |part: &str, shape| weights.linear(&at(part), shape, true);
        let (out, up, down) = (
            linear("attn.out_proj", (width, width))?,
            linear(names.up, (inner, width))?,
            linear(names.down, (width, inner))?,
        );
        Ok(Self {
            attention_norm: Norm::rms(weights, &at("attn_norm"), width)?,
            qkv: (weight.t()?.contiguous()?, bias),
            out,
            mlp_norm: Norm::rms(weights, &at("mlp_norm"), width)?,
            up,
            down,
        })
    }

    /// The rows after the layer, `[candidates, width]`; `bias` is added to scores of attention.
    fn forward(&self, x: &Tensor, bias: &Tensor, heads: usize, eps: f32) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let dim = width / heads;
        let normed = self.attention_norm.forward(&x.contiguous()?, eps)?;
        let qkv = normed.matmul(&self.qkv.0)?.broadcast_add(&self.qkv.1)?;
        let part = |at: usize| -> Result<Tensor> {
            let part = qkv.narrow(1, at * width, width)?;
            let part = part.reshape((rows, heads, dim))?;
            Ok(part.transpose(0, 1)?.contiguous()?)
        };
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scores = q.matmul(&k.transpose(1, 2)?.contiguous()?)?;
        let scores = ((scores / (dim as f64).sqrt())? + bias)?;
        let attended = softmax_last_dim(&scores)?.matmul(&v)?;
        let attended = attended.transpose(0, 1)?.contiguous()?;
        let attended = attended.reshape((rows, width))?;
        let x = (x + self.out.forward(&attended)?)?;
        let normed = self.mlp_norm.forward(&x, eps)?;
        let up = silu(&self.up.forward(&normed)?)?;
        Ok((x + self.down.forward(&up)?)?)
    }
}
