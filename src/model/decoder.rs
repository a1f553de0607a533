//! One decoder for Llama, Qwen2 and Qwen3: flags of [`ModelConfig`] tell them apart.

use super::config::ModelConfig;
use super::linear::{Embedding, Linear};
use super::weights::Weights;
use super::{Batch, Model, Output};
use crate::error::{Error, Result};
use crate::kernels::{Segment, kv_write, on_pool, paged_attention, swiglu};
use crate::kv::{KvShape, KvStore};
use candle_core::{DType, Device, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope_thd;

/// A loaded model. All activations are `[rows, width]`: rows of many sequences, side by side.
pub struct Decoder {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    /// Radians a position, one for each pair of a head.
    frequencies: Vec<f32>,
    dtype: DType,
    device: Device,
}

struct Layer {
    attention_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Norms of each head of q and k (Qwen3).
    head_norms: Option<(Tensor, Tensor)>,
    mlp_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// What all layers of one forward share.
struct Step<'a> {
    /// `[rows]` u32.
    slots: Tensor,
    /// `[rows, head_dim / 2]`, in the compute dtype.
    cos: Tensor,
    sin: Tensor,
    segments: Vec<Segment<'a>>,
    block_size: usize,
}

impl Decoder {
    /// Reads all weights; `done` is called after each layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(config: ModelConfig, mut weights: Weights, done: impl Fn()) -> Result<Self> {
        let embedding = weights.embedding(&config)?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for i in 0..config.num_layers {
            layers.push(Layer::load(&config, &mut weights, i)?);
            done();
        }
        let norm = weights.norm("model.norm", config.hidden_size)?;
        let head = match config.tie_word_embeddings {
            true => embedding.tied_head()?,
            false => weights.linear("lm_head", (config.vocab_size, config.hidden_size), false)?,
        };
        let mut frequencies = config.inverse_frequencies();
        if let Some(factors) = weights.rope_factors()? {
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(f, by)| *f /= by);
        }
        weights.finish();
        Ok(Self {
            dtype: weights.dtype(),
            device: weights.device().clone(),
            config,
            embedding,
            layers,
            norm,
            head,
            frequencies,
        })
    }

    fn shape(&self) -> KvShape {
        KvShape {
            num_layers: self.config.num_layers,
            num_kv_heads: self.config.num_kv_heads,
            head_dim: self.config.head_dim,
            dtype: self.dtype,
        }
    }

    fn step<'a>(&self, batch: &'a Batch, block_size: usize) -> Result<Step<'a>> {
        let angles = |turn: fn(f32) -> f32| -> Result<Tensor> {
            let table: Vec<f32> = batch
                .positions
                .iter()
                .flat_map(|&p| self.frequencies.iter().map(move |f| turn(p as f32 * f)))
                .collect();
            let dims = (batch.positions.len(), self.frequencies.len());
            Ok(Tensor::from_vec(table, dims, &self.device)?.to_dtype(self.dtype)?)
        };
        let segments = batch.spans.iter().map(|span| Segment {
            rows: span.rows.clone(),
            context: span.context,
            blocks: &span.blocks,
            tree: span.tree.as_deref(),
        });
        Ok(Step {
            slots: Tensor::new(batch.slots.as_slice(), &self.device)?,
            cos: angles(f32::cos)?,
            sin: angles(f32::sin)?,
            segments: segments.collect(),
            block_size,
        })
    }
}

impl Model for Decoder {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn new_kv(&self, num_blocks: usize, block_size: usize) -> Result<KvStore> {
        KvStore::new(self.shape(), num_blocks, block_size, &self.device)
    }

