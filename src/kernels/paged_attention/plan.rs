//! Who does what: rows of a call, cut into items and tasks for threads. Nothing here decides an
//! order of additions; any other cut gives the same bits.

use super::tile::CHUNK;
use super::{Dims, Segment};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// (Row, head) pairs that share one pass over the keys: enough to work from registers, and few
/// enough that their queries stay in the first-level cache.
const LANES: usize = 48;
/// An item whose share of the work is more than a thread's by this factor is parted.
const FINE: usize = 4;

/// A run of rows of one segment with all heads of one K/V head: what shares keys and values. The
/// keys of a row are numbered in ascending order; its chunk `c` is the numbers from `c * CHUNK`.
pub(super) struct Item<'a> {
    pub segment: &'a Segment<'a>,
    /// Rows, counted in the segment.
    pub rows: Range<usize>,
    pub kv_head: usize,
    /// Chunks of the row with most keys; a row without a key has an empty one.
    pub chunks: usize,
    /// Where its partial results begin (a lane is one), if chunks are tasks of their own.
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
    pub fn new(segments: &'a [Segment<'a>], dims: Dims, threads: usize) -> Self {
        let rows = (LANES / dims.group()).max(1);
        let mut items = Vec::with_capacity(dims.kv_heads * segments.len());
        for segment in segments {
            for start in (0..segment.rows.len()).step_by(rows) {
                let rows = start..segment.rows.len().min(start + rows);
                items.extend((0..dims.kv_heads).map(|kv_head| Item::new(segment, &rows, kv_head)));
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
    fn new(segment: &'a Segment<'a>, rows: &Range<usize>, kv_head: usize) -> Self {
        let mut item = Self {
            segment,
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
            .map(|row| self.sees(row))
            .max()
            .unwrap_or(0)
    }

    fn cost(&self) -> usize {
        self.keys() * self.rows.len()
    }

    /// Keys that a row of the item sees.
    fn sees(&self, row: usize) -> usize {
        let row = self.rows.start + row;
        let own = self
            .segment
            .tree
            .map_or(row + 1, |tree| tree[row].count_ones() as usize);
        self.segment.context + own
    }

    /// Keys that a row sees of a chunk.
    pub fn sees_of(&self, chunk: usize, row: usize) -> usize {
        self.sees(row).saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// Those among them that all further rows of the item see as well, under the same numbers and
    /// before all others.
    pub fn shares_of(&self, chunk: usize, row: usize) -> usize {
        let shares = match self.segment.tree {
            None => self.sees(row),
            Some(_) => self.segment.context,
        };
        shares.saturating_sub(chunk * CHUNK).min(CHUNK)
    }

    /// Pool positions of the others: what a row of a tree sees of its segment.
    pub fn owns_of(&self, chunk: usize, row: usize) -> impl Iterator<Item = usize> {
        let context = self.segment.context;
        let mask = self
            .segment
            .tree
            .map_or(0, |tree| tree[self.rows.start + row]);
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
