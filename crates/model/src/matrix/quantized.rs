//! GGUF blocks that candle multiplies, on CPUs for which we have no kernel.

use super::Matrix;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Module, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::quant::BlockType;
use std::sync::Arc;

/// A weight in GGUF blocks.
pub struct Quantized {
    blocks: Arc<QTensor>,
    product: QMatMul,
    shape: (usize, usize),
}

/// Maximum rows per call of candle's CPU products. From [`MIN_ROWS`] to this many, a row has the same
/// bits for any number of rows (measured; `tests/it/rows.rs` checks it).
const MAX_ROWS: usize = 31;
/// Minimum rows per call of candle's CPU products: for a single row candle uses another kernel.
const MIN_ROWS: usize = 2;

impl Quantized {
    /// The weight `[outputs, inputs]`.
    ///
    /// # Errors
    /// If the tensor is not a matrix, or candle cannot use it.
    pub fn new(blocks: QTensor) -> Result<Self> {
        let blocks = Arc::new(blocks);
        Ok(Self {
            shape: blocks.shape().dims2()?,
            product: QMatMul::from_arc(blocks.clone())?,
            blocks,
        })
    }
}

impl Matrix for Quantized {
    fn shape(&self) -> (usize, usize) {
        self.shape
    }

    fn format(&self) -> String {
        BlockType::from(self.blocks.dtype()).to_string()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(by_rows(x, |x| self.product.forward(x))?)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(self.blocks.embedding(ids)?.to_dtype(dtype)?)
    }

    fn dequantize(&self) -> Result<Tensor> {
        Ok(self.blocks.dequantize(&self.blocks.device())?)
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }
}

/// Applies `product` to groups of [`MIN_ROWS`] to [`MAX_ROWS`] rows; a single row is padded with a row of
/// zeros.
fn by_rows(
    x: &Tensor,
    product: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let rows = x.dim(0)?;
    if (MIN_ROWS..=MAX_ROWS).contains(&rows) {
        return product(x);
    }
    let mut parts = Vec::with_capacity(rows.div_ceil(MAX_ROWS));
    for start in (0..rows).step_by(MAX_ROWS) {
        let len = MAX_ROWS.min(rows - start);
        let part = x.narrow(0, start, len)?;
        parts.push(if len < MIN_ROWS {
            let filled = part.pad_with_zeros(0, 0, MIN_ROWS - len)?;
            product(&filled.contiguous()?)?.narrow(0, 0, len)?
        } else {
            product(&part.contiguous()?)?
        });
    }
    Tensor::cat(&parts, 0)
}
