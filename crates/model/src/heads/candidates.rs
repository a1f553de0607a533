//! The most probable tokens of a row.

use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::sample::{TopRow, top_logits};

/// The `count` largest logits of each row of `logits`, `[rows, vocab_size]` f32 on a GPU, which finds them: only they are
/// copied to the host. `None` on the CPU.
///
/// # Errors
/// If there are no rows, or the device fails.
pub(super) fn found_by_gpu(logits: &Tensor, count: usize) -> Result<Option<Vec<TopRow>>> {
    if !logits.device().is_cuda() {
        return Ok(None);
    }
    let count = count.min(logits.dim(1)?);
    Ok(Some(top_logits(logits, count)?.read()?))
}

/// The ids of the `count` largest `logits`.
pub(super) fn most_probable(logits: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let descending = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]);
    if count < ids.len() {
        ids.select_nth_unstable_by(count, descending);
    }
    ids.truncate(count);
    ids
}
