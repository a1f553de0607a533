//! The draft during training: a Llama over whole rows, made of ops that candle can differentiate. The
//! kernels of the serving decoder write in place and have no backward pass.

use super::Method;
use super::heads::Heads;
use super::optimizer::ByName;
use super::spec::shapes;
use super::student::{self, Student, TrainBatch};
use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::ops::{rms_norm_slow, silu, softmax};
use candle_nn::rotary_emb::rope_slow;
use foretoken_core::error::Result;
use foretoken_core::sampling::mix;
use foretoken_model::{ModelConfig, names};
use std::collections::HashMap;

/// Standard deviation of initial weights, as in the configurations of Llama and GPT-2
/// (`initializer_range`).
pub const INITIAL_DEVIATION: f64 = 0.02;

/// A trainable Llama in f32.
pub struct TrainModel {
    config: ModelConfig,
    /// The weights, by Hugging Face's names.
    vars: ByName<Var>,
    /// `[seq_len, head_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
    /// `[seq_len, seq_len]`: 0 if a position sees the other, otherwise minus infinity.
    mask: Tensor,
    /// `[draft_vocab_size]`, u32: the ids of the draft's vocabulary; `None` = all.
    outputs: Option<Tensor>,
}

impl TrainModel {
    /// A draft with initial weights that depend on `seed`: matrices are normal(0, 0.02), norms 1. Rows
    /// have up to `seq_len` tokens. `outputs` are the ids of the draft's vocabulary, if `config` has a
    /// `draft_vocab_size`.
    pub fn new(
        config: ModelConfig,
        outputs: Option<&[u32]>,
        seed: u64,
        seq_len: usize,
        device: &Device,
    ) -> Result<Self> {
        let vars = shapes(Method::Draft, &config, 0, 0)
            .into_iter()
            .map(|(name, dims)| {
                let fresh = fresh(seed, &name, &dims, device)?;
                Ok((name, Var::from_tensor(&fresh)?))
            })
            .collect::<Result<_>>()?;
        let heads = Heads::of(&config, seq_len)?;
        let angles =
            |table: &[f32]| Tensor::from_slice(table, (seq_len, heads.head_dim / 2), device);
        let hidden = |at: usize| {
            let sees = move |other| if other <= at { 0.0 } else { f32::NEG_INFINITY };
            (0..seq_len).map(sees)
        };
        let mask: Vec<f32> = (0..seq_len).flat_map(hidden).collect();
        Ok(Self {
            vars,
            cos: angles(&heads.cos)?,
            sin: angles(&heads.sin)?,
            mask: Tensor::from_vec(mask, (seq_len, seq_len), device)?,
            outputs: outputs.map(|ids| Tensor::new(ids, device)).transpose()?,
            config,
        })
    }

    /// The variables, by Hugging Face's names.
    pub fn vars(&self) -> &ByName<Var> {
        &self.vars
    }

    /// Replaces all weights by those that `weight` returns.
    ///
    /// # Errors
    /// `Setup`, if a weight is missing or has another shape.
    pub fn set(&self, weight: impl FnMut(&str) -> Option<Tensor>) -> Result<()> {
        student::set(&self.vars, weight)
    }

