//! Layers that read a text one token after another: a short convolution, after which each head has a matrix that takes
//! in the token and gives an output.
//!
//! One order of additions for each token, whatever the forwards into which a text is divided, and whatever drafts and
//! other sequences are beside it. A GPU has an order of its own.

#[cfg(feature = "cuda")]
pub(super) mod cuda;
mod head;
mod plan;
mod tables;
#[cfg(test)]
pub(super) mod testing;
mod tokens;

use super::parallel::{Shared, for_each};
use super::states::{StateBuffers, StatePool, StateRows, StateShape, StateStart};
use super::storage::contiguous;
use crate::simd::{self, Loop, Simd};
use crate::{cpu, float};
use candle_core::{Device, Result, Storage, Tensor};
use head::{Head, Matrices};
use tokens::{Left, Mixing, Tokens};
use tracing::trace_span;

pub use tables::{StateBatch, StateCapacity, StateTables};

/// Maximum number of rows of a head's matrix on a GPU: the width of q and k, or of B and C.
pub const MAX_GPU_STATE_ROWS: usize = 256;
/// Number of values of matrices, for each token, from which waking other threads pays.
const MIN_PARALLEL: usize = 1 << 15;
/// SIMD lanes: partial sums of a sum of squares.
const LANES: usize = 8;

/// Sizes of such a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub heads: usize,
    /// Width of a head's output.
    pub outputs: usize,
    /// Values of a head's matrix.
    pub matrix: usize,
    /// Values that the convolution mixes.
    pub channels: usize,
    /// Values of a row that are used as they are.
    pub scalars: usize,
    /// Number of tokens that the convolution mixes, the row's own included.
    pub taps: usize,
}

impl Sizes {
    /// Values of the output of a row, and of its gate.
    pub fn values(&self) -> usize {
        self.heads * self.outputs
    }

    /// What the state takes in of a token: its channels before the convolution, and its scalars.
    fn inputs(&self) -> usize {
        self.channels + self.scalars
    }

    /// Values of a row: its gate and its inputs.
    pub fn width(&self) -> usize {
        self.values() + self.inputs()
    }

    /// The sizes of its states.
    pub fn states(&self) -> StateShape {
        StateShape {
            matrices: self.heads * self.matrix,
            window: (self.taps - 1) * self.channels,
            inputs: self.inputs(),
        }
    }
}

/// The convolution of a layer, after which each channel passes a SiLU.
pub(super) struct Convolution<'a> {
    /// `[taps, channels]`, that of the row's own token first.
    pub weights: &'a [f32],
    /// `[channels]`
    pub bias: Option<&'a [f32]>,
}

/// A token as a head sees it.
pub(super) struct TokenInputs<'a> {
    /// All channels, mixed.
    pub mixed: &'a [f32],
    pub scalars: &'a [f32],
}

/// The vectors of a layer in the memory of a GPU, all f32.
#[derive(Debug, Clone)]
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only CUDA reads it")
)]
pub struct RecurrentVectors {
    /// As in [`Convolution`].
    pub(super) conv: Tensor,
    pub(super) conv_bias: Option<Tensor>,
    /// `[heads]` each.
    pub(super) decay: Tensor,
    pub(super) dt_bias: Tensor,
    pub(super) skip: Option<Tensor>,
    pub(super) norm: Option<Tensor>,
}

/// What such a layer computes.
pub(super) trait Recurrence: Sync {
    /// What a head keeps while it works.
    type Scratch;

    /// Its name in messages.
    const NAME: &str;

    fn sizes(&self) -> Sizes;

    fn convolution(&self) -> Convolution<'_>;

    fn scratch(&self) -> Self::Scratch;

    /// Lets the matrix of `head` take in a token. Of a row of the forward, `place` is where the head's output goes, and its
    /// part of the gate.
    fn step(
        &self,
        head: usize,
        matrix: &mut [f32],
        token: &TokenInputs<'_>,
        scratch: &mut Self::Scratch,
        place: Option<(&mut [f32], &[f32])>,
    );

    /// Whether [`Recurrence::finish`] does anything.
    const FINISHES: bool = false;

    /// What is done with the outputs of all heads of a row.
    fn finish(&self, _row: &mut [f32]) {}

    /// How a GPU computes it, if its vectors are there.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Option<cuda::Rule<'_>>;
}

/// The outputs of rows `x`, `[rows, width]`, contiguous, f32 on the CPU: of each the gate, the channels before the
/// convolution and the scalars. They are `[rows, values]`. On a GPU the last rows may be padding, and the pool
/// [was prepared](StatePool::prepare).
///
/// # Errors
/// If the shapes do not match, or `batch` does not have the rows of `x`.
pub(super) fn recurrent<R: Recurrence>(
    layer: &R,
    x: &Tensor,
    batch: &StateBatch,
    pool: &mut StatePool,
) -> Result<Tensor> {
    let (count, width) = x.dims2()?;
    let sizes = layer.sizes();
    if width != sizes.width() {
        candle_core::bail!("{}: rows of {width} values, not {}", R::NAME, sizes.width());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::run(layer, x, batch, pool);
    }
    let rows = batch.rows();
    if StateRows::check(rows)? != count {
        candle_core::bail!("states: {rows:?} are not {count} rows");
    }
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("{}: this build has no kernel for {:?}", R::NAME, x.device());
    };
    let x = contiguous::<f32>(R::NAME, storage, layout)?;
    let out = trace_span!("attention").in_scope(|| run(layer, x, rows, pool))?;
    Tensor::from_vec(out, (count, sizes.values()), &Device::Cpu)
}

