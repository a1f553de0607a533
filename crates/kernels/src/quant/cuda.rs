//! Launches the kernels for quantized weights.

use super::super::gpu;
use super::device_tiles::{DeviceQuantMatrix, UNIT_INPUTS};
use crate::gpu::{Division, FEW_ROWS, STRIP, TILE};
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{CudaDevice, DType, Result, Tensor};
use std::ops::Range;

/// Units per block that dequantizes.
const DEQUANTIZING_WARPS: usize = 8;

/// The format of a weight in the names of kernels.
fn format(matrix: &DeviceQuantMatrix) -> String {
    matrix.kind().to_string().to_ascii_lowercase()
}

/// The kernel `before_FORMAT_after` of the format of `matrix`.
fn kernel(
    device: &CudaDevice,
    matrix: &DeviceQuantMatrix,
    [before, after]: [&str; 2],
) -> Result<gpu::Kernel> {
    let format = format(matrix);
    let name = format!("{before}_{format}_{after}");
    gpu::function(device, &format, matrix.layout.format.ptx, &name)
}

/// Bytes of the sums of a strip and a tile of rows; as in `product.cuh`.
const SUM_BYTES: usize = STRIP * TILE * size_of::<f32>();

/// Weights of a launch, at most; as in `product.cuh`.
const MAX_WEIGHTS: usize = 3;

/// Formats whose weights may share a launch, if those of the first come first: of q, k and v in common files.
const MIXED: [[&str; 2]; 2] = [["q4_k", "q6_k"], ["q5_k", "q6_k"]];

/// Whether these weights may share a launch for `rows` rows: all have the same number of warps, and one format or two that
/// have kernels together.
fn may_share(weights: &[&DeviceQuantMatrix], rows: usize) -> bool {
    let runs: Vec<_> = weights.chunk_by(|a, b| a.kind() == b.kind()).collect();
    let outputs = weights.iter().map(|weight| weight.outputs);
    let has_same_warps = outputs
        .clone()
        .all(|n| gpu::warps(n) == gpu::warps(weights[0].outputs));
    let has_kernels = match runs[..] {
        [_] => true,
        [first, second] => {
            let formats = [first, second].map(|run| format(run[0]));
            MIXED.iter().any(|two| formats == *two) && Shape::of(rows, outputs).is_none()
        }
        _ => false,
    };
    weights.len() <= MAX_WEIGHTS && has_same_warps && has_kernels
}

/// See [`matmul_quantized`](super::matmul_quantized); inputs match. Consecutive weights share a launch if they can.
pub(super) fn product(weights: &[&DeviceQuantMatrix], x: &Tensor) -> Result<Tensor> {
    let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
    let rows = x.dim(0)?;
    let width = weights.iter().map(|weight| weight.outputs).sum();
    if !matches!(dtype, DType::F16 | DType::BF16) {
        candle_core::bail!("quant-matmul: no kernel for {x:?}");
    }
    let y = gpu::output(device, dtype, (rows, width))?;
    let (mut column, mut left) = (0, weights);
    while !left.is_empty() {
        let may_share = |count: &usize| may_share(&left[..*count], rows);
        let count = (2..=left.len()).take_while(may_share).last().unwrap_or(1);
        let (now, later) = left.split_at(count);
        launch_product(device, now, x, (&y, width, column))?;
        column += now.iter().map(|w| w.outputs).sum::<usize>();
        left = later;
    }
    Ok(y)
}

