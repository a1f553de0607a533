//! Grouped-query attention of the heads in training, with RoPE and a backward pass of its own.
//!
//! Each query row sees the beginning of its text and some keys of its own, as a [`KeyLayout`] says. The scores of
//! the text are one matrix product for all rows of a text; those of the own keys, which are few, are computed row by
//! row.

use super::heads::{Heads, KeyLayout};
use super::on_device;
use super::ops::{add_scaled, dot, slice, with_slices};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use foretoken_kernels::float::exp;
use std::ops::Range;

/// The attention of all query rows, `[query rows, queries * head_dim]`. The last columns of `text`,
/// `[texts * len, .. + 2 * keys * head_dim]`, are K and V of the texts; `own`, `[own rows, heads.width()]`, has Q, K
/// and V of the own rows. Both are before RoPE.
pub fn attend(text: &Tensor, own: &Tensor, heads: &Heads, layout: &KeyLayout) -> Result<Tensor> {
    if !text.device().is_cpu() {
        return on_device::attend(text, own, heads, layout);
    }
    let op = Attention {
        heads: heads.clone(),
        layout: layout.clone(),
    };
    text.apply_op2(own, op)
}

struct Attention {
    heads: Heads,
    layout: KeyLayout,
}

/// Heads of Q, K or V: of the text, or of the own rows.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    TextKey,
    TextValue,
    Query,
    Key,
    Value,
}

impl Part {
    fn is_of_text(self) -> bool {
        matches!(self, Self::TextKey | Self::TextValue)
    }
}

/// The place of a [`Part`] in its tensor.
struct Columns {
    heads: usize,
    /// Column of the first head, and number of all columns.
    first: usize,
    width: usize,
    /// Rows of the tensor.
    rows: Range<usize>,
    /// Rows of a text.
    count: usize,
}

