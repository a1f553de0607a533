//! What a GPU has to know of the rows of a call.

use super::super::graph::{Values, overwrite};
use super::{Rows, Segment};
use candle_core::{Device, Result, Tensor};

/// Keys that are a chunk, and most pairs of a row and a head in a tile; as in the kernels.
pub(super) const CHUNK: usize = 64;
pub(super) const LANES: usize = 32;
/// Values of a tile: first row, rows, context, start in the segment, start of the block table, start
/// of the tree masks (-1 = causal), each an i32.
const TILE: usize = 6;

/// Sizes of [`Tables`] that make calls alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Room {
    /// Tiles at most.
    pub tiles: usize,
    /// Chunks of the longest context at most.
    pub chunks: usize,
}

/// The rows of a call, cut into tiles so that none has more than [`LANES`] pairs of a row and a head
/// of one K/V head; in the memory of a GPU.
pub struct Tables {
    /// `[room.tiles * TILE]` u32; tiles without rows fill up the room.
    pub(super) tiles: Tensor,
    /// Block tables of all segments, u32.
    pub(super) blocks: Tensor,
    /// Tree masks of all segments, i64.
    pub(super) trees: Tensor,
    pub(super) room: Room,
    /// Rows of a tile at most.
    pub(super) rows: usize,
}

/// The tables in the host's memory.
struct Parts {
    tiles: Vec<u32>,
    blocks: Vec<u32>,
    trees: Vec<i64>,
}

/// Rows of a tile at most, where `group` query heads share one of keys.
fn most(group: usize) -> usize {
    LANES / group
}

impl Parts {
    fn of(segments: &[Segment<'_>], most: usize) -> Self {
        let (mut tiles, mut blocks, mut trees) = (Vec::new(), Vec::new(), Vec::new());
        for segment in segments {
            let tree = segment.tree.map_or(-1, |_| trees.len() as i32);
            for start in (0..segment.rows.len()).step_by(most) {
                let len = most.min(segment.rows.len() - start);
                let first = segment.rows.start + start;
                tiles.extend([first, len, segment.context, start, blocks.len()].map(|n| n as u32));
                tiles.push(tree as u32);
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
            blocks,
            trees,
        }
    }
}

impl Rows<'_> {
    /// What these rows need, where `group` query heads share one of keys.
    fn needs(&self, group: usize) -> Room {
        let of = |s: &Segment<'_>| s.rows.len().div_ceil(most(group));
        let keys = |s: &Segment<'_>| s.context + s.rows.len();
        Room {
            tiles: self.segments.iter().map(of).sum(),
            chunks: self
                .segments
                .iter()
                .map(keys)
                .max()
                .unwrap_or(0)
                .div_ceil(CHUNK),
        }
    }

    /// Room for these rows and others like them: powers of two.
    pub fn room(&self, group: usize) -> Room {
        let needs = self.needs(group);
        Room {
            tiles: needs.tiles.next_power_of_two(),
            chunks: needs.chunks.next_power_of_two(),
        }
    }

    /// Sends to a GPU what attention needs of these rows, with room for others: `None` = with none.
    /// Attention does it by itself where it was not done.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn send(&self, device: &Device, group: usize, room: Option<Room>) -> Result<&Tables> {
        if let Some(tables) = self.tables.get() {
            return Ok(tables);
        }
        let mut parts = Parts::of(&self.segments, most(group));
        if let Some(room) = room {
            parts.tiles.resize(room.tiles * TILE, 0);
            let blocks = (room.chunks * CHUNK).div_ceil(self.block_size) + 1;
            parts.blocks.resize(room.tiles * blocks, 0);
        }
        // GPUs have no empty allocations.
        parts.trees.push(0);
        let tables = Tables {
            tiles: Tensor::new(parts.tiles, device)?,
            blocks: Tensor::new(parts.blocks, device)?,
            trees: Tensor::new(parts.trees, device)?,
            room: room.unwrap_or_else(|| self.needs(group)),
            rows: most(group),
        };
        Ok(self.tables.get_or_init(|| tables))
    }

    /// The tables that were sent.
    pub fn into_tables(self) -> Option<Tables> {
        self.tables.into_inner()
    }
}

impl Tables {
    /// Puts other rows in the place of those that are there, both without trees.
    ///
    /// # Errors
    /// Where there is no room, or the device fails.
    pub fn replace(&self, rows: &Rows<'_>) -> Result<()> {
        let mut parts = Parts::of(&rows.segments, self.rows);
        let chunks = rows.needs(LANES / self.rows).chunks;
        let trees = parts.trees.len() + self.trees.elem_count() > 1;
        if trees || parts.tiles.len() > self.room.tiles * TILE || chunks > self.room.chunks {
            candle_core::bail!(
                "paged-attention: {} tiles and {chunks} chunks for {:?}, trees: {trees}",
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

    #[test]
    fn tiles_hold_what_the_kernels_take() {
        let (short, long): (Vec<u32>, Vec<u32>) = ((0..2).collect(), (5..45).collect());
        let segment = |rows, context, blocks| Segment {
            rows,
            context,
            blocks,
            tree: None,
        };
        let segments = vec![segment(0..1, 20, &short[..]), segment(1..20, 600, &long)];
        // Three query heads share one of keys, so a tile has ten rows.
        let parts = Parts::of(&segments, most(3));
        let causal = u32::MAX;
        let want = [
            [0, 1, 20, 0, 0, causal],
            [1, 10, 600, 0, 2, causal],
            [11, 9, 600, 10, 2, causal],
        ];
        assert_eq!(parts.tiles, want.concat());
        assert_eq!(parts.blocks, [&short[..], &long].concat());
        let rows = Rows::new(segments, 16);
        let room = |tiles, chunks| Room { tiles, chunks };
        assert_eq!(rows.needs(3), room(3, 10));
        assert_eq!(rows.room(3), room(4, 16));
        let tables = rows.send(&Device::Cpu, 3, Some(rows.room(3))).unwrap();
        assert_eq!(tables.tiles.dims(), [4 * TILE]);
        assert!(tables.blocks.dims()[0] >= 4 * 64);
        let other = Rows::new(vec![segment(0..3, 900, &long)], 16);
        tables.replace(&other).unwrap();
        let tiles = tables.tiles.to_vec1::<u32>().unwrap();
        assert_eq!(tiles[..TILE], [0, 3, 900, 0, 0, causal]);
        assert!(tiles[TILE..].iter().all(|&n| n == 0));
        let longer = Rows::new(vec![segment(0..3, 1022, &long)], 16);
        assert!(tables.replace(&longer).is_err());
    }
}
