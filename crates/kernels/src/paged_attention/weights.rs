//! From scores to weighted values.
//!
//! Each step has a fixed order of additions for a (query, chunk) pair, whatever else it computes and whatever
//! the instruction set.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and C are unrolled"
)]

use super::vectors::{STRIDE, Vectors};
use crate::float::tanh;
use crate::simd::{Element, LANES, Loop, Simd, exp2, exp2_for_bf16};
use half::bf16;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Replaces each score by `cap * tanh(score / cap)`, times log2(e).
pub(super) struct Soften<'a> {
    pub scores: &'a mut [f32],
    pub cap: f32,
}

impl Loop for Soften<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for score in self.scores {
            *score = self.cap * LOG2_E * tanh(*score / self.cap);
        }
    }
}

/// Replaces the scores of each query that it sees by `2^(score - max)`: they are multiples of log2(e). Others in
/// the same 16 become 0.
pub(super) struct Weigh<'a> {
    /// `[queries, STRIDE]`, from the first of the chunk on.
    pub scores: &'a mut [f32],
    /// Of each query.
    pub seen: &'a [Range<usize>],
    /// Become the maxima of the scores that queries see, and the sums of the new values: minus infinity and 0
    /// for those that see none.
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    /// Whether the new values become bf16, of which two have the place of a score: those of a query move to the
    /// front of its `STRIDE`. The sums are of the values before that.
    pub halve: bool,
}

impl Loop for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let queries = self.scores.chunks_exact_mut(STRIDE).zip(self.seen);
        // First all maxima, so that the CPU need not wait for each.
        for ((scores, seen), max) in queries.zip(&mut *self.max) {
            let vectors = vectors(scores, seen);
            let mut maxima = s.splat(f32::NEG_INFINITY);
            for vector in vectors.iter() {
                // SAFETY: 16 numbers.
                maxima = s.max(maxima, unsafe { s.load(vector.as_ptr()) });
            }
            *max = s.max_of(maxima);
        }
        let queries = self.scores.chunks_exact_mut(STRIDE).zip(self.seen);
        for ((scores, seen), (max, sum)) in queries.zip(self.max.iter().zip(self.sum)) {
            let max = s.splat(*max);
            let mut sums = s.splat(0.0);
            let touched = touched(seen);
            let scores = scores[..touched.end].as_mut_ptr();
            for at in touched.step_by(LANES) {
                // SAFETY: 16 numbers from `at` on. Halves of them end before the next.
                unsafe {
                    let below = s.sub(s.load(scores.add(at)), max);
                    let weights = if self.halve {
                        let weights = exp2_for_bf16(s, below);
                        s.store_bf16(scores.cast::<bf16>().add(at), weights);
                        weights
                    } else {
                        let weights = exp2(s, below);
                        s.store(scores.add(at), weights);
                        weights
                    };
                    sums = s.add(sums, weights);
                }
            }
            *sum = s.sum_of(sums);
        }
    }
}

/// `seen`, extended to whole vectors.
#[inline(always)]
fn touched(seen: &Range<usize>) -> Range<usize> {
    let first = seen.start / LANES * LANES;
    first..seen.end.next_multiple_of(LANES).max(first)
}

/// The vectors of scores that `seen` touches. Scores of them that are not seen become minus infinity.
#[inline(always)]
fn vectors<'a>(scores: &'a mut [f32], seen: &Range<usize>) -> &'a mut [[f32; LANES]] {
    let touched = touched(seen);
    scores[touched.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end.max(touched.start)..touched.end].fill(f32::NEG_INFINITY);
    scores[touched].as_chunks_mut::<LANES>().0
}

/// `sums[query] += weights[query][i] * values[i]` for the values that each query sees, in order.
pub(super) struct AddWeighted<'a, E> {
    /// `[queries, width]`.
    pub sums: &'a mut [f32],
    /// The weight of query `i` and value `j` is at `i * STRIDE + j`.
    pub weights: &'a [f32],
    /// The keys of the chunk that each query sees.
    pub seen: &'a [Range<usize>],
    /// The number of the first value in the chunk.
    pub first: usize,
    /// Of `width` numbers, whole vectors.
    pub values: Vectors<'a, E>,
}

impl<E: Element> Loop for AddWeighted<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (all, width) = (self.seen.len(), self.values.width());
        assert!(width.is_multiple_of(LANES) && self.sums.len() >= all * width);
        let values = self.values.places().len();
        assert!(all == 0 || self.weights.len() >= (all - 1) * STRIDE + values);
        let mut query = 0;
        while query < all {
            // SAFETY: so many queries are left, and the rest has just been checked.
            query += match all - query {
                6.. => unsafe { self.rows::<S, 6>(s, query) },
                3.. => unsafe { self.rows::<S, 3>(s, query) },
                2 => unsafe { self.rows::<S, 2>(s, query) },
                _ => unsafe { self.rows::<S, 1>(s, query) },
            };
        }
    }
}

