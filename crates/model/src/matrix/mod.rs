//! Weights that can be multiplied. A file holds one format, and nothing else knows it, except the readers
//! of checkpoints that choose it.

mod dense;
mod on_device;
mod packed;
mod quantized;
mod reordered;
#[cfg(test)]
mod tests;
mod unread;

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::dense::{DenseMatrix, Float8};
use foretoken_kernels::quant::{BlockType, DeviceQuantMatrix, Nvfp4, QuantKind, QuantMatrix};
use foretoken_kernels::{Activation, ForwardWeight};
use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

pub use dense::Dense;
pub use on_device::OnDevice;
pub use packed::Packed;
pub use quantized::Quantized;
pub use reordered::Reordered;
pub use unread::Unread;

/// How a weight is stored in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    /// Unquantized.
    Dense(DType),
    /// FP8 with scales of so many inputs, on the CPU.
    Float8(usize),
    /// FP8 on a GPU.
    DeviceFloat8,
    /// NVFP4 on the CPU.
    Nvfp4,
    /// NVFP4 on a GPU.
    DeviceNvfp4,
    /// Our tiles of such blocks, on the CPU.
    Tiles(BlockType),
    /// Our tiles of such blocks, on a GPU.
    DeviceTiles(BlockType),
    /// The blocks themselves, which candle multiplies.
    Blocks(BlockType),
}

impl WeightForm {
    /// The form in which a GGUF weight of `kind` with `inputs` inputs is loaded: blocks stay if a kernel takes
    /// them, and become `Q8_0` otherwise, or on a GPU `dtype`; f32, f16 and bf16 become `dtype`, or stay if that is `None`.
    pub fn of_gguf(kind: BlockType, inputs: usize, dtype: Option<DType>, on_gpu: bool) -> Self {
        if let Some(own) = kind.float() {
            return Self::Dense(dtype.unwrap_or(own));
        }
        if on_gpu {
            let dtype = dtype.unwrap_or(DType::F16);
            return if DeviceQuantMatrix::keeps(kind, dtype) {
                Self::DeviceTiles(kind)
            } else {
                Self::Dense(dtype)
            };
        }
        if QuantMatrix::keeps(kind, inputs) {
            Self::Tiles(kind)
        } else {
            Self::Tiles(BlockType::Q8_0)
        }
    }

    /// The type of its blocks; `None` = it is dense.
    pub fn blocks(self) -> Option<BlockType> {
        match self {
            Self::Dense(_)
            | Self::Float8(_)
            | Self::DeviceFloat8
            | Self::Nvfp4
            | Self::DeviceNvfp4 => None,
            Self::Tiles(kind) | Self::DeviceTiles(kind) | Self::Blocks(kind) => Some(kind),
        }
    }

    /// `bf16` or `Q4_1`.
    pub fn name(self) -> String {
        match self {
            Self::Dense(dtype) => dtype.as_str().to_owned(),
            Self::Float8(_) | Self::DeviceFloat8 => DType::F8E4M3.as_str().to_owned(),
            Self::Nvfp4 | Self::DeviceNvfp4 => QuantKind::Nvfp4.to_string(),
            Self::Tiles(kind) | Self::DeviceTiles(kind) | Self::Blocks(kind) => kind.to_string(),
        }
    }

    /// Bytes of a weight of the shape `dims`, with what its layout adds.
    pub fn bytes(self, dims: &[usize]) -> u64 {
        let elements: usize = dims.iter().product();
        let bytes = match (self, dims) {
            (Self::Dense(dtype), _) => elements * dtype.size_in_bytes(),
            (Self::Float8(run), &[outputs, inputs]) => {
                DenseMatrix::float8_bytes(outputs, inputs, run)
            }
            (Self::DeviceFloat8, &[outputs, inputs]) => {
                DeviceQuantMatrix::float8_bytes(outputs, inputs)
            }
            (Self::Nvfp4, &[outputs, inputs]) => QuantMatrix::nvfp4_bytes(outputs, inputs),
            (Self::DeviceNvfp4, &[outputs, inputs]) => {
                DeviceQuantMatrix::nvfp4_bytes(outputs, inputs)
            }
            (Self::Float8(_) | Self::DeviceFloat8, _) => elements,
            (Self::Nvfp4 | Self::DeviceNvfp4, _) => elements / 2,
            (Self::Tiles(kind), &[outputs, inputs]) => QuantMatrix::bytes(kind, outputs, inputs),
            (Self::DeviceTiles(kind), &[outputs, inputs]) => {
                DeviceQuantMatrix::bytes(kind, outputs, inputs)
            }
            // A matrix for each expert.
            (Self::Tiles(kind), &[experts, outputs, inputs]) => {
                experts * QuantMatrix::bytes(kind, outputs, inputs)
            }
            (Self::DeviceTiles(kind), &[experts, outputs, inputs]) => {
                experts * DeviceQuantMatrix::bytes(kind, outputs, inputs)
            }
            (Self::Tiles(kind) | Self::DeviceTiles(kind) | Self::Blocks(kind), _) => {
                elements / kind.block_size() * kind.type_size()
            }
        };
        bytes as u64
    }
}

