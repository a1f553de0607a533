//! Attention over a pool in f16 or bf16 with AMX's tiles, which multiply bf16.
//!
//! A number in f16 is the sum of two bf16: that of its upper eight bits, and the rest, which are exact. So are a query and a
//! weight, whose parts are rounded: their relative error is at most 2^-18. A product is the sum of three: that of both upper
//! parts, then those of an upper part and a rest; that of both rests, at most 2^-16 of it, is left out. With a pool in bf16
//! there are no rests, and queries and weights are rounded to bf16.
//!
//! A score adds products for each 32 numbers of a head in that order ([`Tiles::dot`] says how), a weighted sum for each 32 keys
//! of a chunk. So only the numbers of keys matter, as in the other loops, and all rows have these bits, those of prompts and
//! those of answers.
//!
//! Pairs of a lane are the numbers `i` and `i + 16` of each 32: those that two vectors have in the same place.

use super::numbers::Pool;
use super::vectors::{CHUNK, STRIDE, TILE, Vectors};
use crate::simd::amx::{LANES_OF_TILE, ROWS, Tiles};
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
const WIDTH: usize = 4 * LANES;
/// Lanes of a query's weights for a chunk, if they have two parts.
const WEIGHTS: usize = CHUNK;
/// Bytes from a query's weights to the next one's.
const NEXT: usize = WEIGHTS * size_of::<f32>();
/// Lanes of the upper parts and the rests of a tile.
const BOTH: usize = 2 * LANES_OF_TILE;

const _: () = assert!(TILE.is_multiple_of(NUMBERS) && CHUNK.is_multiple_of(KEYS));

/// Steps of 32 numbers that a head of `head_dim` has.
fn steps(head_dim: usize) -> usize {
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
fn transposed<S: Simd>(s: S, tile: &[f32]) -> [[f32; LANES]; ROWS] {
    assert!(tile.len() >= LANES_OF_TILE);
    let mut rows = [tile.as_ptr(); ROWS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = row.wrapping_add(i * LANES);
    }
    let mut columns = [[0.0; LANES]; ROWS];
    // SAFETY: 16 vectors of 16 numbers are read, as asserted, and written.
    unsafe { s.transpose(&rows, columns.as_mut_ptr().cast(), 2 * LANES) };
    columns
}

/// See [`transposed`].
#[inline(always)]
fn place(column: usize) -> usize {
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

/// The dot products of queries with split keys.
pub(super) struct TileScores<'a, E> {
    pub tiles: &'a Tiles,
    /// One or two tiles of [`SplitQueries`].
    pub queries: &'a [f32],
    /// Those of them that are wanted.
    pub wanted: Range<usize>,
    /// [`SplitKeys`].
    pub keys: &'a [f32],
    /// How many there are.
    pub count: usize,
    pub head_dim: usize,
    /// The score of query `i` and key `k` is at `i * STRIDE + k`; up to 15 elements after the last are overwritten.
    pub scores: &'a mut [f32],
    pub element: PhantomData<E>,
}

impl<E: Pool> Loop for TileScores<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let lanes = steps(self.head_dim) * BOTH;
        let count = self.queries.len() / lanes;
        assert!((1..=2).contains(&count) && self.queries.len() == count * lanes);
        assert_eq!(self.keys.len(), lanes_of_keys(self.count, self.head_dim));
        let mut sums = Sums::default();
        let group = 4 / count;
        for (i, keys) in self.keys.chunks_exact(group * lanes).enumerate() {
            if i * group * ROWS >= self.count {
                break;
            }
            // SAFETY: so many tiles of keys and queries, as asserted.
            unsafe {
                match count {
                    1 => one_by_four::<E>(self.tiles, self.queries, keys, lanes, &mut sums),
                    _ => two_by_two::<E>(self.tiles, self.queries, keys, lanes, &mut sums),
                }
            }
            for (j, sums) in sums.0.iter().enumerate() {
                let (tile, first) = (j % count, (i * group + j / count) * ROWS);
                if first < self.count {
                    self.store(s, sums, tile * ROWS, first);
                }
            }
        }
    }
}

