//! Logits over a vocabulary of which an output layer has some ids. On a GPU, a thread of candle's scatter writes a whole row.

use candle_core::{DType, Result, Tensor};

/// `x`, `[rows, outputs]`, in f32 over a vocabulary, `[rows, vocab]`: of each id the value at its place, of `places`, `[vocab]`
/// u32, or minus infinity if that is the number of outputs. In the first rows of `to`, f32, if there is one.
///
/// # Errors
/// If `to` has no room or rows of another length, or the device fails.
pub fn spread(x: &Tensor, places: &Tensor, to: Option<&Tensor>) -> Result<Tensor> {
    let (rows, vocab) = (x.dim(0)?, places.dims1()?);
    let to = match to {
        Some(to) if to.dims2()?.1 == vocab && to.dtype() == DType::F32 && to.is_contiguous() => {
            Some(to.narrow(0, 0, rows)?)
        }
        Some(to) => candle_core::bail!("spread: {rows} rows of {vocab} do not fit {to:?}"),
        None => None,
    };
    #[cfg(feature = "cuda")]
    if cuda::takes(x, places) {
        return cuda::launch(x, places, to);
    }
    let never = Tensor::full(f32::NEG_INFINITY, (rows, 1), x.device())?;
    let all = Tensor::cat(&[&x.to_dtype(DType::F32)?, &never], 1)?.index_select(places, 1)?;
    let Some(to) = to else {
        return Ok(all);
    };
    to.slice_set(&all, 0, 0)?;
    Ok(to)
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use candle_core::{DType, Result, Tensor};

    const THREADS: usize = 256;

    /// Whether there is a kernel for `x`, of which it makes no gradient.
    pub fn takes(x: &Tensor, places: &Tensor) -> bool {
        x.device().is_cuda()
            && x.device().same_device(places.device())
            && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && places.dtype() == DType::U32
            && x.rank() == 2
            && x.is_contiguous()
            && places.is_contiguous()
            && !x.track_op()
            && x.elem_count() > 0
            && places.elem_count() > 0
    }

    pub fn launch(x: &Tensor, places: &Tensor, to: Option<Tensor>) -> Result<Tensor> {
        let ((rows, outputs), vocab) = (x.dims2()?, places.dims1()?);
        let device = x.device().as_cuda_device()?;
        let kernel = format!("spread_{}", gpu::suffix(x.dtype()));
        let kernel = gpu::function(device, "spread", gpu::SPREAD, &kernel)?;
        let out = match to {
            Some(to) => to,
            // A graph does not overwrite it.
            None => gpu::allocate(device, DType::F32, rows * vocab)?.reshape((rows, vocab))?,
        };
        let launch = kernel.launch().tensor(x)?.tensor(places)?.tensor(&out)?;
        let launch = launch.int(outputs).int(vocab);
        let blocks = vocab.div_ceil(THREADS);
        gpu::check_blocks(blocks)?;
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
        unsafe { launch.run(gpu::grid((rows, blocks, 1), THREADS, 0))? };
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn ids_without_an_output_have_no_chance() {
        let cpu = Device::Cpu;
        let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &cpu).unwrap();
        let places = Tensor::new(&[2u32, 1, 0, 2], &cpu).unwrap();
        const NEVER: f32 = f32::NEG_INFINITY;
        let want = [[NEVER, 2., 1., NEVER], [NEVER, 4., 3., NEVER]];
        let narrow = x.to_dtype(DType::BF16).unwrap();
        for x in [&x, &narrow] {
            let all = spread(x, &places, None).unwrap();
            assert_eq!(all.to_vec2::<f32>().unwrap(), want);
        }
        let to = Tensor::zeros((3, 4), DType::F32, &cpu).unwrap();
        let written = spread(&x, &places, Some(&to)).unwrap();
        assert_eq!(written.to_vec2::<f32>().unwrap(), want);
        assert_eq!(to.to_vec2::<f32>().unwrap()[..2], want);
        for dims in [(3, 5), (1, 4)] {
            let to = Tensor::zeros(dims, DType::F32, &cpu).unwrap();
            spread(&x, &places, Some(&to)).unwrap_err();
        }
    }
}
