//! The types of tensors in GGUF files.

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use std::fmt;

/// The type of a GGUF tensor: floats, or a format of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockType {
    /// 32-bit floats, not quantized.
    F32,
    /// 16-bit IEEE floats, not quantized.
    F16,
    /// bfloat16, not quantized.
    BF16,
    /// 4-bit values in blocks of 32, with an f16 scale.
    Q4_0,
    /// 4-bit values in blocks of 32, with an f16 scale and minimum.
    Q4_1,
    /// 5-bit values in blocks of 32, with an f16 scale.
    Q5_0,
    /// 5-bit values in blocks of 32, with an f16 scale and minimum.
    Q5_1,
    /// 8-bit values in blocks of 32, with an f16 scale.
    Q8_0,
    /// 8-bit values in blocks of 32, with an f16 scale and the f16 product of the scale and the values' sum.
    Q8_1,
    /// 2-bit values in blocks of 256; each 16 have a 4-bit scale and minimum.
    Q2K,
    /// 3-bit values in blocks of 256; each 16 have a 6-bit scale.
    Q3K,
    /// 4-bit values in blocks of 256; each 32 have a 6-bit scale and minimum.
    Q4K,
    /// 5-bit values in blocks of 256; each 32 have a 6-bit scale and minimum.
    Q5K,
    /// 6-bit values in blocks of 256; each 16 have an 8-bit scale.
    Q6K,
    /// 8-bit values in blocks of 256, with an f32 scale and the sum of each 16 values.
    Q8K,
    /// 4-bit indices of a nonlinear codebook in blocks of 32, with an f16 scale.
    Iq4Nl,
    /// 4-bit indices of a nonlinear codebook in blocks of 256; each 32 have a 6-bit scale.
    Iq4Xs,
    /// 4-bit floats (E2M1) in blocks of 32, with a power of two as scale (E8M0).
    Mxfp4,
}

use BlockType::*;

/// Number in a file, type, name, values of a block and bytes of a block. From ggml's `ggml.h` and
/// `ggml-common.h`.
const TYPES: [(u32, BlockType, &str, usize, usize); 18] = [
    (0, F32, "F32", 1, 4),
    (1, F16, "F16", 1, 2),
    (2, Q4_0, "Q4_0", 32, 18),
    (3, Q4_1, "Q4_1", 32, 20),
    (6, Q5_0, "Q5_0", 32, 22),
    (7, Q5_1, "Q5_1", 32, 24),
    (8, Q8_0, "Q8_0", 32, 34),
    (9, Q8_1, "Q8_1", 32, 36),
    (10, Q2K, "Q2_K", 256, 84),
    (11, Q3K, "Q3_K", 256, 110),
    (12, Q4K, "Q4_K", 256, 144),
    (13, Q5K, "Q5_K", 256, 176),
    (14, Q6K, "Q6_K", 256, 210),
    (15, Q8K, "Q8_K", 256, 292),
    (20, Iq4Nl, "IQ4_NL", 32, 18),
    (23, Iq4Xs, "IQ4_XS", 256, 136),
    (30, BF16, "BF16", 1, 2),
    (39, Mxfp4, "MXFP4", 32, 17),
];

/// Numbers and names of types that are not supported.
const UNSUPPORTED: [(u32, &str); 17] = [
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl BlockType {
    /// The type that a file has under this number.
    ///
    /// # Errors
    /// The name of the type, if it has one, and those that are supported.
    pub fn of_number(number: u32) -> Result<Self, String> {
        if let Some(found) = TYPES.iter().find(|found| found.0 == number) {
            return Ok(found.1);
        }
        let named = UNSUPPORTED.iter().find(|(other, _)| *other == number);
        let name = named.map_or_else(|| format!("number {number}"), |(_, name)| (*name).into());
        let known: Vec<_> = TYPES.iter().map(|known| known.2).collect();
        let known = known.join(", ");
        Err(format!("type {name} is not supported: only {known} are"))
    }

    fn row(self) -> &'static (u32, Self, &'static str, usize, usize) {
        // All are there.
        let found = TYPES.iter().find(|row| row.1 == self);
        found.unwrap_or(&TYPES[0])
    }

    /// llama.cpp's name: `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Values per block, along the inputs.
    pub fn block_size(self) -> usize {
        self.row().3
    }

    /// Bytes per block.
    pub fn type_size(self) -> usize {
        self.row().4
    }

    /// The dtype of a tensor that is not quantized; `None` if it is quantized.
    pub fn float(self) -> Option<DType> {
        match self {
            F32 => Some(DType::F32),
            F16 => Some(DType::F16),
            BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// candle's type; `None` if it has none.
    pub fn candles(self) -> Option<GgmlDType> {
        Some(match self {
            F32 => GgmlDType::F32,
            F16 => GgmlDType::F16,
            BF16 => GgmlDType::BF16,
            Q4_0 => GgmlDType::Q4_0,
            Q4_1 => GgmlDType::Q4_1,
            Q5_0 => GgmlDType::Q5_0,
            Q5_1 => GgmlDType::Q5_1,
            Q8_0 => GgmlDType::Q8_0,
            Q8_1 => GgmlDType::Q8_1,
            Q2K => GgmlDType::Q2K,
            Q3K => GgmlDType::Q3K,
            Q4K => GgmlDType::Q4K,
            Q5K => GgmlDType::Q5K,
            Q6K => GgmlDType::Q6K,
            Q8K => GgmlDType::Q8K,
            Iq4Nl | Iq4Xs | Mxfp4 => return None,
        })
    }
}

impl From<GgmlDType> for BlockType {
    fn from(kind: GgmlDType) -> Self {
        match kind {
            GgmlDType::F32 => F32,
            GgmlDType::F16 => F16,
            GgmlDType::BF16 => BF16,
            GgmlDType::Q4_0 => Q4_0,
            GgmlDType::Q4_1 => Q4_1,
            GgmlDType::Q5_0 => Q5_0,
            GgmlDType::Q5_1 => Q5_1,
            GgmlDType::Q8_0 => Q8_0,
            GgmlDType::Q8_1 => Q8_1,
            GgmlDType::Q2K => Q2K,
            GgmlDType::Q3K => Q3K,
            GgmlDType::Q4K => Q4K,
            GgmlDType::Q5K => Q5K,
            GgmlDType::Q6K => Q6K,
            GgmlDType::Q8K => Q8K,
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_candles_and_others_are_refused_by_name() {
        for (number, kind, name, block, bytes) in TYPES {
            assert_eq!(BlockType::of_number(number), Ok(kind));
            assert_eq!((kind.name(), kind.block_size()), (name, block));
            if let Some(candles) = kind.candles() {
                assert_eq!(BlockType::from(candles), kind);
                assert_eq!((candles.block_size(), candles.type_size()), (block, bytes));
            }
        }
        let error = BlockType::of_number(16).unwrap_err();
        assert!(
            error.starts_with("type IQ2_XXS is not supported: only F32, F16"),
            "{error}"
        );
        assert!(BlockType::of_number(99).unwrap_err().contains("number 99"));
    }
}
