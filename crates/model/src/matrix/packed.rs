//! Weights in layouts of our own, unquantized or quantized, on the CPU.

use super::Matrix;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::matmul::{CpuMatrix, Group, matmul};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// One or more weights with the same inputs; their outputs are side by side.
pub struct Packed<M>(Vec<Arc<M>>);

impl<M: CpuMatrix> Packed<M> {
    /// A single weight.
    pub fn new(weight: M) -> Self {
        Self(vec![Arc::new(weight)])
    }

    fn group(&self, rows: Range<usize>) -> Group<'_, M> {
        let weights = self.0.iter().map(|w| &**w).collect();
        Group { rows, weights }
    }

    /// `matrix`, if it is of the same kind.
    fn of(matrix: &dyn Matrix) -> Option<&Self> {
        (matrix as &dyn Any).downcast_ref()
    }
}

impl<M: CpuMatrix> Matrix for Packed<M> {
    fn shape(&self) -> (usize, usize) {
        let outputs = self.0.iter().map(|w| w.shape().0);
        (outputs.sum(), self.0[0].shape().1)
    }

    fn format(&self) -> String {
        let formats = self.0.iter().map(|w| w.format());
        formats.collect::<Vec<_>>().join(", ")
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(matmul(&[self.group(0..x.dim(0)?)], x)?)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        let (outputs, inputs) = self.shape();
        let ids = ids.to_vec1::<u32>()?;
        let mut rows = vec![0f32; ids.len() * inputs];
        for (row, &id) in rows.chunks_exact_mut(inputs).zip(&ids) {
            let mut output = id as usize;
            if output >= outputs {
                return Err(Error::internal(format!(
                    "token {id} is outside the vocabulary of {outputs}"
                )));
            }
            for weight in &self.0 {
                let own = weight.shape().0;
                if output < own {
                    weight.read_row(output, row);
                    break;
                }
                output -= own;
            }
        }
        let rows = Tensor::from_vec(rows, (ids.len(), inputs), &Device::Cpu)?;
        Ok(rows.to_dtype(dtype)?)
    }

    fn dequantize(&self) -> Result<Tensor> {
        let outputs = self.shape().0 as u32;
        self.rows(&Tensor::arange(0, outputs, &Device::Cpu)?, DType::F32)
    }

    fn join(&self, next: &dyn Matrix) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(Self::of(next).map(|next| {
            let weights = [&self.0[..], &next.0].concat();
            Arc::new(Self(weights)) as Arc<dyn Matrix>
        }))
    }

    fn forward_groups(
        &self,
        groups: &[(Range<usize>, &dyn Matrix)],
        x: &Tensor,
    ) -> Result<Option<Tensor>> {
        let groups = groups.iter();
        let groups = groups.map(|(rows, matrix)| Some(Self::of(*matrix)?.group(rows.clone())));
        let groups = groups.collect::<Option<Vec<_>>>();
        Ok(groups.map(|groups| matmul(&groups, x)).transpose()?)
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }
}
