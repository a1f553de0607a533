//! One decoder for Llama, Qwen2 and Qwen3: flags of [`ModelConfig`] tell them apart.

use super::config::ModelConfig;
use super::graphs::{Forward, Graphs};
use super::linear::{Embedding, Linear};
use super::weights::{Dtypes, Weights};
use super::{Batch, Model, Output, names};
use crate::error::{Error, Result};
use crate::kernels::graph::{Values, overwrite};
use crate::kernels::{
    HeadNorms, Pools, Rows, Segment, add_norm, paged_attention, rope_kv_write, swiglu,
};
use crate::kv::{KvShape, KvStore};
use candle_core::{DType, Device, Tensor};

/// A loaded model. All activations are `[rows, width]`: rows of many sequences, side by side.
pub struct Decoder {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    /// `[outputs of the head]` u32: their ids, where those are not all.
    output_ids: Option<Tensor>,
    /// Radians a position, one for each pair of a head.
    frequencies: Vec<f32>,
    dtypes: Dtypes,
    device: Device,
    /// `None` where every kernel is launched by itself.
    graphs: Option<Graphs>,
}

struct Layer {
    attention_norm: Tensor,
    /// q, k and v.
    qkv: Linear,
    o: Linear,
    /// Qwen3 has them.
    head_norms: Option<HeadNorms>,
    mlp_norm: Tensor,
    /// The MLP's gate, then up.
    gate_up: Linear,
    down: Linear,
}

/// What a forward reads of its batch, in the memory of the device.
pub(super) struct Inputs {
    /// `[rows]` u32.
    tokens: Tensor,
    /// `[rows]` u32.
    slots: Tensor,
    /// `[rows, head_dim / 2]` f32.
    cos: Tensor,
    sin: Tensor,
    /// Rows whose logits are wanted, u32; `None` = no row.
    wanted: Option<Tensor>,
}

/// What all layers of one forward share.
struct Step<'a> {
    slots: &'a Tensor,
    /// In the compute dtype.
    cos: Tensor,
    sin: Tensor,
    rows: &'a Rows<'a>,
}

impl Inputs {
    /// Sends them to `device`; `frequencies` are the model's.
    pub fn new(batch: &Batch, frequencies: &[f32], device: &Device) -> Result<Self> {
        let dims = (batch.positions.len(), frequencies.len());
        let angles = |turn| Tensor::from_vec(angles(batch, frequencies, turn), dims, device);
        Ok(Self {
            tokens: match &batch.drawn {
                None => Tensor::new(batch.tokens.as_slice(), device)?,
                // Others have it, and these are overwritten when a graph is replayed.
                Some(drawn) => drawn.copy()?,
            },
            slots: Tensor::new(batch.slots.as_slice(), device)?,
            cos: angles(f32::cos)?,
            sin: angles(f32::sin)?,
            wanted: match batch.logits.as_slice() {
                [] => None,
                wanted => Some(Tensor::new(wanted, device)?),
            },
        })
    }

    /// Puts those of another batch of the same size in their place.
    ///
    /// # Errors
    /// Where it is of another size, or the device fails.
    pub fn replace(&self, batch: &Batch, frequencies: &[f32]) -> Result<()> {
        match &batch.drawn {
            None => overwrite(&self.tokens, Values::U32(&batch.tokens))?,
            Some(drawn) => self.tokens.slice_set(drawn, 0, 0)?,
        }
        overwrite(&self.slots, Values::U32(&batch.slots))?;
        for (tensor, turn) in [
            (&self.cos, f32::cos as fn(f32) -> f32),
            (&self.sin, f32::sin),
        ] {
            overwrite(tensor, Values::F32(&angles(batch, frequencies, turn)))?;
        }
        if let Some(wanted) = &self.wanted {
            overwrite(wanted, Values::U32(&batch.logits))?;
        }
        Ok(())
    }
}

/// `turn` of the angles that each row is rotated by.
fn angles(batch: &Batch, frequencies: &[f32], turn: fn(f32) -> f32) -> Vec<f32> {
    let of = |&position: &u32| frequencies.iter().map(move |f| turn(position as f32 * f));
    batch.positions.iter().flat_map(of).collect()
}

