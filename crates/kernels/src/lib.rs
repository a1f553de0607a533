//! Kernels: one file or folder per op, which holds its CPU and its CUDA side.
//!
//! Every kernel has a fixed order of additions per row, independent of the other rows in the call and
//! of the number of threads. So batched and single forwards agree bit for bit, and therefore so do
//! speculative and plain decoding. On a GPU, products of more than [`EXACT_ROWS`] rows and the attention of
//! prompts use faster kernels with other orders of additions, unless batch invariance is requested.
//!
//! On the CPU each op runs in a `tracing` span of level `trace`, named after its part of a step: `matmul`,
//! `attention`, `norm`, `kv_write` (with rope) and `activation`; `wait` is the time within them in which the
//! calling thread waits for others. `benches/step` adds them up. A span that nobody records costs one
//! comparison.

#![warn(clippy::undocumented_unsafe_blocks)]

mod bandwidth;
pub mod cpu;
mod delta_net;
pub mod dense;
mod device;
mod experts;
pub mod float;
mod forward;
pub mod glu;
#[cfg(feature = "cuda")]
mod gpu;
mod gpus;
pub mod graph;
pub mod kv_move;
pub mod kv_write;
mod latent;
mod lora;
mod mamba;
pub mod matmul;
mod mix;
pub mod norm;
pub mod paged_attention;
mod pair_product;
pub mod parallel;
mod pick;
mod pool_rows;
mod q8_blocks;
pub mod quant;
mod recurrent;
pub mod rope;
mod rope_attention;
pub mod rope_kv_write;
pub mod sample;
mod short_conv;
mod simd;
mod slots;
mod span;
mod spread;
mod states;
mod storage;
mod widen;
mod writes;

/// Whether this program has the CUDA kernels.
pub const HAS_CUDA: bool = cfg!(feature = "cuda");

/// Maximum number of rows of a forward in which a row on a GPU has the bits that it has alone, with weights for
/// which there are kernels and without batch invariance. Steps that decode and verify have fewer.
pub const EXACT_ROWS: usize = 256;

pub use bandwidth::read_bandwidth;
pub use delta_net::{DeltaShape, DeltaWeights, delta_net};
pub use device::{device, device_memory, keep_freed_memory};
pub use experts::{
    ChosenGroups, DeviceExperts, ExpertChoice, ExpertWeights, has_expert_gpu_kernel,
};
pub use forward::{
    ForwardLayer, ForwardLinear, ForwardModel, ForwardPlan, ForwardRows, ForwardWeight,
    MAX_FORWARD_ROWS,
};
pub use glu::{Activation, Xielu, glu, sigmoid_gate};
pub use gpus::{copy_to, devices, wait_for};
pub use kv_move::{KvMoves, kv_move};
pub use kv_write::{kv_write, kv_write_to};
pub use latent::{DeviceLatent, LatentRows, LatentShape, LatentWeights, norm_part};
pub use lora::{DeviceLora, LoraPair, LoraPart, LoraRows, RowsOfLora};
pub use mamba::{MambaShape, MambaWeights, mamba};
pub use mix::mix;
pub use norm::{add_layer_norm, add_norm, layer_norm, rms_norm};
pub use paged_attention::{
    AttentionBatch, AttentionParams, AttentionTables, FLOAT8_HEAD_DIM_STEP, GPU_HEAD_DIM_STEP,
    MAX_GPU_HEAD_DIM, MAX_GPU_HEADS_PER_KV_HEAD, MAX_GPU_LATENT_KEY, MAX_GPU_LATENT_RANK,
    TableCapacity, latent_group, paged_attention,
};
pub use pair_product::{Factor, pair_product};
pub use parallel::{default_threads, max_threads, set_threads, threads};
pub use pick::pick_rows;
pub use pool_rows::{PoolRows, read_pool_rows, write_pool_rows};
pub use recurrent::{MAX_GPU_STATE_ROWS, RecurrentVectors, StateBatch, StateCapacity, StateTables};
pub use rope::{HeadNorms, rope};
pub use rope_attention::rope_attention;
pub use rope_kv_write::{Pools, ValueHeads, ValueNorm, rope_kv_write, rope_queries};
pub use short_conv::{ConvWeights, short_conv, short_conv_write};
pub use slots::Slots;
pub use span::Span;
pub use spread::spread;
pub use states::{KeptState, MAX_GPU_STATES, StatePool, StateRows, StateShape, StateStart};
pub use widen::{widen_to, widened};
pub use writes::{SentWrites, Writes};
