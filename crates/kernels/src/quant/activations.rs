//! The inputs of a product, quantized to 8 bits.

use super::super::cpu::{AmxInt8, I8mm, Isa};
use super::super::parallel::{Shared, for_each};
use super::block_sums::{BlockSums, PairSums};
use super::formats::BLOCK;
use std::cell::Cell;
use std::mem::take;

/// Maximum number of rows that are stored together, and that share one pass over a strip if the CPU has
/// enough registers: two vectors of 16 outputs for each row.
pub(super) const ROWS: usize = 12;
/// Maximum number of rows that are stored together, and multiplied together, where tiles multiply.
pub(super) const TILE_ROWS: usize = 16;
/// Maximum number of rows that are stored together, and multiplied together, where they are in pairs: for more, compilers do
/// not keep all sums in registers (counted).
pub(super) const PAIRED_ROWS: usize = 8;
/// Number of rows from which tiles multiply: unpacking weights for fewer costs more than it saves.
const MIN_TILE_ROWS: usize = 64;
/// Number of rows from which they are multiplied in pairs, where the CPU can: two take as many instructions either way, three
/// take more in pairs (counted).
const MIN_PAIRED_ROWS: usize = 4;

/// Number of blocks from which quantizing them with other threads pays.
const MIN_PARALLEL_BLOCKS: usize = 1024;
/// Blocks that one thread quantizes at a time.
const CHUNK: usize = 16;

/// Rows whose values are stored together, so that one address and constant offsets reach all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pass {
    pub first: usize,
    pub rows: usize,
}

/// Rows of a pass that are multiplied together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub pass: Pass,
    /// The first of them, counted from the first of the pass.
    pub first: usize,
    pub rows: usize,
}

/// Divides passes into turns of at most `most` rows.
pub(super) fn turns(passes: &[Pass], most: usize) -> Vec<Turn> {
    let turns = passes.iter().flat_map(|&pass| {
        let turn = move |Pass { first, rows }| Turn { pass, first, rows };
        divide(pass.rows, most, 1).map(turn)
    });
    turns.collect()
}

/// Divides `rows` rows evenly into as few parts of at most `most` as possible. Only the last may have a number of rows that
/// is no multiple of `unit`, as `most` is.
fn divide(rows: usize, most: usize, unit: usize) -> impl Iterator<Item = Pass> {
    let units = rows.div_ceil(unit);
    let count = units.div_ceil(most / unit);
    (0..count).map(move |i| {
        let first = units * i / count * unit;
        let end = units * (i + 1) / count * unit;
        Pass {
            first,
            rows: end.min(rows) - first,
        }
    })
}

/// Buffers of activations.
#[derive(Default)]
struct Buffers {
    q: Vec<i8>,
    sums: Vec<BlockSums>,
    pair_sums: Vec<PairSums>,
}

thread_local! {
    /// The buffers of this thread's last activations: fresh pages would cost as much as quantizing.
    static SPARE: Cell<Buffers> = Cell::default();
}

impl Drop for Activations {
    fn drop(&mut self) {
        let buffers = Buffers {
            q: take(&mut self.q),
            sums: take(&mut self.sums),
            pair_sums: take(&mut self.pair_sums),
        };
        // Fails while the thread ends; then nobody needs them.
        let _ = SPARE.try_with(|spare| spare.set(buffers));
    }
}

/// Rows of blocks of 32 activations, quantized as `scale * q`.
pub(super) struct Activations {
    /// Blocks per row.
    blocks: usize,
    /// The proof that tiles multiply, where they do.
    tiles: Option<AmxInt8>,
    /// The proof that rows are multiplied in pairs, where they are.
    pairs: Option<I8mm>,
    passes: Vec<Pass>,
    /// For each pass: `[inputs / 32][rows of the pass][32]`. Then at least 16 rows of a block, which tiles may read but do not
    /// use.
    ///
    /// In pairs: `[inputs / 32][pairs of the pass][4][2][8]`, and a last row without another has a place beside it, of which
    /// all may be read and nothing is used.
    q: Vec<i8>,
    /// For each pass: `[inputs / 32][rows of the pass]`, with that place.
    sums: Vec<BlockSums>,
    /// For each pass in pairs: `[inputs / 32][pairs of the pass]`.
    pair_sums: Vec<PairSums>,
}

