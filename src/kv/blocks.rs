//! Block allocator and block tables. No tensors: tested alone.

/// The pool has no free block left for what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBlocks;

/// Where one sequence lives in a pool: position `p` is in `blocks[p / block_size]`.
///
/// A table is only changed through the [`BlockAllocator`] that it got its blocks from, and must be
/// given back to it with [`BlockAllocator::release`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<u32>,
}

impl BlockTable {
    /// Block ids in order of position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Pool slot of position `position`, which must have been reserved.
    pub fn slot(&self, position: usize, block_size: usize) -> u32 {
        self.blocks[position / block_size] * block_size as u32 + (position % block_size) as u32
    }
}

/// A fixed number of blocks of `block_size` tokens, each with a reference count.
#[derive(Debug)]
pub struct BlockAllocator {
    block_size: usize,
    /// Free ids; the last one is handed out first, so that warm blocks are used again.
    free: Vec<u32>,
    /// References by tables; 0 = free.
    refs: Vec<u32>,
}

impl BlockAllocator {
    /// `num_blocks` free blocks of `block_size` tokens each.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            block_size,
            free: (0..num_blocks as u32).rev().collect(),
            refs: vec![0; num_blocks],
        }
    }

    /// Tokens in one block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in all.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// Blocks that nobody holds.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Fraction in use, 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - self.num_free() as f64 / self.num_blocks().max(1) as f64
    }

    /// Blocks that `tokens` tokens take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// The longest length up to `wanted` to which `table` can grow now, in tokens.
    pub fn longest(&self, table: &BlockTable, wanted: usize) -> usize {
        wanted.min((table.blocks.len() + self.free.len()) * self.block_size)
    }

    /// Makes room in `table` for positions `0..len`. All or nothing: on an error nothing changed.
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

    /// Gives back every block whose first position is at or beyond `len`; the partial one stays.
    /// A block that another table shares only loses this table's reference. Does nothing where
    /// the table is shorter than `len`.
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

    /// Gives back all blocks of `table`.
    pub fn release(&mut self, table: &mut BlockTable) {
        self.truncate_to(table, 0);
    }

    /// A table that shares the blocks of `table` that are wholly below `len`. Shared blocks are
    /// read-only by construction: both tables grow into blocks of their own.
    pub fn share(&mut self, table: &BlockTable, len: usize) -> BlockTable {
        let full = (len / self.block_size).min(table.blocks.len());
        let blocks = table.blocks[..full].to_vec();
        for &block in &blocks {
            self.refs[block as usize] += 1;
        }
        BlockTable { blocks }
    }

    /// Checks the books against the tables that are alive: every block is either free or held by
    /// exactly as many tables as its count says.
    ///
    /// # Errors
    /// A line that names the first block whose books are wrong.
    pub fn check<'a>(
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
                    "block {block}: {held} tables hold it, its count is {refs}, free: {}",
                    free[block]
                ));
            }
        }
        Ok(())
    }
}