impl<E: Pool> TileScores<'_, E> {
    /// Stores the scores of 16 queries from `query` on and 16 keys from `key` on, which have a row each.
    #[inline(always)]
    fn store<S: Simd>(&mut self, s: S, sums: &[f32; LANES_OF_TILE], query: usize, key: usize) {
        let columns = transposed(s, sums);
        let wanted = self.wanted.start.max(query)..self.wanted.end.min(query + ROWS);
        for i in wanted {
            let to = &mut self.scores[i * STRIDE + key..][..LANES];
            to.copy_from_slice(&columns[place(i - query)]);
        }
    }
}

/// Four tiles of sums.
#[repr(C, align(64))]
struct Sums([[f32; LANES_OF_TILE]; 4]);

impl Default for Sums {
    fn default() -> Self {
        Self([[0.0; LANES_OF_TILE]; 4])
    }
}

impl Sums {
    /// Stores the sums of tiles 0 to 3.
    #[inline(always)]
    fn store(&mut self, tiles: &Tiles) {
        let [a, b, c, d] = &mut self.0;
        // SAFETY: 16 rows of 16 numbers each.
        unsafe {
            tiles.store::<0>(a.as_mut_ptr());
            tiles.store::<1>(b.as_mut_ptr());
            tiles.store::<2>(c.as_mut_ptr());
            tiles.store::<3>(d.as_mut_ptr());
        }
    }

    /// Loads the sums of tiles 0 to 3.
    #[inline(always)]
    fn load(&self, tiles: &Tiles) {
        let [a, b, c, d] = &self.0;
        // SAFETY: 16 rows of 16 numbers each.
        unsafe {
            tiles.load::<0>(a.as_ptr(), ROW);
            tiles.load::<1>(b.as_ptr(), ROW);
            tiles.load::<2>(c.as_ptr(), ROW);
            tiles.load::<3>(d.as_ptr(), ROW);
        }
    }
}

/// Bytes of a tile's row.
const ROW: usize = LANES * size_of::<f32>();

#[inline(always)]
fn clear(tiles: &Tiles) {
    tiles.clear::<0>();
    tiles.clear::<1>();
    tiles.clear::<2>();
    tiles.clear::<3>();
}

/// The sums of four tiles of keys with one of queries.
///
/// # Safety
/// `lanes` lanes can be read of each, [`BOTH`] a step.
#[inline(always)]
unsafe fn one_by_four<E: Pool>(
    tiles: &Tiles,
    queries: &[f32],
    keys: &[f32],
    lanes: usize,
    sums: &mut Sums,
) {
    clear(tiles);
    // SAFETY: the caller's contract.
    unsafe {
        for at in (0..lanes).step_by(BOTH) {
            let (query, key) = (queries.as_ptr().add(at), keys.as_ptr().add(at));
            load_parts::<E, 4, 5>(tiles, query, ROW, LANES_OF_TILE);
            load_parts::<E, 6, 7>(tiles, key, ROW, LANES_OF_TILE);
            add_scores::<E, 0>(tiles);
            load_parts::<E, 6, 7>(tiles, key.add(lanes), ROW, LANES_OF_TILE);
            add_scores::<E, 1>(tiles);
            load_parts::<E, 6, 7>(tiles, key.add(2 * lanes), ROW, LANES_OF_TILE);
            add_scores::<E, 2>(tiles);
            load_parts::<E, 6, 7>(tiles, key.add(3 * lanes), ROW, LANES_OF_TILE);
            add_scores::<E, 3>(tiles);
        }
    }
    sums.store(tiles);
}

/// Loads a tile of upper parts and, if there are some, one of rests, `apart` lanes later.
///
/// # Safety
/// They can be read, in rows `stride` bytes apart.
#[inline(always)]
unsafe fn load_parts<E: Pool, const UPPER: u8, const REST: u8>(
    tiles: &Tiles,
    from: *const f32,
    stride: usize,
    apart: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        tiles.load::<UPPER>(from, stride);
        if E::HAS_RESTS {
            tiles.load::<REST>(from.add(apart), stride);
        }
    }
}

