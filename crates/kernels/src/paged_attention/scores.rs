//! Scores: the dot products of queries and keys.
//!
//! A score is the sum of eight partial sums, of every eighth product each, or one sum of pairs, in one order of
//! additions, whatever else is computed and whatever the instruction set. Few queries read keys as they are, side
//! by side in memory ([`Dots`]). Many share keys that were transposed before ([`Pack`], [`Scores`]), where one vector
//! has a number of 16 keys.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and C are unrolled"
)]

use super::numbers::{Number, Pool, Single};
use super::vectors::{STRIDE, Vectors};
use crate::simd::{Element, LANES, Loop, Simd};
use std::marker::PhantomData;

/// Partial sums of a score, and lanes of a vector that has them.
const PARTS: usize = Single::PARTS;
/// Vectors of sums that are enough to hide the latency of additions.
const FEW_SUMS: usize = 6;

/// The dot products of queries with keys as they are in memory.
pub(super) struct Dots<'a, E> {
    /// `[_, width]`.
    pub queries: &'a [f32],
    /// Of `width` numbers, whole vectors of eight.
    pub keys: Vectors<'a, E>,
    /// The scores of query `i` begin at `i * STRIDE`; up to 15 elements after the last are overwritten.
    pub scores: &'a mut [f32],
}

impl<E: Element> Loop for Dots<'_, E> {
    type Output = ();

    /// Takes as many keys and queries at a time as have enough sums to hide the latency of additions, and fit in registers.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let all = self.queries.len() / self.keys.width();
        // With registers for 12 vectors of sums and those that they are the sums of.
        let has_many = S::SUMS >= 2 * FEW_SUMS;
        match all {
            0 => {}
            1 if has_many => self.blocks::<S, 1, 8>(s),
            1 => self.blocks::<S, 1, 4>(s),
            2 | 3 if has_many => self.blocks::<S, 3, 4>(s),
            4.. if has_many => self.blocks::<S, 6, 2>(s),
            _ => self.blocks::<S, 3, 2>(s),
        }
    }
}

impl<E: Element> Dots<'_, E> {
    /// Takes `2 * C` keys at a time, with up to `R` queries.
    #[inline(always)]
    fn blocks<S: Simd, const R: usize, const C: usize>(self, s: S) {
        let (keys, width) = (self.keys, self.keys.width());
        let all = self.queries.len() / width;
        for (i, places) in keys.places().chunks(2 * C).enumerate() {
            for j in 0..2 * C {
                keys.prefetch(2 * C * i + j, 0..width);
            }
            let pairs = pairs::<E, C>(&keys, places);
            let mut query = 0;
            while query < all {
                let queries = &self.queries[query * width..];
                let scores = &mut self.scores[query * STRIDE + i * 2 * C..];
                query += match all - query {
                    6.. if R >= 6 => dots::<S, E, 6, C>(s, queries, pairs, width, scores),
                    3.. if R >= 3 => dots::<S, E, 3, C>(s, queries, pairs, width, scores),
                    2 if R >= 2 => dots::<S, E, 2, C>(s, queries, pairs, width, scores),
                    _ => dots::<S, E, 1, C>(s, queries, pairs, width, scores),
                };
            }
        }
    }
}

/// The keys at `places`, `2 * C` of them, each two of which share a vector; missing ones are replaced by the first.
#[inline(always)]
fn pairs<'a, E: Element, const C: usize>(
    keys: &Vectors<'a, E>,
    places: &[usize],
) -> [[&'a [E]; 2]; C] {
    let mut pairs = [keys.rows::<2>(&places[..1]); C];
    for (pair, places) in pairs.iter_mut().zip(places.chunks(2)) {
        *pair = keys.rows::<2>(places);
    }
    pairs
}

/// `R` queries with `2 * C` keys, `C` even, each of `width` numbers; returns `R`.
#[inline(always)]
fn dots<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    queries: &[f32],
    keys: [[&[E]; 2]; C],
    width: usize,
    scores: &mut [f32],
) -> usize {
    assert!(width.is_multiple_of(PARTS) && C.is_multiple_of(2));
    for [low, high] in keys {
        assert!(low.len() == width && high.len() == width);
    }
    assert!(queries.len() >= R * width && scores.len() >= (R - 1) * STRIDE + 2 * C);
    let mut sums = [[s.splat(0.0); C]; R];
    let mut at = 0;
    while at < width {
        // SAFETY: keys and queries are whole vectors of eight, as asserted.
        unsafe {
            let mut key = [s.splat(0.0); C];
            for c in 0..C {
                let [low, high] = keys[c];
                key[c] = E::load_halves(s, [low.as_ptr().add(at), high.as_ptr().add(at)]);
            }
            for r in 0..R {
                let query = queries.as_ptr().add(r * width + at);
                let query = s.load_halves([query, query]);
                for c in 0..C {
                    sums[r][c] = s.fma(query, key[c], sums[r][c]);
                }
            }
        }
        at += PARTS;
    }
    for r in 0..R {
        for c in (0..C).step_by(2) {
            let four = s.sums_of_halves([sums[r][c], sums[r][c + 1]]);
            scores[r * STRIDE + 2 * c..][..4].copy_from_slice(&four);
        }
    }
    R
}

