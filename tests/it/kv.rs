//! Promise 6 for the block allocator alone: random operations, checked against the expected tables.

use foretoken::kv::{BlockAllocator, BlockTable, CachedPrefix, PrefixRoot};
use foretoken::sampling::mix;
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
    /// Says that the first `len` tokens of a table are computed.
    Cache {
        table: usize,
        len: usize,
    },
    /// Replaces a table with what is cached of `text`, up to `len` tokens.
    Adopt {
        table: usize,
        text: u64,
        len: usize,
    },
    Reset,
}

const TABLES: usize = 4;

fn op() -> impl Strategy<Value = Op> {
    let (table, len) = (0..TABLES, 0..60usize);
    prop_oneof![
        6 => (table.clone(), len.clone()).prop_map(|(table, len)| Op::Reserve { table, len }),
        6 => (table.clone(), len.clone()).prop_map(|(table, len)| Op::Truncate { table, len }),
        6 => (table.clone(), len.clone()).prop_map(|(table, len)| Op::Cache { table, len }),
        4 => (table, 0..3u64, len).prop_map(|(table, text, len)| Op::Adopt { table, text, len }),
        1 => Just(Op::Reset),
    ]
}

const ROOT: PrefixRoot = PrefixRoot {
    scope: 1,
    first: None,
};

/// Three texts that part at different places.
fn tokens(text: u64, len: usize) -> Vec<u32> {
    let token = |at: usize| match at / 10 >= 2 * text as usize {
        true => mix(at as u64 ^ mix(text)) as u32,
        false => at as u32,
    };
    (0..len).map(token).collect()
}

