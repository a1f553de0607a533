//! The most probable tokens of a row.

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
