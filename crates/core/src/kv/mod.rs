//! Paged KV pools: block allocation ([`blocks`]), the prefix cache ([`prefix`]) and the tensors
//! ([`KvStore`]).

pub mod blocks;
mod bytes;
mod gpus;
pub mod prefix;

use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use foretoken_kernels::quant::BlockType;
use foretoken_kernels::{KvMoves, StatePool, StateRows, StateShape, kv_move};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use blocks::{BlockAllocator, BlockTable, CachedPrefix, OutOfBlocks};
pub use gpus::PoolGpus;
pub use prefix::{BlockKey, BlockName, PrefixRoot};

/// The tensors of one pool. A slot holds one token and has the index `block * block_size + offset`.
#[derive(Debug)]
pub struct KvStore {
    /// K and V of each layer of its [`KvShape`], each `[num_slots, heads, head_dim]`, or `[num_slots, heads, bytes]` u8 where
    /// they are in blocks, whose parts are in another order on a GPU; V is `[num_slots, heads, 0]` where it is a part of K.
    pub layers: Vec<(Tensor, Tensor)>,
    /// The states of each layer that has these instead.
    pub states: Vec<Mutex<StatePool>>,
    /// Slots per block.
    pub block_size: usize,
    num_slots: usize,
}

/// The pool of one layer.
#[derive(Debug, Clone, Copy)]
pub enum LayerPool<'a> {
    /// K and V of tokens.
    Tokens(&'a (Tensor, Tensor)),
    /// States of sequences.
    States(&'a Mutex<StatePool>),
    /// The layer keeps nothing.
    Nothing,
}

/// Where a layer's [`LayerPool`] is in a [`KvStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolPlace {
    /// Index into [`KvStore::layers`].
    Tokens(usize),
    /// Index into [`KvStore::states`].
    States(usize),
    /// The layer keeps nothing.
    Nothing,
}

impl<'a> LayerPool<'a> {
    /// K and V of tokens.
    ///
    /// # Errors
    /// If the layer has none.
    pub fn tokens(self) -> Result<&'a (Tensor, Tensor)> {
        match self {
            Self::Tokens(pool) => Ok(pool),
            Self::States(_) | Self::Nothing => Err(Error::internal("a layer has no K and V")),
        }
    }

    /// The states of sequences.
    ///
    /// # Errors
    /// If the layer has none.
    pub fn states(self) -> Result<MutexGuard<'a, StatePool>> {
        match self {
            // Whoever panicked in a forward has failed its sequences; no other state was written.
            Self::States(pool) => Ok(pool.lock().unwrap_or_else(PoisonError::into_inner)),
            Self::Tokens(_) | Self::Nothing => Err(Error::internal("a layer has no states")),
        }
    }
}

/// The accepted nodes of a draft. Node `i` is at position `first + i` of `table`.
#[derive(Debug, Clone, Copy)]
pub struct AcceptedPath<'a> {
    /// The block table of the sequence.
    pub table: &'a BlockTable,
    /// Position of node 0 in `table`.
    pub first: usize,
    /// Accepted nodes, from the root down, hence ascending.
    pub nodes: &'a [usize],
}

/// Shape of a [`KvStore`].
#[derive(Debug, Clone)]
pub struct KvShape {
    /// Heads of each layer that keeps K and V.
    pub layers: Vec<KvHeads>,
    /// Element type of K and V that are not in blocks.
    pub dtype: DType,
    /// Shape of the state of each layer that keeps a state instead.
    pub states: Vec<StateShape>,
    /// Where the pools are, if the model is spread over several GPUs.
    pub gpus: PoolGpus,
}

/// What K and V of attention are kept as. Whatever else a layer keeps of its tokens has the type of [`Auto`](Self::Auto) if
/// this is of blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[allow(missing_docs, reason = "the names of values say it")]
pub enum KvCacheDtype {
    /// What the checkpoint and the device suggest.
    #[default]
    Auto,
    #[cfg_attr(feature = "clap", value(alias = "float32"))]
    F32,
    #[cfg_attr(feature = "clap", value(alias = "bfloat16"))]
    Bf16,
    #[cfg_attr(feature = "clap", value(alias = "float16"))]
    F16,
    /// Blocks of 32 values of a head, of 8 bits each, with an f16 scale.
    #[cfg_attr(feature = "clap", value(name = "q8_0"))]
    Q8_0,
    /// FP8 (E4M3) without scales, on a GPU.
    #[cfg_attr(feature = "clap", value(name = "fp8", alias = "fp8_e4m3"))]
    Fp8,
}