/// What the test knows of a table: its text, and the blocks that others may share.
#[derive(Default)]
struct Expected {
    text: u64,
    is_stale: bool,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 20 } else { 3000 }))]

    #[test]
    fn invariants_hold(
        num_blocks in 1..24usize,
        block_size in 1..9usize,
        caches in prop::bool::weighted(0.9),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut blocks = BlockAllocator::new(num_blocks, block_size).with_prefix_cache(caches);
        let mut tables: Vec<BlockTable> = (0..TABLES).map(|_| BlockTable::default()).collect();
        let mut expected: Vec<Expected> = (0..TABLES).map(|_| Expected::default()).collect();
        // The text and place that each block was last known to hold.
        let mut holds: Vec<Option<(Vec<u32>, usize)>> = vec![None; num_blocks];
        for op in ops {
            let before: Vec<Vec<u32>> = tables.iter().map(|t| t.blocks().to_vec()).collect();
            let free = blocks.num_free();
            let mut touched = None;
            match op {
                Op::Reserve { table, len } => {
                    touched = Some(table);
                    let missing = len.div_ceil(block_size).saturating_sub(before[table].len());
                    let reserved = blocks.reserve(&mut tables[table], len);
                    prop_assert_eq!(reserved.is_ok(), missing <= free);
                    let grown = if reserved.is_ok() { missing } else { 0 };
                    prop_assert_eq!(tables[table].blocks().len(), before[table].len() + grown);
                    prop_assert!(tables[table].blocks().starts_with(&before[table]));
                    prop_assert_eq!(blocks.num_free(), free - grown);
                    expected[table].is_stale &= !before[table].is_empty();
                    // Whatever they held is overwritten.
                    for &block in &tables[table].blocks()[before[table].len()..] {
                        holds[block as usize] = None;
                    }
                }
                Op::Truncate { table, len } => {
                    touched = Some(table);
                    let known = tables[table].known().len();
                    let left = blocks.truncate_to(&mut tables[table], len);
                    // A partial block stays unless it is known, and the blocks before it do not change.
                    let full = len / block_size;
                    let keep = if full < known { full } else { len.div_ceil(block_size) };
                    let keep = keep.min(before[table].len());
                    prop_assert_eq!(tables[table].blocks(), &before[table][..keep]);
                    prop_assert_eq!(left, len.min(keep * block_size));
                    prop_assert_eq!(tables[table].known().len(), known.min(keep));
                }
                Op::Cache { table, len } => {
                    touched = Some(table);
                    let all = tokens(expected[table].text, len);
                    let known = tables[table].known().len();
                    blocks.cache(&mut tables[table], ROOT, &all);
                    let full = (len / block_size).min(before[table].len()).max(known);
                    let is_off = !caches || expected[table].is_stale;
                    let wanted = if is_off { known } else { full };
                    prop_assert_eq!(tables[table].known().len(), wanted);
                    for place in known..wanted {
                        let (own, now) = (before[table][place], tables[table].blocks()[place]);
                        let content = (all[..(place + 1) * block_size].to_vec(), place);
                        if own != now {
                            prop_assert_eq!(holds[now as usize].as_ref(), Some(&content));
                            holds[own as usize] = None;
                        }
                        holds[now as usize] = Some(content);
                    }
                }
                Op::Adopt { table, text, len } => {
                    touched = Some(table);
                    blocks.release(&mut tables[table]);
                    let all = tokens(text, len);
                    let prefix = blocks.find(ROOT, &all);
                    let other = PrefixRoot { scope: 2, ..ROOT };
                    prop_assert_eq!(blocks.find(other, &all), CachedPrefix::default());
                    prop_assert!(prefix.blocks().len() * block_size <= len);
                    let (free, needed) = (blocks.num_free(), blocks.blocks_after(&prefix, len));
                    prop_assert_eq!(blocks.adopt(&mut tables[table], &prefix), prefix.blocks().len() * block_size);
                    prop_assert_eq!(tables[table].blocks(), prefix.blocks());
                    for (place, &block) in prefix.blocks().iter().enumerate() {
                        let content = (all[..(place + 1) * block_size].to_vec(), place);
                        prop_assert_eq!(holds[block as usize].as_ref(), Some(&content));
                    }
                    let rest = len.div_ceil(block_size) - prefix.blocks().len();
                    prop_assert_eq!(blocks.num_free() + needed, free + rest);
                    expected[table] = Expected { text, is_stale: false };
                }
                Op::Reset => {
                    blocks.reset_prefix_cache();
                    prop_assert_eq!(blocks.num_cached(), 0);
                    for (table, expected) in tables.iter().zip(&mut expected) {
                        expected.is_stale = !table.blocks().is_empty();
                    }
                }
            }
            // No operation touches the other tables, and the allocator agrees with all of them.
            for other in (0..TABLES).filter(|&other| Some(other) != touched) {
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

/// A table that computes and caches `tokens`.
fn computed(blocks: &mut BlockAllocator, tokens: &[u32]) -> BlockTable {
    let mut table = BlockTable::default();
    blocks.reserve(&mut table, tokens.len()).unwrap();
    blocks.cache(&mut table, ROOT, tokens);
    table
}

/// Of two cached texts with a common start, the one that was used longer ago goes first, its end before its
/// start, and the common start last.
#[test]
fn the_least_recently_used_leaf_is_evicted_first() {
    let mut blocks = BlockAllocator::new(6, 2).with_prefix_cache(true);
    let (old, new) = ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10]);
    let mut first = computed(&mut blocks, &old);
    let mut second = computed(&mut blocks, &new);
    assert_eq!(
        first.blocks()[0],
        second.blocks()[0],
        "computed twice, held once"
    );
    assert_eq!(blocks.num_free(), 1);
    blocks.release(&mut first);
    blocks.release(&mut second);
    let found =
        |blocks: &BlockAllocator| [&old, &new].map(|text| blocks.find(ROOT, text).blocks().len());
    assert_eq!((blocks.num_free(), blocks.num_cached()), (6, 5));
    let mut table = BlockTable::default();
    for (len, left) in [
        (2, [3, 3]),
        (4, [2, 3]),
        (6, [1, 3]),
        (8, [1, 2]),
        (10, [1, 1]),
        (12, [0, 0]),
    ] {
        blocks.reserve(&mut table, len).unwrap();
        assert_eq!(blocks.check_invariants([&table]), Ok(()));
        assert_eq!(found(&blocks), left);
    }
}

/// What a table shares is not written again: it loses the block, and learns how much it has to compute.
#[test]
fn a_known_block_is_never_kept_in_part() {
    let mut blocks = BlockAllocator::new(6, 4).with_prefix_cache(true);
    let mut table = computed(&mut blocks, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!((table.blocks().len(), table.known().len()), (3, 2));
    assert_eq!(blocks.truncate_to(&mut table, 9), 9);
    assert_eq!(blocks.truncate_to(&mut table, 7), 4);
    assert_eq!((table.blocks().len(), table.known().len()), (1, 1));
    assert_eq!(
        blocks.find(ROOT, &[1, 2, 3, 4, 5, 6, 7, 8]).blocks().len(),
        2
    );
}
