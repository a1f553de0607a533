//! One head over the tokens of one sequence.

use super::{DeltaShape, DeltaWeights};
use crate::float;
#[cfg(target_arch = "x86_64")]
use crate::kernels::cpu::{self, Avx2, Avx512Vnni};
use crate::kernels::parallel::Shared;
use crate::kernels::states::StateRows;
use candle_core::Result;

/// SIMD lanes: partial sums of a sum of squares.
const LANES: usize = 8;
/// Added to the squared length of q and of k.
const LENGTH_EPS: f32 = 1e-6;

/// The tokens of one sequence: those before its state, only for the convolution, those that the state takes in, and the
/// nodes of a draft.
pub(super) struct Tokens<'a> {
    /// Of each, q, k and v before the convolution; then `b` and `a`, except of those before the state.
    inputs: Vec<&'a [f32]>,
    /// `z` of those that are rows of the forward: the last ones.
    gates: Vec<&'a [f32]>,
    /// The token before each.
    before: Vec<usize>,
    /// Number of those before the state.
    window: usize,
    /// Number of those that the state takes in.
    pub taken: usize,
    parents: &'a [Option<u16>],
}

/// The matrices of one sequence, of all heads.
#[derive(Default)]
pub(super) struct Matrices<'a> {
    /// `None` = they are not kept.
    pub own: Option<Shared<'a, f32>>,
    /// Whether they begin with zeros.
    pub is_empty: bool,
    /// Those that become like `own` after so many tokens.
    pub copies: Vec<(usize, Shared<'a, f32>)>,
}

impl<'a> Tokens<'a> {
    /// Those of `part`, of the forward's rows `x`, after the tokens of `window`; `nodes` are the inputs of the last
    /// draft.
    ///
    /// # Errors
    /// If an accepted node is not among them.
    pub fn new(
        shape: &DeltaShape,
        part: &'a StateRows,
        x: &'a [f32],
        window: &'a [f32],
        nodes: &'a [f32],
    ) -> Result<Self> {
        let mut inputs: Vec<&[f32]> = window.chunks_exact(shape.channels()).collect();
        let window = inputs.len();
        for &node in part.kept.iter().flat_map(|kept| &kept.accepted) {
            let at = usize::from(node) * shape.inputs();
            let Some(node) = nodes.get(at..at + shape.inputs()) else {
                candle_core::bail!("delta-net: node {node} was not in the forward before");
            };
            inputs.push(node);
        }
        let rows = &x[part.rows.start * shape.width()..part.rows.end * shape.width()];
        let rows = rows.chunks_exact(shape.width());
        let rows = rows.map(|row| row.split_at(shape.values()));
        inputs.extend(rows.clone().map(|(_, inputs)| inputs));
        let first_node = inputs.len() - part.parents.len();
        let chain = (0..first_node).map(|token| token.saturating_sub(1));
        let nodes = part.parents.iter().map(|parent| match parent {
            Some(node) => first_node + usize::from(*node),
            None => first_node.saturating_sub(1),
        });
        Ok(Self {
            before: chain.chain(nodes).collect(),
            gates: rows.map(|(gate, _)| gate).collect(),
            window,
            taken: first_node - window,
            parents: &part.parents,
            inputs,
        })
    }

    /// What the convolution reads after so many of the tokens were taken in.
    pub fn window_after(&self, taken: usize, channels: usize) -> Vec<f32> {
        let last = self.inputs[taken..taken + self.window].iter();
        last.flat_map(|inputs| &inputs[..channels])
            .copied()
            .collect()
    }

    /// The inputs of the nodes.
    pub fn nodes(&self) -> &[&'a [f32]] {
        &self.inputs[self.window + self.taken..]
    }

    /// `z` of a token; `None` if it is no row of this forward.
    fn gate(&self, token: usize) -> Option<(usize, &'a [f32])> {
        let row = token.checked_sub(self.inputs.len() - self.gates.len())?;
        Some((row, self.gates[row]))
    }
}

/// What one head keeps while it works.
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `k S`.
    read: Vec<f32>,
}