impl<E: Element> AddWeighted<'_, E> {
    /// `R` queries from `query` on; returns `R`. What all of them see is added together, what is before and
    /// after it one by one.
    ///
    /// # Safety
    /// There are so many, whole vectors of sums, and weights of all values that they see.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&mut self, s: S, query: usize) -> usize {
        let all = self.values.places().len();
        let (mut seen, mut common) = ([const { 0..0 }; R], 0..all);
        for r in 0..R {
            seen[r] = inside(&self.seen[query + r], self.first, all);
            common = common.start.max(seen[r].start)..common.end.min(seen[r].end);
        }
        // SAFETY: the caller's contract.
        unsafe {
            if common == (0..all) {
                self.columns::<S, R>(s, query, common);
                return R;
            }
            common.end = common.end.max(common.start);
            for r in 0..R {
                let before = seen[r].start..seen[r].end.min(common.start);
                self.columns::<S, 1>(s, query + r, before);
            }
            self.columns::<S, R>(s, query, common.clone());
            for r in 0..R {
                let after = seen[r].start.max(common.end)..seen[r].end;
                self.columns::<S, 1>(s, query + r, after);
            }
        }
        R
    }

    /// Adds `values` for `R` queries from `query` on, as many numbers of each at a time as fit in registers.
    ///
    /// # Safety
    /// As for [`rows`](Self::rows).
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(
        &mut self,
        s: S,
        query: usize,
        values: Range<usize>,
    ) {
        if values.is_empty() {
            return;
        }
        let width = self.values.width();
        let some = self.values.slice(values.clone());
        let mut at = 0;
        while at < width {
            // SAFETY: the caller's contract; `Vectors` are within the data.
            unsafe {
                let sums = self.sums.as_mut_ptr().add(query * width + at);
                let weights = self.weights.as_ptr().add(query * STRIDE + values.start);
                let vectors = (width - at) / LANES;
                at += LANES
                    * match vectors {
                        4.. if S::SUMS >= 4 * R => add::<S, E, R, 4>(s, sums, weights, some, at),
                        2.. if S::SUMS >= 2 * R => add::<S, E, R, 2>(s, sums, weights, some, at),
                        _ => add::<S, E, R, 1>(s, sums, weights, some, at),
                    };
            }
        }
    }
}

/// The keys `seen` of a chunk as places among `all` of them, which begin with `first`.
#[inline(always)]
fn inside(seen: &Range<usize>, first: usize, all: usize) -> Range<usize> {
    let end = seen.end.saturating_sub(first).min(all);
    seen.start.saturating_sub(first).min(end)..end
}

/// Adds `C` vectors of the values, from number `at` of each on, for `R` queries; returns `C`.
///
/// # Safety
/// The values and a weight for each can be read, and the sums be written.
#[inline(always)]
unsafe fn add<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    sums: *mut f32,
    mut weights: *const f32,
    values: Vectors<'_, E>,
    at: usize,
) -> usize {
    let (width, data) = (values.width(), values.data().as_ptr().wrapping_add(at));
    let mut to = [sums; R];
    let mut all = [[s.splat(0.0); C]; R];
    // SAFETY: the caller's contract.
    unsafe {
        for r in 1..R {
            to[r] = to[r - 1].add(width);
        }
        for r in 0..R {
            for c in 0..C {
                all[r][c] = s.load(to[r].add(c * LANES));
            }
        }
        for (number, &place) in values.places().iter().enumerate() {
            let value = data.add(place);
            if R > 3 {
                let mut vectors = [s.splat(0.0); C];
                for c in 0..C {
                    vectors[c] = E::load(s, value.add(c * LANES));
                }
                for r in 0..R {
                    let weight = s.splat(*weights.add(r * STRIDE));
                    for c in 0..C {
                        all[r][c] = s.fma(weight, vectors[c], all[r][c]);
                    }
                }
            } else {
                // More queries have copies, which are in the caches.
                values.prefetch(number, at..at + C * LANES);
                // Fewer registers: of up to three weights, where vectors may be two registers each.
                let mut splat = [s.splat(0.0); R];
                for r in 0..R {
                    splat[r] = s.splat(*weights.add(r * STRIDE));
                }
                for c in 0..C {
                    let vector = E::load(s, value.add(c * LANES));
                    for r in 0..R {
                        all[r][c] = s.fma(splat[r], vector, all[r][c]);
                    }
                }
            }
            weights = weights.add(1);
        }
        for r in 0..R {
            for c in 0..C {
                s.store(to[r].add(c * LANES), all[r][c]);
            }
        }
    }
    C
}