/// Launches the product with weights that [`may_share`] a launch, whose outputs begin at `column` of `y`, `[rows, width]`.
fn launch_product(
    device: &CudaDevice,
    weights: &[&DeviceQuantMatrix],
    x: &Tensor,
    (y, width, column): (&Tensor, usize, usize),
) -> Result<()> {
    let (rows, first) = (x.dim(0)?, weights[0]);
    let outputs = weights.iter().map(|weight| weight.outputs);
    let of_first = weights.iter().take_while(|w| w.kind() == first.kind());
    let (count, second) = of_first.fold((0, column), |(n, at), w| (n + 1, at + w.outputs));
    let other = weights.get(count);
    let of_kind = |kind: &str| {
        let after = format!("{kind}_{}", gpu::suffix(x.dtype()));
        let Some(other) = other else {
            return kernel(device, first, ["product", &after]);
        };
        let name = format!("product_{}_{}_{after}", format(first), format(other));
        gpu::function(device, "mixed", gpu::MIXED, &name)
    };
    let shape = Shape::of(rows, outputs.clone());
    let (kernel, grid) = if let Some(shape) = &shape {
        let grid = shape.grid(rows, outputs, first.layout.stage_bytes())?;
        let kernel = of_kind(shape.name)?;
        (kernel.with_shared(grid.shared_mem_bytes as usize)?, grid)
    } else {
        let few = Division::new(rows, outputs)?;
        (of_kind(&format!("{}_{}", few.tiles, few.warps))?, few.grid)
    };
    let mut launch = kernel.launch();
    for place in 0..MAX_WEIGHTS {
        launch = launch.optional(weights.get(place).map(|weight| &weight.tiles))?;
    }
    for place in 0..MAX_WEIGHTS {
        launch = launch.int(weights.get(place).map_or(0, |weight| weight.outputs));
    }
    let launch = launch.tensor(x)?.tensor(y)?.int(first.inputs).int(rows);
    let mut launch = launch.int(width).int(column);
    if shape.is_some() {
        launch = launch.int(gpu::warps(first.outputs));
    } else if other.is_some() {
        launch = launch.int(second);
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(grid) }
}

/// Bytes of shared memory for the rings of so many warps that share a strip, and their units in `product.cuh`.
fn ring_bytes(warps: usize, unit: usize) -> usize {
    const MAX_STATIC_SHARED: usize = 48 << 10;
    const MAX_STAGES: usize = 4;
    let stages = MAX_STAGES.min(MAX_STATIC_SHARED / (warps * unit));
    stages * warps * unit
}

/// See [`gated_quantized`](super::gated_quantized); rows are few, the weights of one format and shape, and inputs match.
pub(super) fn gated_product(
    [gate, up]: [&DeviceQuantMatrix; 2],
    x: &Tensor,
    activation: usize,
) -> Result<Tensor> {
    let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
    let (rows, outputs, unit) = (x.dim(0)?, gate.outputs, gate.layout.stage_bytes());
    let few = Division::new(rows, [outputs])?;
    let is_low = Shape::of(rows, [outputs].into_iter()).is_some();
    let (kind, grid) = if is_low {
        // Of each weight a block has half of its strips.
        let grid = Shape::LOW.grid(rows, [2 * outputs].into_iter(), unit)?;
        (Shape::LOW.name.to_owned(), grid)
    } else {
        let shared = 2 * ring_bytes(few.warps, unit);
        let (_, blocks, _) = few.grid.grid_dim;
        let grid = gpu::grid((1, blocks as usize, 1), 2 * few.warps * 32, shared);
        (format!("{}_{}", few.tiles, few.warps), grid)
    };
    let after = format!("{kind}_{}", gpu::suffix(dtype));
    let kernel = kernel(device, gate, ["gated", &after])?;
    let kernel = kernel.with_shared(grid.shared_mem_bytes as usize)?;
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(&gate.tiles)?.tensor(&up.tiles)?;
    let launch = launch.tensor(x)?.tensor(&y)?.int(outputs).int(gate.inputs);
    let mut launch = launch.int(rows).int(activation);
    if is_low {
        launch = launch.int(few.warps);
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(grid)? };
    Ok(y)
}

