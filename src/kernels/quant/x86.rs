//! The products with vectors of 256 bits: AVX2, or AVX-512 VNNI, which only differ in how they
//! multiply bytes.
//!
//! Loops over rows are plain loops: what the closures of `array::from_fn` and `map` do is compiled
//! without the vector instructions wherever the compiler chooses not to inline them (seen: a third of
//! the speed).

use super::activations::{Activations, BlockSums};
use super::formats::{
    Affine, Bytes, Format, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, Scales6K, ScalesK,
};
use super::{BLOCK, ROWS, TileRow, WIDTH};
use half::f16;
use std::arch::x86_64::*;

/// Vectors of a tile.
const VECTORS: usize = BLOCK / 4;

/// A format as vectors. All functions need AVX2, FMA and F16C, and are inlined into functions that
/// have them.
pub(super) trait Vectors: Format {
    /// Bits of a quant. 8 are signed, fewer are not.
    const BITS: u32;

    /// Quants of inputs `4 v .. 4 v + 4` of eight outputs.
    ///
    /// # Safety
    /// The CPU has AVX2; `v < 8`.
    unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i;

    /// Scales of eight outputs.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C.
    unsafe fn scales(scales: &Self::Scales, sub: usize) -> __m256;

    /// Offsets of eight outputs; only called with [`Format::OFFSET`].
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C.
    unsafe fn offsets(_: &Self::Scales, _sub: usize) -> __m256 {
        unreachable!("the format has no offsets")
    }

    /// For each output the factors of both half blocks, as two i16; only called with 6 bits.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn factors(_: &Self::Scales, _sub: usize) -> __m256i {
        unreachable!("the format has no factors")
    }
}

/// How bytes are multiplied.
trait Multiply {
    /// For each of `R` rows the exact `sum(factor * (quant - bias) * x)` of a block, for eight
    /// outputs.
    ///
    /// # Safety
    /// The CPU has the instructions; the tile and the rows are in range.
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R];
}

/// Rows `row..row + R` of `x`, as pointers: bounds are checked once, not once a vector.
struct Rows<const R: usize> {
    q: [*const i8; R],
    sums: [*const BlockSums; R],
}

impl<const R: usize> Rows<R> {
    #[inline(always)]
    fn new(x: &Activations, row: usize) -> Self {
        Self {
            q: std::array::from_fn(|i| x.q[(row + i) * x.inputs..][..x.inputs].as_ptr()),
            sums: std::array::from_fn(|i| x.sums(row + i).as_ptr()),
        }
    }

    /// Inputs `4 v .. 4 v + 4` of a block of row `i`, eight times.
    ///
    /// # Safety
    /// The row has the block, `v < 8`, and the CPU has AVX2.
    #[inline(always)]
    unsafe fn broadcast(&self, i: usize, block: usize, v: usize) -> __m256i {
        // SAFETY: in range, by the caller's promise.
        unsafe {
            let at = self.q[i].add(block * BLOCK + 4 * v).cast::<i32>();
            _mm256_set1_epi32(at.read_unaligned())
        }
    }

    /// # Safety
    /// The row has the block.
    #[inline(always)]
    unsafe fn sums(&self, i: usize, block: usize) -> &BlockSums {
        // SAFETY: by the caller's promise.
        unsafe { &*self.sums[i].add(block) }
    }
}

struct Avx2;

impl Multiply for Avx2 {
    #[inline(always)]
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R] {
        // SAFETY: in range and available, by the caller's promise.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut dots = [_mm256_setzero_si256(); R];
            if F::BITS == 8 {
                for v in 0..VECTORS {
                    let w = F::quants(quants, v);
                    let magnitude = _mm256_abs_epi8(w);
                    for (i, dot) in dots.iter_mut().enumerate() {
                        // |w| * (x with the sign of w): pairs stay within 2 * 128 * 127, in i16.
                        let signed = _mm256_sign_epi8(x.broadcast(i, block, v), w);
                        let pairs = _mm256_maddubs_epi16(magnitude, signed);
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
                    }
                }
                return dots;
            }
            // So many vectors of products stay inside i16: 8 * 2 * 15 * 127, and so on.
            let run = VECTORS >> (F::BITS - 4);
            for start in (0..VECTORS).step_by(run) {
                let mut pairs = [_mm256_setzero_si256(); R];
                for v in start..start + run {
                    let w = F::quants(quants, v);
                    for (i, pairs) in pairs.iter_mut().enumerate() {
                        let product = _mm256_maddubs_epi16(w, x.broadcast(i, block, v));
                        *pairs = _mm256_add_epi16(*pairs, product);
                    }
                }
                let factor = match F::BITS {
                    6 => both(F::factors(scales, sub), start * 4 / (BLOCK / 2)),
                    _ => ones,
                };
                for (dot, pairs) in dots.iter_mut().zip(pairs) {
                    *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, factor));
                }
            }
            unbias::<F, R>(&mut dots, scales, sub, x, block);
            dots
        }
    }
}

