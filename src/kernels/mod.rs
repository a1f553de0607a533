//! Kernels: one file an op, with its CPU side and its place for a CUDA side.
//!
//! Every kernel here keeps one order of additions for a row, whatever other rows are in the call
//! and however many threads share it. That is what makes batched and single forwards agree bit for
//! bit, and with them speculative and plain decoding.

pub mod clock;
pub mod cpu;
pub mod dense;
mod device;
#[cfg(feature = "cuda")]
mod gpu;
pub mod graph;
pub mod kv_write;
pub mod norm;
pub mod paged_attention;
pub(crate) mod parallel;
pub mod quant;
pub mod rope;
pub mod rope_kv_write;
pub mod sample;
pub mod swiglu;

pub(crate) use crate::float;
pub use device::{device, device_memory};
pub use kv_write::kv_write;
pub use norm::add_norm;
pub use paged_attention::{Room, Rows, Segment, Tables, paged_attention};
pub use parallel::{default_threads, set_threads, threads};
pub use rope::{HeadNorms, rope};
pub use rope_kv_write::{Pools, rope_kv_write};
pub use swiglu::swiglu;

use candle_core::{Layout, Result, WithDType};

/// The elements of a contiguous CPU tensor, for op `op`.
fn contiguous<'a, T: WithDType>(
    op: &str,
    storage: &'a candle_core::CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("{op}: the tensor must be contiguous, got {layout:?}"),
    }
}
