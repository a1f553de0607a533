//! Divides the rows of a call into items and tasks for threads. Nothing here affects the order of
//! additions: any other division gives the same bits.

use super::vectors::CHUNK;
use crate::simd::LANES;
use crate::span::Span;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of queries, (row, head) pairs, that share one pass over the keys: so many that widening and
/// transposing keys costs little. With heads wider than [`WIDTH`] there are fewer, as they shall stay in the
/// second-level cache.
const MAX_QUERIES: usize = 384;
/// The widest heads of which there are [`MAX_QUERIES`].
const WIDTH: usize = 64;
/// The lowest maximum of queries of an item, where longer items would be too few for the threads.
const MIN_QUERIES: usize = 48;
/// An item is split if it has more than `1 / FINE` of a thread's share of the work.
const FINE: usize = 4;
/// Items of up to this many queries, which wait for memory, are always split: so the chunks of all K/V heads, which
/// are adjacent in memory, are read one after the other.
const FEW_QUERIES: usize = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Dims {
    /// Query heads per K/V head.
    pub fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Floats per head as kernels see it: padded with zeros.
    pub fn width(self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
}

/// Consecutive rows of one span with all query heads of one K/V head, which share keys and values. The
/// keys of a row, also those before its window, are numbered in ascending order; its chunk `c` begins at
/// number `c * CHUNK`.
pub(super) struct Item<'a> {
    pub span: &'a Span,
    /// Rows, counted from the span's first.
    pub rows: Range<usize>,
    pub kv_head: usize,
    /// Maximum number of keys up to its own that a row sees.
    window: usize,
    /// Maximum number of keys after its own that a row of a causal span sees of that span.
    ahead: usize,
    /// Number of keys that no row sees, because they are before all windows.
    hidden: usize,
    /// Chunks from that of the first key that a row sees to that of the last, at least one.
    pub chunks: Range<usize>,
    /// The index of its first partial result (there is one per query and chunk), if each chunk is a
    /// separate task.
    pub split: Option<usize>,
    /// Chunks that are not done yet, if it is split.
    left: AtomicUsize,
}

/// Some chunks of an item: one, or all.
pub(super) struct Task {
    pub item: usize,
    pub chunks: Range<usize>,
    /// Number of (row, key) pairs.
    cost: usize,
}

pub(super) struct Plan<'a> {
    pub items: Vec<Item<'a>>,
    /// The longest first, so that threads end at about the same time. Equally long ones of the same rows are ordered
    /// by chunk, since the K/V heads of a chunk are adjacent in memory.
    pub tasks: Vec<Task>,
    /// Number of partial results of all items that are split.
    pub partials: usize,
    /// Number of (row, key) pairs, over all K/V heads.
    pub pairs: usize,
}

