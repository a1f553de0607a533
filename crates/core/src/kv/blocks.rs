//! Block allocator and block tables. Has no tensors, so it is tested on its own.

use super::prefix::{BlockKey, BlockName, PrefixCache, PrefixRoot};
use std::collections::HashMap;
use std::ops::Range;

/// The pool has too few free blocks for the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBlocks;

/// The blocks of one sequence in a pool: position `p` is in `blocks[p / block_size]`.
///
/// Only the [`BlockAllocator`] that owns the blocks changes a table. Return the blocks to it with
/// [`BlockAllocator::release`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<u32>,
    /// So many of the first blocks are known by their content. Other tables may hold them, too, and
    /// nobody writes to them.
    known: usize,
    /// [`BlockAllocator::resets`] when the first block came.
    resets: u64,
}

impl BlockTable {
    /// Block ids, ordered by position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The first of them, which are known by their content.
    pub fn known(&self) -> &[u32] {
        &self.blocks[..self.known]
    }

    /// The pool slot of `position`, which must be reserved.
    pub fn slot(&self, position: usize, block_size: usize) -> u32 {
        self.blocks[position / block_size] * block_size as u32 + (position % block_size) as u32
    }
}

/// The longest known prefix of a sequence. It is valid until the allocator changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CachedPrefix {
    blocks: Vec<u32>,
}

impl CachedPrefix {
    /// Block ids, ordered by position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Keeps only the first `count` blocks.
    pub fn truncate(&mut self, count: usize) {
        self.blocks.truncate(count);
    }
}

/// A fixed number of blocks of `block_size` tokens, each with a reference count.
///
/// With a prefix cache, full blocks are known by their content once [`BlockAllocator::cache`] was told
/// so. A known block stays known after its last release, until the pool needs it.
#[derive(Debug)]
pub struct BlockAllocator {
    block_size: usize,
    /// Free ids that hold nothing known. The last one is allocated first, so that warm blocks are
    /// reused.
    free: Vec<u32>,
    /// Number of tables that hold each block; 0 = free.
    refs: Vec<u32>,
    /// `None` = no prefix cache.
    prefixes: Option<PrefixCache>,
    /// Number of times that all prefixes were forgotten.
    resets: u64,
}

