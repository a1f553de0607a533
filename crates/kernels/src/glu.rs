//! `activation(gate) * up`, the gated activation of an MLP.

use super::parallel::{Shared, for_each};
use super::simd::{Loop, Simd, run};
use super::storage::{Place, contiguous, output};
use super::{cpu, float};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};
use std::f32::consts::FRAC_1_SQRT_2;
use tracing::trace_span;

/// The function that is applied to the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`, also called swish.
    Silu,
    /// `x * P(X <= x)` of a standard normal X (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    Gelu,
    /// Its approximation by tanh.
    GeluTanh,
    /// The square of `max(x, 0)` (So et al. 2021, arXiv 2109.08668).
    Relu2,
    /// xIELU with these parameters.
    Xielu(Xielu),
    /// `x * sigmoid(1.702 * x)` of `min(x, 7)`, the gate of gpt-oss: there it multiplies 1 more than the other half,
    /// which is kept from -7 to 7.
    ClampedSwish,
}

/// The factor in the sigmoid of [`Activation::ClampedSwish`], and the limit of its inputs.
const CLAMPED_ALPHA: f32 = 1.702;
const CLAMPED_LIMIT: f32 = 7.0;

/// Huang and Schlag 2024, "Deriving Activation Functions Using Integration" (arXiv 2411.13010):
/// `alpha_p * x^2 + beta * x` for `x` over 0, else `alpha_n * (exp(min(x, eps)) - 1 - x) + beta * x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xielu {
    /// Coefficient of `x^2` for `x` over 0.
    pub alpha_p: f32,
    /// Coefficient of the exponential part for `x` up to 0.
    pub alpha_n: f32,
    /// Coefficient of the linear part.
    pub beta: f32,
    /// Upper limit of the exponent.
    pub eps: f32,
}

impl Xielu {
    /// The activation with trained parameters: `alpha_p` is the softplus of what is stored, and `alpha_n` is `beta`
    /// more than that.
    pub fn of_stored(alpha_p: f32, alpha_n: f32, beta: f32, eps: f32) -> Self {
        let softplus = |x: f32| x.max(0.) + (-x.abs()).exp().ln_1p();
        Self {
            alpha_p: softplus(alpha_p),
            alpha_n: beta + softplus(alpha_n),
            beta,
            eps,
        }
    }

    fn apply(self, x: &Tensor) -> Result<Tensor> {
        let high = (x.sqr()? * f64::from(self.alpha_p))?;
        let low = ((x.minimum(self.eps)?.exp()? - 1.)? - x)?;
        let low = (low * f64::from(self.alpha_n))?;
        x.gt(0f32)?.where_cond(&high, &low)? + (x * f64::from(self.beta))?
    }

    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        let low = self.alpha_n * (float::exp(x.min(self.eps)) - 1.0 - x);
        let high = self.alpha_p * x * x;
        self.beta * x + if x > 0.0 { high } else { low }
    }
}

impl Activation {
    /// The function of each value of `x`, by candle's own ops.
    ///
    /// # Errors
    /// If the device fails.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => x.gelu(),
            // In f32, candle's relu makes 0 of NaN.
            Self::Relu2 if x.dtype() == DType::F32 => {
                let zeros = x.zeros_like()?;
                x.lt(&zeros)?.where_cond(&zeros, x)?.sqr()
            }
            Self::Relu2 => x.relu()?.sqr(),
            Self::Xielu(xielu) => xielu.apply(x),
            Self::ClampedSwish => {
                let x = x.minimum(CLAMPED_LIMIT)?;
                let by = candle_nn::ops::sigmoid(&(&x * f64::from(CLAMPED_ALPHA))?)?;
                x * by
            }
        }
    }

    /// Its number in kernels that also multiply with gate and up, if they have it.
    #[cfg(feature = "cuda")]
    pub(crate) fn fused(self) -> Option<usize> {
        match self {
            Self::Silu => Some(0),
            Self::Gelu => Some(1),
            Self::GeluTanh => Some(2),
            Self::Relu2 | Self::Xielu(_) | Self::ClampedSwish => None,
        }
    }

    /// What the activated gate multiplies, for the other half of its input.
    fn gated(self, up: Tensor) -> Result<Tensor> {
        match self {
            Self::ClampedSwish => up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)? + 1.,
            _ => Ok(up),
        }
    }
}

