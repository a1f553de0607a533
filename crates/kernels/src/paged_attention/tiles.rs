//! Numbers of a pool in f16 or bf16 in AMX's tiles, which multiply bf16.
//!
//! A number in f16 is the sum of two bf16: that of its upper eight bits, and the rest, which are exact. So are a query and a
//! weight, whose parts are rounded: their relative error is at most 2^-18. A product is the sum of three: that of both upper
//! parts, then those of an upper part and a rest; that of both rests, at most 2^-16 of it, is left out. With a pool in bf16
//! there are no rests, and queries and weights are rounded to bf16.
//!
//! A score adds products for each 32 numbers of a head in that order (`dot` of [`Tiles`](crate::simd::amx::Tiles) says
//! how), a weighted sum for each 32 keys of a chunk. So only the numbers of keys matter, as in the other loops, and all rows have these bits, those of prompts and
//! those of answers.
//!
//! Pairs of a lane are the numbers `i` and `i + 16` of each 32: those that two vectors have in the same place.

use super::numbers::Pool;
use super::vectors::{CHUNK, STRIDE, TILE, Vectors};
use crate::simd::amx::{LANES_OF_TILE, ROWS};
use crate::simd::{Element, LANES, Loop, Simd};
use std::marker::PhantomData;
use std::ops::Range;

/// Numbers of a tile's row, and keys that a weighted sum takes at a time.
pub(super) const NUMBERS: usize = 2 * LANES;
/// Queries that are processed together: two tiles.
pub(super) const QUERIES: usize = 2 * ROWS;
/// Keys in tiles that are multiplied together.
const KEYS: usize = 4 * ROWS;
/// Columns of values in tiles that are multiplied together.
pub(super) const WIDTH: usize = 4 * LANES;
/// Lanes of a query's weights for a chunk, if they have two parts.
pub(super) const WEIGHTS: usize = CHUNK;
/// Lanes of the upper parts and the rests of a tile.
pub(super) const BOTH: usize = 2 * LANES_OF_TILE;

const _: () = assert!(TILE.is_multiple_of(NUMBERS) && CHUNK.is_multiple_of(KEYS));

/// Steps of 32 numbers that a head of `head_dim` has.
pub(super) fn steps(head_dim: usize) -> usize {
    head_dim.div_ceil(NUMBERS)
}

/// Lanes of [`SplitQueries`].
pub(super) fn lanes_of_queries(queries: usize, head_dim: usize) -> usize {
    queries.div_ceil(ROWS) * steps(head_dim) * BOTH
}

/// Lanes of [`SplitKeys`].
pub(super) fn lanes_of_keys(keys: usize, head_dim: usize) -> usize {
    keys.next_multiple_of(KEYS) / ROWS * steps(head_dim) * BOTH
}

/// Lanes of [`SplitValues`].
pub(super) fn lanes_of_values(values: usize, width: usize) -> usize {
    values.div_ceil(NUMBERS) * (width.next_multiple_of(WIDTH) / LANES) * BOTH
}

/// Lanes of [`SplitWeights`].
pub(super) const LANES_OF_WEIGHTS: usize = QUERIES * WEIGHTS;

/// The upper eight bits of a number, and the rest.
#[inline(always)]
fn split<S: Simd>(s: S, x: S::Vector) -> [S::Vector; 2] {
    let upper = s.second(x);
    [upper, s.sub(x, upper)]
}

/// Rounded to eight bits (Dekker 1971, "A floating-point technique for extending the available precision", section 4).
#[inline(always)]
fn rounded<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    const FACTOR: f32 = (1 << 16) as f32 + 1.0;
    let large = s.mul(x, s.splat(FACTOR));
    s.sub(large, s.sub(large, x))
}

/// As [`split`], with both rounded to eight bits.
#[inline(always)]
fn split_rounded<S: Simd>(s: S, x: S::Vector) -> [S::Vector; 2] {
    let upper = rounded(s, x);
    [upper, rounded(s, s.sub(x, upper))]
}

/// Writes the pairs of two vectors' upper parts at `to`, and those of their rests, if they have some, `apart` lanes later.
///
/// # Safety
/// 16 lanes can be written at both.
#[inline(always)]
unsafe fn store_pairs<S: Simd, E: Pool>(
    s: S,
    [a, b]: [[S::Vector; 2]; 2],
    to: *mut f32,
    apart: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        s.store(to, s.pair(a[0], b[0]));
        if E::HAS_RESTS {
            s.store(to.add(apart), s.pair(a[1], b[1]));
        }
    }
}