impl<'a> Plan<'a> {
    /// `window` is the maximum number of keys up to its own that a row sees, and `ahead` that of the keys after it.
    pub fn new(
        spans: &'a [Span],
        dims: Dims,
        (window, ahead): (usize, usize),
        threads: usize,
    ) -> Self {
        let all: usize = spans.iter().map(|span| span.rows.len()).sum();
        // Eight tasks or more for each thread, if there are enough queries.
        let share = all * dims.heads / (8 * threads);
        let most = (MAX_QUERIES * WIDTH / dims.width().max(WIDTH)).max(MIN_QUERIES);
        let mut items = Vec::with_capacity(dims.kv_heads * spans.len());
        for span in spans {
            // Few items of a long context suffice, as their chunks are tasks: the more queries share a pass over
            // the keys, the less it costs to widen and transpose these.
            let keys = (span.context + span.rows.len() / 2).min(window);
            let share = share * keys.div_ceil(CHUNK).max(1);
            let rows = (share.clamp(MIN_QUERIES, most) / dims.group()).max(1);
            for start in (0..span.rows.len()).step_by(rows) {
                let rows = start..span.rows.len().min(start + rows);
                items.extend(
                    (0..dims.kv_heads)
                        .map(|kv_head| Item::new(span, &rows, (window, ahead), kv_head)),
                );
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
            let long = threads > 1 && cost * threads * FINE > pairs;
            let few = item.rows.len() * dims.group() <= FEW_QUERIES;
            if item.chunks.len() > 1 && (long || few) {
                item.split = Some(plan.partials);
                plan.partials += item.chunks.len() * item.rows.len() * dims.group();
                plan.tasks.extend(item.chunks.clone().map(|chunk| Task {
                    item: i,
                    chunks: chunk..chunk + 1,
                    cost: item.rows.len() * CHUNK.min(item.keys().saturating_sub(chunk * CHUNK)),
                }));
            } else {
                plan.tasks.push(Task {
                    item: i,
                    chunks: item.chunks.clone(),
                    cost,
                });
            }
        }
        plan.tasks.sort_unstable_by_key(|task| {
            let rows = task.item / dims.kv_heads;
            (Reverse(task.cost), rows, task.chunks.start, task.item)
        });
        plan
    }
}

impl<'a> Item<'a> {
    fn new(
        span: &'a Span,
        rows: &Range<usize>,
        (window, ahead): (usize, usize),
        kv_head: usize,
    ) -> Self {
        let mut item = Self {
            span,
            rows: rows.clone(),
            kv_head,
            window,
            ahead,
            hidden: 0,
            chunks: 0..0,
            split: None,
            left: AtomicUsize::new(0),
        };
        let hidden = (0..rows.len()).map(|row| item.hidden_keys_of(row)).min();
        item.hidden = hidden.unwrap_or(0);
        let first = item.hidden / CHUNK;
        item.chunks = first..item.keys().div_ceil(CHUNK).max(first + 1);
        item.left = AtomicUsize::new(item.chunks.len());
        item
    }

    /// Number of keys of the row that sees the most.
    pub fn keys(&self) -> usize {
        (0..self.rows.len())
            .map(|row| self.keys_of(row))
            .max()
            .unwrap_or(0)
    }

    fn cost(&self) -> usize {
        self.keys().saturating_sub(self.hidden) * self.rows.len()
    }

    /// Number of keys up to the last that a row of the item sees.
    fn keys_of(&self, row: usize) -> usize {
        let row = self.rows.start + row;
        let own = match &self.span.tree {
            None => (row + 1)
                .saturating_add(self.ahead)
                .min(self.span.rows.len()),
            Some(tree) => tree[row].count_ones() as usize,
        };
        self.span.context + own
    }

    /// Number of keys before the window of a row of the item, which ends at the row's position: in a tree, that
    /// is after its ancestors.
    fn hidden_keys_of(&self, row: usize) -> usize {
        let row = self.rows.start + row;
        let up_to_itself = match &self.span.tree {
            None => row + 1,
            Some(tree) => (tree[row] & (u64::MAX >> (63 - row))).count_ones() as usize,
        };
        (self.span.context + up_to_itself).saturating_sub(self.window)
    }

    /// Number of keys at the start of a chunk that are before a row's window.
    pub fn hidden_keys(&self, chunk: usize, row: usize) -> usize {
        (self.hidden_keys_of(row).saturating_sub(chunk * CHUNK)).min(CHUNK)
    }

    /// Number of keys at the start of a chunk that no row sees.
    pub fn hidden_from_all(&self, chunk: usize) -> usize {
        self.hidden.saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// Number of keys of a chunk up to the last that a row sees.
    pub fn visible_keys(&self, chunk: usize, row: usize) -> usize {
        self.keys_of(row).saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// As [`visible_keys`](Self::visible_keys), of the row that sees the most.
    pub fn visible_keys_of_all(&self, chunk: usize) -> usize {
        self.keys().saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// How many of the [visible keys](Self::visible_keys) all later rows of the item see as well, if windows
    /// let them. They have the same numbers there and come before all others.
    pub fn shared_keys(&self, chunk: usize, row: usize) -> usize {
        let shared = match self.span.tree {
            None => self.keys_of(row),
            Some(_) => self.span.context,
        };
        shared.saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// The positions of the other visible keys: those that a row of a tree sees of its own span.
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

    /// Marks one chunk as done, and returns whether it was the last.
    pub fn finish(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