struct Vnni;

impl Multiply for Vnni {
    #[inline(always)]
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R] {
        // SAFETY: in range and available, by the caller's promise.
        unsafe {
            let mut dots = [[_mm256_setzero_si256(); 2]; R];
            for v in 0..VECTORS {
                let mut w = F::quants(quants, v);
                if F::BITS == 8 {
                    // The instruction wants one side unsigned.
                    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                }
                for (i, dots) in dots.iter_mut().enumerate() {
                    let half = &mut dots[v / (VECTORS / 2)];
                    *half = _mm256_dpbusd_epi32(*half, w, x.broadcast(i, block, v));
                }
            }
            let mut whole = [_mm256_setzero_si256(); R];
            for (whole, [low, high]) in whole.iter_mut().zip(dots) {
                *whole = if F::BITS == 6 {
                    let factors = F::factors(scales, sub);
                    let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(factors));
                    let second = _mm256_srai_epi32::<16>(factors);
                    let low = _mm256_mullo_epi32(low, first);
                    _mm256_add_epi32(low, _mm256_mullo_epi32(high, second))
                } else {
                    _mm256_add_epi32(low, high)
                };
            }
            if F::BITS == 8 {
                shifted_totals::<R, 7>(&mut whole, x, block);
            } else {
                unbias::<F, R>(&mut whole, scales, sub, x, block);
            }
            whole
        }
    }
}

/// Both i16 of each pair, as the one of `half`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn both(pairs: __m256i, half: usize) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        let at = (2 * half) as i32;
        let place = 0x0100_0100 + at * 0x0101_0101;
        let lane = _mm_setr_epi32(
            place,
            place + 0x0404_0404,
            place + 0x0808_0808,
            place + 0x0C0C_0C0C,
        );
        _mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(lane))
    }
}

/// Takes the part of the bias out of unsigned sums.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn unbias<F: Vectors, const R: usize>(
    dots: &mut [__m256i; R],
    scales: &F::Scales,
    sub: usize,
    x: &Rows<R>,
    block: usize,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        if F::BITS == 6 {
            let factors = F::factors(scales, sub);
            for (i, dot) in dots.iter_mut().enumerate() {
                let [low, high] = x.sums(i, block).halves;
                let halves = i32::from(high) << 16 | i32::from(low) & 0xFFFF;
                let biased = _mm256_madd_epi16(factors, _mm256_set1_epi32(halves));
                *dot = _mm256_sub_epi32(*dot, _mm256_slli_epi32::<5>(biased));
            }
        } else if F::BIAS != 0 {
            shifted_totals::<R, 3>(dots, x, block);
        }
    }
}

/// `dots - (total << SHIFT)`.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn shifted_totals<const R: usize, const SHIFT: u32>(
    dots: &mut [__m256i; R],
    x: &Rows<R>,
    block: usize,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        for (i, dot) in dots.iter_mut().enumerate() {
            let bias = x.sums(i, block).total << SHIFT;
            *dot = _mm256_sub_epi32(*dot, _mm256_set1_epi32(bias));
        }
    }
}

/// Tiles between the one that is worked on and the one that is asked for: some 2 KB, which keeps more
/// of the memory busy than the hardware's own prefetching does (measured: a third more bytes a
/// second with one row).
const AHEAD: usize = 16;

