//! Causal grouped-query attention of an unrolled head (EAGLE-3's training-time test), with RoPE and a
//! backward pass of its own.
//!
//! The head runs over the same positions several times, one pass a draft step. At pass `s`, position `i`
//! is rotated as `i + s`, and sees K and V of pass 0 at positions up to `i` (the committed text) and of
//! passes 1 to `s` at `i` alone (the draft that began there). So the passes after the first may run over some
//! of the positions.

use super::heads::{Drafts, Heads};
use super::on_device;
use super::ops::{add_scaled, dot, slice, with_slice};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use foretoken_kernels::float::exp;

/// The attention of the last of `passes`, `[positions of the pass, queries * head_dim]`, for Q, K and V of all of
/// them before RoPE, pass after pass, `[positions of all passes, heads.width()]`. The first pass has all positions
/// of the rows, each later one those of `drafts`.
pub fn attend(qkv: &Tensor, heads: &Heads, drafts: &Drafts, passes: usize) -> Result<Tensor> {
    if !qkv.device().is_cpu() {
        return on_device::attend_causally(qkv, heads, drafts, passes);
    }
    qkv.apply_op1(CausalAttention {
        heads: heads.clone(),
        drafts: drafts.clone(),
        passes,
    })
}

struct CausalAttention {
    heads: Heads,
    drafts: Drafts,
    passes: usize,
}

/// The elements of one call.
struct CausalCall<'a> {
    op: &'a CausalAttention,
    qkv: &'a [f32],
}

/// Which part of Q, K and V, rotated or not.
#[derive(Clone, Copy, PartialEq)]
enum CausalPart {
    Query,
    Key,
    Value,
}

/// The values that the forward and the backward pass need.
struct CausalWeights {
    /// `[rows * queries, positions, head_dim]`, rotated and scaled.
    q: Vec<f32>,
    /// K of each pass, `[rows * keys, positions, head_dim]`, rotated; `v` is V in the same shape, not rotated.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    /// `[rows * queries, positions, len]`: what a position gives to the positions of pass 0.
    text: Vec<f32>,
    /// `[rows * queries, positions, passes - 1]`: what it gives to the later passes.
    draft: Vec<f32>,
}

