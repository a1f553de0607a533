//! The memory layout of quantized weights.

use super::block_type::BlockType;
use super::formats::{BLOCK, Block, Format, ScaleLayout, TileFormat, VECTOR, WIDTH, with_format};
use super::kind::QuantKind;
use std::marker::PhantomData;

/// A vector's bytes, aligned.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line(pub(super) [u8; VECTOR]);

impl Line {
    pub const ZERO: Self = Self([0; VECTOR]);
}

/// The bytes of lines.
pub(super) fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    let len = size_of_val(lines);
    // SAFETY: lines consist of bytes, without padding.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// A quantized weight `[outputs, inputs]`, laid out for the kernels.
pub struct QuantMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) format: TileFormat,
    /// Records `[outputs / 16 rounded up][inputs / 32 / SPAN rounded up]`. Outputs beyond the last are zero.
    pub(super) lines: Vec<Line>,
}

/// The tiles of 16 outputs, for all inputs.
pub(super) struct Strip<'a, F> {
    lines: &'a [Line],
    blocks: usize,
    format: PhantomData<F>,
}

impl<F> Clone for Strip<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Strip<'_, F> {}

/// Lines per strip of `blocks` blocks.
pub(super) fn strip_lines<F: Format>(blocks: usize) -> usize {
    const { assert!(F::SCALES.is_multiple_of(VECTOR) && F::TILE.is_multiple_of(VECTOR)) };
    const { assert!(F::Scales::FACTORS == (F::BITS == 6)) };
    const { assert!(!F::Scales::BY_HALF || matches!(F::BITS, 2 | 4) && F::BIAS == 0) };
    blocks.div_ceil(F::SPAN) * (F::RECORD / VECTOR)
}

impl QuantMatrix {
    /// Number of strips of 16 outputs.
    pub(super) fn strips(&self) -> usize {
        self.outputs.div_ceil(WIDTH)
    }

    /// Bytes of a weight of a block type that [`QuantMatrix::keeps`] accepts.
    pub fn bytes(dtype: BlockType, outputs: usize, inputs: usize) -> usize {
        let blocks = inputs / BLOCK;
        let of = |format| with_format!(format, F => strip_lines::<F>(blocks));
        outputs.div_ceil(WIDTH) * TileFormat::of(dtype).map_or(0, of) * VECTOR
    }

    /// What the tiles hold.
    pub fn kind(&self) -> QuantKind {
        self.format.kind()
    }

    /// A strip of a weight in format `F`.
    pub(super) fn strip<F: Format>(&self, strip: usize) -> Strip<'_, F> {
        let blocks = self.inputs / BLOCK;
        let count = strip_lines::<F>(blocks);
        Strip::new(&self.lines[strip * count..][..count], blocks)
    }
}

impl<'a, F: Format> Strip<'a, F> {
    /// The strip of `blocks` blocks in `lines`.
    pub fn new(lines: &'a [Line], blocks: usize) -> Self {
        assert_eq!(lines.len(), strip_lines::<F>(blocks), "lines of a strip");
        Self {
            lines,
            blocks,
            format: PhantomData,
        }
    }

    pub fn blocks(self) -> usize {
        self.blocks
    }

    /// The records of all blocks, aligned for vectors.
    pub fn bytes(self) -> &'a [u8] {
        let (start, len) = (self.lines.as_ptr(), size_of_val(self.lines));
        // SAFETY: lines consist of bytes, without padding.
        unsafe { std::slice::from_raw_parts(start.cast(), len) }
    }

    /// The scales of the record of a block, the block's number in it, and its tile.
    pub fn block(self, block: usize) -> (&'a [u8], usize, &'a [u8]) {
        let (record, sub) = (block / F::SPAN, block % F::SPAN);
        let record = &self.bytes()[record * F::RECORD..][..F::RECORD];
        let (scales, tiles) = record.split_at(F::SCALES);
        (scales, sub, &tiles[sub * F::TILE..][..F::TILE])
    }
}

/// Bytes of the low halves of a tile's quants, unless these have 8 bits.
pub(super) const NIBBLES: usize = BLOCK * WIDTH / 2;

/// Where the bits of input `k` of output `c` are in a tile: the byte of the low bits and their shift, and
/// those of the bits above the fourth. With 2 bits, bit pair `v / 2` of a byte belongs to vector `v`. With 5 bits, bit `v` of a byte belongs to vector `v`. With 6, the
/// first vector of pairs has, from the low end, those of vectors 0, 1, 4 and 5, the second those of 2, 3, 6
/// and 7.
fn place(bits: usize, c: usize, k: usize) -> [(usize, usize); 2] {
    let (v, at) = (k / 4, 4 * c + k % 4);
    let low = match bits {
        8 => (v * VECTOR + at, 0),
        2 => (v % 2 * VECTOR + at, v / 2 * 2),
        _ => (v % 4 * VECTOR + at, v / 4 * 4),
    };
    let high = match bits {
        5 => (NIBBLES + at, v),
        6 => (NIBBLES + v % 4 / 2 * VECTOR + at, (v / 4 * 2 + v % 2) * 2),
        _ => (0, 0),
    };
    [low, high]
}

/// Puts a block into an empty place of a tile.
pub(super) fn set_block<F: Format>(tile: &mut [u8], c: usize, block: &Block) {
    for (k, &q) in block.iter().enumerate() {
        let [low, high] = place(F::BITS, c, k);
        if F::BITS == 8 {
            tile[low.0] = q;
        } else {
            tile[low.0] |= (q & 15) << low.1;
            tile[high.0] |= (q >> 4) << high.1;
        }
    }
}

/// The quant of a tile, without the bias, or the value that it stands for.
pub(super) fn quant<F: Format>(tile: &[u8], c: usize, k: usize) -> i32 {
    let [low, high] = place(F::BITS, c, k);
    let q = match F::BITS {
        8 => tile[low.0],
        2 => tile[low.0] >> low.1 & 3,
        4 => tile[low.0] >> low.1 & 15,
        bits => {
            let mask = (1 << (bits - 4)) - 1;
            tile[low.0] >> low.1 & 15 | (tile[high.0] >> high.1 & mask) << 4
        }
    };
    match F::TABLE {
        Some(values) => i32::from(values[usize::from(q)]),
        None => i32::from(q) - F::BIAS,
    }
}
