//! The tables that describe the rows of a call to a GPU.

use crate::graph::Values;
use crate::span::Span;
use crate::writes::Writes;
use candle_core::{Device, Result, Tensor};

/// Maximum number of values of a head on a GPU.
pub const MAX_GPU_HEAD_DIM: usize = 512;
/// The number of values of a head on a GPU is a multiple of this: 16 bytes in f16 and bf16.
pub const GPU_HEAD_DIM_STEP: usize = 8;
/// A GPU has kernels for keys and values in FP8 in heads of a multiple of so many values.
pub const FLOAT8_HEAD_DIM_STEP: usize = 16;
/// Maximum number of query heads for each K/V head on a GPU: one row of them is a tile.
pub const MAX_GPU_HEADS_PER_KV_HEAD: usize = 32;
/// Maximum number of values that latent attention keeps of a token on a GPU, as in the kernels.
pub const MAX_GPU_LATENT_KEY: usize = 576;
/// Maximum width of a latent vector on a GPU, as in the kernels.
pub const MAX_GPU_LATENT_RANK: usize = 512;
/// Keys per chunk, as in the kernels.
pub(super) const CHUNK: usize = 64;
/// Maximum number of (row, head) pairs in a tile, as in the kernels: of a short span, and of a long one.
pub(super) const MAX_QUERIES: usize = MAX_GPU_HEADS_PER_KV_HEAD;
pub(super) const MAX_LONG_QUERIES: usize = 64;
/// A span with more rows is long. Decoding and verification have fewer, so they always use the same
/// kernel: a tree has at most 64 nodes, and a longer chain is not worth its rows.
const MAX_SHORT_ROWS: usize = 64;
/// Minimum number of chunks that tables have room for, if they are to be overwritten: 1,024 tokens.
const MIN_CHUNKS: usize = 16;
/// Number of values that describe a tile, each an i32: first row, rows, context, start in the span,
/// start of the block table, start of the tree masks (-1 = causal), rows of its span after it, rows of short spans before
/// it.
pub(super) const TILE: usize = 8;

/// The size of [`AttentionTables`]: how many tiles and chunks of short spans they have room for. Calls with equal
/// capacity launch the same grids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableCapacity {
    /// Maximum number of tiles.
    pub tiles: usize,
    /// Maximum number of chunks of the longest sequence.
    pub chunks: usize,
    /// Maximum number of rows.
    pub rows: usize,
}

impl TableCapacity {
    /// The capacity that `spans` need with `group` query heads per K/V head; with `prefill`, without the
    /// long spans.
    pub(super) fn of(spans: &[Span], group: usize, prefill: bool) -> Self {
        let short = || spans.iter().filter(|span| !(prefill && is_long(span)));
        let tiles = short().map(|s| s.rows.len().div_ceil(max_tile_rows(group)));
        let keys = short().map(|s| s.context + s.rows.len()).max();
        Self {
            tiles: tiles.sum(),
            chunks: keys.unwrap_or(0).div_ceil(CHUNK),
            rows: short().map(|s| s.rows.len()).sum(),
        }
    }

    /// For up to `rows` rows, with tiles and chunks rounded up to powers of two, and to enough chunks for most texts:
    /// blocks without keys end at once, which costs less than another graph.
    pub(super) fn rounded_up(self, rows: usize) -> Self {
        Self {
            tiles: self.tiles.next_power_of_two(),
            chunks: self.chunks.next_power_of_two().max(MIN_CHUNKS),
            rows: self.rows.max(rows),
        }
    }

    /// Whether this has room for `needs`.
    fn holds(self, needs: Self) -> bool {
        needs.tiles <= self.tiles && needs.chunks <= self.chunks && needs.rows <= self.rows
    }
}