/// `activation(gate) * up`, `[rows, width]` ([`Activation::ClampedSwish`] changes `up`, too), for contiguous `gate_up` `[rows, 2 * width]`, whose rows hold
/// first `gate` and then `up` (Shazeer 2020, "GLU Variants Improve Transformer").
///
/// f32 on the CPU and f32, f16 and bf16 on CUDA take one pass; other cases, on CUDA also [`Activation::Xielu`] and
/// [`Activation::ClampedSwish`], use candle's own ops.
///
/// # Errors
/// If the width is odd.
pub fn glu(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if gate_up.device().is_cuda() {
        if let Some(name) = cuda::kernel(activation) {
            let (_, both) = dims(gate_up.layout())?;
            let part = |i| gate_up.narrow(1, i * both / 2, both / 2);
            return cuda::launch(&part(0)?, &part(1)?, name);
        }
        return by_parts(gate_up, activation);
    }
    if gate_up.dtype() == DType::F32 {
        return gate_up.apply_op1_no_bwd(&Glu(activation));
    }
    by_parts(gate_up, activation)
}

/// `sigmoid(gate) * y`, `[rows, width]`: the output of attention with gates. `gate`, of the same shape, may be a part of
/// wider rows.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn sigmoid_gate(gate: &Tensor, y: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if y.device().is_cuda() {
        return cuda::launch(gate, y, "sigmoid");
    }
    y * candle_nn::ops::sigmoid(gate)?
}

/// The same by candle's own ops.
fn by_parts(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let gate = gate_up.narrow(1, 0, width)?;
    activation.apply(&gate)? * activation.gated(gate_up.narrow(1, width, width)?)?
}

/// Minimum number of elements that a thread takes at a time.
const CHUNK: usize = 1024;
/// Number of elements from which waking other threads pays.
const MIN_PARALLEL: usize = 8192;

struct Glu(Activation);

impl CustomOp1 for Glu {
    fn name(&self) -> &'static str {
        "glu"
    }

    fn cpu_fwd(&self, gate_up: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, both) = dims(layout)?;
        let gate_up = contiguous::<f32>(self.name(), gate_up, layout)?;
        let (width, activation) = (both / 2, self.0);
        let out = trace_span!("activation").in_scope(|| {
            let piece = CHUNK.div_ceil(width.max(1));
            let work = |out: &Shared<'_, Place>| {
                for_each(rows.div_ceil(piece), rows * width > MIN_PARALLEL, |i| {
                    for row in i * piece..rows.min((i + 1) * piece) {
                        let (gate, up) = gate_up[row * both..][..both].split_at(width);
                        // SAFETY: rows do not overlap.
                        let out = unsafe { out.slice(row * width, width) };
                        let work = Row {
                            activation,
                            gate,
                            up,
                            out,
                        };
                        run(cpu::isa(), work);
                    }
                });
            };
            // SAFETY: each row is written.
            unsafe { output(rows * width, work) }
        });
        Ok((CpuStorage::F32(out), (rows, width).into()))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use super::Activation;
    use candle_core::{Result, Tensor};

    const THREADS: usize = 256;
    /// Values of a thread.
    const VALUES: usize = 2;

    /// The name of the kernel for a gate of `activation`, if there is one.
    pub fn kernel(activation: Activation) -> Option<&'static str> {
        match activation {
            Activation::Silu => Some("silu"),
            Activation::Gelu => Some("gelu"),
            Activation::GeluTanh => Some("gelu_tanh"),
            Activation::Relu2 => Some("relu2"),
            Activation::Xielu(_) | Activation::ClampedSwish => None,
        }
    }

    /// Launches the kernel called `name`.
    pub fn launch(gate: &Tensor, up: &Tensor, name: &str) -> Result<Tensor> {
        let (rows, width) = up.dims2()?;
        let count = rows * width;
        if gate.dims() != up.dims() {
            candle_core::bail!("glu: {:?} gates for {:?} values", gate.dims(), up.dims());
        }
        let (device, dtype) = (up.device().as_cuda_device()?, up.dtype());
        gpu::expect_dtype("glu", dtype, [gate])?;
        let kernel = format!("glu_{name}_{}", gpu::suffix(dtype));
        let kernel = gpu::function(device, "glu", gpu::GLU, &kernel)?;
        let out = gpu::output(device, dtype, (rows, width))?;
        let (launch, gate_stride) = kernel.launch().rows(gate)?;
        let (launch, up_stride) = launch.rows(up)?;
        let launch = launch.tensor(&out)?.int(width);
        let launch = launch.int(gate_stride).int(up_stride).int(count);
        let blocks = count.div_ceil(THREADS * VALUES);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and
        // writes.
        unsafe { launch.run(gpu::grid((blocks, 1, 1), THREADS, 0))? };
        Ok(out)
    }
}

/// Rows, and values per row (gate and up together).
fn dims(gate_up: &Layout) -> Result<(usize, usize)> {
    let (rows, both) = gate_up.shape().dims2()?;
    if !both.is_multiple_of(2) {
        candle_core::bail!("glu: the width must be even, got {both}");
    }
    Ok((rows, both))
}

/// A row; all have one length.
struct Row<'a> {
    activation: Activation,
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [Place],
}

