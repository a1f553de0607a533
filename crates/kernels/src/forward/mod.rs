//! A whole forward of up to 16 rows in one launch on a GPU, for models with weights in f16, bf16 or quantized.
//!
//! Such a forward otherwise launches a dozen kernels a layer, most of which end before the memory is busy. Here each
//! multiprocessor runs one block from the first layer to the last. Its phases (norm with q, k and v; rope and attention;
//! output of attention; norm with gate and up; down) are separated by barriers over all blocks, and one warp of each
//! block copies weights through a ring in shared memory ahead of the phases, which do not wait for memory then.
//!
//! Every value has the bits that the kernels of the single ops give it: products, norms, rope and attention are the same
//! device functions, in the same order of additions. `forward.cuh` is the kernel.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod plan;

use crate::quant::DeviceQuantMatrix;
use crate::{Activation, AttentionBatch, AttentionParams, HeadNorms, Slots};
use candle_core::{DType, Device, Result, Tensor};

/// Maximum number of rows of such a forward.
pub const MAX_FORWARD_ROWS: usize = 16;

/// A model: each layer is norm, attention, norm and a gated MLP.
pub struct ForwardModel<'a> {
    /// The dtype of activations: f16 or bf16. Pools have it, or are of blocks or of FP8.
    pub dtype: DType,
    /// The GPU of all tensors.
    pub device: &'a Device,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Added to mean squares.
    pub eps: f32,
    /// Slots per block of the pools.
    pub block_size: usize,
    /// The layers, in order; at least one.
    pub layers: Vec<ForwardLayer<'a>>,
    /// `[hidden]`: the weight of the norm before the output layer.
    pub norm: &'a Tensor,
    /// The output layer; `None` = the forward ends with the norm before it.
    pub output: Option<ForwardWeight<'a>>,
}

/// A weight, `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub enum ForwardWeight<'a> {
    /// In one of the formats that have kernels.
    Quantized(&'a DeviceQuantMatrix),
    /// In the dtype of activations, in candle's layout.
    Dense(&'a Tensor),
}

impl ForwardWeight<'_> {
    /// Outputs and inputs.
    ///
    /// # Errors
    /// If a dense weight is not a matrix.
    pub fn shape(&self) -> Result<(usize, usize)> {
        match self {
            Self::Quantized(weight) => Ok(weight.shape()),
            Self::Dense(weight) => weight.dims2(),
        }
    }
}

/// A product: weights whose outputs are side by side, and their bias.
pub struct ForwardLinear<'a> {
    /// The weights.
    pub weights: Vec<ForwardWeight<'a>>,
    /// `[outputs]`.
    pub bias: Option<&'a Tensor>,
}

/// A layer of a [`ForwardModel`].
pub struct ForwardLayer<'a> {
    /// `[hidden]`: the weight of the norm before attention.
    pub norm: &'a Tensor,
    /// The products that make queries, keys and values.
    pub qkv: ForwardLinear<'a>,
    /// The norms of queries and keys, if there are any.
    pub head_norms: Option<&'a HeadNorms>,
    /// Pairs of values of a head that are rotated; 0 = none.
    pub pairs: usize,
    /// What attention does besides.
    pub attention: AttentionParams<'a>,
    /// K and V, `[num_slots, kv_heads, head_dim]`, or bytes of blocks.
    pub pool: &'a (Tensor, Tensor),
    /// The product of the attention's output.
    pub out: ForwardLinear<'a>,
    /// `[hidden]`: the weight of the norm before the MLP.
    pub mlp_norm: &'a Tensor,
    /// Gate, then up, as one weight or two of the same size; without bias.
    pub gate_up: ForwardLinear<'a>,
    /// The function of the gate.
    pub activation: Activation,
    /// The product that ends the MLP.
    pub down: ForwardLinear<'a>,
}

/// What a forward reads, in device memory.
pub struct ForwardRows<'a> {
    /// `[rows, hidden]`: the embedding, which is overwritten.
    pub x: &'a Tensor,
    /// Cosines and sines, `[rows, pairs]`, for the layers with pairs.
    pub angles: Option<(&'a Tensor, &'a Tensor)>,
    /// Where K and V of the rows go.
    pub slots: &'a Slots,
    /// The spans of the rows.
    pub batch: &'a AttentionBatch<'a>,
    /// `[wanted]` u32, below the number of rows: the rows that the output has.
    pub wanted: &'a Tensor,
}

/// The phases of a model with its pools, in device memory.
pub struct ForwardPlan {
    #[cfg(feature = "cuda")]
    inner: cuda::Plan,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl ForwardPlan {
    /// Makes the phases of `model`.
    ///
    /// # Errors
    /// In one line: what of the model or of the GPU has no such forward, or why the device fails.
    pub fn new(model: &ForwardModel<'_>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            inner: cuda::Plan::new(model)?,
        });
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("this build has no kernels for {:?}", model.device)
    }

    /// Checks that a forward of so many rows fits, with tables for so many chunks of keys.
    ///
    /// # Errors
    /// In one line, if it does not.
    pub fn check(&self, rows: usize, chunks: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.inner.check(rows, chunks);
        #[cfg(not(feature = "cuda"))]
        match (self.never, rows, chunks) {}
    }

    /// Runs the forward: `[wanted, vocab]` f32 if the model has an output layer, otherwise `[wanted, hidden]` in its
    /// dtype. Copies nothing between host and device if the tables of the batch were already sent.
    ///
    /// # Errors
    /// If the rows do not fit the model, or the device fails.
    pub fn run(&self, rows: &ForwardRows<'_>) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return self.inner.run(rows);
        #[cfg(not(feature = "cuda"))]
        match (self.never, rows) {}
    }
}
