//! Kernels: one file an op, with its CPU side and its place for a CUDA side.
//!
//! Every kernel here keeps one order of additions for a row, whatever other rows are in the call
//! and however many threads share it. That is what makes batched and single forwards agree bit for
//! bit, and with them speculative and plain decoding. On a GPU products of more than 16 rows and the
//! prompts' attention go to faster kernels with other orders, unless they are told to be batch-invariant.

pub mod clock;
pub mod cpu;
pub mod dense;
mod device;
#[cfg(feature = "cuda")]
mod gpu;
pub mod graph;
pub mod kv_move;
pub mod kv_write;
pub mod norm;
pub mod paged_attention;
pub(crate) mod parallel;
pub mod quant;
pub mod rope;
pub mod rope_kv_write;
pub mod sample;
mod slots;
mod span;
mod storage;
pub mod swiglu;

pub(crate) use crate::float;
pub use device::{device, device_memory};
pub use kv_move::{KvMoves, kv_move};
pub use kv_write::kv_write;
pub use norm::add_norm;
pub use paged_attention::{AttentionBatch, TableCapacity, Tables, paged_attention};
pub use parallel::{default_threads, set_threads, threads};
pub use rope::{HeadNorms, rope};
pub use rope_kv_write::{Pools, rope_kv_write};
pub use slots::Slots;
pub use span::Span;
pub use swiglu::swiglu;
