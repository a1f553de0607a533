//! The formats of quantized weights in memory.

use super::block_type::BlockType;
use candle_core::DType;
use std::fmt;

/// A format of quantized weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantKind {
    /// That of blocks of this type.
    Blocks(BlockType),
    /// Floats of 8 bits with 4 of an exponent (E4M3), and scales in f32.
    Float8,
    /// Floats of 4 bits with 2 of an exponent (E2M1), scales of E4M3 for each 16 of them, and a factor of all scales.
    Nvfp4,
}

#[cfg(feature = "cuda")]
impl QuantKind {
    /// The numbers of formats that GGUF files do not have, as in `cuda/formats.cuh`.
    const FLOAT8: u32 = 256;
    const NVFP4: u32 = 257;

    /// Its number in the kernels.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Blocks(kind) => kind.number(),
            Self::Float8 => Self::FLOAT8,
            Self::Nvfp4 => Self::NVFP4,
        }
    }
}

/// `Q4_1` or `f8e4m3`.
impl fmt::Display for QuantKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(kind) => kind.fmt(f),
            Self::Float8 => f.write_str(DType::F8E4M3.as_str()),
            Self::Nvfp4 => f.write_str("NVFP4"),
        }
    }
}
