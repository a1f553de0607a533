//! The products in plain Rust. The vector code must give the same bits.

use super::pack::Value;
use super::tiles::{Sums, TileRow, WIDTH};

pub(super) fn pass<V: Value>(tiles: &[&[TileRow<V>]], x: &[&[f32]], sums: &mut Sums) {
    for (tile, sums) in tiles.iter().zip(sums) {
        for (k, row) in tile.iter().enumerate() {
            let mut weights = [0f32; WIDTH];
            for (c, weight) in weights.iter_mut().enumerate() {
                *weight = row.0[V::place(c)].widen();
            }
            for (x, sums) in x.iter().zip(sums.iter_mut()) {
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum = weight.mul_add(x[k], *sum);
                }
            }
        }
    }
}
