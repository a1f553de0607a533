//! The types of tensors in GGUF files.

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use std::fmt;

/// Declares the types and their rows, from which all else follows. A row has the type's number in a file, its name,
/// values and bytes of a block (from ggml's `ggml.h` and `ggml-common.h`), the floats of a block, and candle's type if
/// there is one.
macro_rules! block_types {
    ($($(#[$doc:meta])* $kind:ident: $number:literal $name:literal $block_size:literal $type_size:literal,
        $floats:expr $(, $candles:ident)?;)*) => {
        /// The type of a GGUF tensor: floats, or a format of blocks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum BlockType {
            $($(#[$doc])* $kind,)*
        }

        /// In the order of [`BlockType`].
        const ROWS: &[Row] = &[$(Row {
            kind: BlockType::$kind,
            number: $number,
            name: $name,
            block_size: $block_size,
            type_size: $type_size,
            floats: $floats,
            candles: &[$(GgmlDType::$candles)?],
        },)*];

        impl From<GgmlDType> for BlockType {
            fn from(kind: GgmlDType) -> Self {
                match kind {
                    $($(GgmlDType::$candles => Self::$kind,)?)*
                }
            }
        }
    };
}

block_types! {
    /// 32-bit floats, not quantized.
    F32: 0 "F32" 1 4, All(DType::F32), F32;
    /// 16-bit IEEE floats, not quantized.
    F16: 1 "F16" 1 2, All(DType::F16), F16;
    /// bfloat16, not quantized.
    BF16: 30 "BF16" 1 2, All(DType::BF16), BF16;
    /// 4-bit values in blocks of 32, with an f16 scale.
    Q4_0: 2 "Q4_0" 32 18, Halves(&[0]), Q4_0;
    /// 4-bit values in blocks of 32, with an f16 scale and minimum.
    Q4_1: 3 "Q4_1" 32 20, Halves(&[0, 2]), Q4_1;
    /// 5-bit values in blocks of 32, with an f16 scale.
    Q5_0: 6 "Q5_0" 32 22, Halves(&[0]), Q5_0;
    /// 5-bit values in blocks of 32, with an f16 scale and minimum.
    Q5_1: 7 "Q5_1" 32 24, Halves(&[0, 2]), Q5_1;
    /// 8-bit values in blocks of 32, with an f16 scale.
    Q8_0: 8 "Q8_0" 32 34, Halves(&[0]), Q8_0;
    /// 8-bit values in blocks of 32, with an f16 scale and the f16 product of the scale and the values' sum.
    Q8_1: 9 "Q8_1" 32 36, Halves(&[0, 2]), Q8_1;
    /// 2-bit values in blocks of 256; each 16 have a 4-bit scale and minimum.
    Q2K: 10 "Q2_K" 256 84, Halves(&[80, 82]), Q2K;
    /// 3-bit values in blocks of 256; each 16 have a 6-bit scale.
    Q3K: 11 "Q3_K" 256 110, Halves(&[108]), Q3K;
    /// 4-bit values in blocks of 256; each 32 have a 6-bit scale and minimum.
    Q4K: 12 "Q4_K" 256 144, Halves(&[0, 2]), Q4K;
    /// 5-bit values in blocks of 256; each 32 have a 6-bit scale and minimum.
    Q5K: 13 "Q5_K" 256 176, Halves(&[0, 2]), Q5K;
    /// 6-bit values in blocks of 256; each 16 have an 8-bit scale.
    Q6K: 14 "Q6_K" 256 210, Halves(&[208]), Q6K;
    /// 8-bit values in blocks of 256, with an f32 scale and the sum of each 16 values.
    Q8K: 15 "Q8_K" 256 292, Single(0), Q8K;
    /// 4-bit indices of a nonlinear codebook in blocks of 32, with an f16 scale.
    Iq4Nl: 20 "IQ4_NL" 32 18, Halves(&[0]);
    /// 4-bit indices of a nonlinear codebook in blocks of 256; each 32 have a 6-bit scale.
    Iq4Xs: 23 "IQ4_XS" 256 136, Halves(&[0]);
    /// 3-bit magnitudes by a codebook, and signs, in blocks of 256; each 32 have a 4-bit scale.
    Iq3S: 21 "IQ3_S" 256 110, Halves(&[0]);
    /// The same with fewer signs and groups of magnitudes.
    Iq3Xxs: 18 "IQ3_XXS" 256 98, Halves(&[0]);
    /// Three magnitudes by a codebook, and signs, in blocks of 256; each 16 have a 4-bit scale.
    Iq2S: 22 "IQ2_S" 256 82, Halves(&[0]);
    /// The same with fewer signs and groups of magnitudes.
    Iq2Xs: 17 "IQ2_XS" 256 74, Halves(&[0]);
    /// The same with the fewest; each 32 have a 4-bit scale.
    Iq2Xxs: 16 "IQ2_XXS" 256 66, Halves(&[0]);
    /// -1, 0 and 1 by a codebook in blocks of 256; each 32 have a 3-bit scale and a shift by an eighth up or down.
    Iq1S: 19 "IQ1_S" 256 50, Halves(&[0]);
    /// The same; each 16 have a scale, and each 8 a shift.
    Iq1M: 29 "IQ1_M" 256 56, Nibbles([49, 51, 53, 55]);
    /// 4-bit floats (E2M1) in blocks of 32, with a power of two as scale (E8M0).
    Mxfp4: 39 "MXFP4" 32 17, Exponent(0);
}

/// What a file knows about a type; see `block_types`.
struct Row {
    kind: BlockType,
    number: u32,
    name: &'static str,
    block_size: usize,
    type_size: usize,
    floats: Floats,
    /// At most one.
    candles: &'static [GgmlDType],
}

/// The floats of a block, each of which has to be finite.
#[derive(Debug, Clone, Copy)]
pub enum Floats {
    /// All values, which are not quantized.
    All(DType),
    /// f16 numbers, from these bytes on.
    Halves(&'static [usize]),
    /// An f16 number, in the upper halves of these bytes, lowest bits first.
    Nibbles([usize; 4]),
    /// An f32 number, from this byte on.
    Single(usize),
    /// A power of two (E8M0), in this byte.
    Exponent(usize),
}

use Floats::{All, Exponent, Halves, Nibbles, Single};

impl Floats {
    /// The f16 number of [`Floats::Nibbles`].
    pub fn of_nibbles(block: &[u8], places: [usize; 4]) -> [u8; 2] {
        let [a, b, c, d] = places.map(|at| block[at] >> 4);
        [a | b << 4, c | d << 4]
    }
}

/// Numbers and names of types that are not supported.
const UNSUPPORTED: [(u32, &str); 10] = [
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
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
        if let Some(row) = ROWS.iter().find(|row| row.number == number) {
            return Ok(row.kind);
        }
        let named = UNSUPPORTED.iter().find(|(other, _)| *other == number);
        let name = named.map_or_else(|| format!("number {number}"), |(_, name)| (*name).into());
        let mut known: Vec<_> = ROWS.iter().map(|row| (row.number, row.name)).collect();
        known.sort_unstable();
        let known: Vec<_> = known.into_iter().map(|(_, name)| name).collect();
        let known = known.join(", ");
        Err(format!("type {name} is not supported: only {known} are"))
    }

    /// Its number in a file.
    pub fn number(self) -> u32 {
        self.row().number
    }

    /// All types.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.kind)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// llama.cpp's name: `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Values per block, along the inputs.
    pub fn block_size(self) -> usize {
        self.row().block_size
    }

    /// Bytes per block.
    pub fn type_size(self) -> usize {
        self.row().type_size
    }

    /// The floats of a block.
    pub fn floats(self) -> Floats {
        self.row().floats
    }

    /// The dtype of a tensor that is not quantized; `None` if it is quantized.
    pub fn float(self) -> Option<DType> {
        match self.floats() {
            All(dtype) => Some(dtype),
            Halves(_) | Nibbles(_) | Single(_) | Exponent(_) => None,
        }
    }

    /// candle's type; `None` if it has none.
    pub fn candles(self) -> Option<GgmlDType> {
        self.row().candles.first().copied()
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
        for row in ROWS {
            let kind = row.kind;
            assert_eq!(BlockType::of_number(kind.number()), Ok(kind));
            assert_eq!((kind.name(), kind.row().kind), (row.name, kind));
            if let Some(candles) = kind.candles() {
                assert_eq!(BlockType::from(candles), kind);
                let sizes = (candles.block_size(), candles.type_size());
                assert_eq!(sizes, (kind.block_size(), kind.type_size()));
            }
        }
        let error = BlockType::of_number(34).unwrap_err();
        assert!(
            error.starts_with("type TQ1_0 is not supported: only F32, F16"),
            "{error}"
        );
        assert!(BlockType::of_number(99).unwrap_err().contains("number 99"));
    }
}
