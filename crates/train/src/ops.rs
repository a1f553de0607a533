//! Ops with a backward pass of their own, for training on the CPU: candle's chains of elementary ops
//! would write every intermediate value, transpose gradients element by element and add to zeros. A GPU
//! uses these chains.
//!
//! All take contiguous f32.

use super::on_device;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
use foretoken_kernels::float::exp;
use foretoken_kernels::{Factor, pair_product};
use serde::Serialize;

/// Number of partial sums of a sum over a row, so that the compiler can use vector registers.
const LANES: usize = 16;

/// The precision of the factors in products with weights, and in the products of their gradients. Sums are f32.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// f32.
    #[default]
    F32,
    /// Both factors rounded to bf16: faster on a CPU with AVX512-BF16.
    Bf16,
}

/// `x @ weight^T`: `[rows, outputs]` for `x` `[rows, inputs]` and `weight` `[outputs, inputs]`. On a GPU the
/// products are those of f32.
pub fn linear(x: &Tensor, weight: &Tensor, products: Products) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return x.matmul(&weight.t()?);
    }
    x.apply_op2(weight, LinearOp(products))
}

/// `x / rms(x) * weight` over the rows of `x` `[rows, width]`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return candle_nn::ops::rms_norm_slow(x, weight, eps as f32);
    }
    x.apply_op2(weight, RmsNorm { eps: eps as f32 })
}

/// `silu(gate) * up`, `[rows, width]`, for gate and up side by side, `[rows, 2 * width]`.
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    if !gate_up.device().is_cpu() {
        return on_device::swiglu(gate_up);
    }
    gate_up.apply_op1(SwiGlu)
}

/// A scalar whose gradient by `x` is `slope`. Its value is 0, because callers know the value already.
pub fn with_slope(x: &Tensor, slope: Tensor) -> Result<Tensor> {
    x.apply_op1(Slope(slope))
}

/// The sum of `a * b`.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (parts_a, parts_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = parts_a.remainder().iter().zip(parts_b.remainder());
    let rest: f32 = rest.map(|(a, b)| a * b).sum();
    for (a, b) in parts_a.zip(parts_b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `y += factor * x`.
pub fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// The elements of a contiguous tensor on the CPU.
pub fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("the tensor must be contiguous, got {layout:?}"),
    }
}

/// Calls `work` with the elements of tensors on the CPU.
pub fn with_slices<R, const N: usize>(
    tensors: [&Tensor; N],
    work: impl FnOnce([&[f32]; N]) -> R,
) -> Result<R> {
    let tensors = tensors.map(Tensor::contiguous);
    let tensors = tensors.into_iter().collect::<Result<Vec<_>>>()?;
    let storages: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [&[][..]; N];
    for (elements, (storage, layout)) in slices.iter_mut().zip(&storages) {
        *elements = match &**storage {
            candle_core::Storage::Cpu(storage) => slice(storage, layout)?,
            _ => candle_core::bail!("the tensor must be on the CPU"),
        };
    }
    Ok(work(slices))
}

struct LinearOp(Products);

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        "train-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, inputs) = x_layout.shape().dims2()?;
        let (outputs, _) = layout.shape().dims2()?;
        let y = match self.0 {
            Products::F32 => {
                let sizes = (1, rows, outputs, inputs);
                x.matmul(weight, sizes, x_layout, &layout.transpose(0, 1)?)?
            }
            Products::Bf16 => {
                let x = Factor::by_line(slice(x, x_layout)?, rows, inputs);
                let weight = Factor::by_line(slice(weight, layout)?, outputs, inputs);
                CpuStorage::F32(pair_product(x, weight))
            }
        };
        Ok((y, (rows, outputs).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        slope: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let needs_x = x.track_op();
        let (x, weight) = (x.detach(), weight.detach());
        let (of_x, of_weight) = match self.0 {
            Products::F32 => (
                needs_x.then(|| slope.matmul(&weight)),
                slope.t()?.matmul(&x)?,
            ),
            Products::Bf16 => (
                needs_x.then(|| pair_slope(slope, &weight, false)),
                pair_slope(slope, &x, true)?,
            ),
        };
        Ok((of_x.transpose()?, Some(of_weight)))
    }
}

