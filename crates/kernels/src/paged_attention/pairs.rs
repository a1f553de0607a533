//! Products of bf16 with bf16, for pools in bf16: AVX512-BF16 multiplies two pairs of them where f32 has one
//! product.
//!
//! Queries and softmax weights are rounded to bf16 as well. Numbers come in pairs, and a sum takes the second
//! product of a pair, then the first, each by a fused multiply-add, as `vdpbf16ps` does by Intel's manual and on
//! Zen 4 ([`Simd::dot_pairs`]). So instruction sets without it give the same bits (but for numbers below 1.2e-38,
//! which it takes as zeros). A score adds the pairs of a head in one order, a weighted sum those of keys `2i` and
//! `2i + 1` of a chunk: by number, so that nothing but the numbers matters.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and C are unrolled"
)]

use super::vectors::{STRIDE, Vectors};
use crate::simd::{LANES, Loop, Simd};
use half::bf16;
use std::ops::Range;

/// Pairs of a head as kernels see them: padded with zeros to whole vectors.
pub(super) fn pairs_of(head_dim: usize) -> usize {
    head_dim.div_ceil(2).next_multiple_of(LANES)
}

/// Multiplies a query by `factor` and rounds it.
pub(super) struct LoadQuery<'a> {
    pub from: &'a [f32],
    pub factor: f32,
    /// [`pairs_of`] its length, in the order of [`PackKeys`].
    pub to: &'a mut [f32],
}

impl Loop for LoadQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.to.as_chunks_mut::<LANES>().0.iter_mut();
        assert!(self.from.len() <= blocks.len() * 2 * LANES);
        for (from, to) in self.from.chunks(2 * LANES).zip(blocks) {
            let mut numbers = [0.0; 2 * LANES];
            numbers[..from.len()].copy_from_slice(from);
            let mut pairs = [0.0; LANES];
            for half in [0, LANES] {
                // SAFETY: 16 numbers each.
                unsafe {
                    let scaled = s.mul(s.load(numbers[half..].as_ptr()), s.splat(self.factor));
                    s.store_bf16(pairs.as_mut_ptr().cast::<bf16>().add(half), scaled);
                }
            }
            for i in 0..LANES {
                to[i] = pairs[i % 2 * (LANES / 2) + i / 2];
            }
        }
    }
}

/// Transposes keys.
pub(super) struct PackKeys<'a> {
    pub keys: Vectors<'a, bf16>,
    /// `[keys / 16, pairs, 16]`: of each 16 pairs first 0, 8, 1, 9 and so on. Where there are fewer than 16 keys
    /// the rest is not specified.
    pub to: &'a mut [f32],
}

impl Loop for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let length = self.keys.width();
        let strips = self.to.chunks_exact_mut(LANES * pairs_of(length));
        assert!(self.keys.places().len() <= strips.len() * LANES);
        let whole = length / (2 * LANES) * (2 * LANES);
        for (i, (places, strip)) in self.keys.places().chunks(LANES).zip(strips).enumerate() {
            for j in 0..LANES {
                self.keys.prefetch(LANES * i + j, 0..length);
            }
            let rows = self.keys.rows::<LANES>(places);
            let mut from = [std::ptr::null::<f32>(); LANES];
            for (from, row) in from.iter_mut().zip(rows) {
                *from = row.as_ptr().cast();
            }
            let mut to = strip.as_mut_ptr();
            // SAFETY: 16 pairs of each row, and 16 vectors of the strip, one after the other.
            unsafe {
                for _ in 0..whole / (2 * LANES) {
                    s.transpose(&from, to, 2 * LANES);
                    for from in &mut from {
                        *from = from.add(LANES);
                    }
                    to = to.add(LANES * LANES);
                }
            }
            if whole < length {
                let mut padded = [[bf16::ZERO; 2 * LANES]; LANES];
                for ((padded, row), from) in padded.iter_mut().zip(rows).zip(&mut from) {
                    padded[..length - whole].copy_from_slice(&row[whole..]);
                    *from = padded.as_ptr().cast();
                }
                // SAFETY: as above.
                unsafe { s.transpose(&from, to, 2 * LANES) };
            }
        }
    }
}

