//! Hidden states of committed positions in a pool: K and V have a half each.

use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_core::kv::KvHeads;
use foretoken_kernels::kv_write::kv_write;

/// The shape of a layer of a pool that keeps states of width `hidden`, an even number.
pub(super) fn shape(hidden: usize) -> KvHeads {
    KvHeads::new(1, hidden / 2)
}

/// Writes `states`, `[rows, hidden]`, to these slots.
///
/// # Errors
/// If the shapes do not match, or the device fails.
pub(super) fn write(states: &Tensor, slots: &[u32], (k, v): &(Tensor, Tensor)) -> Result<()> {
    let (rows, hidden) = states.dims2()?;
    let halves = states.reshape((rows, 2, hidden / 2))?;
    let slots = Tensor::new(slots, states.device())?;
    kv_write(k, &halves.narrow(1, 0, 1)?, &slots)?;
    Ok(kv_write(v, &halves.narrow(1, 1, 1)?, &slots)?)
}

/// The states in these slots, `[slots, hidden]`.
///
/// # Errors
/// If a slot does not exist, or the device fails.
pub(super) fn read(slots: &[u32], (k, v): &(Tensor, Tensor), dtype: DType) -> Result<Tensor> {
    let slots = Tensor::new(slots, k.device())?;
    let both = [k.index_select(&slots, 0)?, v.index_select(&slots, 0)?];
    Ok(Tensor::cat(&both, 2)?.squeeze(1)?.to_dtype(dtype)?)
}
