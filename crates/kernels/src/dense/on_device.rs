//! Launches the kernels for dense weights on CUDA.

use super::super::gpu;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{DType, Result, Tensor};

/// Inputs that a warp reads at a time.
const STEP: usize = 32;

/// Whether there is a kernel for `inputs` inputs in `dtype`.
pub(crate) fn takes(inputs: usize, dtype: DType) -> bool {
    inputs.is_multiple_of(STEP) && matches!(dtype, DType::F16 | DType::BF16)
}

/// `x @ w^T` for `w` `[outputs, inputs]` and `x` `[rows, inputs]`. A row has the same bits for any number
/// of rows.
pub(super) fn product(w: &Tensor, x: &Tensor) -> Result<Tensor> {
    let ((outputs, inputs), (rows, width)) = (w.dims2()?, x.dims2()?);
    if width != inputs || !takes(inputs, w.dtype()) {
        candle_core::bail!("dense-matmul: {x:?} does not match {w:?}");
    }
    let (device, dtype) = (w.device().as_cuda_device()?, w.dtype());
    gpu::expect_dtype("dense-matmul", dtype, [x])?;
    let (kernel, grid, cluster) = if rows <= gpu::FEW_ROWS {
        let few = gpu::Division::new(rows, [outputs])?;
        let name = format!("gemv{}_{}_{}", few.tiles, few.warps, gpu::suffix(dtype));
        let kernel = gpu::function(device, "gemv", gpu::GEMV, &name)?;
        (kernel, few.grid, 1)
    } else {
        let (multiprocessors, shared) = gpu::size(device.cuda_stream().context())?;
        let block = Block::of(rows, shared);
        let name = format!("tiles_{}_{}", block.name, gpu::suffix(dtype));
        let kernel = gpu::function(device, "tiles", gpu::TILES, &name)?;
        let cluster = block.cluster(rows, outputs, multiprocessors);
        (
            kernel.with_shared(block.shared())?,
            block.grid(rows, outputs, cluster)?,
            cluster,
        )
    };
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(&y)?;
    let mut launch = launch.int(outputs).int(inputs).int(rows);
    if rows > gpu::FEW_ROWS {
        launch = launch.int(gpu::warps(outputs));
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run_in_clusters(grid, cluster)? };
    Ok(y)
}

/// See [`gated_on_device`](super::gated_on_device); rows are few. `w` is `[2 * outputs, inputs]`.
pub(super) fn gated_product(w: &Tensor, x: &Tensor, activation: usize) -> Result<Tensor> {
    let ((both, inputs), (rows, width)) = (w.dims2()?, x.dims2()?);
    if width != inputs {
        candle_core::bail!("dense-matmul: {x:?} does not match {w:?}");
    }
    let (device, dtype) = (w.device().as_cuda_device()?, w.dtype());
    gpu::expect_dtype("dense-matmul", dtype, [x])?;
    let (outputs, warps) = (both / 2, gpu::warps(both));
    let tiles = rows.div_ceil(gpu::TILE);
    let name = format!("gated_gemv{tiles}_{warps}_{}", gpu::suffix(dtype));
    let kernel = gpu::function(device, "gemv", gpu::GEMV, &name)?;
    let blocks = outputs.div_ceil(gpu::STRIP);
    gpu::check_blocks(blocks)?;
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(&y)?;
    let launch = launch.int(outputs).int(inputs).int(rows).int(activation);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(gpu::grid((1, blocks, 1), 2 * warps * 32, 0))? };
    Ok(y)
}

