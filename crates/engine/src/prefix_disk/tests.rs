use super::*;
use candle_core::{DType, Device};
use foretoken_core::kv::{KvHeads, KvShape};
use foretoken_kernels::StateShape;

const BLOCK: usize = 4;
/// Far longer than the disk takes.
const LONG: Duration = Duration::from_secs(60);
const ROOT: PrefixRoot = PrefixRoot {
    scope: 7,
    first: None,
};

/// A pool, and what is kept of it.
struct Rig {
    blocks: BlockAllocator,
    store: KvStore,
    disk: PrefixDisk,
    stats: Arc<Stats>,
}

fn identity(description: &str) -> PoolIdentity {
    PoolIdentity {
        description: description.into(),
        probe: vec![1, 2, 3],
        block_bytes: 2 * BLOCK * size_of::<f32>(),
        state_bytes: 0,
    }
}

/// Asks for the blocks of `tokens` after the `known` ones, and for no states and no blocks of a draft model.
fn wanted(root: PrefixRoot, tokens: &[u32], known: usize) -> impl Fn(&PrefixDisk) -> Wanted + Copy {
    move |disk: &PrefixDisk| Wanted {
        target: Arc::new(disk.chain(disk.target(), root, tokens)),
        known,
        states: None,
        draft: None,
    }
}

impl Rig {
    fn of(path: &Path, target: PoolIdentity) -> Self {
        let shape = KvShape {
            states: vec![StateShape {
                matrices: 1,
                window: 1,
                inputs: 1,
            }],
            ..KvShape::new(vec![KvHeads::new(1, 1)], DType::F32)
        };
        let stats = Arc::new(Stats::new("m"));
        let identities = Identities {
            target,
            draft: None,
        };
        Self {
            blocks: BlockAllocator::new(64, BLOCK).with_prefix_cache(true),
            store: KvStore::new(shape, 64, BLOCK, &Device::Cpu).unwrap(),
            disk: PrefixDisk::open(path, 1 << 20, BLOCK, &identities, &stats).unwrap(),
            stats,
        }
    }

    fn new(path: &Path) -> Self {
        Self::of(path, identity("model"))
    }

    /// Computes `tokens` in the scope of `root`, whose K and V are made of the tokens, and hands over the blocks.
    fn compute(&mut self, root: PrefixRoot, tokens: &[u32]) {
        let mut table = BlockTable::default();
        let found = self.blocks.find(root, tokens);
        self.blocks.adopt(&mut table, &found);
        self.blocks.reserve(&mut table, tokens.len()).unwrap();
        for (block, tokens) in table.blocks().iter().zip(tokens.chunks_exact(BLOCK)) {
            self.store.write_block(*block, &contents(tokens)).unwrap();
        }
        self.blocks.cache(&mut table, root, tokens);
        let (pool, store) = (self.disk.target(), &self.store);
        self.disk
            .keep(pool, store, &mut self.blocks, &table, root, tokens);
        assert!(self.blocks.nameless(&table).is_empty());
        self.blocks.release(&mut table);
    }

    /// Reads what there is of `tokens`. Returns the number of blocks that are known then.
    fn read(&mut self, root: PrefixRoot, tokens: &[u32]) -> usize {
        let known = self.blocks.find(root, tokens).blocks().len();
        let mut has_looked = false;
        let wanted = wanted(root, tokens, known);
        while self.disk.is_awaited(1, &mut has_looked, wanted) {
            self.disk.wait(LONG);
            while let Some((wanted, Found::Target { first, blocks })) = self.disk.take() {
                let (pool, store) = (&mut self.blocks, &mut self.store);
                assert!(take_in(pool, store, &wanted.target, first, &blocks));
            }
        }
        let found = self.blocks.find(root, tokens);
        for (block, tokens) in found.blocks().iter().zip(tokens.chunks_exact(BLOCK)) {
            assert_eq!(self.store.read_block(*block).unwrap(), contents(tokens));
        }
        self.blocks.check_invariants([]).unwrap();
        found.blocks().len()
    }
}

/// K and V of a block with these tokens.
fn contents(tokens: &[u32]) -> Vec<u8> {
    let values = tokens.iter().chain(tokens);
    values.flat_map(|&id| (id as f32).to_ne_bytes()).collect()
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| i * i % 31).collect()
}

