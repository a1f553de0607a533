//! A chunk of an item by AMX's tiles: 32 queries after the other, over keys and values that are split once.

use super::partial::Partial;
use super::queries::QueryGroup;
use super::scratch::Scratch;
use super::stored::Stored;
use super::tile_products::{TileScores, TileSums};
use super::tiles::{
    LANES_OF_WEIGHTS, NUMBERS, QUERIES, SplitKeys, SplitQueries, SplitValues, SplitWeights,
    lanes_of_keys, lanes_of_queries, lanes_of_values,
};
use super::vectors::{CHUNK, Places, STRIDE, TILE, Vectors};
use super::weights::Weigh;
use crate::cpu::AmxBf16;
use crate::simd::amx::{Pairs, ROWS, Tiles};
use crate::simd::{Element, LANES, run};
use candle_core::WithDType;
use std::marker::PhantomData;
use std::ops::Range;

/// Values in tiles, from key `first` of the chunk on, a multiple of [`TILE`].
#[derive(Clone, Copy)]
struct Values<'a> {
    first: usize,
    /// Where they are in the pool.
    places: &'a [usize],
    split: &'a [f32],
    /// Whether all of them are. Those that are not have zeros in tiles.
    are_finite: bool,
}

/// Up to 32 queries that are processed together.
struct Block<'a> {
    tiles: &'a Tiles<Pairs>,
    /// Their numbers among all.
    queries: Range<usize>,
    /// In tiles.
    split: &'a [f32],
    /// `[QUERIES, STRIDE]`: their scores, later their weights.
    scores: &'a mut [f32],
    /// Their weights in tiles.
    weights: &'a mut [f32],
    /// The keys of the chunk that each of them sees.
    seen: &'a [Range<usize>],
}

impl Block<'_> {
    /// The places in the block of a row's heads.
    fn heads(&self, row: usize, group: usize) -> Range<usize> {
        let Range { start, end } = self.queries;
        (row * group).max(start) - start..((row + 1) * group).min(end) - start
    }
}

