//! Who does what: rows of a call, cut into items and tasks for threads. Nothing here decides an
//! order of additions; any other cut gives the same bits.

use super::vectors::{ALIGN, CHUNK};
use crate::kernels::span::Span;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// (Row, head) pairs that share one pass over the keys: enough to work from registers, and few
/// enough that their queries stay in the first-level cache.
const MAX_QUERIES: usize = 48;
/// An item whose share of the work is more than a thread's by this factor is parted.
const FINE: usize = 4;

#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Dims {
    /// Query heads of a K/V head.
    pub fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Floats of a head, as kernels see it: filled up with zeros.
    pub fn width(self) -> usize {
        self.head_dim.next_multiple_of(ALIGN)
    }
}

/// A run of rows of one span with all heads of one K/V head: what shares keys and values. The
/// keys of a row are numbered in ascending order; its chunk `c` is the numbers from `c * CHUNK`.
pub(super) struct Item<'a> {
    pub span: &'a Span,
    /// Rows, counted in the span.
    pub rows: Range<usize>,
    pub kv_head: usize,
    /// Chunks of the row with most keys; a row without a key has an empty one.
    pub chunks: usize,
    /// Where its partial results begin (one a query), if chunks are tasks of their own.
    pub parted: Option<usize>,
    /// Chunks to be done, if so.
    left: AtomicUsize,
}

/// Some chunks of an item: one, or all.
pub(super) struct Task {
    pub item: usize,
    pub chunks: Range<usize>,
    /// Pairs of a row and a key.
    cost: usize,
}

pub(super) struct Plan<'a> {
    pub items: Vec<Item<'a>>,
    /// The longest first, so that threads end together; those of equal length by chunk, since the
    /// K/V heads of a chunk lie side by side in memory.
    pub tasks: Vec<Task>,
    /// Partial results of all items that are parted.
    pub partials: usize,
    /// Pairs of a row and a key, over all K/V heads.
    pub pairs: usize,
}

impl<'a> Plan<'a> {
    pub fn new(spans: &'a [Span], dims: Dims, threads: usize) -> Self {
        let rows = (MAX_QUERIES / dims.group()).max(1);
        let mut items = Vec::with_capacity(dims.kv_heads * spans.len());
        for span in spans {
            for start in (0..span.rows.len()).step_by(rows) {
                let rows = start..span.rows.len().min(start + rows);
                items.extend((0..dims.kv_heads).map(|kv_head| Item::new(span, &rows, kv_head)));
            }
        }
        let pairs = items.iter().map(Item::cost).sum();
        let mut plan = Self {
            tasks: Vec::with_capacity(2 * items.len()),
            items,
            partials: 0,
            pairs,
        };
        for (i, item) in plan.items.iter_mut().enumerate() {
            let cost = item.cost();
            if threads > 1 && item.chunks > 1 && cost * threads * FINE > pairs {
                item.parted = Some(plan.partials);
                plan.partials += item.chunks * item.rows.len() * dims.group();
                plan.tasks.extend((0..item.chunks).map(|chunk| Task {
                    item: i,
                    chunks: chunk..chunk + 1,
                    cost: item.rows.len() * CHUNK.min(item.keys().saturating_sub(chunk * CHUNK)),
                }));
            } else {
                let chunks = 0..item.chunks;
                plan.tasks.push(Task {
                    item: i,
                    chunks,
                    cost,
                });
            }
        }
        plan.tasks
            .sort_unstable_by_key(|task| (Reverse(task.cost), task.chunks.start, task.item));
        plan
    }
}

impl<'a> Item<'a> {
    fn new(span: &'a Span, rows: &Range<usize>, kv_head: usize) -> Self {
        let mut item = Self {
            span,
            rows: rows.clone(),
            kv_head,
            chunks: 0,
            parted: None,
            left: AtomicUsize::new(0),
        };
        item.chunks = item.keys().div_ceil(CHUNK).max(1);
        item.left = AtomicUsize::new(item.chunks);
        item
    }

    /// Keys of the row that sees most.
    pub fn keys(&self) -> usize {
        (0..self.rows.len())
            .map(|row| self.keys_of(row))
            .max()
            .unwrap_or(0)
    }

    fn cost(&self) -> usize {
        self.keys() * self.rows.len()
    }

    /// Keys that a row of the item sees.
    fn keys_of(&self, row: usize) -> usize {
        let row = self.rows.start + row;
        let tree = self.span.tree.as_ref();
        self.span.context + tree.map_or(row + 1, |tree| tree[row].count_ones() as usize)
    }

    /// Keys of a chunk that a row sees.
    pub fn visible_keys(&self, chunk: usize, row: usize) -> usize {
        self.keys_of(row).saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// Those among them that all further rows of the item see as well, under the same numbers and
    /// before all others.
    pub fn shared_keys(&self, chunk: usize, row: usize) -> usize {
        let shared = match self.span.tree {
            None => self.keys_of(row),
            Some(_) => self.span.context,
        };
        shared.saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// Pool positions of the others: what a row of a tree sees of its span.
    pub fn private_keys(&self, chunk: usize, row: usize) -> impl Iterator<Item = usize> {
        let context = self.span.context;
        let tree = self.span.tree.as_ref();
        let mask = tree.map_or(0, |tree| tree[self.rows.start + row]);
        let seen = (0..64).filter(move |j| mask >> j & 1 == 1);
        let numbered = seen
            .enumerate()
            .map(move |(i, j)| (context + i, context + j));
        let numbers = chunk * CHUNK..(chunk + 1) * CHUNK;
        numbered.filter_map(move |(number, position)| numbers.contains(&number).then_some(position))
    }

    /// Says that a chunk is done: whether it was the last.
    pub fn finish(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