/// The dot products of queries with packed keys.
pub(super) struct PairScores<'a> {
    /// `[queries, pairs]`, from [`LoadQuery`].
    pub queries: &'a [f32],
    /// Whole vectors.
    pub pairs: usize,
    /// From [`PackKeys`].
    pub keys: &'a [f32],
    /// How many there are.
    pub count: usize,
    /// The score of query `i` and key `k` is at `i * STRIDE + k`; up to 15 elements after the last are
    /// overwritten.
    pub scores: &'a mut [f32],
}

impl Loop for PairScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (all, pairs) = (self.queries.len() / self.pairs, self.pairs);
        let keys = self.count.next_multiple_of(LANES);
        assert!(pairs.is_multiple_of(LANES) && keys <= STRIDE && self.keys.len() >= keys * pairs);
        assert!(all == 0 || self.scores.len() >= (all - 1) * STRIDE + keys);
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

impl PairScores<'_> {
    /// `R` queries from `query` on; returns `R`.
    ///
    /// # Safety
    /// There are so many, and keys and scores for them.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&mut self, s: S, query: usize) -> usize {
        let strips = self.count.div_ceil(LANES);
        // SAFETY: the caller's contract.
        unsafe {
            let queries = self.queries.as_ptr().add(query * self.pairs);
            let mut keys = self.keys.as_ptr();
            let mut scores = self.scores.as_mut_ptr().add(query * STRIDE);
            let mut strip = 0;
            while strip < strips {
                let done = match strips - strip {
                    4.. if S::SUMS >= 4 * R => {
                        score::<S, R, 4>(s, queries, keys, self.pairs, scores)
                    }
                    2.. if S::SUMS >= 2 * R => {
                        score::<S, R, 2>(s, queries, keys, self.pairs, scores)
                    }
                    _ => score::<S, R, 1>(s, queries, keys, self.pairs, scores),
                };
                strip += done;
                keys = keys.add(done * self.pairs * LANES);
                scores = scores.add(done * LANES);
            }
        }
        R
    }
}

