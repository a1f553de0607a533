//! LoRA adapters (Hu et al. 2021, arXiv 2106.09685): products of low rank that are added, row by row, to those of
//! weights that stay as they are. A row gets `scale * B (A x)` of its own adapter, in one order of additions, so its
//! bits depend on itself and its adapter alone; a row without an adapter is computed as if there were none.

mod config;
mod load;
mod low_rank;

pub use load::LoraTarget;

use crate::error::{Error, Result};
use low_rank::LowRank;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;

/// A weight of the base model, `[outputs, inputs]`, as one of those side by side in a linear layer.
#[derive(Debug, Clone)]
pub(super) struct LinearPart {
    /// What the code calls it, without `.weight`.
    pub name: String,
    pub outputs: usize,
    pub inputs: usize,
    /// Output `i` of the layer is row `order[i]` of the weight that adapters are trained for; `None` = row `i`.
    pub order: Option<Arc<[u32]>>,
}

/// A loaded adapter of a base model. Requests that use it hold it, so that it can be unloaded meanwhile.
pub struct LoraAdapter {
    name: String,
    folder: PathBuf,
    /// Random, so that no two loads share one, not even of the same folder.
    id: u64,
    /// What is added to the outputs of each of the base model's linear layers.
    sites: Vec<Option<LowRank>>,
    rank: usize,
    bytes: u64,
}

impl LoraAdapter {
    /// What requests call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder that it was read from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Differs from that of every other load.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The largest rank of its products.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The size of its weights in memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for LoraAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, id, .. } = self;
        write!(f, "LoraAdapter({name} {id:016x})")
    }
}

/// Consecutive rows of a batch, and their adapter.
#[derive(Debug, Clone)]
pub struct AdapterRows {
    pub rows: Range<usize>,
    pub adapter: Arc<LoraAdapter>,
}

impl AdapterRows {
    /// The same of a batch of only `picked` rows, which ascend.
    pub(super) fn of_picked(all: &[Self], picked: &[u32]) -> Vec<Self> {
        let place = |row: usize| picked.partition_point(|&picked| (picked as usize) < row);
        let of = |one: &Self| Self {
            rows: place(one.rows.start)..place(one.rows.end),
            adapter: one.adapter.clone(),
        };
        let rows = all.iter().map(of);
        rows.filter(|one| !one.rows.is_empty()).collect()
    }

    /// Checks that the rows ascend and are among the first `count`.
    ///
    /// # Errors
    /// If not, which is a bug of the caller.
    pub(super) fn check(all: &[Self], count: usize) -> Result<()> {
        let mut end = 0;
        for AdapterRows { rows, adapter } in all {
            if rows.start < end || rows.end < rows.start || rows.end > count {
                return Err(Error::internal(format!(
                    "rows {rows:?} of {count} have the adapter {adapter:?}"
                )));
            }
            end = rows.end;
        }
        Ok(())
    }

    /// Adds to `y`, `[rows, outputs]`, which nobody else holds, what the adapters of rows add to the outputs of the
    /// linear layer `site` for `x`, `[rows, inputs]`.
    ///
    /// # Errors
    /// If a shape differs from that of the layer.
    pub(super) fn add(all: &[Self], site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
        for Self { rows, adapter } in all {
            let Some(Some(low_rank)) = adapter.sites.get(site) else {
                continue;
            };
            let of_rows = |all: &Tensor| all.narrow(0, rows.start, rows.len());
            let added = low_rank.forward(&of_rows(x)?.contiguous()?)?;
            y.slice_set(&(of_rows(y)? + added)?, 0, rows.start)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
