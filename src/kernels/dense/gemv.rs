//! Products of a few rows with a dense weight on CUDA.

use super::super::gpu;
use candle_core::{DType, Result, Tensor};

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

/// Maximum number of rows that take about the time of one.
pub(super) const FEW_ROWS: usize = 2 * TILE;
/// Maximum number of rows that share one pass over the weights; more rows take several passes.
const MAX_ROWS: usize = 8 * TILE;

/// Whether there is a kernel for `inputs` inputs in `dtype`.
pub(super) fn takes(inputs: usize, dtype: DType) -> bool {
    inputs.is_multiple_of(STEP) && matches!(dtype, DType::F16 | DType::BF16)
}

/// `x @ w^T` for `w` `[outputs, inputs]` and `x` `[rows, inputs]`. A row has the same bits for any number
/// of rows.
pub(super) fn gemv(w: &Tensor, x: &Tensor) -> Result<Tensor> {
    let ((outputs, inputs), (rows, width)) = (w.dims2()?, x.dims2()?);
    let tiles = match rows.div_ceil(TILE) {
        0 | 1 => 1,
        2 => 2,
        _ => MAX_ROWS / TILE,
    };
    let groups = rows.div_ceil(tiles * TILE);
    if width != inputs || groups > MAX_GROUPS || !takes(inputs, w.dtype()) {
        candle_core::bail!("gemv: {x:?} does not match {w:?}");
    }
    let (device, dtype) = (w.device().as_cuda_device()?, w.dtype());
    gpu::expect_dtype("gemv", dtype, [x])?;
    let blocks = outputs.div_ceil(OUTPUTS);
    // The order of additions depends on the number of warps, so it must not depend on the rows.
    let warps = if blocks < FULL { 16 } else { 8 };
    let kernel = format!("gemv{tiles}_{warps}_{}", gpu::suffix(dtype));
    let kernel = gpu::function(device, "gemv", gpu::GEMV, &kernel)?;
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(&y)?;
    let launch = launch.int(outputs).int(inputs).int(rows);
    let grid = gpu::grid((blocks, groups.max(1), 1), warps * 32, 0);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(grid)? };
    Ok(y)
}
