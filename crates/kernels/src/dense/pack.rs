//! Converts a tensor to tiles, and a row of tiles back to floats.

use super::super::parallel::{Shared, for_each};
use super::super::storage::contiguous;
use super::tiles::{DenseMatrix, Scales, TileRow, Tiles, WIDTH};
use super::value::{E4m3, Unpacked, Value};
use candle_core::{Result, Storage, Tensor};

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
        let (op, shape) = ("dense-matmul", (outputs, inputs));
        let tiles = match weight.dtype() {
            candle_core::DType::F32 => {
                Tiles::F32(pack(contiguous(op, storage, layout)?, shape, |v| v))
            }
            candle_core::DType::F16 => {
                Tiles::F16(pack(contiguous(op, storage, layout)?, shape, |v| v))
            }
            candle_core::DType::BF16 => {
                Tiles::BF16(pack(contiguous(op, storage, layout)?, shape, |v| v))
            }
            other => candle_core::bail!("dense-matmul: no weights of {other:?}"),
        };
        Ok(Self {
            outputs,
            inputs,
            tiles,
        })
    }

    /// Lays out a weight of FP8. Of each run of inputs with one scale, up to 512 at a time, the numbers are multiplied with
    /// the inputs as they are, and the sum with the scale.
    ///
    /// # Errors
    /// If `Float8::check` finds one.
    pub fn of_float8(weight: &Float8<'_>) -> Result<Self> {
        weight.check()?;
        let ((outputs, inputs), run) = (weight.shape, weight.block.1);
        let runs = inputs.div_ceil(run);
        let mut factors = vec![[0.0; WIDTH]; outputs.div_ceil(WIDTH) * runs];
        for output in 0..outputs {
            let of_tile = &mut factors[output / WIDTH * runs..][..runs];
            for (factors, scale) in of_tile.iter_mut().zip(weight.scales_of(output)) {
                factors[output % WIDTH] = scale * E4m3::SCALE;
            }
        }
        let scales = Scales { factors, run, runs };
        Ok(Self {
            outputs,
            inputs,
            tiles: Tiles::F8(pack(weight.numbers, (outputs, inputs), E4m3), scales),
        })
    }

    /// Bytes of a weight of FP8 whose scales are those of `run` inputs each.
    pub fn float8_bytes(outputs: usize, inputs: usize, run: usize) -> usize {
        let runs = inputs.div_ceil(run.max(1));
        outputs.div_ceil(WIDTH) * WIDTH * (inputs + runs * size_of::<f32>())
    }

    /// See [`CpuMatrix::read_row`](super::CpuMatrix::read_row).
    pub(super) fn row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert_eq!(row.len(), self.inputs, "inputs of a row");
        match &self.tiles {
            Tiles::F32(all) => unpack(all, output, row),
            Tiles::F16(all) => unpack(all, output, row),
            Tiles::BF16(all) => unpack(all, output, row),
            Tiles::F8(all, scales) => {
                unpack(all, output, row);
                let (tile, place) = (output / WIDTH, output % WIDTH);
                for (run, row) in row.chunks_mut(scales.run).enumerate() {
                    let factor = scales.of(tile, run * scales.run)[place];
                    for value in row {
                        *value = *value * factor * E4m3::INPUT;
                    }
                }
            }
        }
    }
}

/// A weight `[outputs, inputs]` of FP8 with an exponent of 4 bits (E4M3) and a scale for each block.
#[derive(Debug, Clone, Copy)]
pub struct Float8<'a> {
    /// Outputs and inputs.
    pub shape: (usize, usize),
    /// `[outputs, inputs]`
    pub numbers: &'a [u8],
    /// `[outputs / block.0, inputs / block.1]`, rounded up: factors of the numbers.
    pub scales: &'a [f32],
    /// Outputs and inputs of a block.
    pub block: (usize, usize),
}

impl Float8<'_> {
    /// Whether products take these scales: all up to 2^60.
    pub fn can_hold(scales: &[f32]) -> bool {
        let most = 2f32.powi(60);
        scales.iter().all(|scale| scale.abs() <= most)
    }

    /// Checks that products take the weight.
    ///
    /// # Errors
    /// If the numbers or scales are not those of the shape, or a number is not finite, or [`Float8::can_hold`] says no.
    pub(crate) fn check(&self) -> Result<()> {
        let ((outputs, inputs), (rows, run)) = (self.shape, self.block);
        if rows == 0 || run == 0 || self.numbers.len() != outputs * inputs {
            candle_core::bail!("no FP8 of [{outputs}, {inputs}]");
        }
        let found = self.scales.len();
        if found != outputs.div_ceil(rows) * inputs.div_ceil(run) {
            candle_core::bail!("{found} scales for FP8 of [{outputs}, {inputs}]");
        }
        let is_finite = |number: &u8| number & 0x7f != 0x7f;
        if !Self::can_hold(self.scales) || !self.numbers.iter().all(is_finite) {
            candle_core::bail!("numbers of FP8 are not finite");
        }
        Ok(())
    }

    /// The scales of an output: one for each run of inputs.
    pub fn scales_of(&self, output: usize) -> &[f32] {
        let (rows, run) = self.block;
        let runs = self.shape.1.div_ceil(run);
        &self.scales[output / rows * runs..][..runs]
    }
}

/// Tiles of `weight` `[outputs, inputs]`, of which each is stored as what `of` makes of it; missing outputs are zeros.
fn pack<T: Copy + Sync, V: Value>(
    weight: &[T],
    (outputs, inputs): (usize, usize),
    of: impl Fn(T) -> V + Sync,
) -> Vec<TileRow<V>> {
    let count = outputs.div_ceil(WIDTH);
    let mut tiles = vec![TileRow([V::default(); WIDTH], []); count * inputs];
    let shared = Shared::new(&mut tiles);
    for_each(count, true, |tile| {
        // SAFETY: tiles do not overlap.
        let tile_rows = unsafe { shared.slice(tile * inputs, inputs) };
        let first = tile * WIDTH;
        for (strip, tile_rows) in tile_rows.chunks_mut(STRIP).enumerate() {
            for c in 0..WIDTH.min(outputs - first) {
                let from = &weight[(first + c) * inputs + strip * STRIP..][..tile_rows.len()];
                for (row, &value) in tile_rows.iter_mut().zip(from) {
                    row.0[V::place(c)] = of(value);
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

/// The same rows as floats.
pub(super) fn unpacked<V: Value>(rows: &[TileRow<V>]) -> Vec<TileRow<Unpacked>> {
    let of_row = |row: &TileRow<V>| {
        let of_output = |c| Unpacked(row.0[V::place(c)].to_f32());
        TileRow(std::array::from_fn(of_output), [])
    };
    rows.iter().map(of_row).collect()
}
