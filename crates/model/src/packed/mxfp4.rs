//! MXFP4, as the published gpt-oss has its experts: blocks of 32 inputs of one output, each with a power of two as its
//! scale (Open Compute Project 2023, "Microscaling Formats (MX)"). A byte has two values, the first in its lower half.
//! (GGUF files have the same blocks with the values in another order.)

use candle_core::{Device, Tensor};
use foretoken_core::error::Result;
use half::bf16;
use rayon::prelude::*;

/// Values of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block and its scale.
pub const BLOCK_BYTES: usize = BLOCK / 2 + 1;

/// What four bits mean: a sign, two bits of an exponent, and one of a fraction.
pub const VALUES: [f32; 16] = [
    0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.,
];

/// The largest value.
pub const MAX: f32 = 6.;

/// The number of the value that is nearest to `value`.
pub fn nearest(value: f32) -> u8 {
    let far = |number: &u8| (VALUES[usize::from(*number)] - value).abs();
    let numbers = 0..VALUES.len() as u8;
    let nearest = numbers.min_by(|a, b| far(a).total_cmp(&far(b)));
    nearest.unwrap_or_default()
}

/// The power of two with this exponent, less 127.
pub fn power_of_two(exponent: u8) -> f32 {
    // 2^-127 is not normal.
    f32::from_bits((u32::from(exponent) << 23).max(1 << 22))
}

/// The matrix `[outputs, inputs]` whose `values` are those of outputs, one after another, and whose `scales` are the
/// exponents of blocks, 127 more. All are exact in bf16.
///
/// # Errors
/// If they are not those of the shape.
pub fn dequantize(
    values: &[u8],
    scales: &[u8],
    (outputs, inputs): (usize, usize),
) -> Result<Tensor> {
    let mut out = vec![bf16::ZERO; outputs * inputs];
    let blocks = out.par_chunks_mut(BLOCK);
    let packed = values.par_chunks(BLOCK / 2).zip(scales.par_iter());
    blocks
        .zip(packed)
        .with_min_len(64)
        .for_each(|(out, (packed, &scale))| {
            let scale = power_of_two(scale);
            for (out, byte) in out.chunks_exact_mut(2).zip(packed) {
                out[0] = bf16::from_f32(scale * VALUES[usize::from(byte & 15)]);
                out[1] = bf16::from_f32(scale * VALUES[usize::from(byte >> 4)]);
            }
        });
    Ok(Tensor::from_vec(out, (outputs, inputs), &Device::Cpu)?)
}

/// The same blocks as GGUF files have them, whose bytes have the second half of the values in their upper halves.
pub fn blocks(values: &[u8], scales: &[u8]) -> Vec<u8> {
    let (packed, _) = values.as_chunks::<{ BLOCK / 2 }>();
    let mut data = Vec::with_capacity(scales.len() * BLOCK_BYTES);
    for (packed, &scale) in packed.iter().zip(scales) {
        let number = |input: usize| packed[input / 2] >> (input % 2 * 4) & 15;
        data.push(scale);
        data.extend((0..BLOCK / 2).map(|k| number(k) | number(k + BLOCK / 2) << 4));
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    /// Every value with every scale that makes it finite, in f64.
    #[test]
    fn bf16_has_all_values() {
        let values: Vec<u8> = (0..16)
            .map(|i| (2 * i % 16) | (((2 * i + 1) % 16) << 4))
            .collect();
        for scale in 0..=crate::checkpoint::finite::MAX_MXFP4_EXPONENT {
            let matrix = dequantize(&values, &[scale], (1, BLOCK)).unwrap();
            let found = matrix
                .to_dtype(DType::F64)
                .unwrap()
                .to_vec2::<f64>()
                .unwrap();
            let power = f64::from(i32::from(scale) - 127).exp2();
            for (i, found) in found[0].iter().enumerate() {
                assert_eq!(*found, f64::from(VALUES[i % 16]) * power, "{i}, {scale}");
            }
        }
    }
}