/// The rows of a call, in GPU memory, divided into tiles. A tile has at most `MAX_QUERIES` (row, head)
/// pairs of one K/V head, or `MAX_LONG_QUERIES` in a long span.
///
/// The contents come only from an [`AttentionBatch`](super::AttentionBatch), which has checked them.
pub struct AttentionTables {
    /// `[(capacity.tiles + long) * TILE]` u32; tiles without rows pad them to the capacity.
    pub(super) tiles: Tensor,
    /// Number of tiles of long spans, which come after those of short ones.
    pub(super) long: usize,
    /// Block tables of all spans, u32.
    pub(super) blocks: Tensor,
    /// Tree masks of all spans, i64.
    pub(super) trees: Tensor,
    pub(super) capacity: TableCapacity,
    /// Query heads per K/V head.
    group: usize,
    /// Slots per block, and slots of the pools that the contents were checked for.
    pool: (usize, usize),
}

/// The tables in the host's memory.
struct Parts {
    tiles: Vec<u32>,
    long: Vec<u32>,
    blocks: Vec<u32>,
    trees: Vec<i64>,
}

/// Number of query heads of a row that share a tile of latent attention on a GPU, of `heads` heads over the same keys: as
/// many as a tile has room for, and so many that all tiles have as many.
pub fn latent_group(heads: usize) -> usize {
    let groups = 1..=MAX_GPU_HEADS_PER_KV_HEAD.min(heads);
    groups
        .rev()
        .find(|&group| heads.is_multiple_of(group))
        .unwrap_or(1)
}

/// Maximum number of rows in a tile of a short span, with `group` query heads per K/V head.
fn max_tile_rows(group: usize) -> usize {
    MAX_QUERIES / group
}

/// Whether the span goes to the kernel for prompts, if that is used.
pub(super) fn is_long(span: &Span) -> bool {
    span.rows.len() > MAX_SHORT_ROWS && span.tree.is_none()
}

impl Parts {
    /// With `prefill`, the tiles of long spans have a separate list.
    fn of(spans: &[Span], group: usize, prefill: bool) -> Self {
        let (mut tiles, mut long) = (Vec::new(), Vec::new());
        let (mut blocks, mut trees, mut short_rows) = (Vec::new(), Vec::new(), 0);
        for span in spans {
            let tree = span.tree.as_ref().map_or(-1, |_| trees.len() as i32);
            let is_long = prefill && is_long(span);
            let (tiles, max_rows) = match is_long {
                true => (&mut long, MAX_LONG_QUERIES / group),
                false => (&mut tiles, max_tile_rows(group)),
            };
            for start in (0..span.rows.len()).step_by(max_rows) {
                let len = max_rows.min(span.rows.len() - start);
                let first = span.rows.start + start;
                let after = span.rows.len() - start - len;
                tiles.extend([first, len, span.context, start, blocks.len()].map(|n| n as u32));
                tiles.extend([tree as u32, after as u32, (short_rows + start) as u32]);
            }
            if !is_long {
                short_rows += span.rows.len();
            }
            blocks.extend_from_slice(&span.blocks);
            trees.extend(span.tree.iter().flatten().map(|&mask| mask as i64));
        }
        Self {
            tiles,
            long,
            blocks,
            trees,
        }
    }
}

