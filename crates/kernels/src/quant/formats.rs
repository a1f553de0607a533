//! The layout of blocks of quantized weights for the kernels, and their meaning.
//!
//! All formats have blocks of 32 inputs. A value is `scale * factor * (quant - BIAS) + offset`, where the
//! quant is unsigned; in some formats it is the number of a value in a table instead. Scale and offset
//! belong to the block, or to half a block, as the factor (an integer) does. A tile holds one block of each of 16
//! outputs. One vector of 64 bytes holds four inputs of 16 outputs, to be multiplied with four activations
//! that are broadcast to all outputs: vector `v` has inputs `4 v .. 4 v + 4`. Formats with 4 to 6 bits
//! keep vector `v` in the low halves and vector `v + 4` in the high halves of the same bytes, and store the
//! bits above the fourth separately. With 2 bits, the same bytes have vectors `v`, `v + 2`, `v + 4` and `v + 6`.
//! Instructions with 32 bytes read the halves of a vector, which are outputs 0..8 and 8..16.
//!
//! A record holds the scales of [`ScaleLayout::SPAN`] blocks of 16 outputs, then their tiles. All parts are
//! multiples of 64 bytes, so a weight is one stream of aligned vectors.

use super::block_type::BlockType;
use super::kind::QuantKind;
pub use super::scales::BLOCK;
pub(super) use super::scales::{
    BlockOffsets, BlockScales, Exponents, GroupScales, HalfBlockEighths, HalfBlockOffsets,
    HalfBlockScales, SUPER, ScaleLayout, SuperEighths, SuperOffsets, SuperScales, VECTOR, WIDTH,
    of_half,
};
use std::array::from_fn;

/// Values of the quants of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of the quants of `MXFP4`, which are floats with two bits of exponent and one of mantissa
/// (OCP Microscaling Formats 1.0).
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Eight times the magnitudes of `IQ3_S`. A code of these tables is a magnitude's number, and a sign above it.
const IQ3_S: [i8; 16] = signed([8, 24, 40, 56, 72, 88, 104, 120]);
/// Twice the magnitudes of `IQ3_XXS`, of which values are quarters.
const IQ3_XXS: [i8; 16] = signed([8, 24, 40, 56, 72, 88, 104, 124]);
/// The magnitudes of the formats `IQ2`, of which values are eighths, and eight times those of the formats `IQ1`.
const IQ2: [i8; 16] = signed([8, 25, 43, 1, 7, 9, 0, 0]);

/// Magnitudes, then their negatives.
const fn signed(magnitudes: [i8; 8]) -> [i8; 16] {
    let mut values = [0; 16];
    let mut i = 0;
    while i < 8 {
        values[i] = magnitudes[i];
        values[i + 8] = -magnitudes[i];
        i += 1;
    }
    values
}

/// Bits of values whose halves of a block are multiplied apart, plus a bias.
const fn bits_apart(table: &[i8; 16]) -> usize {
    let (mut bits, mut i) = (6, 0);
    while i < 16 {
        match table[i] {
            -32..=31 => (),
            -64..=63 => bits = 7,
            _ => panic!("a value does not fit a bias of 64"),
        }
        i += 1;
    }
    bits
}

/// Values plus `bias`, unsigned, as instructions look them up.
const fn biased(table: Option<&[i8; 16]>, bias: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    if let Some(table) = table {
        let mut i = 0;
        while i < 16 {
            bytes[i] = table[i].cast_unsigned().wrapping_add(bias);
            i += 1;
        }
    }
    bytes
}

/// The unsigned quants of one block.
pub(super) type Block = [u8; BLOCK];

/// A format of quantized weights; see `formats!`.
pub(super) trait Format: 'static {
    type Scales: ScaleLayout;
    /// Bits per quant: 2, 4, 5, 6 or 8. Vector code expects factors with 6 bits, and with no others, and scales of halves
    /// with 2 and 4 bits, without a bias.
    const BITS: usize;
    /// The value that is subtracted from quants.
    const BIAS: i32;
    /// The values that quants of 4 bits stand for; `None` = they are numbers.
    const TABLE: Option<&'static [i8; 16]>;
    /// The CUDA kernels; `None` = there are none.
    const DEVICE: Option<DeviceFormat> = None;
    /// Whether the sums of halves of a block are multiplied apart.
    const APART: bool = Self::Scales::FACTORS || Self::Scales::BY_HALF;
    /// Bits of what is multiplied: of the values that quants stand for, plus a bias, or of the quants. Of halves of a block
    /// the bias is 32, for which sums of halves are known, or 64, and otherwise 128.
    const VALUE_BITS: usize = match Self::TABLE {
        Some(table) if Self::APART => bits_apart(table),
        Some(_) => 8,
        None => Self::BITS,
    };
    /// The values of `TABLE` plus their bias.
    const BIASED: [u8; 16] = biased(Self::TABLE, 1 << (Self::VALUE_BITS - 1));
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
    /// Factors for each 16 inputs, of a scale and an offset that 256 inputs share.
    HalfBlockOffset,
    /// An f32 for each 64.
    Unit,
    /// A float of 8 bits for each 16, and a factor of all scales.
    Group,
}

