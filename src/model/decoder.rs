//! One decoder for Llama, Qwen2 and Qwen3, which differ by flags of [`ModelConfig`].

use super::config::ModelConfig;
use super::inputs::Inputs;
use super::linear::{Embedding, Linear};
use super::weights::{Dtypes, Weights};
use super::{Batch, Model, Output, names};
use crate::error::{Error, Result};
use crate::kernels::{
    AttentionBatch, HeadNorms, Pools, Slots, add_norm, paged_attention, rope_kv_write, swiglu,
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
    /// `[outputs of the head]` u32: their token ids, if the head does not cover the whole vocabulary.
    output_ids: Option<Tensor>,
    /// Radians per position, one for each pair of dimensions of a head.
    frequencies: Vec<f32>,
    dtypes: Dtypes,
    device: Device,
    /// Whether a GPU adds in the same order for any number of rows.
    batch_invariant: bool,
}

#[derive(Clone)]
struct Layer {
    attention_norm: Tensor,
    /// q, k and v.
    qkv: Linear,
    o: Linear,
    /// Only in Qwen3.
    head_norms: Option<HeadNorms>,
    mlp_norm: Tensor,
    /// The MLP's gate, then up.
    gate_up: Linear,
    down: Linear,
}

/// The inputs that all layers of one forward share.
struct Step<'a> {
    slots: &'a Slots,
    /// In the compute dtype.
    cos: Tensor,
    sin: Tensor,
    spans: &'a AttentionBatch<'a>,
}