/// Transposes keys.
pub(super) struct Pack<'a, E> {
    pub keys: Vectors<'a, E>,
    /// `[keys / 16, width, 16]`, in the order in which [`Scores`] reads them; the width is that of [`Number::lanes`], and
    /// lanes that a key lacks are zeros. With eight partial sums, lane `d` of
    /// 16 keys is vector `d % 8 * (width / 8) + d / 8`; with one, the vectors are lanes 0, 8, 1, 9 and so on of
    /// each 16. Where there are fewer than 16 keys the rest is not specified.
    pub to: &'a mut [f32],
}

impl<E: Pool> Loop for Pack<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (length, count) = (self.keys.width(), E::Number::COUNT);
        let width = E::Number::lanes(length);
        let strips = self.to.chunks_exact_mut(LANES * width);
        assert!(self.keys.places().len() <= strips.len() * LANES);
        let whole = length / (count * LANES) * (count * LANES);
        // From a lane to the next, and from 16 lanes to the next.
        let (step, next) = match E::Number::PARTS {
            1 => (2 * LANES, LANES * LANES),
            parts => (width / parts * LANES, 2 * LANES),
        };
        for (i, (places, strip)) in self.keys.places().chunks(LANES).zip(strips).enumerate() {
            for j in 0..LANES {
                self.keys.prefetch(LANES * i + j, 0..length);
            }
            let rows = self.keys.rows::<LANES>(places);
            let mut from = [std::ptr::null::<E::Lane>(); LANES];
            for (from, row) in from.iter_mut().zip(rows) {
                *from = row.as_ptr().cast();
            }
            let mut to = strip.as_mut_ptr();
            // SAFETY: `whole` elements of each row are 16 lanes at a time, and each 16 have 16 vectors of the strip
            // to themselves, the last of which is within `width`.
            unsafe {
                for _ in 0..whole / (count * LANES) {
                    s.transpose(&from, [to, to.add(LANES)], step);
                    for from in &mut from {
                        *from = from.add(LANES);
                    }
                    to = to.add(next);
                }
            }
            if whole < length {
                let mut padded = [[E::zero(); 2 * LANES]; LANES];
                for ((padded, row), from) in padded.iter_mut().zip(rows).zip(&mut from) {
                    padded[..length - whole].copy_from_slice(&row[whole..]);
                    *from = padded.as_ptr().cast();
                }
                // SAFETY: `padded` has 16 lanes for each row, and the strip has the last 16 vectors left.
                unsafe { s.transpose(&from, [to, to.add(LANES)], step) };
            }
        }
    }
}

/// The dot products of queries with packed keys.
pub(super) struct Scores<'a, N> {
    /// `[queries, width]`, from [`LoadQuery`](super::numbers::LoadQuery).
    pub queries: &'a [f32],
    /// Lanes, whole vectors.
    pub width: usize,
    /// From [`Pack`].
    pub keys: &'a [f32],
    /// How many there are.
    pub count: usize,
    /// The score of query `i` and key `k` is at `i * STRIDE + k`; up to 15 elements after the last are
    /// overwritten.
    pub scores: &'a mut [f32],
    pub number: PhantomData<N>,
}

