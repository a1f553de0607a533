//! The layout of blocks of quantized weights for the kernels, and their meaning.
//!
//! All formats have blocks of 32 inputs. A value is `scale * factor * (quant - BIAS) + offset`, where the
//! quant is unsigned; in some formats it is the number of a value in a table instead. Scale and offset
//! belong to the block, the factor (an integer) to half a block. A tile holds one block of each of 16
//! outputs. One vector of 64 bytes holds four inputs of 16 outputs, to be multiplied with four activations
//! that are broadcast to all outputs: vector `v` has inputs `4 v .. 4 v + 4`. Formats with fewer than 8 bits
//! keep vector `v` in the low halves and vector `v + 4` in the high halves of the same bytes, and store the
//! bits above the fourth separately. Instructions with 32 bytes read the halves of a vector, which are
//! outputs 0..8 and 8..16.
//!
//! A record holds the scales of [`ScaleLayout::SPAN`] blocks of 16 outputs, then their tiles. All parts are
//! multiples of 64 bytes, so a weight is one stream of aligned vectors.

use super::block_type::BlockType;
use half::f16;
use std::array::from_fn;

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

    /// Stores the scales of the block that `data` holds, or of block `sub` of the 8 that it holds.
    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]);

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32;

    fn offset(_scales: &[u8], _sub: usize, _c: usize) -> f32 {
        0.
    }

    /// Factor of inputs `16 half .. 16 half + 16`.
    fn factor(_scales: &[u8], _sub: usize, _c: usize, _half: usize) -> i32 {
        1
    }
}

/// A format of quantized weights; see `formats!`.
pub(super) trait Format: 'static {
    type Scales: ScaleLayout;
    /// Bits per quant: 4, 5, 6 or 8. Vector code expects factors with 6 bits, and with no others.
    const BITS: usize;
    /// The value that is subtracted from quants.
    const BIAS: i32;
    /// The values that quants of 4 bits stand for; `None` = they are numbers.
    const TABLE: Option<&'static [i8; 16]>;
    /// The CUDA kernels; `None` = there are none.
    const DEVICE: Option<DeviceFormat> = None;
    /// The values of `TABLE` plus 128.
    const BIASED: [u8; 16] = biased(Self::TABLE);
    /// Bits of what is multiplied: of the values that quants stand for, plus 128, or of the quants.
    const VALUE_BITS: usize = if Self::TABLE.is_some() { 8 } else { Self::BITS };
    /// Blocks per record, and bytes of its scales.
    const SPAN: usize = Self::Scales::SPAN;
    const SCALES: usize = Self::Scales::BYTES;
    /// Bytes of a tile.
    const TILE: usize = BLOCK * WIDTH * Self::BITS / 8;
    /// Bytes of a record.
    const RECORD: usize = Self::SCALES + Self::SPAN * Self::TILE;

    /// The quants of the block that `data` holds, or of block `sub` of the 8 that it holds.
    fn quants(data: &[u8], sub: usize) -> Block;
}

/// What the CUDA kernels of a format read besides quants.
#[derive(Clone, Copy)]
pub(super) struct DeviceFormat {
    pub scales: DeviceScales,
    #[cfg(feature = "cuda")]
    pub ptx: &'static str,
}

/// The scales of a format on a GPU; see `cuda/unpack.cuh`.
#[derive(Clone, Copy)]
pub(super) enum DeviceScales {
    /// A half for each block of 32.
    Block,
    /// A scale and an offset.
    BlockOffset,
    /// A power of two.
    BlockExponent,
    /// Factors of a scale that 256 inputs share.
    Super,
    /// Factors of a scale and an offset that 256 inputs share.
    SuperOffset,
    /// Factors for each 16 inputs, of a scale that 256 inputs share.
    HalfBlock,
    /// An f32 for each 64.
    Unit,
    /// A float of 8 bits for each 16, and a factor of all scales.
    Group,
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

/// A half for each of two blocks.
pub(super) struct BlockScales;

impl ScaleLayout for BlockScales {
    const SPAN: usize = 2;
    const BYTES: usize = Self::SPAN * HALVES;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(data, scales, sub * HALVES, c);
    }

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
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

    fn scale(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, 0, c)
    }

    fn offset(scales: &[u8], _: usize, c: usize) -> f32 {
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

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[Self::SC + sub * WIDTH + c])
    }

    fn offset(scales: &[u8], sub: usize, c: usize) -> f32 {
        -(half(scales, Self::M, c) * f32::from(scales[Self::MN + sub * WIDTH + c]))
    }
}

/// 16 halves `d`, 32 unused bytes, then for each half block 16 signed bytes.
pub(super) struct HalfBlockScales;

impl HalfBlockScales {
    /// The place of the factors of a half block among the scales.
    pub const fn factors(sub: usize, half: usize) -> usize {
        2 * HALVES + (2 * sub + half) * WIDTH
    }
}

impl ScaleLayout for HalfBlockScales {
    const SPAN: usize = SUPER / BLOCK;
    const BYTES: usize = Self::factors(Self::SPAN, 0);
    const FACTORS: bool = true;

    fn read(data: &[u8], sub: usize, c: usize, scales: &mut [u8]) {
        copy_half(&data[208..], scales, 0, c);
        for half in 0..2 {
            scales[Self::factors(sub, half) + c] = data[192 + 2 * sub + half];
        }
    }

    fn scale(scales: &[u8], _: usize, c: usize) -> f32 {
        half(scales, 0, c)
    }

