//! The memory layout of quantized weights.

use super::formats::{Format, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, WIDTH};
use candle_core::quantized::GgmlDType;

/// Tiles per strip: they are side by side in memory and have 16 outputs together. With two sums at a
/// time the CPU waits less for each.
pub(super) const SIDES: usize = 2;
/// A whole matrix in one format. Outputs beyond the last are zero.
pub(super) struct Tiles<F: Format> {
    /// `[outputs / 16 rounded up][inputs / 32]`.
    pub quants: Vec<[F::Quants; SIDES]>,
    /// `[outputs / 16 rounded up][inputs / 32 / F::SPAN]`.
    pub scales: Vec<[F::Scales; SIDES]>,
}

/// The tiles of 16 outputs, for all inputs.
pub(super) struct Strip<'a, F: Format> {
    pub quants: &'a [[F::Quants; SIDES]],
    pub scales: &'a [[F::Scales; SIDES]],
}

impl<F: Format> Clone for Strip<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for Strip<'_, F> {}

pub(super) enum AnyTiles {
    Q8_0(Tiles<Q8_0>),
    Q4_0(Tiles<Q4_0>),
    Q4_1(Tiles<Q4_1>),
    Q5_1(Tiles<Q5_1>),
    Q4K(Tiles<Q4K>),
    Q5K(Tiles<Q5K>),
    Q6K(Tiles<Q6K>),
}

/// Runs the same code for tiles of any format.
macro_rules! with_tiles {
    ($tiles:expr, $name:ident => $body:expr) => {
        match $tiles {
            AnyTiles::Q8_0($name) => $body,
            AnyTiles::Q4_0($name) => $body,
            AnyTiles::Q4_1($name) => $body,
            AnyTiles::Q5_1($name) => $body,
            AnyTiles::Q4K($name) => $body,
            AnyTiles::Q5K($name) => $body,
            AnyTiles::Q6K($name) => $body,
        }
    };
}
pub(super) use with_tiles;

/// A quantized weight `[outputs, inputs]`, laid out for this CPU.
pub struct QuantMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) tiles: AnyTiles,
}

impl QuantMatrix {
    /// Number of strips of 16 outputs.
    pub(super) fn strips(&self) -> usize {
        self.outputs.div_ceil(SIDES * WIDTH)
    }

    /// The block type that the tiles hold.
    pub fn dtype(&self) -> GgmlDType {
        match self.tiles {
            AnyTiles::Q8_0(_) => GgmlDType::Q8_0,
            AnyTiles::Q4_0(_) => GgmlDType::Q4_0,
            AnyTiles::Q4_1(_) => GgmlDType::Q4_1,
            AnyTiles::Q5_1(_) => GgmlDType::Q5_1,
            AnyTiles::Q4K(_) => GgmlDType::Q4K,
            AnyTiles::Q5K(_) => GgmlDType::Q5K,
            AnyTiles::Q6K(_) => GgmlDType::Q6K,
        }
    }
}

impl<F: Format> Tiles<F> {
    pub fn strip(&self, strip: usize, blocks: usize) -> Strip<'_, F> {
        let records = blocks / F::SPAN;
        Strip {
            quants: &self.quants[strip * blocks..(strip + 1) * blocks],
            scales: &self.scales[strip * records..(strip + 1) * records],
        }
    }
}