/// The values that the forward and the backward pass need.
struct Weights {
    /// `[texts * queries, query rows of a text, head_dim]`, rotated and scaled.
    q: CpuStorage,
    /// `[parts * texts * keys, query rows of a text, head_dim]`; K is rotated.
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[texts * keys, len, head_dim]`; K is rotated.
    text_k: CpuStorage,
    text_v: CpuStorage,
    /// `[texts * queries, query rows of a text, len]`: the weights of a query's text.
    text: Vec<f32>,
    /// `[texts * queries, query rows of a text, own]`: the weights of a query's own keys.
    own: Vec<f32>,
}

/// The elements of one call.
struct Call<'a> {
    heads: &'a Heads,
    layout: &'a KeyLayout,
    text: &'a [f32],
    own: &'a [f32],
}

impl Call<'_> {
    /// Queries of one head of K.
    fn group(&self) -> usize {
        self.heads.queries / self.heads.keys
    }

    fn columns(&self, part: Part) -> Columns {
        let layout = self.layout;
        let Heads { queries, keys, .. } = *self.heads;
        let (d, texts) = (self.heads.head_dim, layout.texts * layout.len);
        let own_rows = layout.positions.len();
        let (all, rows, count) = if part.is_of_text() {
            (self.text.len() / texts.max(1), texts, layout.len)
        } else {
            (self.heads.width(), own_rows, layout.count())
        };
        let own = if layout.own > 0 { keys } else { 0 };
        let (heads, first, skipped) = match part {
            Part::TextKey => (keys, all - 2 * keys * d, 0),
            Part::TextValue => (keys, all - keys * d, 0),
            Part::Query => (queries, 0, layout.first_query()),
            Part::Key => (own, queries * d, 0),
            Part::Value => (own, (queries + keys) * d, 0),
        };
        Columns {
            heads,
            first,
            width: all,
            rows: skipped..rows,
            count,
        }
    }

    /// The output has the columns of the queries alone.
    fn outputs(&self) -> Columns {
        let columns = self.columns(Part::Query);
        Columns {
            width: columns.heads * self.heads.head_dim,
            rows: 0..columns.rows.len(),
            ..columns
        }
    }

    /// Calls `each` with every place of `columns`: its number in the order of `[texts, heads, rows of a text]`, its
    /// offset in the tensor, and its row there.
    fn places(&self, columns: &Columns, mut each: impl FnMut(usize, usize, usize)) {
        let (heads, count) = (columns.heads, columns.count);
        for (i, row) in columns.rows.clone().enumerate() {
            for head in 0..heads {
                let to = (i / count * heads + head) * count + i % count;
                let from = row * columns.width + columns.first + head * self.heads.head_dim;
                each(to, from, row);
            }
        }
    }

    /// Moves one head of `part` from `x` to `y`, to the position of `row` or (if `direction` is -1) back.
    fn turn(&self, part: Part, row: usize, x: &[f32], y: &mut [f32], direction: f32) {
        let position = match part {
            Part::Value | Part::TextValue => return y.copy_from_slice(x),
            Part::TextKey => row % self.layout.len,
            Part::Query | Part::Key => self.layout.positions[row],
        };
        let scale = if part == Part::Query {
            self.heads.scale()
        } else {
            1.0
        };
        rotate(x, y, self.heads.rotation(position), scale, direction);
    }

    /// `part` as `[texts, heads, rows of a text, head_dim]`.
    fn gather(&self, part: Part) -> Vec<f32> {
        let (d, columns) = (self.heads.head_dim, self.columns(part));
        let all = if part.is_of_text() {
            self.text
        } else {
            self.own
        };
        let mut out = vec![0f32; columns.rows.len() * columns.heads * d];
        self.places(&columns, |to, from, row| {
            let (x, y) = (&all[from..from + d], &mut out[to * d..(to + 1) * d]);
            self.turn(part, row, x, y, 1.0);
        });
        out
    }

    /// Writes the gradient by `part`, `[texts, heads, rows of a text, head_dim]`, to `out`, the gradient by the tensor
    /// that has the part.
    fn scatter(&self, part: Part, slope: &[f32], out: &mut [f32]) {
        let d = self.heads.head_dim;
        self.places(&self.columns(part), |from, to, row| {
            let (x, y) = (&slope[from * d..(from + 1) * d], &mut out[to..to + d]);
            self.turn(part, row, x, y, -1.0);
        });
    }

    /// Returns the number of keys of its text that `query` sees.
    fn prefix(&self, query: usize) -> usize {
        let count = self.layout.count();
        self.layout.prefix[query / count / self.heads.queries * count + query % count]
    }

    /// Returns the places of the own keys that `query` sees, in K or V of all.
    fn keys(&self, query: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let KeyLayout {
            size, own, texts, ..
        } = *self.layout;
        let (count, d) = (self.layout.count(), self.heads.head_dim);
        let first = query / count / self.group() * count + query % count / size * size;
        let of_part = texts * self.heads.keys * count;
        // No division per key: this is the innermost loop.
        let parts = own.checked_div(size).unwrap_or(0);
        (0..parts).flat_map(move |part| {
            let first = first + part * of_part;
            (first..first + size).map(move |key| key * d..(key + 1) * d)
        })
    }

    /// `a @ b` for each head of K of each text: `a` is `[m, k]`, `b` is `[k, n]`; the flags say which is stored
    /// transposed.
    fn product(
        &self,
        (a, a_turned): (&CpuStorage, bool),
        (b, b_turned): (&CpuStorage, bool),
        (m, n, k): (usize, usize, usize),
    ) -> Result<Vec<f32>> {
        let batch = self.layout.texts * self.heads.keys;
        let layout = |rows, columns, turned| {
            if turned {
                Layout::contiguous((batch, columns, rows)).transpose(1, 2)
            } else {
                Ok(Layout::contiguous((batch, rows, columns)))
            }
        };
        let (a_layout, b_layout) = (layout(m, k, a_turned)?, layout(k, n, b_turned)?);
        match a.matmul(b, (batch, m, n, k), &a_layout, &b_layout)? {
            CpuStorage::F32(product) => Ok(product),
            _ => candle_core::bail!("a product of f32 is f32"),
        }
    }

    /// The attention's weights; each row is a softmax over what it sees.
    fn weights(&self) -> Result<Weights> {
        let (len, d, count) = (self.layout.len, self.heads.head_dim, self.layout.own);
        let q = CpuStorage::F32(self.gather(Part::Query));
        let k = self.gather(Part::Key);
        let text_k = CpuStorage::F32(self.gather(Part::TextKey));
        let sizes = (self.group() * self.layout.count(), len, d);
        let mut text = self.product((&q, false), (&text_k, true), sizes)?;
        let q_rows = q.as_slice::<f32>()?;
        let mut own = vec![0f32; q_rows.len() / d * count];
        let queries = text.chunks_exact_mut(len).zip(q_rows.chunks_exact(d));
        for (query, (text, q)) in queries.enumerate() {
            let own = &mut own[query * count..(query + 1) * count];
            for (own, key) in own.iter_mut().zip(self.keys(query)) {
                *own = dot(q, &k[key]);
            }
            let (seen, unseen) = text.split_at_mut(self.prefix(query));
            unseen.fill(0.0);
            softmax(seen, own);
        }
        Ok(Weights {
            q,
            k,
            v: self.gather(Part::Value),
            text_k,
            text_v: CpuStorage::F32(self.gather(Part::TextValue)),
            text,
            own,
        })
    }

    fn forward(&self) -> Result<Vec<f32>> {
        let (len, d, count) = (self.layout.len, self.heads.head_dim, self.layout.own);
        let weights = self.weights()?;
        let sizes = (self.group() * self.layout.count(), d, len);
        let text = CpuStorage::F32(weights.text);
        let mut y = self.product((&text, false), (&weights.text_v, false), sizes)?;
        for (query, y) in y.chunks_exact_mut(d).enumerate() {
            let own = &weights.own[query * count..(query + 1) * count];
            for (&weight, key) in own.iter().zip(self.keys(query)) {
                add_scaled(y, weight, &weights.v[key]);
            }
        }
        let mut out = vec![0f32; y.len()];
        self.places(&self.outputs(), |from, to, _| {
            out[to..to + d].copy_from_slice(&y[from * d..(from + 1) * d]);
        });
        Ok(out)
    }

    /// The gradients by the tensors of the texts and of the own rows, for the gradient `slope` by the output.
    fn backward(&self, slope: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let (len, d, count) = (self.layout.len, self.heads.head_dim, self.layout.own);
        let Weights {
            q,
            k,
            v,
            text_k,
            text_v,
            text,
            own,
        } = self.weights()?;
        let q_rows = q.as_slice::<f32>()?;
        let mut of_y = vec![0f32; slope.len()];
        self.places(&self.outputs(), |to, from, _| {
            of_y[to * d..(to + 1) * d].copy_from_slice(&slope[from..from + d]);
        });
        let of_y = CpuStorage::F32(of_y);
        let of_y_rows = of_y.as_slice::<f32>()?;
        let queries = self.group() * self.layout.count();
        let sizes = (queries, len, d);
        let mut of_text = self.product((&of_y, false), (&text_v, true), sizes)?;
        let (mut of_k, mut of_v) = (vec![0f32; k.len()], vec![0f32; v.len()]);
        let mut of_q_own = vec![0f32; q_rows.len()];
        let mut of_own = vec![0f32; count];
        for (query, of_text) in of_text.chunks_exact_mut(len).enumerate() {
            let at = query * d..(query + 1) * d;
            let text = &text[query * len..(query + 1) * len];
            let own = &own[query * count..(query + 1) * count];
            for (slope, key) in of_own.iter_mut().zip(self.keys(query)) {
                *slope = dot(&of_y_rows[at.clone()], &v[key]);
            }
            // The gradient through a softmax: what is above the mean rises.
            let mean = dot(of_text, text) + dot(&of_own, own);
            for (slope, weight) in of_text.iter_mut().zip(text) {
                *slope = weight * (*slope - mean);
            }
            for ((slope, weight), key) in of_own.iter().zip(own).zip(self.keys(query)) {
                let score = weight * (slope - mean);
                add_scaled(&mut of_q_own[at.clone()], score, &k[key.clone()]);
                add_scaled(&mut of_k[key.clone()], score, &q_rows[at.clone()]);
                add_scaled(&mut of_v[key], *weight, &of_y_rows[at.clone()]);
            }
        }
        let (text, of_text) = (CpuStorage::F32(text), CpuStorage::F32(of_text));
        let sizes = (len, d, queries);
        let of_text_v = self.product((&text, true), (&of_y, false), sizes)?;
        let of_text_k = self.product((&of_text, true), (&q, false), sizes)?;
        let mut of_q = self.product((&of_text, false), (&text_k, false), (queries, d, len))?;
        add_scaled(&mut of_q, 1.0, &of_q_own);
        let mut texts = vec![0f32; self.text.len()];
        self.scatter(Part::TextKey, &of_text_k, &mut texts);
        self.scatter(Part::TextValue, &of_text_v, &mut texts);
        let mut owns = vec![0f32; self.own.len()];
        self.scatter(Part::Query, &of_q, &mut owns);
        self.scatter(Part::Key, &of_k, &mut owns);
        self.scatter(Part::Value, &of_v, &mut owns);
        Ok((texts, owns))
    }
}

/// Makes weights of the scores of a row: the softmax over both parts of what it sees.
fn softmax(text: &mut [f32], own: &mut [f32]) {
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

/// Rotates one head from `x` to `y`, times `scale`; backwards if `direction` is -1.
fn rotate(x: &[f32], y: &mut [f32], (cos, sin): (&[f32], &[f32]), scale: f32, direction: f32) {
    let (x0, x1) = x.split_at(x.len() / 2);
    let (y0, y1) = y.split_at_mut(x.len() / 2);
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (cos, sin) = (cos * scale, sin * scale * direction);
        y0[i] = x0[i] * cos - x1[i] * sin;
        y1[i] = x0[i] * sin + x1[i] * cos;
    }
}

impl Attention {
    fn call<'a>(&'a self, text: &'a [f32], own: &'a [f32]) -> Call<'a> {
        let (heads, layout) = (&self.heads, &self.layout);
        Call {
            heads,
            layout,
            text,
            own,
        }
    }
}

impl CustomOp2 for Attention {
    fn name(&self) -> &'static str {
        "train-attention"
    }

    fn cpu_fwd(
        &self,
        text: &CpuStorage,
        text_layout: &Layout,
        own: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let call = self.call(slice(text, text_layout)?, slice(own, layout)?);
        let width = self.heads.queries * self.heads.head_dim;
        let shape = (self.layout.prefix.len(), width).into();
        Ok((CpuStorage::F32(call.forward()?), shape))
    }

    fn bwd(
        &self,
        text: &Tensor,
        own: &Tensor,
        _: &Tensor,
        slope: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (of_text, of_own) = with_slices([text, own, slope], |[text, own, slope]| {
            self.call(text, own).backward(slope)
        })??;
        let of_text = Tensor::from_vec(of_text, text.shape(), text.device())?;
        let of_own = Tensor::from_vec(of_own, own.shape(), own.device())?;
        Ok((Some(of_text), Some(of_own)))
    }
}