/// Asks for tile `block` of a matrix, counted from this row of tiles, which may end before.
#[inline(always)]
fn prefetch<F: Format>(tiles: TileRow<'_, F>, block: usize) {
    let quants = tiles.quants.as_ptr().wrapping_add(block).cast::<i8>();
    let scales = size_of::<F::Scales>() * block / F::SPAN;
    let scales = tiles.scales.as_ptr().cast::<i8>().wrapping_add(scales);
    // SAFETY: a prefetch has no effect that can be seen, whatever the address.
    unsafe {
        for line in (0..size_of::<F::Quants>()).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(quants.wrapping_add(line));
        }
        _mm_prefetch::<_MM_HINT_T0>(scales);
    }
}

/// `R` rows against a row of tiles.
///
/// # Safety
/// The CPU has what `M` and the format need.
#[inline(always)]
unsafe fn rows<M: Multiply, F: Vectors, const R: usize>(
    tiles: TileRow<'_, F>,
    x: &Activations,
    row: usize,
) -> [[f32; WIDTH]; R] {
    assert!(tiles.quants.len() == x.inputs / BLOCK);
    assert!(tiles.scales.len() * F::SPAN >= tiles.quants.len());
    let x = Rows::<R>::new(x, row);
    // SAFETY: blocks are in range of tiles and rows, and the CPU is as the caller promises.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); R];
        for (block, quants) in tiles.quants.iter().enumerate() {
            let scales = tiles.scales.get_unchecked(block / F::SPAN);
            let sub = block % F::SPAN;
            prefetch(tiles, block + AHEAD);
            let dots = M::dots::<F, R>(quants, scales, sub, &x, block);
            let d = F::scales(scales, sub);
            for i in 0..R {
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(x.sums(i, block).scale));
                sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), scale, sums[i]);
            }
            if F::OFFSET {
                let m = F::offsets(scales, sub);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm256_fmadd_ps(m, _mm256_set1_ps(x.sums(i, block).sum), *sum);
                }
            }
        }
        let mut out = [[0f32; WIDTH]; R];
        for (out, sum) in out.iter_mut().zip(sums) {
            _mm256_storeu_ps(out.as_mut_ptr(), sum);
        }
        out
    }
}

/// Calls `rows` for `count` rows, a number that `take` has given, and puts each row's outputs to `store`.
macro_rules! by_count {
    ($multiply:ty, $format:ty, $tiles:expr, $x:expr, $row:expr, $count:expr, $store:expr; $($n:literal)*) => {
        match $count {
            $($n => {
                for (i, sums) in rows::<$multiply, $format, $n>($tiles, $x, $row).iter().enumerate() {
                    $store($row + i, sums);
                }
            })*
            _ => unreachable!("take gives no such number"),
        }
    };
}

/// Rows of the next pass when `left` are left.
fn take(left: usize) -> usize {
    match left {
        ROWS.. => ROWS,
        7 | 6 => 6,
        5 | 4 => 4,
        few => few,
    }
}

/// All rows `rows` of `x` against a row of tiles; `store` is called once a row.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn product_avx2<F: Vectors>(
    tiles: TileRow<'_, F>,
    x: &Activations,
    range: std::ops::Range<usize>,
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    let mut row = range.start;
    while row < range.end {
        let count = take(range.end - row);
        // SAFETY: the caller has seen to the CPU.
        unsafe { by_count!(Avx2, F, tiles, x, row, count, store; 1 2 3 4 6 8) };
        row += count;
    }
}

/// As [`product_avx2`].
///
/// # Safety
/// The CPU has AVX-512 VNNI and VL too.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn product_vnni<F: Vectors>(
    tiles: TileRow<'_, F>,
    x: &Activations,
    range: std::ops::Range<usize>,
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    let mut row = range.start;
    while row < range.end {
        let count = take(range.end - row);
        // SAFETY: the caller has seen to the CPU.
        unsafe { by_count!(Vnni, F, tiles, x, row, count, store; 1 2 3 4 6 8) };
        row += count;
    }
}

/// 32 bytes at vector `v`.
///
/// # Safety
/// The CPU has AVX2, and there are so many bytes.
#[inline(always)]
unsafe fn load<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    debug_assert!((v + 1) * 32 <= N);
    // SAFETY: by the caller's promise; `Bytes` is aligned.
    unsafe { _mm256_load_si256(bytes.0.as_ptr().add(v * 32).cast()) }
}

