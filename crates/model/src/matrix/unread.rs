//! Weights of which only the header was read.

use super::{Matrix, no_batch_invariant_kernel};
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::quant::BLOCK;
use std::sync::Arc;

/// A weight without values: it has a shape, and cannot be multiplied.
pub struct Unread {
    /// Outputs and inputs.
    pub shape: (usize, usize),
    /// How the weight would be stored in memory: `bf16` or `Q4_1`.
    pub format: String,
}

impl Unread {
    /// So many weights of this shape and format.
    pub fn matrices(count: usize, shape: (usize, usize), format: &str) -> Vec<Arc<dyn Matrix>> {
        let one = || Self {
            shape,
            format: format.to_owned(),
        };
        (0..count).map(|_| Arc::new(one()) as _).collect()
    }

    fn error(&self) -> Error {
        Error::internal("only the header of this weight was read")
    }
}

impl Matrix for Unread {
    fn shape(&self) -> (usize, usize) {
        self.shape
    }

    fn format(&self) -> String {
        self.format.clone()
    }

    fn forward(&self, _: &Tensor) -> Result<Tensor> {
        Err(self.error())
    }

    fn rows(&self, _: &Tensor, _: DType) -> Result<Tensor> {
        Err(self.error())
    }

    fn dequantize(&self) -> Result<Tensor> {
        Err(self.error())
    }

    /// As that of the weight that it stands for.
    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        let is = |dtype: DType| self.format == dtype.as_str();
        let is_half = is(DType::F16) || is(DType::BF16);
        let has_kernel = is_half && self.shape.1.is_multiple_of(BLOCK);
        if is(DType::F32) || is_half && !has_kernel {
            return Err(no_batch_invariant_kernel(self));
        }
        Ok(None)
    }
}
