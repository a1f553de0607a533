//! Computes one item on one thread: its queries, chunk by chunk over their keys.

use super::plan::{Dims, Item};
use super::tile::{Kernel, add_weighted, prefetch, scores, soften, weigh, widen};
use super::vectors::{ALIGN, CHUNK, STRIDE, TILE, Vectors};
use crate::kernels::cpu::Isa;
use crate::kernels::float::exp;
use std::cell::RefCell;

/// Maximum number of private keys of a row, those of its tree.
const MAX_PRIVATE: usize = 64;

/// Up to this many queries read 16-bit K and V directly; for more, K and V are first widened once.
const MAX_DIRECT: usize = 3;

/// Buffers for one item, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries: `[queries, width]`, ordered by row, then by head.
    queries: Vec<f32>,
    /// Scores of the chunk, later its weights: `[queries, STRIDE]`.
    scores: Vec<f32>,
    /// A tile of K or V as f32.
    wide: Vec<f32>,
    /// Number of keys of a tile that each query sees.
    counts: Vec<usize>,
    /// The softmax so far, and that of the next chunk.
    partials: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Runs `work` with this thread's buffers.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(work)
}

/// `buffer[..len]`, with unspecified contents.
fn room<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// The softmax over some keys, for each query.
pub(super) struct Partial<'a> {
    /// Weighted sums of values, `[queries, width]`.
    acc: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Floats per query.
    pub fn floats(width: usize) -> usize {
        width + 2
    }

    pub fn new(floats: &'a mut [f32], width: usize) -> Self {
        let queries = floats.len() / Self::floats(width);
        let (acc, rest) = floats.split_at_mut(queries * width);
        let (max, sum) = rest.split_at_mut(queries);
        Self { acc, max, sum }
    }

    fn clear(&mut self) {
        self.acc.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    /// Merges the softmax of a query's next chunk (Milakov and Gimelshein 2018, "Online normalizer
    /// calculation for softmax").
    fn merge(&mut self, next: &Partial<'_>, query: usize, width: usize) {
        let own = query * width..(query + 1) * width;
        if self.sum[query] == 0.0 {
            // Its first chunk: others of the item see earlier ones.
            (self.max[query], self.sum[query]) = (next.max[query], next.sum[query]);
            return self.acc[own.clone()].copy_from_slice(&next.acc[own]);
        }
        let max = self.max[query].max(next.max[query]);
        let (ours, theirs) = (exp(self.max[query] - max), exp(next.max[query] - max));
        self.max[query] = max;
        self.sum[query] = self.sum[query] * ours + next.sum[query] * theirs;
        let next = &next.acc[own.clone()];
        for (acc, next) in self.acc[own].iter_mut().zip(next) {
            *acc = *acc * ours + next * theirs;
        }
    }
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
    /// `[rows, heads, head_dim]`.
    pub q: &'a [f32],
    /// The pools, `[num_slots, kv_heads, head_dim]`.
    pub k: &'a [E],
    pub v: &'a [E],
    pub dims: Dims,
}

