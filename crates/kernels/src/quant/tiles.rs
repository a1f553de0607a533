//! The memory layout of quantized weights.

use super::block_type::BlockType;
use super::formats::{BLOCK, Format, VECTOR, WIDTH};
use std::marker::PhantomData;

/// A vector's bytes, aligned.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Line(pub [u8; VECTOR]);

/// Runs the same code for any block type that tiles can hold.
macro_rules! with_format {
    ($dtype:expr, $format:ident => $body:expr) => {{
        use $crate::quant::formats;
        macro_rules! with {
            ($type:ident) => {{
                type $format = formats::$type;
                $body
            }};
        }
        match $dtype {
            BlockType::Q8_0 => with!(Q8_0),
            BlockType::Q4_0 => with!(Q4_0),
            BlockType::Q4_1 => with!(Q4_1),
            BlockType::Q5_1 => with!(Q5_1),
            BlockType::Q4K => with!(Q4K),
            BlockType::Q5K => with!(Q5K),
            BlockType::Q6K => with!(Q6K),
            BlockType::Iq4Nl => with!(Iq4Nl),
            BlockType::Iq4Xs => with!(Iq4Xs),
            BlockType::Mxfp4 => with!(Mxfp4),
            other => unreachable!("no tiles of {other:?}"),
        }
    }};
}
pub(super) use with_format;

/// A quantized weight `[outputs, inputs]`, laid out for the kernels.
pub struct QuantMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// One that [`with_format`] has.
    pub(super) dtype: BlockType,
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
    blocks.div_ceil(F::SPAN) * (F::RECORD / VECTOR)
}

impl QuantMatrix {
    /// Number of strips of 16 outputs.
    pub(super) fn strips(&self) -> usize {
        self.outputs.div_ceil(WIDTH)
    }

    /// Bytes of a weight of a block type that [`QuantMatrix::keeps`] accepts.
    pub fn bytes(dtype: BlockType, outputs: usize, inputs: usize) -> usize {
        let dtype = Self::held_as(dtype);
        let lines = with_format!(dtype, F => strip_lines::<F>(inputs / BLOCK));
        outputs.div_ceil(WIDTH) * lines * VECTOR
    }

    /// The block type whose tiles hold blocks of this type without loss.
    pub(super) fn held_as(dtype: BlockType) -> BlockType {
        match dtype {
            BlockType::Q5_0 => BlockType::Q5_1,
            same => same,
        }
    }

    /// The block type that the tiles hold.
    pub fn dtype(&self) -> BlockType {
        self.dtype
    }

    /// A strip of a weight in format `F`.
    pub(super) fn strip<F: Format>(&self, strip: usize) -> Strip<'_, F> {
        let blocks = self.inputs / BLOCK;
        let count = strip_lines::<F>(blocks);
        Strip {
            lines: &self.lines[strip * count..][..count],
            blocks,
            format: PhantomData,
        }
    }
}

impl<'a, F: Format> Strip<'a, F> {
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