impl CausalCall<'_> {
    fn rows(&self) -> usize {
        self.op.drafts.rows
    }

    /// Positions of a row in the last pass.
    fn count(&self) -> usize {
        self.op.drafts.count(self.op.passes - 1)
    }

    /// Queries of one head of K.
    fn group(&self) -> usize {
        self.op.heads.queries / self.op.heads.keys
    }

    /// Number of heads of `part`, and the column at which it begins.
    fn columns(&self, part: CausalPart) -> (usize, usize) {
        let Heads {
            queries,
            keys,
            head_dim,
            ..
        } = self.op.heads;
        match part {
            CausalPart::Query => (queries, 0),
            CausalPart::Key => (keys, queries * head_dim),
            CausalPart::Value => (keys, (queries + keys) * head_dim),
        }
    }

    /// Calls `each` with every place of `part` of pass `pass`, in rows of width `width`: its number in the order
    /// of `[rows, heads, positions]`, its offset in `[rows * positions, width]`, and its position.
    fn places(
        &self,
        (part, pass): (CausalPart, usize),
        width: usize,
        mut each: impl FnMut(usize, usize, usize),
    ) {
        let (heads, start) = self.columns(part);
        let (count, d) = (self.op.drafts.count(pass), self.op.heads.head_dim);
        for row in 0..self.rows() {
            for head in 0..heads {
                for i in 0..count {
                    let from = (row * count + i) * width + start + head * d;
                    let position = self.op.drafts.position(pass, row, i);
                    each((row * heads + head) * count + i, from, position);
                }
            }
        }
    }

    /// `part` of pass `pass`, `[rows, heads, positions, head_dim]`.
    fn gather(&self, part: CausalPart, pass: usize) -> Vec<f32> {
        let d = self.op.heads.head_dim;
        let width = self.op.heads.width();
        let places = self.op.drafts.places(pass);
        let size = places.len();
        let qkv = &self.qkv[places.start * width..places.end * width];
        let mut out = vec![0f32; size * self.columns(part).0 * d];
        let scale = match part {
            CausalPart::Query => self.op.heads.scale(),
            _ => 1.0,
        };
        self.places((part, pass), width, |to, from, i| {
            let (x, y) = (&qkv[from..from + d], &mut out[to * d..(to + 1) * d]);
            match part {
                CausalPart::Value => y.copy_from_slice(x),
                _ => rotate(x, y, self.op.heads.rotation(i + pass), scale, 1.0),
            }
        });
        out
    }

    /// Writes the gradient by `part` of pass `pass`, `[rows, heads, positions, head_dim]`, to `out`, which is
    /// that by all of `qkv`.
    fn scatter(&self, part: CausalPart, pass: usize, slope: &[f32], out: &mut [f32]) {
        let d = self.op.heads.head_dim;
        let width = self.op.heads.width();
        let places = self.op.drafts.places(pass);
        let out = &mut out[places.start * width..places.end * width];
        let scale = match part {
            CausalPart::Query => self.op.heads.scale(),
            _ => 1.0,
        };
        self.places((part, pass), width, |from, to, i| {
            let (x, y) = (&slope[from * d..(from + 1) * d], &mut out[to..to + d]);
            match part {
                CausalPart::Value => y.copy_from_slice(x),
                _ => rotate(x, y, self.op.heads.rotation(i + pass), scale, -1.0),
            }
        });
    }

    /// [`product`] for each head of K.
    fn product(
        &self,
        a: (Vec<f32>, bool),
        b: (&CpuStorage, bool),
        sizes: (usize, usize, usize),
    ) -> Result<Vec<f32>> {
        product(self.rows() * self.op.heads.keys, a, b, sizes)
    }

    /// The attention's weights; each row is a softmax over what its position sees.
    fn weights(&self) -> Result<CausalWeights> {
        let (len, count, d) = (self.op.drafts.len, self.count(), self.op.heads.head_dim);
        let passes = self.op.passes;
        let q = self.gather(CausalPart::Query, passes - 1);
        let all = |part| (0..passes).map(move |pass| self.gather(part, pass));
        let (k, v): (Vec<_>, Vec<_>) = (
            all(CausalPart::Key).collect(),
            all(CausalPart::Value).collect(),
        );
        let keys = CpuStorage::F32(k[0].clone());
        let sizes = (self.group() * count, len, d);
        let mut text = self.product((q.clone(), false), (&keys, true), sizes)?;
        let later = passes - 1;
        let mut draft = vec![0f32; q.len() / d * later];
        for (query, (text, q)) in text
            .chunks_exact_mut(len)
            .zip(q.chunks_exact(d))
            .enumerate()
        {
            let own = &mut draft[query * later..(query + 1) * later];
            let key = self.key(query);
            for (own, k) in own.iter_mut().zip(&k[1..]) {
                *own = dot(q, &k[key * d..(key + 1) * d]);
            }
            let row = query / count / self.op.heads.queries;
            let position = self.op.drafts.position(later, row, query % count);
            let (seen, unseen) = text.split_at_mut(position + 1);
            unseen.fill(0.0);
            softmax(seen, own);
        }
        Ok(CausalWeights {
            q,
            k,
            v,
            text,
            draft,
        })
    }

    /// The number of the key of a later pass at the position and in the group of the query with this number.
    fn key(&self, query: usize) -> usize {
        let count = self.count();
        query / count / self.group() * count + query % count
    }

    fn forward(&self) -> Result<Vec<f32>> {
        let (len, d) = (self.op.drafts.len, self.op.heads.head_dim);
        let weights = self.weights()?;
        let values = CpuStorage::F32(weights.v[0].clone());
        let sizes = (self.group() * self.count(), d, len);
        let mut y = self.product((weights.text, false), (&values, false), sizes)?;
        let later = self.op.passes - 1;
        for (query, y) in y.chunks_exact_mut(d).enumerate() {
            let key = self.key(query);
            let own = &weights.draft[query * later..(query + 1) * later];
            for (&weight, v) in own.iter().zip(&weights.v[1..]) {
                add_scaled(y, weight, &v[key * d..(key + 1) * d]);
            }
        }
        let width = self.op.heads.queries * d;
        let mut out = vec![0f32; y.len()];
        self.places((CausalPart::Query, later), width, |from, to, _| {
            out[to..to + d].copy_from_slice(&y[from * d..(from + 1) * d]);
        });
        Ok(out)
    }

    /// The gradient by `qkv` for the gradient `slope` by the output.
    fn backward(&self, slope: &[f32]) -> Result<Vec<f32>> {
        let (len, count, d) = (self.op.drafts.len, self.count(), self.op.heads.head_dim);
        let passes = self.op.passes;
        let later = passes - 1;
        let (group, width) = (self.group(), self.op.heads.queries * d);
        let CausalWeights {
            q,
            k,
            v,
            text,
            draft,
        } = self.weights()?;
        let mut of_y = vec![0f32; slope.len()];
        self.places((CausalPart::Query, later), width, |to, from, _| {
            of_y[to * d..(to + 1) * d].copy_from_slice(&slope[from..from + d]);
        });
        let values = CpuStorage::F32(v[0].clone());
        let mut of_text = self.product(
            (of_y.clone(), false),
            (&values, true),
            (group * count, len, d),
        )?;
        let zeros = |k: &Vec<f32>| vec![0f32; k.len()];
        let (mut of_k, mut of_v): (Vec<_>, Vec<_>) = k.iter().map(|k| (zeros(k), zeros(k))).unzip();
        let mut of_q_later = vec![0f32; q.len()];
        let mut of_own = vec![0f32; later];
        for (query, of_text) in of_text.chunks_exact_mut(len).enumerate() {
            let at = query * d..(query + 1) * d;
            let key = self.key(query) * d..(self.key(query) + 1) * d;
            let text = &text[query * len..(query + 1) * len];
            let own = &draft[query * later..(query + 1) * later];
            for (pass, slope) in of_own.iter_mut().enumerate() {
                *slope = dot(&of_y[at.clone()], &v[pass + 1][key.clone()]);
            }
            // The gradient through a softmax: what is above the mean rises.
            let mean = dot(of_text, text) + dot(&of_own, own);
            for (slope, weight) in of_text.iter_mut().zip(text) {
                *slope = weight * (*slope - mean);
            }
            for (pass, (slope, weight)) in of_own.iter().zip(own).enumerate() {
                let score = weight * (slope - mean);
                let pass = pass + 1;
                add_scaled(&mut of_q_later[at.clone()], score, &k[pass][key.clone()]);
                add_scaled(&mut of_k[pass][key.clone()], score, &q[at.clone()]);
                add_scaled(&mut of_v[pass][key.clone()], *weight, &of_y[at.clone()]);
            }
        }
        let keys = CpuStorage::F32(k.into_iter().next().unwrap_or_default());
        let (q, of_y) = (CpuStorage::F32(q), CpuStorage::F32(of_y));
        let sizes = (len, d, group * count);
        of_v[0] = self.product((text, true), (&of_y, false), sizes)?;
        of_k[0] = self.product((of_text.clone(), true), (&q, false), sizes)?;
        let mut of_q = self.product((of_text, false), (&keys, false), (group * count, d, len))?;
        add_scaled(&mut of_q, 1.0, &of_q_later);
        let mut out = vec![0f32; self.qkv.len()];
        self.scatter(CausalPart::Query, later, &of_q, &mut out);
        for pass in 0..passes {
            self.scatter(CausalPart::Key, pass, &of_k[pass], &mut out);
            self.scatter(CausalPart::Value, pass, &of_v[pass], &mut out);
        }
        Ok(out)
    }
}

