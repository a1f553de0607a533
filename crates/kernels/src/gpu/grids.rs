//! How work is divided over the blocks of a launch.

use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{DType, Result, Tensor};

/// Rows per tensor core instruction.
pub(crate) const TILE: usize = 8;
/// Outputs per tensor core instruction.
pub(crate) const STRIP: usize = 16;
/// Maximum number of rows that take about the time of one.
pub(crate) const FEW_ROWS: usize = 2 * TILE;
/// Maximum number of blocks of a grid in its second dimension.
pub(crate) const MAX_GROUPS: usize = 65_535;
/// A weight with fewer strips has more warps for each of them, or it would leave a large GPU without enough
/// loads in flight: two blocks per multiprocessor.
const FULL: usize = 264;

/// Warps that share the inputs of an output, each with a sum of its own. The order of additions depends on their
/// number, so it depends on nothing but the outputs of the weight.
pub(crate) fn warps(outputs: usize) -> usize {
    if outputs.div_ceil(STRIP) < FULL {
        16
    } else {
        8
    }
}

/// How a product of up to [`FEW_ROWS`] rows with a dense or a quantized weight is divided, whose blocks have [`warps`]
/// warps and compute [`STRIP`] outputs.
pub(crate) struct Division {
    /// Tiles of rows: 1 or 2.
    pub tiles: usize,
    /// Warps of a block.
    pub warps: usize,
    pub grid: LaunchConfig,
}

impl Division {
    /// The division of a product of `rows` rows with weights of so many outputs each, which have the same number of
    /// warps.
    ///
    /// # Errors
    /// If the weights have too many outputs for a grid.
    pub fn new(rows: usize, outputs: impl IntoIterator<Item = usize> + Clone) -> Result<Self> {
        let warps = warps(outputs.clone().into_iter().next().unwrap_or(0));
        let tiles = rows.div_ceil(TILE).max(1);
        let blocks = outputs.into_iter();
        let blocks: usize = blocks.map(|outputs| outputs.div_ceil(STRIP)).sum();
        check_blocks(blocks)?;
        Ok(Self {
            tiles,
            warps,
            grid: grid((1, blocks, 1), warps * 32, 0),
        })
    }
}

/// Groups of consecutive rows, each of which has the weight of one expert.
pub(crate) struct Groups<'a> {
    /// In device memory, as `experts/groups.cuh` says; only the device knows how many groups have rows.
    pub table: &'a Tensor,
    /// Places of the table.
    pub max: usize,
    /// Maximum number of rows of a group: [`TILE`], or 64.
    pub rows: usize,
    /// The dtype of the rows, and of their products.
    pub dtype: DType,
}

impl Groups<'_> {
    /// The grid for all groups, for one whose blocks in the first dimension have the rows of one group.
    pub fn grid(&self, of_one: LaunchConfig) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (self.max as u32, of_one.grid_dim.1, of_one.grid_dim.2),
            ..of_one
        }
    }
}

/// Checks the number of blocks in the second dimension of a grid.
///
/// # Errors
/// If they are too many.
pub(crate) fn check_blocks(blocks: usize) -> Result<()> {
    if blocks > MAX_GROUPS {
        candle_core::bail!("a weight that takes {blocks} blocks is too large for a grid");
    }
    Ok(())
}

/// A grid of `blocks` blocks of `threads` threads, each with `shared` bytes of shared memory.
pub(crate) fn grid(blocks: (usize, usize, usize), threads: usize, shared: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks.0 as u32, blocks.1 as u32, blocks.2 as u32),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}