/// What K and V of attention are kept in instead of numbers of a pool's dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvForm {
    /// Such blocks, of which a head has whole ones.
    Blocks(BlockType),
    /// FP8 (E4M3).
    Float8,
}

/// The key/value heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHeads {
    /// Number of heads.
    pub count: usize,
    /// Width of one head.
    pub dim: usize,
    /// Whether V is kept beside K, in heads as wide; otherwise it is a part of K.
    pub has_values: bool,
    /// What K and V of a head are kept in; `None` = in numbers of the dtype of the pool.
    pub form: Option<KvForm>,
}

impl KvHeads {
    /// `count` heads of `dim` values with K and V.
    pub fn new(count: usize, dim: usize) -> Self {
        Self {
            count,
            dim,
            has_values: true,
            form: None,
        }
    }

    /// The dtype of a pool whose floats are in `dtype`.
    fn dtype(self, dtype: DType) -> DType {
        match self.form {
            None => dtype,
            Some(KvForm::Blocks(_)) => DType::U8,
            Some(KvForm::Float8) => DType::F8E4M3,
        }
    }

    /// The elements of such a pool that `values` values of a head are kept in.
    fn elements(self, values: usize) -> usize {
        match self.form {
            Some(KvForm::Blocks(blocks)) => values / blocks.block_size() * blocks.type_size(),
            Some(KvForm::Float8) | None => values,
        }
    }

    /// Width of a head of V.
    fn value_dim(self) -> usize {
        if self.has_values { self.dim } else { 0 }
    }
}

impl KvShape {
    /// The shape of pools for layers without states, on the device of the model.
    pub fn new(layers: Vec<KvHeads>, dtype: DType) -> Self {
        Self {
            layers,
            dtype,
            states: Vec::new(),
            gpus: PoolGpus::default(),
        }
    }

    /// The shape of such pools that are all on the device of the model.
    pub fn on_one_device(self) -> Self {
        Self {
            gpus: PoolGpus::default(),
            ..self
        }
    }

    /// Bytes of K and V for one token over all layers.
    pub fn bytes_per_token(&self) -> usize {
        self.layers.iter().map(|heads| self.bytes_of(heads)).sum()
    }

    /// Bytes of K and V for one token over the layers on the GPU with this index.
    pub fn bytes_per_token_on(&self, gpu: usize) -> usize {
        let layers = self.layers.iter().enumerate();
        let own = layers.filter(|&(layer, _)| self.gpus.of_layer(layer) == gpu);
        own.map(|(_, heads)| self.bytes_of(heads)).sum()
    }

    /// Bytes of a token in a layer.
    fn bytes_of(&self, heads: &KvHeads) -> usize {
        let elements = [heads.dim, heads.value_dim()].map(|dim| heads.elements(dim));
        heads.count * (elements[0] + elements[1]) * heads.dtype(self.dtype).size_in_bytes()
    }

    /// Whether a layer keeps a state of a whole text.
    pub fn is_recurrent(&self) -> bool {
        !self.states.is_empty()
    }

    /// Bytes of the states of one sequence over all layers.
    pub fn bytes_per_state(&self) -> usize {
        self.states.iter().map(StateShape::bytes).sum()
    }

    /// Bytes of the states of one sequence over the layers on the GPU with this index.
    pub fn bytes_per_state_on(&self, gpu: usize) -> usize {
        let states = self.states.iter().enumerate();
        let own = states.filter(|&(state, _)| self.gpus.of_state(state) == gpu);
        own.map(|(_, shape)| shape.bytes()).sum()
    }
}