fn run<R: Recurrence>(
    layer: &R,
    x: &[f32],
    rows: &[StateRows],
    pool: &mut StatePool,
) -> Result<Vec<f32>> {
    let sizes = &layer.sizes();
    let mut slots = Vec::new();
    for kept in rows.iter().filter_map(|part| part.kept.as_ref()) {
        if let StateStart::CopyOf(from) = kept.start {
            pool.copy(from, kept.slot)?;
        }
        slots.push(kept.slot);
        slots.extend(kept.copies.iter().map(|(_, slot)| slot));
    }
    let mut buffers = pool.get_mut(&slots)?;
    let empty = vec![0.; sizes.states().window];
    let (mut tokens, mut matrices) = (Vec::new(), Vec::new());
    let mut left = buffers.iter_mut();
    for part in rows {
        // A part that keeps nothing has no buffers.
        let kept = part.kept.as_ref();
        let Some((kept, own)) = kept.and_then(|kept| Some((kept, left.next()?))) else {
            tokens.push(Tokens::new(sizes, part, x, &empty, &[])?);
            matrices.push(Matrices::default());
            continue;
        };
        let StateBuffers {
            matrices: own,
            window,
            nodes,
        } = &mut **own;
        let is_empty = kept.start == StateStart::Empty;
        let window = if is_empty { &empty } else { &*window };
        tokens.push(Tokens::new(sizes, part, x, window, nodes)?);
        let copies = kept.copies.iter().zip(&mut left);
        matrices.push(Matrices {
            own: Some(Shared::new(own)),
            is_empty,
            copies: (copies.map(|((at, _), copy)| (*at, Shared::new(&mut copy.matrices))))
                .collect(),
        });
    }
    let count = x.len() / sizes.width();
    let is_much = count * sizes.states().matrices >= MIN_PARALLEL;
    let mixed = mix(layer, &tokens, is_much);
    let mut out = vec![0.; count * sizes.values()];
    let (heads, places) = (sizes.heads, Shared::new(&mut out));
    let isa = cpu::isa();
    for_each(rows.len() * heads, is_much, |unit| {
        let (part, head) = (unit / heads, unit % heads);
        let work = Head {
            layer,
            head,
            tokens: &tokens[part],
            mixed: &mixed[part],
            matrices: &matrices[part],
            out: &places,
            first: rows[part].rows.start * sizes.values(),
        };
        simd::run(isa, work);
    });
    if R::FINISHES {
        for_each(count, is_much, |row| {
            // SAFETY: each row is finished once.
            let row = unsafe { places.slice(row * sizes.values(), sizes.values()) };
            simd::run(isa, Finish { layer, row });
        });
    }
    let left = rows.iter().zip(&tokens);
    let left = left.flat_map(|(part, tokens)| Left::of(part, tokens, sizes.channels));
    let left: Vec<Left> = left.collect();
    for (buffers, left) in buffers.into_iter().zip(left) {
        (buffers.window, buffers.nodes) = (left.window, left.nodes);
    }
    Ok(out)
}

/// The channels of all `tokens` that are taken in or are nodes, mixed with those before: of each sequence
/// `[tokens, channels]`. All heads read some of them.
fn mix<R: Recurrence>(layer: &R, tokens: &[Tokens<'_>], is_much: bool) -> Vec<Vec<f32>> {
    let channels = layer.sizes().channels;
    let mut mixed: Vec<Vec<f32>> = (tokens.iter())
        .map(|tokens| vec![0.; tokens.count() * channels])
        .collect();
    let places: Vec<Shared<'_, f32>> = mixed.iter_mut().map(|all| Shared::new(all)).collect();
    let units = tokens.iter().enumerate();
    let units: Vec<(usize, usize)> = units
        .flat_map(|(part, tokens)| (0..tokens.count()).map(move |token| (part, token)))
        .collect();
    let isa = cpu::isa();
    for_each(units.len(), is_much, |unit| {
        let (part, token) = units[unit];
        let work = Mixing {
            convolution: layer.convolution(),
            tokens: &tokens[part],
            token,
            // SAFETY: each token is mixed once.
            out: unsafe { places[part].slice(token * channels, channels) },
        };
        simd::run(isa, work);
    });
    drop(places);
    mixed
}

/// [`Recurrence::finish`] of a row.
struct Finish<'a, R> {
    layer: &'a R,
    row: &'a mut [f32],
}

impl<R: Recurrence> Loop for Finish<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        self.layer.finish(self.row);
    }
}

#[inline(always)]
pub(super) fn square_sum(values: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    for values in values.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(values) {
            *sum += x * x;
        }
    }
    sums.iter().sum()
}

#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1. / (1. + float::exp(-x))
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.) + float::exp(-x.abs()).ln_1p()
}
