//! LoRA adapters on a GPU: what the adapter of each row adds to products, for rows of any adapters in one launch.
//!
//! Each adapter has its weights and a table of their addresses in device memory, which never change. A forward has the
//! address of its adapter's table for each row ([`LoraRows`]), sent with its other inputs. So loading and unloading changes
//! nothing that a recorded graph has, and graphs take in adapters that were loaded after they were recorded.
//!
//! A row has the same bits whatever others it is with, and one without an adapter those of a forward without adapters.

#[cfg(feature = "cuda")]
mod cuda;

use crate::writes::Writes;
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;

/// One of the weights that are side by side in a linear layer, and what an adapter adds to it.
#[derive(Debug, Clone)]
pub struct LoraPart {
    /// Outputs of the weight.
    pub outputs: usize,
    /// Inputs of the weight.
    pub inputs: usize,
    /// What is added; `None` = nothing.
    pub pair: Option<LoraPair>,
}

/// The two factors of what is added to a weight, on the CPU: `scale * up @ down`.
#[derive(Debug, Clone)]
pub struct LoraPair {
    /// `[rank, inputs]`
    pub down: Tensor,
    /// `[outputs, rank]`
    pub up: Tensor,
    /// Factor of the product.
    pub scale: f32,
}

/// An adapter's weights on a GPU, in the dtype of activations. A clone shares them.
///
/// Dropping the last clone frees them in the order of the dropping thread's own work, so no other thread may still compute
/// with them.
#[derive(Debug, Clone)]
pub struct DeviceLora {
    #[cfg(feature = "cuda")]
    inner: cuda::Adapter,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// The adapters of a forward's rows, in device memory.
#[derive(Debug)]
pub struct LoraRows {
    #[cfg(feature = "cuda")]
    inner: cuda::Rows,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// Consecutive rows, and their adapter.
pub type RowsOfLora<'a> = (Range<usize>, &'a DeviceLora);

impl DeviceLora {
    /// Sends an adapter to a GPU, for activations in `dtype`; `sites` has the weights of each linear layer. Returns when all
    /// threads can use it.
    ///
    /// # Errors
    /// If shapes do not match, or the device has no memory.
    pub fn new(sites: &[Vec<LoraPart>], dtype: DType, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            inner: cuda::Adapter::new(sites, dtype, device)?,
        });
        #[cfg(not(feature = "cuda"))]
        {
            let count = sites.len();
            candle_core::bail!(
                "this build has no kernels for adapters of {count} layers in {dtype:?} on {device:?}"
            )
        }
    }
}

impl LoraRows {
    /// Sends the adapters of `rows` of a forward of `count` rows. The others have none.
    ///
    /// # Errors
    /// If the rows do not exist, the adapters are not of one model, or the device fails.
    pub fn new(rows: &[RowsOfLora<'_>], count: usize, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            inner: cuda::Rows::new(rows, count, device)?,
        });
        #[cfg(not(feature = "cuda"))]
        {
            let len = rows.len();
            candle_core::bail!("this build has no kernels for {len} of {count} rows on {device:?}")
        }
    }

    /// The room that [`LoraRows`] of these adapters have for their ranks; 0 = there are no adapters. Forwards of equal room
    /// and of equally many rows launch the same grids.
    pub fn room(rows: &[RowsOfLora<'_>]) -> usize {
        #[cfg(feature = "cuda")]
        return cuda::room(rows);
        #[cfg(not(feature = "cuda"))]
        rows.first()
            .map_or(0, |(_, adapter)| match adapter.never {})
    }

    /// Adds to `writes` those of another forward of as many rows, in the place of these.
    ///
    /// # Errors
    /// If the rows do not exist, the adapters are not of the same model, or need more room.
    pub fn replace(&self, rows: &[RowsOfLora<'_>], writes: &mut Writes) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.inner.replace(rows, writes);
        #[cfg(not(feature = "cuda"))]
        match (self.never, rows, writes) {}
    }

    /// Adds to `y`, `[rows, outputs]`, what the adapters of the rows add to the outputs of linear layer `site` for `x`,
    /// `[rows, inputs]`. Both are contiguous, in the dtype of the adapters. Copies nothing between host and device.
    ///
    /// # Errors
    /// If shapes or dtypes do not match, or the device fails.
    ///
    /// # Safety
    /// The adapters of the last [`new`](Self::new) or [`replace`](Self::replace) still exist, and are dropped only by this
    /// thread, or after the GPU has done what this launches.
    pub unsafe fn add(&self, site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        // SAFETY: the caller vouches for it.
        return unsafe { self.inner.add(site, x, y) };
        #[cfg(not(feature = "cuda"))]
        match (self.never, site, x, y) {}
    }
}
