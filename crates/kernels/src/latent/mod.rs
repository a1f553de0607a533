//! Multi-head latent attention on a GPU (DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1), in the form in
//! which queries and outputs are multiplied instead of latent vectors.
//!
//! A pool has one row of `rank + rope` values a token: the latent vector after its norm, and the rotated key. All heads
//! attend over these rows, whose first `rank` values are the values, too. Nothing is copied to the host, so that steps can
//! be recorded as graphs. A row has the same bits in any number of rows, prompts included.

#[cfg(feature = "cuda")]
mod cuda;

use crate::norm::rms_norm;
use crate::paged_attention::{AttentionBatch, AttentionParams};
use crate::slots::Slots;
use candle_core::{Result, Tensor};

/// The sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    /// Number of query heads.
    pub heads: usize,
    /// Values without a position of a head's query.
    pub nope: usize,
    /// Values with a position of a head's query, and of the key that all heads share.
    pub rope: usize,
    /// Width of a latent vector.
    pub rank: usize,
    /// Values of a head's output.
    pub value: usize,
}

/// The weights of latent attention, on one GPU, in the dtype of activations.
pub struct LatentWeights<'a> {
    /// `[heads, rank, nope]`: what makes a query over latent vectors of one without position.
    pub keys: &'a Tensor,
    /// `[heads, value, rank]`: what makes the output of a head of a sum of latent vectors.
    pub values: &'a Tensor,
    /// `[rank]`: the RMSNorm of latent vectors.
    pub norm: &'a Tensor,
    /// Added to the mean square of the norm.
    pub eps: f32,
}

/// What is written of rows, and where.
pub struct LatentRows<'a> {
    /// `[rows, width]`: latent vectors, and keys after them, are parts of its rows.
    pub products: &'a Tensor,
    /// The place of the latent vector in a row of `products`.
    pub first: usize,
    /// Rows that begin with the queries of all heads, `[heads, nope + rope]` each.
    pub q: &'a Tensor,
    /// Cosines and sines, `[rows, rope / 2]` each: value `i` is paired with value `i + rope / 2`.
    pub angles: (&'a Tensor, &'a Tensor),
    /// The slot of each row.
    pub slots: &'a Slots,
    /// `[num_slots, 1, rank + rope]`.
    pub pool: &'a Tensor,
}

/// Latent attention of a layer on a GPU. A clone shares the weights.
#[derive(Clone)]
pub struct DeviceLatent {
    #[cfg(feature = "cuda")]
    inner: cuda::Latent,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl DeviceLatent {
    /// Latent attention with these weights, which it holds.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not match, or there is no kernel for the shape.
    pub fn new(shape: LatentShape, weights: &LatentWeights<'_>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            inner: cuda::Latent::new(shape, weights)?,
        });
        #[cfg(not(feature = "cuda"))]
        {
            let device = weights.keys.device();
            candle_core::bail!("this build has no kernels for {shape:?} on {device:?}")
        }
    }

    /// Writes what is kept of each row to its slot. Returns `[rows, heads, rank + rope]`, of which only the rotated last
    /// values of each head are specified; [`attend`](Self::attend) writes the others.
    ///
    /// # Errors
    /// If shapes or dtypes do not match, the pool has fewer slots than [`Slots`] were checked for, or the device fails.
    pub fn write(&self, rows: &LatentRows<'_>) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return self.inner.write(rows);
        #[cfg(not(feature = "cuda"))]
        match (self.never, rows) {}
    }

    /// The outputs of all heads, `[rows, heads * value]`, for `q` as in [`LatentRows`] and what [`write`](Self::write) has
    /// returned for the same rows, which is overwritten.
    ///
    /// # Errors
    /// If shapes or dtypes do not match, the pool has fewer slots than `batch` was checked for, or the device fails.
    pub fn attend(
        &self,
        (q, queries): (&Tensor, &Tensor),
        pool: &Tensor,
        batch: &AttentionBatch<'_>,
        params: AttentionParams<'_>,
    ) -> Result<Tensor> {
        params.check(queries.dim(1)?)?;
        #[cfg(feature = "cuda")]
        return self.inner.attend((q, queries), pool, batch, params);
        #[cfg(not(feature = "cuda"))]
        match (self.never, q, pool, batch, params) {}
    }
}

/// The RMSNorm with `weight`, `[width]`, of the values from `first` on of each row of `x`, `[rows, all]`: `[rows, width]`.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn norm_part(x: &Tensor, first: usize, weight: &Tensor, eps: f32) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::norm_part(x, first, weight, eps);
    }
    let part = x.narrow(1, first, weight.dim(0)?)?.contiguous()?;
    rms_norm(&part, weight, eps)
}