impl<E: Kernel> QueryGroup<'_, E> {
    /// Number of queries.
    pub fn count(&self) -> usize {
        self.item.rows.len() * self.dims.group()
    }

    /// Computes all chunks, one after the other. `out` returns the output of a row's heads, which begins
    /// at the given index.
    pub fn all<'o>(&self, scratch: &mut Scratch, out: impl Fn(usize) -> &'o mut [f32]) {
        let width = self.dims.width();
        let floats = self.count() * Partial::floats(width);
        // Taken out of `scratch`, because `chunk` borrows the rest.
        let mut partials = std::mem::take(&mut scratch.partials);
        let (so_far, next) = room(&mut partials, 2 * floats).split_at_mut(floats);
        let mut so_far = Partial::new(so_far, width);
        let mut chunks = self.item.chunks.clone();
        let first = chunks.next().unwrap_or(0);
        self.chunk(first, scratch, &mut so_far);
        for chunk in chunks {
            let mut next = Partial::new(next, width);
            self.chunk(chunk, scratch, &mut next);
            self.merge(&mut so_far, &next, chunk);
        }
        self.store(&so_far, out);
        scratch.partials = partials;
    }

    /// Merges, in the same order, the results of chunks that were separate tasks.
    pub fn merge_all<'o>(&self, partials: &mut [f32], out: impl Fn(usize) -> &'o mut [f32]) {
        let width = self.dims.width();
        let mut partials = partials.chunks_exact_mut(self.count() * Partial::floats(width));
        let Some(first) = partials.next() else { return };
        let mut so_far = Partial::new(first, width);
        for (chunk, next) in self.item.chunks.clone().skip(1).zip(partials) {
            self.merge(&mut so_far, &Partial::new(next, width), chunk);
        }
        self.store(&so_far, out);
    }

    fn merge(&self, so_far: &mut Partial<'_>, next: &Partial<'_>, chunk: usize) {
        let group = self.dims.group();
        for query in 0..self.count() {
            let row = query / group;
            if self.item.visible_keys(chunk, row) > self.item.hidden_keys(chunk, row) {
                so_far.merge(next, query, self.dims.width());
            }
        }
    }

    /// Computes the softmax of one chunk.
    pub fn chunk(&self, chunk: usize, scratch: &mut Scratch, into: &mut Partial<'_>) {
        let (group, rows) = (self.dims.group(), self.item.rows.len());
        let width = self.dims.width();
        into.clear();
        self.load(room(&mut scratch.queries, self.count() * width));
        room(&mut scratch.scores, self.count() * STRIDE);
        room(&mut scratch.counts, self.count());
        let mut places = [0; CHUNK];
        // The last row sees every key that any row shares with the rows after it.
        let shared = self.item.shared_keys(chunk, rows - 1);
        // Tiles begin at multiples of their length, whatever the window.
        let first = (self.item.hidden_from_all(chunk) / TILE * TILE).min(shared);
        self.places(chunk * CHUNK + first, &mut places[first..shared]);
        let end = shared.min(first + TILE);
        prefetch(self.k, &places[first..end], self.dims.head_dim);
        for start in (first..shared).step_by(TILE) {
            let (end, next) = (shared.min(start + TILE), shared.min(start + 2 * TILE));
            prefetch(self.k, &places[end..next], self.dims.head_dim);
            prefetch(self.v, &places[start..end], self.dims.head_dim);
            self.ahead(chunk, start);
            let places = &places[start..end];
            let first = self.first_sharing_row(chunk, start);
            self.score(places, first..rows, start, scratch);
        }
        self.for_private_keys(chunk, |row, start, places| {
            self.score(places, row..row + 1, start, scratch)
        });
        for query in 0..self.count() {
            let visible = self.item.visible_keys(chunk, query / group);
            let hidden = self.item.hidden_keys(chunk, query / group).min(visible);
            let scores = &mut scratch.scores[query * STRIDE..][..visible];
            let (before, scores) = scores.split_at_mut(hidden);
            before.fill(0.0);
            if !scores.is_empty() {
                if let Some(cap) = self.soft_cap {
                    soften(self.isa, scores, cap);
                }
                (into.max[query], into.sum[query]) = weigh(self.isa, scores);
            }
        }
        for start in (first..shared).step_by(TILE) {
            self.ahead(chunk, CHUNK + start);
            let places = &places[start..shared.min(start + TILE)];
            let first = self.first_sharing_row(chunk, start);
            for (row, counts) in
                (first..rows).zip(scratch.counts[first * group..].chunks_mut(group))
            {
                counts.fill((self.item.shared_keys(chunk, row) - start).min(places.len()));
            }
            self.add(places, first..rows, start, scratch, into.acc);
        }
        self.for_private_keys(chunk, |row, start, places| {
            scratch.counts[row * group..][..group].fill(places.len());
            self.add(places, row..row + 1, start, scratch, into.acc);
        });
    }

    /// If chunks are separate tasks, prefetches a part of the next chunk, for all K/V heads. The same
    /// thread is likely to process that chunk after the other heads of this one, each of which prefetches
    /// other parts. `done` counts the keys of this chunk that have been processed, of `2 * CHUNK`: once
    /// for scores, then for values. Long runs of memory are several times as fast as scattered heads.
    fn ahead(&self, chunk: usize, done: usize) {
        if self.item.split.is_none() {
            return;
        }
        let kv_heads = self.dims.kv_heads;
        let pieces = 2 * CHUNK / TILE * kv_heads;
        let piece = done / TILE * kv_heads + self.item.kv_head;
        let start = (chunk + 1) * CHUNK;
        let keys = self.item.keys().saturating_sub(start).min(CHUNK);
        let mut places = [0; CHUNK];
        let places = &mut places[..keys * (piece + 1) / pieces - keys * piece / pieces];
        self.places(start + keys * piece / pieces, places);
        let width = kv_heads * self.dims.head_dim;
        for place in &mut *places {
            *place -= self.item.kv_head * self.dims.head_dim;
        }
        prefetch(self.k, places, width);
        prefetch(self.v, places, width);
    }

    /// The first row that shares the chunk's key `start` with the rows after it.
    fn first_sharing_row(&self, chunk: usize, start: usize) -> usize {
        let mut rows = 0..self.item.rows.len();
        rows.find(|&row| self.item.shared_keys(chunk, row) > start)
            .unwrap_or(rows.end)
    }

    /// Calls `work` for each row that has private keys in the chunk, with the row, the first of these
    /// keys' number in the chunk, and the places of all of them.
    fn for_private_keys(&self, chunk: usize, mut work: impl FnMut(usize, usize, &[usize])) {
        if self.item.span.tree.is_none() {
            return;
        }
        for row in 0..self.item.rows.len() {
            let (mut places, mut count) = ([0; MAX_PRIVATE], 0);
            for position in self.item.private_keys(chunk, row) {
                self.places(position, &mut places[count..=count]);
                count += 1;
            }
            if count > 0 {
                work(row, self.item.shared_keys(chunk, row), &places[..count]);
            }
        }
    }

    /// The indices in the pools of K and V of the sequence's positions from `position` on.
    fn places(&self, mut position: usize, mut places: &mut [usize]) {
        let (size, stride) = (self.block_size, self.dims.kv_heads * self.dims.head_dim);
        // Block by block: a division per key would cost more than its scores.
        while !places.is_empty() {
            let (block, offset) = (position / size, position % size);
            let slot = self.item.span.blocks[block] as usize * size + offset;
            let start = slot * stride + self.item.kv_head * self.dims.head_dim;
            let (inside, rest) = places.split_at_mut(places.len().min(size - offset));
            for (i, place) in inside.iter_mut().enumerate() {
                *place = start + i * stride;
            }
            position += inside.len();
            places = rest;
        }
    }

    /// Computes the scores of the keys at `places` for some rows; the first key is key `start` of the
    /// chunk.
    fn score(
        &self,
        places: &[usize],
        rows: std::ops::Range<usize>,
        start: usize,
        scratch: &mut Scratch,
    ) {
        let (group, width) = (self.dims.group(), self.dims.width());
        let queries = &scratch.queries[rows.start * group * width..rows.end * group * width];
        let out = &mut scratch.scores[rows.start * group * STRIDE + start..];
        if self.is_direct(rows.len()) {
            let keys = Vectors::new(self.k, places, width);
            scores(self.isa, queries, keys, out);
        } else {
            let at = self.widen(self.k, places, &mut scratch.wide);
            let keys = Vectors::new(&scratch.wide, &at[..places.len()], width);
            scores(self.isa, queries, keys, out);
        }
    }

    /// Adds the values at `places` to some rows' sums, with the weights from key `start` of the chunk on.
    fn add(
        &self,
        places: &[usize],
        rows: std::ops::Range<usize>,
        start: usize,
        scratch: &mut Scratch,
        acc: &mut [f32],
    ) {
        let (group, width) = (self.dims.group(), self.dims.width());
        let queries = rows.start * group..rows.end * group;
        let acc = &mut acc[queries.start * width..queries.end * width];
        let weights = &scratch.scores[queries.start * STRIDE + start..];
        let counts = &scratch.counts[queries];
        if self.is_direct(rows.len()) {
            let values = Vectors::new(self.v, places, width);
            add_weighted(self.isa, acc, weights, counts, values);
        } else {
            let at = self.widen(self.v, places, &mut scratch.wide);
            let values = Vectors::new(&scratch.wide, &at[..places.len()], width);
            add_weighted(self.isa, acc, weights, counts, values);
        }
    }

    /// Whether K and V are read from the pools, without being widened to a tile first.
    fn is_direct(&self, rows: usize) -> bool {
        let few = E::DTYPE == candle_core::DType::F32 || rows * self.dims.group() <= MAX_DIRECT;
        few && self.dims.head_dim.is_multiple_of(ALIGN)
    }

    /// Copies vectors to a tile as f32, padded with zeros, and returns their indices there.
    fn widen(&self, pool: &[E], places: &[usize], wide: &mut Vec<f32>) -> [usize; MAX_PRIVATE] {
        let (d, width) = (self.dims.head_dim, self.dims.width());
        let wide = room(wide, places.len() * width);
        for (&place, to) in places.iter().zip(wide.chunks_exact_mut(width)) {
            widen(self.isa, &pool[place..place + d], to);
            to[d..].fill(0.0);
        }
        std::array::from_fn(|i| i * width)
    }

    fn load(&self, queries: &mut [f32]) {
        let (d, group) = (self.dims.head_dim, self.dims.group());
        for (number, query) in queries.chunks_exact_mut(self.dims.width()).enumerate() {
            let from = &self.q[self.heads_of(number / group) + number % group * d..][..d];
            for (to, from) in query.iter_mut().zip(from) {
                *to = from * self.scale;
            }
            query[d..].fill(0.0);
        }
    }

    fn store<'o>(&self, so_far: &Partial<'_>, out: impl Fn(usize) -> &'o mut [f32]) {
        let (d, width, group) = (self.dims.head_dim, self.dims.width(), self.dims.group());
        for row in 0..self.item.rows.len() {
            for (i, head) in out(self.heads_of(row)).chunks_exact_mut(d).enumerate() {
                let query = row * group + i;
                let sum = self.with_sink(i, so_far.max[query], so_far.sum[query]);
                for (to, from) in head.iter_mut().zip(&so_far.acc[query * width..]) {
                    *to = from / sum;
                }
            }
        }
    }

    /// The sum of a query's weights with that of its head's sink, of the item's head `head`.
    fn with_sink(&self, head: usize, max: f32, sum: f32) -> f32 {
        match self.sinks {
            None => sum,
            Some(sinks) => {
                let sink = sinks[self.item.kv_head * self.dims.group() + head];
                sum + exp(sink - max)
            }
        }
    }

    /// The index of a row's heads in q and in the output.
    fn heads_of(&self, row: usize) -> usize {
        let row = self.item.span.rows.start + self.item.rows.start + row;
        (row * self.dims.heads + self.item.kv_head * self.dims.group()) * self.dims.head_dim
    }
}
