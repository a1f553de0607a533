//! The target's forwards over the rows of the corpus.
//!
//! A forward takes as many whole rows as fit into a number of tokens, or a part of one longer row. On the CPU this
//! number is small, because a row of logits should stay in a cache until it is read. A GPU is busy only with
//! thousands of tokens; what they take of its memory bounds them. It computes the next rows while the host packs
//! and writes those before.

use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken_core::model::{Batch, KeptState, Model, Taps};
use foretoken_kernels as kernels;
use foretoken_kernels::sample::{TopLogits, TopRow, top_logits};

/// Tokens of a forward on the CPU, and the least for which a GPU must have memory.
const FEWEST_TOKENS: usize = 128;
/// Bytes that a forward takes of a GPU at most. More would not keep it busier.
const MAX_BYTES: u64 = 4 << 30;
const BLOCK_SIZE: usize = 16;

/// What is wanted of each position.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Number of most probable ids.
    pub top_k: usize,
    /// The layers whose hidden states are wanted, ascending.
    pub taps: Vec<usize>,
}

/// Number of tokens that a forward of `target` takes over rows of `len` tokens: a fixed one on the CPU, and on a GPU
/// what half of its free memory has room for. The other half is for what libraries take.
///
/// # Errors
/// `Setup`, if the GPU has too little memory.
pub fn tokens_of_a_forward(target: &dyn Model, len: usize, wanted: &Wanted) -> Result<usize> {
    let memory = kernels::device_memory(target.device()).map_err(Error::setup)?;
    let Some((free, _)) = memory else {
        return Ok(FEWEST_TOKENS);
    };
    let bytes = ForwardBytes::new(target, len, wanted);
    bytes.tokens_within(free / 2).ok_or_else(|| {
        let needed = 2 * bytes.least();
        Error::setup(format!(
            "the target's pass over rows of {len} tokens needs {needed} bytes of the GPU's memory beside the target, and {free} are free"
        ))
    })
}

/// Upper bounds on what forwards over rows of `len` tokens take of a GPU's memory.
struct ForwardBytes {
    len: usize,
    /// K and V of a whole row.
    row: u64,
    /// A token of the forward: activations of one layer; the logits in f32, before they were converted to it and
    /// before a cap; K and V; and what is wanted.
    token: u64,
}

impl ForwardBytes {
    fn new(target: &dyn Model, len: usize, wanted: &Wanted) -> Self {
        let (info, kv) = (target.info(), target.kv_shape().bytes_per_token());
        let hidden = 2 * wanted.taps.len() * info.hidden_size;
        let values = info.row_values + 3 * info.vocab_size + hidden + 2 * wanted.top_k + 2;
        Self {
            len,
            row: (kv * len.next_multiple_of(BLOCK_SIZE)) as u64,
            token: (values * size_of::<f32>() + kv) as u64,
        }
    }

    /// Bytes of the smallest forward.
    fn least(&self) -> u64 {
        self.row + self.token * self.len.min(FEWEST_TOKENS) as u64
    }

    /// The tokens of a forward that takes at most `room` bytes; `None` = they are too few.
    fn tokens_within(&self, room: u64) -> Option<usize> {
        let enough = room >= self.least();
        enough.then(|| ((room - self.row).min(MAX_BYTES) / self.token) as usize)
    }
}

/// A target, and the KV pool for the rows of one forward.
pub struct TargetPass<'a> {
    target: &'a mut dyn Model,
    kv: KvStore,
    /// One for each row of a forward.
    tables: Vec<BlockTable>,
    /// Tokens of a row in a forward.
    chunk: usize,
    wanted: Wanted,
}

/// What a pass computes of some rows, on the device, which may still be at work.
pub struct PassOutput(Vec<(TopLogits, Option<Tensor>)>);

impl<'a> TargetPass<'a> {
    /// A pass over `rows` rows of `len` tokens with at most `tokens` tokens, at least 1, a forward.
    ///
    /// # Errors
    /// If the device has no memory for K and V.
    pub fn new(
        target: &'a mut dyn Model,
        (rows, len): (usize, usize),
        tokens: usize,
        wanted: Wanted,
    ) -> Result<Self> {
        let at_once = (tokens / len).clamp(1, rows.max(1));
        let blocks = at_once * len.div_ceil(BLOCK_SIZE);
        let mut free = BlockAllocator::new(blocks, BLOCK_SIZE);
        let mut table = |_| -> Result<BlockTable> {
            let mut table = BlockTable::default();
            free.reserve(&mut table, len)
                .map_err(|_| Error::internal("the pool is as large as the rows"))?;
            Ok(table)
        };
        Ok(Self {
            tables: (0..at_once).map(&mut table).collect::<Result<_>>()?,
            kv: target.new_kv(blocks, BLOCK_SIZE)?,
            target,
            chunk: tokens.min(len),
            wanted,
        })
    }

    /// Maximum number of rows of [`TargetPass::start`].
    pub fn rows_at_once(&self) -> usize {
        self.tables.len()
    }

    /// Starts the forwards over some rows of the same length.
    ///
    /// # Errors
    /// The error of the target.
    pub fn start(&mut self, rows: &[&[u32]]) -> Result<PassOutput> {
        let len = rows.first().map_or(0, |row| row.len());
        let parts = (0..len).step_by(self.chunk);
        let parts = parts.map(|start| self.forward(rows, start, (start + self.chunk).min(len)));
        parts.collect::<Result<_>>().map(PassOutput)
    }

    /// The forward over the tokens from `start` to `end` of each row. Only one row has more than one part.
    fn forward(
        &mut self,
        rows: &[&[u32]],
        start: usize,
        end: usize,
    ) -> Result<(TopLogits, Option<Tensor>)> {
        let mut batch = Batch::default();
        for (slot, (row, table)) in (0..).zip(rows.iter().zip(&self.tables)) {
            batch.push_span(&row[start..end], &[], start, table, BLOCK_SIZE);
            batch.keep_state(end - start, &[], KeptState::of_chunk(slot, start == 0));
        }
        batch.logits = (0..batch.tokens.len() as u32).collect();
        let layers = &self.wanted.taps;
        batch.taps = (!layers.is_empty()).then(|| Taps {
            layers: layers.clone(),
            rows: batch.logits.clone(),
        });
        let output = self.target.forward(&batch, &mut self.kv)?;
        Ok((
            top_logits(&output.logits, self.wanted.top_k)?,
            output.tapped,
        ))
    }
}

impl PassOutput {
    /// The largest logits of all positions, row after row, and their hidden states in the same order: those of the
    /// taps of a position side by side. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<(Vec<TopRow>, Vec<f32>)> {
        let (mut top, mut hidden) = (Vec::new(), Vec::new());
        for (logits, tapped) in &self.0 {
            top.extend(logits.read()?);
            if let Some(states) = tapped {
                let states = states
                    .to_dtype(DType::F32)?
                    .flatten_all()?
                    .to_vec1::<f32>()?;
                if hidden.is_empty() {
                    hidden = states;
                } else {
                    hidden.extend(states);
                }
            }
        }
        Ok((top, hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_tokens_as_fit_and_at_least_some() {
        let mib = 1 << 20;
        let of = |len: usize| ForwardBytes {
            len,
            row: 3 * mib,
            token: mib,
        };
        assert_eq!(of(256).tokens_within(130 * mib), None);
        assert_eq!(of(256).tokens_within(131 * mib), Some(128));
        assert_eq!(of(16).tokens_within(23 * mib), Some(20));
        // There is more memory than a forward uses.
        assert_eq!(of(256).tokens_within(u64::MAX), Some(4096));
    }
}