/// Adds the products of keys in tiles 6 and 7 with queries in tiles 4 and 5.
#[inline(always)]
fn add_scores<E: Pool, const SUMS: u8>(tiles: &Tiles) {
    tiles.dot::<SUMS, 6, 4>();
    if E::HAS_RESTS {
        tiles.dot::<SUMS, 6, 5>();
        tiles.dot::<SUMS, 7, 4>();
    }
}

/// The sums of two tiles of keys with two of queries: those of the first keys come first.
///
/// # Safety
/// As for [`one_by_four`].
#[inline(always)]
unsafe fn two_by_two<E: Pool>(
    tiles: &Tiles,
    queries: &[f32],
    keys: &[f32],
    lanes: usize,
    sums: &mut Sums,
) {
    clear(tiles);
    // SAFETY: the caller's contract.
    unsafe {
        for at in (0..lanes).step_by(BOTH) {
            let (query, key) = (queries.as_ptr().add(at), keys.as_ptr().add(at));
            tiles.load::<4>(query, ROW);
            tiles.load::<5>(query.add(lanes), ROW);
            tiles.load::<6>(key, ROW);
            tiles.load::<7>(key.add(lanes), ROW);
            four::<6, 7, 4, 5>(tiles);
            if !E::HAS_RESTS {
                continue;
            }
            tiles.load::<4>(query.add(LANES_OF_TILE), ROW);
            tiles.load::<5>(query.add(lanes + LANES_OF_TILE), ROW);
            four::<6, 7, 4, 5>(tiles);
            tiles.load::<4>(query, ROW);
            tiles.load::<5>(query.add(lanes), ROW);
            tiles.load::<6>(key.add(LANES_OF_TILE), ROW);
            tiles.load::<7>(key.add(lanes + LANES_OF_TILE), ROW);
            four::<6, 7, 4, 5>(tiles);
        }
    }
    sums.store(tiles);
}

/// Adds the products of the first two tiles with the others.
#[inline(always)]
fn four<const A: u8, const B: u8, const C: u8, const D: u8>(tiles: &Tiles) {
    tiles.dot::<0, A, C>();
    tiles.dot::<1, A, D>();
    tiles.dot::<2, B, C>();
    tiles.dot::<3, B, D>();
}

/// Adds weighted values to sums.
pub(super) struct TileSums<'a, E> {
    pub tiles: &'a Tiles,
    /// [`SplitWeights`], from the block of the first value on.
    pub weights: &'a [f32],
    /// Those of up to 32 queries that are wanted.
    pub wanted: Range<usize>,
    /// [`SplitValues`].
    pub values: &'a [f32],
    /// `[queries, width]`.
    pub sums: &'a mut [f32],
    pub width: usize,
    pub element: PhantomData<E>,
}

impl<E: Pool> Loop for TileSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, _: S) {
        if self.wanted.is_empty() {
            return;
        }
        let columns = self.width.next_multiple_of(WIDTH) / LANES;
        let blocks = self.values.len() / (columns * BOTH);
        let (first, last) = (self.wanted.start / ROWS, (self.wanted.end - 1) / ROWS);
        assert!(last < 2 && self.values.len() == blocks * columns * BOTH);
        assert!(
            blocks == 0
                || self.weights.len() >= (last * ROWS + ROWS - 1) * WEIGHTS + blocks * 2 * LANES
        );
        let mut sums = Sums::default();
        let both = first != last;
        let group = if both { 2 } else { 4 };
        for column in (0..self.width.div_ceil(LANES)).step_by(group) {
            self.copy::<true>(&mut sums, (column, both));
            sums.load(self.tiles);
            for block in 0..blocks {
                // SAFETY: as asserted, so many tiles of values and of weights.
                unsafe {
                    let values = self.values.as_ptr().add((block * columns + column) * BOTH);
                    let weights = self
                        .weights
                        .as_ptr()
                        .add(first * ROWS * WEIGHTS + block * 2 * LANES);
                    match both {
                        false => weighted_by_four::<E>(self.tiles, weights, values),
                        true => weighted_two_by_two::<E>(self.tiles, weights, values),
                    }
                }
            }
            sums.store(self.tiles);
            self.copy::<false>(&mut sums, (column, both));
        }
    }
}

