//! Quantized weights on a GPU, in a layout of our own.

use super::Matrix;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::Activation;
use foretoken_kernels::quant::{DeviceQuantMatrix, gated_quantized, matmul_quantized};
use std::any::Any;
use std::sync::Arc;

/// One or more weights with the same inputs; their outputs are side by side. Up to
/// [`EXACT_ROWS`](foretoken_kernels::EXACT_ROWS) rows have one order of additions.
pub struct OnDevice {
    weights: Vec<Arc<DeviceQuantMatrix>>,
    /// Whether all numbers of rows have one order of additions.
    batch_invariant: bool,
}

impl OnDevice {
    /// The weights, in the order of their outputs.
    pub fn weights(&self) -> impl Iterator<Item = &DeviceQuantMatrix> {
        self.weights.iter().map(|weight| &**weight)
    }

    /// A single weight.
    pub fn new(weight: DeviceQuantMatrix) -> Self {
        Self {
            weights: vec![Arc::new(weight)],
            batch_invariant: false,
        }
    }
}

impl Matrix for OnDevice {
    fn shape(&self) -> (usize, usize) {
        let outputs = self.weights.iter().map(|weight| weight.shape().0);
        (outputs.sum(), self.weights[0].shape().1)
    }

    fn format(&self) -> String {
        let formats = self.weights.iter().map(|weight| weight.kind().to_string());
        formats.collect::<Vec<_>>().join(", ")
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let weights: Vec<_> = self.weights().collect();
        Ok(matmul_quantized(&weights, x, self.batch_invariant)?)
    }

    fn forward_gated(&self, x: &Tensor, activation: Activation) -> Result<Option<Tensor>> {
        let weights: Vec<_> = self.weights().collect();
        Ok(gated_quantized(&weights, x, activation)?)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        match &self.weights[..] {
            [one] => Ok(one.rows(ids, dtype)?),
            // Which weight has an id is known on the GPU only.
            _ => Ok(self.dequantize()?.index_select(ids, 0)?.to_dtype(dtype)?),
        }
    }

    fn dequantize(&self) -> Result<Tensor> {
        let parts = self.weights.iter();
        let parts = parts.map(|weight| weight.dequantize(DType::F32));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&parts, 0)?)
    }

    fn join(&self, next: &dyn Matrix) -> Result<Option<Arc<dyn Matrix>>> {
        let next = (next as &dyn Any).downcast_ref::<Self>();
        Ok(next.map(|next| {
            Arc::new(Self {
                weights: [&self.weights[..], &next.weights].concat(),
                batch_invariant: self.batch_invariant || next.batch_invariant,
            }) as Arc<dyn Matrix>
        }))
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(Some(Arc::new(Self {
            weights: self.weights.clone(),
            batch_invariant: true,
        })))
    }
}
