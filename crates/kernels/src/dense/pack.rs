//! Converts a tensor to tiles, and a row of tiles back to floats.

use super::super::parallel::{Shared, for_each};
use super::super::storage::contiguous;
use super::tiles::{DenseMatrix, TileRow, Tiles, WIDTH};
use crate::simd::{Element, Simd};
use candle_core::{Result, Storage, Tensor};
use half::{bf16, f16};

/// A stored weight.
pub(super) trait Value: Element {
    /// The index of the tile's output `c` in a [`TileRow`].
    fn place(c: usize) -> usize {
        c
    }

    /// The weights of a tile's outputs, in order.
    #[inline(always)]
    fn load_row<S: Simd>(s: S, row: &TileRow<Self>) -> S::Vector {
        // SAFETY: a row has 16 numbers.
        unsafe { Self::load(s, row.0.as_ptr()) }
    }
}

impl Value for f32 {}

impl Value for f16 {}

impl Value for bf16 {
    /// Output `c` is next to output `8 + c`: one is the low half of 32 bits and the other the high half,
    /// so that a shift and a mask make two vectors of f32.
    fn place(c: usize) -> usize {
        2 * (c % (WIDTH / 2)) + c / (WIDTH / 2)
    }

    #[inline(always)]
    fn load_row<S: Simd>(s: S, row: &TileRow<Self>) -> S::Vector {
        // SAFETY: a row has 16 numbers.
        unsafe { s.load_apart(row.0.as_ptr()) }
    }
}

/// Inputs that are laid out at a time: they stay in the first-level cache.
const STRIP: usize = 64;

impl DenseMatrix {
    /// Lays out `weight` `[outputs, inputs]` of f32, f16 or bf16 on the CPU.
    ///
    /// # Errors
    /// For another shape, dtype or device.
    pub fn new(weight: &Tensor) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let weight = weight.contiguous()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("dense-matmul: the weight is not on the CPU");
        };
        let op = "dense-matmul";
        let tiles = match weight.dtype() {
            candle_core::DType::F32 => {
                Tiles::F32(pack(contiguous(op, storage, layout)?, outputs, inputs))
            }
            candle_core::DType::F16 => {
                Tiles::F16(pack(contiguous(op, storage, layout)?, outputs, inputs))
            }
            candle_core::DType::BF16 => {
                Tiles::BF16(pack(contiguous(op, storage, layout)?, outputs, inputs))
            }
            other => candle_core::bail!("dense-matmul: no weights of {other:?}"),
        };
        Ok(Self {
            outputs,
            inputs,
            tiles,
        })
    }

    /// See [`CpuMatrix::read_row`](super::CpuMatrix::read_row).
    pub(super) fn row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert_eq!(row.len(), self.inputs, "inputs of a row");
        match &self.tiles {
            Tiles::F32(all) => unpack(all, output, row),
            Tiles::F16(all) => unpack(all, output, row),
            Tiles::BF16(all) => unpack(all, output, row),
        }
    }
}

/// Tiles of `weight` `[outputs, inputs]`; missing outputs are zeros.
fn pack<V: Value>(weight: &[V], outputs: usize, inputs: usize) -> Vec<TileRow<V>> {
    let count = outputs.div_ceil(WIDTH);
    let mut tiles = vec![TileRow([V::zero(); WIDTH]); count * inputs];
    let shared = Shared::new(&mut tiles);
    for_each(count, true, |tile| {
        // SAFETY: tiles do not overlap.
        let tile_rows = unsafe { shared.slice(tile * inputs, inputs) };
        let first = tile * WIDTH;
        for (strip, tile_rows) in tile_rows.chunks_mut(STRIP).enumerate() {
            for c in 0..WIDTH.min(outputs - first) {
                let from = &weight[(first + c) * inputs + strip * STRIP..][..tile_rows.len()];
                for (row, &value) in tile_rows.iter_mut().zip(from) {
                    row.0[V::place(c)] = value;
                }
            }
        }
    });
    tiles
}

fn unpack<V: Value>(tiles: &[TileRow<V>], output: usize, row: &mut [f32]) {
    let (tile, place) = (output / WIDTH, V::place(output % WIDTH));
    let tile_rows = &tiles[tile * row.len()..];
    for (value, tile_row) in row.iter_mut().zip(tile_rows) {
        *value = tile_row.0[place].to_f32();
    }
}