/// Nibbles of vector `v`.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn nibbles<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        let both = load(bytes, v % (VECTORS / 2));
        let nibbles = if v < VECTORS / 2 {
            both
        } else {
            _mm256_srli_epi16::<4>(both)
        };
        _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
    }
}

/// Quants of 5 bits.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn five<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        // Bit v of each byte goes to bit 4; what crosses over from the next byte is masked off.
        let bits = _mm256_sll_epi16(load(bytes, 4), _mm_cvtsi32_si128(4 - v.min(4) as i32));
        let bits = _mm256_srl_epi16(bits, _mm_cvtsi32_si128(v.max(4) as i32 - 4));
        let bit = _mm256_and_si256(bits, _mm256_set1_epi8(16));
        _mm256_or_si256(nibbles(bytes, v), bit)
    }
}

/// Eight halves as floats.
///
/// # Safety
/// The CPU has F16C.
#[inline(always)]
unsafe fn widen(halves: &[f16; WIDTH]) -> __m256 {
    // SAFETY: eight halves are 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
}

/// Eight bytes as floats.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen_bytes(bytes: &[u8; WIDTH]) -> __m256 {
    // SAFETY: eight bytes are read.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast()))) }
}

/// # Safety
/// The CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn scales_k(scales: &ScalesK, sub: usize) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_mul_ps(widen(&scales.d), widen_bytes(&scales.sc[sub])) }
}

/// # Safety
/// The CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn offsets_k(scales: &ScalesK, sub: usize) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let offsets = _mm256_mul_ps(widen(&scales.m), widen_bytes(&scales.mn[sub]));
        _mm256_xor_ps(offsets, _mm256_set1_ps(-0.0))
    }
}

/// Implements [`Vectors`]: bits, quants, scales and, if any, offsets, as functions of above.
macro_rules! vectors {
    ($format:ty, $bits:literal, $quants:expr, $scales:expr $(, $offsets:expr)?) => {
        impl Vectors for $format {
            const BITS: u32 = $bits;

            #[inline(always)]
            unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i {
                // SAFETY: by the caller's promise.
                unsafe { $quants(quants, v) }
            }

            #[inline(always)]
            unsafe fn scales(scales: &Self::Scales, sub: usize) -> __m256 {
                // SAFETY: by the caller's promise.
                unsafe { $scales(scales, sub) }
            }

            $(#[inline(always)]
            unsafe fn offsets(scales: &Self::Scales, sub: usize) -> __m256 {
                // SAFETY: by the caller's promise.
                unsafe { $offsets(scales, sub) }
            })?
        }
    };
}

vectors!(Q8_0, 8, load, |s, _| widen(s));
vectors!(Q4_0, 4, nibbles, |s, _| widen(s));
vectors!(
    Q4_1,
    4,
    nibbles,
    |s: &Affine, _| widen(&s.d),
    |s: &Affine, _| widen(&s.m)
);
vectors!(
    Q5_1,
    5,
    five,
    |s: &Affine, _| widen(&s.d),
    |s: &Affine, _| widen(&s.m)
);
vectors!(Q4K, 4, nibbles, scales_k, offsets_k);
vectors!(Q5K, 5, five, scales_k, offsets_k);

impl Vectors for Q6K {
    const BITS: u32 = 6;

    #[inline(always)]
    unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            let bits = load(quants, 4 + v % 4 / 2);
            let bits = match v / 4 * 2 + v % 2 {
                0 => _mm256_slli_epi16::<4>(bits),
                1 => _mm256_slli_epi16::<2>(bits),
                2 => bits,
                _ => _mm256_srli_epi16::<2>(bits),
            };
            let high = _mm256_and_si256(bits, _mm256_set1_epi8(0x30));
            _mm256_or_si256(nibbles(quants, v), high)
        }
    }

    #[inline(always)]
    unsafe fn scales(scales: &Scales6K, _: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe { widen(&scales.d) }
    }

    #[inline(always)]
    unsafe fn factors(scales: &Scales6K, sub: usize) -> __m256i {
        // SAFETY: sixteen factors are 16 bytes.
        unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(scales.sc[sub].as_ptr().cast())) }
    }
}
