//! The loops over a tile with AVX2, FMA and F16C. They take a few queries and a few keys at once in
//! registers, so that each loaded vector is used several times. A sum has the same order of additions
//! for any number of queries and keys.

use super::portable;
use super::vectors::{Element, STRIDE, Vectors};
use crate::kernels::cpu::Avx2;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Floats per vector.
const WIDTH: usize = 8;

/// How many of `left` queries to take at once: three or two, or one if there is only one.
fn at_once(left: usize) -> usize {
    match left {
        4 => 2,
        left => left.min(3),
    }
}

/// Takes four keys with three or two queries, or eight with one: enough sums to hide the latency of
/// additions.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scores<E: Load>(_: Avx2, queries: &[f32], keys: Vectors<'_, E>, scores: &mut [f32]) {
    let width = keys.width();
    let all = queries.len() / width;
    if all == 1 {
        for (places, scores) in keys.places().chunks(8).zip(scores.chunks_mut(8)) {
            dots::<E, 1, 8>(queries, keys.rows(places), width, scores);
        }
        return;
    }
    for (i, places) in keys.places().chunks(4).enumerate() {
        let rows = keys.rows::<4>(places);
        let mut query = 0;
        while query < all {
            let queries = &queries[query * width..];
            let scores = &mut scores[query * STRIDE + i * 4..];
            let count = at_once(all - query);
            match count {
                3 => dots::<E, 3, 4>(queries, rows, width, scores),
                _ => dots::<E, 2, 4>(queries, rows, width, scores),
            }
            query += count;
        }
    }
}

/// `N` queries with `K` keys, 4 or 8, each of `width` numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dots<E: Load, const N: usize, const K: usize>(
    queries: &[f32],
    keys: [&[E]; K],
    width: usize,
    scores: &mut [f32],
) {
    assert!(width.is_multiple_of(WIDTH) && keys.iter().all(|key| key.len() == width));
    assert!(queries.len() >= N * width && scores.len() >= (N - 1) * STRIDE + K);
    let mut sums = [[_mm256_setzero_ps(); K]; N];
    for at in (0..width).step_by(WIDTH) {
        let mut q = [_mm256_setzero_ps(); N];
        for (i, q) in q.iter_mut().enumerate() {
            // SAFETY: there are N queries, each of whole vectors.
            *q = unsafe { _mm256_loadu_ps(queries.as_ptr().add(i * width + at)) };
        }
        for (j, key) in keys.iter().enumerate() {
            // SAFETY: keys are whole vectors, as asserted.
            let k = unsafe { E::load(key.as_ptr().add(at)) };
            for (sums, q) in sums.iter_mut().zip(q) {
                sums[j] = _mm256_fmadd_ps(q, k, sums[j]);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for j in (0..K).step_by(4) {
            let four = across(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
            // SAFETY: there are N rows of scores, with room for K each.
            unsafe { _mm_storeu_ps(scores.as_mut_ptr().add(i * STRIDE + j), four) };
        }
    }
}

/// The sums of four vectors, each in the same order.
#[target_feature(enable = "avx2")]
#[inline]
fn across(a: __m256, b: __m256, c: __m256, d: __m256) -> __m128 {
    // Pairs the halves of a and b, then those of c and d: one shuffle, where a horizontal addition
    // takes two.
    let fold = |a, b| {
        let (straight, crossed) = (
            _mm256_blend_ps::<0xCC>(a, b),
            _mm256_shuffle_ps::<0x4E>(a, b),
        );
        _mm256_add_ps(straight, crossed)
    };
    let (ab, cd) = (fold(a, b), fold(c, d));
    let four = _mm256_add_ps(
        _mm256_shuffle_ps::<0x88>(ab, cd),
        _mm256_shuffle_ps::<0xDD>(ab, cd),
    );
    _mm_add_ps(
        _mm256_castps256_ps128(four),
        _mm256_extractf128_ps::<1>(four),
    )
}

#[target_feature(enable = "avx2")]
pub(super) fn soften(_: Avx2, scores: &mut [f32], cap: f32) {
    portable::soften(scores, cap);
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn weigh(_: Avx2, scores: &mut [f32]) -> (f32, f32) {
    let (whole, rest) = scores.as_chunks_mut::<WIDTH>();
    // The last vector is padded with elements of weight zero.
    let mut last = [f32::NEG_INFINITY; WIDTH];
    last[..rest.len()].copy_from_slice(rest);
    let mut maxima = load(&last);
    for part in whole.iter() {
        maxima = _mm256_max_ps(maxima, load(part));
    }
    let mut eight = [0f32; WIDTH];
    store(&mut eight, maxima);
    let max = eight.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let max_everywhere = _mm256_set1_ps(max);
    let mut sums = _mm256_setzero_ps();
    for part in whole {
        let weights = exp(_mm256_sub_ps(load(part), max_everywhere));
        sums = _mm256_add_ps(sums, weights);
        store(part, weights);
    }
    if !rest.is_empty() {
        let weights = exp(_mm256_sub_ps(load(&last), max_everywhere));
        sums = _mm256_add_ps(sums, weights);
        store(&mut last, weights);
        rest.copy_from_slice(&last[..rest.len()]);
    }
    let zero = _mm256_setzero_ps();
    (max, _mm_cvtss_f32(across(sums, zero, zero, zero)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(from: &[f32; WIDTH]) -> __m256 {
    // SAFETY: eight floats.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store(to: &mut [f32; WIDTH], from: __m256) {
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), from) }
}

/// Like [`crate::kernels::float::exp`], for numbers up to 0, with fused additions.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn exp(x: __m256) -> __m256 {
    let number = |x: f32| _mm256_set1_ps(x);
    let round = number(12_582_912.0);
    // With the arguments in this order a NaN stays a NaN.
    let clamped = _mm256_max_ps(number(-88.0), x);
    let shifted = _mm256_fmadd_ps(clamped, number(std::f32::consts::LOG2_E), round);
    let n = _mm256_sub_ps(shifted, round);
    let r = _mm256_fnmadd_ps(n, number(0.693_359_4), clamped);
    let r = _mm256_fnmadd_ps(n, number(-2.121_944_4e-4), r);
    let mut p = number(1.987_569_1e-4);
    for factor in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = _mm256_fmadd_ps(p, r, number(factor));
    }
    let e_r = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), number(1.0));
    // The low bits of `shifted` are n, which is added to the exponent of e^r.
    let n_bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e_r), n_bits));
    let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(x, number(-87.0));
    _mm256_andnot_ps(tiny, scaled)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_weighted<E: Load>(
    _: Avx2,
    sums: &mut [f32],
    weights: &[f32],
    counts: &[usize],
    values: Vectors<'_, E>,
) {
    let mut query = 0;
    while query < counts.len() {
        let sums = &mut sums[query * values.width()..];
        let weights = &weights[query * STRIDE..];
        let queries = at_once(counts.len() - query);
        // Counts are ascending, so the first query sees the fewest.
        let all = counts[query];
        match queries {
            3 => rows::<E, 3>(sums, weights, values.range(0, all)),
            2 => rows::<E, 2>(sums, weights, values.range(0, all)),
            _ => rows::<E, 1>(sums, weights, values.range(0, all)),
        }
        for (i, &count) in counts[query..query + queries].iter().enumerate().skip(1) {
            if count > all {
                let sums = &mut sums[i * values.width()..];
                rows::<E, 1>(sums, &weights[i * STRIDE + all..], values.range(all, count));
            }
        }
        query += queries;
    }
}

