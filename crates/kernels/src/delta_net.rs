//! The gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3) after a short convolution, as Qwen3-Next and
//! Qwen3.5 have it.

#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
use super::recurrent::cuda;
use super::recurrent::{
    Convolution, Recurrence, RecurrentVectors, Sizes, StateBatch, TokenInputs, recurrent, sigmoid,
    softplus, square_sum,
};
use super::states::{StatePool, StateShape};
use crate::float;
use candle_core::{Device, Result, Tensor};

/// Added to the squared length of q and of k.
const LENGTH_EPS: f32 = 1e-6;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of heads of q and of k; divides `value_heads`.
    pub key_heads: usize,
    /// Number of heads of v, each with its own state matrix.
    pub value_heads: usize,
    /// Width of a head of q and k.
    pub key_dim: usize,
    /// Width of a head of v.
    pub value_dim: usize,
    /// Number of tokens that the convolution mixes, the row's own included.
    pub taps: usize,
    /// A head of q and k serves `value_heads / key_heads` heads of v: every `key_heads`-th, or else those one after another.
    pub is_tiled: bool,
}

impl DeltaShape {
    /// The head of q and k of a head of v.
    fn key_head(&self, head: usize) -> usize {
        if self.is_tiled {
            head % self.key_heads
        } else {
            head / (self.value_heads / self.key_heads)
        }
    }

    /// Values of v of a row.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Values of q, of k.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Values that the convolution mixes: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Values of a row: `z`, the channels, `b` and `a`.
    pub fn width(&self) -> usize {
        self.sizes().width()
    }

    /// The sizes of its states.
    pub fn states(&self) -> StateShape {
        self.sizes().states()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            heads: self.value_heads,
            outputs: self.value_dim,
            matrix: self.key_dim * self.value_dim,
            channels: self.channels(),
            scalars: 2 * self.value_heads,
            taps: self.taps,
        }
    }
}

/// The weights of a layer, besides its products.
#[derive(Debug, Clone)]
pub struct DeltaWeights {
    /// The sizes of the layer.
    pub shape: DeltaShape,
    /// `[taps, channels]`, that of the row's own token first.
    pub conv: Vec<f32>,
    /// Of each head of v: the factor of the decay, below 0, and what is added to `a`.
    pub decay: Vec<f32>,
    /// `[value_heads]`: the bias added to `a` before the softplus.
    pub dt_bias: Vec<f32>,
    /// `[value_dim]`: of the norm of the output.
    pub norm: Vec<f32>,
    /// Added to the mean square in the norm of the output.
    pub eps: f32,
    /// Those of a layer on a GPU, which [`DeltaWeights::on`] sends there.
    pub on_device: Option<RecurrentVectors>,
}

/// The outputs of rows `x`, `[rows, width]`, contiguous, f32 on the CPU: of each `z`, q, k, v, `b` and `a`. They are
/// `[rows, values]`: the heads of v, normalized, times `silu(z)`.
///
/// q, k and v are mixed with those of the tokens before and pass a SiLU; q and k become unit vectors, q divided by the
/// square root of its width. Then each head's matrix S, `[key_dim, value_dim]`, decays by
/// `exp(decay * softplus(a + dt_bias))`, takes in `k (v - k S) sigmoid(b)`, and gives `q S`. One token after another, and
/// with one order of additions, whatever the forwards into which a text is divided.
///
/// # Errors
/// If the shapes do not match, or `batch` does not have the rows of `x`.
pub fn delta_net(
    x: &Tensor,
    weights: &DeltaWeights,
    batch: &StateBatch,
    pool: &mut StatePool,
) -> Result<Tensor> {
    recurrent(weights, x, batch, pool)
}

impl DeltaWeights {
    /// These weights for a layer on `device`.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn on(mut self, device: &Device) -> Result<Self> {
        if !device.is_cpu() {
            let send = |values: &[f32]| Tensor::new(values, device);
            self.on_device = Some(RecurrentVectors {
                conv: send(&self.conv)?,
                conv_bias: None,
                decay: send(&self.decay)?,
                dt_bias: send(&self.dt_bias)?,
                skip: None,
                norm: Some(send(&self.norm)?),
            });
        }
        Ok(self)
    }
}

