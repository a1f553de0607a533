//! The gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3) after a short convolution, as Qwen3-Next and
//! Qwen3.5 have it. CPU only.

mod head;
#[cfg(test)]
mod tests;

use super::parallel::{Shared, for_each};
use super::states::{StateBuffers, StatePool, StateRows, StateShape, StateStart};
use super::storage::contiguous;
use candle_core::{Device, Result, Storage, Tensor};
use head::{Matrices, Tokens};
use tracing::trace_span;

/// Number of values of matrices, for each token, from which waking other threads pays.
const MIN_PARALLEL: usize = 1 << 15;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
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

    /// What the state takes in of a token: q, k and v before the convolution, `b` and `a`.
    fn inputs(&self) -> usize {
        self.channels() + 2 * self.value_heads
    }

    /// Values of a row: `z` and its inputs.
    pub fn width(&self) -> usize {
        self.values() + self.inputs()
    }

    /// The sizes of its states.
    pub fn states(&self) -> StateShape {
        StateShape {
            matrices: self.values() * self.key_dim,
            window: (self.taps - 1) * self.channels(),
        }
    }
}

/// The weights of a layer, besides its products.
#[derive(Debug, Clone)]
pub struct DeltaWeights {
    pub shape: DeltaShape,
    /// `[taps, channels]`, that of the row's own token first.
    pub conv: Vec<f32>,
    /// Of each head of v: the factor of the decay, below 0, and what is added to `a`.
    pub decay: Vec<f32>,
    pub dt_bias: Vec<f32>,
    /// `[value_dim]`: of the norm of the output.
    pub norm: Vec<f32>,
    pub eps: f32,
}

/// The outputs of rows `x`, `[rows, width]` f32, contiguous: of each `z`, q, k, v, `b` and `a`. They are
/// `[rows, values]`: the heads of v, normalized, times `silu(z)`.
///
/// q, k and v are mixed with those of the tokens before and pass a SiLU; q and k become unit vectors, q divided by the
/// square root of its width. Then each head's matrix S, `[key_dim, value_dim]`, decays by
/// `exp(decay * softplus(a + dt_bias))`, takes in `k (v - k S) sigmoid(b)`, and gives `q S`. One token after another, and
/// with one order of additions, whatever the forwards into which a text is divided.
///
/// # Errors
/// If the shapes do not match, or `rows` are not the rows of `x`.
pub fn delta_net(
    x: &Tensor,
    weights: &DeltaWeights,
    rows: &[StateRows],
    pool: &mut StatePool,
) -> Result<Tensor> {
    let (count, width) = x.dims2()?;
    let shape = weights.shape;
    if width != shape.width() {
        candle_core::bail!("delta-net: rows of {width} values, not {}", shape.width());
    }
    StateRows::check(rows, count)?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("delta-net: only the CPU has this kernel");
    };
    let x = contiguous::<f32>("delta-net", storage, layout)?;
    let out = trace_span!("attention").in_scope(|| weights.run(x, rows, pool))?;
    Tensor::from_vec(out, (count, shape.values()), &Device::Cpu)
}

/// What a forward leaves in a slot besides matrices.
struct Left {
    window: Vec<f32>,
    nodes: Vec<f32>,
}

impl Left {
    /// That of the slots of `part` with these tokens, in their order.
    fn of(part: &StateRows, tokens: &Tokens<'_>, channels: usize) -> Vec<Self> {
        let Some(kept) = &part.kept else {
            return Vec::new();
        };
        let own = Self {
            window: tokens.window_after(tokens.taken, channels),
            nodes: tokens.nodes().concat(),
        };
        let copies = kept.copies.iter().map(|(at, _)| Self {
            window: tokens.window_after(*at, channels),
            nodes: Vec::new(),
        });
        std::iter::once(own).chain(copies).collect()
    }
}

impl DeltaWeights {
    fn run(&self, x: &[f32], rows: &[StateRows], pool: &mut StatePool) -> Result<Vec<f32>> {
        let shape = &self.shape;
        let mut slots = Vec::new();
        for kept in rows.iter().filter_map(|part| part.kept.as_ref()) {
            if let StateStart::CopyOf(from) = kept.start {
                pool.copy(from, kept.slot);
            }
            slots.push(kept.slot);
            slots.extend(kept.copies.iter().map(|(_, slot)| slot));
        }
        let mut buffers = pool.get_mut(&slots);
        let empty = vec![0.; shape.states().window];
        let (mut tokens, mut matrices) = (Vec::new(), Vec::new());
        let mut left = buffers.iter_mut();
        for part in rows {
            let Some((kept, own)) = part.kept.as_ref().zip(left.next()) else {
                tokens.push(Tokens::new(shape, part, x, &empty, &[])?);
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
            tokens.push(Tokens::new(shape, part, x, window, nodes)?);
            let copies = kept.copies.iter().zip(&mut left);
            matrices.push(Matrices {
                own: Some(Shared::new(own)),
                is_empty,
                copies: (copies.map(|((at, _), copy)| (*at, Shared::new(&mut copy.matrices))))
                    .collect(),
            });
        }
        let count = x.len() / shape.width();
        let mut out = vec![0.; count * shape.values()];
        let (heads, places) = (shape.value_heads, Shared::new(&mut out));
        let is_much = count * shape.states().matrices >= MIN_PARALLEL;
        for_each(rows.len() * heads, is_much, |unit| {
            let (part, head) = (unit / heads, unit % heads);
            let first = rows[part].rows.start * shape.values();
            self.one_head(head, &tokens[part], &matrices[part], (&places, first));
        });
        let left = rows.iter().zip(&tokens);
        let left = left.flat_map(|(part, tokens)| Left::of(part, tokens, shape.channels()));
        let left: Vec<Left> = left.collect();
        for (buffers, left) in buffers.into_iter().zip(left) {
            (buffers.window, buffers.nodes) = (left.window, left.nodes);
        }
        Ok(out)
    }
}
