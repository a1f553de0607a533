//! Weights that can be multiplied. A file holds one format, and nothing else knows it, except the readers
//! of checkpoints that choose it.

mod dense;
mod packed;
mod quantized;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::kernels::dense::DenseMatrix;
use candle_core::{DType, Device, Tensor};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

pub use dense::Dense;
pub use packed::Packed;
pub use quantized::Quantized;

/// A weight `[outputs, inputs]` in one format, on one device.
///
/// A row's bits depend only on that row. On a GPU that may hold for few rows only, or not at all; then
/// [`Matrix::make_dense`] and [`Matrix::make_batch_invariant`] return a matrix for which it holds.
pub trait Matrix: Any + Send + Sync {
    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize);

    /// How the weights are stored, for messages: `bf16` or `Q4_1`.
    fn format(&self) -> String;

    /// `x @ self^T`: `[rows, outputs]` for `x` `[rows, inputs]`, contiguous, in the compute dtype (f32 on
    /// the CPU).
    ///
    /// # Errors
    /// If `x` has another width, dtype or device.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// The rows `ids`, `[n]` u32, of the weight: `[n, inputs]`, in any float dtype.
    ///
    /// # Errors
    /// If an id is not below the number of outputs (on a GPU: not checked), or the device fails.
    fn rows(&self, ids: &Tensor) -> Result<Tensor>;

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

    /// [`forward_chosen`] for `groups` of consecutive rows of `x` with their matrices, if it takes less time
    /// than one product per group; otherwise `None`.
    ///
    /// # Errors
    /// As [`Matrix::forward`].
    fn forward_groups(
        &self,
        _groups: &[(Range<usize>, &dyn Matrix)],
        _x: &Tensor,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// A dense matrix in `dtype` instead of one on a GPU whose order of additions depends on the number of
    /// rows, even of a few; otherwise `None`.
    ///
    /// # Errors
    /// If the device fails, for example because it does not have the memory.
    fn make_dense(&self, _dtype: DType) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }

    /// A matrix with one order of additions for any number of rows; `None` if this one has it.
    ///
    /// # Errors
    /// A setup error if there is no such kernel for the weight.
    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>>;

    /// Prepares for recording products in CUDA graphs; returns the maximum number of rows that they may
    /// have.
    ///
    /// # Errors
    /// If the device fails.
    fn prepare_recording(&self) -> Result<usize> {
        Ok(usize::MAX)
    }
}

/// An unquantized weight `[outputs, inputs]`: in `dtype` if given, otherwise in its own dtype, or in f32 if
/// no kernel takes that one.
///
/// # Errors
/// If the tensor is not a matrix, or `dtype` is none of f32, f16 and bf16.
pub fn unquantized(weight: &Tensor, dtype: Option<DType>) -> Result<Arc<dyn Matrix>> {
    let dtype = dtype.unwrap_or(match weight.dtype() {
        own @ (DType::F32 | DType::F16 | DType::BF16) => own,
        _ => DType::F32,
    });
    let weight = weight.to_dtype(dtype)?;
    Ok(match weight.device() {
        Device::Cpu => Arc::new(Packed::new(DenseMatrix::new(&weight)?)),
        _ => Arc::new(Dense::new(weight)?),
    })
}

/// The same outputs in the same order, with as few matrices as [`Matrix::join`] allows.
///
/// # Errors
/// As [`Matrix::join`].
pub fn join(matrices: Vec<Arc<dyn Matrix>>) -> Result<Vec<Arc<dyn Matrix>>> {
    let mut joined: Vec<Arc<dyn Matrix>> = Vec::with_capacity(matrices.len());
    for next in matrices {
        let both = match joined.last() {
            Some(last) => last.join(&*next)?,
            None => None,
        };
        match (both, joined.last_mut()) {
            (Some(both), Some(last)) => *last = both,
            _ => joined.push(next),
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