impl Decoder {
    /// Reads all weights; calls `done` after each layer.
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
        // Each thread has its own GPU queue, and another thread may use the weights.
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
            batch_invariant: false,
        })
    }

    /// Makes a GPU add in the same order for any number of rows and any chunks of a prompt, which is
    /// slower. Quantized weights become dense ones.
    ///
    /// # Errors
    /// A setup error if a weight has no kernel for that, or the device fails.
    pub fn with_batch_invariance(self) -> Result<Self> {
        let mut dense = self.with_dense_weights()?;
        dense.linears().try_for_each(Linear::set_batch_invariant)?;
        dense.batch_invariant = true;
        Ok(dense)
    }

    /// Makes quantized weights on a GPU dense. Then a row has the same bits in all forwards of up to 16
    /// rows.
    ///
    /// # Errors
    /// If the device fails, for example because it does not have the memory.
    pub fn with_dense_weights(mut self) -> Result<Self> {
        let dtype = self.dtypes.activations;
        self.linears()
            .try_for_each(|linear| linear.make_dense(dtype))?;
        self.device.synchronize()?;
        Ok(self)
    }

    fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let layers = self.layers.iter_mut().flat_map(Layer::linears);
        layers.chain([&mut self.head])
    }

    /// A model of these `layers` of this one (ascending indices), with the same embedding and output
    /// layer: the residual stream goes past the others. It shares the weights and has its own, smaller
    /// KV pool. It is the draft of self-speculative decoding (Zhang et al. 2023, arXiv 2309.08168).
    ///
    /// # Errors
    /// A setup error if `layers` is empty, not ascending, or names a layer that does not exist.
    pub fn subset(&self, layers: &[usize]) -> Result<Self> {
        let count = self.layers.len();
        let ascending = layers.is_sorted_by(|a, b| a < b);
        if !ascending || layers.last().is_none_or(|&last| last >= count) {
            return Err(Error::setup(format!(
                "a draft cannot have the layers {layers:?} of a model with {count} layers"
            )));
        }
        Ok(Self {
            config: ModelConfig {
                num_layers: layers.len(),
                ..self.config.clone()
            },
            embedding: self.embedding.clone(),
            layers: layers.iter().map(|&i| self.layers[i].clone()).collect(),
            norm: self.norm.clone(),
            head: self.head.clone(),
            output_ids: self.output_ids.clone(),
            frequencies: self.frequencies.clone(),
            dtypes: self.dtypes,
            device: self.device.clone(),
            batch_invariant: self.batch_invariant,
        })
    }

    /// Prepares for forwards that are recorded as CUDA graphs; returns the maximum number of their rows.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn prepare_recording(&self) -> Result<usize> {
        let mut max_rows = self.head.prepare_recording()?;
        for layer in &self.layers {
            for linear in [&layer.qkv, &layer.o, &layer.gate_up, &layer.down] {
                max_rows = max_rows.min(linear.prepare_recording()?);
            }
        }
        Ok(max_rows)
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Query heads per key head.
    pub(super) fn query_heads_a_key(&self) -> usize {
        self.config.num_heads / self.config.num_kv_heads
    }

    /// The batch's spans in the form that attention takes, checked.
    ///
    /// # Errors
    /// If a span reaches outside the pool.
    pub(super) fn spans<'a>(&self, batch: &'a Batch, kv: &KvStore) -> Result<AttentionBatch<'a>> {
        let spans = AttentionBatch::new(&batch.spans, kv.block_size, kv.num_slots())?;
        Ok(spans.with_batch_invariance(self.batch_invariant))
    }

    /// The rest of the batch, in device memory, checked.
    ///
    /// # Errors
    /// See [`Inputs::new`].
    pub(super) fn inputs(&self, batch: &Batch, kv: &KvStore) -> Result<Inputs> {
        let vocab_size = self.config.vocab_size;
        let slots = kv.num_slots();
        let inputs = Inputs::new(batch, &self.frequencies, vocab_size, slots, &self.device)?;
        inputs.with_taps(batch.taps.as_ref(), self.layers.len())
    }

    /// Overwrites `inputs` with another batch of the same size.
    ///
    /// # Errors
    /// See [`Inputs::replace`].
    pub(super) fn replace_inputs(&self, inputs: &Inputs, batch: &Batch) -> Result<()> {
        inputs.replace(batch, &self.frequencies)
    }

    fn shape(&self) -> KvShape {
        KvShape {
            num_layers: self.config.num_layers,
            num_kv_heads: self.config.num_kv_heads,
            head_dim: self.config.head_dim,
            dtype: self.dtypes.kv,
        }
    }

    /// Expands `[rows, outputs of the head]` to `[rows, vocab_size]`: minus infinity for ids without an
    /// output.
    fn over_all_ids(&self, logits: Tensor) -> Result<Tensor> {
        let Some(ids) = &self.output_ids else {
            return Ok(logits);
        };
        let dims = (logits.dim(0)?, self.config.vocab_size);
        let never = Tensor::full(f32::NEG_INFINITY, dims, &self.device)?;
        let ids = ids.broadcast_as(logits.dims())?.contiguous()?;
        Ok(never.scatter(&ids, &logits, 1)?)
    }

    /// Logits, `[inputs.wanted, vocab_size]` f32, and tapped hidden states. Copies nothing between host
    /// and device if the tables of `spans` were already sent.
    ///
    /// # Errors
    /// If the shape of the pool is not the model's, or the device fails.
    pub(super) fn run(
        &self,
        inputs: &Inputs,
        spans: &AttentionBatch<'_>,
        kv: &KvStore,
    ) -> Result<Output> {
        let step = Step {
            slots: &inputs.slots,
            cos: inputs.cos.to_dtype(self.dtypes.activations)?,
            sin: inputs.sin.to_dtype(self.dtypes.activations)?,
            spans,
        };
        let mut x = self.embedding.forward(&inputs.tokens)?;
        let mut delta = x.zeros_like()?;
        let mut tapped = Vec::new();
        for (i, (layer, pool)) in self.layers.iter().zip(&kv.layers).enumerate() {
            inputs.tap(i, &x, &delta, &mut tapped)?;
            (x, delta) = layer.forward(&x, &delta, &self.config, &step, pool)?;
        }
        inputs.tap(self.layers.len(), &x, &delta, &mut tapped)?;
        let logits = match &inputs.wanted {
            None => {
                // GPUs have no empty allocations.
                let none = (0, self.config.vocab_size);
                Tensor::zeros(none, DType::F32, &Device::Cpu)?
            }
            Some(wanted) => {
                let (x, delta) = (x.index_select(wanted, 0)?, delta.index_select(wanted, 0)?);
                self.logits(&x, &delta)?
            }
        };
        let hidden = match tapped.is_empty() {
            true => None,
            false => Some(Tensor::cat(&tapped, 1)?),
        };
        Ok(Output { logits, hidden })
    }

    /// Logits of the rows whose residual stream is `x`, with `delta` still to be added to it.
    fn logits(&self, x: &Tensor, delta: &Tensor) -> Result<Tensor> {
        let eps = self.config.rms_norm_eps as f32;
        let (_, x) = add_norm(x, delta, &self.norm, eps)?;
        let logits = self.head.forward(&x)?.to_dtype(DType::F32)?;
        self.over_all_ids(logits)
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

    fn subset(&self, layers: &[usize]) -> Result<Box<dyn Model>> {
        Ok(Box::new(self.subset(layers)?))
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<Output> {
        let inputs = self.inputs(batch, kv)?;
        let spans = self.spans(batch, kv)?;
        self.run(&inputs, &spans, kv)
    }
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

    fn linears(&mut self) -> [&mut Linear; 4] {
        [
            &mut self.qkv,
            &mut self.o,
            &mut self.gate_up,
            &mut self.down,
        ]
    }

    /// Takes the residual stream and the `delta` still to be added to it, `[rows, hidden]` each;
    /// returns both as they are after the layer.
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
        let y = paged_attention(&q, k_pool, v_pool, step.spans, scale)?;
        self.o.forward(&y.reshape((rows, heads * d))?)
    }
}
