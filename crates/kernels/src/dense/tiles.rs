//! The memory layout of weights.

use super::value::{E4m3, Value};
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
/// The weights of one input for the outputs of a tile, in the order of the dtype's `Value::place`, with its alignment.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TileRow<V: Value>(pub [V; WIDTH], pub [V::Align; 0]);

/// `[outputs / 16 rounded up][inputs]`.
pub(super) enum Tiles {
    F32(Vec<TileRow<f32>>),
    F16(Vec<TileRow<f16>>),
    BF16(Vec<TileRow<bf16>>),
    F8(Vec<TileRow<E4m3>>, Scales),
}

/// The factors of FP8: of each tile and run of inputs, those of its outputs.
pub(super) struct Scales {
    /// `[outputs / 16 rounded up][runs]`, times [`E4m3::SCALE`].
    pub(super) factors: Vec<[f32; WIDTH]>,
    /// Inputs of a run, but for the last.
    pub(super) run: usize,
    /// Number of runs.
    pub(super) runs: usize,
}

impl Scales {
    /// The factors of a tile's outputs for the run that has this input.
    pub(super) fn of(&self, tile: usize, input: usize) -> &[f32; WIDTH] {
        &self.factors[tile * self.runs + input / self.run]
    }
}

/// A weight `[outputs, inputs]` of f32, f16, bf16 or FP8 with scales, laid out for this CPU.
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
            Tiles::F8(..) => DType::F8E4M3,
        }
    }
}
