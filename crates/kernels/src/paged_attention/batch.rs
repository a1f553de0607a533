//! All rows of a call, grouped by sequence.

use super::tables::{AttentionTables, TableCapacity, is_long};
use crate::span::Span;
use crate::writes::Writes;
use candle_core::{DType, Device, Result};
use std::sync::OnceLock;

/// The spans of a forward, which cover its rows in order. The attention of all layers shares them.
///
/// The spans are checked when the batch is made and do not change afterwards. So a batch is the witness
/// that every block of every table is inside any pool with [`num_slots`](Self::num_slots) slots, and
/// that every mask is where a kernel looks for it. Kernels need not check it again, which a GPU could
/// not do.
pub struct AttentionBatch<'a> {
    spans: &'a [Span],
    rows: usize,
    block_size: usize,
    num_slots: usize,
    batch_invariant: bool,
    /// The largest number of query heads per K/V head that was named.
    max_group: usize,
    /// What a GPU needs of the spans, sent there once.
    tables: OnceLock<AttentionTables>,
}

impl<'a> AttentionBatch<'a> {
    /// A batch of `spans` over pools of `num_slots` slots in blocks of `block_size`. The rows of each
    /// span follow those of the span before it.
    ///
    /// # Errors
    /// If the spans leave out rows, a table is too short or names a block outside the pools, or a tree
    /// does not have one mask per row, names a row that does not exist, or has more than 64 rows.
    pub fn new(spans: &'a [Span], block_size: usize, num_slots: usize) -> Result<Self> {
        let mut rows = 0;
        for span in spans {
            if !fits(span, rows, block_size, num_slots) {
                candle_core::bail!("paged-attention: {span:?} does not fit {num_slots} slots");
            }
            rows = span.rows.end;
        }
        Ok(Self {
            spans,
            rows,
            block_size,
            num_slots,
            batch_invariant: false,
            max_group: 1,
            tables: OnceLock::new(),
        })
    }

    /// For layers of up to `max_group` query heads per K/V head. On a GPU all layers share tables, which are for the
    /// layers with the most.
    pub fn with_max_group(mut self, max_group: usize) -> Self {
        self.max_group = max_group;
        self
    }

    /// With `batch_invariant`, all rows use one kernel on a GPU, also those of prompts, so that no bit
    /// depends on how many rows of a sequence are in a call. On the CPU this always holds.
    pub fn with_batch_invariance(mut self, batch_invariant: bool) -> Self {
        self.batch_invariant = batch_invariant;
        self
    }

    /// The spans, in the order of their rows.
    pub fn spans(&self) -> &'a [Span] {
        self.spans
    }

    /// Rows of all spans.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Slots per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The number of slots that the pools must have.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Whether a span is so long that the kernel for prompts takes it, if it is used.
    pub fn has_long_spans(&self) -> bool {
        self.spans.iter().any(is_long)
    }

    /// The capacity for up to `rows` rows that are similar to these, rounded up to powers of two, if no span is long.
    /// `group` is the number of query heads per K/V head.
    pub fn capacity(&self, group: usize, rows: usize) -> TableCapacity {
        let group = group.max(self.max_group);
        TableCapacity::of(self.spans, group, false).rounded_up(rows)
    }

    /// Sends to a GPU the tables that attention needs for these rows, large enough for `capacity`
    /// (`None` = just for these rows). With `prefill`, long spans go to the kernel for prompts. Attention
    /// calls it if it was not called before.
    ///
    /// # Errors
    /// If the device fails.
    pub fn send(
        &self,
        device: &Device,
        group: usize,
        prefill: bool,
        capacity: Option<TableCapacity>,
    ) -> Result<&AttentionTables> {
        if let Some(tables) = self.tables.get() {
            return Ok(tables);
        }
        let (kind, mut writes) = ((group, prefill), Writes::default());
        // SAFETY: they are written here.
        let tables = unsafe { self.new_tables(device, kind, capacity, &mut writes)? };
        writes.write()?;
        Ok(self.tables.get_or_init(|| tables))
    }

    /// As [`send`](Self::send) for activations of this dtype, without a capacity, but a GPU has the tables once `writes` are
    /// written.
    ///
    /// # Errors
    /// As of [`send`](Self::send).
    ///
    /// # Safety
    /// No kernel reads them before.
    pub unsafe fn send_with(
        &self,
        device: &Device,
        dtype: DType,
        writes: &mut Writes,
    ) -> Result<()> {
        if self.tables.get().is_none() {
            let kind = (self.max_group, self.has_prefill(dtype));
            // SAFETY: the caller promises it.
            let tables = unsafe { self.new_tables(device, kind, None, writes)? };
            self.tables.get_or_init(|| tables);
        }
        Ok(())
    }

    /// # Safety
    /// As of [`send_with`](Self::send_with).
    unsafe fn new_tables(
        &self,
        device: &Device,
        (group, prefill): (usize, bool),
        capacity: Option<TableCapacity>,
        writes: &mut Writes,
    ) -> Result<AttentionTables> {
        let pool = (self.block_size, self.num_slots);
        let kind = (group.max(self.max_group), prefill);
        // SAFETY: the caller promises it.
        unsafe { AttentionTables::new(self.spans, pool, device, kind, capacity, writes) }
    }

    /// Whether a GPU has a kernel for the long spans of activations of this dtype: it uses tensor cores, which do not take f32.
    pub(crate) fn has_prefill(&self, dtype: DType) -> bool {
        dtype != DType::F32 && !self.batch_invariant
    }

    /// The tables that were sent.
    pub fn into_tables(self) -> Option<AttentionTables> {
        self.tables.into_inner()
    }

    /// Adds to `writes` these rows in the place of those that `tables` hold. Neither may have prompts.
    ///
    /// # Errors
    /// If these rows were checked for other pools or exceed the capacity.
    pub fn overwrite(&self, tables: &AttentionTables, writes: &mut Writes) -> Result<()> {
        tables.replace(self.spans, (self.block_size, self.num_slots), writes)
    }
}