/// What one head keeps while it works.
pub(super) struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `k S`.
    read: Vec<f32>,
}

impl Recurrence for DeltaWeights {
    type Scratch = Scratch;

    const NAME: &str = "delta-net";

    fn sizes(&self) -> Sizes {
        self.shape.sizes()
    }

    fn convolution(&self) -> Convolution<'_> {
        Convolution {
            weights: &self.conv,
            bias: None,
        }
    }

    fn scratch(&self) -> Scratch {
        let DeltaShape {
            key_dim, value_dim, ..
        } = self.shape;
        Scratch {
            q: vec![0.; key_dim],
            k: vec![0.; key_dim],
            v: vec![0.; value_dim],
            read: vec![0.; value_dim],
        }
    }

    /// Lets the matrix take in k and v; writes what q reads then, normalized and gated.
    #[inline(always)]
    fn step(
        &self,
        head: usize,
        matrix: &mut [f32],
        token: &TokenInputs<'_>,
        scratch: &mut Scratch,
        place: Option<(&mut [f32], &[f32])>,
    ) {
        self.prepare(head, token.mixed, scratch);
        let Scratch { q, k, v, read } = scratch;
        let (b, a) = token.scalars.split_at(self.shape.value_heads);
        let decay = float::exp(self.decay[head] * softplus(a[head] + self.dt_bias[head]));
        let beta = sigmoid(b[head]);
        read.fill(0.);
        let width = v.len();
        for (row, k) in matrix.chunks_exact_mut(width).zip(&*k) {
            for (x, read) in row.iter_mut().zip(&mut *read) {
                *x *= decay;
                *read += *x * k;
            }
        }
        for (v, read) in v.iter_mut().zip(&*read) {
            *v = (*v - read) * beta;
        }
        read.fill(0.);
        for ((row, k), q) in matrix.chunks_exact_mut(width).zip(&*k).zip(&*q) {
            for ((x, v), read) in row.iter_mut().zip(&*v).zip(&mut *read) {
                *x += k * v;
                *read += *x * q;
            }
        }
        if let Some((out, gate)) = place {
            let scale = 1. / (square_sum(read) / width as f32 + self.eps).sqrt();
            for (((out, x), norm), z) in out.iter_mut().zip(&*read).zip(&self.norm).zip(gate) {
                *out = x * scale * norm * (z * sigmoid(*z));
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Option<cuda::Rule<'_>> {
        let shape = &self.shape;
        Some(cuda::Rule {
            name: "delta",
            vectors: self.on_device.as_ref()?,
            shared: shape.key_heads,
            last: cuda::Last::IsTiled(shape.is_tiled),
            output: cuda::Output {
                width: shape.value_dim,
                is_of_each: true,
                gates_first: false,
                eps: self.eps,
            },
        })
    }
}

impl DeltaWeights {
    /// q, k and v of a head, of channels that were mixed.
    #[inline(always)]
    fn prepare(&self, head: usize, mixed: &[f32], Scratch { q, k, v, .. }: &mut Scratch) {
        let shape = &self.shape;
        let (dim, keys) = (shape.key_dim, shape.keys());
        let at = shape.key_head(head) * dim;
        q.copy_from_slice(&mixed[at..at + dim]);
        k.copy_from_slice(&mixed[keys + at..][..dim]);
        v.copy_from_slice(&mixed[2 * keys + head * shape.value_dim..][..shape.value_dim]);
        let scale = 1. / (dim as f32).sqrt();
        let q_scale = scale / (square_sum(q) + LENGTH_EPS).sqrt();
        let k_scale = 1. / (square_sum(k) + LENGTH_EPS).sqrt();
        q.iter_mut().for_each(|x| *x *= q_scale);
        k.iter_mut().for_each(|x| *x *= k_scale);
    }
}
