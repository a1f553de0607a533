//! An EAGLE-3 head in training (Li et al. 2025, arXiv 2503.01840, sections 3.1 and 3.2).
//!
//! At position `i` the head reads the hidden states that the target computed there (`fc` fuses three of
//! its layers) and the token after it, and predicts the token after that. In a draft, its own output takes
//! the place of the hidden states that the target has not computed. It is trained as it drafts
//! ("training-time test"): it runs several passes, each on the outputs of the one before, and the loss is
//! that of all passes.

use super::attention::{Heads, attend};
use super::model::{INITIAL_DEVIATION, fresh};
use super::ops::{linear, rms_norm, swiglu};
use super::optimizer::Named;
use super::student::{Batch, Student};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, Weights, names};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::HashMap;
use std::sync::Arc;

/// How much less the loss of a pass counts than that of the one before it.
const DECAY: f64 = 0.8;
/// Standard deviation of the noise beside what is taken from the target. Larger noise in `fc` would drown
/// the one layer that the first step can use.
const FC_NOISE: f64 = 0.002;
const EMBEDDING_NOISE: f64 = 0.01;

/// A trainable head in f32, on the CPU.
pub struct Head {
    config: ModelConfig,
    vars: Named<Var>,
    /// `[vocab_size, hidden]`: the target's; it is not trained.
    embedding: Tensor,
    /// The target's ids of the head's output rows.
    ids: Vec<u32>,
    passes: usize,
    heads: Heads,
}

impl Head {
    /// A head of shape `config` that predicts `ids` and is unrolled over `passes` steps, for rows of
    /// `seq_len` tokens. It starts with what it can take of the target: its last layer, its final norm, and
    /// its output layer; the rest is noise from `seed`.
    ///
    /// # Errors
    /// `Setup`, if the target does not have the tensors of a decoder.
    pub fn new(
        config: ModelConfig,
        (target, weights): (&ModelConfig, &mut Weights),
        taps: usize,
        ids: Vec<u32>,
        passes: usize,
        (seed, seq_len): (u64, usize),
    ) -> Result<Self> {
        let mut start = Start {
            layer: target.num_layers.saturating_sub(1),
            tied: target.tie_word_embeddings,
            weights,
            ids: &ids,
            seed,
        };
        let vars = shapes(&config, taps, ids.len())
            .into_iter()
            .map(|(name, dims)| {
                let var = Var::from_tensor(&start.weight(&name, &dims)?)?;
                Ok((name, var))
            })
            .collect::<Result<_>>()?;
        let embedding = start.tensor(&format!("{}.weight", names::EMBEDDING))?;
        let frequencies = config.inverse_frequencies();
        let table = |turn: fn(f32) -> f32| -> Arc<Vec<f32>> {
            let positions = 0..seq_len + passes;
            let angles = positions.flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
            Arc::new(angles.map(turn).collect())
        };
        Ok(Self {
            heads: Heads {
                queries: config.num_heads,
                keys: config.num_kv_heads,
                head_dim: config.head_dim,
                cos: table(f32::cos),
                sin: table(f32::sin),
            },
            config,
            vars,
            embedding,
            ids,
            passes,
        })
    }

    fn var(&self, name: &str) -> &Tensor {
        self.vars[&format!("{name}.weight")].as_tensor()
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        Ok(rms_norm(x, self.var(name), self.config.rms_norm_eps)?)
    }

    /// The weights of layers with the same input, one below the other.
    fn joined(&self, names: &[&str]) -> Result<Tensor> {
        let all: Vec<&Tensor> = names.iter().map(|name| self.var(name)).collect();
        Ok(Tensor::cat(&all, 0)?)
    }

    /// The embeddings of the tokens that pass `pass` reads, `[rows * positions, hidden]`. After the end of
    /// a row its last token is repeated; nothing is learnt there.
    fn embeddings(&self, tokens: &[&[u32]], pass: usize) -> Result<Tensor> {
        let ids: Vec<u32> = tokens
            .iter()
            .flat_map(|row| {
                let last = row.len() - 1;
                (1..last).map(move |i| row[(i + pass).min(last)])
            })
            .collect();
        let ids = Tensor::new(ids, &Device::Cpu)?;
        Ok(self.embedding.index_select(&ids, 0)?)
    }
}

impl Student for Head {
    fn vars(&self) -> &Named<Var> {
        &self.vars
    }

    /// The published layout: `d2t` is the id of each output row minus the row's number, `t2d` says of each
    /// id whether it has a row.
    fn weights(&self) -> Result<HashMap<String, Tensor>> {
        let vars = self.vars.iter();
        let mut weights: HashMap<String, Tensor> = vars
            .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
            .collect();
        let offsets: Vec<i64> = (0..)
            .zip(&self.ids)
            .map(|(i, &id)| i64::from(id) - i)
            .collect();
        let mut kept = vec![0u8; self.config.vocab_size];
        for &id in &self.ids {
            kept[id as usize] = 1;
        }
        weights.insert(
            names::OUTPUT_IDS.into(),
            Tensor::new(offsets, &Device::Cpu)?,
        );
        weights.insert("t2d".into(), Tensor::new(kept, &Device::Cpu)?);
        Ok(weights)
    }

    fn depths(&self) -> (usize, f64) {
        (self.passes, DECAY)
    }

    fn ahead(&self) -> usize {
        1
    }

