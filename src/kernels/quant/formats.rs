//! The layout of blocks of quantized weights for the kernels, and their meaning.
//!
//! All formats have blocks of 32 inputs. A value is `scale * factor * (quant - BIAS) + offset`. Scale
//! and offset belong to the block, the factor (an integer) to half a block. A tile holds one block of
//! each of eight outputs. One vector of 32 bytes holds four inputs of eight outputs, to be multiplied
//! with four activations that are broadcast to all outputs: vector `v` has inputs `4 v .. 4 v + 4`.
//! Formats with fewer than 8 bits keep vector `v` in the low halves and vector `v + 4` in the high
//! halves of the same bytes, and store the bits above the fourth separately.

use half::f16;

/// Values per block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs per tile.
pub(super) const WIDTH: usize = 8;

/// Bytes with the alignment of a vector.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes<const N: usize>(pub [u8; N]);

/// Inputs that share a scale record in the K formats.
pub(super) const SUPER: usize = 256;

/// The unsigned quants of one GGUF block. Where its scales are depends on the format.
pub(super) type Block = [u8; BLOCK];

/// A layout of quantized weights. `c` is an output of the tile, `k` an input of the block, `sub`
/// the number of the block among those that share a scale record.
pub(super) trait Format: 'static {
    /// Quants of a tile.
    type Quants: Copy + Send + Sync;
    /// Scales of [`Format::SPAN`] tiles along the inputs.
    type Scales: Copy + Send + Sync;
    /// Blocks per scale record.
    const SPAN: usize = 1;
    /// The value that is subtracted from quants.
    const BIAS: i32 = 0;
    /// Whether [`Format::offset`] can differ from 0.
    const OFFSET: bool = false;

    fn empty() -> (Self::Quants, Self::Scales);

    /// Stores block `sub` of `data`, which holds `SPAN` blocks of 32 values of output `c`.
    fn set(data: &[u8], sub: usize, c: usize, quants: &mut Self::Quants, scales: &mut Self::Scales);

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32;

    fn scale(scales: &Self::Scales, sub: usize, c: usize) -> f32;

    fn offset(_: &Self::Scales, _sub: usize, _c: usize) -> f32 {
        0.
    }

    /// Factor of inputs `16 half .. 16 half + 16`.
    fn factor(_: &Self::Scales, _sub: usize, _c: usize, _half: usize) -> i32 {
        1
    }
}

/// The index of input `k` of output `c` in vectors of four inputs of eight outputs.
fn place(c: usize, k: usize) -> usize {
    4 * (WIDTH * (k / 4) + c) + k % 4
}

/// Puts the low four bits of a block into the tile.
fn set_nibbles(nibbles: &mut [u8], c: usize, block: &Block) {
    for k in 0..BLOCK / 2 {
        nibbles[place(c, k)] = block[k] & 15 | block[k + BLOCK / 2] << 4;
    }
}

fn nibble(nibbles: &[u8], c: usize, k: usize) -> u8 {
    let byte = nibbles[place(c, k % (BLOCK / 2))];
    if k < BLOCK / 2 { byte & 15 } else { byte >> 4 }
}

fn half_at(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

/// Unpacks a block whose inputs 0..16 are in the low halves of 16 bytes and 16..32 in the high halves.
fn split(bytes: &[u8]) -> Block {
    std::array::from_fn(|k| bytes[k % 16] >> (k / 16 * 4) & 15)
}

/// `Q8_0`: signed quants.
pub(super) struct Q8_0;

impl Format for Q8_0 {
    type Quants = Bytes<{ BLOCK * WIDTH }>;
    type Scales = [f16; WIDTH];

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), [f16::ZERO; _])
    }

    fn set(data: &[u8], _: usize, c: usize, quants: &mut Self::Quants, scales: &mut Self::Scales) {
        let (d, q) = data.split_at(2);
        scales[c] = half_at(d);
        for (k, &q) in q.iter().enumerate() {
            quants.0[place(c, k)] = q;
        }
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        i32::from(quants.0[place(c, k)] as i8)
    }

    fn scale(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales[c].to_f32()
    }
}

/// `Q4_0`.
pub(super) struct Q4_0;

impl Format for Q4_0 {
    type Quants = Bytes<{ BLOCK * WIDTH / 2 }>;
    type Scales = [f16; WIDTH];
    const BIAS: i32 = 8;

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), [f16::ZERO; _])
    }

    fn set(data: &[u8], _: usize, c: usize, quants: &mut Self::Quants, scales: &mut Self::Scales) {
        let (d, q) = data.split_at(2);
        scales[c] = half_at(d);
        set_nibbles(&mut quants.0, c, &split(q));
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        nibble(&quants.0, c, k).into()
    }

    fn scale(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales[c].to_f32()
    }
}