/// A weight `[outputs, inputs]` in one format, on one device.
///
/// A row's bits depend only on that row. On a GPU that may hold for few rows only; then
/// [`Matrix::make_batch_invariant`] returns a matrix for which it holds.
pub trait Matrix: Any + Send + Sync {
    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize);

    /// The format that the weights are stored in, for messages: `bf16` or `Q4_1`.
    fn format(&self) -> String;

    /// `x @ self^T`: `[rows, outputs]` for `x` `[rows, inputs]`, contiguous, in the compute dtype (f32 on
    /// the CPU).
    ///
    /// # Errors
    /// If `x` has another width, dtype or device.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// `activation(gate) * up`, `[rows, outputs / 2]`, where `gate` and `up` are the halves of [`Matrix::forward`], with the
    /// bits of these ops, if one kernel does it all; otherwise `None`.
    ///
    /// # Errors
    /// Returns the errors of [`Matrix::forward`].
    fn forward_gated(&self, _x: &Tensor, _activation: Activation) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The rows `ids`, `[n]` u32, of the weight in `dtype`: `[n, inputs]`.
    ///
    /// # Errors
    /// If an id is not below the number of outputs (on a GPU: not checked), or the device fails.
    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor>;

    /// All weights, `[outputs, inputs]` f32.
    ///
    /// # Errors
    /// If the device fails.
    fn dequantize(&self) -> Result<Tensor>;

    /// A matrix with the outputs of this one, then those of `next`, if it takes less time than the two;
    /// otherwise `None`.
    ///
    /// # Errors
    /// If the two differ in inputs, or the device fails.
    fn join(&self, _next: &dyn Matrix) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }

    /// `forward_chosen` for `groups` of consecutive rows of `x` with their matrices, if it takes less time
    /// than one product per group; otherwise `None`.
    ///
    /// # Errors
    /// Returns the errors of [`Matrix::forward`].
    fn forward_groups(
        &self,
        _groups: &[(Range<usize>, &dyn Matrix)],
        _x: &Tensor,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// A matrix with one order of additions for any number of rows; `None` if this one has it.
    ///
    /// # Errors
    /// A setup error if there is no such kernel for the weight.
    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>>;
}

/// An unquantized weight `[outputs, inputs]`: in `dtype` if given, otherwise in its own dtype, or in f32 if
/// no kernel takes that one.
///
/// # Errors
/// If the tensor is not a matrix, or `dtype` is none of f32, f16 and bf16.
pub fn unquantized(weight: &Tensor, dtype: Option<DType>) -> Result<Arc<dyn Matrix>> {
    unquantized_for(weight, dtype, !weight.device().is_cpu())
}

/// As [`unquantized`], in the layout that a GPU reads, if `on_gpu`, although the weight may be in the host's memory.
///
/// # Errors
/// Returns the errors of [`unquantized`].
pub(crate) fn unquantized_for(
    weight: &Tensor,
    dtype: Option<DType>,
    on_gpu: bool,
) -> Result<Arc<dyn Matrix>> {
    let weight = weight.to_dtype(unquantized_dtype(weight.dtype(), dtype))?;
    if on_gpu {
        return Ok(Arc::new(Dense::new(weight)?));
    }
    Ok(Arc::new(Packed::new(DenseMatrix::new(&weight)?)))
}

/// The dtype of [`unquantized`] weights whose own dtype is `own`.
pub fn unquantized_dtype(own: DType, dtype: Option<DType>) -> DType {
    dtype.unwrap_or(match own {
        DType::F32 | DType::F16 | DType::BF16 => own,
        _ => DType::F32,
    })
}

/// The weight of this `shape` whose blocks are `data`, in a form that is not dense.
///
/// # Errors
/// If the blocks are not those of the shape, or the device fails.
pub fn quantized(
    form: WeightForm,
    data: Vec<u8>,
    (outputs, inputs): (usize, usize),
    device: &Device,
) -> Result<Arc<dyn Matrix>> {
    Ok(match form {
        WeightForm::Dense(_)
        | WeightForm::Float8(_)
        | WeightForm::DeviceFloat8
        | WeightForm::Nvfp4
        | WeightForm::DeviceNvfp4 => {
            return Err(Error::internal("a dense form has no blocks"));
        }
        WeightForm::Tiles(kind) => {
            let tiles = QuantMatrix::from_blocks(kind, &data, outputs, inputs)?;
            Arc::new(Packed::new(tiles))
        }
        WeightForm::DeviceTiles(kind) => {
            let shape = (outputs, inputs);
            let tiles = DeviceQuantMatrix::from_blocks(kind, &data, shape, device)?;
            Arc::new(OnDevice::new(tiles))
        }
        WeightForm::Blocks(kind) => {
            let candles = kind.candles();
            let candles = candles
                .ok_or_else(|| Error::internal(format!("candle has no blocks of {kind}")))?;
            let storage = QStorage::from_data(Cow::Owned(data), device, candles)?;
            Arc::new(Quantized::new(QTensor::new(storage, (outputs, inputs))?)?)
        }
    })
}