/// `slope @ other`, or `slope^T @ other` if it is `turned`, rounded to bf16 before.
fn pair_slope(slope: &Tensor, other: &Tensor, turned: bool) -> Result<Tensor> {
    let ((rows, outputs), (depth, inputs)) = (slope.dims2()?, other.dims2()?);
    let product = with_slices([slope, other], |[slope, other]| {
        let slope = if turned {
            Factor::by_depth(slope, outputs, rows)
        } else {
            Factor::by_line(slope, rows, outputs)
        };
        pair_product(slope, Factor::by_depth(other, inputs, depth))
    })?;
    let rows = if turned { outputs } else { rows };
    Tensor::from_vec(product, (rows, inputs), slope.device())
}

struct RmsNorm {
    eps: f32,
}

impl RmsNorm {
    /// One over the root mean square of `x`.
    fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (dot(x, x) / x.len() as f32 + self.eps).sqrt()
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "train-rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (values, weight) = (slice(x, x_layout)?, slice(weight, layout)?);
        let mut out = vec![0f32; values.len()];
        let width = weight.len();
        for (out, x) in out.chunks_exact_mut(width).zip(values.chunks_exact(width)) {
            let scale = self.scale(x);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * weight;
            }
        }
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        slope: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = weight.elem_count();
        let mut of_x = vec![0f32; x.elem_count()];
        let mut of_weight = vec![0f32; width];
        let mut scaled = vec![0f32; width];
        with_slices([x, weight, slope], |[x, weight, slope]| {
            let parts = of_x.chunks_exact_mut(width).zip(x.chunks_exact(width));
            for ((of_x, x), slope) in parts.zip(slope.chunks_exact(width)) {
                let scale = self.scale(x);
                for ((scaled, slope), weight) in scaled.iter_mut().zip(slope).zip(weight) {
                    *scaled = slope * weight;
                }
                let along = dot(&scaled, x) * scale * scale / width as f32;
                let columns = of_x.iter_mut().zip(&mut of_weight).zip(&scaled);
                for (((of_x, of_weight), scaled), (x, slope)) in columns.zip(x.iter().zip(slope)) {
                    *of_x = scale * (scaled - x * along);
                    *of_weight += slope * x * scale;
                }
            }
        })?;
        let of_x = Tensor::from_vec(of_x, x.shape(), x.device())?;
        let of_weight = Tensor::from_vec(of_weight, width, x.device())?;
        Ok((Some(of_x), Some(of_weight)))
    }
}

struct SwiGlu;

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "train-swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, both) = layout.shape().dims2()?;
        let mut out = vec![0f32; rows * both / 2];
        let inputs = slice(storage, layout)?.chunks_exact(both);
        for (out, gate_up) in out.chunks_exact_mut(both / 2).zip(inputs) {
            let (gate, up) = gate_up.split_at(both / 2);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-gate)) * up;
            }
        }
        Ok((CpuStorage::F32(out), (rows, both / 2).into()))
    }

    fn bwd(&self, gate_up: &Tensor, _: &Tensor, slope: &Tensor) -> Result<Option<Tensor>> {
        let (_, both) = gate_up.dims2()?;
        let mut out = vec![0f32; gate_up.elem_count()];
        with_slices([gate_up, slope], |[gate_up, slope]| {
            let parts = out.chunks_exact_mut(both).zip(gate_up.chunks_exact(both));
            for ((out, gate_up), slope) in parts.zip(slope.chunks_exact(both / 2)) {
                let (of_gate, of_up) = out.split_at_mut(both / 2);
                let (gate, up) = gate_up.split_at(both / 2);
                let outs = of_gate.iter_mut().zip(of_up);
                let ins = gate.iter().zip(up).zip(slope);
                for ((of_gate, of_up), ((&gate, &up), &slope)) in outs.zip(ins) {
                    let sigmoid = 1.0 / (1.0 + exp(-gate));
                    *of_up = slope * gate * sigmoid;
                    *of_gate = slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                }
            }
        })?;
        Tensor::from_vec(out, gate_up.shape(), gate_up.device()).map(Some)
    }
}

struct Slope(Tensor);

impl CustomOp1 for Slope {
    fn name(&self) -> &'static str {
        "train-slope"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), ().into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
