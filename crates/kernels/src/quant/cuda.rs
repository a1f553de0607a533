//! Launches the kernels for quantized weights.

use super::super::gpu;
use super::device_tiles::{DeviceQuantMatrix, UNIT_INPUTS};
use crate::gpu::{Division, FEW_ROWS, MAX_GROUPS, STRIP};
use candle_core::{CudaDevice, DType, Result, Tensor};
use std::ops::Range;

/// Units of each strip that a warp has on their way or in use, of many rows.
const STAGES: usize = 2;
/// Units per block that dequantizes.
const DEQUANTIZING_WARPS: usize = 8;

/// The kernel `before_FORMAT_after` of the format of `matrix`.
fn kernel(
    device: &CudaDevice,
    matrix: &DeviceQuantMatrix,
    [before, after]: [&str; 2],
) -> Result<gpu::Kernel> {
    let format = matrix.kind().name().to_ascii_lowercase();
    let name = format!("{before}_{format}_{after}");
    gpu::function(device, &format, matrix.layout.format.ptx, &name)
}

/// Weights of a launch, at most; as in `product.cuh`.
const MAX_WEIGHTS: usize = 3;

/// See [`matmul_quantized`](super::matmul_quantized); inputs match. Consecutive weights of the same format share a
/// launch.
pub(super) fn product(weights: &[&DeviceQuantMatrix], x: &Tensor) -> Result<Tensor> {
    let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
    let rows = x.dim(0)?;
    let width = weights.iter().map(|weight| weight.outputs).sum();
    if !matches!(dtype, DType::F16 | DType::BF16) {
        candle_core::bail!("quant-matmul: no kernel for {x:?}");
    }
    let y = gpu::output(device, dtype, (rows, width))?;
    let mut column = 0;
    let like = |a: &&DeviceQuantMatrix, b: &&DeviceQuantMatrix| {
        a.kind() == b.kind() && gpu::warps(a.outputs) == gpu::warps(b.outputs)
    };
    let runs = weights.chunk_by(like);
    for weights in runs.flat_map(|run| run.chunks(MAX_WEIGHTS)) {
        launch_product(device, weights, x, (&y, width, column))?;
        column += weights.iter().map(|w| w.outputs).sum::<usize>();
    }
    Ok(y)
}

/// Launches the product with up to [`MAX_WEIGHTS`] weights of one format and number of warps, whose outputs begin at
/// `column` of `y`, `[rows, width]`.
fn launch_product(
    device: &CudaDevice,
    weights: &[&DeviceQuantMatrix],
    x: &Tensor,
    (y, width, column): (&Tensor, usize, usize),
) -> Result<()> {
    let rows = x.dim(0)?;
    let mut division = Division::new(rows, weights.iter().map(|weight| weight.outputs))?;
    let name = format!(
        "{}_{}_{}",
        division.tiles,
        division.warps,
        gpu::suffix(x.dtype())
    );
    let first = weights[0];
    let mut kernel = kernel(device, first, ["product", &name])?;
    if rows > FEW_ROWS {
        let shared = STAGES * division.warps * division.strips * first.layout.stage_bytes();
        division.grid.shared_mem_bytes = shared as u32;
        kernel = kernel.with_shared(shared)?;
    }
    let mut launch = kernel.launch();
    for place in 0..MAX_WEIGHTS {
        launch = launch.optional(weights.get(place).map(|weight| &weight.tiles))?;
    }
    for place in 0..MAX_WEIGHTS {
        launch = launch.int(weights.get(place).map_or(0, |weight| weight.outputs));
    }
    let launch = launch.tensor(x)?.tensor(y)?.int(first.inputs).int(rows);
    let launch = launch.int(width).int(column);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(division.grid) }
}

/// Rows of a weight in `dtype`, `[n, inputs]`: those of `ids`, `[n]` u32, or without them `outputs`, from a multiple
/// of 16 on.
pub(super) fn dequantize(
    weight: &DeviceQuantMatrix,
    ids: Option<&Tensor>,
    outputs: Range<usize>,
    dtype: DType,
) -> Result<Tensor> {
    let device = weight.tiles.device().as_cuda_device()?;
    let count = match ids {
        Some(ids) => ids.dims1()?,
        None => outputs.len(),
    };
    let blocks = match ids {
        Some(_) => count,
        None => count.div_ceil(STRIP),
    };
    if blocks > MAX_GROUPS || ids.is_some_and(|ids| ids.dtype() != DType::U32) {
        candle_core::bail!("dequantize: no kernel for {blocks} blocks");
    }
    let y = gpu::output(device, dtype, (count, weight.inputs))?;
    if count == 0 {
        return Ok(y);
    }
    let kernel = kernel(device, weight, ["dequantize", gpu::suffix(dtype)])?;
    let launch = kernel
        .launch()
        .tensor(&weight.tiles)?
        .optional(ids)?
        .tensor(&y)?;
    let launch = launch.int(weight.outputs).int(weight.inputs);
    let launch = launch.int(outputs.start).int(count);
    let units = weight.inputs.div_ceil(UNIT_INPUTS);
    let grid = (units.div_ceil(DEQUANTIZING_WARPS), blocks, 1);
    let grid = gpu::grid(grid, DEQUANTIZING_WARPS * 32, 0);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; ids
    // beyond the outputs are left out.
    unsafe { launch.run(grid)? };
    Ok(y)
}
