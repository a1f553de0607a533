//! How the scales of blocks lie in the records of the kernels' layout, which `formats` describes.

use half::f16;

/// Values per block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs per tile.
pub(super) const WIDTH: usize = 16;
/// Bytes of a vector: four inputs of each output.
pub(super) const VECTOR: usize = 4 * WIDTH;
/// Part of the scales of formats whose tables have eight times the values.
pub(super) const EIGHTH: f32 = 1. / 8.;
/// Inputs that share a scale record in the K formats.
pub(super) const SUPER: usize = 256;

/// How the scales of the blocks of a record lie in its first bytes, `scales`. `c` is an output of the tile, `sub` the
/// number of the block in its record.
pub(super) trait ScaleLayout: 'static {
    /// Blocks per record.
    const SPAN: usize;
    /// Bytes of a record's scales, a multiple of [`VECTOR`].
    const BYTES: usize;
    /// Whether [`ScaleLayout::offset`] can differ from 0.
    const OFFSET: bool = false;
    /// Whether [`ScaleLayout::factor`] can differ from 1.
    const FACTORS: bool = false;
    /// Whether halves of a block can have different scales and offsets; `half` is ignored otherwise.
    const BY_HALF: bool = false;

    /// Stores the scales of the block that `data` holds, or of block `sub` of the 8 that it holds.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]);

    /// Scale of inputs `16 half .. 16 half + 16`.
    fn scale(scales: &[u8], sub: usize, c: usize, half: usize) -> f32;

    /// Offset of the same.
    fn offset(_scales: &[u8], _sub: usize, _c: usize, _half: usize) -> f32 {
        0.
    }

    /// Factor of inputs `16 half .. 16 half + 16`.
    fn factor(_scales: &[u8], _sub: usize, _c: usize, _half: usize) -> i32 {
        1
    }
}

/// Bytes of 16 halves.
const HALVES: usize = 2 * WIDTH;

/// Copies a GGUF half to place `c` of the halves at `to`.
fn copy_half(data: &[u8], scales: &mut [u8], to: usize, c: usize) {
    scales[to + 2 * c..][..2].copy_from_slice(&data[..2]);
}

/// The half at place `c` of those at `from`.
fn half(scales: &[u8], from: usize, c: usize) -> f32 {
    let at = from + 2 * c;
    f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32()
}

/// The place of the 16 bytes of half a block among scales that begin with a vector of what all of them share.
pub(super) const fn of_half(sub: usize, half: usize) -> usize {
    VECTOR + (2 * sub + half) * WIDTH
}

/// A half for each of two blocks.
pub(super) struct BlockScales;

impl ScaleLayout for BlockScales {
    const SPAN: usize = 2;
    const BYTES: usize = Self::SPAN * HALVES;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, sub * HALVES, c);
    }

    fn scale(scales: &[u8], sub: usize, c: usize, _: usize) -> f32 {
        half(scales, sub * HALVES, c)
    }
}

/// A half, and another that is the offset.
pub(super) struct BlockOffsets;

impl ScaleLayout for BlockOffsets {
    const SPAN: usize = 1;
    const BYTES: usize = 2 * HALVES;
    const OFFSET: bool = true;

    fn read(data: &[u8], _: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        copy_half(&data[2..], scales, HALVES, c);
    }

    fn scale(scales: &[u8], _: usize, c: usize, _: usize) -> f32 {
        half(scales, 0, c)
    }

    fn offset(scales: &[u8], _: usize, c: usize, _: usize) -> f32 {
        half(scales, HALVES, c)
    }
}

/// 16 halves `d`, 16 halves `m`, then for each block 16 bytes `sc`, then for each block 16 bytes `mn`.
/// `scale = d * sc`, `offset = -m * mn`.
pub(super) struct SuperOffsets;

impl SuperOffsets {
    pub const M: usize = HALVES;
    pub const SC: usize = 2 * HALVES;
    pub const MN: usize = Self::SC + Self::SPAN * WIDTH;
}

impl ScaleLayout for SuperOffsets {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = Self::MN + Self::SPAN * WIDTH;
    const OFFSET: bool = true;

    /// Reads the first 16 bytes of a block: d, m, and eight pairs of 6-bit values in 12 bytes.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        copy_half(&data[2..], scales, Self::M, c);
        let s = &data[4..16];
        let (sc, mn) = if sub < 4 {
            (s[sub] & 63, s[sub + 4] & 63)
        } else {
            (
                s[sub + 4] & 15 | s[sub - 4] >> 6 << 4,
                s[sub + 4] >> 4 | s[sub] >> 6 << 4,
            )
        };
        scales[Self::SC + sub * WIDTH + c] = sc;
        scales[Self::MN + sub * WIDTH + c] = mn;
    }

    fn scale(scales: &[u8], sub: usize, c: usize, _: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[Self::SC + sub * WIDTH + c])
    }

    fn offset(scales: &[u8], sub: usize, c: usize, _: usize) -> f32 {
        -(half(scales, Self::M, c) * f32::from(scales[Self::MN + sub * WIDTH + c]))
    }
}

/// 16 halves `d`, 32 unused bytes, then for each half block 16 signed bytes.
pub(super) struct HalfBlockScales;

impl ScaleLayout for HalfBlockScales {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = of_half(Self::SPAN, 0);
    const FACTORS: bool = true;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(&data[208..], scales, 0, c);
        for half in 0..2 {
            scales[of_half(sub, half) + c] = data[192 + 2 * sub + half];
        }
    }

    fn scale(scales: &[u8], _: usize, c: usize, _: usize) -> f32 {
        half(scales, 0, c)
    }

    fn factor(scales: &[u8], sub: usize, c: usize, half: usize) -> i32 {
        i32::from(scales[of_half(sub, half) + c] as i8)
    }
}

