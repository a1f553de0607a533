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

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn rows8<const R: usize>(tiles: &[Tile8], x: &Activations, row: usize) -> [[f32; WIDTH]; ROWS] {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_ps(); R];
    for (b, tile) in tiles.iter().enumerate() {
        let xs: [&[i8]; R] = std::array::from_fn(|i| x.block(row + i, b));
        let mut dots = [_mm256_setzero_si256(); R];
        for j in 0..BLOCK / 4 {
            let w = load(&tile.q, j);
            let magnitude = _mm256_abs_epi8(w);
            for i in 0..R {
                // |w| * (x with the sign of w): pairs stay within 2 * 128 * 127, inside 16 bits.
                let signed = _mm256_sign_epi8(broadcast(xs[i], j), w);
                let pairs = _mm256_maddubs_epi16(magnitude, signed);
                dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(pairs, ones));
            }
        }
        let d = halves(&tile.d);
        for i in 0..R {
            let scale = _mm256_set1_ps(x.scale[x.at(row + i, b)]);
            let scale = _mm256_mul_ps(d, scale);
            sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), scale, sums[i]);
        }
    }
    store(sums)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn rows4<const R: usize>(tiles: &[Tile4], x: &Activations, row: usize) -> [[f32; WIDTH]; ROWS] {
    let ones = _mm256_set1_epi16(1);
    let low_bits = _mm256_set1_epi8(15);
    let mut sums = [_mm256_setzero_ps(); R];
    for (b, tile) in tiles.iter().enumerate() {
        let xs: [&[i8]; R] = std::array::from_fn(|i| x.block(row + i, b));
        let mut dots = [_mm256_setzero_si256(); R];
        for j in 0..BLOCK / 8 {
            let w = load(&tile.q, j);
            let low = _mm256_and_si256(w, low_bits);
            let high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_bits);
            for i in 0..R {
                // 16 products of at most 15 * 127 stay inside 16 bits: widen once a block.
                let a = _mm256_maddubs_epi16(low, broadcast(xs[i], j));
                let b = _mm256_maddubs_epi16(high, broadcast(xs[i], j + BLOCK / 8));
                dots[i] = _mm256_add_epi16(dots[i], _mm256_add_epi16(a, b));
            }
        }
        let (d, m) = (halves(&tile.d), halves(&tile.m));
        for i in 0..R {
            let at = x.at(row + i, b);
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots[i], ones));
            let scale = _mm256_mul_ps(d, _mm256_set1_ps(x.scale[at]));
            sums[i] = _mm256_fmadd_ps(dot, scale, sums[i]);
            sums[i] = _mm256_fmadd_ps(m, _mm256_set1_ps(x.sum[at]), sums[i]);
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

/// Activations `4 j..4 j + 4`, eight times.
#[target_feature(enable = "avx2")]
#[inline]
fn broadcast(x: &[i8], j: usize) -> __m256i {
    debug_assert!(j * 4 + 4 <= x.len());
    // SAFETY: a block has 32 values and `j < 8`.
    _mm256_set1_epi32(unsafe { x.as_ptr().add(j * 4).cast::<i32>().read_unaligned() })
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
