//! Launches the kernels for dense weights on CUDA.

use super::super::gpu;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{DType, Result, Tensor};

/// Inputs that a warp reads at a time.
const STEP: usize = 32;

/// Whether there is a kernel for `inputs` inputs in `dtype`.
pub(super) fn takes(inputs: usize, dtype: DType) -> bool {
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
    let (kernel, grid) = if rows <= gpu::FEW_ROWS {
        let few = gpu::Division::new(rows, [outputs])?;
        let name = format!("gemv{}_{}_{}", few.tiles, few.warps, gpu::suffix(dtype));
        (gpu::function(device, "gemv", gpu::GEMV, &name)?, few.grid)
    } else {
        let block = Block::of(rows, outputs);
        let name = format!("tiles_{}_{}", block.name, gpu::suffix(dtype));
        let kernel = gpu::function(device, "tiles", gpu::TILES, &name)?;
        (
            kernel.with_shared(block.shared())?,
            block.grid(rows, outputs)?,
        )
    };
    let y = gpu::output(device, dtype, (rows, outputs))?;
    let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(&y)?;
    let mut launch = launch.int(outputs).int(inputs).int(rows);
    if rows > gpu::FEW_ROWS {
        launch = launch.int(gpu::warps(outputs));
    }
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(grid)? };
    Ok(y)
}

/// The size of a block of `tiles.cu`, where it is called `Shape`.
struct Block {
    name: &'static str,
    outputs: usize,
    rows: usize,
    warps: usize,
    stages: usize,
}

impl Block {
    const SMALL: Self = Self::new("small", (32, 64), 4, 6);
    const MEDIUM: Self = Self::new("medium", (64, 64), 4, 5);
    const LARGE: Self = Self::new("large", (128, 128), 8, 3);
    /// With fewer blocks than this, a large GPU has too little to do.
    const ENOUGH: usize = 64;

    const fn new(
        name: &'static str,
        (outputs, rows): (usize, usize),
        warps: usize,
        stages: usize,
    ) -> Self {
        Self {
            name,
            outputs,
            rows,
            warps,
            stages,
        }
    }

    /// The largest block that leaves enough of them. All give the same bits.
    fn of(rows: usize, outputs: usize) -> Self {
        let is_enough = |block: &Self| {
            outputs.div_ceil(block.outputs) * rows.div_ceil(block.rows) >= Self::ENOUGH
        };
        if rows > Self::MEDIUM.rows && is_enough(&Self::LARGE) {
            Self::LARGE
        } else if is_enough(&Self::MEDIUM) {
            Self::MEDIUM
        } else {
            Self::SMALL
        }
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        /// Steps that are copied together.
        const TOGETHER: usize = 2;
        self.stages * TOGETHER * (self.outputs + self.rows) * STEP * size_of::<u16>()
    }

    fn grid(&self, rows: usize, outputs: usize) -> Result<LaunchConfig> {
        let blocks = outputs.div_ceil(self.outputs);
        gpu::check_blocks(blocks)?;
        let grid = (rows.div_ceil(self.rows), blocks, 1);
        Ok(gpu::grid(grid, self.warps * 32, self.shared()))
    }
}
