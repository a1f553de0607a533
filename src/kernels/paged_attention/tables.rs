//! What a GPU has to know of the rows of a call.

use super::super::graph::{Values, overwrite};
use super::{Rows, Segment};
use candle_core::{Device, Result, Tensor};

/// Keys that are a chunk, and most pairs of a row and a head in a tile; as in the kernels.
pub(super) const CHUNK: usize = 64;
pub(super) const LANES: usize = 32;
pub(super) const LONG_LANES: usize = 64;
/// Rows of a segment above which it is long. Decoding and verification have fewer, and their bits are
/// those of one kernel.
const SHORT: usize = 16;
/// Values of a tile: first row, rows, context, start in the segment, start of the block table, start
/// of the tree masks (-1 = causal), rows of short segments before it, each an i32.
pub(super) const TILE: usize = 7;

/// Sizes of [`Tables`] that make calls alike: what short segments need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Room {
    /// Tiles at most.
    pub tiles: usize,
    /// Chunks of the longest context at most.
    pub chunks: usize,
}

/// The rows of a call, cut into tiles so that none has more than [`LANES`] pairs of a row and a head
/// of one K/V head, or [`LONG_LANES`] in a long segment; in the memory of a GPU.
pub struct Tables {
    /// `[(room.tiles + long) * TILE]` u32; tiles without rows fill up the room.
    pub(super) tiles: Tensor,
    /// Tiles of long segments, behind those of short ones.
    pub(super) long: usize,
    /// Block tables of all segments, u32.
    pub(super) blocks: Tensor,
    /// Tree masks of all segments, i64.
    pub(super) trees: Tensor,
    pub(super) room: Room,
    /// Rows of short segments.
    pub(super) short_rows: usize,
    /// Query heads that share one of keys.
    group: usize,
}

/// The tables in the host's memory.
struct Parts {
    tiles: Vec<u32>,
    long: Vec<u32>,
    blocks: Vec<u32>,
    trees: Vec<i64>,
    short_rows: usize,
}

/// Rows of a tile of a short segment at most, where `group` query heads share one of keys.
pub(super) fn most(group: usize) -> usize {
    LANES / group
}

impl Segment<'_> {
    /// Whether the kernel for prompts takes it, where there is one.
    fn is_long(&self) -> bool {
        self.rows.len() > SHORT && self.tree.is_none()
    }
}

impl Parts {
    /// With `prefill` long segments have a list of their own.
    fn of(segments: &[Segment<'_>], group: usize, prefill: bool) -> Self {
        let (mut tiles, mut long) = (Vec::new(), Vec::new());
        let (mut blocks, mut trees, mut short_rows) = (Vec::new(), Vec::new(), 0);
        for segment in segments {
            let tree = segment.tree.map_or(-1, |_| trees.len() as i32);
            let is_long = prefill && segment.is_long();
            let (tiles, most) = match is_long {
                true => (&mut long, LONG_LANES / group),
                false => (&mut tiles, most(group)),
            };
            for start in (0..segment.rows.len()).step_by(most) {
                let len = most.min(segment.rows.len() - start);
                let first = segment.rows.start + start;
                tiles.extend([first, len, segment.context, start, blocks.len()].map(|n| n as u32));
                tiles.extend([tree as u32, (short_rows + start) as u32]);
            }
            if !is_long {
                short_rows += segment.rows.len();
            }
            blocks.extend_from_slice(segment.blocks);
            trees.extend(
                segment
                    .tree
                    .unwrap_or_default()
                    .iter()
                    .map(|&mask| mask as i64),
            );
        }
        Self {
            tiles,
            long,
            blocks,
            trees,
            short_rows,
        }
    }
}

impl Rows<'_> {
    /// What these rows need, where `group` query heads share one of keys; with `prefill` without the
    /// long segments.
    fn needs(&self, group: usize, prefill: bool) -> Room {
        let short = || self.segments.iter().filter(|s| !(prefill && s.is_long()));
        let tiles = short().map(|s| s.rows.len().div_ceil(most(group))).sum();
        let keys = short().map(|s| s.context + s.rows.len()).max();
        Room {
            tiles,
            chunks: keys.unwrap_or(0).div_ceil(CHUNK),
        }
    }

    /// Room for these rows and others like them, none of them in a long segment: powers of two.
    pub fn room(&self, group: usize) -> Room {
        let needs = self.needs(group, false);
        Room {
            tiles: needs.tiles.next_power_of_two(),
            chunks: needs.chunks.next_power_of_two(),
        }
    }

    /// Sends to a GPU what attention needs of these rows, with room for others: `None` = with none.
    /// With `prefill` long segments go to the kernel for prompts. Attention does it by itself where
    /// it was not done.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn send(
        &self,
        device: &Device,
        group: usize,
        prefill: bool,
        room: Option<Room>,
    ) -> Result<&Tables> {
        if let Some(tables) = self.tables.get() {
            return Ok(tables);
        }
        let mut parts = Parts::of(&self.segments, group, prefill);
        if let Some(room) = room {
            parts.tiles.resize(room.tiles * TILE, 0);
            let blocks = (room.chunks * CHUNK).div_ceil(self.block_size) + 1;
            parts.blocks.resize(room.tiles * blocks, 0);
        }
        let long = parts.long.len() / TILE;
        parts.tiles.append(&mut parts.long);
        // GPUs have no empty allocations.
        parts.trees.push(0);
        let tables = Tables {
            tiles: Tensor::new(parts.tiles, device)?,
            long,
            blocks: Tensor::new(parts.blocks, device)?,
            trees: Tensor::new(parts.trees, device)?,
            room: room.unwrap_or_else(|| self.needs(group, prefill)),
            short_rows: parts.short_rows,
            group,
        };
        Ok(self.tables.get_or_init(|| tables))
    }

    /// The tables that were sent.
    pub fn into_tables(self) -> Option<Tables> {
        self.tables.into_inner()
    }
}

