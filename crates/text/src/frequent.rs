//! The ids that texts have most often.

use std::cmp::Reverse;

/// The `size` ids of the largest `counts`, which are by id; always those of `always`, if there are no more of them.
/// Ascending. Of equally frequent ids it takes the lower ones, which are the shorter tokens of a BPE.
pub fn most_frequent(counts: &[u64], always: &[u32], size: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..counts.len() as u32).collect();
    let rank = |&id: &u32| (!always.contains(&id), Reverse(counts[id as usize]), id);
    ids.sort_unstable_by_key(rank);
    ids.truncate(size);
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_ids_come_before_rare_ones_and_low_ones_before_high_ones() {
        let counts = [0, 5, 0, 9, 5, 0];
        assert_eq!(most_frequent(&counts, &[], 1), [3]);
        assert_eq!(most_frequent(&counts, &[], 2), [1, 3]);
        assert_eq!(most_frequent(&counts, &[5], 3), [1, 3, 5]);
        assert_eq!(most_frequent(&counts, &[5], 5), [0, 1, 3, 4, 5]);
        assert_eq!(most_frequent(&counts, &[], 9), [0, 1, 2, 3, 4, 5]);
    }
}
