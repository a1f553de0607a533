//! Paged KV pools: who holds which block ([`blocks`]), and the tensors ([`KvStore`]).

pub mod blocks;

use crate::error::Result;
use candle_core::{DType, Device, Tensor};

pub use blocks::{BlockAllocator, BlockTable, OutOfBlocks};

/// The tensors of one pool. A slot is a place for one token: `block * block_size + offset`.
#[derive(Debug)]
pub struct KvStore {
    /// K and V of each layer, each `[num_slots, num_kv_heads, head_dim]`.
    pub layers: Vec<(Tensor, Tensor)>,
    /// Slots a block.
    pub block_size: usize,
}

/// Shape of a [`KvStore`].
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub dtype: DType,
}

impl KvShape {
    /// Bytes of K and V for one token over all layers.
    pub fn bytes_per_token(&self) -> usize {
        2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.size_in_bytes()
    }
}

impl KvStore {
    /// Zeroed tensors for `num_blocks` blocks of `block_size` tokens.
    pub fn new(
        shape: KvShape,
        num_blocks: usize,
        block_size: usize,
        device: &Device,
    ) -> Result<Self> {
        let dims = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim);
        let layers = (0..shape.num_layers)
            .map(|_| {
                Ok((
                    Tensor::zeros(dims, shape.dtype, device)?,
                    Tensor::zeros(dims, shape.dtype, device)?,
                ))
            })
            .collect::<Result<_>>()?;
        // As with weights: zeros that are written late would wipe out keys.
        device.synchronize()?;
        Ok(Self { layers, block_size })
    }
}
