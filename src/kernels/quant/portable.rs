//! The product in plain Rust. The vector code must give the same bits.

use super::activations::{Activations, Pass};
use super::formats::{BLOCK, Format, WIDTH};
use super::tiles::Strip;

/// Multiplies the rows of `passes` with one side of a strip: eight outputs per row, in order of rows.
pub(super) fn product<F: Format>(
    strip: Strip<'_, F>,
    side: usize,
    x: &Activations,
    passes: &[Pass],
) -> Vec<[f32; WIDTH]> {
    let rows = passes
        .iter()
        .flat_map(|&pass| (0..pass.rows).map(move |row| (pass, row)));
    let mut out = vec![[0f32; WIDTH]; rows.clone().count()];
    for (b, quants) in strip.quants.iter().enumerate() {
        let quants = &quants[side];
        let (scales, sub) = (&strip.scales[b / F::SPAN][side], b % F::SPAN);
        let x: Vec<_> = rows
            .clone()
            .map(|(pass, row)| (x.block(pass, row, b), x.sums(pass)[b * pass.rows + row]))
            .collect();
        for c in 0..WIDTH {
            let weights: [i16; BLOCK] =
                std::array::from_fn(|k| (F::quant(quants, c, k) - F::BIAS) as i16);
            let factors = [0, 1].map(|half| F::factor(scales, sub, c, half));
            let (scale, offset) = (F::scale(scales, sub, c), F::offset(scales, sub, c));
            for ((x, sums), out) in x.iter().zip(&mut out) {
                let dot = dot(&weights, factors, x) as f32;
                out[c] = dot.mul_add(scale * sums.scale, out[c]);
                if F::OFFSET {
                    out[c] = offset.mul_add(sums.sum, out[c]);
                }
            }
        }
    }
    out
}

/// The exact dot product of a block, with each half multiplied by its factor.
fn dot(weights: &[i16; BLOCK], factors: [i32; 2], x: &[i8; BLOCK]) -> i32 {
    let half = |h: usize| -> i32 {
        let half = h * BLOCK / 2..(h + 1) * BLOCK / 2;
        let pairs = weights[half.clone()].iter().zip(&x[half]);
        pairs.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
    };
    factors[0] * half(0) + factors[1] * half(1)
}
