//! From scores to weighted values.
//!
//! Each step has a fixed order of additions for a (query, chunk) pair, whatever else it computes and whatever
//! the instruction set.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and C are unrolled"
)]

use super::numbers::{Hidden, Number};
use super::vectors::{STRIDE, Vectors};
use crate::float::tanh;
use crate::simd::{Element, LANES, Loop, Simd, exp2, exp2_for_bf16};
use half::bf16;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
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
pub(super) struct AddWeighted<'a, E, N> {
    /// `[queries, width]`.
    pub sums: &'a mut [f32],
    /// The weight of query `i` and lane `j` of the values is at `i * STRIDE + j`; of a lane with two numbers, that
    /// of a key that the query does not see is 0.
    pub weights: &'a [f32],
    /// The keys of the chunk that each query sees.
    pub seen: &'a [Range<usize>],
    /// The number of the first value in the chunk, whose lane begins with it.
    pub first: usize,
    /// How many values there are.
    pub count: usize,
    /// [`Number::COUNT`] values each, of `width` lanes, whole vectors.
    pub values: Vectors<'a, E>,
    pub number: PhantomData<N>,
}

impl<E: Element, N: Number> Loop for AddWeighted<'_, E, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (all, width) = (self.seen.len(), self.values.width());
        assert!(width.is_multiple_of(LANES) && self.sums.len() >= all * width);
        let values = self.values.places().len();
        assert!(self.first.is_multiple_of(N::COUNT) && values == self.count.div_ceil(N::COUNT));
        assert!(all == 0 || self.weights.len() >= (all - 1) * STRIDE + values);
        let mut query = 0;
        while query < all {
            let rows = match all - query {
                6.. if N::sums::<S>() >= 6 => 6,
                3.. => 3,
                rows => rows,
            };
            // SAFETY: so many queries are left, and the rest has just been checked.
            unsafe { self.rows(s, query..query + rows) };
            query += rows;
        }
    }
}

impl<E: Element, N: Number> AddWeighted<'_, E, N> {
    /// 6, 3, 2 or 1 `queries`. What all of them see is added together, what is before and after it one by one.
    ///
    /// # Safety
    /// There are so many, whole vectors of sums, and weights of all values that they see.
    #[inline(always)]
    unsafe fn rows<S: Simd>(&mut self, s: S, queries: Range<usize>) {
        let all = self.values.places().len();
        let mut common = 0..self.count / N::COUNT;
        for query in queries.clone() {
            let seen = self.seen_by(query);
            let (start, end) = (seen.start.div_ceil(N::COUNT), seen.end / N::COUNT);
            common = common.start.max(start)..common.end.min(end);
        }
        common.end = common.end.max(common.start);
        for part in [0..common.start, common.end..all] {
            // SAFETY: the caller's contract.
            unsafe {
                if part.start == common.end {
                    let common = common.clone();
                    match queries.len() {
                        6 => self.columns::<S, 6>(s, queries.start, common, Hidden::Neither),
                        3 => self.columns::<S, 3>(s, queries.start, common, Hidden::Neither),
                        2 => self.columns::<S, 2>(s, queries.start, common, Hidden::Neither),
                        _ => self.columns::<S, 1>(s, queries.start, common, Hidden::Neither),
                    }
                }
                for query in queries.clone() {
                    self.alone(s, query, &part);
                }
            }
        }
    }

    /// The keys that a query sees, as places among the values.
    #[inline(always)]
    fn seen_by(&self, query: usize) -> Range<usize> {
        let seen = &self.seen[query];
        let end = seen.end.saturating_sub(self.first).min(self.count);
        seen.start.saturating_sub(self.first).min(end)..end
    }

    /// Adds the lanes of `values` that a query sees, of which it may see one half only.
    ///
    /// # Safety
    /// As for [`rows`](Self::rows).
    #[inline(always)]
    unsafe fn alone<S: Simd>(&mut self, s: S, query: usize, values: &Range<usize>) {
        let seen = self.seen_by(query);
        if seen.is_empty() || values.is_empty() {
            return;
        }
        let (first, last) = (seen.start / N::COUNT, seen.end / N::COUNT);
        let whole = seen.start.div_ceil(N::COUNT);
        // The first and the last are empty where it sees all keys of a lane.
        let parts = [
            (first..whole, Hidden::First),
            (whole..last, Hidden::Neither),
            (last.max(whole)..seen.end.div_ceil(N::COUNT), Hidden::Second),
        ];
        for (part, hidden) in parts {
            let part = part.start.max(values.start)..part.end.min(values.end);
            // SAFETY: the caller's contract.
            unsafe { self.columns::<S, 1>(s, query, part, hidden) };
        }
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
        hidden: Hidden,
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
                let tile = Tile {
                    sums: self.sums.as_mut_ptr().add(query * width + at),
                    weights: self.weights.as_ptr().add(query * STRIDE + values.start),
                    values: some,
                    at,
                    number: self.number,
                };
                at += LANES
                    * match (width - at) / LANES {
                        4.. if N::sums::<S>() >= 4 * R => tile.add::<S, R, 4>(s, hidden),
                        2.. if N::sums::<S>() >= 2 * R => tile.add::<S, R, 2>(s, hidden),
                        _ => tile.add::<S, R, 1>(s, hidden),
                    };
            }
        }
    }
}

/// Some sums, and the weights and values for them.
struct Tile<'a, E, N> {
    sums: *mut f32,
    weights: *const f32,
    values: Vectors<'a, E>,
    /// The first lane of each value.
    at: usize,
    number: PhantomData<N>,
}

impl<E: Element, N: Number> Tile<'_, E, N> {
    /// Adds `C` vectors of the values for `R` queries; returns `C`.
    ///
    /// # Safety
    /// The values and a weight for each can be read, and the sums be written.
    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const C: usize>(self, s: S, hidden: Hidden) -> usize {
        let (at, values, mut weights) = (self.at, self.values, self.weights);
        let data = values.data().as_ptr().wrapping_add(at);
        let mut to = [self.sums; R];
        let mut all = [[s.splat(0.0); C]; R];
        // SAFETY: the caller's contract.
        unsafe {
            for r in 1..R {
                to[r] = to[r - 1].add(values.width());
            }
            for r in 0..R {
                for c in 0..C {
                    all[r][c] = s.load(to[r].add(c * LANES));
                }
            }
            for (number, &place) in values.places().iter().enumerate() {
                let value = data.add(place);
                values.prefetch(number, at..at + C * LANES);
                if R > 3 || N::COUNT > 1 {
                    let mut vectors = [s.splat(0.0); C];
                    for c in 0..C {
                        vectors[c] = N::hide(s, E::load(s, value.add(c * LANES)), hidden);
                    }
                    for r in 0..R {
                        let weight = s.splat(*weights.add(r * STRIDE));
                        for c in 0..C {
                            all[r][c] = N::fma(s, weight, vectors[c], all[r][c]);
                        }
                    }
                } else {
                    // Fewer registers: of up to three weights, where vectors may be two registers each.
                    let mut splat = [s.splat(0.0); R];
                    for r in 0..R {
                        splat[r] = s.splat(*weights.add(r * STRIDE));
                    }
                    for c in 0..C {
                        let vector = E::load(s, value.add(c * LANES));
                        for r in 0..R {
                            all[r][c] = N::fma(s, splat[r], vector, all[r][c]);
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
}
