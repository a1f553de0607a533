//! Which rows have which adapter.

use super::*;
use foretoken_core::model::AdapterRows;
use std::ops::Range;

fn rows(ranges: &[(usize, usize)]) -> Vec<AdapterRows> {
    let adapter: Arc<dyn Adapter> = Arc::new(LoraAdapter {
        name: "a".into(),
        folder: PathBuf::new(),
        id: 1,
        weights: AdapterWeights::Host(Vec::new()),
        rank: 1,
        bytes: 0,
    });
    let of = |&(start, end): &(usize, usize)| AdapterRows {
        rows: start..end,
        adapter: adapter.clone(),
    };
    ranges.iter().map(of).collect()
}

#[test]
fn picked_rows_keep_their_adapters() {
    let all = rows(&[(1, 4), (6, 7), (8, 12)]);
    let picked = |rows: &[u32]| -> Vec<Range<usize>> {
        let of = AdapterRows::of_picked(&all, rows);
        of.into_iter().map(|one| one.rows).collect()
    };
    assert_eq!(picked(&[0, 1, 3, 4, 5, 8, 11, 12]), [1..3, 5..7]);
    assert!(picked(&[6]).into_iter().eq(std::iter::once(0..1)));
    assert!(picked(&[0, 4, 5, 7]).is_empty());
}

#[test]
fn rows_that_do_not_exist_or_overlap_are_refused() {
    AdapterRows::check(&rows(&[(0, 2), (2, 5)]), 5).unwrap();
    for wrong in [&[(0, 6)][..], &[(0, 3), (2, 5)], &[(3, 2)]] {
        AdapterRows::check(&rows(wrong), 5).unwrap_err();
    }
}

/// Neighbours with the same adapter share a product.
#[test]
fn a_batch_joins_rows_of_one_adapter() {
    let [one, two] = [(); 2].map(|()| rows(&[(0, 1)])[0].adapter.clone());
    let mut batch = foretoken_core::model::Batch::default();
    for (rows, adapter) in [
        (2, Some(&one)),
        (3, Some(&one)),
        (1, None),
        (1, Some(&one)),
        (1, Some(&two)),
    ] {
        batch.tokens.extend(std::iter::repeat_n(0, rows));
        if let Some(adapter) = adapter {
            batch.adapt(rows, adapter);
        }
    }
    let found: Vec<_> = batch.adapters.iter().map(|one| one.rows.clone()).collect();
    assert_eq!(found, [0..5, 6..7, 7..8]);
}
