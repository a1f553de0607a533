//! What the engine asks of a model, and how one is loaded.

pub mod config;
pub mod decoder;
mod download;
mod finite;
mod gguf;
mod graphs;
mod hub;
mod inputs;
pub mod linear;
pub mod load;
pub(crate) mod names;
pub mod source;
pub mod toy;
mod weights;

use crate::error::Result;
use crate::kv::{BlockTable, KvStore};
use candle_core::{CpuStorage, Storage, Tensor};

pub use crate::kernels::Span;
pub use config::ModelConfig;
pub use load::{LoadOptions, load};
pub use source::{LoadFormat, ModelSource};
pub(crate) use weights::safetensors_files;

/// Rows of many sequences, computed in one forward. Row `i` is `tokens[i]` at `positions[i]`; its
/// key and value go to pool slot `slots[i]`.
#[derive(Debug, Default, Clone)]
pub struct Batch {
    /// Token ids, one a row.
    pub tokens: Vec<u32>,
    /// What stands in their place, `[rows]` u32, where a GPU drew them and the host has not read them.
    pub drawn: Option<Tensor>,
    /// Position of each row in its sequence, from 0.
    pub positions: Vec<u32>,
    /// Pool slot of each row: `block * block_size + offset`.
    pub slots: Vec<u32>,
    /// Which rows belong together, in row order.
    pub spans: Vec<Span>,
    /// Rows whose logits are wanted, ascending.
    pub logits: Vec<u32>,
}

impl Batch {
    /// Adds the rows of one sequence: `tokens` follow `context` tokens that are in the pool, and
    /// `table` has room for them.
    pub fn push_span(
        &mut self,
        tokens: &[u32],
        context: usize,
        table: &BlockTable,
        block_size: usize,
    ) {
        let start = self.tokens.len();
        let end = context + tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend(context as u32..end as u32);
        self.slots
            .extend((context..end).map(|position| table.slot(position, block_size)));
        self.spans.push(Span {
            rows: start..self.tokens.len(),
            context,
            blocks: table.blocks()[..end.div_ceil(block_size)].to_vec(),
            tree: None,
        });
    }
}

/// What a forward gives back.
#[derive(Debug)]
pub struct Output {
    /// `[batch.logits.len(), vocab_size]`, f32, in the order of [`Batch::logits`].
    pub logits: Tensor,
}

impl Output {
    /// Whether the logits are in the memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.logits.device().is_cuda()
    }

    /// Calls `work` with the logits, row after row; from a GPU they are copied.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn read<R>(&self, work: impl FnOnce(&[f32]) -> R) -> Result<R> {
        if let (Storage::Cpu(CpuStorage::F32(values)), layout) =
            (&*self.logits.storage_and_layout().0, self.logits.layout())
            && let Some((start, end)) = layout.contiguous_offsets()
        {
            return Ok(work(&values[start..end]));
        }
        Ok(work(&self.logits.flatten_all()?.to_vec1::<f32>()?))
    }
}

/// A causal language model over a paged pool.
///
/// `forward` first writes the K and V of every row to its slot, then attends: each row sees its
/// span's context and the rows of its span that the mask allows. It touches no other slot. A row's
/// logits depend on nothing but its own sequence, bit for bit: neither on the other spans nor on
/// how the sequence was cut into forwards (on a GPU as far as [`LoadOptions::batch_invariant`] says).
pub trait Model: Send {
    /// Shapes, special ids and limits.
    fn config(&self) -> &ModelConfig;

    /// An empty pool of `num_blocks * block_size` slots for this model.
    fn new_kv(&self, num_blocks: usize, block_size: usize) -> Result<KvStore>;

    /// Bytes of K and V that one token takes in the pool, over all layers.
    fn kv_bytes_per_token(&self) -> usize;

    /// One ragged forward. See the trait for what it may read and write.
    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<Output>;
}