/// Scale and offset of eight outputs.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Affine {
    pub d: [f16; WIDTH],
    pub m: [f16; WIDTH],
}

const NO_AFFINE: Affine = Affine {
    d: [f16::ZERO; WIDTH],
    m: [f16::ZERO; WIDTH],
};

/// `Q4_1`.
pub(super) struct Q4_1;

impl Format for Q4_1 {
    type Quants = Bytes<{ BLOCK * WIDTH / 2 }>;
    type Scales = Affine;
    const OFFSET: bool = true;

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), NO_AFFINE)
    }

    fn set(data: &[u8], _: usize, c: usize, quants: &mut Self::Quants, scales: &mut Self::Scales) {
        (scales.d[c], scales.m[c]) = (half_at(data), half_at(&data[2..]));
        set_nibbles(&mut quants.0, c, &split(&data[4..]));
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        nibble(&quants.0, c, k).into()
    }

    fn scale(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales.d[c].to_f32()
    }

    fn offset(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales.m[c].to_f32()
    }
}

/// Bytes of a tile with 5 bits: the nibbles, then the fifth bits. Bit `v` of byte `4 c + t` of the latter
/// belongs to input `4 v + t` of output `c`.
const FIVE: usize = BLOCK * WIDTH * 5 / 8;
const NIBBLES: usize = BLOCK * WIDTH / 2;

fn set_five(quants: &mut [u8; FIVE], c: usize, block: &Block) {
    set_nibbles(&mut quants[..NIBBLES], c, block);
    for (k, q) in block.iter().enumerate() {
        quants[NIBBLES + 4 * c + k % 4] |= (q >> 4 & 1) << (k / 4);
    }
}

fn five(quants: &[u8; FIVE], c: usize, k: usize) -> i32 {
    let bit = quants[NIBBLES + 4 * c + k % 4] >> (k / 4) & 1;
    i32::from(nibble(quants, c, k) | bit << 4)
}

/// `Q5_1`.
pub(super) struct Q5_1;

impl Format for Q5_1 {
    type Quants = Bytes<FIVE>;
    type Scales = Affine;
    const OFFSET: bool = true;

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), NO_AFFINE)
    }

    fn set(data: &[u8], _: usize, c: usize, quants: &mut Self::Quants, scales: &mut Self::Scales) {
        (scales.d[c], scales.m[c]) = (half_at(data), half_at(&data[2..]));
        let high = u32::from_le_bytes([data[4], data[5], data[6], data[7]]);
        let mut block = split(&data[8..]);
        for (k, q) in block.iter_mut().enumerate() {
            *q |= ((high >> k & 1) as u8) << 4;
        }
        set_five(&mut quants.0, c, &block);
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        five(&quants.0, c, k)
    }

    fn scale(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales.d[c].to_f32()
    }

    fn offset(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales.m[c].to_f32()
    }
}

/// Scales of eight blocks of eight outputs in `Q4_K` and `Q5_K`: `scale = d * sc`,
/// `offset = -m * mn`.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub(super) struct ScalesK {
    pub d: [f16; WIDTH],
    pub m: [f16; WIDTH],
    pub sc: [[u8; WIDTH]; SUPER / BLOCK],
    pub mn: [[u8; WIDTH]; SUPER / BLOCK],
}

const NO_SCALES_K: ScalesK = ScalesK {
    d: [f16::ZERO; WIDTH],
    m: [f16::ZERO; WIDTH],
    sc: [[0; WIDTH]; SUPER / BLOCK],
    mn: [[0; WIDTH]; SUPER / BLOCK],
};

impl ScalesK {
    /// Reads the first 16 bytes of a block: d, m, and eight pairs of 6-bit values in 12 bytes.
    fn set(&mut self, data: &[u8], sub: usize, c: usize) {
        (self.d[c], self.m[c]) = (half_at(data), half_at(&data[2..]));
        let s = &data[4..16];
        (self.sc[sub][c], self.mn[sub][c]) = if sub < 4 {
            (s[sub] & 63, s[sub + 4] & 63)
        } else {
            (
                s[sub + 4] & 15 | s[sub - 4] >> 6 << 4,
                s[sub + 4] >> 4 | s[sub] >> 6 << 4,
            )
        };
    }

    fn scale(&self, sub: usize, c: usize) -> f32 {
        self.d[c].to_f32() * f32::from(self.sc[sub][c])
    }

    fn offset(&self, sub: usize, c: usize) -> f32 {
        -(self.m[c].to_f32() * f32::from(self.mn[sub][c]))
    }
}

/// The low bits of block `sub`. Blocks are stored in pairs, one in the low and one in the high halves.
fn low_bits_k(nibbles: &[u8], sub: usize) -> Block {
    std::array::from_fn(|k| nibbles[sub / 2 * BLOCK + k] >> (sub % 2 * 4) & 15)
}

/// `Q4_K`.
pub(super) struct Q4K;