impl AttentionTables {
    /// See `AttentionBatch::send`. `pool` is the slots per block and the slots of the pools that `spans`
    /// were checked for. A GPU has them once `writes` are written.
    ///
    /// # Safety
    /// No kernel reads them before.
    pub(super) unsafe fn new(
        spans: &[Span],
        pool: (usize, usize),
        device: &Device,
        (group, prefill): (usize, bool),
        capacity: Option<TableCapacity>,
        writes: &mut Writes,
    ) -> Result<Self> {
        let mut parts = Parts::of(spans, group, prefill);
        // Kernels count in signed 32-bit integers.
        let largest = parts.blocks.len().max(parts.trees.len()).max(pool.1);
        if i32::try_from(largest).is_err() {
            candle_core::bail!("paged-attention: {largest} slots or blocks are too many for a GPU");
        }
        let needs = TableCapacity::of(spans, group, prefill);
        if let Some(capacity) = capacity {
            if !capacity.holds(needs) {
                candle_core::bail!("paged-attention: {needs:?} exceeds {capacity:?}");
            }
            parts.tiles.resize(capacity.tiles * TILE, 0);
            let blocks = (capacity.chunks * CHUNK).div_ceil(pool.0) + 1;
            let blocks = parts.blocks.len().max(capacity.tiles * blocks);
            parts.blocks.resize(blocks, 0);
            // Any rows may be those of trees.
            parts.trees.resize(capacity.rows, 0);
        }
        let long = parts.long.len() / TILE;
        parts.tiles.append(&mut parts.long);
        // A GPU cannot allocate an empty buffer.
        parts.trees.push(0);
        let mut tensor = |values: Values<'_>, len: usize| {
            // SAFETY: the caller promises it.
            unsafe { writes.tensor(values, len, device) }
        };
        Ok(Self {
            tiles: tensor(Values::U32(&parts.tiles), parts.tiles.len())?,
            long,
            blocks: tensor(Values::U32(&parts.blocks), parts.blocks.len())?,
            trees: tensor(Values::I64(&parts.trees), parts.trees.len())?,
            capacity: capacity.unwrap_or(needs),
            group,
            pool,
        })
    }

    /// Query heads per K/V head.
    #[cfg(feature = "cuda")]
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Tiles, block tables and tree masks, for kernels.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensors(&self) -> [&Tensor; 3] {
        [&self.tiles, &self.blocks, &self.trees]
    }

    /// Number of tiles of all spans, those without rows included.
    #[cfg(feature = "cuda")]
    pub(crate) fn num_tiles(&self) -> usize {
        self.capacity.tiles + self.long
    }

    /// How many tiles and chunks they have room for.
    #[cfg(feature = "cuda")]
    pub(crate) fn capacity(&self) -> TableCapacity {
        self.capacity
    }

    /// Whether there are tiles for the kernel for prompts.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_prompts(&self) -> bool {
        self.long > 0
    }

    /// See `AttentionBatch::overwrite`.
    pub(super) fn replace(
        &self,
        spans: &[Span],
        pool: (usize, usize),
        writes: &mut Writes,
    ) -> Result<()> {
        let mut parts = Parts::of(spans, self.group, false);
        let needs = TableCapacity::of(spans, self.group, false);
        let capacity = self.capacity;
        if self.long > 0
            || pool != self.pool
            || !capacity.holds(needs)
            || parts.blocks.len() > self.blocks.elem_count()
            || parts.trees.len() > self.trees.elem_count()
        {
            candle_core::bail!(
                "paged-attention: cannot replace the tables: {needs:?} for {capacity:?}, pools {pool:?} for {:?}",
                self.pool
            );
        }
        parts.tiles.resize(capacity.tiles * TILE, 0);
        writes.push(&self.tiles, Values::U32(&parts.tiles))?;
        writes.push(&self.blocks, Values::U32(&parts.blocks))?;
        writes.push(&self.trees, Values::I64(&parts.trees))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAUSAL: u32 = u32::MAX;

    fn capacity(tiles: usize, chunks: usize, rows: usize) -> TableCapacity {
        TableCapacity {
            tiles,
            chunks,
            rows,
        }
    }

    const POOL: (usize, usize) = (16, 1024);

    fn tables_of(
        spans: &[Span],
        prefill: bool,
        capacity: Option<TableCapacity>,
    ) -> Result<AttentionTables> {
        let mut writes = Writes::default();
        // SAFETY: on the CPU they are written at once.
        unsafe {
            AttentionTables::new(
                spans,
                POOL,
                &Device::Cpu,
                (3, prefill),
                capacity,
                &mut writes,
            )
        }
    }

    #[test]
    fn heads_of_latent_attention_fill_tiles() {
        let groups = [4, 16, 20, 64, 128, 40, 37].map(latent_group);
        assert_eq!(groups, [4, 16, 20, 32, 32, 20, 1]);
    }

    #[test]
    fn tiles_hold_no_more_than_the_kernels_take() {
        let (short, long): (Vec<u32>, Vec<u32>) = ((0..2).collect(), (5..45).collect());
        let spans = [
            Span::causal(0..1, 20, &short),
            Span::causal(1..20, 600, &long),
        ];
        // Three query heads per K/V head, so a tile has ten rows.
        let parts = Parts::of(&spans, 3, false);
        let want = [
            [0, 1, 20, 0, 0, CAUSAL, 0, 0],
            [1, 10, 600, 0, 2, CAUSAL, 9, 1],
            [11, 9, 600, 10, 2, CAUSAL, 0, 11],
        ];
        assert_eq!(parts.tiles, want.concat());
        assert!(parts.long.is_empty());
        assert_eq!(parts.blocks, [&short[..], &long].concat());
        let needs = TableCapacity::of(&spans, 3, false);
        assert_eq!(needs, capacity(3, 10, 20));
        assert_eq!(needs.rounded_up(24), capacity(4, 16, 24));
        let send = |capacity| tables_of(&spans, false, Some(capacity));
        assert!(send(capacity(2, 16, 20)).is_err());
        assert!(send(capacity(4, 8, 20)).is_err());
        assert!(send(capacity(4, 16, 19)).is_err());
        let tables = send(needs.rounded_up(24)).unwrap();
        assert_eq!((tables.tiles.dims(), tables.long), (&[4 * TILE][..], 0));
        assert!(tables.blocks.dims()[0] >= 4 * 64);
        let replace = |span| {
            let mut writes = Writes::default();
            tables.replace(&[span], POOL, &mut writes)?;
            writes.write()
        };
        replace(Span::causal(0..24, 0, &long)).unwrap();
        replace(Span::causal(0..3, 900, &long)).unwrap();
        let tiles = tables.tiles.to_vec1::<u32>().unwrap();
        assert_eq!(tiles[..TILE], [0, 3, 900, 0, 0, CAUSAL, 0, 0]);
        assert!(tiles[TILE..].iter().all(|&n| n == 0));
        assert!(replace(Span::causal(0..3, 1022, &long)).is_err(), "chunks");
        assert!(replace(Span::causal(0..25, 0, &long)).is_err(), "rows");
        let many = vec![0; tables.blocks.elem_count() + 1];
        assert!(replace(Span::causal(0..3, 0, &many)).is_err(), "blocks");
    }

    #[test]
    fn prompts_have_separate_tiles() {
        let (one, other): (Vec<u32>, Vec<u32>) = ((0..2).collect(), (5..45).collect());
        let branches = Span {
            tree: Some(vec![1; 20]),
            ..Span::causal(82..102, 70, &other)
        };
        let spans = [
            Span::causal(0..16, 10, &one),
            Span::causal(16..82, 300, &other),
            branches,
            Span::causal(102..103, 20, &one),
        ];
        let parts = Parts::of(&spans, 3, true);
        let short = [
            [0, 10, 10, 0, 0, CAUSAL, 6, 0],
            [10, 6, 10, 10, 0, CAUSAL, 0, 10],
            [82, 10, 70, 0, 42, 0, 10, 16],
            [92, 10, 70, 10, 42, 0, 0, 26],
            [102, 1, 20, 0, 82, CAUSAL, 0, 36],
        ];
        assert_eq!(parts.tiles, short.concat());
        let tiles = parts.long.chunks(TILE).map(|tile| &tile[..TILE - 1]);
        let long = [
            [16, 21, 300, 0, 2, CAUSAL, 45],
            [37, 21, 300, 21, 2, CAUSAL, 24],
            [58, 21, 300, 42, 2, CAUSAL, 3],
            [79, 3, 300, 63, 2, CAUSAL, 0],
        ];
        assert!(tiles.eq(long));
        let tables = tables_of(&spans, true, None).unwrap();
        // The prompt's chunks do not count.
        assert_eq!((tables.capacity, tables.long), (capacity(5, 2, 37), 4));
        let tiles = tables.tiles.to_vec1::<u32>().unwrap();
        assert_eq!(tiles[..5 * TILE], short.concat());
        assert_eq!(tiles[5 * TILE..][..TILE - 1], long[0]);
        let nothing = tables.replace(&[], POOL, &mut Writes::default());
        assert!(nothing.is_err());
    }
}