impl<N: Number> Loop for Scores<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (all, width) = (self.queries.len() / self.width, self.width);
        let keys = self.count.next_multiple_of(LANES);
        assert!(width.is_multiple_of(LANES) && keys <= STRIDE && self.keys.len() >= keys * width);
        assert!(all == 0 || self.scores.len() >= (all - 1) * STRIDE + keys);
        let mut query = 0;
        while query < all {
            // SAFETY: so many queries are left, and the rest has just been checked.
            query += unsafe {
                match all - query {
                    6.. if N::sums::<S>() >= 6 => self.rows::<S, 6>(s, query),
                    3.. => self.rows::<S, 3>(s, query),
                    2 => self.rows::<S, 2>(s, query),
                    _ => self.rows::<S, 1>(s, query),
                }
            };
        }
    }
}

impl<N: Number> Scores<'_, N> {
    /// `R` queries from `query` on; returns `R`.
    ///
    /// # Safety
    /// There are so many, and keys and scores for them.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&mut self, s: S, query: usize) -> usize {
        let width = self.width;
        let strips = self.count.div_ceil(LANES);
        // Partial sums are added to others.
        let sums = R * N::PARTS.min(2);
        // SAFETY: the caller's contract.
        unsafe {
            let queries = self.queries.as_ptr().add(query * width);
            let mut keys = self.keys.as_ptr();
            let mut scores = self.scores.as_mut_ptr().add(query * STRIDE);
            let mut strip = 0;
            while strip < strips {
                let done = match strips - strip {
                    4.. if N::sums::<S>() >= 4 * sums => {
                        score::<S, N, R, 4>(s, queries, keys, width, scores)
                    }
                    2.. if N::sums::<S>() >= 2 * sums => {
                        score::<S, N, R, 2>(s, queries, keys, width, scores)
                    }
                    _ => score::<S, N, R, 1>(s, queries, keys, width, scores),
                };
                strip += done;
                keys = keys.add(done * width * LANES);
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
unsafe fn score<S: Simd, N: Number, const R: usize, const C: usize>(
    s: S,
    queries: *const f32,
    keys: *const f32,
    width: usize,
    scores: *mut f32,
) -> usize {
    let mut q = [queries; R];
    let mut k = [keys; C];
    // SAFETY: the caller's contract: queries of `width` and strips of `width` vectors. The first
    // sums are read after they were written.
    unsafe {
        for r in 1..R {
            q[r] = q[r - 1].add(width);
        }
        for c in 1..C {
            k[c] = k[c - 1].add(width * LANES);
        }
        let half = N::PARTS.div_ceil(2);
        let mut first = 0;
        while first < N::PARTS {
            let mut sums = part::<S, N, R, C>(s, &q, &mut k, first, width);
            for number in first + 1..first + half {
                let part = part::<S, N, R, C>(s, &q, &mut k, number, width);
                for r in 0..R {
                    for c in 0..C {
                        sums[r][c] = s.add(sums[r][c], part[r][c]);
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    let to = scores.add(r * STRIDE + c * LANES);
                    if first > 0 {
                        sums[r][c] = s.add(s.load(to), sums[r][c]);
                    }
                    s.store(to, sums[r][c]);
                }
            }
            first += half;
        }
    }
    C
}

/// The partial sums `number` of `R` queries at `q` and `C` times 16 keys at `k`, which it moves on.
///
/// # Safety
/// `width` lanes of each query can be read, and the part's share of as many vectors of keys.
#[inline(always)]
unsafe fn part<S: Simd, N: Number, const R: usize, const C: usize>(
    s: S,
    q: &[*const f32; R],
    k: &mut [*const f32; C],
    number: usize,
    width: usize,
) -> [[S::Vector; C]; R] {
    let mut sums = [[s.splat(0.0); C]; R];
    let mut at = number;
    while at < width {
        // SAFETY: the caller's contract.
        unsafe {
            let mut key = [s.splat(0.0); C];
            for c in 0..C {
                key[c] = s.load(k[c]);
                k[c] = k[c].add(LANES);
            }
            for r in 0..R {
                let query = s.splat(*q[r].add(at));
                for c in 0..C {
                    sums[r][c] = N::fma(s, query, key[c], sums[r][c]);
                }
            }
        }
        at = at.wrapping_add(N::PARTS);
    }
    sums
}
