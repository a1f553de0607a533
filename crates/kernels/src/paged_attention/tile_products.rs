//! Products of queries with keys, and of weights with values, in AMX's tiles.

use super::numbers::Pool;
use super::tiles::{BOTH, WEIGHTS, WIDTH, lanes_of_keys, place, steps, transposed};
use super::vectors::STRIDE;
use crate::simd::amx::{LANES_OF_TILE, Pairs, ROWS, Tiles};
use crate::simd::{LANES, Loop, Simd};
use std::marker::PhantomData;
use std::ops::Range;

/// The dot products of queries with split keys.
pub(super) struct TileScores<'a, E> {
    pub tiles: &'a Tiles<Pairs>,
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
            clear(self.tiles);
            for at in (0..lanes).step_by(BOTH) {
                let keys = Parts::new(keys[at..].as_ptr(), lanes);
                let queries = Parts::new(self.queries[at..].as_ptr(), lanes);
                // SAFETY: so many tiles of keys and queries, as asserted.
                unsafe {
                    match count {
                        1 => four_by_one::<E>(self.tiles, keys, queries),
                        _ => two_by_two::<E>(self.tiles, keys, queries),
                    }
                }
            }
            sums.store(self.tiles);
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
    fn store(&mut self, tiles: &Tiles<Pairs>) {
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
    fn load(&self, tiles: &Tiles<Pairs>) {
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
fn clear(tiles: &Tiles<Pairs>) {
    tiles.clear::<0>();
    tiles.clear::<1>();
    tiles.clear::<2>();
    tiles.clear::<3>();
}

/// Both parts of some tiles: the rests, if there are some, are `rests` lanes after the upper parts.
#[derive(Clone, Copy)]
struct Parts {
    from: *const f32,
    /// Bytes from a row to the next.
    stride: usize,
    rests: usize,
    /// Lanes from a tile to the next.
    next: usize,
}

impl Parts {
    /// Parts that follow one another, of tiles `next` lanes apart.
    fn new(from: *const f32, next: usize) -> Self {
        Self {
            from,
            stride: ROW,
            rests: LANES_OF_TILE,
            next,
        }
    }

    /// # Safety
    /// There is a tile `number`.
    #[inline(always)]
    unsafe fn load_upper<const TO: u8>(self, tiles: &Tiles<Pairs>, number: usize) {
        // SAFETY: the caller's contract.
        unsafe { tiles.load::<TO>(self.from.add(number * self.next), self.stride) }
    }

    /// # Safety
    /// There is a tile `number`, with rests.
    #[inline(always)]
    unsafe fn load_rest<const TO: u8>(self, tiles: &Tiles<Pairs>, number: usize) {
        let from = self.from.wrapping_add(number * self.next + self.rests);
        // SAFETY: the caller's contract.
        unsafe { tiles.load::<TO>(from, self.stride) }
    }

    /// # Safety
    /// There is a tile `number`.
    #[inline(always)]
    unsafe fn load<E: Pool, const UPPER: u8, const REST: u8>(
        self,
        tiles: &Tiles<Pairs>,
        number: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            self.load_upper::<UPPER>(tiles, number);
            if E::HAS_RESTS {
                self.load_rest::<REST>(tiles, number);
            }
        }
    }
}

/// Adds the products of two tiles, whose rows are those of the sums, with two whose columns are: those of the first rows come
/// first.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn two_by_two<E: Pool>(tiles: &Tiles<Pairs>, rows: Parts, columns: Parts) {
    // SAFETY: the caller's contract.
    unsafe {
        rows.load_upper::<4>(tiles, 0);
        rows.load_upper::<5>(tiles, 1);
        columns.load_upper::<6>(tiles, 0);
        columns.load_upper::<7>(tiles, 1);
        four_products(tiles);
        if !E::HAS_RESTS {
            return;
        }
        columns.load_rest::<6>(tiles, 0);
        columns.load_rest::<7>(tiles, 1);
        four_products(tiles);
        rows.load_rest::<4>(tiles, 0);
        rows.load_rest::<5>(tiles, 1);
        columns.load_upper::<6>(tiles, 0);
        columns.load_upper::<7>(tiles, 1);
        four_products(tiles);
    }
}

/// Adds the products of tiles 4 and 5 with tiles 6 and 7.
#[inline(always)]
fn four_products(tiles: &Tiles<Pairs>) {
    tiles.dot::<0, 4, 6>();
    tiles.dot::<1, 4, 7>();
    tiles.dot::<2, 5, 6>();
    tiles.dot::<3, 5, 7>();
}

/// Adds the products of four tiles, whose rows are those of the sums, with one.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn four_by_one<E: Pool>(tiles: &Tiles<Pairs>, rows: Parts, column: Parts) {
    // SAFETY: the caller's contract.
    unsafe {
        column.load::<E, 6, 7>(tiles, 0);
        rows.load::<E, 4, 5>(tiles, 0);
        three_products::<E, 0>(tiles);
        rows.load::<E, 4, 5>(tiles, 1);
        three_products::<E, 1>(tiles);
        rows.load::<E, 4, 5>(tiles, 2);
        three_products::<E, 2>(tiles);
        rows.load::<E, 4, 5>(tiles, 3);
        three_products::<E, 3>(tiles);
    }
}

/// Adds the products of one tile, whose rows are those of the sums, with four.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn one_by_four<E: Pool>(tiles: &Tiles<Pairs>, row: Parts, columns: Parts) {
    // SAFETY: the caller's contract.
    unsafe {
        row.load::<E, 4, 5>(tiles, 0);
        columns.load::<E, 6, 7>(tiles, 0);
        three_products::<E, 0>(tiles);
        columns.load::<E, 6, 7>(tiles, 1);
        three_products::<E, 1>(tiles);
        columns.load::<E, 6, 7>(tiles, 2);
        three_products::<E, 2>(tiles);
        columns.load::<E, 6, 7>(tiles, 3);
        three_products::<E, 3>(tiles);
    }
}

/// Adds the products of the parts in tiles 4 and 5 with those in tiles 6 and 7, in the order of [`two_by_two`].
#[inline(always)]
fn three_products<E: Pool, const SUMS: u8>(tiles: &Tiles<Pairs>) {
    tiles.dot::<SUMS, 4, 6>();
    if E::HAS_RESTS {
        tiles.dot::<SUMS, 4, 7>();
        tiles.dot::<SUMS, 5, 6>();
    }
}

/// Adds weighted values to sums.
pub(super) struct TileSums<'a, E> {
    pub tiles: &'a Tiles<Pairs>,
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
                let at = first * ROWS * WEIGHTS + block * 2 * LANES;
                let weights = Parts {
                    from: self.weights[at..].as_ptr(),
                    stride: WEIGHTS * size_of::<f32>(),
                    rests: LANES,
                    next: ROWS * WEIGHTS,
                };
                let at = (block * columns + column) * BOTH;
                let values = Parts::new(self.values[at..].as_ptr(), BOTH);
                // SAFETY: as asserted, so many tiles of values and of weights.
                unsafe {
                    match both {
                        false => one_by_four::<E>(self.tiles, weights, values),
                        true => two_by_two::<E>(self.tiles, weights, values),
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
                true => (column + i % 2, i / 2 * ROWS),
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
