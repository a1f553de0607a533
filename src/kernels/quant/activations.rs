//! The inputs of a product, quantized to 8 bits.

use super::super::cpu::Isa;
use super::super::parallel::{Shared, for_each};
use super::formats::BLOCK;

/// Maximum number of rows that share one pass over the tiles of eight outputs.
pub(super) const ROWS: usize = 8;

/// Number of rows from which quantizing them with other threads pays.
const MIN_PARALLEL_ROWS: usize = 8;
/// Blocks that one thread quantizes at a time.
const CHUNK: usize = 16;

/// Rows that are multiplied together. Their values are also stored together, so that one address and
/// constant offsets reach all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pass {
    pub first: usize,
    pub rows: usize,
}

/// Divides `rows` rows into passes: of eight rows, then one or two of sizes that kernels exist for.
fn passes(rows: usize) -> Vec<Pass> {
    let mut passes = Vec::with_capacity(rows / ROWS + 2);
    let mut first = 0;
    while first < rows {
        let rows = match rows - first {
            ROWS.. => ROWS,
            7 | 6 => 6,
            5 | 4 => 4,
            few => few,
        };
        passes.push(Pass { first, rows });
        first += rows;
    }
    passes
}

/// Rows of blocks of 32 activations, quantized as `scale * q`.
pub(super) struct Activations {
    /// Blocks per row.
    blocks: usize,
    passes: Vec<Pass>,
    /// For each pass: `[inputs / 4][rows of the pass][4]`.
    q: Vec<i8>,
    /// For each pass: `[inputs / 32][rows of the pass]`.
    sums: Vec<BlockSums>,
}

/// What a product needs of a block besides its values.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct BlockSums {
    pub scale: f32,
    /// `scale * sum(q)`, which is multiplied with a weight's offset.
    pub sum: f32,
    /// `sum(q)`, which is multiplied with a weight's bias.
    pub total: i32,
    /// `sum(q)` over inputs 0..16 and over 16..32.
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
    pub fn quantize(isa: Isa, x: &[f32], inputs: usize) -> Self {
        let (rows, blocks) = (x.len() / inputs, inputs / BLOCK);
        let mut this = Self {
            blocks,
            passes: passes(rows),
            q: vec![0; x.len()],
            sums: vec![BlockSums::default(); rows * blocks],
        };
        let (q, sums) = (Shared::new(&mut this.q), Shared::new(&mut this.sums));
        let chunks = blocks.div_ceil(CHUNK);
        for_each(
            this.passes.len() * chunks,
            rows >= MIN_PARALLEL_ROWS,
            |at| {
                let Pass { first, rows } = this.passes[at / chunks];
                let start = at % chunks * CHUNK;
                let count = CHUNK.min(blocks - start);
                let place = first * blocks + start * rows;
                // SAFETY: no two tasks write the same blocks of the same pass.
                let (q, sums) = unsafe {
                    (
                        q.slice(place * BLOCK, count * rows * BLOCK),
                        sums.slice(place, count * rows),
                    )
                };
                for row in 0..rows {
                    let x = &x[(first + row) * inputs + start * BLOCK..][..count * BLOCK];
                    quantize_row(isa, x, row, rows, q, sums);
                }
            },
        );
        this
    }

    /// The passes, which cover all rows in order.
    pub fn passes(&self) -> &[Pass] {
        &self.passes
    }

    /// The values of a pass: `[inputs / 4][rows][4]`.
    pub fn q(&self, pass: Pass) -> &[i8] {
        &self.q[pass.first * self.blocks * BLOCK..][..pass.rows * self.blocks * BLOCK]
    }

    /// The sums of a pass: `[inputs / 32][rows]`.
    pub fn sums(&self, pass: Pass) -> &[BlockSums] {
        &self.sums[pass.first * self.blocks..][..pass.rows * self.blocks]
    }

    /// The 32 values of a block of a pass's row.
    pub fn block(&self, pass: Pass, row: usize, block: usize) -> [i8; BLOCK] {
        let q = self.q(pass);
        std::array::from_fn(|k| q[place(pass.rows, row, block, k / 4) + k % 4])
    }
}

/// The index of inputs `4 v .. 4 v + 4` of a block in a pass of `rows` rows.
fn place(rows: usize, row: usize, block: usize, v: usize) -> usize {
    ((block * BLOCK / 4 + v) * rows + row) * 4
}

/// Quantizes blocks of row `row` of a pass of `rows` rows, and stores them at their places.
fn quantize_row(
    isa: Isa,
    x: &[f32],
    row: usize,
    rows: usize,
    q: &mut [i8],
    sums: &mut [BlockSums],
) {
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        let mut values = [0; BLOCK];
        sums[block * rows + row] = match isa.avx2() {
            // SAFETY: `proof` proves that the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Some(proof) => unsafe { avx2::quantize_block(proof, x, &mut values) },
            _ => quantize_block(x, &mut values),
        };
        for (v, values) in values.chunks_exact(4).enumerate() {
            q[place(rows, row, block, v)..][..4].copy_from_slice(values);
        }
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
    use crate::kernels::cpu::Avx2;
    use std::arch::x86_64::*;

    /// The same as the portable function, bit for bit.
    #[target_feature(enable = "avx2")]
    pub(super) fn quantize_block(_: Avx2, x: &[f32], q: &mut [i8]) -> BlockSums {
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
        // Packing works on each half of a vector separately; this order of 4-byte groups undoes that.
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