impl KvStore {
    /// Zeroed tensors for `num_blocks` blocks of `block_size` tokens. On a CPU, what is not used yet takes no
    /// memory.
    ///
    /// # Errors
    /// If the device has no memory for them.
    pub fn new(
        shape: KvShape,
        num_blocks: usize,
        block_size: usize,
        device: &Device,
    ) -> Result<Self> {
        let gpus = &shape.gpus;
        let layers = (shape.layers.iter().enumerate())
            .map(|(layer, heads)| {
                let device = gpus.device(gpus.of_layer(layer), device);
                let slots = num_blocks * block_size;
                let (dtype, elements) = (heads.dtype(shape.dtype), heads.elements(heads.dim));
                let k = zeros((slots, heads.count, elements), dtype, device)?;
                // A GPU cannot allocate an empty buffer.
                let v = if heads.has_values {
                    zeros(k.dims3()?, dtype, device)?
                } else {
                    k.narrow(2, 0, 0)?
                };
                Ok((k, v))
            })
            .collect::<Result<_>>()?;
        let states = (shape.states.into_iter().enumerate())
            .map(|(state, states)| {
                let device = gpus.device(gpus.of_state(state), device);
                Ok(Mutex::new(StatePool::on(states, shape.dtype, device)?))
            })
            .collect::<Result<_>>()?;
        // As with weights: zeros written late would overwrite keys.
        for device in gpus.devices.iter().chain([device]) {
            device.synchronize()?;
        }
        Ok(Self {
            layers,
            states,
            block_size,
            num_slots: num_blocks * block_size,
        })
    }

    /// Number of slots in the pool.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// The pool at `place`.
    ///
    /// # Errors
    /// If there is no pool at `place`.
    pub fn pool(&self, place: PoolPlace) -> Result<LayerPool<'_>> {
        let pool = match place {
            PoolPlace::Tokens(i) => self.layers.get(i).map(LayerPool::Tokens),
            PoolPlace::States(i) => self.states.get(i).map(LayerPool::States),
            PoolPlace::Nothing => Some(LayerPool::Nothing),
        };
        pool.ok_or_else(|| Error::internal("the pool has too few layers"))
    }

    /// Makes the states ready for a forward with these rows: see [`StatePool::prepare`].
    ///
    /// # Errors
    /// Returns the errors of [`StatePool::prepare`].
    pub fn prepare_states(&self, rows: &[StateRows]) -> Result<()> {
        for pool in &self.states {
            LayerPool::States(pool).states()?.prepare(rows)?;
        }
        Ok(())
    }

    /// Moves K and V of accepted nodes to the positions of their depths: the first to that of node
    /// 0, and so on. The caller truncates what comes after them. For a draft without branches there
    /// is nothing to move.
    ///
    /// # Errors
    /// If the device fails; the pool's contents at these positions are then not specified.
    pub fn commit<'a>(&mut self, paths: impl IntoIterator<Item = AcceptedPath<'a>>) -> Result<()> {
        let mut moves = Vec::new();
        for path in paths {
            let slot = |node| path.table.slot(path.first + node, self.block_size);
            let nodes = path.nodes.iter().enumerate();
            let moved = nodes.filter(|&(depth, &node)| node != depth);
            // A node's index is at least its depth, so no move overwrites what a later one reads.
            moves.extend(moved.map(|(depth, &node)| (slot(node), slot(depth))));
        }
        if moves.is_empty() {
            return Ok(());
        }
        let moves = KvMoves::new(moves, self.num_slots())?;
        let is_there =
            |a: &(Tensor, Tensor), b: &(Tensor, Tensor)| a.0.device().same_device(b.0.device());
        for layers in self.layers.chunk_by(is_there) {
            let pools = layers.iter().flat_map(|(k, v)| [k, v]);
            let pools: Vec<_> = pools.filter(|pool| pool.elem_count() > 0).collect();
            kv_move(&pools, &moves)?;
        }
        Ok(())
    }
}

/// A tensor of zeros. On a CPU it is of pages that the system gives as zeros when they are first touched:
/// candle fills those of halves, whose zero the allocator does not know.
fn zeros(
    dims: (usize, usize, usize),
    dtype: DType,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let bits = || vec![0u16; dims.0 * dims.1 * dims.2];
    match (device, dtype) {
        (Device::Cpu, DType::F16) => {
            Tensor::from_vec(bits().reinterpret_into::<f16>(), dims, device)
        }
        (Device::Cpu, DType::BF16) => {
            Tensor::from_vec(bits().reinterpret_into::<bf16>(), dims, device)
        }
        _ => Tensor::zeros(dims, dtype, device),
    }
}
