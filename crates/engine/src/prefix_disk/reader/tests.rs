use super::*;

const BYTES: usize = 5 << 20;

fn chain(pool: u8, blocks: u8, bytes: usize) -> Arc<Chain> {
    Arc::new(Chain {
        root: PrefixRoot {
            scope: 0,
            first: None,
        },
        tokens: Vec::new(),
        names: (0..blocks).map(|i| BlockName([i; 16])).collect(),
        pool: BlockName([pool; 16]),
        bytes,
    })
}

fn opened() -> (tempfile::TempDir, Arc<Folder>) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Arc::new(Folder::open(temporary.path()).unwrap());
    (temporary, folder)
}

/// The places of the blocks and states that were found, by kind.
fn places(found: impl IntoIterator<Item = Found>) -> Vec<(char, usize)> {
    let mut places = Vec::new();
    for found in found {
        match found {
            Found::Target { first, blocks } => {
                places.extend((first..).take(blocks.len()).map(|place| ('t', place)));
            }
            Found::Draft { first, blocks } => {
                places.extend((first..).take(blocks.len()).map(|place| ('d', place)));
            }
            Found::State { after, .. } => places.push(('s', after)),
        }
    }
    places
}

#[test]
fn blocks_come_in_parts_until_one_is_missing() {
    let (_temporary, folder) = opened();
    let (target, draft) = (chain(1, 8, BYTES), chain(2, 8, 3));
    for depth in [0, 1, 2, 3, 4, 6] {
        folder
            .write(&target.entry(depth), &vec![depth as u8; BYTES])
            .unwrap();
    }
    for depth in [0, 1] {
        folder.write(&draft.entry(depth), b"abc").unwrap();
    }
    let reader = Reader::start(folder).unwrap();
    let wanted = Wanted {
        target,
        known: 2,
        states: None,
        draft: Some((draft, 0)),
    };
    let all: Vec<Found> = reader.read(wanted.clone()).iter().collect();
    assert!(all.len() > 3, "{} parts", all.len());
    for found in &all {
        if let Found::Target { first, blocks } = found {
            assert!(blocks[0].iter().all(|&byte| byte == *first as u8));
        }
    }
    let want = [('t', 2), ('t', 3), ('t', 4), ('d', 0), ('d', 1)];
    assert_eq!(places(all), want);
    // Whoever does not wait for it does not keep the thread.
    drop(reader.read(wanted));
    drop(reader);
}

/// Blocks without a state after them are of no use.
#[test]
fn blocks_end_at_the_last_state() {
    let (_temporary, folder) = opened();
    let target = chain(1, 8, 4);
    let states = |known| {
        Some(Arc::new(ChainStates {
            names: (100..108).map(|i| BlockName([i; 16])).collect(),
            pool: BlockName([3; 16]),
            bytes: 2,
            known,
        }))
    };
    for depth in 0..6 {
        folder.write(&target.entry(depth), b"abcd").unwrap();
    }
    let state = |after: usize| Entry {
        pool: BlockName([3; 16]),
        name: BlockName([99 + after as u8; 16]),
        depth: after,
    };
    // The last one has too few blocks before it.
    for after in [2, 4, 7] {
        folder.write(&state(after), b"ab").unwrap();
    }
    let reader = Reader::start(folder).unwrap();
    let read = |known, known_states| {
        places(reader.read(Wanted {
            target: target.clone(),
            known,
            states: states(known_states),
            draft: None,
        }))
    };
    let all = [('t', 0), ('t', 1), ('t', 2), ('t', 3), ('s', 4)];
    assert_eq!(read(0, 0), all);
    assert_eq!(read(3, 2), all[3..]);
    assert_eq!(read(6, 2), all[4..], "all blocks are in memory");
    assert!(read(6, 4).is_empty());
}