/// 16 numbers of a row from `at` on, and zeros after its end.
#[inline(always)]
fn load<S: Simd, E: Element>(s: S, row: &[E], at: usize) -> S::Vector {
    // SAFETY: 16 numbers can be read.
    unsafe {
        match row.get(at..) {
            Some(from) if from.len() >= LANES => E::load(s, from.as_ptr()),
            Some(from) => {
                let mut padded = [E::zero(); LANES];
                padded[..from.len()].copy_from_slice(from);
                E::load(s, padded.as_ptr())
            }
            None => s.splat(0.0),
        }
    }
}

/// Splits 16 queries, multiplied by a factor.
pub(super) struct SplitQueries<'a, E> {
    /// Up to 16, each of as many numbers.
    pub queries: &'a [&'a [f32]],
    pub factor: f32,
    /// For each step two tiles, the upper parts and the rests: lane `j` of row `i` is pair `i` of query `j`.
    pub to: &'a mut [f32],
    pub element: PhantomData<E>,
}

impl<E: Pool> Loop for SplitQueries<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (step, to) in self.to.chunks_exact_mut(BOTH).enumerate() {
            let mut rows = [0.0; BOTH];
            for (query, to) in self.queries.iter().zip(rows.chunks_exact_mut(LANES)) {
                let at = step * NUMBERS;
                let [a, b] = [load(s, query, at), load(s, query, at + LANES)];
                let factor = s.splat(self.factor);
                let pairs = [
                    split_rounded(s, s.mul(a, factor)),
                    split_rounded(s, s.mul(b, factor)),
                ];
                assert!(to.len() >= LANES);
                // SAFETY: as just asserted, there are 16 lanes; `rows` has as many one tile later.
                unsafe { store_pairs::<S, E>(s, pairs, to.as_mut_ptr(), LANES_OF_TILE) };
            }
            let tiles = rows.chunks_exact(LANES_OF_TILE);
            for (rows, to) in tiles.zip(to.chunks_exact_mut(LANES_OF_TILE)) {
                let columns = transposed(s, rows);
                for (i, row) in to.chunks_exact_mut(LANES).enumerate() {
                    row.copy_from_slice(&columns[place(i)]);
                }
            }
        }
    }
}

/// The columns of a tile: column `i` is at [`place`] of `i`.
#[inline(always)]
pub(super) fn transposed<S: Simd>(s: S, tile: &[f32]) -> [[f32; LANES]; ROWS] {
    assert!(tile.len() >= LANES_OF_TILE);
    let mut rows = [tile.as_ptr(); ROWS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = row.wrapping_add(i * LANES);
    }
    let mut columns = [[0.0; LANES]; ROWS];
    // SAFETY: 16 vectors of 16 numbers are read, as asserted, and written.
    unsafe {
        let to: *mut f32 = columns.as_mut_ptr().cast();
        s.transpose(&rows, [to, to.add(LANES)], 2 * LANES);
    }
    columns
}

/// See [`transposed`].
#[inline(always)]
pub(super) fn place(column: usize) -> usize {
    column % 8 * 2 + column / 8
}

/// Splits keys.
pub(super) struct SplitKeys<'a, E> {
    pub keys: Vectors<'a, E>,
    /// For each 16 keys and step two tiles, the upper parts and the rests: row `i` has the pairs of key `i`. Tiles without a
    /// key, up to a multiple of four, are zeros.
    pub to: &'a mut [f32],
}

impl<E: Pool> Loop for SplitKeys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (keys, width) = (self.keys, self.keys.width());
        let steps = steps(width);
        let (count, data) = (keys.places().len(), keys.data());
        assert_eq!(self.to.len(), lanes_of_keys(count, width));
        for (number, &place) in keys.places().iter().enumerate() {
            keys.prefetch(number, 0..width);
            let row = &data[place..place + width];
            let tiles = number / ROWS * steps;
            for step in 0..steps {
                let to = (tiles + step) * BOTH + number % ROWS * LANES;
                let at = step * NUMBERS;
                let [a, b] = [load(s, row, at), load(s, row, at + LANES)];
                let pairs = [split(s, a), split(s, b)];
                // SAFETY: `to` has 16 lanes there, and as many one tile later, as asserted.
                unsafe {
                    store_pairs::<S, E>(s, pairs, self.to.as_mut_ptr().add(to), LANES_OF_TILE)
                };
            }
        }
        for number in count..count.next_multiple_of(KEYS) {
            for step in 0..steps {
                let to = &mut self.to[(number / ROWS * steps + step) * BOTH..][..BOTH];
                for part in to.chunks_exact_mut(LANES_OF_TILE) {
                    part[number % ROWS * LANES..][..LANES].fill(0.0);
                }
            }
        }
    }
}

