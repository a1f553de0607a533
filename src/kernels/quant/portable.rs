//! The product in plain Rust: what the vector paths must equal bit for bit.

use super::activations::Activations;
use super::formats::Format;
use super::{BLOCK, TileRow, WIDTH};
use std::ops::Range;

/// Rows `rows` of `x` against a row of tiles: eight outputs of each, in order of rows.
pub(super) fn product<F: Format>(
    tiles: TileRow<'_, F>,
    x: &Activations,
    rows: Range<usize>,
) -> Vec<[f32; WIDTH]> {
    let mut out = vec![[0f32; WIDTH]; rows.len()];
    for (b, quants) in tiles.quants.iter().enumerate() {
        let (scales, sub) = (&tiles.scales[b / F::SPAN], b % F::SPAN);
        for c in 0..WIDTH {
            let weights: [i16; BLOCK] =
                std::array::from_fn(|k| (F::quant(quants, c, k) - F::BIAS) as i16);
            let factors = [0, 1].map(|half| F::factor(scales, sub, c, half));
            let (scale, offset) = (F::scale(scales, sub, c), F::offset(scales, sub, c));
            for (row, out) in rows.clone().zip(&mut out) {
                let sums = &x.sums(row)[b];
                let dot = dot(&weights, factors, x.block(row, b)) as f32;
                out[c] = dot.mul_add(scale * sums.scale, out[c]);
                if F::OFFSET {
                    out[c] = offset.mul_add(sums.sum, out[c]);
                }
            }
        }
    }
    out
}

/// The exact sum of a block, each half times its factor.
fn dot(weights: &[i16; BLOCK], factors: [i32; 2], x: &[i8]) -> i32 {
    let half = |h: usize| -> i32 {
        let half = h * BLOCK / 2..(h + 1) * BLOCK / 2;
        let pairs = weights[half.clone()].iter().zip(&x[half]);
        pairs.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
    };
    factors[0] * half(0) + factors[1] * half(1)
}
