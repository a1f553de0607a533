//! The product in plain Rust: what the vector paths must equal bit for bit.

use super::activations::Activations;
use super::formats::Format;
use super::{BLOCK, TileRow, WIDTH};

/// One row against a row of tiles: eight outputs.
pub(super) fn product<F: Format>(
    tiles: TileRow<'_, F>,
    x: &Activations,
    row: usize,
) -> [f32; WIDTH] {
    let mut out = [0f32; WIDTH];
    for (b, (quants, sums)) in tiles.quants.iter().zip(x.sums(row)).enumerate() {
        let (scales, sub) = (&tiles.scales[b / F::SPAN], b % F::SPAN);
        let x = x.block(row, b);
        for (c, out) in out.iter_mut().enumerate() {
            let mut halves = [0i32; 2];
            for (k, &x) in x.iter().enumerate() {
                halves[2 * k / BLOCK] += i32::from(x) * (F::quant(quants, c, k) - F::BIAS);
            }
            let half = |h: usize| F::factor(scales, sub, c, h) * halves[h];
            let dot = (half(0) + half(1)) as f32;
            *out = dot.mul_add(F::scale(scales, sub, c) * sums.scale, *out);
            if F::OFFSET {
                *out = F::offset(scales, sub, c).mul_add(sums.sum, *out);
            }
        }
    }
    out
}