    fn factor(scales: &[u8], sub: usize, c: usize, half: usize) -> i32 {
        i32::from(scales[Self::factors(sub, half) + c] as i8)
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

    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        half(scales, 0, c) * f32::from(scales[Self::factors(sub) + c] as i8)
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
    fn scale(scales: &[u8], sub: usize, c: usize) -> f32 {
        let exponent = u32::from(scales[sub * WIDTH + c]);
        0.5 * f32::from_bits((exponent << 23).max(Self::SMALLEST))
    }
}

/// Declares the formats: types that are [`Format`]s, [`TileFormat`], which lists them, and `with_format!`, which runs
/// the same code for any of them. A row has bits, bias, scales, table, the scales on a GPU with the file in `cuda/` that
/// has the kernels, and [`Format::quants`].
macro_rules! formats {
    ($dollar:tt $($format:ident: $bits:literal, $bias:literal, $scales:ty, $table:expr
        $(, $device:ident in $file:ident)? => $quants:expr;)*) => {
        $(
            pub(super) struct $format;

            impl Format for $format {
                type Scales = $scales;
                const BITS: usize = $bits;
                const BIAS: i32 = $bias;
                const TABLE: Option<&'static [i8; 16]> = $table;
                $(const DEVICE: Option<DeviceFormat> = Some(DeviceFormat {
                    scales: DeviceScales::$device,
                    #[cfg(feature = "cuda")]
                    ptx: crate::gpu::$file,
                });)?

                fn quants(data: &[u8], sub: usize) -> Block {
                    let quants: fn(&[u8], usize) -> Block = $quants;
                    quants(data, sub)
                }
            }
        )*

        /// A format of tiles.
        #[derive(Debug, Clone, Copy)]
        pub(super) enum TileFormat {
            $($format,)*
        }

        impl TileFormat {
            /// The format that holds blocks of this type without loss; `None` if there is none.
            pub fn of(kind: BlockType) -> Option<Self> {
                let held = match kind {
                    BlockType::Q5_0 => BlockType::Q5_1,
                    BlockType::Q3K => BlockType::Q6K,
                    _ => kind,
                };
                [$(Self::$format),*].into_iter().find(|format| format.block_type() == held)
            }

            /// The type whose blocks are held as they are.
            pub fn block_type(self) -> BlockType {
                match self {
                    $(Self::$format => BlockType::$format,)*
                }
            }
        }

        macro_rules! with_format {
            ($dollar tiles:expr, $dollar name:ident => $dollar body:expr) => {
                match $dollar tiles {
                    $($crate::quant::formats::TileFormat::$format => {
                        type $dollar name = $crate::quant::formats::$format;
                        $dollar body
                    })*
                }
            };
        }
    };
}

formats! { $
    Q8_0: 8, 128, BlockScales, None, Block in Q8_0 => |data, _| from_fn(|k| data[2 + k] ^ 0x80);
    Q4_0: 4, 8, BlockScales, None, Block in Q4_0 => |data, _| split(&data[2..]);
    Q4_1: 4, 0, BlockOffsets, None, BlockOffset in Q4_1 => |data, _| split(&data[4..]);
    Q5_1: 5, 0, BlockOffsets, None, BlockOffset in Q5_1 => five_bits;
    Q4K: 4, 0, SuperOffsets, None, SuperOffset in Q4_K => |data, sub| low_bits_k(&data[16..], sub);
    Q5K: 5, 0, SuperOffsets, None, SuperOffset in Q5_K => five_bits_k;
    Q6K: 6, 32, HalfBlockScales, None, HalfBlock in Q6_K => six_bits_k;
    Iq4Nl: 4, 0, BlockScales, Some(&IQ4), Block in IQ4_NL => |data, _| split(&data[2..]);
    Iq4Xs: 4, 0, SuperScales, Some(&IQ4), Super in IQ4_XS => |data, sub| split(&data[8 + sub * BLOCK / 2..]);
    Mxfp4: 4, 0, Exponents, Some(&E2M1), BlockExponent in MXFP4 => |data, _| split(&data[1..]);
}
pub(super) use with_format;

/// Unpacks a block whose inputs 0..16 are in the low halves of 16 bytes and 16..32 in the high halves.
fn split(bytes: &[u8]) -> Block {
    from_fn(|k| bytes[k % 16] >> (k / 16 * 4) & 15)
}

/// Quants of `Q5_1`: their fifth bits are before the others.
fn five_bits(data: &[u8], _: usize) -> Block {
    let high = u32::from_le_bytes([data[4], data[5], data[6], data[7]]);
    let mut block = split(&data[8..]);
    for (k, q) in block.iter_mut().enumerate() {
        *q |= ((high >> k & 1) as u8) << 4;
    }
    block
}

/// The low bits of block `sub`. Blocks are stored in pairs, one in the low and one in the high halves.
fn low_bits_k(nibbles: &[u8], sub: usize) -> Block {
    from_fn(|k| nibbles[sub / 2 * BLOCK + k] >> (sub % 2 * 4) & 15)
}

/// Quants of `Q5_K`.
fn five_bits_k(data: &[u8], sub: usize) -> Block {
    let (high, low) = data[16..].split_at(BLOCK);
    let mut block = low_bits_k(low, sub);
    for (q, high) in block.iter_mut().zip(high) {
        *q |= (high >> sub & 1) << 4;
    }
    block
}

/// Quants of `Q6_K`: two runs of 128 inputs, each with 64 bytes of nibbles and 32 bytes of bit pairs.
fn six_bits_k(data: &[u8], sub: usize) -> Block {
    let (run, part) = (sub / 4, sub % 4);
    let (low, high) = (&data[run * 64..], &data[128 + run * 32..]);
    from_fn(|k| {
        let low = low[part % 2 * 32 + k] >> (part / 2 * 4) & 15;
        low | (high[k] >> (2 * part) & 3) << 4
    })
}