/// The type of blocks that hold those of this type without loss, if other ones do.
pub(super) fn held_type(kind: BlockType) -> BlockType {
    match kind {
        BlockType::Q5_0 => BlockType::Q5_1,
        BlockType::Q3K => BlockType::Q6K,
        BlockType::Iq1S => BlockType::Iq2Xxs,
        BlockType::Iq2S | BlockType::Iq1M => BlockType::Iq2Xs,
        _ => kind,
    }
}

/// What a row of `formats!` holds: blocks of its name, or another kind.
macro_rules! kind_of {
    ($format:ident) => {
        QuantKind::Blocks(BlockType::$format)
    };
    ($format:ident $kind:ident) => {
        QuantKind::$kind
    };
}

/// Declares the formats: types that are [`Format`]s, [`TileFormat`], which lists them, and `with_format!`, which runs
/// the same code for any of them. A row has its kind, if that is not blocks of its name, bits, bias, scales, table, the scales on a GPU with the file in `cuda/` that
/// has the kernels, and [`Format::quants`].
macro_rules! formats {
    ($dollar:tt $($format:ident $(= $kind:ident)?: $bits:literal, $bias:literal, $scales:ty, $table:expr
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
                let held = QuantKind::Blocks(held_type(kind));
                [$(Self::$format),*].into_iter().find(|format| format.kind() == held)
            }

            /// What its tiles hold as it is.
            pub fn kind(self) -> QuantKind {
                match self {
                    $(Self::$format => kind_of!($format $($kind)?),)*
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
    Q2K: 2, 0, HalfBlockOffsets, None, HalfBlockOffset in Q2_K => two_bits_k;
    Q4K: 4, 0, SuperOffsets, None, SuperOffset in Q4_K => |data, sub| low_bits_k(&data[16..], sub);
    Q5K: 5, 0, SuperOffsets, None, SuperOffset in Q5_K => five_bits_k;
    Q6K: 6, 32, HalfBlockScales, None, HalfBlock in Q6_K => six_bits_k;
    Iq4Nl: 4, 0, BlockScales, Some(&IQ4), Block in IQ4_NL => |data, _| split(&data[2..]);
    Iq4Xs: 4, 0, SuperScales, Some(&IQ4), Super in IQ4_XS => |data, sub| split(&data[8 + sub * BLOCK / 2..]);
    Iq3S: 4, 0, SuperEighths, Some(&IQ3_S), Super in IQ3_S => codes;
    Iq3Xxs: 4, 0, SuperEighths, Some(&IQ3_XXS), Super in IQ3_XXS => codes;
    Iq2Xxs: 4, 0, SuperEighths, Some(&IQ2), Super in IQ2_XXS => codes;
    Iq2Xs: 4, 0, HalfBlockEighths, Some(&IQ2), HalfBlock in IQ2_XS => codes;
    Mxfp4: 4, 0, Exponents, Some(&E2M1), BlockExponent in MXFP4 => |data, _| split(&data[1..]);
    Nvfp4 = Nvfp4: 4, 0, GroupScales, Some(&E2M1) => |data, _| from_fn(|k| data[6 + k / 2] >> (k % 2 * 4) & 15);
}
pub(super) use with_format;

/// Unpacks a block whose inputs 0..16 are in the low halves of 16 bytes and 16..32 in the high halves.
fn split(bytes: &[u8]) -> Block {
    from_fn(|k| bytes[k % 16] >> (k / 16 * 4) & 15)
}

/// Codes of a block that `codebooks` wrote, after a half and 16 factors.
fn codes(data: &[u8], sub: usize) -> Block {
    split(&data[18 + sub * BLOCK / 2..])
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

/// Quants of `Q2_K`: two runs of 128 inputs, each with 32 bytes of bit pairs, after 16 bytes of factors.
fn two_bits_k(data: &[u8], sub: usize) -> Block {
    let (run, part) = (sub / 4, sub % 4);
    from_fn(|k| data[16 + run * 32 + k] >> (2 * part) & 3)
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