/// `R` queries and `C` times 16 keys; returns `C`.
///
/// # Safety
/// The queries and keys can be read, and the scores written.
#[inline(always)]
unsafe fn score<S: Simd, const R: usize, const C: usize>(
    s: S,
    queries: *const f32,
    keys: *const f32,
    pairs: usize,
    scores: *mut f32,
) -> usize {
    let mut q = [queries; R];
    let mut k = [keys; C];
    let mut sums = [[s.splat(0.0); C]; R];
    // SAFETY: the caller's contract: queries of `pairs` and strips of `pairs` times 16 pairs.
    unsafe {
        for r in 1..R {
            q[r] = q[r - 1].add(pairs);
        }
        for c in 1..C {
            k[c] = k[c - 1].add(pairs * LANES);
        }
        for at in 0..pairs {
            let mut key = [s.splat(0.0); C];
            for c in 0..C {
                key[c] = s.load(k[c]);
                k[c] = k[c].add(LANES);
            }
            for r in 0..R {
                let query = s.splat(*q[r].add(at));
                for c in 0..C {
                    sums[r][c] = s.dot_pairs(query, key[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                s.store(scores.add(r * STRIDE + c * LANES), sums[r][c]);
            }
        }
    }
    C
}

/// Joins the values of two keys each.
pub(super) struct PackValues<'a> {
    /// The first has an even number.
    pub values: Vectors<'a, bf16>,
    /// The length of values that are padded with zeros, whole vectors.
    pub width: usize,
    /// `[values / 2, width]` pairs; an odd last one has zeros beside it.
    pub to: &'a mut [f32],
}

impl Loop for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (data, length) = (self.values.data(), self.values.width());
        let pairs = self.to.chunks_exact_mut(self.width);
        assert!(self.width.is_multiple_of(LANES) && length <= self.width);
        assert!(self.values.places().len() <= 2 * pairs.len());
        let zeros = [bf16::ZERO; LANES];
        for (i, (places, to)) in self.values.places().chunks(2).zip(pairs).enumerate() {
            self.values.prefetch(2 * i, 0..length);
            self.values.prefetch(2 * i + 1, 0..length);
            let first = &data[places[0]..places[0] + length];
            let (second, step) = match places {
                [_, place] => (&data[*place..place + length], LANES),
                _ => (zeros.as_slice(), 0),
            };
            let (whole, rest) = to.split_at_mut(length / LANES * LANES);
            for (i, to) in whole.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                // SAFETY: 16 numbers each.
                unsafe {
                    let low = s.load_bf16(first.as_ptr().add(i * LANES));
                    let high = s.load_bf16(second.as_ptr().add(i * step));
                    s.store(to.as_mut_ptr(), s.pair(low, high));
                }
            }
            if !rest.is_empty() {
                let mut padded = [[bf16::ZERO; LANES]; 2];
                let (tail, from) = (length % LANES, length / LANES);
                padded[0][..tail].copy_from_slice(&first[from * LANES..]);
                padded[1][..tail].copy_from_slice(&second[from * step..][..tail]);
                // SAFETY: 16 numbers each.
                unsafe {
                    let low = s.load_bf16(padded[0].as_ptr());
                    let high = s.load_bf16(padded[1].as_ptr());
                    s.store(rest.as_mut_ptr(), s.pair(low, high));
                }
            }
        }
    }
}

/// `sums[query] += weights[query][i] * values[i]` for the values that each query sees, pair after pair.
pub(super) struct AddPairs<'a> {
    /// `[queries, width]`.
    pub sums: &'a mut [f32],
    /// The weights of query `i` for the pair `j` of the values are at `i * STRIDE + j`; that of a key of a pair
    /// that the query does not see is 0.
    pub weights: &'a [f32],
    /// The keys of the chunk that each query sees.
    pub seen: &'a [Range<usize>],
    /// The number of the first value in the chunk, which is even.
    pub first: usize,
    /// From [`PackValues`].
    pub values: &'a [f32],
    /// How many there are.
    pub count: usize,
    /// Whole vectors.
    pub width: usize,
}

/// The key of a pair that a query does not see.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hidden {
    Neither,
    First,
    Second,
}

impl Loop for AddPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (all, width, pairs) = (self.seen.len(), self.width, self.count.div_ceil(2));
        assert!(width.is_multiple_of(LANES) && self.sums.len() >= all * width);
        assert!(self.first.is_multiple_of(2) && self.values.len() >= pairs * width);
        assert!(all == 0 || self.weights.len() >= (all - 1) * STRIDE + pairs);
        let mut query = 0;
        while query < all {
            let rows = match all - query {
                6.. => 6,
                3.. => 3,
                rows => rows,
            };
            // SAFETY: so many queries are left, and the rest has just been checked.
            unsafe { self.rows(s, query..query + rows) };
            query += rows;
        }
    }
}