#[test]
fn a_later_process_finds_what_was_computed() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(42);
    let mut first = Rig::new(folder.path());
    first.compute(ROOT, &tokens[..20]);
    first.compute(ROOT, &tokens);
    let stats = first.stats.clone();
    drop(first);
    let bytes = stats.prefix_cache_disk_written_bytes.get();
    assert_eq!(bytes, 10 * 2 * 16, "each block is written once");
    let mut second = Rig::new(folder.path());
    assert_eq!(second.read(ROOT, &tokens[..27]), 6);
    assert_eq!(second.read(ROOT, &tokens), 10);
    let other = PrefixRoot { scope: 8, ..ROOT };
    assert_eq!(second.read(other, &tokens), 0);
    second.blocks.reset_prefix_cache();
    assert_eq!(second.read(ROOT, &tokens), 10, "memory has none of it");
    let mut changed = tokens.clone();
    changed[13] += 1;
    assert_eq!(second.read(ROOT, &changed), 3);
    // What was read is not written again.
    second.compute(ROOT, &tokens);
    let stats = second.stats.clone();
    drop(second);
    assert_eq!(stats.prefix_cache_disk_written_bytes.get(), 0);
}

#[test]
fn another_model_finds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(40);
    Rig::new(folder.path()).compute(ROOT, &tokens);
    let others = [
        identity("another model"),
        // Another CPU, or other kernels.
        PoolIdentity {
            probe: vec![1, 2, 4],
            ..identity("model")
        },
    ];
    for other in others {
        assert_eq!(Rig::of(folder.path(), other).read(ROOT, &tokens), 0);
    }
    assert_eq!(Rig::new(folder.path()).read(ROOT, &tokens), 10);
}

#[test]
fn blocks_after_a_damaged_one_are_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(40);
    let mut first = Rig::new(folder.path());
    first.compute(ROOT, &tokens);
    let names = first.disk.names(first.disk.target, ROOT, &tokens);
    let name: String = names[4]
        .0
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    drop(first);
    let mut damaged = 0;
    for file in files(folder.path()) {
        if file.ends_with(format!("{}/{}.kv", &name[..2], &name[2..])) {
            std::fs::write(&file, b"damaged").unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1);
    let mut second = Rig::new(folder.path());
    assert_eq!(second.read(ROOT, &tokens), 4);
    // It is computed and written again.
    second.compute(ROOT, &tokens);
    drop(second);
    assert_eq!(Rig::new(folder.path()).read(ROOT, &tokens), 10);
}

fn files(path: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            files.push(path);
        }
    }
    files
}

/// The pool has no room for all blocks, or forgets what came before: then the rest is computed.
#[test]
fn blocks_without_room_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(40);
    let mut rig = Rig::new(folder.path());
    rig.compute(ROOT, &tokens);
    let chain = rig.disk.chain(rig.disk.target, ROOT, &tokens);
    let all: Vec<Vec<u8>> = tokens.chunks_exact(BLOCK).map(contents).collect();
    let mut small = BlockAllocator::new(6, BLOCK).with_prefix_cache(true);
    let store = &mut rig.store;
    assert!(!take_in(&mut small, store, &chain, 0, &all));
    assert!(!take_in(&mut small, store, &chain, 2, &all[2..4]), "a gap");
    assert!(take_in(&mut small, store, &chain, 0, &all[..3]));
    assert!(take_in(&mut small, store, &chain, 3, &all[3..6]));
    assert_eq!(small.find(ROOT, &tokens).blocks().len(), 6);
    assert!(!take_in(&mut small, store, &chain, 6, &all[6..7]), "full");
    assert_eq!(small.find(ROOT, &tokens).blocks().len(), 6);
    let wrong = [vec![0; 3]];
    let mut empty = BlockAllocator::new(6, BLOCK).with_prefix_cache(true);
    assert!(!take_in(&mut empty, store, &chain, 0, &wrong));
    for blocks in [small, empty] {
        blocks.check_invariants([]).unwrap();
        assert_eq!(blocks.num_free(), 6);
    }
}

