//! Searches the bytes of a tensor for NaN and infinity; loading has to read them anyway.

use candle_core::DType;
use foretoken_core::error::Error;
use foretoken_kernels::quant::{BlockType, Floats};
use rayon::prelude::*;

/// Bytes that a thread checks at a time; a multiple of every value's size.
const PIECE: usize = 1 << 16;

/// Whether all values of a tensor of `dtype` are finite; always true if `dtype` is not a float.
pub fn floats(dtype: DType, bytes: &[u8]) -> bool {
    let pieces = bytes.par_chunks(PIECE);
    match dtype {
        DType::F64 => pieces.all(|p| each(p, |b| u64::from_le_bytes(b) << 1 >> 53 != 0x7ff)),
        DType::F32 => pieces.all(|p| each(p, |b| u32::from_le_bytes(b) << 1 >> 24 != 0xff)),
        DType::F16 => pieces.all(|p| each(p, |bytes| exponent_of_f16(bytes) < 0x1f)),
        DType::BF16 => pieces.all(|p| each(p, |b| u16::from_le_bytes(b) << 1 >> 8 != 0xff)),
        _ => true,
    }
}

/// Whether all block scales of a GGUF tensor are finite, or all its values if it is not quantized.
pub fn blocks(kind: BlockType, bytes: &[u8]) -> bool {
    match kind.floats() {
        Floats::All(dtype) => floats(dtype, bytes),
        Floats::Halves(places) => {
            // Tiles hold Q5_0 with an offset of 16 times the scale, which must be finite, too.
            let end = if kind == BlockType::Q5_0 {
                0x1f - 4
            } else {
                0x1f
            };
            each_block(kind, bytes, |block| {
                let mut halves = places.iter().map(|&at| [block[at], block[at + 1]]);
                halves.all(|half| exponent_of_f16(half) < end)
            })
        }
        Floats::Nibbles(places) => each_block(kind, bytes, |block| {
            exponent_of_f16(Floats::of_nibbles(block, places)) < 0x1f
        }),
        Floats::Single(at) => {
            each_block(kind, bytes, |block| floats(DType::F32, &block[at..at + 4]))
        }
        // The largest exponent is NaN; a few below it make values that are infinite.
        Floats::Exponent(at) => each_block(kind, bytes, |block| block[at] <= MAX_MXFP4_EXPONENT),
    }
}

/// Whether `holds` is true for each block.
fn each_block(kind: BlockType, bytes: &[u8], holds: impl Fn(&[u8]) -> bool + Sync) -> bool {
    let pieces = bytes.par_chunks(kind.type_size() * 1024);
    pieces.all(|piece| piece.chunks_exact(kind.type_size()).all(&holds))
}

/// The error of the tensor `name` whose values are not finite.
pub fn error(name: &str) -> Error {
    Error::setup(format!("tensor {name} contains NaN or infinity"))
}

/// The largest exponent of `MXFP4` with which all values are finite: 6 times two to the power of it less 127.
pub const MAX_MXFP4_EXPONENT: u8 = 252;

/// The five bits of the exponent; all are set of infinity and NaN.
fn exponent_of_f16(bytes: [u8; 2]) -> u16 {
    u16::from_le_bytes(bytes) << 1 >> 11
}

/// Whether `holds` is true for each value. Does not exit early, so that it compiles to vector code.
fn each<const N: usize>(piece: &[u8], holds: impl Fn([u8; N]) -> bool) -> bool {
    let values = piece.as_chunks::<N>().0;
    values.iter().fold(true, |all, &value| all & holds(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};
    use half::{bf16, f16};

    #[test]
    fn every_dtype_is_searched() {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for x in bad.into_iter().chain([0., -1., f32::MIN_POSITIVE, 65504.]) {
            let (x64, x16, xb) = (f64::from(x), f16::from_f32(x), bf16::from_f32(x));
            let mut values = [1f32; 100];
            values[77] = x;
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(floats(DType::F32, &bytes), x.is_finite(), "{x}");
            assert_eq!(floats(DType::F64, &x64.to_le_bytes()), x.is_finite(), "{x}");
            assert_eq!(floats(DType::F16, &x16.to_le_bytes()), x.is_finite(), "{x}");
            assert_eq!(floats(DType::BF16, &xb.to_le_bytes()), x.is_finite(), "{x}");
        }
    }

    /// Finds infinity exactly at the offsets of the scales.
    #[test]
    fn every_block_type_is_searched() {
        use GgmlDType::*;
        let ones = Tensor::ones((2, 256), DType::F32, &Device::Cpu).unwrap();
        for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K] {
            let tensor = QTensor::quantize(&ones, kind).unwrap();
            let good = tensor.data().unwrap().into_owned();
            assert!(blocks(kind.into(), &good), "{kind:?}");
            let width = if kind == Q8K { 4 } else { 2 };
            let infinity: &[u8] = if kind == Q8K {
                &[0, 0, 0x80, 0x7f]
            } else {
                &[0, 0x7c]
            };
            let size = kind.type_size();
            let found = (0..=size - width).step_by(width).filter(|&at| {
                let mut bad = good.clone();
                bad[size + at..size + at + width].copy_from_slice(infinity);
                !blocks(kind.into(), &bad)
            });
            let wanted = match kind {
                Q4_1 | Q5_1 | Q2K | Q4K | Q5K => 2,
                _ => 1,
            };
            assert_eq!(found.count(), wanted, "{kind:?}");
        }
        let mut q5_0 = vec![0u8; 22];
        for (scale, is_good) in [(4094f32, true), (4096., false), (-4096., false)] {
            q5_0[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
            assert_eq!(blocks(BlockType::Q5_0, &q5_0), is_good, "{scale}");
        }
    }

    #[test]
    fn blocks_that_candle_does_not_read_are_searched_too() {
        for kind in BlockType::all().filter(|kind| kind.candles().is_none()) {
            let mut data = vec![0u8; 3 * kind.type_size()];
            assert!(blocks(kind, &data), "{kind}");
            let (infinite, at): (&[u8], _) = match kind {
                BlockType::Mxfp4 => (&[253], 0),
                // The upper four bits of two bytes are the 0xc and the 0x7 of 0x7c00.
                BlockType::Iq1M => (&[0xc0, 0, 0x70], 53),
                _ => (&[0, 0x7c], 0),
            };
            let at = at + 2 * kind.type_size();
            data[at..at + infinite.len()].copy_from_slice(infinite);
            assert!(!blocks(kind, &data), "{kind}");
        }
        let half = 0.5 * f32::from_bits(u32::from(MAX_MXFP4_EXPONENT) << 23);
        assert!((half * 12.).is_finite() && (half * 2. * 12.).is_infinite());
    }
}
