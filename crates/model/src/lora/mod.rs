//! LoRA adapters (Hu et al. 2021, arXiv 2106.09685): products of low rank that are added, row by row, to those of
//! weights that stay as they are. A row gets `scale * B (A x)` of its own adapter, in one order of additions, so its
//! bits depend on itself and its adapter alone; a row without an adapter is computed as if there were none.

mod config;
mod load;
mod low_rank;

pub use load::LoraTarget;

use foretoken_core::error::{Error, Result};
use foretoken_core::model::{Adapter, AdapterRows};
use low_rank::LowRank;
use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;

/// A weight of the base model, `[outputs, inputs]`, as one of those side by side in a linear layer.
#[derive(Debug, Clone)]
pub(super) struct LinearPart {
    /// The name that the code has for the weight, without `.weight`.
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

impl Adapter for LoraAdapter {
    fn name(&self) -> &str {
        &self.name
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for LoraAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, id, .. } = self;
        write!(f, "LoraAdapter({name} {id:016x})")
    }
}

/// Adds to `y`, `[rows, outputs]`, which nobody else holds, what the adapters of `all` rows add to the outputs of the
/// linear layer `site` for `x`, `[rows, inputs]`.
///
/// # Errors
/// If a shape differs from that of the layer, or an adapter is of another kind of model.
pub(super) fn add(all: &[AdapterRows], site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
    for AdapterRows { rows, adapter } in all {
        let adapter: &dyn Any = &**adapter;
        let adapter = adapter.downcast_ref::<LoraAdapter>();
        let adapter = adapter.ok_or_else(|| Error::internal("an adapter of another model"))?;
        let Some(Some(low_rank)) = adapter.sites.get(site) else {
            continue;
        };
        let of_rows = |all: &Tensor| all.narrow(0, rows.start, rows.len());
        let added = low_rank.forward(&of_rows(x)?.contiguous()?)?;
        y.slice_set(&(of_rows(y)? + added)?, 0, rows.start)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
