//! Grouped-query attention of masked blocks with RoPE, and a backward pass of its own.
//!
//! Several blocks of one row are computed at once. Each begins at its anchor, a position of the row: its
//! rows see K and V of the context before the anchor, and one another, but no other block.

use super::attention::{product, rotate, softmax};
use super::heads::{BlockLayout, Heads};
use super::on_device;
use super::ops::{add_scaled, dot, slice, with_slice};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

/// The attention of all blocks, `[blocks * size, queries * head_dim]`, for K and V of the context,
/// `[rows * len, 2 * keys * head_dim]`, and Q, K and V of the blocks, `[blocks * size, heads.width()]`, all
/// before RoPE.
pub fn attend(
    context: &Tensor,
    blocks: &Tensor,
    heads: &Heads,
    shape: &BlockLayout,
) -> Result<Tensor> {
    if !context.device().is_cpu() {
        return on_device::attend_in_blocks(context, blocks, heads, shape);
    }
    let op = BlockAttention {
        heads: heads.clone(),
        blocks: shape.clone(),
    };
    context.apply_op2(blocks, op)
}

struct BlockAttention {
    heads: Heads,
    blocks: BlockLayout,
}

/// Which heads of the context or of the blocks.
#[derive(Clone, Copy)]
enum BlockPart {
    ContextKey,
    ContextValue,
    Query,
    Key,
    Value,
}

/// Where a [`BlockPart`] is.
struct Columns {
    heads: usize,
    /// Column of the first head, and number of all columns.
    first: usize,
    width: usize,
    /// Positions of a row.
    len: usize,
}

