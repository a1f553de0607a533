//! LoRA adapters (Hu et al. 2021, arXiv 2106.09685): products of low rank that are added, row by row, to those of
//! weights that stay as they are. A row gets `scale * B (A x)` of its own adapter, in one order of additions, so its
//! bits depend on itself and its adapter alone; a row without an adapter is computed as if there were none.

mod config;
mod load;
mod low_rank;
mod place;
mod rows;

pub use load::LoraTarget;
pub(crate) use rows::RowAdapters;

use foretoken_core::model::Adapter;
use place::AdapterWeights;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    weights: AdapterWeights,
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

#[cfg(test)]
mod tests;
