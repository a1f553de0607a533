//! Converts GGUF blocks, or floats, to tiles.

use super::activations::largest;
use super::block_type::BlockType;
use super::codebooks;
use super::formats::{BLOCK, Format, ScaleLayout, TileFormat, WIDTH, held_type, with_format};
use super::tiles::{Line, QuantMatrix, bytes_mut, quant, set_block, strip_lines};
use candle_core::Result;
use half::f16;
use std::borrow::Cow;

impl QuantMatrix {
    /// Whether [`QuantMatrix::from_blocks`] takes blocks of this type with `inputs` values per row.
    pub fn keeps(dtype: BlockType, inputs: usize) -> bool {
        TileFormat::of(dtype).is_some() && inputs.is_multiple_of(dtype.block_size())
    }

    /// Converts the blocks of a GGUF tensor `[outputs, inputs]`, without loss.
    ///
    /// # Errors
    /// If [`QuantMatrix::keeps`] does not accept the type, or `data` has another length.
    pub fn from_blocks(
        dtype: impl Into<BlockType>,
        data: &[u8],
        outputs: usize,
        inputs: usize,
    ) -> Result<Self> {
        let dtype = dtype.into();
        let bytes = outputs * inputs / dtype.block_size() * dtype.type_size();
        let fits = data.len() == bytes && inputs.is_multiple_of(dtype.block_size());
        let Some(format) = TileFormat::of(dtype).filter(|_| fits) else {
            let found = data.len();
            candle_core::bail!("{found} bytes cannot be a [{outputs}, {inputs}] weight in {dtype}");
        };
        let (data, size) = held_blocks(dtype, data);
        let together = dtype.block_size() / BLOCK;
        let lines = with_format!(format, F => pack::<F>(&data, size, together, inputs / BLOCK));
        Ok(Self {
            outputs,
            inputs,
            format,
            lines,
        })
    }

    /// Quantizes `[outputs, inputs]` floats to `Q8_0`.
    ///
    /// # Errors
    /// If `inputs` is not a multiple of 32, or `data` has another length.
    pub fn from_floats(data: &[f32], outputs: usize, inputs: usize) -> Result<Self> {
        if !inputs.is_multiple_of(BLOCK) || data.len() != outputs * inputs {
            candle_core::bail!(
                "{} floats cannot be a [{outputs}, {inputs}] weight in blocks of {BLOCK}",
                data.len()
            );
        }
        let blocks: Vec<u8> = data.chunks_exact(BLOCK).flat_map(q8_0).collect();
        Self::from_blocks(BlockType::Q8_0, &blocks, outputs, inputs)
    }

    /// All values, `[outputs, inputs]` in the order of rows.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut values = vec![0f32; self.outputs * self.inputs];
        for (output, row) in values.chunks_exact_mut(self.inputs).enumerate() {
            self.dequantize_row(output, row);
        }
        values
    }

    /// See [`CpuMatrix::read_row`](super::CpuMatrix::read_row).
    pub(super) fn dequantize_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert_eq!(row.len(), self.inputs, "inputs of a row");
        with_format!(self.format, F => self.dequantize_as::<F>(output, row));
    }

    fn dequantize_as<F: Format>(&self, output: usize, row: &mut [f32]) {
        let (strip, c) = (self.strip::<F>(output / WIDTH), output % WIDTH);
        for (b, row) in row.chunks_exact_mut(BLOCK).enumerate() {
            let (scales, sub, tile) = strip.block(b);
            for (half, row) in row.chunks_exact_mut(BLOCK / 2).enumerate() {
                let scale = F::Scales::scale(scales, sub, c, half);
                let offset = F::Scales::offset(scales, sub, c, half);
                let factor = F::Scales::factor(scales, sub, c, half);
                for (k, x) in row.iter_mut().enumerate() {
                    let quant = quant::<F>(tile, c, half * BLOCK / 2 + k);
                    *x = scale * (factor * quant) as f32 + offset;
                }
            }
        }
    }
}