impl DeltaWeights {
    /// Computes a head of v over `tokens`, and writes its outputs to the rows of `out` from the index on that comes with
    /// it.
    pub(super) fn one_head(
        &self,
        head: usize,
        tokens: &Tokens<'_>,
        matrices: &Matrices<'_>,
        out: (&Shared<'_, f32>, usize),
    ) {
        #[cfg(target_arch = "x86_64")]
        {
            let isa = cpu::isa();
            if let Some(proof) = isa.avx512() {
                // SAFETY: `proof` proves that the CPU has the instructions.
                return unsafe { run_avx512(proof, self, head, tokens, matrices, out) };
            }
            if let Some(proof) = isa.avx2() {
                // SAFETY: as above.
                return unsafe { run_avx2(proof, self, head, tokens, matrices, out) };
            }
        }
        self.run_head(head, tokens, matrices, out);
    }

    #[inline(always)]
    fn run_head(
        &self,
        head: usize,
        tokens: &Tokens<'_>,
        matrices: &Matrices<'_>,
        (out, first): (&Shared<'_, f32>, usize),
    ) {
        let shape = &self.shape;
        let size = shape.key_dim * shape.value_dim;
        let (mut none, at) = (Vec::new(), head * size);
        let state = match &matrices.own {
            // SAFETY: each head of a sequence is computed once.
            Some(all) => unsafe { all.slice(at, size) },
            None => {
                none.resize(size, 0.);
                &mut none[..]
            }
        };
        if matrices.is_empty {
            state.fill(0.);
        }
        let mut scratch = Scratch {
            q: vec![0.; shape.key_dim],
            k: vec![0.; shape.key_dim],
            v: vec![0.; shape.value_dim],
            read: vec![0.; shape.value_dim],
        };
        let mut step = |token: usize, state: &mut [f32]| {
            self.prepare(head, token, tokens, &mut scratch);
            let inputs = &tokens.inputs[token][shape.channels()..];
            let (b, a) = (inputs[head], inputs[shape.value_heads + head]);
            let place = tokens.gate(token).map(|(row, gate)| {
                let at = first + row * shape.values() + head * shape.value_dim;
                // SAFETY: each head of a row is computed once.
                let place = unsafe { out.slice(at, shape.value_dim) };
                (place, &gate[head * shape.value_dim..][..shape.value_dim])
            });
            let decay = float::exp(self.decay[head] * softplus(a + self.dt_bias[head]));
            self.update(state, decay, sigmoid(b), &mut scratch, place);
        };
        for taken in 0..tokens.taken {
            step(tokens.window + taken, state);
            for (_, copy) in matrices.copies.iter().filter(|(at, _)| *at == taken + 1) {
                // SAFETY: as of `own`; no slot is written twice.
                unsafe { copy.slice(at, size) }.copy_from_slice(state);
            }
        }
        // Of each node that others come after.
        let mut states: Vec<Option<Vec<f32>>> = vec![None; tokens.parents.len()];
        for (node, parent) in tokens.parents.iter().enumerate() {
            let later = &tokens.parents[node + 1..];
            let mut state = match parent.map(usize::from) {
                None => state.to_vec(),
                Some(of) if later.contains(parent) => states[of].clone().unwrap_or_default(),
                Some(of) => states[of].take().unwrap_or_default(),
            };
            step(tokens.window + tokens.taken + node, &mut state);
            states[node] = later.contains(&Some(node as u16)).then_some(state);
        }
    }

    /// Mixes q, k and v of `token` with those before.
    #[inline(always)]
    fn prepare(&self, head: usize, token: usize, tokens: &Tokens<'_>, scratch: &mut Scratch) {
        let shape = &self.shape;
        let key_head = shape.key_head(head);
        let (q_at, v_at) = (key_head * shape.key_dim, head * shape.value_dim);
        let parts = [
            (q_at, &mut scratch.q),
            (shape.keys() + q_at, &mut scratch.k),
            (2 * shape.keys() + v_at, &mut scratch.v),
        ];
        for (at, part) in parts {
            let mut from = token;
            part.fill(0.);
            for weights in self.conv.chunks_exact(shape.channels()) {
                let inputs = &tokens.inputs[from][at..at + part.len()];
                let weights = &weights[at..at + part.len()];
                for ((sum, x), weight) in part.iter_mut().zip(inputs).zip(weights) {
                    *sum += x * weight;
                }
                from = tokens.before[from];
            }
            part.iter_mut().for_each(|x| *x *= sigmoid(*x));
        }
        let scale = 1. / (shape.key_dim as f32).sqrt();
        let q_scale = scale / (square_sum(&scratch.q) + LENGTH_EPS).sqrt();
        let k_scale = 1. / (square_sum(&scratch.k) + LENGTH_EPS).sqrt();
        scratch.q.iter_mut().for_each(|x| *x *= q_scale);
        scratch.k.iter_mut().for_each(|x| *x *= k_scale);
    }

    /// Lets the matrix take in k and v; writes what q reads then, normalized and gated.
    #[inline(always)]
    fn update(
        &self,
        state: &mut [f32],
        decay: f32,
        beta: f32,
        Scratch { q, k, v, read }: &mut Scratch,
        place: Option<(&mut [f32], &[f32])>,
    ) {
        read.fill(0.);
        let width = v.len();
        for (row, k) in state.chunks_exact_mut(width).zip(&*k) {
            for (x, read) in row.iter_mut().zip(&mut *read) {
                *x *= decay;
                *read += *x * k;
            }
        }
        for (v, read) in v.iter_mut().zip(&*read) {
            *v = (*v - read) * beta;
        }
        read.fill(0.);
        for ((row, k), q) in state.chunks_exact_mut(width).zip(&*k).zip(&*q) {
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
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2(
    _: Avx2,
    weights: &DeltaWeights,
    head: usize,
    tokens: &Tokens<'_>,
    matrices: &Matrices<'_>,
    out: (&Shared<'_, f32>, usize),
) {
    weights.run_head(head, tokens, matrices, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn run_avx512(
    _: Avx512Vnni,
    weights: &DeltaWeights,
    head: usize,
    tokens: &Tokens<'_>,
    matrices: &Matrices<'_>,
    out: (&Shared<'_, f32>, usize),
) {
    weights.run_head(head, tokens, matrices, out);
}

#[inline(always)]
fn square_sum(values: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    for values in values.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(values) {
            *sum += x * x;
        }
    }
    sums.iter().sum()
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1. / (1. + float::exp(-x))
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus(x: f32) -> f32 {
    x.max(0.) + float::exp(-x.abs()).ln_1p()
}
