//! Access to the elements of tensors, for kernels.

use candle_core::{Layout, Result, WithDType};

/// The elements of a contiguous CPU tensor, for op `op`.
pub(super) fn contiguous<'a, T: WithDType>(
    op: &str,
    storage: &'a candle_core::CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("{op}: the tensor must be contiguous, got {layout:?}"),
    }
}