/// Multiplies groups of rows with weights like `like`, which are at `addresses`. `y` gets the bits that [`product`] gives
/// its rows.
pub(crate) fn multiply_groups(
    like: &DeviceQuantMatrix,
    addresses: &Tensor,
    groups: &gpu::Groups<'_>,
    x: &Tensor,
    y: &Tensor,
) -> Result<()> {
    let (device, outputs) = (x.device().as_cuda_device()?, like.outputs);
    let (warps, suffix) = (gpu::warps(outputs), gpu::suffix(groups.dtype));
    let is_few = groups.rows <= TILE;
    let (kind, grid) = if is_few {
        let few = Division::new(groups.rows, [outputs])?;
        (warps.to_string(), few.grid)
    } else {
        let unit = like.layout.stage_bytes();
        let grid = Shape::LARGE.grid(groups.rows, [outputs].into_iter(), unit)?;
        ("large".to_owned(), grid)
    };
    let kernel = kernel(device, like, ["experts", &format!("{kind}_{suffix}")])?;
    let kernel = kernel.with_shared(grid.shared_mem_bytes as usize)?;
    let launch = kernel.launch().tensor(addresses)?.tensor(groups.table)?;
    let launch = launch.tensor(x)?.tensor(y)?;
    let mut launch = launch.int(outputs).int(like.inputs);
    if !is_few {
        launch = launch.int(warps);
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; groups have
    // rows of `x`, and numbers of weights.
    unsafe { launch.run(groups.grid(grid)) }
}

/// The size of a block of `many.cuh`.
struct Shape {
    name: &'static str,
    strips: usize,
    rows: usize,
    /// Groups of a warp for each strip.
    groups: usize,
    stages: usize,
}

impl Shape {
    const LOW: Self = Self::new("low", (4, 16), 4, 3);
    const SMALL: Self = Self::new("small", (2, 32), 8, 2);
    const MEDIUM: Self = Self::new("medium", (4, 32), 4, 3);
    const LARGE: Self = Self::new("large", (8, 64), 2, 3);
    /// With fewer blocks than this, a large GPU has too little to do.
    const ENOUGH: usize = 96;

    const fn new(
        name: &'static str,
        (strips, rows): (usize, usize),
        groups: usize,
        stages: usize,
    ) -> Self {
        Self {
            name,
            strips,
            rows,
            groups,
            stages,
        }
    }

    /// The shape for a product of `rows` rows with weights of so many outputs each, which have the same number of warps;
    /// `None` if it has a [`Division`] instead. Of more than [`FEW_ROWS`] rows, the largest that leaves enough blocks. All
    /// give the same bits.
    fn of(rows: usize, outputs: impl Iterator<Item = usize> + Clone) -> Option<Self> {
        if rows <= FEW_ROWS {
            // Where many blocks would read the same activations.
            let many = outputs.clone().next().is_some_and(|n| gpu::warps(n) == 8);
            return (rows > TILE && many).then_some(Self::LOW);
        }
        let shape = [Self::LARGE, Self::MEDIUM].into_iter().find(|shape| {
            let (groups, blocks) = shape.blocks(rows, outputs.clone());
            groups * blocks >= Self::ENOUGH
        });
        shape.or(Some(Self::SMALL))
    }

    /// Numbers of blocks for `rows` rows, and for weights of so many outputs each.
    fn blocks(&self, rows: usize, outputs: impl Iterator<Item = usize>) -> (usize, usize) {
        let blocks = outputs.map(|outputs| outputs.div_ceil(self.strips * STRIP));
        (rows.div_ceil(self.rows), blocks.sum())
    }

    /// The grid, for units of `unit` bytes. Groups of rows come first, so that blocks that read the same weights run at
    /// the same time.
    ///
    /// # Errors
    /// If the weights have too many outputs for a grid.
    fn grid(
        &self,
        rows: usize,
        outputs: impl Iterator<Item = usize>,
        unit: usize,
    ) -> Result<LaunchConfig> {
        let (groups, blocks) = self.blocks(rows, outputs);
        gpu::check_blocks(blocks)?;
        let activations = self.rows * UNIT_INPUTS * size_of::<u16>();
        let group = (activations + self.strips * unit).max(2 * self.strips * SUM_BYTES);
        let shared = self.stages * self.groups * group;
        let threads = self.strips * self.groups * 32;
        Ok(gpu::grid((groups, blocks, 1), threads, shared))
    }
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
    if let Some(ids) = ids.filter(|ids| ids.dtype() != DType::U32) {
        candle_core::bail!("dequantize: {ids:?} are no ids");
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
    let of_row = units.div_ceil(DEQUANTIZING_WARPS);
    gpu::check_blocks(of_row)?;
    let grid = gpu::grid((blocks, of_row, 1), DEQUANTIZING_WARPS * 32, 0);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; ids
    // beyond the outputs are left out.
    unsafe { launch.run(grid)? };
    Ok(y)
}
