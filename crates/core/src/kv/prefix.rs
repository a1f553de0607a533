//! Which blocks hold the K and V of which tokens. No tensors.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};

/// What decides the K and V of a sequence besides the tokens at their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixRoot {
    /// Sequences of different scopes share no blocks.
    pub scope: u64,
    /// The token before the first position, for a head whose positions begin with the second token.
    pub first: Option<u32>,
}

/// The name of a block's content outside its pool: a hash of the tokens up to its end, and of what they depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockName(pub [u8; 16]);

/// What comes before a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Parent {
    Root(PrefixRoot),
    Block(u32),
}

/// The content of a full block: its tokens, and the known block before it. A known block is not given
/// away while one after it is known, so the chain of parents stands for all tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey<'t> {
    parent: Parent,
    tokens: &'t [u32],
}

impl<'t> BlockKey<'t> {
    /// The block of `block_size` tokens after the blocks `known`; `None` if `tokens` do not fill it.
    pub(super) fn after(
        known: &[u32],
        root: PrefixRoot,
        tokens: &'t [u32],
        block_size: usize,
    ) -> Option<Self> {
        let start = known.len() * block_size;
        Some(Self {
            parent: known
                .last()
                .map_or(Parent::Root(root), |&block| Parent::Block(block)),
            tokens: tokens.get(start..start + block_size)?,
        })
    }
}

/// A known block.
#[derive(Debug)]
struct CachedBlock {
    parent: Parent,
    tokens: Box<[u32]>,
    digest: u64,
    /// `None` = it is nowhere else. A block with a name comes after one with a name.
    name: Option<BlockName>,
    /// The block's key in [`PrefixCache::idle`], while no table holds the block.
    idle_since: Option<u64>,
}

/// The known blocks of one pool. Those that no table holds are evicted when the pool needs blocks, least
/// recently used first. A table releases its last blocks first, and who holds a known block holds its
/// parents, too, so the least recently used block is always a leaf.
#[derive(Debug)]
pub struct PrefixCache {
    /// Keyed at random for each process, so that no client can look for collisions.
    hasher: RandomState,
    /// Known blocks by digest. An entry is compared as a whole: equal digests alone mean nothing.
    known: HashMap<u64, u32>,
    /// Entries by block; `None` = the block is not known.
    entries: Vec<Option<CachedBlock>>,
    /// The known blocks that no table holds, by the time of their release.
    idle: BTreeMap<u64, u32>,
    /// Number of releases so far.
    clock: u64,
    /// See [`PrefixCache::forget_names_before`].
    epoch: u64,
}

impl PrefixCache {
    /// An empty cache for a pool of `num_blocks` blocks.
    pub fn new(num_blocks: usize) -> Self {
        Self {
            hasher: RandomState::new(),
            known: HashMap::new(),
            entries: (0..num_blocks).map(|_| None).collect(),
            idle: BTreeMap::new(),
            clock: 0,
            epoch: 0,
        }
    }

    /// The block with this content.
    pub fn get(&self, key: &BlockKey<'_>) -> Option<u32> {
        let block = *self.known.get(&self.hasher.hash_one(key))?;
        let entry = self.entries[block as usize].as_ref()?;
        (entry.parent == key.parent && *entry.tokens == *key.tokens).then_some(block)
    }

    /// Makes `block` known, whose content no known block has. Returns false, and does nothing, if another
    /// content has the same digest.
    pub fn insert(&mut self, key: &BlockKey<'_>, block: u32) -> bool {
        let digest = self.hasher.hash_one(key);
        if self.known.contains_key(&digest) {
            return false;
        }
        self.known.insert(digest, block);
        self.entries[block as usize] = Some(CachedBlock {
            parent: key.parent,
            tokens: key.tokens.into(),
            digest,
            name: None,
            idle_since: None,
        });
        true
    }

    /// The name of `block`, if it has one.
    pub fn name(&self, block: u32) -> Option<BlockName> {
        self.entries[block as usize].as_ref()?.name
    }

    /// Gives `block` a name, if it is known.
    pub fn set_name(&mut self, block: u32, name: BlockName) {
        if let Some(entry) = &mut self.entries[block as usize] {
            entry.name = Some(name);
        }
    }

    /// Forgets all names, unless the last call had the same `epoch`.
    pub fn forget_names_before(&mut self, epoch: u64) {
        if std::mem::replace(&mut self.epoch, epoch) != epoch {
            for entry in self.entries.iter_mut().flatten() {
                entry.name = None;
            }
        }
    }

    /// Notes that a table holds `block`.
    pub fn hold(&mut self, block: u32) {
        if let Some(entry) = &mut self.entries[block as usize]
            && let Some(since) = entry.idle_since.take()
        {
            self.idle.remove(&since);
        }
    }

    /// Notes that no table holds `block` any more. Returns false if the block is not known.
    pub fn release(&mut self, block: u32) -> bool {
        let Some(entry) = &mut self.entries[block as usize] else {
            return false;
        };
        self.clock += 1;
        entry.idle_since = Some(self.clock);
        self.idle.insert(self.clock, block);
        true
    }

    /// Forgets the least recently used of the blocks that no table holds, and returns it.
    pub fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(entry) = self.entries[block as usize].take() {
            self.known.remove(&entry.digest);
        }
        Some(block)
    }

    /// Forgets all blocks, and returns those that no table holds.
    pub fn clear(&mut self) -> impl Iterator<Item = u32> + use<> {
        self.known.clear();
        self.entries.fill_with(|| None);
        std::mem::take(&mut self.idle).into_values()
    }

    /// Number of known blocks that no table holds.
    pub fn num_idle(&self) -> usize {
        self.idle.len()
    }

    /// Whether `block` is known and no table holds it.
    pub fn is_idle(&self, block: u32) -> bool {
        let entry = self.entries[block as usize].as_ref();
        entry.is_some_and(|entry| entry.idle_since.is_some())
    }

    /// Whether `block` is known.
    pub fn contains(&self, block: u32) -> bool {
        self.entries[block as usize].is_some()
    }

    /// Checks its lists against each other and against the blocks' reference counts.
    ///
    /// # Errors
    /// The inconsistency found.
    pub fn check_invariants(&self, refs: &[u32]) -> Result<(), String> {
        let entries = self.entries.iter().flatten().count();
        if entries != self.known.len() {
            return Err(format!(
                "{entries} blocks are known under {} digests",
                self.known.len()
            ));
        }
        for (&since, &block) in &self.idle {
            let entry = self.entries[block as usize].as_ref();
            if entry.and_then(|entry| entry.idle_since) != Some(since) {
                return Err(format!("block {block} can be evicted, but is not known"));
            }
        }
        for (block, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            if self.known.get(&entry.digest) != Some(&(block as u32)) {
                return Err(format!("block {block} is not known under its digest"));
            }
            let idle = entry.idle_since.and_then(|since| self.idle.get(&since));
            if (idle == Some(&(block as u32))) != (refs[block] == 0) {
                return Err(format!(
                    "block {block}: reference count {}, can be evicted: {}",
                    refs[block],
                    idle.is_some()
                ));
            }
            if let Parent::Block(parent) = entry.parent {
                let above = self.entries[parent as usize].as_ref();
                // No time = held, which is later than any.
                let last = |idle_since: Option<u64>| idle_since.unwrap_or(u64::MAX);
                if above.is_none_or(|above| last(above.idle_since) < last(entry.idle_since)) {
                    return Err(format!(
                        "block {parent} goes before block {block}, which comes after it"
                    ));
                }
            }
        }
        Ok(())
    }
}
