//! Values in f32, as logits are. candle's kernels for it take one value a thread, which for the logits of 64 rows took
//! five times as long as the memory needs.

use candle_core::{DType, Result, Tensor};

/// `x` in f32, contiguous.
///
/// # Errors
/// If the device fails.
pub fn widened(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.dtype() != DType::F32 && cuda::takes(x) {
        return cuda::widened(x);
    }
    x.to_dtype(DType::F32)?.contiguous()
}

/// Writes the values of `x`, which has no gradient, in f32 to the first rows of `to`, which is contiguous.
///
/// # Errors
/// If `to` is not in f32, has no room or rows of another shape; or if the device fails.
pub fn widen_to(to: &Tensor, x: &Tensor) -> Result<()> {
    let fits = to.dtype() == DType::F32
        && to.is_contiguous()
        && to.dims().get(1..) == x.dims().get(1..)
        && x.dim(0)? <= to.dim(0)?;
    if !fits {
        candle_core::bail!("widen: {x:?} does not fit {to:?}");
    }
    #[cfg(feature = "cuda")]
    if cuda::takes(x) {
        return cuda::launch(x, to);
    }
    to.slice_set(&x.to_dtype(DType::F32)?.contiguous()?, 0, 0)
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use candle_core::{DType, Result, Tensor};

    const THREADS: usize = 256;
    /// Values of a thread.
    const VALUES: usize = 8;

    /// Whether there is a kernel for `x`.
    pub fn takes(x: &Tensor) -> bool {
        x.device().is_cuda()
            && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && x.is_contiguous()
            && !x.track_op()
            && (1..=i32::MAX as usize).contains(&x.elem_count())
    }

    /// `x` in new memory, which a graph does not overwrite.
    pub fn widened(x: &Tensor) -> Result<Tensor> {
        let device = x.device().as_cuda_device()?;
        let out = gpu::allocate(device, DType::F32, x.elem_count())?;
        launch(x, &out)?;
        out.reshape(x.shape())
    }

    /// Writes `x`, which the kernel takes, to the first elements of `to`, which are as many or more.
    pub fn launch(x: &Tensor, to: &Tensor) -> Result<()> {
        let (device, count) = (x.device().as_cuda_device()?, x.elem_count());
        let kernel = format!("widen_{}", gpu::suffix(x.dtype()));
        let kernel = gpu::function(device, "widen", gpu::WIDEN, &kernel)?;
        let launch = kernel.launch().tensor(x)?.tensor(to)?.int(count);
        let grid = gpu::grid((count.div_ceil(THREADS * VALUES), 1, 1), THREADS, 0);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(grid) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn rows_are_widened_and_written_before_others() {
        let x = Tensor::new(&[[1f32, -2.5], [3., 0.5]], &Device::Cpu).unwrap();
        let narrow = x.to_dtype(DType::BF16).unwrap();
        assert_eq!(
            widened(&narrow).unwrap().to_vec2::<f32>().unwrap(),
            [[1., -2.5], [3., 0.5]]
        );
        let to = Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap();
        widen_to(&to, &narrow).unwrap();
        let want = [[1., -2.5], [3., 0.5], [1., 1.]];
        assert_eq!(to.to_vec2::<f32>().unwrap(), want);
        assert!(
            widen_to(
                &to,
                &Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap()
            )
            .is_err()
        );
        assert!(
            widen_to(
                &to,
                &Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap()
            )
            .is_err()
        );
        assert!(widen_to(&narrow, &x).is_err());
    }
}
