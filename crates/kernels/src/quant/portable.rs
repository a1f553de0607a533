//! The product in plain Rust. The vector code must give the same bits.

use super::activations::{Activations, Turn};
use super::block_sums::BY_LESS_32;
use super::formats::{BLOCK, Format, ScaleLayout, WIDTH};
use super::tiles::{Strip, quant};

/// Multiplies the rows of `turns` with a strip: 16 outputs per row, in order of rows.
pub(super) fn product<F: Format>(
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
) -> Vec<[f32; WIDTH]> {
    let rows = turns.iter().flat_map(|turn| {
        let rows = turn.first..turn.first + turn.rows;
        rows.map(|row| (turn.pass, row))
    });
    let mut out = vec![[0f32; WIDTH]; rows.clone().count()];
    for b in 0..strip.blocks() {
        let (scales, sub, tile) = strip.block(b);
        let x: Vec<_> = rows
            .clone()
            .map(|(pass, row)| (x.block(pass, row, b), x.sums(pass)[b * pass.rows + row]))
            .collect();
        for c in 0..WIDTH {
            let weights: [i16; BLOCK] = std::array::from_fn(|k| quant::<F>(tile, c, k) as i16);
            let factors = [0, 1].map(|half| F::Scales::factor(scales, sub, c, half));
            let scale = [0, 1].map(|half| F::Scales::scale(scales, sub, c, half));
            let offset = [0, 1].map(|half| F::Scales::offset(scales, sub, c, half));
            for ((x, sums), out) in x.iter().zip(&mut out) {
                let dots = [0, 1].map(|half| dot(&weights, x, half));
                if F::Scales::BY_HALF {
                    for half in 0..2 {
                        let scale = scale[half] * sums.scale;
                        out[c] = (dots[half] as f32).mul_add(scale, out[c]);
                        if F::Scales::OFFSET {
                            let sum = sums.less_32[half] as f32;
                            let offset = offset[half] * BY_LESS_32 * sums.scale;
                            out[c] = sum.mul_add(offset, out[c]);
                        }
                    }
                    continue;
                }
                let ([scale, _], [offset, _]) = (scale, offset);
                let dot = (factors[0] * dots[0] + factors[1] * dots[1]) as f32;
                out[c] = dot.mul_add(scale * sums.scale, out[c]);
                if F::Scales::OFFSET {
                    out[c] = offset.mul_add(sums.sum, out[c]);
                }
            }
        }
    }
    out
}

/// The exact dot product of half a block.
fn dot(weights: &[i16; BLOCK], x: &[i8; BLOCK], half: usize) -> i32 {
    let half = half * BLOCK / 2..(half + 1) * BLOCK / 2;
    let pairs = weights[half.clone()].iter().zip(&x[half]);
    pairs.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
}
