//! Computes one item on one thread: its queries, chunk by chunk over their keys.

use super::numbers::{LoadQuery, Number, Pool};
use super::partial::{Merge, Normalize, Partial};
use super::plan::{Dims, Item};
use super::scores::{Dots, Pack, Scores};
use super::scratch::Scratch;
use super::stored::Stored;
use super::vectors::{CHUNK, Places, STRIDE, TILE, Vectors, Widen, prefetch_all};
use super::weights::{AddWeighted, Soften, Weigh};
use crate::cpu::{AmxBf16, Isa};
use crate::simd::{LANES, run};
use std::f32::consts::LOG2_E;
use std::iter::repeat_n;
use std::marker::PhantomData;
use std::ops::Range;

/// Maximum number of keys of a tile, or of a row's tree and the keys before it in a tile, in whole vectors.
const MAX_KEYS: usize = 64 + TILE;

/// Up to this many queries read K and V as they are, if these are not pairs; for more, a tile is first widened: then
/// several passes over it cost more than a copy.
const MAX_DIRECT: usize = 24;

/// The widest heads of which two tiles of keys are processed together.
const NARROW: usize = 64;

/// Up to this many queries read keys side by side; for more, they are first transposed.
const MAX_DOTS: usize = 6;

/// `[rows, heads, head_dim]`, with `stride` floats from a row to the next.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub q: &'a [f32],
    pub stride: usize,
}

/// The queries of an item, with the data that they read. A query is a (row, head) pair.
pub(super) struct QueryGroup<'a, E> {
    pub isa: Isa,
    pub scale: f32,
    pub soft_cap: Option<f32>,
    /// Of all heads, if they have sinks.
    pub sinks: Option<&'a [f32]>,
    /// Slots per block.
    pub block_size: usize,
    pub item: &'a Item<'a>,
    pub q: Queries<'a>,
    /// The pools, `[num_slots, kv_heads, head]`, with the [elements](Stored::elements) of a head.
    pub k: &'a [E],
    pub v: &'a [E],
    pub dims: Dims,
}

/// How the numbers of a pool are multiplied.
type NumberOf<E> = <<E as Stored>::Numbers as Pool>::Number;

