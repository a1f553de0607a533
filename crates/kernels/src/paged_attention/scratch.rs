//! Memory of a thread for the items that it computes.

use crate::quant::{ByteRows, Line};
use crate::simd::LANES;
use std::cell::RefCell;
use std::ops::Range;

/// Buffers for one item, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries: `[queries, lanes]`, ordered by row, then by head.
    pub queries: Buffer,
    /// A tile of keys, see [`Pack`](super::scores::Pack).
    pub keys: Buffer,
    /// A tile of values, or of keys of few queries, see [`Widen`](super::vectors::Widen).
    pub values: Buffer,
    /// Queries for keys of blocks.
    pub byte_queries: Option<ByteRows>,
    /// A tile of keys of blocks, in strips of 16.
    pub strips: Vec<Line>,
    /// A tile of values of blocks, in f32.
    pub copies: Copies,
    /// Scores of the chunk, later its weights: `[queries, STRIDE]`, see [`Weigh`](super::weights::Weigh).
    pub scores: Buffer,
    /// Weights in tiles.
    #[cfg(target_arch = "x86_64")]
    pub weights: Buffer,
    /// Keys or values in tiles that only one row of a tree sees.
    #[cfg(target_arch = "x86_64")]
    pub own: Buffer,
    /// The keys of the chunk that each query sees.
    pub seen: Vec<Range<usize>>,
    /// Addresses of the first keys of two chunks, the last one and that which it prefetched.
    pub warm: [usize; 2],
    /// The softmax so far, and that of the chunk.
    pub partials: [Buffer; 2],
}

/// Floats from a multiple of 64 bytes on, so that no vector lies in two cache lines.
#[derive(Default)]
pub(super) struct Buffer(Vec<f32>);

impl Buffer {
    /// So many floats: those of the last call if it asked for as many or more, otherwise with unspecified contents.
    pub fn room(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len + LANES {
            self.0.resize(len + LANES, 0.0);
        }
        let skip = self.0.as_ptr().align_offset(64).min(LANES);
        &mut self.0[skip..skip + len]
    }
}

/// Heads that are copied one after the other.
#[derive(Default)]
pub(super) struct Copies {
    floats: Buffer,
    /// Where each begins, if it has `head_dim` floats.
    at: Vec<usize>,
    head_dim: usize,
}

impl Copies {
    /// Room for `count` heads of `head_dim` floats, and where each begins.
    pub fn room(&mut self, count: usize, head_dim: usize) -> (&mut [f32], &[usize]) {
        if self.head_dim != head_dim || self.at.len() < count {
            self.at = (0..count).map(|i| i * head_dim).collect();
            self.head_dim = head_dim;
        }
        (self.floats.room(count * head_dim), &self.at[..count])
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Runs `work` with this thread's buffers.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        let result = work(scratch);
        // Their memory is that of the thread's next product.
        scratch.byte_queries = None;
        result
    })
}
