//! Products of a few rows with a dense weight on CUDA.

use super::super::gpu;
use candle_core::{DType, Result, Tensor};

/// Inputs that a warp reads at a time.
const STEP: usize = 32;
/// Whether there is a kernel for `inputs` inputs in `dtype`.
pub(super) fn takes(inputs: usize, dtype: DType) -> bool {
    inputs.is_multiple_of(STEP) && matches!(dtype, DType::F16 | DType::BF16)
}

/// `x @ w^T` for `w` `[outputs, inputs]` and `x` `[rows, inputs]`. A row has the same bits for any number
/// of rows.
pub(super) fn gemv(w: &Tensor, x: &Tensor) -> Result<Tensor> {
    let ((outputs, inputs), (rows, width)) = (w.dims2()?, x.dims2()?);
    let few = gpu::FewRows::new(rows, outputs)?;
    if width != inputs || !takes(inputs, w.dtype()) {
        candle_core::bail!("gemv: {x:?} does not match {w:?}");
    }
    let (device, dtype) = (w.device().as_cuda_device()?, w.dtype());
    gpu::expect_dtype("gemv", dtype, [x])?;
    let kernel = format!("gemv{}_{}_{}", few.tiles, few.warps, gpu::suffix(dtype));
    let kernel = gpu::function(device, "gemv", gpu::GEMV, &kernel)?;
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(&y)?;
    let launch = launch.int(outputs).int(inputs).int(rows);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(few.grid)? };
    Ok(y)
}
