//! The inputs of a product, in 8 bits.

use super::super::cpu::Path;
use super::super::parallel::{Shared, for_each};
use super::BLOCK;

/// Rows below which quantizing them is not worth other threads.
const MANY: usize = 8;

/// Rows of blocks of 32 activations as `scale * q`.
pub(super) struct Activations {
    pub inputs: usize,
    /// `[rows, inputs]`.
    pub q: Vec<i8>,
    /// `[rows, inputs / 32]`.
    pub blocks: Vec<BlockSums>,
}

/// What a product needs of a block besides its values.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct BlockSums {
    pub scale: f32,
    /// `scale * sum(q)`: what a weight's offset is multiplied with.
    pub sum: f32,
    /// `sum(q)`: what a weight's bias is multiplied with.
    pub total: i32,
    /// `total` of inputs 0..16 and 16..32.
    pub halves: [i16; 2],
}

impl BlockSums {
    fn new(scale: f32, halves: [i16; 2]) -> Self {
        let total = i32::from(halves[0]) + i32::from(halves[1]);
        Self {
            scale,
            sum: scale * total as f32,
            total,
            halves,
        }
    }
}

impl Activations {
    /// Quantizes `x` `[rows, inputs]`; `inputs` is a multiple of 32.
    pub fn quantize(path: Path, x: &[f32], inputs: usize) -> Self {
        let (rows, blocks) = (x.len() / inputs, inputs / BLOCK);
        let mut this = Self {
            inputs,
            q: vec![0; x.len()],
            blocks: vec![BlockSums::default(); rows * blocks],
        };
        let (q, sums) = (Shared::new(&mut this.q), Shared::new(&mut this.blocks));
        for_each(rows, rows >= MANY, |row| {
            // SAFETY: rows do not overlap.
            let (q, sums) = unsafe {
                (
                    q.slice(row * inputs, inputs),
                    sums.slice(row * blocks, blocks),
                )
            };
            quantize_row(path, &x[row * inputs..][..inputs], q, sums);
        });
        this
    }

    /// The 32 values of a block.
    pub fn block(&self, row: usize, block: usize) -> &[i8] {
        &self.q[row * self.inputs + block * BLOCK..][..BLOCK]
    }

    /// The sums of a row's blocks.
    pub fn sums(&self, row: usize) -> &[BlockSums] {
        let blocks = self.inputs / BLOCK;
        &self.blocks[row * blocks..][..blocks]
    }
}

fn quantize_row(path: Path, x: &[f32], q: &mut [i8], sums: &mut [BlockSums]) {
    let blocks = x.chunks_exact(BLOCK).zip(q.chunks_exact_mut(BLOCK));
    #[cfg(target_arch = "x86_64")]
    if path >= Path::Avx2 {
        for ((x, q), sums) in blocks.zip(sums) {
            // SAFETY: a path is only taken where the CPU has its instructions.
            *sums = unsafe { avx2::quantize_block(x, q) };
        }
        return;
    }
    let _ = path;
    for ((x, q), sums) in blocks.zip(sums) {
        *sums = quantize_block(x, q);
    }
}

/// Quantizes 32 values to -127..=127, ties to even.
fn quantize_block(x: &[f32], q: &mut [i8]) -> BlockSums {
    let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
    let inverse = if max > 0. { 127. / max } else { 0. };
    let mut halves = [0i16; 2];
    for (k, (q, &x)) in q.iter_mut().zip(x).enumerate() {
        *q = (x * inverse).round_ties_even() as i8;
        halves[k / 16] += i16::from(*q);
    }
    BlockSums::new(max / 127., halves)
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{BLOCK, BlockSums};
    use std::arch::x86_64::*;

    /// As the portable function, bit for bit.
    #[target_feature(enable = "avx2")]
    pub(super) fn quantize_block(x: &[f32], q: &mut [i8]) -> BlockSums {
        assert!(x.len() == BLOCK && q.len() == BLOCK);
        let load = |at: usize| {
            // SAFETY: there are 32 floats, and `at` is at most 24.
            unsafe { _mm256_loadu_ps(x.as_ptr().add(at)) }
        };
        let (a, b, c, d) = (load(0), load(8), load(16), load(24));
        let magnitude = |v| _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
        let max = largest(_mm256_max_ps(
            _mm256_max_ps(magnitude(a), magnitude(b)),
            _mm256_max_ps(magnitude(c), magnitude(d)),
        ));
        let inverse = if max > 0. { 127. / max } else { 0. };
        let round = |v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse)));
        let (a, b, c, d) = (round(a), round(b), round(c), round(d));
        let halves = [
            total(_mm256_add_epi32(a, b)) as i16,
            total(_mm256_add_epi32(c, d)) as i16,
        ];
        // Packing works on halves of vectors: this order of 4-byte groups undoes it.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let words = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let bytes = _mm256_permutevar8x32_epi32(words, order);
        // SAFETY: there are 32 bytes.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };
        BlockSums::new(max / 127., halves)
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn largest(v: __m256) -> f32 {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn total(v: __m256i) -> i32 {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b1110>(v));
        _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v)))
    }
}
