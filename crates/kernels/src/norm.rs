//! The residual sum and the RMSNorm or LayerNorm after it.

use super::cpu;
use super::parallel::{Shared, for_each};
use super::simd::{Loop, Simd, run};
use super::storage::{Place, contiguous, output, written};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use tracing::trace_span;

/// Number of rows from which waking other threads pays.
const MIN_PARALLEL_ROWS: usize = 16;
/// SIMD lanes: partial sums of a sum of squares.
const LANES: usize = 8;

/// `sum = x + delta` and `weight * sum / rms(sum)` of each row (Zhang and Sennrich 2019), both
/// `[rows, width]` in the dtype of `x`.
///
/// `x` and `delta` are `[rows, width]`, `weight` is `[width]`; all are contiguous and have one dtype.
/// f32 on the CPU and f32, f16 and bf16 on CUDA take one pass; other cases use candle's own ops. CUDA reads `x` while the
/// kernel before may still run: that must not be the one that makes `x`. It makes `delta`, say.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn add_norm(x: &Tensor, delta: &Tensor, weight: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::add(x, delta, cuda::Weights::Rms(weight), eps);
    }
    if x.dtype() == DType::F32 {
        let both = x.apply_op3_no_bwd(delta, weight, &AddNorm { eps })?;
        return Ok((both.get(0)?, both.get(1)?));
    }
    let sum = (x + delta)?;
    let normed = candle_nn::ops::rms_norm(&sum, weight, eps)?;
    Ok((sum, normed))
}

/// As [`add_norm`], with LayerNorm (Ba et al. 2016, arXiv 1607.06450): each row's mean is subtracted before the RMSNorm,
/// and `bias`, `[width]`, is added after it.
///
/// f32, f16 and bf16 on CUDA take one pass, which reads `x` as that of [`add_norm`] does.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn add_layer_norm(
    x: &Tensor,
    delta: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::add(x, delta, cuda::Weights::Layer(weight, bias), eps);
    }
    let sum = (x + delta)?;
    let centered = sum.broadcast_sub(&sum.mean_keepdim(1)?)?;
    // Its mean square is the variance.
    let normed = rms_norm(&centered, weight, eps)?;
    match bias {
        Some(bias) => Ok((sum, normed.broadcast_add(bias)?)),
        None => Ok((sum, normed)),
    }
}

/// The norm that [`add_norm`] returns for a delta of zeros, with the same bits. On CUDA, any kernel may make `x`.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::norm(x, cuda::Weights::Rms(weight), eps);
    }
    Ok(add_norm(x, &x.zeros_like()?, weight, eps)?.1)
}

/// The norm that [`add_layer_norm`] returns for a delta of zeros, with the same bits. On CUDA, any kernel may make `x`.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f32) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::norm(x, cuda::Weights::Layer(weight, bias), eps);
    }
    Ok(add_layer_norm(x, &x.zeros_like()?, weight, bias, eps)?.1)
}

/// Returns `[2, rows, width]`: the sums, then the normalized sums.
struct AddNorm {
    eps: f32,
}

impl CustomOp3 for AddNorm {
    fn name(&self) -> &'static str {
        "add-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        delta: &CpuStorage,
        delta_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = dims(x_layout, delta_layout, weight_layout)?;
        let x = contiguous::<f32>(self.name(), x, x_layout)?;
        let delta = contiguous::<f32>(self.name(), delta, delta_layout)?;
        let weight = contiguous::<f32>(self.name(), weight, weight_layout)?;
        let out = trace_span!("norm").in_scope(|| {
            let work = |out: &Shared<'_, Place>| {
                for_each(rows, rows >= MIN_PARALLEL_ROWS, |row| {
                    // SAFETY: rows do not overlap.
                    let place = |at| unsafe { out.slice(at, width) };
                    let at = row * width;
                    let work = Row {
                        eps: self.eps,
                        x: &x[at..at + width],
                        delta: &delta[at..at + width],
                        weight,
                        sum: place(at),
                        out: place(x.len() + at),
                    };
                    run(cpu::isa(), work);
                });
            };
            // SAFETY: each row of both is written.
            unsafe { output(2 * x.len(), work) }
        });
        Ok((CpuStorage::F32(out), (2, rows, width).into()))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use super::dims;
    use candle_core::{Result, Tensor};

    /// The weights of a norm.
    #[derive(Clone, Copy)]
    pub enum Weights<'a> {
        /// Of an RMSNorm.
        Rms(&'a Tensor),
        /// Of a LayerNorm, and its bias.
        Layer(&'a Tensor, Option<&'a Tensor>),
    }

    /// The sum and its norm.
    pub fn add(
        x: &Tensor,
        delta: &Tensor,
        weights: Weights<'_>,
        eps: f32,
    ) -> Result<(Tensor, Tensor)> {
        let out = launch(x, Some(delta), weights, eps)?;
        Ok((out.get(0)?, out.get(1)?))
    }

    /// The norm alone.
    pub fn norm(x: &Tensor, weights: Weights<'_>, eps: f32) -> Result<Tensor> {
        launch(x, None, weights, eps)?.get(0)
    }

    /// Launches the kernel: `[2, rows, width]`, or `[1, rows, width]` without `delta`.
    fn launch(
        x: &Tensor,
        delta: Option<&Tensor>,
        weights: Weights<'_>,
        eps: f32,
    ) -> Result<Tensor> {
        let (name, weight, bias) = match weights {
            Weights::Rms(weight) => ("add_norm", weight, None),
            Weights::Layer(weight, bias) => ("add_layer_norm", weight, bias),
        };
        let (rows, width) = dims(x.layout(), delta.unwrap_or(x).layout(), weight.layout())?;
        if bias.is_some_and(|bias| bias.dims() != [width]) {
            candle_core::bail!("add-norm: a bias {bias:?} of rows of {width} values");
        }
        let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
        let others = [weight].into_iter().chain(delta).chain(bias);
        gpu::expect_dtype("add-norm", dtype, others)?;
        let kernel = format!("{name}_{}", gpu::suffix(dtype));
        let kernel = gpu::function(device, "norm", gpu::NORM, &kernel)?;
        let parts = 1 + usize::from(delta.is_some());
        let out = gpu::output(device, dtype, (parts, rows, width))?;
        let launch = kernel.launch().tensor(x)?.optional(delta)?.tensor(weight)?;
        let launch = match weights {
            Weights::Rms(_) => launch,
            Weights::Layer(_, bias) => launch.optional(bias)?,
        };
        let launch = launch.tensor(&out)?;
        // A thread takes 16 bytes at a time, if it can.
        let packs = width.div_ceil(16 / dtype.size_in_bytes());
        let threads = packs.next_multiple_of(32).clamp(32, 1024);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and
        // writes.
        unsafe {
            launch
                .int(width)
                .float(eps)
                .run(gpu::grid((rows, 1, 1), threads, 0))?
        };
        Ok(out)
    }
}