impl Format for Q4K {
    type Quants = Bytes<{ BLOCK * WIDTH / 2 }>;
    type Scales = ScalesK;
    const SPAN: usize = SUPER / BLOCK;
    const OFFSET: bool = true;

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), NO_SCALES_K)
    }

    fn set(data: &[u8], sub: usize, c: usize, q: &mut Self::Quants, scales: &mut Self::Scales) {
        scales.set(data, sub, c);
        set_nibbles(&mut q.0, c, &low_bits_k(&data[16..], sub));
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        nibble(&quants.0, c, k).into()
    }

    fn scale(scales: &Self::Scales, sub: usize, c: usize) -> f32 {
        scales.scale(sub, c)
    }

    fn offset(scales: &Self::Scales, sub: usize, c: usize) -> f32 {
        scales.offset(sub, c)
    }
}

/// `Q5_K`.
pub(super) struct Q5K;

impl Format for Q5K {
    type Quants = Bytes<FIVE>;
    type Scales = ScalesK;
    const SPAN: usize = SUPER / BLOCK;
    const OFFSET: bool = true;

    fn empty() -> (Self::Quants, Self::Scales) {
        (Bytes([0; _]), NO_SCALES_K)
    }

    fn set(data: &[u8], sub: usize, c: usize, q: &mut Self::Quants, scales: &mut Self::Scales) {
        scales.set(data, sub, c);
        let (high, low) = data[16..].split_at(BLOCK);
        let mut block = low_bits_k(low, sub);
        for (q, high) in block.iter_mut().zip(high) {
            *q |= (high >> sub & 1) << 4;
        }
        set_five(&mut q.0, c, &block);
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        five(&quants.0, c, k)
    }

    fn scale(scales: &Self::Scales, sub: usize, c: usize) -> f32 {
        scales.scale(sub, c)
    }

    fn offset(scales: &Self::Scales, sub: usize, c: usize) -> f32 {
        scales.offset(sub, c)
    }
}

/// Scales of eight blocks of eight outputs in `Q6_K`: one f16, and an integer per half block.
#[repr(C, align(32))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales6K {
    pub sc: [[[i8; 2]; WIDTH]; SUPER / BLOCK],
    pub d: [f16; WIDTH],
}

/// `Q6_K`. A tile holds the nibbles, then the upper two bits in two vectors. Byte `4 c + t` of the first
/// has, from the low end, those of vectors 0, 1, 4 and 5; the second has those of 2, 3, 6 and 7.
pub(super) struct Q6K;

const SIX: usize = BLOCK * WIDTH * 6 / 8;

/// The byte and the shift of the upper bits of input `k`.
fn place_six(c: usize, k: usize) -> (usize, usize) {
    let v = k / 4;
    (
        NIBBLES + v % 4 / 2 * 32 + 4 * c + k % 4,
        (v / 4 * 2 + v % 2) * 2,
    )
}

impl Format for Q6K {
    type Quants = Bytes<SIX>;
    type Scales = Scales6K;
    const SPAN: usize = SUPER / BLOCK;
    const BIAS: i32 = 32;

    fn empty() -> (Self::Quants, Self::Scales) {
        let scales = Scales6K {
            sc: [[[0; 2]; WIDTH]; _],
            d: [f16::ZERO; _],
        };
        (Bytes([0; _]), scales)
    }

    fn set(data: &[u8], sub: usize, c: usize, q: &mut Self::Quants, scales: &mut Self::Scales) {
        // Two runs of 128 inputs, each with 64 bytes of nibbles and 32 bytes of bit pairs.
        let (run, part) = (sub / 4, sub % 4);
        let (low, high) = (&data[run * 64..], &data[128 + run * 32..]);
        let block: Block = std::array::from_fn(|k| {
            let low = low[part % 2 * 32 + k] >> (part / 2 * 4) & 15;
            low | (high[k] >> (2 * part) & 3) << 4
        });
        scales.d[c] = half_at(&data[208..]);
        scales.sc[sub][c] = [0, 1].map(|half| data[192 + 2 * sub + half] as i8);
        set_nibbles(&mut q.0[..NIBBLES], c, &block);
        for (k, value) in block.iter().enumerate() {
            let (byte, shift) = place_six(c, k);
            q.0[byte] |= (value >> 4) << shift;
        }
    }

    fn quant(quants: &Self::Quants, c: usize, k: usize) -> i32 {
        let (byte, shift) = place_six(c, k);
        i32::from(nibble(&quants.0, c, k) | (quants.0[byte] >> shift & 3) << 4)
    }

    fn scale(scales: &Self::Scales, _: usize, c: usize) -> f32 {
        scales.d[c].to_f32()
    }

    fn factor(scales: &Self::Scales, sub: usize, c: usize, half: usize) -> i32 {
        scales.sc[sub][c][half].into()
    }
}