/// Adds the whole width for `N` queries, as many vectors at a time as fit in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<E: Load, const N: usize>(sums: &mut [f32], weights: &[f32], values: Vectors<'_, E>) {
    let vectors = values.width() / WIDTH;
    let mut start = 0;
    while start < vectors {
        let at = start * WIDTH;
        start += match vectors - start {
            8.. if N == 1 => part::<E, N, 8>(sums, at, weights, values),
            4.. => part::<E, N, 4>(sums, at, weights, values),
            2.. => part::<E, N, 2>(sums, at, weights, values),
            _ => part::<E, N, 1>(sums, at, weights, values),
        };
    }
}

/// Adds `V` vectors from `at` on, which stay in registers over all values; returns `V`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn part<E: Load, const N: usize, const V: usize>(
    sums: &mut [f32],
    at: usize,
    weights: &[f32],
    values: Vectors<'_, E>,
) -> usize {
    let width = values.width();
    assert!(at + V * WIDTH <= width && sums.len() >= N * width);
    assert!(weights.len() >= (N - 1) * STRIDE + values.places().len());
    let mut parts = [[_mm256_setzero_ps(); V]; N];
    for (query, parts) in parts.iter_mut().enumerate() {
        for (i, part) in parts.iter_mut().enumerate() {
            // SAFETY: there are N sums, and V vectors of each from `at` on.
            *part = unsafe { _mm256_loadu_ps(sums.as_ptr().add(query * width + at + i * WIDTH)) };
        }
    }
    for (number, &place) in values.places().iter().enumerate() {
        let mut weight = [_mm256_setzero_ps(); N];
        for (query, weight) in weight.iter_mut().enumerate() {
            // SAFETY: each of N rows of weights has one weight per place.
            *weight = _mm256_set1_ps(unsafe { *weights.get_unchecked(query * STRIDE + number) });
        }
        for i in 0..V {
            // SAFETY: `Vectors` are whole vectors within the data.
            let value = unsafe { E::load(values.data().as_ptr().add(place + at + i * WIDTH)) };
            for (parts, weight) in parts.iter_mut().zip(weight) {
                parts[i] = _mm256_fmadd_ps(weight, value, parts[i]);
            }
        }
    }
    for (query, parts) in parts.iter().enumerate() {
        for (i, part) in parts.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_ps(sums.as_mut_ptr().add(query * width + at + i * WIDTH), *part)
            };
        }
    }
    V
}

/// An element type that is loaded as a vector of eight floats.
pub(super) trait Load: Element {
    /// Loads eight numbers.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C, and eight numbers can be read at `from`.
    unsafe fn load(from: *const Self) -> __m256;
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { _mm256_loadu_ps(from) }
    }
}

impl Load for f16 {
    #[inline(always)]
    unsafe fn load(from: *const f16) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

impl Load for bf16 {
    /// A bf16 is the upper half of an f32.
    #[inline(always)]
    unsafe fn load(from: *const bf16) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen<E: Load>(_: Avx2, from: &[E], to: &mut [f32]) {
    let (whole, rest) = from.as_chunks::<WIDTH>();
    let (to, last) = to[..from.len()].as_chunks_mut::<WIDTH>();
    for (from, to) in whole.iter().zip(to) {
        // SAFETY: eight numbers.
        store(to, unsafe { E::load(from.as_ptr()) });
    }
    for (from, to) in rest.iter().zip(last) {
        *to = from.to_f32();
    }
}
