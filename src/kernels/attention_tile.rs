//! What attention does with one query and one tile of keys: scores, weights, weighted values.
//!
//! Each function keeps one order of additions for a (query, key) or a (query, tile), whatever else
//! is computed beside it. The AVX2 and the portable path differ in their orders; a process uses one
//! of them for good.

use super::float::exp;

/// Keys a tile at most.
pub(super) const TILE: usize = 64;
/// Values a vector, and partial sums of a sum.
const LANES: usize = 8;

/// Whether this CPU runs the AVX2 path, for heads of this width.
pub(super) fn is_fast(head_dim: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        head_dim.is_multiple_of(LANES)
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = head_dim;
        false
    }
}

/// Calls the AVX2 or the portable function of a name.
macro_rules! dispatch {
    ($fast:expr, $name:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if $fast {
            // SAFETY: `is_fast` has seen that the CPU has the features.
            return unsafe { avx2::$name($($argument),*) };
        }
        portable::$name($($argument),*)
    }};
}

/// `scores[i] = query . keys[places[i]..]` for each of `places`.
pub(super) fn scores(
    fast: bool,
    query: &[f32],
    keys: &[f32],
    places: &[usize],
    scores: &mut [f32],
) {
    assert!(scores.len() >= places.len());
    assert!(places.iter().all(|place| place + query.len() <= keys.len()));
    dispatch!(fast, scores(query, keys, places, scores))
}

/// Turns scores into `e^(score - max)` and gives back their sum.
pub(super) fn weigh(fast: bool, scores: &mut [f32], max: f32) -> f32 {
    dispatch!(fast, weigh(scores, max))
}

/// `sum += weights[i] * values[places[i]..]` for each of `places`, in order.
pub(super) fn add_weighted(
    fast: bool,
    sum: &mut [f32],
    weights: &[f32],
    values: &[f32],
    places: &[usize],
) {
    assert!(weights.len() >= places.len());
    assert!(places.iter().all(|place| place + sum.len() <= values.len()));
    dispatch!(fast, add_weighted(sum, weights, values, places))
}

mod portable {
    use super::{LANES, exp};

    pub(super) fn scores(query: &[f32], keys: &[f32], places: &[usize], scores: &mut [f32]) {
        for (score, &place) in scores.iter_mut().zip(places) {
            let mut lanes = [0f32; LANES];
            for (q, k) in query.chunks(LANES).zip(keys[place..].chunks(LANES)) {
                for ((lane, q), k) in lanes.iter_mut().zip(q).zip(k) {
                    *lane += q * k;
                }
            }
            *score = lanes.iter().sum();
        }
    }