/// Makes weights of the scores of a row: the softmax over both parts of what it sees.
pub fn softmax(text: &mut [f32], own: &mut [f32]) {
    let highest = text.iter().chain(&*own).copied().fold(f32::MIN, f32::max);
    let mut sum = 0.0;
    for part in [&mut *text, &mut *own] {
        part.iter_mut()
            .for_each(|score| *score = exp(*score - highest));
        sum += part.iter().sum::<f32>();
    }
    let share = 1.0 / sum;
    text.iter_mut()
        .chain(own)
        .for_each(|weight| *weight *= share);
}

/// `a @ b` for each of a batch: `a` is `[m, k]`, `b` is `[k, n]`; the flags say which is stored
/// transposed.
pub fn product(
    batch: usize,
    (a, a_turned): (Vec<f32>, bool),
    (b, b_turned): (&CpuStorage, bool),
    (m, n, k): (usize, usize, usize),
) -> Result<Vec<f32>> {
    let layout = |rows, columns, turned| {
        if turned {
            Layout::contiguous((batch, columns, rows)).transpose(1, 2)
        } else {
            Ok(Layout::contiguous((batch, rows, columns)))
        }
    };
    let (a_layout, b_layout) = (layout(m, k, a_turned)?, layout(k, n, b_turned)?);
    let a = CpuStorage::F32(a);
    match a.matmul(b, (batch, m, n, k), &a_layout, &b_layout)? {
        CpuStorage::F32(product) => Ok(product),
        _ => candle_core::bail!("a product of f32 is f32"),
    }
}

/// Rotates one head from `x` to `y`, times `scale`; backwards if `direction` is -1.
pub fn rotate(x: &[f32], y: &mut [f32], (cos, sin): (&[f32], &[f32]), scale: f32, direction: f32) {
    let (x0, x1) = x.split_at(x.len() / 2);
    let (y0, y1) = y.split_at_mut(x.len() / 2);
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (cos, sin) = (cos * scale, sin * scale * direction);
        y0[i] = x0[i] * cos - x1[i] * sin;
        y1[i] = x0[i] * sin + x1[i] * cos;
    }
}

impl CustomOp1 for CausalAttention {
    fn name(&self) -> &'static str {
        "train-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = slice(storage, layout)?;
        let call = CausalCall { op: self, qkv };
        let width = self.heads.queries * self.heads.head_dim;
        let shape = (call.rows() * call.count(), width).into();
        Ok((CpuStorage::F32(call.forward()?), shape))
    }

    fn bwd(&self, qkv: &Tensor, _: &Tensor, slope: &Tensor) -> Result<Option<Tensor>> {
        let of_qkv = with_slice(qkv, |qkv| {
            with_slice(slope, |slope| CausalCall { op: self, qkv }.backward(slope))
        })???;
        Tensor::from_vec(of_qkv, qkv.dims2()?, qkv.device()).map(Some)
    }
}
