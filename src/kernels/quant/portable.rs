//! The products in plain Rust: what the vector paths must equal bit for bit.

use super::{Activations, BLOCK, ROWS, Tile4, Tile8, WIDTH};

pub(super) fn product8(
    tiles: &[Tile8],
    x: &Activations,
    row: usize,
    count: usize,
) -> [[f32; WIDTH]; ROWS] {
    let mut out = [[0f32; WIDTH]; ROWS];
    for (b, tile) in tiles.iter().enumerate() {
        for (i, out) in out[..count].iter_mut().enumerate() {
            let sums = dot(x.block(row + i, b), |at| i32::from(tile.q[at]));
            let scale = x.scale[x.at(row + i, b)];
            for c in 0..WIDTH {
                out[c] = (sums[c] as f32).mul_add(tile.d[c].to_f32() * scale, out[c]);
            }
        }
    }
    out
}

pub(super) fn product4(
    tiles: &[Tile4],
    x: &Activations,
    row: usize,
    count: usize,
) -> [[f32; WIDTH]; ROWS] {
    const HALF: usize = BLOCK * WIDTH / 2;
    let mut out = [[0f32; WIDTH]; ROWS];
    for (b, tile) in tiles.iter().enumerate() {
        for (i, out) in out[..count].iter_mut().enumerate() {
            let sums = dot(x.block(row + i, b), |at| {
                i32::from(if at < HALF {
                    tile.q[at] & 15
                } else {
                    tile.q[at - HALF] >> 4
                })
            });
            let at = x.at(row + i, b);
            for c in 0..WIDTH {
                out[c] = (sums[c] as f32).mul_add(tile.d[c].to_f32() * x.scale[at], out[c]);
                out[c] = tile.m[c].to_f32().mul_add(x.sum[at], out[c]);
            }
        }
    }
    out
}

/// Eight integer dot products; `weight(4 * (8 j + c) + t)` is input `4 j + t` of output `c`.
#[inline(always)]
fn dot(x: &[i8], weight: impl Fn(usize) -> i32) -> [i32; WIDTH] {
    let mut sums = [0i32; WIDTH];
    for (j, x) in x.chunks_exact(4).enumerate() {
        for (c, sum) in sums.iter_mut().enumerate() {
            for (t, &x) in x.iter().enumerate() {
                *sum += i32::from(x) * weight(4 * (WIDTH * j + c) + t);
            }
        }
    }
    sums
}