/// 16 halves `d`, 16 halves `m`, then for each half block 16 bytes: `sc` in the lower half and `mn` in the upper half.
/// `scale = d * sc`, `offset = -m * mn`.
pub(super) struct HalfBlockOffsets;

impl HalfBlockOffsets {
    pub const M: usize = HALVES;
}

impl ScaleLayout for HalfBlockOffsets {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = of_half(Self::SPAN, 0);
    const OFFSET: bool = true;
    const BY_HALF: bool = true;

    /// Reads the factors before the quants of a block, and d and m behind them.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(&data[80..], scales, 0, c);
        copy_half(&data[82..], scales, Self::M, c);
        for half in 0..2 {
            scales[of_half(sub, half) + c] = data[2 * sub + half];
        }
    }

    fn scale(scales: &[u8], sub: usize, c: usize, in_half: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[of_half(sub, in_half) + c] & 15)
    }

    fn offset(scales: &[u8], sub: usize, c: usize, in_half: usize) -> f32 {
        -(half(scales, Self::M, c) * f32::from(scales[of_half(sub, in_half) + c] >> 4))
    }
}

/// A factor of all scales, which are floats of 8 bits (E4M3) without a sign: an f32 and 60 unused bytes, then for each half
/// block 16 bytes.
pub(super) struct GroupScales;

impl GroupScales {
    /// The bits of an E4M3 number, so far to the left in an f32, are the number over [`GroupScales::OVER`], also below its
    /// smallest exponent.
    pub const SHIFT: u32 = 20;
    /// 2^120, which is part of the stored factor.
    pub const OVER: f32 = f32::from_bits((127 + 120) << 23);
}

impl ScaleLayout for GroupScales {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = of_half(Self::SPAN, 0);
    const BY_HALF: bool = true;

    /// Reads the factor, as it is stored, and two numbers.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        scales[..4].copy_from_slice(&data[..4]);
        for half in 0..2 {
            scales[of_half(sub, half) + c] = data[4 + half];
        }
    }

    fn scale(scales: &[u8], sub: usize, c: usize, half: usize) -> f32 {
        let factor = f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]);
        let number = u32::from(scales[of_half(sub, half) + c]);
        f32::from_bits(number << Self::SHIFT) * factor
    }
}

/// A half times a whole number of 6 bits. 16 halves, 32 unused bytes, then for each block 16 signed bytes.
pub(super) struct SuperScales;

impl SuperScales {
    /// The place of the whole numbers of a block among the scales.
    pub const fn factors(sub: usize) -> usize {
        2 * HALVES + sub * WIDTH
    }
}

impl ScaleLayout for SuperScales {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = Self::factors(Self::SPAN);

    /// Reads a half, 16 bits with the upper two of each factor, and four bytes with the lower four.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        let high = u16::from_le_bytes([data[2], data[3]]) >> (2 * sub) & 3;
        let low = data[4 + sub / 2] >> (sub % 2 * 4) & 15;
        let factor = low | (high as u8) << 4;
        scales[Self::factors(sub) + c] = factor.wrapping_sub(32);
    }

    fn scale(scales: &[u8], sub: usize, c: usize, _: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[Self::factors(sub) + c] as i8)
    }
}

/// Eighths of those of [`SuperScales`], with factors below 32. f16 has no room for eighths of the smallest halves.
pub(super) struct SuperEighths;

impl ScaleLayout for SuperEighths {
    const SPAN: usize = SuperScales::SPAN;
    const BYTES: usize = SuperScales::BYTES;

    /// Reads a half, and the factor of each 16 inputs, which is that of both halves of a block.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        scales[SuperScales::factors(sub) + c] = data[2 + 2 * sub];
    }

    fn scale(scales: &[u8], sub: usize, c: usize, half: usize) -> f32 {
        SuperScales::scale(scales, sub, c, half) * EIGHTH
    }
}

/// Eighths of a half times a factor below 32. 16 halves, 32 unused bytes, then for each half block 16 bytes.
pub(super) struct HalfBlockEighths;

impl ScaleLayout for HalfBlockEighths {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = of_half(Self::SPAN, 0);
    const BY_HALF: bool = true;

    /// Reads a half, and the factor of each 16 inputs.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        for half in 0..2 {
            scales[of_half(sub, half) + c] = data[2 + 2 * sub + half];
        }
    }

    fn scale(scales: &[u8], sub: usize, c: usize, in_half: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[of_half(sub, in_half) + c]) * EIGHTH
    }
}

/// Half a power of two: 16 exponents for each of four blocks.
pub(super) struct Exponents;

impl Exponents {
    /// The smallest power of two that is half a scale, as bits: below it, exponents are those of subnormal
    /// numbers.
    pub const SMALLEST: u32 = 1 << 22;
}

impl ScaleLayout for Exponents {
    const SPAN: usize = 4;
    const BYTES: usize = Self::SPAN * WIDTH;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        scales[sub * WIDTH + c] = data[0];
    }

    /// `2^(exponent - 128)`: the table has twice the values.
    fn scale(scales: &[u8], sub: usize, c: usize, _: usize) -> f32 {
        let exponent = u32::from(scales[sub * WIDTH + c]);
        0.5 * f32::from_bits((exponent << 23).max(Self::SMALLEST))
    }
}