/// Lays out rows of `blocks` blocks of 32 values, of which `together` are one GGUF block of `size` bytes.
/// Missing outputs of the last strip are zero.
pub(super) fn pack<F: Format>(
    data: &[u8],
    size: usize,
    together: usize,
    blocks: usize,
) -> Vec<Line> {
    let per_row = blocks / together;
    let outputs = data.len() / (size * per_row).max(1);
    let strip_lines = strip_lines::<F>(blocks);
    let mut lines = vec![Line::ZERO; outputs.div_ceil(WIDTH) * strip_lines];
    let bytes = bytes_mut(&mut lines);
    for (at, data) in data.chunks_exact(size).enumerate() {
        let (output, first) = (at / per_row, at % per_row * together);
        let strip = output / WIDTH * size_of::<Line>() * strip_lines;
        for block in first..first + together {
            let (record, sub) = (block / F::SPAN, block % F::SPAN);
            let record = &mut bytes[strip + record * F::RECORD..][..F::RECORD];
            let (scales, tiles) = record.split_at_mut(F::SCALES);
            let c = output % WIDTH;
            F::Scales::read(data, sub, c, scales);
            let tile = &mut tiles[sub * F::TILE..][..F::TILE];
            set_block::<F>(tile, c, &F::quants(data, sub));
        }
    }
    lines
}

/// GGUF blocks of a type as tiles hold them, and the bytes of one.
pub(super) fn held_blocks(kind: BlockType, data: &[u8]) -> (Cow<'_, [u8]>, usize) {
    if let Some(coded) = codebooks::coded(kind, data) {
        return (coded.into(), codebooks::SIZE);
    }
    let held = held_type(kind);
    if kind == held {
        return (data.into(), kind.type_size());
    }
    let blocks = data.chunks_exact(kind.type_size());
    let converted: Vec<u8> = match kind {
        BlockType::Q3K => blocks.flat_map(six_bits).collect(),
        _ => blocks.flat_map(affine).collect(),
    };
    (converted.into(), held.type_size())
}

/// Converts a `Q3_K` block (`d * (scale - 32) * (q - 4)`) to `Q6_K` (`d * scale * (q - 32)`), exactly. It has the third bits
/// of quants, the others in pairs, the lower four bits of scales, the others in pairs, and d.
fn six_bits(block: &[u8]) -> Vec<u8> {
    let (third, low, factors, d) = (&block[..32], &block[32..96], &block[96..108], &block[108..]);
    let mut six = vec![0; BlockType::Q6K.type_size()];
    for i in 0..256 {
        let (run, part, k) = (i / 128, i % 128 / 32, i % 32);
        let bits = low[run * 32 + k] >> (2 * part) & 3 | (third[k] >> (i / 32) & 1) << 2;
        let q = bits + 28;
        six[run * 64 + part % 2 * 32 + k] |= (q & 15) << (part / 2 * 4);
        six[128 + run * 32 + k] |= (q >> 4) << (2 * part);
    }
    for i in 0..16 {
        let low = factors[i % 8] >> (i / 8 * 4) & 15;
        let high = factors[8 + i % 4] >> (i / 4 * 2) & 3;
        six[192 + i] = (low | high << 4).wrapping_sub(32);
    }
    six[208..].copy_from_slice(d);
    six
}

/// Converts a `Q5_0` block (`d * (q - 16)`) to `Q5_1` (`d * q + m`). The conversion is exact if `m = -16 d` is finite in f16,
/// which loading checks.
fn affine(block: &[u8]) -> Vec<u8> {
    let (d, quants) = block.split_at(2);
    let m = f16::from_f32(f16::from_le_bytes([d[0], d[1]]).to_f32() * -16.);
    [d, &m.to_le_bytes(), quants].concat()
}

/// Quantizes 32 floats to a `Q8_0` block, whose scale is not finite if one of them is not.
fn q8_0(x: &[f32]) -> Vec<u8> {
    let d = f16::from_f32(f32::from_bits(largest(x)) / 127.);
    let inverse = if d > f16::ZERO {
        d.to_f32().recip()
    } else {
        0.
    };
    let quants = x
        .iter()
        .map(|x| (x * inverse).round().clamp(-127., 127.) as i8 as u8);
    d.to_le_bytes().into_iter().chain(quants).collect()
}