    /// The logits of every position, `[rows * len, vocab]`, for `tokens` `[rows, len]` u32. A position
    /// sees its own row up to itself. With a draft vocabulary there is one column per id in it.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (rows, len) = tokens.dims2()?;
        let embedding = self.var(names::EMBEDDING);
        let mut x = embedding.index_select(&tokens.flatten_all()?, 0)?;
        for layer in 0..self.config.num_layers() {
            let at = |part: &str| names::layer(layer, part);
            let normed = self.norm(&x, &at("input_layernorm"))?;
            x = (x + self.attend(&normed, rows, len, &at("self_attn"))?)?;
            let normed = self.norm(&x, &at("post_attention_layernorm"))?;
            let gate = silu(&self.linear(&normed, &at("mlp.gate_proj"))?)?;
            let wide = (gate * self.linear(&normed, &at("mlp.up_proj"))?)?;
            x = (x + self.linear(&wide, &at("mlp.down_proj"))?)?;
        }
        let x = self.norm(&x, names::NORM)?;
        Ok(x.matmul(&self.head()?.t()?)?)
    }

    /// The output layer, `[output_size, hidden]`.
    fn head(&self) -> Result<Tensor> {
        let embedding = self.var("model.embed_tokens");
        Ok(match (self.config.tie_word_embeddings, &self.outputs) {
            (false, _) => self.var("lm_head").as_tensor().clone(),
            (true, None) => embedding.as_tensor().clone(),
            (true, Some(ids)) => embedding.index_select(ids, 0)?,
        })
    }

    /// Causal grouped-query attention over `x`, `[rows * len, hidden]`.
    fn attend(&self, x: &Tensor, rows: usize, len: usize, at: &str) -> Result<Tensor> {
        let (heads, d) = (self.config.num_heads, self.config.head_dim);
        let kv_heads = self.config.num_kv_heads;
        let split = |part: &str, heads: usize| -> Result<Tensor> {
            let y = self.linear(x, &format!("{at}.{part}"))?;
            let y = y.reshape((rows, len, heads, d))?;
            Ok(y.transpose(1, 2)?.contiguous()?)
        };
        let (cos, sin) = (self.cos.narrow(0, 0, len)?, self.sin.narrow(0, 0, len)?);
        let q = rope_slow(&split("q_proj", heads)?, &cos, &sin)?;
        let k = rope_slow(&split("k_proj", kv_heads)?, &cos, &sin)?;
        // A head of keys and values serves a group of query heads.
        let repeat = |x: &Tensor| -> candle_core::Result<Tensor> {
            Tensor::cat(&vec![x; heads / kv_heads], 2)?.reshape((rows, heads, len, d))
        };
        let (k, v) = (repeat(&k)?, repeat(&split("v_proj", kv_heads)?)?);
        let mask = self.mask.narrow(0, 0, len)?.narrow(1, 0, len)?;
        let scores = (q.matmul(&k.t()?)? * (1.0 / (d as f64).sqrt()))?;
        let weights = softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let y = weights.matmul(&v.contiguous()?)?;
        let y = y.transpose(1, 2)?.reshape((rows * len, heads * d))?;
        self.linear(&y, &format!("{at}.o_proj"))
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let eps = self.config.rms_norm_eps as f32;
        Ok(rms_norm_slow(x, self.var(name), eps)?)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        Ok(x.matmul(&self.var(name).t()?)?)
    }

    /// The weight `name`, one of [`shapes`], without `.weight`.
    fn var(&self, name: &str) -> &Var {
        &self.vars[&format!("{name}.weight")]
    }
}

impl Student for TrainModel {
    fn vars(&self) -> &ByName<Var> {
        &self.vars
    }

    /// The weights with a draft vocabulary include a separate output layer.
    fn weights(&self) -> Result<HashMap<String, Tensor>> {
        let ids = self.outputs.as_ref().map(Tensor::to_vec1).transpose()?;
        let mut weights = student::published(&self.vars, ids.as_deref())?;
        if ids.is_some() {
            weights.insert("lm_head.weight".into(), self.head()?.detach());
        }
        Ok(weights)
    }

    fn logits(&self, batch: &TrainBatch<'_>) -> Result<Tensor> {
        let seen = batch.tokens.iter().map(|row| &row[..row.len() - 1]);
        let tokens: Vec<u32> = seen.clone().flatten().copied().collect();
        let dims = (
            batch.tokens.len(),
            seen.map(<[u32]>::len).max().unwrap_or(0),
        );
        self.forward(&Tensor::from_vec(tokens, dims, self.cos.device())?)
    }
}

/// Ones for a norm, otherwise normal noise (Box and Muller 1958) that depends only on seed and name;
/// candle cannot seed its CPU generator.
pub fn fresh(seed: u64, name: &str, dims: &[usize], device: &Device) -> Result<Tensor> {
    if dims.len() == 1 {
        return Ok(Tensor::ones(dims, DType::F32, device)?);
    }
    let mut state = name
        .bytes()
        .fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)));
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((mix(state) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let count: usize = dims.iter().product();
    let noise = (0..count).map(|_| {
        let radius = (-2.0 * uniform().ln()).sqrt();
        (INITIAL_DEVIATION * radius * (std::f64::consts::TAU * uniform()).cos()) as f32
    });
    Ok(Tensor::from_vec(noise.collect::<Vec<f32>>(), dims, device)?)
}