/// Whether `span` begins at row `first`, its table has room for its keys, its blocks are inside the
/// pool, and it has one mask per row, of its rows, if it is a tree.
fn fits(span: &Span, first: usize, block_size: usize, num_slots: usize) -> bool {
    let ordered = span.rows.start == first && span.rows.start <= span.rows.end;
    let keys = span.context.checked_add(span.rows.len());
    let room = span.blocks.len().checked_mul(block_size);
    // Counts whole blocks, not slots: the last block of a pool may be incomplete.
    let blocks = num_slots.checked_div(block_size).unwrap_or(0);
    let inside = span.blocks.iter().all(|&block| (block as usize) < blocks);
    let is_sound = |masks: &Vec<u64>| {
        let rows = masks.len();
        let beyond = |mask: &u64| mask.checked_shr(rows as u32).unwrap_or(0) != 0;
        rows == span.rows.len() && rows <= 64 && !masks.iter().any(beyond)
    };
    ordered
        && inside
        && keys.is_some_and(|keys| room.is_some_and(|room| keys <= room))
        && span.tree.as_ref().is_none_or(is_sound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    #[test]
    fn spans_that_lead_out_of_the_pool_are_refused() {
        let two = [Span::causal(0..2, 3, &[0, 1]), Span::causal(2..3, 0, &[2])];
        let batch = AttentionBatch::new(&two, 4, 13).unwrap();
        assert_eq!((batch.rows(), batch.num_slots()), (3, 13));
        let tree = |len| Span {
            tree: Some(vec![1; len]),
            ..Span::causal(0..2, 3, &[0, 1])
        };
        assert!(AttentionBatch::new(&[tree(2)], 4, 12).is_ok());
        let reversed = Range { start: 2, end: 0 };
        for wrong in [
            Span::causal(0..2, 3, &[0, 3]),
            Span::causal(0..2, 3, &[u32::MAX, 0]),
            Span::causal(0..2, 3, &[0]),
            Span::causal(0..2, usize::MAX, &[0, 1]),
            Span::causal(1..2, 3, &[0, 1]),
            Span::causal(reversed, 3, &[0, 1]),
            tree(1),
            tree(3),
            Span {
                tree: Some(vec![1, 0b100]),
                ..Span::causal(0..2, 3, &[0, 1])
            },
            Span {
                tree: Some(vec![1; 65]),
                ..Span::causal(0..65, 0, &(0..17).map(|i| i % 3).collect::<Vec<_>>())
            },
        ] {
            let wrong = [wrong];
            assert!(AttentionBatch::new(&wrong, 4, 12).is_err(), "{wrong:?}");
        }
        assert!(AttentionBatch::new(&two, 0, 12).is_err());
        assert!(AttentionBatch::new(&two, 4, 11).is_err());
        // Rows that belong to no span, or to two.
        for start in [1, 3] {
            let wrong = [
                Span::causal(0..2, 3, &[0, 1]),
                Span::causal(start..4, 0, &[2]),
            ];
            assert!(AttentionBatch::new(&wrong, 4, 12).is_err());
        }
    }

    /// What a graph reads on replay passes the same checks as what it was recorded with.
    #[test]
    fn tables_take_no_batch_of_other_pools() {
        let recorded = [Span::causal(0..2, 3, &[0, 1])];
        let batch = AttentionBatch::new(&recorded, 4, 12).unwrap();
        let capacity = batch.capacity(2, 4);
        batch.send(&Device::Cpu, 2, false, Some(capacity)).unwrap();
        let tables = batch.into_tables().unwrap();
        let other = [Span::causal(0..2, 5, &[2, 0])];
        let over = |block_size, num_slots| {
            let batch = AttentionBatch::new(&other, block_size, num_slots).unwrap();
            batch.overwrite(&tables, &mut Writes::default())
        };
        over(4, 12).unwrap();
        // A larger pool has blocks that the recorded one does not have; another block size moves blocks.
        over(4, 16).unwrap_err();
        over(5, 15).unwrap_err();
        // A pool of one slot more has the same blocks, but is refused as well.
        over(4, 13).unwrap_err();
    }
}
