//! Products of a few rows with a dense weight on CUDA.

use super::super::gpu;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, builder_arg};
use half::{bf16, f16};

/// Rows per tensor core instruction.
const TILE: usize = 8;
/// Inputs that a warp reads at a time.
const STEP: usize = 32;
/// Outputs per block.
const OUTPUTS: usize = 16;
/// A weight with fewer blocks has more warps in each of them, or it would leave a large GPU without enough
/// loads in flight: two blocks per multiprocessor.
const FULL: usize = 264;
/// Maximum number of groups of rows in a grid.
const MAX_GROUPS: usize = 65_535;

/// `x @ w^T` for `w` `[outputs, inputs]` and `x` `[rows, inputs]`. A row has the same bits for any
/// number of rows.
pub(super) struct Gemv;

impl Gemv {
    /// Maximum number of rows that share one pass over the weights; more rows take several passes.
    pub const MAX_ROWS: usize = 2 * TILE;

    /// Whether there is a kernel for `inputs` inputs in `dtype`.
    pub fn takes(inputs: usize, dtype: DType) -> bool {
        inputs.is_multiple_of(STEP) && matches!(dtype, DType::F16 | DType::BF16)
    }

    fn run<T: CudaDType + DeviceRepr>(
        &self,
        (w, w_layout): (&CudaStorage, &Layout),
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<(CudaStorage, Shape)> {
        let ((outputs, inputs), (rows, width)) =
            (w_layout.shape().dims2()?, x_layout.shape().dims2()?);
        let groups = rows.div_ceil(Self::MAX_ROWS);
        if width != inputs || groups > MAX_GROUPS || !Self::takes(inputs, w.dtype()) {
            candle_core::bail!("gemv: {x_layout:?} does not match {w_layout:?}");
        }
        let device = w.device().clone();
        let tiles = rows.div_ceil(TILE).clamp(1, 2);
        let blocks = outputs.div_ceil(OUTPUTS);
        // The order of additions depends on the number of warps, so it must not depend on the rows.
        let warps = if blocks < FULL { 16 } else { 8 };
        let kernel = format!("gemv{tiles}_{warps}_{}", gpu::suffix(w.dtype()));
        let kernel = gpu::function(&device, "gemv", gpu::GEMV, &kernel)?;
        let w = gpu::contiguous::<T>("gemv", w, w_layout)?;
        let x = gpu::contiguous::<T>("gemv", x, x_layout)?;
        // SAFETY: the kernel writes every element.
        let y = unsafe { device.alloc::<T>(rows * outputs)? };
        let mut args = kernel.builder();
        args.arg(&w).arg(&x).arg(&y);
        builder_arg!(args, outputs as i32, inputs as i32, rows as i32);
        let grid = gpu::grid((blocks, groups.max(1), 1), warps * 32, 0);
        // SAFETY: the arguments match the kernel's parameters, and their buffers have the lengths that it
        // reads and writes.
        unsafe { args.launch(grid) }.w()?;
        let y = CudaStorage::wrap_cuda_slice(y, device);
        Ok((y, (rows, outputs).into()))
    }
}

impl CustomOp2 for Gemv {
    fn name(&self) -> &'static str {
        "gemv"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("gemv: not for the CPU, whose weights have another layout")
    }

    fn cuda_fwd(
        &self,
        w: &CudaStorage,
        w_layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        match w.dtype() {
            DType::F16 => self.run::<f16>((w, w_layout), (x, x_layout)),
            _ => self.run::<bf16>((w, w_layout), (x, x_layout)),
        }
    }
}
