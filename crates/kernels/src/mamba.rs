//! Mamba 2 (Dao and Gu 2024, arXiv 2405.21060, sections 2 and 7): a state space layer whose matrices decay by one factor
//! for each head.

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

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// Number of heads, each with its own state matrix.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups of heads one after another that share B and C; divides `heads`.
    pub groups: usize,
    /// Width of B and C of a group.
    pub state_dim: usize,
    /// Number of tokens that the convolution mixes, the row's own included.
    pub taps: usize,
}

impl MambaShape {
    /// Values of x of a row.
    pub fn values(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values that the convolution mixes: x, B and C.
    pub fn channels(&self) -> usize {
        self.values() + 2 * self.groups * self.state_dim
    }

    /// Values of a row: `z`, the channels and `dt`.
    pub fn width(&self) -> usize {
        self.sizes().width()
    }

    /// The sizes of its states.
    pub fn states(&self) -> StateShape {
        self.sizes().states()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            heads: self.heads,
            outputs: self.head_dim,
            matrix: self.state_dim * self.head_dim,
            channels: self.channels(),
            scalars: self.heads,
            taps: self.taps,
        }
    }
}

/// The weights of a layer, besides its products.
#[derive(Debug, Clone)]
pub struct MambaWeights {
    /// The sizes of the layer.
    pub shape: MambaShape,
    /// `[taps, channels]`, that of the row's own token first.
    pub conv: Vec<f32>,
    /// `[channels]`
    pub conv_bias: Option<Vec<f32>>,
    /// Of each head: the factor of the decay, below 0, what is added to `dt`, and the factor of x in the output.
    pub decay: Vec<f32>,
    /// `[heads]`: the bias added to `dt` before the softplus.
    pub dt_bias: Vec<f32>,
    /// `[heads]`: the factor of x in the output (D).
    pub skip: Vec<f32>,
    /// The least and the largest step.
    pub step_limits: (f32, f32),
    /// `[values]`: of the norm of the output, which spans the heads of a group; `None` = there is none.
    pub norm: Option<Vec<f32>>,
    /// Added to the mean square in the norm of the output.
    pub eps: f32,
    /// Those of a layer on a GPU, which [`MambaWeights::on`] sends there.
    pub on_device: Option<RecurrentVectors>,
}

/// The outputs of rows `x`, `[rows, width]`, contiguous, f32 on the CPU: of each `z`, x, B, C and `dt`. They are
/// `[rows, values]`: the heads of x times `silu(z)`, normalized group by group if there is a norm.
///
/// x, B and C are mixed with those of the tokens before and pass a SiLU. `dt` becomes a step, `softplus(dt + dt_bias)`
/// within its limits. Each head's matrix S, `[state_dim, head_dim]`, decays by `exp(decay * step)`, takes in `B x step`, and
/// gives `C S`, to which `skip * x` is added. One token after another, and with one order of additions, whatever the
/// forwards into which a text is divided.
///
/// # Errors
/// If the shapes do not match, or `batch` does not have the rows of `x`.
pub fn mamba(
    x: &Tensor,
    weights: &MambaWeights,
    batch: &StateBatch,
    pool: &mut StatePool,
) -> Result<Tensor> {
    recurrent(weights, x, batch, pool)
}

impl MambaWeights {
    /// These weights for a layer on `device`.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn on(mut self, device: &Device) -> Result<Self> {
        if !device.is_cpu() {
            let send = |values: &[f32]| Tensor::new(values, device);
            self.on_device = Some(RecurrentVectors {
                conv: send(&self.conv)?,
                conv_bias: self.conv_bias.as_deref().map(send).transpose()?,
                decay: send(&self.decay)?,
                dt_bias: send(&self.dt_bias)?,
                skip: Some(send(&self.skip)?),
                norm: self.norm.as_deref().map(send).transpose()?,
            });
        }
        Ok(self)
    }
}

/// What one head keeps while it works.
pub(super) struct Scratch {
    /// x times the step.
    new: Vec<f32>,
    /// `C S`.
    read: Vec<f32>,
}

impl Recurrence for MambaWeights {
    type Scratch = Scratch;

    const NAME: &str = "mamba";

    fn sizes(&self) -> Sizes {
        self.shape.sizes()
    }

    fn convolution(&self) -> Convolution<'_> {
        Convolution {
            weights: &self.conv,
            bias: self.conv_bias.as_deref(),
        }
    }

    fn scratch(&self) -> Scratch {
        Scratch {
            new: vec![0.; self.shape.head_dim],
            read: vec![0.; self.shape.head_dim],
        }
    }

    #[inline(always)]
    fn step(
        &self,
        head: usize,
        matrix: &mut [f32],
        token: &TokenInputs<'_>,
        Scratch { new, read }: &mut Scratch,
        place: Option<(&mut [f32], &[f32])>,
    ) {
        let MambaShape {
            heads,
            head_dim,
            groups,
            state_dim,
            ..
        } = self.shape;
        let (x, shared) = token.mixed.split_at(self.shape.values());
        let (b, c) = shared.split_at(groups * state_dim);
        let x = &x[head * head_dim..][..head_dim];
        let at = head / (heads / groups) * state_dim;
        let (b, c) = (&b[at..at + state_dim], &c[at..at + state_dim]);
        let (least, most) = self.step_limits;
        let step = softplus(token.scalars[head] + self.dt_bias[head]);
        let step = step.max(least).min(most);
        let decay = float::exp(self.decay[head] * step);
        for (new, x) in new.iter_mut().zip(x) {
            *new = step * x;
        }
        read.fill(0.);
        for ((row, b), c) in matrix.chunks_exact_mut(head_dim).zip(b).zip(c) {
            for ((s, new), read) in row.iter_mut().zip(&*new).zip(&mut *read) {
                *s = *s * decay + b * new;
                *read += *s * c;
            }
        }
        if let Some((out, gate)) = place {
            let skip = self.skip[head];
            for (((out, read), x), z) in out.iter_mut().zip(&*read).zip(x).zip(gate) {
                *out = (read + skip * x) * (z * sigmoid(*z));
            }
        }
    }

    const FINISHES: bool = true;

    #[inline(always)]
    fn finish(&self, row: &mut [f32]) {
        let Some(norm) = &self.norm else { return };
        let width = row.len() / self.shape.groups;
        let groups = row.chunks_exact_mut(width);
        for (values, norm) in groups.zip(norm.chunks_exact(width)) {
            let scale = 1. / (square_sum(values) / width as f32 + self.eps).sqrt();
            for (x, norm) in values.iter_mut().zip(norm) {
                *x = *x * scale * norm;
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Option<cuda::Rule<'_>> {
        let (least, most) = self.step_limits;
        Some(cuda::Rule {
            name: "mamba",
            vectors: self.on_device.as_ref()?,
            shared: self.shape.groups,
            last: cuda::Last::Limits(least, most),
            output: cuda::Output {
                width: self.shape.values() / self.shape.groups,
                is_of_each: false,
                gates_first: true,
                eps: self.eps,
            },
        })
    }
}