impl Activations {
    /// Quantizes `x` `[rows, inputs]`; `inputs` is a multiple of 32.
    pub fn quantize(isa: Isa, x: &[f32], inputs: usize) -> Self {
        let (rows, blocks) = (x.len() / inputs, inputs / BLOCK);
        let mut buffers = SPARE.take();
        let tiles = isa.amx_int8().filter(|_| rows >= MIN_TILE_ROWS);
        let pairs = isa.i8mm().filter(|_| rows >= MIN_PAIRED_ROWS);
        let (most, unit) = match (tiles, pairs) {
            (Some(_), _) => (TILE_ROWS, 1),
            (_, Some(_)) => (PAIRED_ROWS, 2),
            _ => (ROWS, 1),
        };
        let places = rows.next_multiple_of(unit) * blocks;
        grow(&mut buffers.q, places * BLOCK + TILE_ROWS * BLOCK);
        grow(&mut buffers.sums, places);
        grow(&mut buffers.pair_sums, pairs.map_or(0, |_| places / 2));
        let mut this = Self {
            blocks,
            tiles,
            pairs,
            passes: divide(rows, most, unit).collect(),
            q: buffers.q,
            sums: buffers.sums,
            pair_sums: buffers.pair_sums,
        };
        this.fill(isa, x);
        this
    }

    /// Quantizes the values of the rows.
    fn fill(&mut self, isa: Isa, x: &[f32]) {
        let (blocks, inputs) = (self.blocks, self.blocks * BLOCK);
        let unit = self.pairs.map_or(1, |_| 2);
        let parallelize = x.len() / BLOCK >= MIN_PARALLEL_BLOCKS;
        let q = Shared::new(&mut self.q);
        let sums = Shared::new(&mut self.sums);
        let pair_sums = Shared::new(&mut self.pair_sums);
        let chunks = blocks.div_ceil(CHUNK);
        for_each(self.passes.len() * chunks, parallelize, |at| {
            let Pass { first, rows } = self.passes[at / chunks];
            let start = at % chunks * CHUNK;
            let count = CHUNK.min(blocks - start);
            let stored = rows.next_multiple_of(unit);
            let (place, len) = (first * blocks + start * stored, count * stored);
            // SAFETY: no two tasks write the same blocks of the same pass.
            let (q, sums) =
                unsafe { (q.slice(place * BLOCK, len * BLOCK), sums.slice(place, len)) };
            for row in 0..rows {
                let x = &x[(first + row) * inputs + start * BLOCK..][..count * BLOCK];
                quantize_row(isa, x, row, stored, q, sums);
            }
            if self.pairs.is_some() {
                // SAFETY: as above; passes begin with a pair.
                pair(q, sums, unsafe { pair_sums.slice(place / 2, len / 2) });
            }
        });
    }

    /// The proof that tiles multiply weights, where they do: a pass in one turn. Where halves of a block have sums of their own
    /// (`is_apart`), vectors are faster (measured with 6 bits).
    pub fn tiles(&self, is_apart: bool) -> Option<AmxInt8> {
        self.tiles.filter(|_| !is_apart)
    }

    /// The proof that rows are multiplied in pairs, where they are: a pass in one turn.
    pub fn pairs(&self) -> Option<I8mm> {
        self.pairs
    }

    /// Blocks per row.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The passes, which cover all rows in order.
    pub fn passes(&self) -> &[Pass] {
        &self.passes
    }

    /// Rows that a block of a pass has places for.
    pub fn stored(&self, pass: Pass) -> usize {
        pass.rows.next_multiple_of(self.pairs.map_or(1, |_| 2))
    }

    /// The values of a pass: `[inputs / 32][rows][32]`, or `[inputs / 32][pairs][4][2][8]`.
    pub fn q(&self, pass: Pass) -> &[i8] {
        &self.q[pass.first * self.blocks * BLOCK..][..self.stored(pass) * self.blocks * BLOCK]
    }

    /// Values of a block: those of 16 rows of a pass, or those of all its rows and then others.
    #[cfg(target_arch = "x86_64")]
    pub fn tile(&self, pass: Pass, block: usize) -> &[i8; TILE_ROWS * BLOCK] {
        let at = (pass.first * self.blocks + block * pass.rows) * BLOCK;
        let (tile, _) = self.q[at..]
            .split_first_chunk()
            .expect("16 rows follow the last block");
        tile
    }

    /// The sums of a pass: `[inputs / 32][rows]`.
    pub fn sums(&self, pass: Pass) -> &[BlockSums] {
        &self.sums[pass.first * self.blocks..][..self.stored(pass) * self.blocks]
    }

    /// The sums of the pairs of a pass: `[inputs / 32][pairs]`.
    #[cfg(target_arch = "aarch64")]
    pub fn pair_sums(&self, pass: Pass) -> &[PairSums] {
        let (first, pairs) = (pass.first / 2, self.stored(pass) / 2);
        &self.pair_sums[first * self.blocks..][..pairs * self.blocks]
    }