impl Loop for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (gate, up, out) = (self.gate, self.up, self.out);
        // One loop for each, so that the compiler vectorizes all.
        match self.activation {
            Activation::Silu => apply(gate, up, out, |x, up| silu(x) * up),
            Activation::Gelu => apply(gate, up, out, |x, up| gelu(x) * up),
            Activation::GeluTanh => apply(gate, up, out, |x, up| gelu_tanh(x) * up),
            Activation::Relu2 => apply(gate, up, out, |x, up| relu2(x) * up),
            Activation::Xielu(xielu) => apply(gate, up, out, |x, up| xielu.of(x) * up),
            Activation::ClampedSwish => apply(gate, up, out, clamped_swish),
        }
    }
}

/// Writes every place of `out`.
#[inline(always)]
fn apply(gate: &[f32], up: &[f32], out: &mut [Place], of: impl Fn(f32, f32) -> f32) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        out.write(of(g, u));
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + float::exp(-x))
}

/// NaN stays NaN, which `max` would make 0.
#[inline(always)]
fn relu2(x: f32) -> f32 {
    let positive = if x < 0.0 { 0.0 } else { x };
    positive * positive
}

/// NaN stays NaN, which `min` would make a number.
#[inline(always)]
fn clamped_swish(x: f32, up: f32) -> f32 {
    let x = if x > CLAMPED_LIMIT { CLAMPED_LIMIT } else { x };
    let up = up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT);
    x / (1.0 + float::exp(-CLAMPED_ALPHA * x)) * (up + 1.0)
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    // The smaller of both sides' probabilities, so that it is precise also far below 0.
    let tail = 0.5 * float::erfc(x.abs() * FRAC_1_SQRT_2);
    x * if x < 0.0 { tail } else { 1.0 - tail }
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + float::tanh(SQRT_2_PI * (x + 0.044_715 * x * x * x)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn agrees_with_candle_and_does_not_know_its_neighbours() {
        let cpu = Device::Cpu;
        let xielu = Xielu::of_stored(0.3, -0.4, 0.5, -1e-6);
        for (rows, width) in [(7, 3001), (1, 1536), (40, 33)] {
            let both = Tensor::randn(0f32, 3.0, (rows, 2 * width), &cpu).unwrap();
            let part = |i| both.narrow(1, i * width, width).unwrap();
            let clamped = Activation::ClampedSwish;
            for (activation, theirs) in [
                (Activation::Silu, part(0).silu()),
                (Activation::Gelu, part(0).gelu_erf()),
                (Activation::GeluTanh, part(0).gelu()),
                (Activation::Relu2, part(0).relu().unwrap().sqr()),
                (Activation::Xielu(xielu), xielu.apply(&part(0))),
                (clamped, clamped.apply(&part(0))),
            ] {
                let ours = glu(&both, activation).unwrap().to_vec2::<f32>().unwrap();
                let factors = activation.gated(part(1)).unwrap();
                let theirs = (theirs.unwrap() * &factors).unwrap();
                let [theirs, factors] = [theirs, factors].map(|all| all.to_vec2::<f32>().unwrap());
                let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
                for ((ours, theirs), factor) in pairs.zip(factors.iter().flatten()) {
                    // What is off by a little is multiplied, too.
                    let size = theirs.abs().max(factor.abs()).max(1.);
                    let off = (ours - theirs).abs();
                    assert!(off <= 3e-6 * size, "{ours} {theirs} {factor}");
                }
                for (row, ours) in ours.iter().enumerate() {
                    let alone = glu(&both.narrow(0, row, 1).unwrap(), activation).unwrap();
                    assert_eq!(&alone.to_vec2::<f32>().unwrap()[0], ours);
                }
            }
        }
        let odd = Tensor::zeros((1, 3), DType::F32, &cpu).unwrap();
        assert!(glu(&odd, Activation::Silu).is_err());
    }

    /// A forward that goes wrong is seen at its logits. Infinite gates, as of f16, are those of large numbers.
    #[test]
    fn nan_stays_nan() {
        let rows = [
            [f32::NAN, 2.],
            [2., f32::NAN],
            [f32::INFINITY, 2.],
            [f32::NEG_INFINITY, 2.],
        ];
        let both = Tensor::new(&rows, &Device::Cpu).unwrap();
        let gates = both.narrow(1, 0, 1).unwrap();
        for activation in [Activation::Relu2, Activation::ClampedSwish] {
            let [fused, parts] = [glu(&both, activation), by_parts(&both, activation)].map(|out| {
                out.unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
            });
            for out in [fused, parts] {
                let is_nan: Vec<bool> = out.iter().map(|x| x.is_nan()).collect();
                assert_eq!(is_nan[..3], [true, true, false], "{activation:?}: {out:?}");
            }
        }
        let alone = Activation::Relu2.apply(&gates).unwrap();
        let alone = alone.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(alone[0].is_nan());
        assert_eq!(alone[1..], [4., f32::INFINITY, 0.]);
    }
}