    fn logits(&self, batch: &Batch<'_>) -> Result<Tensor> {
        let features = (batch.features.as_ref())
            .ok_or_else(|| Error::internal("a head reads the target's hidden states"))?;
        let positions = features.dim(0)? / batch.tokens.len().max(1);
        let at = |part: &str| format!("midlayer.{part}");
        let qkv = ["q", "k", "v"].map(|part| at(&format!("self_attn.{part}_proj")));
        let qkv = self.joined(&qkv.each_ref().map(String::as_str))?;
        let gate_up = [at("mlp.gate_proj"), at("mlp.up_proj")];
        let gate_up = self.joined(&gate_up.each_ref().map(String::as_str))?;
        let mut feature = linear(features, self.var("fc"))?;
        let (mut known, mut outputs) = (Vec::new(), Vec::new());
        for pass in 0..self.passes {
            let embedded = self.embeddings(&batch.tokens, pass)?;
            let embedded = self.norm(&embedded, &at("input_layernorm"))?;
            let hidden = self.norm(&feature, &at("hidden_norm"))?;
            let x = linear(&Tensor::cat(&[embedded, hidden], 1)?, &qkv)?;
            known.push(x.unsqueeze(0)?);
            let y = attend(&Tensor::cat(&known, 0)?, &self.heads, positions)?;
            let residual = (feature + linear(&y, self.var(&at("self_attn.o_proj")))?)?;
            let normed = self.norm(&residual, &at("post_attention_layernorm"))?;
            let wide = swiglu(&linear(&normed, &gate_up)?)?;
            feature = (residual + linear(&wide, self.var(&at("mlp.down_proj")))?)?;
            outputs.push(self.norm(&feature, "norm")?);
        }
        Ok(linear(&Tensor::cat(&outputs, 0)?, self.var("lm_head"))?)
    }
}

/// The name and shape of every weight of a head that reads `taps` layers and predicts `outputs` ids.
fn shapes(config: &ModelConfig, taps: usize, outputs: usize) -> Vec<(String, Vec<usize>)> {
    let (hidden, mlp, d) = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
    );
    let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
    [
        ("fc", vec![hidden, taps * hidden]),
        ("midlayer.input_layernorm", vec![hidden]),
        ("midlayer.hidden_norm", vec![hidden]),
        ("midlayer.post_attention_layernorm", vec![hidden]),
        ("midlayer.self_attn.q_proj", vec![q, 2 * hidden]),
        ("midlayer.self_attn.k_proj", vec![kv, 2 * hidden]),
        ("midlayer.self_attn.v_proj", vec![kv, 2 * hidden]),
        ("midlayer.self_attn.o_proj", vec![hidden, q]),
        ("midlayer.mlp.gate_proj", vec![mlp, hidden]),
        ("midlayer.mlp.up_proj", vec![mlp, hidden]),
        ("midlayer.mlp.down_proj", vec![hidden, mlp]),
        ("norm", vec![hidden]),
        ("lm_head", vec![outputs, hidden]),
    ]
    .map(|(name, dims)| (format!("{name}.weight"), dims))
    .into()
}

/// What a head starts with.
struct Start<'a> {
    /// The target's last layer.
    layer: usize,
    tied: bool,
    weights: &'a mut Weights,
    ids: &'a [u32],
    seed: u64,
}

impl Start<'_> {
    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        self.weights.dense(name)
    }

    /// A tensor of the last layer.
    fn last(&mut self, part: &str) -> Result<Tensor> {
        self.tensor(&names::layer(self.layer, part))
    }

    /// The first value of the weight `name`. A matrix of the target that does not have the head's shape
    /// is not taken.
    fn weight(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let noise = fresh(self.seed, name, dims, &Device::Cpu)?;
        let quiet = |deviation: f64| &noise * (deviation / INITIAL_DEVIATION);
        let part = name.strip_prefix("midlayer.").unwrap_or(name);
        let taken = match part {
            "fc.weight" => {
                let (hidden, all) = (dims[0], dims[1]);
                let identity = Tensor::eye(hidden, DType::F32, &Device::Cpu)?;
                let identity = identity.pad_with_zeros(1, all - hidden, 0)?;
                return Ok((identity + quiet(FC_NOISE)?)?);
            }
            "input_layernorm.weight" => return Ok(noise),
            "hidden_norm.weight" => self.last("input_layernorm.weight")?,
            "norm.weight" => self.tensor(&format!("{}.weight", names::NORM))?,
            "lm_head.weight" => {
                let output = match self.tied {
                    true => names::EMBEDDING,
                    false => names::HEAD,
                };
                let ids = Tensor::new(self.ids, &Device::Cpu)?;
                self.tensor(&format!("{output}.weight"))?
                    .index_select(&ids, 0)?
            }
            "self_attn.q_proj.weight" | "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => {
                let of_hidden = self.last(part)?;
                match of_hidden.dims() == [dims[0], dims[1] / 2] {
                    false => return Ok(noise),
                    true => {
                        let of_embedding = quiet(EMBEDDING_NOISE)?.narrow(1, 0, dims[1] / 2)?;
                        Tensor::cat(&[of_embedding, of_hidden], 1)?
                    }
                }
            }
            _ => self.last(part)?,
        };
        Ok(match taken.dims() == dims {
            true => taken,
            false => noise,
        })
    }
}

#[cfg(test)]
mod tests;
