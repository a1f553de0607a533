//! Promise 5 for the block allocator alone: random operations, checked against the expected tables.

use foretoken::kv::{BlockAllocator, BlockTable};
use proptest::prelude::*;

/// An operation on one of a few tables.
#[derive(Debug, Clone)]
enum Op {
    Reserve {
        table: usize,
        len: usize,
    },
    Truncate {
        table: usize,
        len: usize,
    },
    /// Replaces `to` with a table that shares the start of `from`.
    Share {
        from: usize,
        to: usize,
        len: usize,
    },
}

const TABLES: usize = 4;

fn op() -> impl Strategy<Value = Op> {
    let (table, len) = (0..TABLES, 0..60usize);
    prop_oneof![
        3 => (table.clone(), len.clone()).prop_map(|(table, len)| Op::Reserve { table, len }),
        3 => (table.clone(), len.clone()).prop_map(|(table, len)| Op::Truncate { table, len }),
        1 => (table.clone(), table, len).prop_map(|(from, to, len)| Op::Share { from, to, len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 20 } else { 3000 }))]

    #[test]
    fn invariants_hold(num_blocks in 1..24usize, block_size in 1..9usize, ops in prop::collection::vec(op(), 1..60)) {
        let mut blocks = BlockAllocator::new(num_blocks, block_size);
        let mut tables: Vec<BlockTable> = (0..TABLES).map(|_| BlockTable::default()).collect();
        for op in ops {
            let before: Vec<Vec<u32>> = tables.iter().map(|t| t.blocks().to_vec()).collect();
            let free = blocks.num_free();
            match op {
                Op::Reserve { table, len } => {
                    let missing = len.div_ceil(block_size).saturating_sub(before[table].len());
                    let reserved = blocks.reserve(&mut tables[table], len);
                    prop_assert_eq!(reserved.is_ok(), missing <= free);
                    let grown = if reserved.is_ok() { missing } else { 0 };
                    prop_assert_eq!(tables[table].blocks().len(), before[table].len() + grown);
                    prop_assert!(tables[table].blocks().starts_with(&before[table]));
                    prop_assert_eq!(blocks.num_free(), free - grown);
                }
                Op::Truncate { table, len } => {
                    blocks.truncate_to(&mut tables[table], len);
                    // The partial block stays, and the blocks before it do not change.
                    let keep = len.div_ceil(block_size).min(before[table].len());
                    prop_assert_eq!(tables[table].blocks(), &before[table][..keep]);
                }
                Op::Share { from, to, len } => {
                    let shared = blocks.share(&tables[from], len);
                    let full = (len / block_size).min(before[from].len());
                    prop_assert_eq!(shared.blocks(), &before[from][..full]);
                    blocks.release(&mut tables[to]);
                    tables[to] = shared;
                }
            }
            // No operation touches the other tables, and the allocator agrees with all of them.
            let touched = match op { Op::Reserve { table, .. } | Op::Truncate { table, .. } => table, Op::Share { to, .. } => to };
            for other in (0..TABLES).filter(|&other| other != touched) {
                prop_assert_eq!(tables[other].blocks(), &before[other][..]);
            }
            prop_assert_eq!(blocks.check_invariants(&tables), Ok(()));
        }
        tables.iter_mut().for_each(|table| blocks.release(table));
        prop_assert_eq!(blocks.num_free(), num_blocks);
        prop_assert_eq!(blocks.check_invariants([]), Ok(()));
    }
}

#[test]
fn slots_follow_the_table() {
    let mut blocks = BlockAllocator::new(4, 3);
    let mut first = BlockTable::default();
    let mut table = BlockTable::default();
    blocks.reserve(&mut first, 1).unwrap();
    blocks.reserve(&mut table, 7).unwrap();
    let slots: Vec<u32> = (0..7).map(|position| table.slot(position, 3)).collect();
    assert_eq!(slots, [3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(
        blocks.longest(&table, 100),
        9,
        "its own three blocks are all there are"
    );
}

#[test]
fn the_check_sees_a_leak_and_a_double_holder() {
    let mut blocks = BlockAllocator::new(4, 3);
    let mut table = BlockTable::default();
    blocks.reserve(&mut table, 4).unwrap();
    assert!(
        blocks.check_invariants([]).is_err(),
        "two blocks are held by nobody"
    );
    assert!(
        blocks.check_invariants([&table, &table]).is_err(),
        "held twice, counted once"
    );
    assert_eq!(blocks.check_invariants([&table]), Ok(()));
}
