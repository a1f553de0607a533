//! Block allocator and block tables. Has no tensors, so it is tested on its own.

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
}

impl BlockTable {
    /// Block ids, ordered by position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The pool slot of `position`, which must be reserved.
    pub fn slot(&self, position: usize, block_size: usize) -> u32 {
        self.blocks[position / block_size] * block_size as u32 + (position % block_size) as u32
    }
}

/// A fixed number of blocks of `block_size` tokens, each with a reference count.
#[derive(Debug)]
pub struct BlockAllocator {
    block_size: usize,
    /// Free ids. The last one is allocated first, so that warm blocks are
    /// reused.
    free: Vec<u32>,
    /// Number of tables that hold each block; 0 = free.
    refs: Vec<u32>,
}

impl BlockAllocator {
    /// An allocator of `num_blocks` free blocks of `block_size` tokens each.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            block_size,
            free: (0..num_blocks as u32).rev().collect(),
            refs: vec![0; num_blocks],
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Total number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// Number of free blocks.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Fraction of blocks in use, 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - self.num_free() as f64 / self.num_blocks().max(1) as f64
    }

    /// Blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// The largest length in tokens, at most `wanted`, to which `table` can grow now.
    pub fn longest(&self, table: &BlockTable, wanted: usize) -> usize {
        wanted.min((table.blocks.len() + self.free.len()) * self.block_size)
    }

    /// Reserves blocks in `table` for positions `0..len`. On an error nothing changes.
    pub fn reserve(&mut self, table: &mut BlockTable, len: usize) -> Result<(), OutOfBlocks> {
        let missing = self.blocks_for(len).saturating_sub(table.blocks.len());
        if missing > self.free.len() {
            return Err(OutOfBlocks);
        }
        for block in self.free.drain(self.free.len() - missing..).rev() {
            self.refs[block as usize] = 1;
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Releases every block whose first position is at or beyond `len`; a partial block stays. A
    /// shared block only loses this table's reference. Does nothing if the table is shorter than
    /// `len`.
    pub fn truncate_to(&mut self, table: &mut BlockTable, len: usize) {
        let keep = self.blocks_for(len).min(table.blocks.len());
        for block in table.blocks.drain(keep..).rev() {
            let refs = &mut self.refs[block as usize];
            *refs -= 1;
            if *refs == 0 {
                self.free.push(block);
            }
        }
    }

    /// Releases all blocks of `table`.
    pub fn release(&mut self, table: &mut BlockTable) {
        self.truncate_to(table, 0);
    }

    /// A table that shares all full blocks of `table` below `len`. Shared blocks are never written:
    /// both tables grow into new blocks.
    pub fn share(&mut self, table: &BlockTable, len: usize) -> BlockTable {
        let full = (len / self.block_size).min(table.blocks.len());
        let blocks = table.blocks[..full].to_vec();
        for &block in &blocks {
            self.refs[block as usize] += 1;
        }
        BlockTable { blocks }
    }

    /// Checks the invariants against `tables`, all live tables: every block is either free or held
    /// by as many tables as its reference count.
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
        }
        let mut free = vec![false; self.refs.len()];
        for &block in &self.free {
            if std::mem::replace(&mut free[block as usize], true) {
                return Err(format!("block {block} is twice on the free list"));
            }
        }
        for (block, (&held, &refs)) in held.iter().zip(&self.refs).enumerate() {
            if held != refs || (refs == 0) != free[block] {
                return Err(format!(
                    "block {block}: held by {held} tables, reference count {refs}, free: {}",
                    free[block]
                ));
            }
        }
        Ok(())
    }
}
