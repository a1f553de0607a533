//! Unquantized weights in candle's layout, on a GPU.

use super::{Matrix, no_batch_invariant_kernel};
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::dense::{gated_on_device, has_kernel_on_device, matmul_on_device};
use foretoken_kernels::{Activation, pick_rows};
use std::any::Any;
use std::sync::Arc;

/// A weight in the compute dtype. Up to [`EXACT_ROWS`](foretoken_kernels::EXACT_ROWS) rows of f16 or bf16 have one order
/// of additions.
pub struct Dense {
    weight: Tensor,
    shape: (usize, usize),
    /// Whether all numbers of rows have one order of additions.
    batch_invariant: bool,
}

impl Dense {
    /// The weight `[outputs, inputs]`.
    ///
    /// # Errors
    /// If the tensor is not a matrix.
    pub fn new(weight: Tensor) -> Result<Self> {
        Ok(Self {
            shape: weight.dims2()?,
            weight,
            batch_invariant: false,
        })
    }

    /// The weight `[outputs, inputs]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Matrix for Dense {
    fn shape(&self) -> (usize, usize) {
        self.shape
    }

    fn format(&self) -> String {
        self.weight.dtype().as_str().to_owned()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(matmul_on_device(&self.weight, x, self.batch_invariant)?)
    }

    fn forward_gated(&self, x: &Tensor, activation: Activation) -> Result<Option<Tensor>> {
        Ok(gated_on_device(&self.weight, x, activation)?)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(pick_rows(&self.weight, ids)?.to_dtype(dtype)?)
    }

    fn dequantize(&self) -> Result<Tensor> {
        Ok(self.weight.to_dtype(DType::F32)?)
    }

    /// One tensor of the two: they can only share a call that way.
    fn join(&self, next: &dyn Matrix) -> Result<Option<Arc<dyn Matrix>>> {
        let Some(next) = (next as &dyn Any).downcast_ref::<Self>() else {
            return Ok(None);
        };
        let mut joined = Self::new(Tensor::cat(&[&self.weight, &next.weight], 0)?)?;
        joined.batch_invariant = self.batch_invariant || next.batch_invariant;
        Ok(Some(Arc::new(joined)))
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        if !has_kernel_on_device(&self.weight)? {
            return Err(no_batch_invariant_kernel(self));
        }
        Ok(Some(Arc::new(Self {
            weight: self.weight.clone(),
            batch_invariant: true,
            ..*self
        })))
    }
}