/// A weight of FP8, which stays so, in the memory of `device` and, if `on_gpu`, in the layout that a GPU reads.
///
/// # Errors
/// If its numbers or scales are not those of its shape, no product takes them, or the device fails.
pub fn float8(weight: &Float8<'_>, device: &Device, on_gpu: bool) -> Result<Arc<dyn Matrix>> {
    if on_gpu {
        let weight = DeviceQuantMatrix::from_float8(weight, device)?;
        return Ok(Arc::new(OnDevice::new(weight)));
    }
    Ok(Arc::new(Packed::new(DenseMatrix::of_float8(weight)?)))
}

/// A weight of NVFP4, which stays so, in the memory of `device` and, if `on_gpu`, in the layout that a GPU reads.
///
/// # Errors
/// If its numbers or scales are not those of its shape, no product takes them, or the device fails.
pub fn nvfp4(weight: &Nvfp4<'_>, device: &Device, on_gpu: bool) -> Result<Arc<dyn Matrix>> {
    if on_gpu {
        let weight = DeviceQuantMatrix::from_nvfp4(weight, device)?;
        return Ok(Arc::new(OnDevice::new(weight)));
    }
    Ok(Arc::new(Packed::new(QuantMatrix::from_nvfp4(weight)?)))
}

/// The weights of `matrix`, whose outputs are side by side, for kernels of a GPU that take several at once; `None` if they
/// are neither quantized nor dense in its memory.
pub(crate) fn device_weights(matrix: &dyn Matrix) -> Option<Vec<ForwardWeight<'_>>> {
    let matrix = matrix as &dyn Any;
    if let Some(dense) = matrix.downcast_ref::<Dense>() {
        return Some(vec![ForwardWeight::Dense(dense.weight())]);
    }
    let on_device = matrix.downcast_ref::<OnDevice>()?;
    Some(on_device.weights().map(ForwardWeight::Quantized).collect())
}

/// Joins `matrices` into as few as [`Matrix::join`] allows. The outputs and their order stay the same.
///
/// # Errors
/// Returns the errors of [`Matrix::join`].
pub fn join(matrices: Vec<Arc<dyn Matrix>>) -> Result<Vec<Arc<dyn Matrix>>> {
    let mut joined: Vec<Arc<dyn Matrix>> = Vec::with_capacity(matrices.len());
    for next in matrices {
        match joined.last_mut() {
            Some(last) => match last.join(&*next)? {
                Some(both) => *last = both,
                None => joined.push(next),
            },
            None => joined.push(next),
        }
    }
    Ok(joined)
}

/// `[rows, outputs]` for `x` `[rows, inputs]`, where row `i` is multiplied with `experts[chosen[i]]`. All
/// experts have the same shape. A row has the bits that [`Matrix::forward`] of its expert gives it. Adjacent
/// rows of one expert share a pass over its weights, so sort them by expert.
///
/// # Errors
/// If `chosen` does not name an expert for each row, there is no row, or as [`Matrix::forward`].
pub fn forward_chosen(experts: &[Arc<dyn Matrix>], x: &Tensor, chosen: &[u32]) -> Result<Tensor> {
    let mut groups: Vec<(Range<usize>, &dyn Matrix)> = Vec::new();
    for run in chosen.chunk_by(|a, b| a == b) {
        let start = groups.last().map_or(0, |(rows, _)| rows.end);
        let expert = experts.get(run[0] as usize);
        let expert = expert.ok_or_else(|| {
            Error::internal(format!("expert {} of only {}", run[0], experts.len()))
        })?;
        groups.push((start..start + run.len(), &**expert));
    }
    let [(_, first), ..] = groups[..] else {
        return Err(Error::internal("no row has an expert"));
    };
    if chosen.len() != x.dim(0)? {
        let rows = x.dim(0)?;
        return Err(Error::internal(format!(
            "{rows} rows, but experts for {}",
            chosen.len()
        )));
    }
    if let Some(y) = first.forward_groups(&groups, x)? {
        return Ok(y);
    }
    let parts = groups.iter().map(|(rows, expert)| {
        let rows = x.narrow(0, rows.start, rows.len())?;
        expert.forward(&rows.contiguous()?)
    });
    Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
}

/// Why [`Matrix::make_batch_invariant`] is impossible.
fn no_batch_invariant_kernel(matrix: &dyn Matrix) -> Error {
    let ((outputs, inputs), format) = (matrix.shape(), matrix.format());
    Error::setup(format!(
        "--batch-invariant on a GPU needs weights in bf16 or f16 whose number of inputs is a multiple of 32: one is [{outputs}, {inputs}] in {format}"
    ))
}