/// The values that the forward and the backward pass need.
struct BlockWeights {
    /// `[rows * queries, rows of its blocks, head_dim]`, rotated and scaled.
    q: Vec<f32>,
    /// `[rows * keys, rows of its blocks, head_dim]`; K is rotated.
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[rows * keys, len, head_dim]`; K is rotated.
    context_k: CpuStorage,
    context_v: CpuStorage,
    /// `[rows * queries, rows of its blocks, len]`: what a row gives to the context.
    text: Vec<f32>,
    /// `[rows * queries, rows of its blocks, size]`: what it gives to its block.
    own: Vec<f32>,
}

/// The elements of one call.
struct BlockCall<'a> {
    op: &'a BlockAttention,
    rows: usize,
    context: &'a [f32],
    blocks: &'a [f32],
}

impl BlockAttention {
    fn call<'a>(&'a self, context: &'a [f32], blocks: &'a [f32]) -> BlockCall<'a> {
        let width = 2 * self.heads.keys * self.heads.head_dim;
        BlockCall {
            op: self,
            rows: context.len() / width / self.blocks.len,
            context,
            blocks,
        }
    }
}

impl BlockCall<'_> {
    /// Queries of one head of K.
    fn group(&self) -> usize {
        self.op.heads.queries / self.op.heads.keys
    }

    /// Rows of all blocks of a row.
    fn len(&self) -> usize {
        self.op.blocks.anchors.len() / self.rows * self.op.blocks.size
    }

    fn columns(&self, part: BlockPart) -> Columns {
        let (queries, keys) = (self.op.heads.queries, self.op.heads.keys);
        let (heads, before) = match part {
            BlockPart::ContextKey => (keys, 0),
            BlockPart::ContextValue => (keys, keys),
            BlockPart::Query => (queries, 0),
            BlockPart::Key => (keys, queries),
            BlockPart::Value => (keys, queries + keys),
        };
        let d = self.op.heads.head_dim;
        let (width, len) = match part {
            BlockPart::ContextKey | BlockPart::ContextValue => (2 * keys * d, self.op.blocks.len),
            _ => (self.op.heads.width(), self.len()),
        };
        Columns {
            heads,
            first: before * d,
            width,
            len,
        }
    }

    /// Calls `each` with every place of `part`: its number in the order of `[rows, heads, len]`, its offset
    /// in the tensor it comes from, and its position.
    fn places(
        &self,
        part: BlockPart,
        columns: &Columns,
        mut each: impl FnMut(usize, usize, usize),
    ) {
        let Columns {
            heads,
            first,
            width,
            len,
        } = *columns;
        let BlockLayout { size, anchors, .. } = &self.op.blocks;
        for row in 0..self.rows {
            for head in 0..heads {
                for i in 0..len {
                    let position = match part {
                        BlockPart::ContextKey | BlockPart::ContextValue => i,
                        _ => anchors[(row * len + i) / size] + i % size,
                    };
                    let from = (row * len + i) * width + first + head * self.op.heads.head_dim;
                    each((row * heads + head) * len + i, from, position);
                }
            }
        }
    }

    /// Moves one head of `part` from `x` to `y`, to its position or (if `direction` is -1) back.
    fn turn(&self, part: BlockPart, x: &[f32], y: &mut [f32], position: usize, direction: f32) {
        let rotation = self.op.heads.rotation(position);
        match part {
            BlockPart::Value | BlockPart::ContextValue => y.copy_from_slice(x),
            BlockPart::Key | BlockPart::ContextKey => rotate(x, y, rotation, 1.0, direction),
            BlockPart::Query => rotate(x, y, rotation, self.op.heads.scale(), direction),
        }
    }

    /// `part` as `[rows, heads, len, head_dim]`.
    fn gather(&self, part: BlockPart) -> Vec<f32> {
        let (d, columns) = (self.op.heads.head_dim, self.columns(part));
        let all = match part {
            BlockPart::ContextKey | BlockPart::ContextValue => self.context,
            _ => self.blocks,
        };
        let mut out = vec![0f32; self.rows * columns.heads * columns.len * d];
        self.places(part, &columns, |to, from, position| {
            let (x, y) = (&all[from..from + d], &mut out[to * d..(to + 1) * d]);
            self.turn(part, x, y, position, 1.0);
        });
        out
    }

    /// Writes the gradient by `part`, `[rows, heads, len, head_dim]`, to `out`, which is that by the
    /// tensor it comes from.
    fn scatter(&self, part: BlockPart, slope: &[f32], out: &mut [f32]) {
        let d = self.op.heads.head_dim;
        self.places(part, &self.columns(part), |from, to, position| {
            let (x, y) = (&slope[from * d..(from + 1) * d], &mut out[to..to + d]);
            self.turn(part, x, y, position, -1.0);
        });
    }

    /// Returns the number of context positions that the block of `query` sees, and the number of the first key of
    /// this block.
    fn sees(&self, query: usize) -> (usize, usize) {
        let (len, size) = (self.len(), self.op.blocks.size);
        let (head, block) = (query / len, query % len / size);
        let row = head / self.op.heads.queries;
        let anchor = self.op.blocks.anchors[row * (len / size) + block];
        (anchor, head / self.group() * len + block * size)
    }

    /// The attention's weights; each row is a softmax over what it sees.
    fn weights(&self) -> Result<BlockWeights> {
        let (len, d) = (self.op.blocks.len, self.op.heads.head_dim);
        let size = self.op.blocks.size;
        let (q, k) = (self.gather(BlockPart::Query), self.gather(BlockPart::Key));
        let context_k = CpuStorage::F32(self.gather(BlockPart::ContextKey));
        let sizes = (self.group() * self.len(), len, d);
        let batch = self.rows * self.op.heads.keys;
        let mut text = product(batch, (q.clone(), false), (&context_k, true), sizes)?;
        let mut own = vec![0f32; q.len() / d * size];
        let all = text.chunks_exact_mut(len).zip(own.chunks_exact_mut(size));
        for (query, ((text, own), q)) in all.zip(q.chunks_exact(d)).enumerate() {
            let (anchor, first) = self.sees(query);
            let keys = k[first * d..].chunks_exact(d);
            for (own, k) in own.iter_mut().zip(keys) {
                *own = dot(q, k);
            }
            let (seen, unseen) = text.split_at_mut(anchor);
            unseen.fill(0.0);
            softmax(seen, own);
        }
        Ok(BlockWeights {
            q,
            k,
            v: self.gather(BlockPart::Value),
            context_k,
            context_v: CpuStorage::F32(self.gather(BlockPart::ContextValue)),
            text,
            own,
        })
    }

    /// The output's columns are those of the queries alone.
    fn outputs(&self) -> Columns {
        let columns = self.columns(BlockPart::Query);
        Columns {
            width: columns.heads * self.op.heads.head_dim,
            ..columns
        }
    }

    fn forward(&self) -> Result<Vec<f32>> {
        let (len, d) = (self.op.blocks.len, self.op.heads.head_dim);
        let size = self.op.blocks.size;
        let weights = self.weights()?;
        let batch = self.rows * self.op.heads.keys;
        let sizes = (self.group() * self.len(), d, len);
        let values = (&weights.context_v, false);
        let mut y = product(batch, (weights.text, false), values, sizes)?;
        let owns = weights.own.chunks_exact(size);
        for (query, (y, own)) in y.chunks_exact_mut(d).zip(owns).enumerate() {
            let first = self.sees(query).1;
            for (&weight, v) in own.iter().zip(weights.v[first * d..].chunks_exact(d)) {
                add_scaled(y, weight, v);
            }
        }
        let mut out = vec![0f32; y.len()];
        self.places(BlockPart::Query, &self.outputs(), |from, to, _| {
            out[to..to + d].copy_from_slice(&y[from * d..(from + 1) * d]);
        });
        Ok(out)
    }

    /// The gradients by the context's and the blocks' tensors for the gradient `slope` by the output.
    fn backward(&self, slope: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let (len, d) = (self.op.blocks.len, self.op.heads.head_dim);
        let size = self.op.blocks.size;
        let weights = self.weights()?;
        let BlockWeights {
            q, k, v, text, own, ..
        } = weights;
        let mut of_y = vec![0f32; slope.len()];
        self.places(BlockPart::Query, &self.outputs(), |to, from, _| {
            of_y[to * d..(to + 1) * d].copy_from_slice(&slope[from..from + d]);
        });
        let (batch, queries) = (self.rows * self.op.heads.keys, self.group() * self.len());
        let values = (&weights.context_v, true);
        let mut of_text = product(batch, (of_y.clone(), false), values, (queries, len, d))?;
        let (mut of_k, mut of_v) = (vec![0f32; k.len()], vec![0f32; v.len()]);
        let mut of_q_own = vec![0f32; q.len()];
        let mut of_own = vec![0f32; size];
        for (query, of_text) in of_text.chunks_exact_mut(len).enumerate() {
            let at = query * d..(query + 1) * d;
            let first = self.sees(query).1;
            let key = |row: usize| (first + row) * d..(first + row + 1) * d;
            let text = &text[query * len..(query + 1) * len];
            let own = &own[query * size..(query + 1) * size];
            for (row, slope) in of_own.iter_mut().enumerate() {
                *slope = dot(&of_y[at.clone()], &v[key(row)]);
            }
            // The gradient through a softmax: what is above the mean rises.
            let mean = dot(of_text, text) + dot(&of_own, own);
            for (slope, weight) in of_text.iter_mut().zip(text) {
                *slope = weight * (*slope - mean);
            }
            for (row, (slope, weight)) in of_own.iter().zip(own).enumerate() {
                let score = weight * (slope - mean);
                add_scaled(&mut of_q_own[at.clone()], score, &k[key(row)]);
                add_scaled(&mut of_k[key(row)], score, &q[at.clone()]);
                add_scaled(&mut of_v[key(row)], *weight, &of_y[at.clone()]);
            }
        }
        let (q, of_y) = (CpuStorage::F32(q), CpuStorage::F32(of_y));
        let of_context = (len, d, queries);
        let of_context_v = product(batch, (text, true), (&of_y, false), of_context)?;
        let of_context_k = product(batch, (of_text.clone(), true), (&q, false), of_context)?;
        let keys = (&weights.context_k, false);
        let mut of_q = product(batch, (of_text, false), keys, (queries, d, len))?;
        add_scaled(&mut of_q, 1.0, &of_q_own);
        let mut context = vec![0f32; self.context.len()];
        self.scatter(BlockPart::ContextKey, &of_context_k, &mut context);
        self.scatter(BlockPart::ContextValue, &of_context_v, &mut context);
        let mut blocks = vec![0f32; self.blocks.len()];
        self.scatter(BlockPart::Query, &of_q, &mut blocks);
        self.scatter(BlockPart::Key, &of_k, &mut blocks);
        self.scatter(BlockPart::Value, &of_v, &mut blocks);
        Ok((context, blocks))
    }
}

impl CustomOp2 for BlockAttention {
    fn name(&self) -> &'static str {
        "train-block-attention"
    }

    fn cpu_fwd(
        &self,
        context: &CpuStorage,
        context_layout: &Layout,
        blocks: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let call = self.call(slice(context, context_layout)?, slice(blocks, layout)?);
        let width = self.heads.queries * self.heads.head_dim;
        let shape = (layout.shape().dims2()?.0, width).into();
        Ok((CpuStorage::F32(call.forward()?), shape))
    }

    fn bwd(
        &self,
        context: &Tensor,
        blocks: &Tensor,
        _: &Tensor,
        slope: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (of_context, of_blocks) = with_slice(context, |context| {
            with_slice(blocks, |blocks| {
                with_slice(slope, |slope| self.call(context, blocks).backward(slope))
            })
        })????;
        let of_context = Tensor::from_vec(of_context, context.shape(), context.device())?;
        let of_blocks = Tensor::from_vec(of_blocks, blocks.shape(), blocks.device())?;
        Ok((Some(of_context), Some(of_blocks)))
    }
}