#[test]
fn a_state_is_kept_after_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let with_states = || PoolIdentity {
        state_bytes: 8,
        ..identity("model")
    };
    let tokens = text(40);
    let mut rig = Rig::of(folder.path(), with_states());
    rig.compute(ROOT, &tokens[..20]);
    rig.store.write_state(3, &[5; 8]).unwrap();
    for len in [16, 24] {
        let state = || rig.store.read_state(3);
        assert!(rig.disk.keep_state(ROOT, &tokens[..len], state));
    }
    drop(rig);
    let mut rig = Rig::of(folder.path(), with_states());
    let target = rig.disk.chain(rig.disk.target(), ROOT, &tokens);
    let wanted = |disk: &PrefixDisk| Wanted {
        states: disk.states(&target, 0).map(Arc::new),
        target: Arc::new(target),
        known: 0,
        draft: None,
    };
    assert!(rig.disk.is_awaited(1, &mut false, wanted));
    let mut found = Vec::new();
    while rig.disk.load.is_some() {
        rig.disk.wait(LONG);
        found.extend(rig.disk.take().map(|(_, found)| found));
    }
    // The blocks of the second one were never computed.
    let [
        Found::Target { first: 0, blocks },
        Found::State { after: 4, state },
    ] = &found[..]
    else {
        panic!("{found:?}");
    };
    assert_eq!((blocks.len(), &state[..]), (4, &[5; 8][..]));
}

#[test]
fn one_sequence_is_read_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(40);
    Rig::new(folder.path()).compute(ROOT, &tokens);
    let mut disk = Rig::new(folder.path()).disk;
    let wanted = wanted(ROOT, &tokens, 0);
    let mut has_looked = [false; 2];
    assert!(disk.is_awaited(1, &mut has_looked[0], wanted));
    assert!(disk.is_awaited(1, &mut has_looked[0], wanted));
    assert!(
        !disk.is_awaited(2, &mut has_looked[1], wanted),
        "it goes on"
    );
    assert_eq!(has_looked, [true, false]);
    assert!(
        !disk.is_awaited(3, &mut true, wanted),
        "it has had its turn"
    );
    disk.abandon_unless(|id| id != 1);
    assert!(disk.is_awaited(2, &mut has_looked[1], wanted));
    assert!(!disk.is_awaited(1, &mut has_looked[0], wanted));
    disk.wait(LONG);
    let (_, found) = disk.take().unwrap();
    assert_eq!(found.bytes(), 10 * 32);
}

/// The test answers in the reader's place, and late.
#[test]
fn a_reader_that_does_not_answer_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = Rig::new(folder.path()).disk;
    let tokens = text(40);
    let wanted = wanted(ROOT, &tokens, 0);
    let (answer, found) = std::sync::mpsc::sync_channel(1);
    disk.load = Some(Load {
        id: 1,
        wanted: wanted(&disk),
        found,
        arrived: None,
        heard: Instant::now() + LONG,
        is_over: false,
    });
    assert!(disk.is_awaited(1, &mut true, wanted));
    disk.load.as_mut().unwrap().heard -= LONG + MAX_SILENCE;
    let mut has_looked = false;
    assert!(!disk.is_awaited(1, &mut true, wanted));
    assert!(!disk.is_awaited(2, &mut has_looked, wanted));
    assert!(disk.late.is_some() && !has_looked);
    drop(answer);
    disk.is_awaited(2, &mut has_looked, wanted);
    assert!(disk.late.is_none() && has_looked);
}

/// A file is removed before those after it are written: all blocks are offered again.
#[test]
fn what_comes_after_a_lost_block_is_written_later() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = text(40);
    let mut rig = Rig::new(folder.path());
    let until = |is_done: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !is_done() {
            assert!(started.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let stats = rig.stats.clone();
    rig.compute(ROOT, &tokens[..20]);
    until(&|| stats.prefix_cache_disk_written_bytes.get() == 5 * 32);
    for file in files(folder.path()) {
        if file.extension().is_some_and(|end| end == "kv") {
            std::fs::remove_file(file).unwrap();
        }
    }
    rig.compute(ROOT, &tokens);
    until(&|| stats.prefix_cache_disk_dropped.get() > 0);
    rig.compute(ROOT, &tokens);
    drop(rig);
    assert_eq!(Rig::new(folder.path()).read(ROOT, &tokens), 10);
}

#[test]
fn a_limit_without_room_for_a_block_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let stats = Arc::new(Stats::new("m"));
    let identities = Identities {
        target: identity("model"),
        draft: None,
    };
    let open = |limit| PrefixDisk::open(folder.path(), limit, BLOCK, &identities, &stats);
    assert!(open(96).is_ok());
    let refused = open(95).map(drop).unwrap_err().to_string();
    assert!(refused.contains("--prefix-cache-disk-size 95"), "{refused}");
}