impl<E: Pool> TileSums<'_, E> {
    /// Copies the wanted rows of the sums from a column of 16 on to tiles, or back.
    #[inline(always)]
    fn copy<const TO_TILES: bool>(&mut self, sums: &mut Sums, (column, both): (usize, bool)) {
        for (i, tile) in sums.0.iter_mut().enumerate() {
            let (column, query) = match both {
                true => (column + i / 2, i % 2 * ROWS),
                false => (column + i, self.wanted.start / ROWS * ROWS),
            };
            if column * LANES >= self.width {
                continue;
            }
            for (row, query) in tile.chunks_exact_mut(LANES).zip(query..) {
                if query < self.wanted.start || query >= self.wanted.end {
                    continue;
                }
                let own = &mut self.sums[query * self.width + column * LANES..][..LANES];
                match TO_TILES {
                    true => row.copy_from_slice(own),
                    false => own.copy_from_slice(row),
                }
            }
        }
    }
}

/// Adds 32 values in four tiles of columns, for one of weights.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn weighted_by_four<E: Pool>(tiles: &Tiles, weights: *const f32, values: *const f32) {
    // SAFETY: the caller's contract.
    unsafe {
        load_parts::<E, 4, 5>(tiles, weights, NEXT, LANES);
        load_parts::<E, 6, 7>(tiles, values, ROW, LANES_OF_TILE);
        add_weighted::<E, 0>(tiles);
        load_parts::<E, 6, 7>(tiles, values.add(BOTH), ROW, LANES_OF_TILE);
        add_weighted::<E, 1>(tiles);
        load_parts::<E, 6, 7>(tiles, values.add(2 * BOTH), ROW, LANES_OF_TILE);
        add_weighted::<E, 2>(tiles);
        load_parts::<E, 6, 7>(tiles, values.add(3 * BOTH), ROW, LANES_OF_TILE);
        add_weighted::<E, 3>(tiles);
    }
}

/// Adds the products of weights in tiles 4 and 5 with values in tiles 6 and 7.
#[inline(always)]
fn add_weighted<E: Pool, const SUMS: u8>(tiles: &Tiles) {
    tiles.dot::<SUMS, 4, 6>();
    if E::HAS_RESTS {
        tiles.dot::<SUMS, 5, 6>();
        tiles.dot::<SUMS, 4, 7>();
    }
}

/// Adds 32 values in two tiles of columns, for two of weights: the sums of the first column come first.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn weighted_two_by_two<E: Pool>(tiles: &Tiles, weights: *const f32, values: *const f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let second = weights.add(ROWS * WEIGHTS);
        tiles.load::<4>(weights, NEXT);
        tiles.load::<5>(second, NEXT);
        tiles.load::<6>(values, ROW);
        tiles.load::<7>(values.add(BOTH), ROW);
        four_sums(tiles);
        if !E::HAS_RESTS {
            return;
        }
        tiles.load::<4>(weights.add(LANES), NEXT);
        tiles.load::<5>(second.add(LANES), NEXT);
        four_sums(tiles);
        tiles.load::<4>(weights, NEXT);
        tiles.load::<5>(second, NEXT);
        tiles.load::<6>(values.add(LANES_OF_TILE), ROW);
        tiles.load::<7>(values.add(BOTH + LANES_OF_TILE), ROW);
        four_sums(tiles);
    }
}

/// Adds the products of both tiles of weights with both of values.
#[inline(always)]
fn four_sums(tiles: &Tiles) {
    tiles.dot::<0, 4, 6>();
    tiles.dot::<1, 5, 6>();
    tiles.dot::<2, 4, 7>();
    tiles.dot::<3, 5, 7>();
}
