//! The layout of blocks of quantized weights for the kernels, and their meaning.
//!
//! All formats have blocks of 32 inputs. A value is `scale * factor * (quant - BIAS) + offset`, where the
//! quant is unsigned; in some formats it is the number of a value in a table instead. Scale and offset belong to the block, the factor (an integer) to half a block. A tile
//! holds one block of each of 16 outputs. One vector of 64 bytes holds four inputs of 16 outputs, to be
//! multiplied with four activations that are broadcast to all outputs: vector `v` has inputs
//! `4 v .. 4 v + 4`. Formats with fewer than 8 bits keep vector `v` in the low halves and vector `v + 4` in
//! the high halves of the same bytes, and store the bits above the fourth separately. Instructions with 32
//! bytes read the halves of a vector, which are outputs 0..8 and 8..16.
//!
//! A record holds the scales of [`Format::SPAN`] blocks of 16 outputs, then their tiles. All parts are
//! multiples of 64 bytes, so a weight is one stream of aligned vectors.

use half::f16;

/// Values per block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs per tile.
pub(super) const WIDTH: usize = 16;
/// Bytes of a vector: four inputs of each output.
pub(super) const VECTOR: usize = 4 * WIDTH;
/// Inputs that share a scale record in the K formats.
pub(super) const SUPER: usize = 256;

/// Values of the quants of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of the quants of `MXFP4`, which are floats with two bits of exponent and one of mantissa
/// (OCP Microscaling Formats 1.0).
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Values plus 128, unsigned, as instructions look them up.
const fn biased(table: Option<&[i8; 16]>) -> [u8; 16] {
    let mut bytes = [0; 16];
    if let Some(table) = table {
        let mut i = 0;
        while i < 16 {
            bytes[i] = table[i].cast_unsigned() ^ 0x80;
            i += 1;
        }
    }
    bytes
}

/// The unsigned quants of one block.
pub(super) type Block = [u8; BLOCK];

/// A layout of quantized weights. `c` is an output of the tile, `k` an input of the block, `sub` the
/// number of the block in its record, `scales` the first [`Format::SCALES`] bytes of the record.
pub(super) trait Format: 'static {
    /// Bits per quant: 4, 5, 6 or 8.
    const BITS: usize;
    /// Blocks per record.
    const SPAN: usize;
    /// Bytes of a record's scales, a multiple of [`VECTOR`].
    const SCALES: usize;
    /// The value that is subtracted from quants.
    const BIAS: i32 = 0;
    /// The values that quants of 4 bits stand for; `None` = they are numbers.
    const TABLE: Option<&'static [i8; 16]> = None;
    /// The values of `TABLE` plus 128.
    const BIASED: [u8; 16] = biased(Self::TABLE);
    /// Bits of what is multiplied: of the values that quants stand for, plus 128, or of the quants.
    const VALUE_BITS: usize = if Self::TABLE.is_some() { 8 } else { Self::BITS };
    /// Whether [`Format::offset`] can differ from 0.
    const OFFSET: bool = false;
    /// Bytes of a tile.
    const TILE: usize = BLOCK * WIDTH * Self::BITS / 8;
    /// Bytes of a record.
    const RECORD: usize = Self::SCALES + Self::SPAN * Self::TILE;

    /// Stores the scales of the block that `data` holds, or of block `sub` of the 8 that it holds. Returns
    /// the block's quants.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block;

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32;

    fn offset(_scales: &[u8], _sub: usize, _c: usize) -> f32 {
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

/// Unpacks a block whose inputs 0..16 are in the low halves of 16 bytes and 16..32 in the high halves.
fn split(bytes: &[u8]) -> Block {
    std::array::from_fn(|k| bytes[k % 16] >> (k / 16 * 4) & 15)
}

/// `Q8_0`.
pub(super) struct Q8_0;

impl Format for Q8_0 {
    const BITS: usize = 8;
    const SPAN: usize = 2;
    const SCALES: usize = Self::SPAN * HALVES;
    const BIAS: i32 = 128;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        copy_half(data, scales, sub * HALVES, c);
        std::array::from_fn(|k| data[2 + k] ^ 0x80)
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        half(scales, sub * HALVES, c)
    }
}

/// `Q4_0`.
pub(super) struct Q4_0;

impl Format for Q4_0 {
    const BITS: usize = 4;
    const SPAN: usize = 2;
    const SCALES: usize = Self::SPAN * HALVES;
    const BIAS: i32 = 8;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        copy_half(data, scales, sub * HALVES, c);
        split(&data[2..])
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        half(scales, sub * HALVES, c)
    }
}

/// `IQ4_NL`: like `Q4_0`, but quants stand for values that are not evenly spaced.
pub(super) struct Iq4Nl;

