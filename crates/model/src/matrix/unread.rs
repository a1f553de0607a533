//! Weights of which only the header was read.

use super::Matrix;
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
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

    fn rows(&self, _: &Tensor) -> Result<Tensor> {
        Err(self.error())
    }

    fn dequantize(&self) -> Result<Tensor> {
        Err(self.error())
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }
}