/// Multiplies groups of rows with weights `[outputs, inputs]`, which [`takes`] accepts and which are at `addresses`. `y` gets the bits that [`product`] gives its rows.
pub(crate) fn multiply_groups(
    (outputs, inputs): (usize, usize),
    addresses: &Tensor,
    groups: &gpu::Groups<'_>,
    x: &Tensor,
    y: &Tensor,
) -> Result<()> {
    let device = x.device().as_cuda_device()?;
    let (warps, suffix) = (gpu::warps(outputs), gpu::suffix(groups.dtype));
    let is_few = groups.rows <= gpu::TILE;
    let (kernel, grid) = if is_few {
        let few = gpu::Division::new(groups.rows, [outputs])?;
        let name = format!("experts_gemv_{warps}_{suffix}");
        (gpu::function(device, "gemv", gpu::GEMV, &name)?, few.grid)
    } else {
        let (_, shared) = gpu::size(device.cuda_stream().context())?;
        let block = Block::of(groups.rows, shared);
        let name = format!("experts_tiles_{}_{suffix}", block.name);
        let kernel = gpu::function(device, "tiles", gpu::TILES, &name)?;
        let grid = block.grid(groups.rows, outputs, 1)?;
        (kernel.with_shared(block.shared())?, grid)
    };
    let launch = kernel.launch().tensor(addresses)?.tensor(groups.table)?;
    let mut launch = launch.tensor(x)?.tensor(y)?.int(outputs).int(inputs);
    if !is_few {
        launch = launch.int(warps);
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes; groups have
    // rows of `x`, and numbers of weights.
    unsafe { launch.run(groups.grid(grid)) }
}

/// The size of a block of `tiles.cu`, where it is called `Shape`. All give the same bits.
struct Block {
    name: &'static str,
    outputs: usize,
    rows: usize,
    /// Teams, which compute a chain each at the same time.
    teams: usize,
    stages: usize,
}

impl Block {
    const SMALL: Self = Self::new("small", (64, 64), 4, 2);
    const WIDE: Self = Self::new("wide", (128, 64), 4, 4);
    const LARGE: Self = Self::new("large", (128, 128), 2, 5);
    /// Outputs and rows of a warp.
    const WARP: usize = 64;

    const fn new(
        name: &'static str,
        (outputs, rows): (usize, usize),
        teams: usize,
        stages: usize,
    ) -> Self {
        Self {
            name,
            outputs,
            rows,
            teams,
            stages,
        }
    }

    /// The block that reads the fewest activations from the L2 cache, of those that a GPU with so much shared memory for a
    /// block has room for.
    fn of(rows: usize, shared: usize) -> Self {
        let block = if rows > Self::WIDE.rows {
            Self::LARGE
        } else {
            Self::WIDE
        };
        if block.shared() <= shared {
            block
        } else {
            Self::SMALL
        }
    }

    /// The blocks of a cluster, which divide the chains of their outputs: as many as make the launch take the fewest
    /// passes, one after the other.
    fn cluster(&self, rows: usize, outputs: usize, multiprocessors: usize) -> usize {
        let passes = gpu::warps(outputs) / self.teams;
        let tiles = outputs.div_ceil(self.outputs) * rows.div_ceil(self.rows);
        let sizes = (0..=passes.min(gpu::max_cluster()).ilog2()).map(|power| 1usize << power);
        let time = |&blocks: &usize| (tiles * blocks).div_ceil(multiprocessors) * passes / blocks;
        sizes.min_by_key(time).unwrap_or(1)
    }

    /// Bytes of shared memory: the rings or sums of the teams, and the sums of earlier passes.
    fn shared(&self) -> usize {
        let ring = self.stages * (self.outputs + self.rows) * STEP * size_of::<u16>();
        let sums = self.outputs * self.rows * size_of::<f32>();
        self.teams * ring.max(sums) + sums
    }

    fn grid(&self, rows: usize, outputs: usize, cluster: usize) -> Result<LaunchConfig> {
        let blocks = outputs.div_ceil(self.outputs) * cluster;
        gpu::check_blocks(blocks)?;
        let warps = self.teams * (self.outputs / Self::WARP) * (self.rows / Self::WARP);
        let grid = (rows.div_ceil(self.rows), blocks, 1);
        Ok(gpu::grid(grid, warps * 32, self.shared()))
    }
}