impl Tables {
    /// Puts other rows in the place of those that are there, both without trees and prompts.
    ///
    /// # Errors
    /// Where there is no room, or the device fails.
    pub fn replace(&self, rows: &Rows<'_>) -> Result<()> {
        let mut parts = Parts::of(&rows.segments, self.group, false);
        let chunks = rows.needs(self.group, false).chunks;
        let trees = parts.trees.len() + self.trees.elem_count() > 1;
        let more = self.long > 0 || parts.short_rows > self.short_rows;
        if trees || more || parts.tiles.len() > self.room.tiles * TILE || chunks > self.room.chunks
        {
            candle_core::bail!(
                "paged-attention: {} tiles and {chunks} chunks for {:?}, trees: {trees}, more rows: {more}",
                parts.tiles.len() / TILE,
                self.room
            );
        }
        parts.tiles.resize(self.room.tiles * TILE, 0);
        overwrite(&self.tiles, Values::U32(&parts.tiles))?;
        overwrite(&self.blocks, Values::U32(&parts.blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    const CAUSAL: u32 = u32::MAX;

    fn segment(rows: Range<usize>, context: usize, blocks: &[u32]) -> Segment<'_> {
        Segment {
            rows,
            context,
            blocks,
            tree: None,
        }
    }

    fn room(tiles: usize, chunks: usize) -> Room {
        Room { tiles, chunks }
    }

    #[test]
    fn tiles_hold_what_the_kernels_take() {
        let (short, long): (Vec<u32>, Vec<u32>) = ((0..2).collect(), (5..45).collect());
        let segments = vec![segment(0..1, 20, &short), segment(1..20, 600, &long)];
        // Three query heads share one of keys, so a tile has ten rows.
        let parts = Parts::of(&segments, 3, false);
        let want = [
            [0, 1, 20, 0, 0, CAUSAL, 0],
            [1, 10, 600, 0, 2, CAUSAL, 1],
            [11, 9, 600, 10, 2, CAUSAL, 11],
        ];
        assert_eq!(parts.tiles, want.concat());
        assert!(parts.long.is_empty());
        assert_eq!(parts.blocks, [&short[..], &long].concat());
        let rows = Rows::new(segments, 16);
        assert_eq!(rows.needs(3, false), room(3, 10));
        assert_eq!(rows.room(3), room(4, 16));
        let tables = rows
            .send(&Device::Cpu, 3, false, Some(rows.room(3)))
            .unwrap();
        assert_eq!((tables.tiles.dims(), tables.long), (&[4 * TILE][..], 0));
        assert!(tables.blocks.dims()[0] >= 4 * 64);
        let other = Rows::new(vec![segment(0..3, 900, &long)], 16);
        tables.replace(&other).unwrap();
        let tiles = tables.tiles.to_vec1::<u32>().unwrap();
        assert_eq!(tiles[..TILE], [0, 3, 900, 0, 0, CAUSAL, 0]);
        assert!(tiles[TILE..].iter().all(|&n| n == 0));
        let longer = Rows::new(vec![segment(0..3, 1022, &long)], 16);
        assert!(tables.replace(&longer).is_err());
        let more = Rows::new(vec![segment(0..21, 0, &long)], 16);
        assert!(tables.replace(&more).is_err());
    }

    #[test]
    fn prompts_have_tiles_of_their_own() {
        let (one, other): (Vec<u32>, Vec<u32>) = ((0..2).collect(), (5..45).collect());
        let tree = vec![1u64; 20];
        let branches = Segment {
            tree: Some(&tree),
            ..segment(62..82, 70, &other)
        };
        let segments = vec![
            segment(0..16, 10, &one),
            segment(16..62, 300, &other),
            branches,
            segment(82..83, 20, &one),
        ];
        let parts = Parts::of(&segments, 3, true);
        let short = [
            [0, 10, 10, 0, 0, CAUSAL, 0],
            [10, 6, 10, 10, 0, CAUSAL, 10],
            [62, 10, 70, 0, 42, 0, 16],
            [72, 10, 70, 10, 42, 0, 26],
            [82, 1, 20, 0, 82, CAUSAL, 36],
        ];
        assert_eq!(parts.tiles, short.concat());
        let tiles = parts.long.chunks(TILE).map(|tile| &tile[..TILE - 1]);
        let long = [
            [16, 21, 300, 0, 2, CAUSAL],
            [37, 21, 300, 21, 2, CAUSAL],
            [58, 4, 300, 42, 2, CAUSAL],
        ];
        assert!(tiles.eq(long));
        let rows = Rows::new(segments, 16);
        // The prompt has more chunks.
        assert_eq!(rows.needs(3, true), room(5, 2));
        let tables = rows.send(&Device::Cpu, 3, true, None).unwrap();
        assert_eq!((tables.room, tables.long), (room(5, 2), 3));
        assert_eq!(tables.short_rows, 37);
        let tiles = tables.tiles.to_vec1::<u32>().unwrap();
        assert_eq!(tiles[..5 * TILE], short.concat());
        assert_eq!(tiles[5 * TILE..][..6], long[0]);
        assert!(tables.replace(&Rows::new(vec![], 16)).is_err());
    }
}