impl AddPairs<'_> {
    /// 6, 3, 2 or 1 `queries`. Pairs that all of them see are added together, what is before and after them one by
    /// one.
    ///
    /// # Safety
    /// There are so many, whole vectors of sums, and weights of all values that they see.
    #[inline(always)]
    unsafe fn rows<S: Simd>(&mut self, s: S, queries: Range<usize>) {
        let all = self.count.div_ceil(2);
        let mut common = 0..self.count / 2;
        for query in queries.clone() {
            let seen = self.seen_by(query);
            common = common.start.max(seen.start.div_ceil(2))..common.end.min(seen.end / 2);
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

    /// Those of `pairs` that a query sees, of which it may see one half only.
    ///
    /// # Safety
    /// As for [`rows`](Self::rows).
    #[inline(always)]
    unsafe fn alone<S: Simd>(&mut self, s: S, query: usize, pairs: &Range<usize>) {
        let seen = self.seen_by(query);
        if seen.is_empty() || pairs.is_empty() {
            return;
        }
        let (first, last) = (seen.start / 2, seen.end / 2);
        let whole = seen.start.div_ceil(2);
        // The first and the last are empty where it sees both keys.
        let parts = [
            (first..whole, Hidden::First),
            (whole..last, Hidden::Neither),
            (last.max(whole)..seen.end.div_ceil(2), Hidden::Second),
        ];
        for (part, hidden) in parts {
            let part = part.start.max(pairs.start)..part.end.min(pairs.end);
            // SAFETY: the caller's contract.
            unsafe { self.columns::<S, 1>(s, query, part, hidden) };
        }
    }

    /// Adds `pairs` for `R` queries from `query` on, as many numbers of each at a time as fit in registers.
    ///
    /// # Safety
    /// As for [`rows`](Self::rows).
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(
        &mut self,
        s: S,
        query: usize,
        pairs: Range<usize>,
        hidden: Hidden,
    ) {
        if pairs.is_empty() {
            return;
        }
        let width = self.width;
        let mut at = 0;
        while at < width {
            // SAFETY: the caller's contract.
            unsafe {
                let sums = self.sums.as_mut_ptr().add(query * width + at);
                let weights = self.weights.as_ptr().add(query * STRIDE + pairs.start);
                let values = self.values.as_ptr().add(pairs.start * width + at);
                let tile = Tile {
                    sums,
                    weights,
                    values,
                    width,
                    pairs: pairs.len(),
                };
                at += LANES
                    * match (width - at) / LANES {
                        4.. if S::SUMS >= 4 * R => tile.add::<S, R, 4>(s, hidden),
                        2.. if S::SUMS >= 2 * R => tile.add::<S, R, 2>(s, hidden),
                        _ => tile.add::<S, R, 1>(s, hidden),
                    };
            }
        }
    }
}

/// Some sums, and the weights and values of some pairs for them.
struct Tile {
    sums: *mut f32,
    weights: *const f32,
    values: *const f32,
    /// From the sums of a query to those of the next, and from the values of a pair to those of the next.
    width: usize,
    pairs: usize,
}

impl Tile {
    /// Adds `C` vectors of the pairs for `R` queries; returns `C`.
    ///
    /// # Safety
    /// The values and a weight for each can be read, and the sums be written.
    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const C: usize>(self, s: S, hidden: Hidden) -> usize {
        let mut to = [self.sums; R];
        let mut all = [[s.splat(0.0); C]; R];
        let (mut weights, mut values) = (self.weights, self.values);
        // SAFETY: the caller's contract.
        unsafe {
            for r in 1..R {
                to[r] = to[r - 1].add(self.width);
            }
            for r in 0..R {
                for c in 0..C {
                    all[r][c] = s.load(to[r].add(c * LANES));
                }
            }
            for _ in 0..self.pairs {
                let mut vectors = [s.splat(0.0); C];
                for c in 0..C {
                    let both = s.load(values.add(c * LANES));
                    // A weight of 0 alone would not do: the hidden value may be infinite.
                    vectors[c] = match hidden {
                        Hidden::Neither => both,
                        Hidden::First => s.pair(s.splat(0.0), s.second(both)),
                        Hidden::Second => s.pair(s.first(both), s.splat(0.0)),
                    };
                }
                for r in 0..R {
                    let weight = s.splat(*weights.add(r * STRIDE));
                    for c in 0..C {
                        all[r][c] = s.dot_pairs(weight, vectors[c], all[r][c]);
                    }
                }
                weights = weights.add(1);
                values = values.add(self.width);
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
