//! The products with AVX2: 32 multiply-adds an instruction.

use super::{Activations, BLOCK, ROWS, Tile4, Tile8, WIDTH};
use std::arch::x86_64::*;

/// Whether this CPU can run the functions below.
#[inline]
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// `count` rows against the tiles of eight outputs, 8-bit weights.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product8(
    tiles: &[Tile8],
    x: &Activations,
    row: usize,
    count: usize,
) -> [[f32; WIDTH]; ROWS] {
    match count {
        1 => rows8::<1>(tiles, x, row),
        2 => rows8::<2>(tiles, x, row),
        3 => rows8::<3>(tiles, x, row),
        _ => rows8::<ROWS>(tiles, x, row),
    }
}

/// The same for 4-bit weights.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product4(
    tiles: &[Tile4],
    x: &Activations,
    row: usize,
    count: usize,
) -> [[f32; WIDTH]; ROWS] {
    match count {
        1 => rows4::<1>(tiles, x, row),
        2 => rows4::<2>(tiles, x, row),
        3 => rows4::<3>(tiles, x, row),
        _ => rows4::<ROWS>(tiles, x, row),
    }
}

/// The activations of `R` rows, as pointers: bounds are checked once, not once a vector.
struct Rows<const R: usize> {
    q: [*const i8; R],
    scale: [*const f32; R],
    sum: [*const f32; R],
}

impl<const R: usize> Rows<R> {
    #[inline(always)]
    fn new(x: &Activations, row: usize, blocks: usize) -> Self {
        let mut this = Self {
            q: [std::ptr::null(); R],
            scale: [std::ptr::null(); R],
            sum: [std::ptr::null(); R],
        };
        for i in 0..R {
            let (values, at) = ((row + i) * x.inputs, x.at(row + i, 0));
            this.q[i] = x.q[values..values + blocks * BLOCK].as_ptr();
            this.scale[i] = x.scale[at..at + blocks].as_ptr();
            this.sum[i] = x.sum[at..at + blocks].as_ptr();
        }
        this
    }

    /// Activations `4 j..4 j + 4` of row `i` in block `b`, eight times. In range: `b < blocks` and
    /// `j < 8` at every call below, and `new` has checked that the row has as many.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn broadcast(&self, i: usize, b: usize, j: usize) -> __m256i {
        let at = self.q[i].wrapping_add(b * BLOCK + 4 * j).cast::<i32>();
        // SAFETY: in range, see above.
        _mm256_set1_epi32(unsafe { at.read_unaligned() })
    }

    /// The scale of row `i` in block `b`, eight times.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn scale(&self, i: usize, b: usize) -> __m256 {
        // SAFETY: in range, as above.
        _mm256_set1_ps(unsafe { *self.scale[i].wrapping_add(b) })
    }

    /// The scaled sum of row `i` in block `b`, eight times.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn sum(&self, i: usize, b: usize) -> __m256 {
        // SAFETY: in range, as above.
        _mm256_set1_ps(unsafe { *self.sum[i].wrapping_add(b) })
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn rows8<const R: usize>(tiles: &[Tile8], x: &Activations, row: usize) -> [[f32; WIDTH]; ROWS] {
    let x = Rows::<R>::new(x, row, tiles.len());
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_ps(); R];
    for (b, tile) in tiles.iter().enumerate() {
        let mut dots = [_mm256_setzero_si256(); R];
        for j in 0..BLOCK / 4 {
            let w = load(&tile.q, j);
            let magnitude = _mm256_abs_epi8(w);
            for (i, dot) in dots.iter_mut().enumerate() {
                // |w| * (x with the sign of w): pairs stay within 2 * 128 * 127, inside 16 bits.
                let signed = _mm256_sign_epi8(x.broadcast(i, b, j), w);
                let pairs = _mm256_maddubs_epi16(magnitude, signed);
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
            }
        }
        let d = halves(&tile.d);
        for i in 0..R {
            let scale = _mm256_mul_ps(d, x.scale(i, b));
            sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), scale, sums[i]);
        }
    }
    store(sums)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn rows4<const R: usize>(tiles: &[Tile4], x: &Activations, row: usize) -> [[f32; WIDTH]; ROWS] {
    let x = Rows::<R>::new(x, row, tiles.len());
    let ones = _mm256_set1_epi16(1);
    let low_bits = _mm256_set1_epi8(15);
    let mut sums = [_mm256_setzero_ps(); R];
    for (b, tile) in tiles.iter().enumerate() {
        let mut dots = [_mm256_setzero_si256(); R];
        for j in 0..BLOCK / 8 {
            let w = load(&tile.q, j);
            let low = _mm256_and_si256(w, low_bits);
            let high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_bits);
            for (i, dot) in dots.iter_mut().enumerate() {
                // 16 products of at most 15 * 127 stay inside 16 bits: widen once a block.
                let a = _mm256_maddubs_epi16(low, x.broadcast(i, b, j));
                let b = _mm256_maddubs_epi16(high, x.broadcast(i, b, j + BLOCK / 8));
                *dot = _mm256_add_epi16(*dot, _mm256_add_epi16(a, b));
            }
        }
        let (d, m) = (halves(&tile.d), halves(&tile.m));
        for i in 0..R {
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots[i], ones));
            let scale = _mm256_mul_ps(d, x.scale(i, b));
            sums[i] = _mm256_fmadd_ps(dot, scale, sums[i]);
            sums[i] = _mm256_fmadd_ps(m, x.sum(i, b), sums[i]);
        }
    }
    store(sums)
}

/// Vector `j` of 32 weights.
#[target_feature(enable = "avx2")]
#[inline]
fn load<T>(q: &[T], j: usize) -> __m256i {
    debug_assert!(size_of::<T>() == 1 && (j + 1) * 32 <= q.len());
    // SAFETY: `q` holds bytes, and `j` counts its vectors (128 or 256 bytes, checked in debug).
    unsafe { _mm256_loadu_si256(q.as_ptr().add(j * 32).cast()) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn halves(h: &[half::f16; WIDTH]) -> __m256 {
    // SAFETY: eight halves are 16 bytes.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(h.as_ptr().cast()) })
}

#[target_feature(enable = "avx2")]
#[inline]
fn store<const R: usize>(sums: [__m256; R]) -> [[f32; WIDTH]; ROWS] {
    let mut out = [[0f32; WIDTH]; ROWS];
    for (out, sum) in out.iter_mut().zip(sums) {
        // SAFETY: eight floats are 32 bytes.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
    }
    out
}