impl<E: Stored> QueryGroup<'_, E> {
    /// Numbers per lane.
    const COUNT: usize = NumberOf::<E>::COUNT;

    /// Number of queries.
    pub fn count(&self) -> usize {
        self.item.rows.len() * self.dims.group()
    }

    /// Computes all chunks, one after the other. `out` returns the output of a row's heads, which begins
    /// at the given index.
    pub fn all<'o>(&self, scratch: &mut Scratch, out: impl Fn(usize) -> &'o mut [f32]) {
        let width = self.dims.width();
        // Taken out of `scratch`, because `chunk` borrows the rest.
        let mut partials = std::mem::take(&mut scratch.partials);
        let floats = self.count() * Partial::floats(width);
        let [mut so_far, mut next] =
            (partials.each_mut()).map(|buffer| Partial::new(buffer.room(floats), width));
        self.one(self.item.chunks.start, scratch, &mut so_far);
        for chunk in self.item.chunks.clone().skip(1) {
            self.chunk(chunk, scratch, &mut next);
            self.merge(&mut so_far, &next);
        }
        self.store(&so_far, out);
        scratch.partials = partials;
    }

    /// Computes one chunk.
    pub fn one(&self, chunk: usize, scratch: &mut Scratch, into: &mut Partial<'_>) {
        match self.amx() {
            #[cfg(target_arch = "x86_64")]
            Some(_) => self.load_in_tiles(scratch),
            _ => self.load(scratch),
        }
        self.chunk(chunk, scratch, into);
    }

    /// Merges, in the same order, the results of chunks that were separate tasks.
    pub fn merge_all<'o>(&self, partials: &mut [f32], out: impl Fn(usize) -> &'o mut [f32]) {
        let width = self.dims.width();
        let mut partials = partials
            .chunks_exact_mut(self.count() * Partial::floats(width))
            .map(|floats| Partial::new(floats, width));
        let Some(mut so_far) = partials.next() else {
            return;
        };
        for next in partials {
            self.merge(&mut so_far, &next);
        }
        self.store(&so_far, out);
    }

    fn merge(&self, so_far: &mut Partial<'_>, next: &Partial<'_>) {
        let width = self.dims.width();
        let merge = Merge {
            so_far,
            next,
            width,
        };
        run(self.isa, merge);
    }

    /// The keys of a chunk that a row sees.
    pub(super) fn seen(&self, chunk: usize, row: usize) -> Range<usize> {
        self.item.hidden_keys(chunk, row)..self.item.visible_keys(chunk, row)
    }

    /// The proof that tiles multiply, where they do.
    fn amx(&self) -> Option<AmxBf16> {
        match self.isa {
            Isa::AmxBf16(proof) if E::Numbers::IN_TILES => Some(proof),
            _ => None,
        }
    }

    /// Computes the softmax of one chunk, of queries that are loaded.
    fn chunk(&self, chunk: usize, scratch: &mut Scratch, into: &mut Partial<'_>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(amx) = self.amx() {
            return self.chunk_in_tiles(amx, chunk, scratch, into);
        }
        let group = self.dims.group();
        let mut places = [[0; CHUNK]; 2];
        // The last row sees every key that any row shares with the rows after it.
        let shared = self.shared_keys(chunk, self.item.rows.len() - 1);
        // Tiles begin at multiples of their length, whatever the window.
        let first = (self.item.hidden_from_all(chunk) / TILE * TILE).min(shared);
        let next = self.item.visible_keys_of_all(chunk + 1);
        self.places(chunk * CHUNK + first, &mut places[0][first..shared]);
        self.places((chunk + 1) * CHUNK, &mut places[1][..next]);
        self.warm_up(&places[0][first..shared], places[1][0], scratch);
        let places = Places::in_memory(&places[0], &places[1][..next]);
        let tile = self.tile();
        for start in (first..shared).step_by(tile) {
            let places = places.slice(start..shared.min(start + tile));
            let query = self.first_sharing_row(chunk, start) * group;
            self.score(places, query..self.count(), start, scratch);
        }
        self.for_private_keys(chunk, 0..self.item.rows.len(), |row, start, places| {
            self.score(places, row * group..(row + 1) * group, start, scratch);
        });
        self.weigh(chunk, scratch, into);
        into.acc.fill(0.0);
        for start in (first..shared).step_by(tile) {
            let places = places.slice(start..shared.min(start + tile));
            let query = self.first_sharing_row(chunk, start) * group;
            self.add(places, query..self.count(), start, scratch, into.acc);
        }
        self.for_private_keys(chunk, 0..self.item.rows.len(), |row, start, places| {
            let queries = row * group..(row + 1) * group;
            self.add(places, queries, start, scratch, into.acc);
        });
    }

    /// Prefetches a chunk, unless that was done during the last one: if chunks are separate tasks also that of the K/V
    /// heads after this one, which this thread is likely to process next. `places` are those of its keys, `next` is
    /// that of the next chunk's first.
    pub(super) fn warm_up(&self, places: &[usize], next: usize, scratch: &mut Scratch) {
        let Some(&first) = places.first() else {
            return;
        };
        let (d, head) = (self.elements(), self.item.kv_head);
        let slot = |place: usize| self.k.as_ptr().wrapping_add(place).wrapping_sub(head * d);
        let slots = [slot(first).addr(), slot(next).addr()];
        if !scratch.warm.contains(&slots[0]) {
            let heads = self.item.split.map_or(1, |_| self.dims.kv_heads - head);
            let width = heads * d;
            prefetch_all(self.k, places, width);
            prefetch_all(self.v, places, width);
        }
        scratch.warm = slots;
    }

    /// Number of keys that are processed together: all of a chunk if they need no room of their own.
    fn tile(&self) -> usize {
        if !E::IN_BLOCKS && self.is_direct(self.count()) {
            CHUNK
        } else if self.dims.width() <= NARROW {
            2 * TILE
        } else {
            TILE
        }
    }

    /// Computes the scores of the keys at `places`, at most [`MAX_KEYS`] or a [tile](Self::tile), for some queries; the
    /// first key is key `start` of the chunk.
    fn score(
        &self,
        places: Places<'_>,
        queries: Range<usize>,
        start: usize,
        scratch: &mut Scratch,
    ) {
        if E::IN_BLOCKS {
            return self.score_bytes(places, &queries, start, scratch);
        }
        let (d, lanes) = (self.dims.head_dim, NumberOf::<E>::lanes(self.dims.head_dim));
        let scores = scratch.scores.room(self.count() * STRIDE);
        let scores = &mut scores[queries.start * STRIDE + start..];
        let all = scratch.queries.room(self.count() * lanes);
        let own = &all[queries.start * lanes..queries.end * lanes];
        let count = places.at.len();
        let keys = E::vectors(self.isa, self.k, places, d, &mut scratch.copies);
        if self.is_direct(queries.len()) {
            let queries = own;
            let dots = Dots {
                queries,
                keys,
                scores,
            };
            return run(self.isa, dots);
        }
        let few = queries.len() <= MAX_DOTS || !start.is_multiple_of(LANES);
        if Self::COUNT == 1 && few {
            let values = scratch.values.room(MAX_KEYS * lanes);
            let at = self.widen(keys, values);
            let dots = Dots {
                queries: own,
                keys: Vectors::new(values, Places::cached(&at[..count]), lanes),
                scores,
            };
            return run(self.isa, dots);
        }
        let packed = scratch.keys.room(MAX_KEYS * lanes);
        run(self.isa, Pack { keys, to: packed });
        let scores = Scores {
            queries: own,
            width: lanes,
            keys: packed,
            count,
            scores,
            number: PhantomData::<NumberOf<E>>,
        };
        run(self.isa, scores);
    }

    /// Adds the values at `places`, as many as for [`score`](Self::score), to the sums of some queries, with the
    /// weights from key `first` of the chunk on.
    fn add(
        &self,
        places: Places<'_>,
        queries: Range<usize>,
        first: usize,
        scratch: &mut Scratch,
        sums: &mut [f32],
    ) {
        let width = self.dims.width();
        let sums = &mut sums[queries.start * width..queries.end * width];
        let weights = scratch.scores.room(self.count() * STRIDE);
        let weights = &weights[queries.start * STRIDE + first / Self::COUNT..];
        let seen = &scratch.seen[queries.clone()];
        let (count, number) = (places.at.len(), PhantomData::<NumberOf<E>>);
        let d = self.dims.head_dim;
        let read = E::vectors(self.isa, self.v, places, d, &mut scratch.copies);
        if self.is_direct(if E::IN_BLOCKS { 0 } else { queries.len() }) {
            let add = AddWeighted {
                sums,
                weights,
                seen,
                first,
                count,
                values: read,
                number,
            };
            return run(self.isa, add);
        }
        let values = scratch.values.room(MAX_KEYS * width);
        let at = self.widen(read, values);
        let at = Places::cached(&at[..count.div_ceil(Self::COUNT)]);
        let add = AddWeighted {
            sums,
            weights,
            seen,
            first,
            count,
            values: Vectors::new(values, at, width),
            number,
        };
        run(self.isa, add);
    }

    /// Whether so many queries read K and V as they are, without another copy.
    fn is_direct(&self, queries: usize) -> bool {
        Self::COUNT == 1 && queries <= MAX_DIRECT && self.dims.head_dim == self.dims.width()
    }

    /// Copies `vectors` as lanes, padded with zeros, and returns where those of each begin.
    fn widen(&self, vectors: Vectors<'_, E::Numbers>, to: &mut [f32]) -> [usize; MAX_KEYS] {
        let width = self.dims.width();
        run(self.isa, Widen { vectors, to });
        std::array::from_fn(|i| i * width)
    }

    /// Turns the scores of all queries into weights, and notes which keys each query sees.
    fn weigh(&self, chunk: usize, scratch: &mut Scratch, into: &mut Partial<'_>) {
        let group = self.dims.group();
        let scores = scratch.scores.room(self.count() * STRIDE);
        scratch.seen.clear();
        for row in 0..self.item.rows.len() {
            let seen = self.seen(chunk, row);
            scratch.seen.extend(repeat_n(seen, group));
        }
        self.soften(scores, &scratch.seen);
        let weigh = Weigh {
            scores,
            seen: &scratch.seen,
            max: into.max,
            sum: into.sum,
            halve: Self::COUNT > 1,
        };
        run(self.isa, weigh);
    }

    /// Caps the scores that queries see, if they are to be capped: `[queries, STRIDE]`.
    pub(super) fn soften(&self, scores: &mut [f32], seen: &[Range<usize>]) {
        let Some(cap) = self.soft_cap else {
            return;
        };
        for (scores, seen) in scores.chunks_exact_mut(STRIDE).zip(seen) {
            if let Some(scores) = scores.get_mut(seen.clone()) {
                run(self.isa, Soften { scores, cap });
            }
        }
    }

    /// As [`Item::shared_keys`]. Those of a tree that are added together, in pairs or tiles, end with whole ones: the keys
    /// after them belong with a row's first private key.
    pub(super) fn shared_keys(&self, chunk: usize, row: usize) -> usize {
        let shared = self.item.shared_keys(chunk, row);
        let together = match self.amx() {
            Some(_) => TILE,
            None => Self::COUNT,
        };
        match self.item.span.tree {
            Some(_) => shared / together * together,
            None => shared,
        }
    }

    /// The first row that shares the chunk's key `start` with the rows after it.
    fn first_sharing_row(&self, chunk: usize, start: usize) -> usize {
        let mut rows = 0..self.item.rows.len();
        rows.find(|&row| self.shared_keys(chunk, row) > start)
            .unwrap_or(rows.end)
    }

    /// Calls `work` for each of `rows` that has private keys in the chunk, with the row, the first of these
    /// keys' number in the chunk, and the places of all of them.
    pub(super) fn for_private_keys(
        &self,
        chunk: usize,
        rows: Range<usize>,
        mut work: impl FnMut(usize, usize, Places<'_>),
    ) {
        if self.item.span.tree.is_none() {
            return;
        }
        for row in rows {
            let (mut places, mut count) = ([0; MAX_KEYS], 0);
            let first = self.shared_keys(chunk, row);
            for number in first..self.item.shared_keys(chunk, row) {
                self.places(chunk * CHUNK + number, &mut places[count..=count]);
                count += 1;
            }
            for position in self.item.private_keys(chunk, row) {
                self.places(position, &mut places[count..=count]);
                count += 1;
            }
            if count > 0 {
                work(row, first, Places::cached(&places[..count]));
            }
        }
    }

    /// The indices in the pools of K and V of the sequence's positions from `position` on.
    pub(super) fn places(&self, mut position: usize, mut places: &mut [usize]) {
        let (size, head) = (self.block_size, self.elements());
        let stride = self.dims.kv_heads * head;
        // Block by block: a division per key would cost more than its scores.
        while !places.is_empty() {
            let (block, offset) = (position / size, position % size);
            let slot = self.item.span.blocks[block] as usize * size + offset;
            let start = slot * stride + self.item.kv_head * head;
            let (inside, rest) = places.split_at_mut(places.len().min(size - offset));
            let mut next = start;
            for place in inside.iter_mut() {
                *place = next;
                next = next.wrapping_add(stride);
            }
            position += inside.len();
            places = rest;
        }
    }

    /// Elements of a head in the pools.
    pub(super) fn elements(&self) -> usize {
        E::elements(self.dims.head_dim).unwrap_or_default()
    }

    /// Scales the queries, so that scores are multiples of log2(e), unless they are still to be capped.
    fn load(&self, scratch: &mut Scratch) {
        let lanes = NumberOf::<E>::lanes(self.dims.head_dim);
        let queries = scratch.queries.room(self.count() * lanes);
        for (number, to) in queries.chunks_exact_mut(lanes).enumerate() {
            let load = LoadQuery {
                from: self.query(number),
                factor: self.factor(),
                to,
                number: PhantomData::<NumberOf<E>>,
            };
            run(self.isa, load);
        }
        if E::IN_BLOCKS {
            self.round_queries(scratch);
        }
    }

    /// What queries are multiplied by.
    pub(super) fn factor(&self) -> f32 {
        match self.soft_cap {
            None => self.scale * LOG2_E,
            Some(_) => self.scale,
        }
    }

    /// A query as it came.
    pub(super) fn query(&self, number: usize) -> &[f32] {
        let (d, group) = (self.dims.head_dim, self.dims.group());
        let (row, head) = (number / group, self.item.kv_head * group + number % group);
        &self.q.q[self.row_of(row) * self.q.stride + head * d..][..d]
    }

    fn store<'o>(&self, so_far: &Partial<'_>, out: impl Fn(usize) -> &'o mut [f32]) {
        let (d, width, group) = (self.dims.head_dim, self.dims.width(), self.dims.group());
        let sinks = self.sinks.map(|all| &all[self.item.kv_head * group..]);
        for row in 0..self.item.rows.len() {
            for (i, to) in out(self.heads_of(row)).chunks_exact_mut(d).enumerate() {
                let query = row * group + i;
                let normalize = Normalize {
                    sums: &so_far.acc[query * width..],
                    max: so_far.max[query],
                    sum: so_far.sum[query],
                    sink: sinks.map(|sinks| sinks[i]),
                    to,
                };
                run(self.isa, normalize);
            }
        }
    }

    /// The number of a row of the item among all.
    fn row_of(&self, row: usize) -> usize {
        self.item.span.rows.start + self.item.rows.start + row
    }

    /// The index of a row's heads in the output.
    fn heads_of(&self, row: usize) -> usize {
        let heads = self.row_of(row) * self.dims.heads + self.item.kv_head * self.dims.group();
        heads * self.dims.head_dim
    }
}
