//! Helpers that the CUDA sides of the ops share. The kernels themselves are in `.cu` files beside the
//! ops.

use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, LaunchArgs, LaunchConfig,
};
use candle_core::{CudaDevice, DType, Result};
pub(super) use candle_core::{CudaStorage, Storage};
use std::sync::Arc;

/// The types that an op's CUDA side needs.
pub(super) use candle_core::backend::BackendStorage;
pub(super) use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, PushKernelArg};
pub(super) use candle_core::cuda_backend::{CudaDType, WrapErr};
pub(super) use candle_core::{Layout, builder_arg};

/// The PTX of each `.cu` file: `NORM`, `SAMPLE` and so on.
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}
pub(super) use ptx::*;

/// Runs `$body` with `$t` as the type of `$dtype`.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $t:ident => $body:block) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => candle_core::bail!("{}: no CUDA kernel for {other:?}", $op),
        }
    };
}
pub(super) use with_float;

/// The name of a dtype in kernel names.
pub(super) fn suffix(dtype: DType) -> &'static str {
    dtype.as_str()
}

/// Kernel `name` of the module called `module`, whose PTX is `ptx`.
pub(super) fn function(device: &CudaDevice, module: &str, ptx: &str, name: &str) -> Result<Kernel> {
    let module = format!("foretoken-{module}");
    let function = device.get_or_load_custom_func(name, &module, ptx)?;
    Ok(Kernel {
        function: function.into_cuda_function(),
        stream: device.cuda_stream(),
    })
}

/// A kernel, and the stream that it is launched on.
pub(super) struct Kernel {
    pub function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Kernel {
    /// Starts a launch, to which arguments are added one by one.
    pub fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.function)
    }
}

/// The elements of a contiguous tensor, for op `op`.
pub(super) fn contiguous<'a, T: CudaDType>(
    op: &str,
    storage: &'a CudaStorage,
    layout: &Layout,
) -> Result<CudaView<'a, T>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(storage.as_cuda_slice::<T>()?.slice(start..end)),
        None => candle_core::bail!("{op}: the tensor must be contiguous, got {layout:?}"),
    }
}

/// The elements of a contiguous tensor with this storage and layout, for op `op`.
pub(super) fn view<'a, T: CudaDType>(
    op: &str,
    storage: &'a Storage,
    layout: &Layout,
) -> Result<CudaView<'a, T>> {
    match storage {
        Storage::Cuda(storage) => contiguous(op, storage, layout),
        _ => candle_core::bail!("{op}: a tensor is not on the GPU"),
    }
}

/// A grid of `blocks` blocks of `threads` threads, each with `shared` bytes of shared memory.
pub(super) fn grid(blocks: (usize, usize, usize), threads: usize, shared: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks.0 as u32, blocks.1 as u32, blocks.2 as u32),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: shared as u32,
    }
}
