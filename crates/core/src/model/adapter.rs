//! Adapters of a base model, as the engine knows them.

use crate::error::{Error, Result};
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// An adapter of a base model. Requests that use it hold it, so that it can be unloaded meanwhile.
pub trait Adapter: Any + Debug + Send + Sync {
    /// The name that requests give for the adapter.
    fn name(&self) -> &str;

    /// The folder that it was read from.
    fn folder(&self) -> &Path;

    /// The id of this load. It differs from the id of every other load.
    fn id(&self) -> u64;

    /// The largest rank of its products.
    fn rank(&self) -> usize;

    /// The size of its weights in memory.
    fn bytes(&self) -> u64;
}

/// Loads adapters for one base model.
pub trait AdapterLoader: Debug + Send + Sync {
    /// Reads the adapter in `folder`, which requests will call `name`, and whose rank is at most `max_rank`.
    ///
    /// # Errors
    /// A setup error in one line: what is missing, broken, too large, or not supported.
    fn load(&self, name: &str, folder: &Path, max_rank: usize) -> Result<Arc<dyn Adapter>>;
}

/// Consecutive rows of a batch, and their adapter.
#[derive(Debug, Clone)]
pub struct AdapterRows {
    /// Range of row indices in the batch.
    pub rows: Range<usize>,
    /// The adapter of these rows.
    pub adapter: Arc<dyn Adapter>,
}

impl AdapterRows {
    /// Restricts `all` to the `picked` rows of the batch, which ascend. The rows of the result count among the
    /// picked ones.
    pub fn of_picked(all: &[Self], picked: &[u32]) -> Vec<Self> {
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
    pub fn check(all: &[Self], count: usize) -> Result<()> {
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
}
