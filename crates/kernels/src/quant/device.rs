//! Quantized weights on a GPU.

#[cfg(feature = "cuda")]
use super::cuda::{dequantize, gated_product, product};
use super::device_tiles::DeviceQuantMatrix;
use super::formats::WIDTH;
use crate::{Activation, EXACT_ROWS};
use candle_core::{DType, Result, Tensor};

/// Maximum bytes of weights that are dequantized at a time for a product of many rows.
const MAX_DEQUANTIZED: usize = 128 << 20;

impl DeviceQuantMatrix {
    /// The rows `ids`, `[n]` u32, of the weight in `dtype`: `[n, inputs]`.
    ///
    /// # Errors
    /// If the device fails. Ids are not checked: those beyond the outputs give unspecified values.
    pub fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        dequantize(self, Some(ids), 0..0, dtype)
    }

    /// All weights in `dtype`, `[outputs, inputs]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        dequantize(self, None, 0..self.outputs, dtype)
    }

    /// The product by the device's library, with weights rounded to the dtype of `x`.
    fn matmul_dequantized(&self, x: &Tensor) -> Result<Tensor> {
        let row = self.inputs * x.dtype().size_in_bytes();
        let at_once = (MAX_DEQUANTIZED / row.max(1)).next_multiple_of(WIDTH);
        let mut parts = Vec::new();
        for first in (0..self.outputs).step_by(at_once) {
            let outputs = first..self.outputs.min(first + at_once);
            let weights = dequantize(self, None, outputs, x.dtype())?;
            parts.push(x.matmul(&weights.t()?)?);
        }
        side_by_side(parts)
    }
}

fn side_by_side(mut parts: Vec<Tensor>) -> Result<Tensor> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    Tensor::cat(&parts, 1)
}

/// `x @ weight^T` for several weights with the same inputs, `[rows, outputs]` with the outputs side by side, for
/// `x` `[rows, inputs]` f16 or bf16 on their GPU. Each 32 rows read the quantized weights once, and a row has the
/// same bits in any number of up to [`EXACT_ROWS`] rows. With more rows, weights are rounded to the dtype of `x` and
/// multiplied by the device's library, unless `batch_invariant` is set.
///
/// # Errors
/// If there is no weight, or shapes, dtypes or devices do not match.
pub fn matmul_quantized(
    weights: &[&DeviceQuantMatrix],
    x: &Tensor,
    batch_invariant: bool,
) -> Result<Tensor> {
    let (rows, inputs) = x.dims2()?;
    if weights.is_empty() || weights.iter().any(|weight| weight.inputs != inputs) {
        candle_core::bail!("quant-matmul: {inputs} values per row are not those of the weights");
    }
    if rows > EXACT_ROWS && !batch_invariant {
        let parts = weights.iter().map(|weight| weight.matmul_dequantized(x));
        return side_by_side(parts.collect::<Result<_>>()?);
    }
    product(weights, x)
}

/// `activation(gate) * up`, `[rows, outputs]`, for the products `gate` and `up` of `x` with two weights, in one launch:
/// the bits of [`matmul_quantized`] and [`glu`](crate::glu()). `None` = there is no such launch, as for more than 16 rows
/// and for weights of different formats.
///
/// # Errors
/// If shapes, dtypes or devices do not match.
pub fn gated_quantized(
    weights: &[&DeviceQuantMatrix],
    x: &Tensor,
    activation: Activation,
) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if let (&[gate, up], Some(number)) = (weights, activation.fused()) {
        let (rows, inputs) = x.dims2()?;
        let is_like = gate.kind() == up.kind() && gate.shape() == up.shape();
        let is_known = matches!(x.dtype(), DType::F16 | DType::BF16) && gate.inputs == inputs;
        if is_like && is_known && (1..=crate::gpu::FEW_ROWS).contains(&rows) {
            return gated_product([gate, up], x, number).map(Some);
        }
    }
    let _ = (weights, x, activation);
    Ok(None)
}

#[cfg(not(feature = "cuda"))]
fn product(weights: &[&DeviceQuantMatrix], _: &Tensor) -> Result<Tensor> {
    let device = weights[0].tiles.device();
    candle_core::bail!("this build has no kernels for {device:?}")
}

#[cfg(not(feature = "cuda"))]
fn dequantize(
    weight: &DeviceQuantMatrix,
    _: Option<&Tensor>,
    _: std::ops::Range<usize>,
    _: DType,
) -> Result<Tensor> {
    let device = weight.tiles.device();
    candle_core::bail!("this build has no kernels for {device:?}")
}