/// The batch's rows, as attention wants them.
fn rows(batch: &Batch, block_size: usize) -> Rows<'_> {
    let segments = batch.spans.iter().map(|span| Segment {
        rows: span.rows.clone(),
        context: span.context,
        blocks: &span.blocks,
        tree: span.tree.as_deref(),
    });
    Rows::new(segments.collect(), block_size)
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
        let norm = weights.norm(names::NORM, config.hidden_size)?;
        let head = match config.tie_word_embeddings && config.draft_vocab_size.is_none() {
            true => embedding.tied_head()?,
            false => weights.linear(
                names::HEAD,
                (config.output_size(), config.hidden_size),
                false,
            )?,
        };
        let output_ids = weights.output_ids(&config)?;
        let mut frequencies = config.inverse_frequencies();
        if let Some(factors) = weights.rope_factors()? {
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(f, by)| *f /= by);
        }
        weights.finish()?;
        // A GPU has a queue for each thread, and another thread may use the weights.
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            config,
            embedding,
            layers,
            norm,
            head,
            output_ids,
            frequencies,
            graphs: None,
        })
    }

    /// Records forwards of few rows as CUDA graphs from now on.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn with_graphs(mut self) -> Result<Self> {
        let mut most = self.head.prepare_recording()?;
        for layer in &self.layers {
            for linear in [&layer.qkv, &layer.o, &layer.gate_up, &layer.down] {
                most = most.min(linear.prepare_recording()?);
            }
        }
        self.graphs = Some(Graphs::new(most));
        Ok(self)
    }

    fn shape(&self) -> KvShape {
        KvShape {
            num_layers: self.config.num_layers,
            num_kv_heads: self.config.num_kv_heads,
            head_dim: self.config.head_dim,
            dtype: self.dtypes.kv,
        }
    }

    /// `[rows, vocab_size]` of `[rows, outputs of the head]`: minus infinity for ids without one.
    fn over_all_ids(&self, logits: Tensor) -> Result<Tensor> {
        let Some(ids) = &self.output_ids else {
            return Ok(logits);
        };
        let dims = (logits.dim(0)?, self.config.vocab_size);
        let never = Tensor::full(f32::NEG_INFINITY, dims, &self.device)?;
        let ids = ids.broadcast_as(logits.dims())?.contiguous()?;
        Ok(never.scatter(&ids, &logits, 1)?)
    }

    /// `[inputs.wanted, vocab_size]` f32. Copies nothing between host and device.
    fn run(&self, inputs: &Inputs, rows: &Rows<'_>, kv: &KvStore) -> Result<Tensor> {
        let step = Step {
            slots: &inputs.slots,
            cos: inputs.cos.to_dtype(self.dtypes.activations)?,
            sin: inputs.sin.to_dtype(self.dtypes.activations)?,
            rows,
        };
        let mut x = self.embedding.forward(&inputs.tokens)?;
        let mut delta = x.zeros_like()?;
        for (layer, pool) in self.layers.iter().zip(&kv.layers) {
            (x, delta) = layer.forward(&x, &delta, &self.config, &step, pool)?;
        }
        let Some(wanted) = &inputs.wanted else {
            // GPUs have no empty allocations.
            let none = (0, self.config.vocab_size);
            return Ok(Tensor::zeros(none, DType::F32, &Device::Cpu)?);
        };
        let (x, delta) = (x.index_select(wanted, 0)?, delta.index_select(wanted, 0)?);
        let eps = self.config.rms_norm_eps as f32;
        let (_, x) = add_norm(&x, &delta, &self.norm, eps)?;
        let logits = self.head.forward(&x)?.to_dtype(DType::F32)?;
        self.over_all_ids(logits)
    }

    /// The logits by a graph, if there is one for such batches or it is time to record it.
    fn replay(&mut self, batch: &Batch, kv: &KvStore) -> Result<Option<Tensor>> {
        let Some(mut graphs) = self.graphs.take() else {
            return Ok(None);
        };
        let forward = Forward {
            batch,
            rows: rows(batch, kv.block_size),
            kv,
            frequencies: &self.frequencies,
            group: self.config.num_heads / self.config.num_kv_heads,
            device: &self.device,
        };
        let logits = graphs.forward(forward, |inputs, rows| self.run(inputs, rows, kv));
        self.graphs = Some(graphs);
        logits
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
        if let Some(logits) = self.replay(batch, kv)? {
            return Ok(Output { logits });
        }
        let inputs = Inputs::new(batch, &self.frequencies, &self.device)?;
        let logits = self.run(&inputs, &rows(batch, kv.block_size), kv)?;
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
        let at = |part: &str| names::layer(index, part);
        let (hidden, mlp, d) = (
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
        );
        let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
        let bias = config.qkv_bias;
        let head_norms = match config.qk_norm {
            false => None,
            true => Some(HeadNorms {
                q: weights.norm(&at("self_attn.q_norm"), d)?,
                k: weights.norm(&at("self_attn.k_norm"), d)?,
                eps: config.rms_norm_eps as f32,
            }),
        };
        Ok(Self {
            attention_norm: weights.norm(&at("input_layernorm"), hidden)?,
            qkv: Linear::join(vec![
                weights.linear(&at("self_attn.q_proj"), (q, hidden), bias)?,
                weights.linear(&at("self_attn.k_proj"), (kv, hidden), bias)?,
                weights.linear(&at("self_attn.v_proj"), (kv, hidden), bias)?,
            ])?,
            o: weights.linear(&at("self_attn.o_proj"), (hidden, q), false)?,
            head_norms,
            mlp_norm: weights.norm(&at("post_attention_layernorm"), hidden)?,
            gate_up: Linear::join(vec![
                weights.linear(&at("mlp.gate_proj"), (mlp, hidden), false)?,
                weights.linear(&at("mlp.up_proj"), (mlp, hidden), false)?,
            ])?,
            down: weights.linear(&at("mlp.down_proj"), (hidden, mlp), false)?,
        })
    }

    /// The residual stream and what is still to be added to it, `[rows, hidden]` each: from before
    /// the layer to after it.
    fn forward(
        &self,
        x: &Tensor,
        delta: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<(Tensor, Tensor)> {
        let eps = config.rms_norm_eps as f32;
        let (x, normed) = add_norm(x, delta, &self.attention_norm, eps)?;
        let attended = self.attend(&normed, config, step, pool)?;
        let (x, normed) = add_norm(&x, &attended, &self.mlp_norm, eps)?;
        let wide = swiglu(&self.gate_up.forward(&normed)?)?;
        Ok((x, self.down.forward(&wide)?))
    }

    fn attend(
        &self,
        x: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        (k_pool, v_pool): &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let (rows, d) = (x.dim(0)?, config.head_dim);
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.reshape((rows, heads + 2 * kv_heads, d))?;
        let pools = Pools {
            k: k_pool,
            v: v_pool,
            slots: step.slots,
        };
        let angles = (&step.cos, &step.sin);
        let q = rope_kv_write(&qkv, heads, angles, self.head_norms.as_ref(), pools)?;
        let scale = 1. / (d as f32).sqrt();
        let y = paged_attention(&q, k_pool, v_pool, step.rows, scale)?;
        self.o.forward(&y.reshape((rows, heads * d))?)
    }
}