/// Splits values; returns whether all are finite.
pub(super) struct SplitValues<'a, E> {
    pub values: Vectors<'a, E>,
    /// For each 32 values and 16 columns two tiles, the upper parts and the rests: row `i` has the pairs of values `i`
    /// and `i + 16`. Missing values and columns, up to a multiple of 64, are zeros.
    pub to: &'a mut [f32],
}

impl<E: Pool> Loop for SplitValues<'_, E> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (values, width) = (self.values, self.values.width());
        let (places, data) = (values.places(), values.data());
        let tiles = lanes_of_values(NUMBERS, width) / BOTH;
        assert_eq!(self.to.len(), lanes_of_values(places.len(), width));
        // Times zero, what is not finite becomes NaN.
        let mut sum = s.splat(0.0);
        for (block, to) in self.to.chunks_exact_mut(tiles * BOTH).enumerate() {
            for i in 0..ROWS {
                let at = [block * NUMBERS + i, block * NUMBERS + i + ROWS];
                let mut rows: [&[E]; 2] = [&[]; 2];
                for (row, at) in rows.iter_mut().zip(at) {
                    if let Some(&place) = places.get(at) {
                        values.prefetch(at, 0..width);
                        *row = &data[place..place + width];
                    }
                }
                for tile in 0..tiles {
                    let at = tile * LANES;
                    let [a, b] = [load(s, rows[0], at), load(s, rows[1], at)];
                    sum = s.fma(a, s.splat(0.0), sum);
                    sum = s.fma(b, s.splat(0.0), sum);
                    let pairs = [split(s, a), split(s, b)];
                    let to = &mut to[tile * BOTH + i * LANES..];
                    assert!(to.len() >= LANES_OF_TILE + LANES);
                    // SAFETY: as just asserted.
                    unsafe { store_pairs::<S, E>(s, pairs, to.as_mut_ptr(), LANES_OF_TILE) };
                }
            }
        }
        !s.sum_of(sum).is_nan()
    }
}

/// Splits the weights of up to 32 queries for a chunk.
pub(super) struct SplitWeights<'a, E> {
    /// `[queries, STRIDE]`, of which the keys of `seen`, extended to whole vectors, are read.
    pub weights: &'a [f32],
    /// The keys of the chunk that each query sees.
    pub seen: &'a [Range<usize>],
    /// For each query and 32 keys 16 pairs of the upper parts, then 16 of the rests. They are zeros for missing keys,
    /// and for missing queries of a tile.
    pub to: &'a mut [f32],
    pub element: PhantomData<E>,
}

impl<E: Pool> Loop for SplitWeights<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.weights.chunks(STRIDE).zip(self.seen);
        for ((weights, seen), to) in rows.zip(self.to.chunks_exact_mut(WEIGHTS)) {
            let touched = match seen.is_empty() {
                true => 0..0,
                false => seen.start / LANES * LANES..seen.end.next_multiple_of(LANES),
            };
            for (block, to) in to.chunks_exact_mut(2 * LANES).enumerate() {
                let mut halves = [s.splat(0.0); 2];
                for (i, half) in halves.iter_mut().enumerate() {
                    let at = block * NUMBERS + i * LANES;
                    if at >= touched.start && at < touched.end {
                        *half = load(s, weights, at);
                    }
                }
                let pairs = [split_rounded(s, halves[0]), split_rounded(s, halves[1])];
                // SAFETY: `to` has twice 16 lanes.
                unsafe { store_pairs::<S, E>(s, pairs, to.as_mut_ptr(), LANES) };
            }
        }
        let end = self.seen.len().next_multiple_of(ROWS) * WEIGHTS;
        self.to[self.seen.len() * WEIGHTS..end].fill(0.0);
    }
}
