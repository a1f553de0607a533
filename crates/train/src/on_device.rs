//! The computations of [`ops`](super::ops), [`attention`](super::attention) and
//! [`block_attention`](super::block_attention), as chains of candle's ops, which have kernels for a GPU and know
//! their own gradients.

use super::heads::{BlockLayout, Drafts, Heads};
use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::softmax;

/// A score that no softmax notices, and that is finite, so that gradients are.
const UNSEEN: f32 = -1e9;

/// See [`ops::swiglu`](super::ops::swiglu).
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let half = |first| gate_up.narrow(1, first, width)?.contiguous();
    half(0)?.silu()? * half(width)?
}

/// See [`attention::attend`](super::attention::attend).
pub fn attend_causally(
    qkv: &Tensor,
    heads: &Heads,
    drafts: &Drafts,
    passes: usize,
) -> Result<Tensor> {
    let (rows, len, device) = (drafts.rows, drafts.len, qkv.device());
    let count = drafts.count(passes - 1);
    let (keys, group, d) = (heads.keys, heads.queries / heads.keys, heads.head_dim);
    // Heads of the pass, `[rows * keys, .. * positions, head_dim]`, rotated if they have angles.
    let part = |pass: usize, first: usize, of: usize, rotates: bool| {
        let (places, count) = (drafts.places(pass), drafts.count(pass));
        let part = qkv.narrow(0, places.start, places.len())?;
        let part = heads_of(&part, (rows, count), (first, of), d)?;
        let part = if rotates {
            let positions = drafts.positions(pass).into_iter();
            let positions: Vec<usize> = positions.map(|position| position + pass).collect();
            rotate(&part, &angles(heads, &positions, (rows, count), device)?)?
        } else {
            part
        };
        part.reshape((rows * keys, of / keys * count, d))
    };
    let q = (part(passes - 1, 0, heads.queries, true)? * f64::from(heads.scale()))?;
    let key = |pass| part(pass, heads.queries, keys, true);
    let value = |pass| part(pass, heads.queries + keys, keys, false);
    // A draft's own K or V beside the queries of its group.
    let of_group = |own: Tensor| {
        let dims = (rows * keys, group, count, d);
        let own = own.unsqueeze(1)?.broadcast_as(dims)?;
        own.reshape((rows * keys, group * count, d))
    };
    let seen = drafts.positions(passes - 1).into_iter();
    let seen = seen.flat_map(|position| (0..len).map(move |j| j <= position));
    let seen = mask(seen, (rows, 1, 1, count, len), device)?;
    let scores = q.matmul(&key(0)?.t()?)?;
    let scores = scores.reshape((rows, keys, group, count, len))?;
    let scores = scores.broadcast_add(&seen)?;
    let mut scores = vec![scores.reshape((rows * keys, group * count, len))?];
    for pass in 1..passes {
        scores.push((&q * of_group(key(pass)?)?)?.sum_keepdim(2)?);
    }
    let weights = softmax(&Tensor::cat(&scores, 2)?, D::Minus1)?;
    let mut y = weights
        .narrow(2, 0, len)?
        .contiguous()?
        .matmul(&value(0)?)?;
    for pass in 1..passes {
        let weight = weights.narrow(2, len + pass - 1, 1)?;
        y = (y + of_group(value(pass)?)?.broadcast_mul(&weight)?)?;
    }
    side_by_side(&y, (rows, count), heads)
}

