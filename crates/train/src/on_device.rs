//! The computations of [`ops`](super::ops) and [`attention`](super::attention), as chains of candle's ops, which have
//! kernels for a GPU and know their own gradients.

use super::heads::{Heads, KeyLayout};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::softmax;

/// A score that no softmax notices, and that is finite, so that gradients are.
const UNSEEN: f64 = -1e9;

/// [`ops::swiglu`](super::ops::swiglu) on a GPU.
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let half = |first| gate_up.narrow(1, first, width)?.contiguous();
    half(0)?.silu()? * half(width)?
}

/// [`attention::attend`](super::attention::attend) on a GPU.
pub fn attend(text: &Tensor, own: &Tensor, heads: &Heads, layout: &KeyLayout) -> Result<Tensor> {
    let (texts, len, device) = (layout.texts, layout.len, text.device());
    let (keys, group, d) = (heads.keys, heads.queries / heads.keys, heads.head_dim);
    let (all, count, size) = (texts * keys, layout.count(), layout.size);
    let turned = |part: &Tensor, positions: &[usize], dims: (usize, usize)| {
        rotate(part, &angles(heads, positions, dims, device)?)
    };
    let (skipped, queries) = (layout.first_query(), layout.prefix.len());
    let q = heads_of(
        &own.narrow(0, skipped, queries)?,
        (texts, count),
        (0, heads.queries),
        d,
    )?;
    let q = turned(&q, &layout.positions[skipped..], (texts, count))?;
    let q = (q * f64::from(heads.scale()))?.reshape((all, group * count, d))?;
    let first = text.dim(1)? / d - 2 * keys;
    let places: Vec<usize> = (0..len).collect();
    let text_k = turned(
        &heads_of(text, (texts, len), (first, keys), d)?,
        &places,
        (1, len),
    )?;
    let text_k = text_k.reshape((all, len, d))?;
    let text_v = heads_of(text, (texts, len), (first + keys, keys), d)?.reshape((all, len, d))?;

    let seen = mask(&layout.prefix, len, device)?.reshape((texts, 1, 1, count, len))?;
    let scores = q
        .matmul(&text_k.t()?)?
        .reshape((texts, keys, group, count, len))?;
    let scores = scores
        .broadcast_add(&seen)?
        .reshape((all, group * count, len))?;
    if layout.own == 0 {
        let y = softmax(&scores, D::Minus1)?.matmul(&text_v)?;
        return side_by_side(&y, (texts, count), heads);
    }

    // The rows of a block see the same own keys: `[all, n, blocks * size, ..]` as `[all * blocks, n * size, ..]`, where
    // n are the queries of a head of K, or the parts.
    let (blocks, parts) = (count / size, layout.own / size);
    let by_block = |x: &Tensor, n: usize, width: usize| {
        let x = x.reshape((all, n, blocks, size, width))?.transpose(1, 2)?;
        x.contiguous()?.reshape((all * blocks, n * size, width))
    };
    let by_query = |x: &Tensor, width: usize| {
        let x = x
            .reshape((all, blocks, group, size, width))?
            .transpose(1, 2)?;
        x.contiguous()?.reshape((all, group * count, width))
    };
    let of_blocks = |part: Tensor| {
        let part = part.reshape((parts, all, count * d))?.transpose(0, 1)?;
        by_block(&part.contiguous()?, parts, d)
    };
    let rows = (parts * texts, count);
    let k = turned(
        &heads_of(own, rows, (heads.queries, keys), d)?,
        &layout.positions,
        rows,
    )?;
    let (k, v) = (
        of_blocks(k)?,
        of_blocks(heads_of(own, rows, (heads.queries + keys, keys), d)?)?,
    );
    let of_own = by_query(&by_block(&q, group, d)?.matmul(&k.t()?)?, layout.own)?;
    let weights = softmax(&Tensor::cat(&[scores, of_own], 2)?, D::Minus1)?;
    let of_text = weights.narrow(2, 0, len)?.contiguous()?.matmul(&text_v)?;
    let of_own = weights.narrow(2, len, layout.own)?.contiguous()?;
    let of_own = by_query(&by_block(&of_own, group, layout.own)?.matmul(&v)?, d)?;
    side_by_side(&(of_text + of_own)?, (texts, count), heads)
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

/// Puts the heads of each row side by side: `[rows * len, queries * head_dim]` of `[rows * keys, group * len, head_dim]`.
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

/// What is added to the scores of `len` keys: for each of `prefix`, 0 for so many of the first keys, and [`UNSEEN`] for the
/// others. It is made on the device, because the host would need longer for it than the device for a step.
fn mask(prefix: &[usize], len: usize, device: &Device) -> Result<Tensor> {
    let ends: Vec<f32> = prefix.iter().map(|&end| end as f32).collect();
    let ends = Tensor::from_vec(ends, (prefix.len(), 1), device)?;
    let keys = Tensor::arange(0., len as f32, device)?.reshape((1, len))?;
    let seen = ends.broadcast_gt(&keys)?.to_dtype(DType::F32)?;
    seen.affine(-UNSEEN, UNSEEN)
}

#[cfg(test)]
mod tests;