    fn kv_bytes_per_token(&self) -> usize {
        self.shape().bytes_per_token()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<Output> {
        check(batch)?;
        on_pool(|| self.run(batch, kv))
    }
}

impl Decoder {
    fn run(&self, batch: &Batch, kv: &KvStore) -> Result<Output> {
        let step = self.step(batch, kv.block_size)?;
        let tokens = Tensor::new(batch.tokens.as_slice(), &self.device)?;
        let mut x = self.embedding.forward(&tokens)?;
        for (layer, pool) in self.layers.iter().zip(&kv.layers) {
            x = layer.forward(&x, &self.config, &step, pool)?;
        }
        let logits = if batch.logits.is_empty() {
            Tensor::zeros((0, self.config.vocab_size), DType::F32, &self.device)?
        } else {
            let wanted = Tensor::new(batch.logits.as_slice(), &self.device)?;
            let x = x.index_select(&wanted, 0)?;
            let x = rms_norm(&x, &self.norm, self.config.rms_norm_eps as f32)?;
            self.head.forward(&x)?.to_dtype(DType::F32)?
        };
        Ok(Output { logits })
    }
}

/// A batch whose parts do not fit together is a bug of the caller, better named than computed.
fn check(batch: &Batch) -> Result<()> {
    let rows = batch.tokens.len();
    if rows == 0 || batch.positions.len() != rows || batch.slots.len() != rows {
        return Err(Error::internal(format!(
            "batch of {rows} tokens, {} positions and {} slots",
            batch.positions.len(),
            batch.slots.len()
        )));
    }
    Ok(())
}

impl Layer {
    fn load(config: &ModelConfig, weights: &mut Weights, index: usize) -> Result<Self> {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let (hidden, mlp, d) = (
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
        );
        let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
        let bias = config.qkv_bias;
        let head_norms = match config.qk_norm {
            false => None,
            true => Some((
                weights.norm(&at("self_attn.q_norm"), d)?,
                weights.norm(&at("self_attn.k_norm"), d)?,
            )),
        };
        Ok(Self {
            attention_norm: weights.norm(&at("input_layernorm"), hidden)?,
            q: weights.linear(&at("self_attn.q_proj"), (q, hidden), bias)?,
            k: weights.linear(&at("self_attn.k_proj"), (kv, hidden), bias)?,
            v: weights.linear(&at("self_attn.v_proj"), (kv, hidden), bias)?,
            o: weights.linear(&at("self_attn.o_proj"), (hidden, q), false)?,
            head_norms,
            mlp_norm: weights.norm(&at("post_attention_layernorm"), hidden)?,
            gate: weights.linear(&at("mlp.gate_proj"), (mlp, hidden), false)?,
            up: weights.linear(&at("mlp.up_proj"), (mlp, hidden), false)?,
            down: weights.linear(&at("mlp.down_proj"), (hidden, mlp), false)?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let eps = config.rms_norm_eps as f32;
        let normed = rms_norm(x, &self.attention_norm, eps)?;
        let x = (x + self.attend(&normed, config, step, pool)?)?;
        let normed = rms_norm(&x, &self.mlp_norm, eps)?;
        let wide = swiglu(&self.gate.forward(&normed)?, &self.up.forward(&normed)?)?;
        Ok((&x + self.down.forward(&wide)?)?)
    }

    fn attend(
        &self,
        x: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        (k_pool, v_pool): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let (rows, d) = (x.dim(0)?, config.head_dim);
        let eps = config.rms_norm_eps as f32;
        let mut q = self.q.forward(x)?.reshape((rows, config.num_heads, d))?;
        let mut k = self.k.forward(x)?.reshape((rows, config.num_kv_heads, d))?;
        let v = self.v.forward(x)?.reshape((rows, config.num_kv_heads, d))?;
        if let Some((q_norm, k_norm)) = &self.head_norms {
            q = rms_norm(&q, q_norm, eps)?;
            k = rms_norm(&k, k_norm, eps)?;
        }
        let q = rotate(&q, step)?;
        let k = rotate(&k, step)?;
        kv_write(k_pool, &k, &step.slots)?;
        kv_write(v_pool, &v.contiguous()?, &step.slots)?;
        let scale = 1. / (d as f32).sqrt();
        let y = paged_attention(&q, k_pool, v_pool, &step.segments, step.block_size, scale)?;
        self.o.forward(&y.reshape((rows, config.num_heads * d))?)
    }
}

/// Rope on `[rows, heads, head_dim]`, each row at its own position.
fn rotate(x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
    let rotated = rope_thd(&x.unsqueeze(0)?.contiguous()?, &step.cos, &step.sin)?;
    Ok(rotated.squeeze(0)?)
}