impl Format for Iq4Nl {
    const BITS: usize = 4;
    const SPAN: usize = 2;
    const SCALES: usize = Self::SPAN * HALVES;
    const TABLE: Option<&'static [i8; 16]> = Some(&IQ4);

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        Q4_0::read(data, sub, c, scales)
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        Q4_0::scale(scales, sub, c)
    }
}

/// `IQ4_XS`: eight blocks of `IQ4_NL` whose scales are a half times a whole number of 6 bits. Its scales are 16
/// halves, 32 unused bytes, then for each block 16 signed bytes.
pub(super) struct Iq4Xs;

impl Iq4Xs {
    /// The place of the whole numbers of a block among the scales.
    pub const fn factors(sub: usize) -> usize {
        2 * HALVES + sub * WIDTH
    }
}

impl Format for Iq4Xs {
    const BITS: usize = 4;
    const SPAN: usize = SUPER / BLOCK;
    const SCALES: usize = Self::factors(Self::SPAN);
    const TABLE: Option<&'static [i8; 16]> = Some(&IQ4);

    /// A half, 16 bits with the upper two of each factor, four bytes with the lower four, and the quants.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        copy_half(data, scales, 0, c);
        let high = u16::from_le_bytes([data[2], data[3]]) >> (2 * sub) & 3;
        let low = data[4 + sub / 2] >> (sub % 2 * 4) & 15;
        let factor = low | (high as u8) << 4;
        scales[Self::factors(sub) + c] = factor.wrapping_sub(32);
        split(&data[8 + sub * BLOCK / 2..])
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[Self::factors(sub) + c] as i8)
    }
}

/// `MXFP4`: floats of 4 bits, with a power of two for each block. Its scales are 16 exponents for each of four
/// blocks.
pub(super) struct Mxfp4;

impl Mxfp4 {
    /// The smallest power of two that is half a scale, as bits: below it, exponents are those of subnormal
    /// numbers.
    pub const SMALLEST: u32 = 1 << 22;
}

impl Format for Mxfp4 {
    const BITS: usize = 4;
    const SPAN: usize = 4;
    const SCALES: usize = Self::SPAN * WIDTH;
    const TABLE: Option<&'static [i8; 16]> = Some(&E2M1);

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        scales[sub * WIDTH + c] = data[0];
        split(&data[1..])
    }

    /// `2^(exponent - 128)`: the table has twice the values.
    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        let exponent = u32::from(scales[sub * WIDTH + c]);
        0.5 * f32::from_bits((exponent << 23).max(Self::SMALLEST))
    }
}

/// `Q4_1`.
pub(super) struct Q4_1;

impl Format for Q4_1 {
    const BITS: usize = 4;
    const SPAN: usize = 1;
    const SCALES: usize = 2 * HALVES;
    const OFFSET: bool = true;

    fn read(data: &[u8], _: usize, c: usize, scales: &mut [u8]) -> Block {
        copy_half(data, scales, 0, c);
        copy_half(&data[2..], scales, HALVES, c);
        split(&data[4..])
    }

    fn scale(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, 0, c)
    }

    fn offset(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, HALVES, c)
    }
}

/// `Q5_1`.
pub(super) struct Q5_1;

impl Format for Q5_1 {
    const BITS: usize = 5;
    const SPAN: usize = 1;
    const SCALES: usize = 2 * HALVES;
    const OFFSET: bool = true;

    fn read(data: &[u8], _: usize, c: usize, scales: &mut [u8]) -> Block {
        copy_half(data, scales, 0, c);
        copy_half(&data[2..], scales, HALVES, c);
        let high = u32::from_le_bytes([data[4], data[5], data[6], data[7]]);
        let mut block = split(&data[8..]);
        for (k, q) in block.iter_mut().enumerate() {
            *q |= ((high >> k & 1) as u8) << 4;
        }
        block
    }

    fn scale(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, 0, c)
    }

    fn offset(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, HALVES, c)
    }
}

/// Scales of `Q4_K` and `Q5_K`: 16 halves `d`, 16 halves `m`, then for each block 16 bytes `sc`, then for
/// each block 16 bytes `mn`. `scale = d * sc`, `offset = -m * mn`.
pub(super) mod scales_k {
    use super::{BLOCK, HALVES, SUPER, WIDTH, copy_half};

    pub const SPAN: usize = SUPER / BLOCK;
    pub const M: usize = HALVES;
    pub const SC: usize = 2 * HALVES;
    pub const MN: usize = SC + SPAN * WIDTH;
    pub const BYTES: usize = MN + SPAN * WIDTH;

