//! Converts GGUF blocks, or floats, to tiles.

use super::formats::{BLOCK, Format, SUPER, WIDTH};
use super::tiles::{AnyTiles, QuantMatrix, SIDES, Tiles, with_tiles};
use candle_core::Result;
use candle_core::quantized::GgmlDType;
use half::f16;

impl QuantMatrix {
    /// Whether [`QuantMatrix::from_blocks`] takes blocks of this type with `inputs` values per row.
    pub fn keeps(dtype: GgmlDType, inputs: usize) -> bool {
        use GgmlDType::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        match dtype {
            Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 => inputs.is_multiple_of(BLOCK),
            Q4K | Q5K | Q6K => inputs.is_multiple_of(SUPER),
            _ => false,
        }
    }

    /// Converts the blocks of a GGUF tensor `[outputs, inputs]`, without loss.
    ///
    /// # Errors
    /// If [`QuantMatrix::keeps`] does not accept the type, or `data` has another length.
    pub fn from_blocks(
        dtype: GgmlDType,
        data: &[u8],
        outputs: usize,
        inputs: usize,
    ) -> Result<Self> {
        let bytes = outputs * inputs / dtype.block_size() * dtype.type_size();
        if !Self::keeps(dtype, inputs) || data.len() != bytes {
            let found = data.len();
            candle_core::bail!(
                "{found} bytes cannot be a [{outputs}, {inputs}] weight in {dtype:?}"
            );
        }
        let (size, blocks) = (dtype.type_size(), inputs / BLOCK);
        let tiles = match dtype {
            GgmlDType::Q8_0 => AnyTiles::Q8_0(Tiles::new(data, size, blocks)),
            GgmlDType::Q4_0 => AnyTiles::Q4_0(Tiles::new(data, size, blocks)),
            GgmlDType::Q4_1 => AnyTiles::Q4_1(Tiles::new(data, size, blocks)),
            GgmlDType::Q5_0 => {
                let (data, size) = affine(data, size);
                AnyTiles::Q5_1(Tiles::new(&data, size, blocks))
            }
            GgmlDType::Q5_1 => AnyTiles::Q5_1(Tiles::new(data, size, blocks)),
            GgmlDType::Q4K => AnyTiles::Q4K(Tiles::new(data, size, blocks)),
            GgmlDType::Q5K => AnyTiles::Q5K(Tiles::new(data, size, blocks)),
            _ => AnyTiles::Q6K(Tiles::new(data, size, blocks)),
        };
        Ok(Self {
            outputs,
            inputs,
            tiles,
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
        Self::from_blocks(GgmlDType::Q8_0, &blocks, outputs, inputs)
    }

    /// See [`CpuMatrix::read_row`](super::CpuMatrix::read_row).
    pub(super) fn dequantize_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert_eq!(row.len(), self.inputs, "inputs of a row");
        let blocks = self.inputs / BLOCK;
        with_tiles!(&self.tiles, tiles => tiles.dequantize_row(output, blocks, row));
    }
}

impl<F: Format> Tiles<F> {
    /// Lays out rows of `blocks` blocks of 32 values; `F::SPAN` of these are one GGUF block of `size`
    /// bytes. Missing outputs of the last strip are zero.
    fn new(data: &[u8], size: usize, blocks: usize) -> Self {
        let records = blocks / F::SPAN;
        let outputs = data.len() / (size * records).max(1);
        let strips = outputs.div_ceil(SIDES * WIDTH);
        let (quants, scales) = F::empty();
        let mut this = Self {
            quants: vec![[quants; SIDES]; strips * blocks],
            scales: vec![[scales; SIDES]; strips * records],
        };
        for (at, data) in data.chunks_exact(size).enumerate() {
            let (output, record) = (at / records, at % records);
            let (strip, side, c) = place(output);
            let scales = &mut this.scales[strip * records + record][side];
            for sub in 0..F::SPAN {
                let quants = &mut this.quants[strip * blocks + record * F::SPAN + sub][side];
                F::set(data, sub, c, quants, scales);
            }
        }
        this
    }

    fn dequantize_row(&self, output: usize, blocks: usize, row: &mut [f32]) {
        let (strip, side, c) = place(output);
        let strip = self.strip(strip, blocks);
        for (b, row) in row.chunks_exact_mut(BLOCK).enumerate() {
            let (scales, sub) = (&strip.scales[b / F::SPAN][side], b % F::SPAN);
            let (scale, offset) = (F::scale(scales, sub, c), F::offset(scales, sub, c));
            for (k, x) in row.iter_mut().enumerate() {
                let factor = F::factor(scales, sub, c, 2 * k / BLOCK);
                let q = F::quant(&strip.quants[b][side], c, k) - F::BIAS;
                *x = scale * (factor * q) as f32 + offset;
            }
        }
    }
}

/// The strip, the side and the place in the tile of an output.
fn place(output: usize) -> (usize, usize, usize) {
    let tile = output / WIDTH;
    (tile / SIDES, tile % SIDES, output % WIDTH)
}

/// Converts `Q5_0` blocks (`d * (q - 16)`) to `Q5_1` (`d * q + m`), and returns the new block size. The
/// conversion is exact: `m = -16 d`, which f16 can represent.
fn affine(data: &[u8], size: usize) -> (Vec<u8>, usize) {
    let blocks = data.chunks_exact(size).flat_map(|block| {
        let (d, quants) = block.split_at(2);
        let m = f16::from_f32(f16::from_le_bytes([d[0], d[1]]).to_f32() * -16.);
        [d, &m.to_le_bytes(), quants].concat()
    });
    (blocks.collect(), size + 2)
}

/// Quantizes 32 floats to a `Q8_0` block.
fn q8_0(x: &[f32]) -> Vec<u8> {
    let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
    let d = f16::from_f32(max / 127.);
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