/// See [`block_attention::attend`](super::block_attention::attend).
pub fn attend_in_blocks(
    context: &Tensor,
    blocks: &Tensor,
    heads: &Heads,
    shape: &BlockLayout,
) -> Result<Tensor> {
    let (len, size, device) = (shape.len, shape.size, context.device());
    let (keys, group, d) = (heads.keys, heads.queries / heads.keys, heads.head_dim);
    let rows = context.dim(0)? / len;
    let count = shape.anchors.len() / rows;
    let own_len = count * size;
    // Positions of the blocks' rows, and of the context.
    let own: Vec<usize> = (shape.anchors.iter())
        .flat_map(|anchor| (0..size).map(move |i| anchor + i))
        .collect();
    let own = angles(heads, &own, (rows, own_len), device)?;
    let text: Vec<usize> = (0..len).collect();
    let text = angles(heads, &text, (1, len), device)?;

    let of_blocks = |first, count| heads_of(blocks, (rows, own_len), (first, count), d);
    let q = (rotate(&of_blocks(0, heads.queries)?, &own)? * f64::from(heads.scale()))?;
    let k = rotate(&of_blocks(heads.queries, keys)?, &own)?;
    let v = of_blocks(heads.queries + keys, keys)?;
    let context_k = rotate(&heads_of(context, (rows, len), (0, keys), d)?, &text)?;
    let context_v = heads_of(context, (rows, len), (keys, keys), d)?;

    // What rows of blocks see of the context.
    let of_keys = |x: &Tensor, len: usize| x.reshape((rows * keys, len, d));
    let scores = of_keys(&q, group * own_len)?.matmul(&of_keys(&context_k, len)?.t()?)?;
    let seen = (shape.anchors.iter())
        .flat_map(|&anchor| (0..size).flat_map(move |_| (0..len).map(move |p| p < anchor)));
    let seen = mask(seen, (rows, 1, 1, own_len, len), device)?;
    let scores = scores.reshape((rows, keys, group, own_len, len))?;
    let scores = scores.broadcast_add(&seen)?;
    let scores = scores.reshape((rows * keys, group, count, size, len))?;

    // What they see of their block.
    let by_block = |x: &Tensor, group: usize| {
        let x = x.reshape((rows * keys, group, count, size, d))?;
        let x = x.transpose(1, 2)?.contiguous()?;
        x.reshape((rows * keys * count, group * size, d))
    };
    let own = by_block(&q, group)?.matmul(&by_block(&k, 1)?.t()?)?;
    let own = own.reshape((rows * keys, count, group, size, size))?;
    let own = own.transpose(1, 2)?.contiguous()?;

    let weights = softmax(&Tensor::cat(&[scores, own], 4)?, D::Minus1)?;
    let text = weights.narrow(4, 0, len)?.contiguous()?;
    let text = text.reshape((rows * keys, group * own_len, len))?;
    let y = text.matmul(&of_keys(&context_v, len)?)?;
    let own = weights
        .narrow(4, len, size)?
        .transpose(1, 2)?
        .contiguous()?;
    let own = own.reshape((rows * keys * count, group * size, size))?;
    let own = own.matmul(&by_block(&v, 1)?)?;
    let own = own.reshape((rows * keys, count, group, size, d))?;
    let own = own.transpose(1, 2)?.contiguous()?;
    let y = (y + own.reshape((rows * keys, group * own_len, d))?)?;
    side_by_side(&y, (rows, own_len), heads)
}

/// `count` heads of `x` `[rows * len, width]` from head `first` on: `[rows, count, len, head_dim]`.
fn heads_of(
    x: &Tensor,
    (rows, len): (usize, usize),
    (first, count): (usize, usize),
    head_dim: usize,
) -> Result<Tensor> {
    let part = x.narrow(1, first * head_dim, count * head_dim)?;
    let part = part.contiguous()?.reshape((rows, len, count, head_dim))?;
    part.transpose(1, 2)?.contiguous()
}

/// The opposite, for `[rows * keys, group * len, head_dim]`: `[rows * len, queries * head_dim]`.
fn side_by_side(y: &Tensor, (rows, len): (usize, usize), heads: &Heads) -> Result<Tensor> {
    let y = y.reshape((rows, heads.queries, len, heads.head_dim))?;
    let y = y.transpose(1, 2)?.contiguous()?;
    y.reshape((rows * len, heads.queries * heads.head_dim))
}

/// Cosines and sines, `[rows, 1, len, head_dim / 2]`, of `rows * len` positions.
fn angles(
    heads: &Heads,
    positions: &[usize],
    (rows, len): (usize, usize),
    device: &Device,
) -> Result<[Tensor; 2]> {
    let half = heads.head_dim / 2;
    let turned = positions.iter().map(|&position| heads.rotation(position));
    let (cos, sin): (Vec<&[f32]>, Vec<&[f32]>) = turned.unzip();
    let table = |all: Vec<&[f32]>| Tensor::from_vec(all.concat(), (rows, 1, len, half), device);
    Ok([table(cos)?, table(sin)?])
}

/// Rotates heads `[rows, heads, len, head_dim]`.
fn rotate(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let half = x.dim(3)? / 2;
    let part = |first| x.narrow(3, first, half)?.contiguous();
    let (x0, x1) = (part(0)?, part(half)?);
    let y0 = (x0.broadcast_mul(cos)? - x1.broadcast_mul(sin)?)?;
    let y1 = (x0.broadcast_mul(sin)? + x1.broadcast_mul(cos)?)?;
    Tensor::cat(&[y0, y1], 3)
}

/// Returns the tensor that is added to scores: 0 where something is seen, and [`UNSEEN`] elsewhere.
fn mask(
    seen: impl Iterator<Item = bool>,
    dims: impl Into<candle_core::Shape>,
    device: &Device,
) -> Result<Tensor> {
    let added: Vec<f32> = seen.map(|seen| if seen { 0. } else { UNSEEN }).collect();
    Tensor::from_vec(added, dims.into(), device)
}

#[cfg(test)]
mod tests;
