//! One layer of a decoder: attention over a paged pool, and an MLP.

use super::config::ModelConfig;
use super::inputs::Inputs;
use super::linear::Linear;
use super::weights::Weights;
use crate::error::Result;
use crate::kernels::{
    Activation, AttentionBatch, AttentionParams, HeadNorms, Pools, Slots, add_norm, glu,
    paged_attention, rope_kv_write,
};
use candle_core::{DType, Tensor};

/// A layer of a decoder.
#[derive(Clone)]
pub(super) struct Layer {
    norm: Tensor,
    block: Block,
}

/// A layer without the norm of its input. Its attention may read wider rows than it writes.
#[derive(Clone)]
pub(super) struct Block {
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
pub(super) struct Step<'a> {
    slots: &'a Slots,
    /// In the compute dtype.
    cos: Tensor,
    sin: Tensor,
    spans: &'a AttentionBatch<'a>,
}

impl<'a> Step<'a> {
    /// The inputs of a forward over `spans`, with angles in `dtype`, that of the activations.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(inputs: &'a Inputs, spans: &'a AttentionBatch<'a>, dtype: DType) -> Result<Self> {
        Ok(Self {
            slots: &inputs.slots,
            cos: inputs.cos.to_dtype(dtype)?,
            sin: inputs.sin.to_dtype(dtype)?,
            spans,
        })
    }
}

/// The RMSNorm of `x`, `[rows, width]`, with `weight`, `[width]`.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub(super) fn norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    Ok(add_norm(x, &x.zeros_like()?, weight, eps)?.1)
}

impl Layer {
    /// Reads a layer; `at` names its parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        Ok(Self {
            norm: weights.norm(&at("input_layernorm"), hidden)?,
            block: Block::load(config, weights, hidden, at)?,
        })
    }

    /// All its products.
    pub fn linears(&mut self) -> [&mut Linear; 4] {
        let Block {
            qkv,
            o,
            gate_up,
            down,
            ..
        } = &mut self.block;
        [qkv, o, gate_up, down]
    }

    /// See [`Linear::prepare_recording`]; the minimum over its products.
    pub fn prepare_recording(&self) -> Result<usize> {
        let block = &self.block;
        let mut max_rows = usize::MAX;
        for linear in [&block.qkv, &block.o, &block.gate_up, &block.down] {
            max_rows = max_rows.min(linear.prepare_recording()?);
        }
        Ok(max_rows)
    }

    /// Takes the residual stream and the `delta` still to be added to it, `[rows, hidden]` each;
    /// returns both as they are after the layer.
    pub fn forward(
        &self,
        x: &Tensor,
        delta: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<(Tensor, Tensor)> {
        self.forward_after(None, x, delta, config, step, pool)
    }

    /// Like [`Layer::forward`], of rows after those of `context`, `[others, hidden]`: inputs of the
    /// attention for rows of which only K and V are computed. `step` has the slots and angles of all rows,
    /// and the spans of the last.
    pub fn forward_after(
        &self,
        context: Option<&Tensor>,
        x: &Tensor,
        delta: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = add_norm(x, delta, &self.norm, config.rms_norm_eps as f32)?;
        let read = match context {
            Some(context) => Tensor::cat(&[context, &normed], 0)?,
            None => normed,
        };
        self.block.forward(&x, &read, config, step, pool)
    }

    /// Writes K and V of rows whose inputs of the attention are `context`, `[rows, hidden]`.
    pub fn write(
        &self,
        context: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<()> {
        self.block.write(context, config, step, pool).map(drop)
    }
}

impl Block {
    /// Reads a block whose attention has `inputs` inputs; `at` names its parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        weights: &mut Weights,
        inputs: usize,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
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
            qkv: Linear::join(vec![
                weights.linear(&at("self_attn.q_proj"), (q, inputs), bias)?,
                weights.linear(&at("self_attn.k_proj"), (kv, inputs), bias)?,
                weights.linear(&at("self_attn.v_proj"), (kv, inputs), bias)?,
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

    /// Takes the residual stream `x`, `[rows, hidden]`, and the attention's input `normed`,
    /// `[rows, inputs]`; returns the stream after the attention and the `delta` still to be added to it.
    /// `normed` may have more rows: of those before the last `rows`, only K and V are computed.
    pub fn forward(
        &self,
        x: &Tensor,
        normed: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<(Tensor, Tensor)> {
        let attended = self.attend(normed, x.dim(0)?, config, step, pool)?;
        let (x, normed) = add_norm(x, &attended, &self.mlp_norm, config.rms_norm_eps as f32)?;
        let wide = glu(&self.gate_up.forward(&normed)?, Activation::Silu)?;
        Ok((x, self.down.forward(&wide)?))
    }

    /// The attention of the last `rows` rows of `x`.
    fn attend(
        &self,
        x: &Tensor,
        rows: usize,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let (heads, d) = (config.num_heads, config.head_dim);
        let q = self.write(x, config, step, pool)?;
        let q = q.narrow(0, q.dim(0)? - rows, rows)?;
        let scale = 1. / (d as f32).sqrt();
        let params = AttentionParams::scaled(scale);
        let y = paged_attention(&q, &pool.0, &pool.1, step.spans, params)?;
        self.o.forward(&y.reshape((rows, heads * d))?)
    }

    /// Writes K and V of all rows; returns the queries, `[rows, num_heads, head_dim]`.
    pub fn write(
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
        let angles = Some((&step.cos, &step.sin));
        let norms = self.head_norms.as_ref();
        Ok(rope_kv_write(&qkv, heads, angles, norms, pools)?)
    }
}