    /// The 32 values of a block of a pass's row, unless rows are in pairs.
    pub fn block(&self, pass: Pass, row: usize, block: usize) -> &[i8; BLOCK] {
        let (blocks, _) = self.q(pass).as_chunks();
        &blocks[block * pass.rows + row]
    }
}

/// Makes a buffer at least so long. Cut shorter, it would be filled again for the next product that is longer.
fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Puts quantized rows of blocks into pairs, of which each eight values are beside those of the other row.
fn pair(q: &mut [i8], sums: &[BlockSums], pairs: &mut [PairSums]) {
    let (eights, _) = q.as_chunks_mut::<8>();
    for both in eights.as_chunks_mut::<8>().0 {
        let [a, b, c, d, e, f, g, h] = *both;
        *both = [a, e, b, f, c, g, d, h];
    }
    for (sums, pair) in sums.as_chunks().0.iter().zip(pairs) {
        *pair = PairSums::new(sums);
    }
}

/// Quantizes blocks of row `row` of a pass with places for `rows` rows, and stores them at theirs.
fn quantize_row(
    isa: Isa,
    x: &[f32],
    row: usize,
    rows: usize,
    q: &mut [i8],
    sums: &mut [BlockSums],
) {
    let (x, q) = (x.as_chunks().0, q.as_chunks_mut().0);
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(proof) = isa.avx512() {
            // SAFETY: `proof` proves that the CPU has the instructions.
            return unsafe { x86::quantize_row_avx512(proof, x, row, rows, q, sums) };
        }
        if let Some(proof) = isa.avx2() {
            // SAFETY: as above.
            return unsafe { x86::quantize_row_avx2(proof, x, row, rows, q, sums) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(proof) = isa.neon() {
        // SAFETY: `proof` proves that the CPU has the instructions.
        return unsafe { neon::quantize_row(proof, x, row, rows, q, sums) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = isa;
    for (i, x) in x.iter().enumerate() {
        sums[i * rows + row] = quantize_block(x, &mut q[i * rows + row]);
    }
}

/// Quantizes 32 values to -127..=127, ties to even.
fn quantize_block(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> BlockSums {
    let Some(Scales { max, inverse }) = Scales::of(largest(x)) else {
        return BlockSums::not_finite(q);
    };
    let mut halves = [0i16; 2];
    for (k, (q, &x)) in q.iter_mut().zip(x).enumerate() {
        *q = (x * inverse).round_ties_even() as i8;
        halves[k / 16] += i16::from(*q);
    }
    BlockSums::new(max / 127., halves)
}

/// The bits of the largest magnitude. They are ordered as magnitudes are, infinity and NaN above all others.
pub(super) fn largest(x: &[f32]) -> u32 {
    x.iter().map(|x| x.abs().to_bits()).fold(0, u32::max)
}

/// How a block is scaled to 8 bits.
struct Scales {
    /// The largest magnitude.
    max: f32,
    /// What values are multiplied by: 0 if they are too small for it.
    inverse: f32,
}

impl Scales {
    /// The scales of a block by its largest magnitude, which is given by its bits; `None` if it is not finite.
    #[inline(always)]
    fn of(max: u32) -> Option<Self> {
        let max = f32::from_bits(max);
        let inverse = Some(127. / max).filter(|inverse| inverse.is_finite());
        max.is_finite().then_some(Self {
            max,
            inverse: inverse.unwrap_or(0.),
        })
    }
}

/// Quantization with AVX2 and AVX-512, with the bits of the portable functions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, BlockSums, Scales};
    use crate::cpu::{Avx2, Avx512Vnni};
    use std::arch::x86_64::*;

    macro_rules! quantize_row {
        ($name:ident, $proof:ty, $features:literal, $block:ident) => {
            /// As the function above, for blocks `x`.
            #[target_feature(enable = $features)]
            pub(super) fn $name(
                _: $proof,
                x: &[[f32; BLOCK]],
                row: usize,
                rows: usize,
                q: &mut [[i8; BLOCK]],
                sums: &mut [BlockSums],
            ) {
                let mut place = row;
                for x in x {
                    sums[place] = $block(x, &mut q[place]);
                    place += rows;
                }
            }
        };
    }
    quantize_row!(quantize_row_avx2, Avx2, "avx2", block_avx2);
    quantize_row!(
        quantize_row_avx512,
        Avx512Vnni,
        "avx2,avx512f,avx512bw,avx512vl,avx512vnni",
        block_avx512
    );

    #[target_feature(enable = "avx2")]
    #[inline]
    fn block_avx2(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> BlockSums {
        let load = |at: usize| {
            // SAFETY: there are 32 floats, and `at` is at most 24.
            unsafe { _mm256_loadu_ps(x.as_ptr().add(at)) }
        };
        let (a, b, c, d) = (load(0), load(8), load(16), load(24));
        let magnitude = |v| _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v));
        let max = largest(_mm256_max_epi32(
            _mm256_max_epi32(magnitude(a), magnitude(b)),
            _mm256_max_epi32(magnitude(c), magnitude(d)),
        ));
        let Some(Scales { max, inverse }) = Scales::of(max) else {
            return BlockSums::not_finite(q);
        };
        let round = |v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse)));
        let (a, b, c, d) = (round(a), round(b), round(c), round(d));
        // Packing works on each half of a vector separately; this order of 4-byte groups undoes that.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let words = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let bytes = _mm256_permutevar8x32_epi32(words, order);
        // SAFETY: there are 32 bytes.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };
        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        sums(max, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
    #[inline]
    fn block_avx512(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> BlockSums {
        // SAFETY: there are 32 floats.
        let (a, b) = unsafe {
            (
                _mm512_loadu_ps(x.as_ptr()),
                _mm512_loadu_ps(x.as_ptr().add(16)),
            )
        };
        let magnitude = |v| _mm512_castps_si512(_mm512_abs_ps(v));
        let both = _mm512_max_epi32(magnitude(a), magnitude(b));
        let (low, high) = (
            _mm512_castsi512_si256(both),
            _mm512_extracti64x4_epi64::<1>(both),
        );
        let Some(Scales { max, inverse }) = Scales::of(largest(_mm256_max_epi32(low, high))) else {
            return BlockSums::not_finite(q);
        };
        let inverse = _mm512_set1_ps(inverse);
        let narrow = |v| _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
        let bytes = _mm256_set_m128i(narrow(b), narrow(a));
        // SAFETY: there are 32 bytes.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };
        let zero = _mm256_setzero_si256();
        sums(max, _mm256_dpbusd_epi32(zero, _mm256_set1_epi8(1), bytes))
    }

    /// The sums of a block whose largest value is `max`; each half of `sums` has the sums of half a block.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn sums(max: f32, sums: __m256i) -> BlockSums {
        let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b1110>(sums));
        let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<1>(sums));
        let low = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums)) as i16;
        let high = _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(sums)) as i16;
        BlockSums::new(max / 127., [low, high])
    }

    /// The largest of 8 numbers that are not negative.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn largest(v: __m256i) -> u32 {
        let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b1110>(v));
        _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32::<1>(v))) as u32
    }
}