/// Rows and width.
fn dims(x: &Layout, delta: &Layout, weight: &Layout) -> Result<(usize, usize)> {
    let (rows, width) = x.shape().dims2()?;
    if delta.dims() != x.dims() || weight.dims() != [width] {
        candle_core::bail!("add-norm: {x:?}, {delta:?} and {weight:?} do not fit");
    }
    Ok((rows, width))
}

/// A row, of which all parts have one length.
struct Row<'a> {
    eps: f32,
    x: &'a [f32],
    delta: &'a [f32],
    weight: &'a [f32],
    sum: &'a mut [Place],
    out: &'a mut [Place],
}

impl Loop for Row<'_> {
    type Output = ();

    /// Writes every place of both outputs. Simple enough for the compiler to vectorize, and without fused
    /// multiply-adds, so that every instruction set gives the same bits.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (sum, out) = (self.sum, self.out);
        assert!(self.x.len() == sum.len() && self.delta.len() == sum.len());
        assert!(self.weight.len() == out.len() && sum.len() == out.len());
        for ((sum, x), delta) in sum.iter_mut().zip(self.x).zip(self.delta) {
            sum.write(x + delta);
        }
        // SAFETY: all are written, as there are as many values of `x` and `delta`.
        let sum = unsafe { written(sum) };
        let scale = 1. / (mean_square(sum) + self.eps).sqrt();
        for ((out, sum), weight) in out.iter_mut().zip(sum).zip(self.weight) {
            out.write(*sum * scale * weight);
        }
    }
}

/// The mean of the squares of `x`.
#[inline(always)]
pub(super) fn mean_square(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    (lanes.iter().sum::<f32>() + rest) / x.len() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn agrees_with_f64_and_does_not_know_its_neighbours() {
        let cpu = Device::Cpu;
        for width in [1, 7, 64, 75, 576] {
            let x = Tensor::randn(0f32, 3., (19, width), &cpu).unwrap();
            let delta = Tensor::randn(1f32, 3., (19, width), &cpu).unwrap();
            let weight = Tensor::randn(0f32, 1., width, &cpu).unwrap();
            let run = |x: &Tensor, delta: &Tensor| {
                let (sum, normed) = add_norm(x, delta, &weight, 1e-5).unwrap();
                let values = |t: Tensor| t.to_vec2::<f32>().unwrap();
                (values(sum), values(normed))
            };
            let (sums, normed) = run(&x, &delta);
            let (x_values, deltas) = (x.to_vec2::<f32>().unwrap(), delta.to_vec2::<f32>().unwrap());
            let weights = weight.to_vec1::<f32>().unwrap();
            for row in 0..19 {
                let sum: Vec<f64> = (0..width)
                    .map(|i| f64::from(x_values[row][i]) + f64::from(deltas[row][i]))
                    .collect();
                let mean = sum.iter().map(|x| x * x).sum::<f64>() / width as f64;
                for i in 0..width {
                    let want = sum[i] / (mean + 1e-5).sqrt() * f64::from(weights[i]);
                    assert!((f64::from(normed[row][i]) - want).abs() < 1e-5 * want.abs().max(1.));
                    assert_eq!(sums[row][i], x_values[row][i] + deltas[row][i]);
                }
                let pick = |t: &Tensor| t.narrow(0, row, 1).unwrap();
                let alone = run(&pick(&x), &pick(&delta));
                assert_eq!((&alone.0[0], &alone.1[0]), (&sums[row], &normed[row]));
            }
            let without = rms_norm(&x, &weight, 1e-5).unwrap();
            let (_, with_zeros) = run(&x, &x.zeros_like().unwrap());
            assert_eq!(without.to_vec2::<f32>().unwrap(), with_zeros);
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert!(add_norm(&zeros(&[2, 3]), &zeros(&[2, 4]), &zeros(&[3]), 1e-5).is_err());
        assert!(add_norm(&zeros(&[2, 3]), &zeros(&[2, 3]), &zeros(&[2]), 1e-5).is_err());
    }
}