    /// Reads the first 16 bytes of a block: d, m, and eight pairs of 6-bit values in 12 bytes.
    pub fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, 0, c);
        copy_half(&data[2..], scales, M, c);
        let s = &data[4..16];
        let (sc, mn) = if sub < 4 {
            (s[sub] & 63, s[sub + 4] & 63)
        } else {
            (
                s[sub + 4] & 15 | s[sub - 4] >> 6 << 4,
                s[sub + 4] >> 4 | s[sub] >> 6 << 4,
            )
        };
        scales[SC + sub * WIDTH + c] = sc;
        scales[MN + sub * WIDTH + c] = mn;
    }

    pub fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        super::half(scales, 0, c) * f32::from(scales[SC + sub * WIDTH + c])
    }

    pub fn offset(scales: &[u8], sub: usize, c: usize) -> f32 {
        -(super::half(scales, M, c) * f32::from(scales[MN + sub * WIDTH + c]))
    }
}

/// The low bits of block `sub`. Blocks are stored in pairs, one in the low and one in the high halves.
fn low_bits_k(nibbles: &[u8], sub: usize) -> Block {
    std::array::from_fn(|k| nibbles[sub / 2 * BLOCK + k] >> (sub % 2 * 4) & 15)
}

/// `Q4_K`.
pub(super) struct Q4K;

impl Format for Q4K {
    const BITS: usize = 4;
    const SPAN: usize = scales_k::SPAN;
    const SCALES: usize = scales_k::BYTES;
    const OFFSET: bool = true;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        scales_k::read(data, sub, c, scales);
        low_bits_k(&data[16..], sub)
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        scales_k::scale(scales, sub, c)
    }

    fn offset(scales: &[u8], sub: usize, c: usize) -> f32 {
        scales_k::offset(scales, sub, c)
    }
}

/// `Q5_K`.
pub(super) struct Q5K;

impl Format for Q5K {
    const BITS: usize = 5;
    const SPAN: usize = scales_k::SPAN;
    const SCALES: usize = scales_k::BYTES;
    const OFFSET: bool = true;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        scales_k::read(data, sub, c, scales);
        let (high, low) = data[16..].split_at(BLOCK);
        let mut block = low_bits_k(low, sub);
        for (q, high) in block.iter_mut().zip(high) {
            *q |= (high >> sub & 1) << 4;
        }
        block
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        scales_k::scale(scales, sub, c)
    }

    fn offset(scales: &[u8], sub: usize, c: usize) -> f32 {
        scales_k::offset(scales, sub, c)
    }
}

/// `Q6_K`. Its scales are 16 halves `d`, 32 unused bytes, then for each half block 16 signed bytes.
pub(super) struct Q6K;

impl Q6K {
    /// The place of the factors of a half block among the scales.
    pub const fn factors(sub: usize, half: usize) -> usize {
        2 * HALVES + (2 * sub + half) * WIDTH
    }
}

impl Format for Q6K {
    const BITS: usize = 6;
    const SPAN: usize = SUPER / BLOCK;
    const SCALES: usize = Self::factors(Self::SPAN, 0);
    const BIAS: i32 = 32;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) -> Block {
        // Two runs of 128 inputs, each with 64 bytes of nibbles and 32 bytes of bit pairs.
        let (run, part) = (sub / 4, sub % 4);
        let (low, high) = (&data[run * 64..], &data[128 + run * 32..]);
        copy_half(&data[208..], scales, 0, c);
        for half in 0..2 {
            scales[Self::factors(sub, half) + c] = data[192 + 2 * sub + half];
        }
        std::array::from_fn(|k| {
            let low = low[part % 2 * 32 + k] >> (part / 2 * 4) & 15;
            low | (high[k] >> (2 * part) & 3) << 4
        })
    }

    fn scale(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, 0, c)
    }

    fn factor(scales: &[u8], sub: usize, c: usize, half: usize) -> i32 {
        i32::from(scales[Self::factors(sub, half) + c] as i8)
    }
}

/// Bytes of the low halves of a tile's quants, unless these have 8 bits.
pub(super) const NIBBLES: usize = BLOCK * WIDTH / 2;

/// Where the bits of input `k` of output `c` are in a tile: the byte of the low bits and their shift, and
/// those of the bits above the fourth. With 5 bits, bit `v` of a byte belongs to vector `v`. With 6, the
/// first vector of pairs has, from the low end, those of vectors 0, 1, 4 and 5, the second those of 2, 3, 6
/// and 7.
fn place(bits: usize, c: usize, k: usize) -> [(usize, usize); 2] {
    let (v, at) = (k / 4, 4 * c + k % 4);
    let low = match bits {
        8 => (v * VECTOR + at, 0),
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
