//! Rows of a tensor. Before each of its lookups, candle sends sizes to a GPU, and recorded ones allocate their output.

use candle_core::{Result, Tensor};

/// The rows `ids`, `[n]` u32, of `all`: `[n, ...]`. On a GPU, ids are not checked: in the place of one that does not exist
/// may be the last row.
///
/// # Errors
/// If an id does not exist on the CPU, or the device fails.
pub fn pick_rows(all: &Tensor, ids: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if cuda::takes(all, ids) {
        return cuda::launch(all, ids);
    }
    all.index_select(ids, 0)
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use candle_core::{DType, Result, Tensor};

    const THREADS: usize = 256;

    /// Whether there is a kernel for these rows, of which it makes no gradient.
    pub fn takes(all: &Tensor, ids: &Tensor) -> bool {
        all.device().is_cuda()
            && all.device().same_device(ids.device())
            && matches!(all.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && (ids.dtype(), ids.rank()) == (DType::U32, 1)
            && all.is_contiguous()
            && ids.is_contiguous()
            && !all.track_op()
            && all.rank() > 0
            && all.elem_count() > 0
            && ids.elem_count() > 0
    }

    pub fn launch(all: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (device, dtype) = (all.device().as_cuda_device()?, all.dtype());
        let (count, rows) = (all.dim(0)?, ids.elem_count());
        let kernel = format!("pick_rows_{}", gpu::suffix(dtype));
        let kernel = gpu::function(device, "pick", gpu::PICK, &kernel)?;
        let dims = [&[rows][..], &all.dims()[1..]].concat();
        let y = gpu::output(device, dtype, dims)?;
        let launch = kernel.launch().tensor(all)?.tensor(ids)?.tensor(&y)?;
        let launch = launch.int(all.elem_count() / count).int(count);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(gpu::grid((rows, 1, 1), THREADS, 0))? };
        Ok(y)
    }
}