impl<E: Stored> QueryGroup<'_, E> {
    /// Splits the queries, scaled so that scores are multiples of log2(e), unless they are still to be capped.
    pub(super) fn load_in_tiles(&self, scratch: &mut Scratch) {
        let d = self.dims.head_dim;
        let tiles = scratch.queries.room(lanes_of_queries(self.count(), d));
        for (i, to) in tiles.chunks_exact_mut(lanes_of_queries(1, d)).enumerate() {
            let mut queries = [&[] as &[f32]; ROWS];
            let numbers = i * ROWS..self.count().min((i + 1) * ROWS);
            let count = numbers.len();
            for (query, number) in queries.iter_mut().zip(numbers) {
                *query = self.query(number);
            }
            let split = SplitQueries {
                queries: &queries[..count],
                factor: self.factor(),
                to,
                element: PhantomData::<E::Numbers>,
            };
            run(self.isa, split);
        }
    }

    /// Computes the softmax of one chunk, of queries that are loaded.
    pub(super) fn chunk_in_tiles(
        &self,
        amx: AmxBf16,
        chunk: usize,
        scratch: &mut Scratch,
        into: &mut Partial<'_>,
    ) {
        let (d, group, width) = (self.dims.head_dim, self.dims.group(), self.dims.width());
        let mut places = [[0; CHUNK]; 2];
        let shared = self.shared_keys(chunk, self.item.rows.len() - 1);
        // Tiles begin at multiples of their length, whatever the window.
        let first = (self.item.hidden_from_all(chunk).min(shared)) / TILE * TILE;
        let next = self.item.visible_keys_of_all(chunk + 1);
        self.places(chunk * CHUNK + first, &mut places[0][first..shared]);
        self.places((chunk + 1) * CHUNK, &mut places[1][..next]);
        self.warm_up(&places[0][first..shared], places[1][0], scratch);
        let shared = Places::in_memory(&places[0], &places[1][..next]).slice(first..shared);
        let keys = scratch.keys.room(lanes_of_keys(shared.at.len(), d));
        self.split_keys(shared, keys);
        let values = scratch.values.room(lanes_of_values(shared.at.len(), d));
        let values = self.split_values(shared, first, values);
        let tiles = Tiles::pairs(amx);
        into.acc.fill(0.0);
        for start in (0..self.count()).step_by(QUERIES) {
            let queries = start..self.count().min(start + QUERIES);
            let rows = start / group..queries.end.div_ceil(group);
            scratch.seen.clear();
            for query in queries.clone() {
                scratch.seen.push(self.seen(chunk, query / group));
            }
            let (ours, before) = (
                lanes_of_queries(queries.len(), d),
                lanes_of_queries(start, d),
            );
            let mut block = Block {
                tiles: &tiles,
                queries: queries.clone(),
                split: &scratch.queries.room(before + ours)[before..],
                scores: scratch.scores.room(QUERIES * STRIDE),
                weights: scratch.weights.room(LANES_OF_WEIGHTS),
                seen: &scratch.seen,
            };
            // Later rows may see more keys.
            let count = self.shared_keys(chunk, rows.end - 1).max(first) - first;
            let all = 0..queries.len();
            let keys = &keys[..lanes_of_keys(count, d)];
            self.score_in_tiles(&mut block, (first, count, keys), all.clone());
            self.for_private_keys(chunk, rows.clone(), |row, first, places| {
                let keys = scratch.own.room(lanes_of_keys(places.at.len(), d));
                self.split_keys(places, keys);
                let heads = block.heads(row, group);
                self.score_in_tiles(&mut block, (first, places.at.len(), keys), heads);
            });
            let (max, sum) = (
                &mut into.max[queries.clone()],
                &mut into.sum[queries.clone()],
            );
            self.weigh_in_tiles(&mut block, max, sum);
            let sums = &mut into.acc[start * width..queries.end * width];
            let values = Values {
                places: &values.places[..count],
                split: &values.split[..lanes_of_values(count, d)],
                ..values
            };
            self.add_in_tiles(&block, values, all, sums);
            self.for_private_keys(chunk, rows, |row, first, places| {
                let values = scratch.own.room(lanes_of_values(places.at.len(), d));
                let values = self.split_values(places, first, values);
                self.add_in_tiles(&block, values, block.heads(row, group), sums);
            });
        }
    }

    fn split_keys(&self, places: Places<'_>, to: &mut [f32]) {
        let keys = Vectors::new(E::numbers(self.k), places, self.dims.head_dim);
        run(self.isa, SplitKeys { keys, to });
    }

    fn split_values<'v>(&self, places: Places<'v>, first: usize, to: &'v mut [f32]) -> Values<'v> {
        let (d, pool) = (self.dims.head_dim, E::numbers(self.v));
        let values = Vectors::new(pool, places, d);
        let are_finite = run(self.isa, SplitValues { values, to });
        if !are_finite {
            // In a tile, a weight of zero would not hide them.
            let rows = places.at.iter().flat_map(|&place| &pool[place..place + d]);
            let finite = |x: &E::Numbers| match x.to_f32().is_finite() {
                true => *x,
                false => E::Numbers::from_f64(0.0),
            };
            let copy: Vec<E::Numbers> = rows.map(finite).collect();
            let at: Vec<usize> = (0..places.at.len()).map(|i| i * d).collect();
            let values = Vectors::new(&copy, Places::cached(&at), d);
            run(self.isa, SplitValues { values, to });
        }
        Values {
            first,
            places: places.at,
            split: to,
            are_finite,
        }
    }

    /// Computes the scores of some of the block's queries; `keys` are the first's number, how many there are, and they.
    fn score_in_tiles(
        &self,
        block: &mut Block<'_>,
        (first, count, keys): (usize, usize, &[f32]),
        wanted: Range<usize>,
    ) {
        let scores = TileScores {
            tiles: block.tiles,
            queries: block.split,
            wanted,
            keys,
            count,
            head_dim: self.dims.head_dim,
            scores: &mut block.scores[first..],
            element: PhantomData::<E::Numbers>,
        };
        run(self.isa, scores);
    }

    /// Turns the scores of the block's queries into weights.
    fn weigh_in_tiles(&self, block: &mut Block<'_>, max: &mut [f32], sum: &mut [f32]) {
        self.soften(block.scores, block.seen);
        let weigh = Weigh {
            scores: block.scores,
            seen: block.seen,
            max,
            sum,
            halve: false,
        };
        run(self.isa, weigh);
        let split = SplitWeights {
            weights: block.scores,
            seen: block.seen,
            to: block.weights,
            element: PhantomData::<E::Numbers>,
        };
        run(self.isa, split);
    }

    /// Adds values to the sums of some of the block's queries.
    fn add_in_tiles(
        &self,
        block: &Block<'_>,
        values: Values<'_>,
        wanted: Range<usize>,
        sums: &mut [f32],
    ) {
        let (d, width) = (self.dims.head_dim, self.dims.width());
        let add = TileSums {
            tiles: block.tiles,
            weights: &block.weights[values.first / NUMBERS * 2 * LANES..],
            wanted: wanted.clone(),
            values: values.split,
            sums,
            width,
            element: PhantomData::<E::Numbers>,
        };
        run(self.isa, add);
        if values.are_finite {
            return;
        }
        for query in wanted {
            for (&place, number) in values.places.iter().zip(values.first..) {
                if !block.seen[query].contains(&number) {
                    continue;
                }
                let weight = block.scores[query * STRIDE + number];
                let sums = &mut sums[query * width..][..d];
                for (sum, value) in sums.iter_mut().zip(&E::numbers(self.v)[place..place + d]) {
                    let value = value.to_f32();
                    if !value.is_finite() {
                        *sum += weight * value;
                    }
                }
            }
        }
    }
}