    #[inline(always)]
    pub(super) fn weigh(scores: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0f32; LANES];
        for chunk in scores.chunks_mut(LANES) {
            for (score, lane) in chunk.iter_mut().zip(&mut lanes) {
                *score = exp(*score - max);
                *lane += *score;
            }
        }
        lanes.iter().sum()
    }

    pub(super) fn add_weighted(sum: &mut [f32], weights: &[f32], values: &[f32], places: &[usize]) {
        for (weight, &place) in weights.iter().zip(places) {
            for (sum, value) in sum.iter_mut().zip(&values[place..]) {
                *sum += weight * value;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::LANES;
    use std::arch::x86_64::*;

    /// Eight keys at a time: the last ones are filled up with the first, whose sums are dropped.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn scores(query: &[f32], keys: &[f32], places: &[usize], scores: &mut [f32]) {
        for (places, scores) in places.chunks(LANES).zip(scores.chunks_mut(LANES)) {
            let mut rows = [keys[places[0]..].as_ptr(); LANES];
            for (row, &place) in rows.iter_mut().zip(places) {
                *row = keys[place..].as_ptr();
            }
            let mut sums = [_mm256_setzero_ps(); LANES];
            for at in (0..query.len()).step_by(LANES) {
                // SAFETY: `query` is a multiple of eight long, and every key as long.
                let q = unsafe { _mm256_loadu_ps(query.as_ptr().add(at)) };
                for (sum, row) in sums.iter_mut().zip(rows) {
                    // SAFETY: as above.
                    *sum = _mm256_fmadd_ps(q, unsafe { _mm256_loadu_ps(row.add(at)) }, *sum);
                }
            }
            let mut out = [0f32; LANES];
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), across(sums)) };
            let count = places.len();
            scores[..count].copy_from_slice(&out[..count]);
        }
    }

    /// The eight sums of eight vectors, each added up in the same order.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn across(v: [__m256; LANES]) -> __m256 {
        let pairs = |a, b| _mm256_hadd_ps(a, b);
        let low = pairs(pairs(v[0], v[1]), pairs(v[2], v[3]));
        let high = pairs(pairs(v[4], v[5]), pairs(v[6], v[7]));
        let halves = _mm256_permute2f128_ps::<0x21>(low, high);
        _mm256_add_ps(halves, _mm256_blend_ps::<0xF0>(low, high))
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn weigh(scores: &mut [f32], max: f32) -> f32 {
        super::portable::weigh(scores, max)
    }

    /// Eight vectors of the sum at a time stay in registers over all keys.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_weighted(sum: &mut [f32], weights: &[f32], values: &[f32], places: &[usize]) {
        let mut start = 0;
        while start < sum.len() {
            start += match (sum.len() - start) / LANES {
                8.. => add_part::<8>(sum, start, weights, values, places),
                4.. => add_part::<4>(sum, start, weights, values, places),
                2.. => add_part::<2>(sum, start, weights, values, places),
                _ => add_part::<1>(sum, start, weights, values, places),
            };
        }
    }

    /// Vectors `start / 8..` of the sum, `N` of them; gives back how many floats those are.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn add_part<const N: usize>(
        sum: &mut [f32],
        start: usize,
        weights: &[f32],
        values: &[f32],
        places: &[usize],
    ) -> usize {
        let part = &mut sum[start..start + N * LANES];
        let mut sums = [_mm256_setzero_ps(); N];
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `part` has N vectors.
            *sum = unsafe { _mm256_loadu_ps(part.as_ptr().add(i * LANES)) };
        }
        for (&weight, &place) in weights.iter().zip(places) {
            let weight = _mm256_set1_ps(weight);
            let row = values[place + start..].as_ptr();
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: every value is as long as the whole sum.
                let value = unsafe { _mm256_loadu_ps(row.add(i * LANES)) };
                *sum = _mm256_fmadd_ps(weight, value, *sum);
            }
        }
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: `part` has N vectors.
            unsafe { _mm256_storeu_ps(part.as_mut_ptr().add(i * LANES), sum) };
        }
        N * LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, salt: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 37 + salt * 101) % 61) as f32 / 30.0 - 1.0)
            .collect()
    }

    /// Both paths against f64; and a key's score and a tile's weights do not depend on how many
    /// keys come after.
    #[test]
    fn both_paths_agree_with_f64_and_with_fewer_keys() {
        for d in [8, 24, 40, 64, 128, 13] {
            let (query, keys) = (noise(d, 1), noise(TILE * d, 2));
            let places: Vec<usize> = (0..TILE).map(|i| (i * 11 % TILE) * d).collect();
            for fast in [false, is_fast(d)] {
                let mut all = [0f32; TILE];
                scores(fast, &query, &keys, &places, &mut all);
                let mut sum = vec![0.5; d];
                add_weighted(fast, &mut sum, &all, &keys, &places);
                for count in [1, 7, 8, 9, 33] {
                    let mut some = [0f32; TILE];
                    scores(fast, &query, &keys, &places[..count], &mut some);
                    assert_eq!(some[..count], all[..count], "d {d}, fast {fast}");
                }
                let exact = |place: usize| -> f64 {
                    let pairs = query.iter().zip(&keys[place..place + d]);
                    pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
                };
                for (score, &place) in all.iter().zip(&places) {
                    assert!((f64::from(*score) - exact(place)).abs() < 1e-4);
                }
                for (i, sum) in sum.iter().enumerate() {
                    let terms = places.iter().map(|&p| exact(p) * f64::from(keys[p + i]));
                    let want = 0.5 + terms.sum::<f64>();
                    assert!((f64::from(*sum) - want).abs() < 1e-2, "{sum} {want}");
                }
            }
        }
    }

    #[test]
    fn weights_are_exponentials_and_their_sum() {
        for fast in [false, is_fast(8)] {
            for count in [1, 5, 8, 31, 64] {
                let original = noise(count, 3);
                let mut weights = original.clone();
                let sum = weigh(fast, &mut weights, 1.0);
                let want: f32 = original.iter().map(|x| (x - 1.0).exp()).sum();
                assert!((sum - want).abs() < 1e-5 * want);
            }
        }
    }
}
