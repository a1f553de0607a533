//! The memory layout of weights.

use crate::simd::LANES;
use candle_core::DType;
use half::{bf16, f16};

/// Outputs per tile: a vector.
pub(super) const WIDTH: usize = LANES;
/// Maximum rows of a pass.
pub(super) const ROWS: usize = 12;
/// Maximum tiles of a pass, which has one row then: eight multiply-adds can be started in the time that
/// one takes, and reading from four places at once keeps the memory busy.
pub(super) const TILES: usize = 4;
/// The weights of one input for the outputs of a tile, in the order of the dtype's `Value::place`. The
/// alignment keeps a row of halves from crossing a cache line.
#[repr(C, align(32))]
#[derive(Clone, Copy)]
pub(super) struct TileRow<V>(pub [V; WIDTH]);

/// `[outputs / 16 rounded up][inputs]`.
pub(super) enum Tiles {
    F32(Vec<TileRow<f32>>),
    F16(Vec<TileRow<f16>>),
    BF16(Vec<TileRow<bf16>>),
}

/// A weight `[outputs, inputs]` of f32, f16 or bf16, laid out for this CPU.
pub struct DenseMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) tiles: Tiles,
}

/// The results of a pass so far: `[tile][row][output of the tile]`.
pub(super) type Sums = [[[f32; WIDTH]; ROWS]; TILES];

impl DenseMatrix {
    /// The dtype that the weights are stored in.
    pub fn dtype(&self) -> DType {
        match self.tiles {
            Tiles::F32(_) => DType::F32,
            Tiles::F16(_) => DType::F16,
            Tiles::BF16(_) => DType::BF16,
        }
    }
}