impl BlockAllocator {
    /// An allocator of `num_blocks` free blocks of `block_size` tokens each, without a prefix cache.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            block_size,
            free: (0..num_blocks as u32).rev().collect(),
            refs: vec![0; num_blocks],
            prefixes: None,
            resets: 0,
        }
    }

    /// Turns the prefix cache on or off. No block may be in use.
    pub fn with_prefix_cache(mut self, enabled: bool) -> Self {
        self.set_prefix_cache(enabled);
        self
    }

    /// Begins or ends to cache prefixes, while no block is in use.
    pub fn set_prefix_cache(&mut self, enabled: bool) {
        self.prefixes = enabled.then(|| PrefixCache::new(self.num_blocks()));
    }

    /// Whether there is a prefix cache.
    pub fn has_prefix_cache(&self) -> bool {
        self.prefixes.is_some()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Total number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// Number of blocks that only `table` holds: as many are free after it is released.
    pub fn num_own(&self, table: &BlockTable) -> usize {
        let is_own = |block: &&u32| self.refs[**block as usize] == 1;
        table.blocks().iter().filter(is_own).count()
    }

    /// Number of blocks that only `tables` hold: as many are free after all of them are released.
    pub fn num_own_of<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> usize {
        let mut held: HashMap<u32, u32> = HashMap::new();
        for &block in tables.flat_map(BlockTable::blocks) {
            *held.entry(block).or_default() += 1;
        }
        let is_own = |(block, count): &(&u32, &u32)| self.refs[**block as usize] == **count;
        held.iter().filter(is_own).count()
    }

    /// Number of free blocks, those included whose content is known.
    pub fn num_free(&self) -> usize {
        self.free.len() + self.prefixes.as_ref().map_or(0, PrefixCache::num_idle)
    }

    /// Number of free blocks whose content is known.
    pub fn num_cached(&self) -> usize {
        self.num_free() - self.free.len()
    }

    /// Fraction of blocks in use, 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - self.num_free() as f64 / self.num_blocks().max(1) as f64
    }

    /// Blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Free blocks that a new table of `len` tokens takes if it begins with `prefix`.
    pub fn blocks_after(&self, prefix: &CachedPrefix, len: usize) -> usize {
        let is_idle = |block: &&u32| self.refs[**block as usize] == 0;
        let idle = prefix.blocks.iter().filter(is_idle).count();
        idle + self.blocks_for(len).saturating_sub(prefix.blocks.len())
    }

    /// The largest length in tokens, at most `wanted`, to which `table` can grow now.
    pub fn longest(&self, table: &BlockTable, wanted: usize) -> usize {
        wanted.min((table.blocks.len() + self.num_free()) * self.block_size)
    }

    /// Reserves blocks in `table` for positions `0..len`, evicting cached ones if no others are free. On
    /// an error nothing changes.
    pub fn reserve(&mut self, table: &mut BlockTable, len: usize) -> Result<(), OutOfBlocks> {
        let missing = self.blocks_for(len).saturating_sub(table.blocks.len());
        if missing > self.num_free() {
            return Err(OutOfBlocks);
        }
        self.begin(table);
        let evict = |cache: &mut Option<PrefixCache>| cache.as_mut().and_then(PrefixCache::evict);
        for _ in 0..missing {
            let block = self.free.pop().or_else(|| evict(&mut self.prefixes));
            let block = block.ok_or(OutOfBlocks)?;
            self.refs[block as usize] = 1;
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Releases every block whose first position is at or beyond `len`; a partial block stays, unless it
    /// is known: nobody writes to that again, so it goes, too. A shared block only loses this table's
    /// reference. Returns the length of which the blocks are left, at most `len`.
    pub fn truncate_to(&mut self, table: &mut BlockTable, len: usize) -> usize {
        let full = len / self.block_size;
        let keep = if full < table.known {
            full
        } else {
            self.blocks_for(len).min(table.blocks.len())
        };
        table.known = table.known.min(keep);
        for block in table.blocks.drain(keep..).rev() {
            self.drop_ref(block);
        }
        len.min(keep * self.block_size)
    }

    /// Releases all blocks of `table`.
    pub fn release(&mut self, table: &mut BlockTable) {
        self.truncate_to(table, 0);
    }

    /// The known blocks with the first tokens of a sequence, as many full ones as there are.
    pub fn find(&self, root: PrefixRoot, tokens: &[u32]) -> CachedPrefix {
        let mut blocks = Vec::new();
        if let Some(prefixes) = &self.prefixes {
            let after = |known: &[u32]| BlockKey::after(known, root, tokens, self.block_size);
            while let Some(block) = after(&blocks).and_then(|key| prefixes.get(&key)) {
                blocks.push(block);
            }
        }
        CachedPrefix { blocks }
    }

    /// Lets `table` begin with the blocks of `prefix`, if it has only known ones so far, which are the
    /// first of these. Returns the length of its known blocks in tokens.
    pub fn adopt(&mut self, table: &mut BlockTable, prefix: &CachedPrefix) -> usize {
        self.begin(table);
        let is_current = table.resets == self.resets && table.known == table.blocks.len();
        if is_current && prefix.blocks.starts_with(&table.blocks) {
            for &block in &prefix.blocks[table.known..] {
                self.refs[block as usize] += 1;
                self.prefixes.iter_mut().for_each(|all| all.hold(block));
                table.blocks.push(block);
            }
            table.known = table.blocks.len();
        }
        table.known * self.block_size
    }

    /// The content that the block after the `known` ones of a sequence has once it is computed. `None` if the
    /// sequence's `tokens` do not fill the block, or nobody could share it.
    pub fn next_block<'t>(
        &self,
        known: &[u32],
        root: PrefixRoot,
        tokens: &'t [u32],
    ) -> Option<BlockKey<'t>> {
        self.prefixes.as_ref()?;
        BlockKey::after(known, root, tokens, self.block_size)
    }

    /// Makes the full blocks of a sequence's `tokens` known. Their K and V must be in the blocks of `table`,
    /// and nobody may write to them again. Where another table has a block with the same content, this
    /// table shares it from now on, and its own block is free.
    pub fn cache(&mut self, table: &mut BlockTable, root: PrefixRoot, tokens: &[u32]) {
        let Some(prefixes) = &mut self.prefixes else {
            return;
        };
        if table.resets != self.resets {
            return;
        }
        let full = (tokens.len() / self.block_size).min(table.blocks.len());
        while table.known < full
            && let Some(key) = BlockKey::after(table.known(), root, tokens, self.block_size)
        {
            let own = table.blocks[table.known];
            if let Some(other) = prefixes.get(&key) {
                self.refs[other as usize] += 1;
                prefixes.hold(other);
                self.refs[own as usize] -= 1;
                self.free.push(own);
                table.blocks[table.known] = other;
            } else if !prefixes.insert(&key, own) {
                return;
            }
            table.known += 1;
        }
    }

    /// The name that a known block was given; see [`BlockAllocator::set_name`].
    pub fn name(&self, block: u32) -> Option<BlockName> {
        self.prefixes.as_ref()?.name(block)
    }

    /// Notes under which name the content of a known block is kept outside the pool, too. The block before it has a
    /// name. The name is forgotten with the content.
    pub fn set_name(&mut self, block: u32, name: BlockName) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.set_name(block, name);
        }
    }

    /// Forgets the names of all blocks, unless the last call had the same `epoch`; the first one is 0.
    pub fn forget_names_before(&mut self, epoch: u64) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.forget_names_before(epoch);
        }
    }

    /// The places of the known blocks of `table` that have no name; none if nobody shares them any more.
    pub fn nameless(&self, table: &BlockTable) -> Range<usize> {
        let known = table.known();
        if table.resets != self.resets {
            return known.len()..known.len();
        }
        known.partition_point(|&block| self.name(block).is_some())..known.len()
    }

    /// Forgets what the blocks hold. Tables keep their blocks, but what was computed so far will not be
    /// shared.
    pub fn reset_prefix_cache(&mut self) {
        self.resets += 1;
        if let Some(prefixes) = &mut self.prefixes {
            self.free.extend(prefixes.clear());
        }
    }

    /// Notes when an empty table begins.
    fn begin(&self, table: &mut BlockTable) {
        if table.blocks.is_empty() {
            (table.known, table.resets) = (0, self.resets);
        }
    }

    /// Notes that a table no longer holds `block`.
    fn drop_ref(&mut self, block: u32) {
        let refs = &mut self.refs[block as usize];
        *refs -= 1;
        if *refs == 0 && !(self.prefixes.as_mut()).is_some_and(|all| all.release(block)) {
            self.free.push(block);
        }
    }

    /// Checks the invariants against `tables`, all live tables: every block is held by as many tables as
    /// its reference count, and if by none, then it is either free or cached.
    ///
    /// # Errors
    /// A line that names the first block that violates an invariant.
    pub fn check_invariants<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), String> {
        let mut held = vec![0u32; self.refs.len()];
        for table in tables {
            for &block in &table.blocks {
                held[block as usize] += 1;
            }
            self.check_known(table)?;
        }
        let mut free = vec![false; self.refs.len()];
        for &block in &self.free {
            if std::mem::replace(&mut free[block as usize], true) {
                return Err(format!("block {block} is twice on the free list"));
            }
        }
        for (block, (&held, &refs)) in held.iter().zip(&self.refs).enumerate() {
            let is_cached = self
                .prefixes
                .as_ref()
                .is_some_and(|all| all.is_idle(block as u32));
            let places = u8::from(refs > 0) + u8::from(free[block]) + u8::from(is_cached);
            if held != refs || places != 1 {
                return Err(format!(
                    "block {block}: held by {held} tables, reference count {refs}, free: {}, cached: {is_cached}",
                    free[block]
                ));
            }
        }
        match &self.prefixes {
            Some(prefixes) => prefixes.check_invariants(&self.refs),
            None => Ok(()),
        }
    }

    /// Checks that the first blocks of `table` are known, and the others are its own.
    fn check_known(&self, table: &BlockTable) -> Result<(), String> {
        let Some(prefixes) = self
            .prefixes
            .as_ref()
            .filter(|_| table.resets == self.resets)
        else {
            return Ok(());
        };
        for (place, &block) in table.blocks.iter().enumerate() {
            let is_own = !prefixes.contains(block) && self.refs[block as usize] == 1;
            if is_own == (place < table.known) {
                return Err(format!(
                    "block {block}, place {place} of a table with {} known blocks, is its own: {is_own}",
                    table.known
                ));
            }
        }
        Ok(())
    }
}
