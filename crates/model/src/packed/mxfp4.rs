//! MXFP4, as the published gpt-oss has its experts: blocks of 32 inputs of one output, each with a power of two as its
//! scale (Open Compute Project 2023, "Microscaling Formats (MX)"). A byte has two values, the first in its lower half.
//! (GGUF files have the same blocks with the values in another order.)

use crate::checkpoint::finite::MAX_MXFP4_EXPONENT;
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

/// What lies in the middle between the values without a sign.
const MIDDLES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.];

/// The number of the value that is nearest to `value`, of two the smaller one.
pub fn nearest(value: f32) -> u8 {
    let below = MIDDLES.iter().filter(|&&middle| value.abs() > middle);
    below.count() as u8 | u8::from(value < 0.) << 3
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

/// Blocks as GGUF files have them, with the values nearest to `values`. The scale of a block is the smallest with which it
/// has its largest value.
pub fn rounded(values: &[f32]) -> Vec<u8> {
    let (groups, _) = values.as_chunks::<BLOCK>();
    let of_group = |group: &[f32; BLOCK]| {
        let largest = group.iter().fold(0f32, |most, value| most.max(value.abs()));
        let bits = (largest / MAX).to_bits();
        let exponent = (bits >> 23) + u32::from(bits << 9 != 0);
        let scale = exponent.min(u32::from(MAX_MXFP4_EXPONENT)) as u8;
        let number = |input: usize| nearest(group[input] / power_of_two(scale));
        let packed =
            std::array::from_fn::<u8, { BLOCK / 2 }, _>(|k| number(2 * k) | number(2 * k + 1) << 4);
        blocks(&packed, &[scale])
    };
    groups.iter().flat_map(of_group).collect()
}

/// The size of the largest value of blocks as GGUF files have them.
pub fn largest(blocks: &[u8]) -> f32 {
    let of_block = |block: &[u8; BLOCK_BYTES]| {
        let numbers = block[1..].iter().flat_map(|both| [both & 7, both >> 4 & 7]);
        let largest = numbers.max().unwrap_or_default();
        power_of_two(block[0]) * VALUES[usize::from(largest)]
    };
    let (blocks, _) = blocks.as_chunks::<BLOCK_BYTES>();
    blocks.par_iter().map(of_block).reduce(|| 0., f32::max)
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
        for scale in 0..=MAX_MXFP4_EXPONENT {
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

    /// Values that blocks have stay as they are, whatever their scale, and others become the nearest ones.
    #[test]
    fn values_become_the_nearest_ones() {
        for exponent in [1, 60, 127, 250] {
            let scale = power_of_two(exponent);
            let values: Vec<f32> = (0..BLOCK).map(|i| scale * VALUES[i % 16]).collect();
            let own = rounded(&values);
            assert_eq!(own[0], exponent);
            assert_eq!(largest(&own), 6. * scale);
            let numbers: Vec<u8> = (0..8).chain([0]).chain(9..16).collect();
            let packed: Vec<u8> = numbers.iter().map(|n| n | n << 4).collect();
            assert_eq!(own[1..], packed[..]);
        }
        let near = |value| VALUES[usize::from(nearest(value))];
        for (value, want) in [
            (0.24, 0.),
            (-0.26, -0.5),
            (2.4, 2.),
            (4.9, 4.),
            (-5.1, -6.),
            (9., 6.),
        ] {
            assert_eq!(near(value), want);
        }
        let other = rounded(&[[6.1f32; BLOCK], [0.; BLOCK]].concat());
        // 2 to the power of 1, and 3.
        assert_eq!((other[0], other[1]), (128, 0x55));
        assert_eq!(other[BLOCK_BYTES..], [0; BLOCK_BYTES]);
        assert_eq!(largest(&other), 6.);
    }
}