/// Quantization with NEON, with the bits of the portable functions.
#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{BLOCK, BlockSums, Scales};
    use crate::cpu::Neon;
    use std::arch::aarch64::*;

    /// As the function above, for blocks `x`.
    #[target_feature(enable = "neon")]
    pub(super) fn quantize_row(
        _: Neon,
        x: &[[f32; BLOCK]],
        row: usize,
        rows: usize,
        q: &mut [[i8; BLOCK]],
        sums: &mut [BlockSums],
    ) {
        let mut place = row;
        for x in x {
            sums[place] = block(x, &mut q[place]);
            place += rows;
        }
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn block(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> BlockSums {
        let (quads, _) = x.as_chunks::<4>();
        let mut max = vdupq_n_u32(0);
        for quad in quads {
            // SAFETY: there are four floats.
            let quad = unsafe { vld1q_f32(quad.as_ptr()) };
            max = vmaxq_u32(max, vreinterpretq_u32_f32(vabsq_f32(quad)));
        }
        let Some(Scales { max, inverse }) = Scales::of(vmaxvq_u32(max)) else {
            return BlockSums::not_finite(q);
        };
        let round = |at: usize| {
            // SAFETY: there are 32 floats, and `at` is at most 28.
            let quad = unsafe { vld1q_f32(x.as_ptr().add(at)) };
            vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(quad, inverse)))
        };
        let mut halves = [0; 2];
        for (half, sum) in halves.iter_mut().enumerate() {
            let at = half * BLOCK / 2;
            let eights = [at, at + 8].map(|at| vqmovn_s16(vcombine_s16(round(at), round(at + 4))));
            let bytes = vcombine_s8(eights[0], eights[1]);
            *sum = vaddlvq_s8(bytes);
            // SAFETY: there are 32 bytes.
            unsafe { vst1q_s8(q.as_mut_ptr().add(at), bytes) };
        }
        BlockSums::new(max / 127., halves)
    }
}
