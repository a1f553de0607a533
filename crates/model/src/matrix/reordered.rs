//! Weights whose inputs are in another order than the rows that they are multiplied with, on the CPU.

use super::Matrix;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::Result;
use std::any::Any;
use std::sync::Arc;

/// A weight, and the order of its inputs.
pub struct Reordered {
    matrix: Arc<dyn Matrix>,
    /// Input `i` of the weight is input `order[i]` of rows.
    order: Tensor,
    /// Where each input of rows is among those of the weight.
    places: Tensor,
}

impl Reordered {
    /// The weight `matrix`, of which input `i` is input `order[i]` of rows.
    ///
    /// # Errors
    /// If the order does not have each input once.
    pub fn new(matrix: Arc<dyn Matrix>, order: &[u32]) -> Result<Self> {
        let mut places = vec![u32::MAX; order.len()];
        for (place, &input) in (0..).zip(order) {
            if let Some(entry) = places.get_mut(input as usize) {
                *entry = place;
            }
        }
        if order.len() != matrix.shape().1 || places.contains(&u32::MAX) {
            return Err(foretoken_core::error::Error::internal(
                "no order of a weight's inputs",
            ));
        }
        Ok(Self {
            matrix,
            order: Tensor::new(order, &Device::Cpu)?,
            places: Tensor::new(places, &Device::Cpu)?,
        })
    }
}

impl Matrix for Reordered {
    fn shape(&self) -> (usize, usize) {
        self.matrix.shape()
    }

    fn format(&self) -> String {
        self.matrix.format()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.matrix.forward(&x.index_select(&self.order, 1)?)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        let rows = self.matrix.rows(ids, dtype)?;
        Ok(rows.index_select(&self.places, 1)?)
    }

    fn dequantize(&self) -> Result<Tensor> {
        Ok(self.matrix.dequantize()?.index_select(&self.places, 1)?)
    }

    /// If both have the same order, as those have that were quantized with the same rows.
    fn join(&self, next: &dyn Matrix) -> Result<Option<Arc<dyn Matrix>>> {
        let Some(next) = (next as &dyn Any).downcast_ref::<Self>() else {
            return Ok(None);
        };
        if self.order.to_vec1::<u32>()? != next.order.to_vec1::<u32>()? {
            return Ok(None);
        }
        let joined = self.matrix.join(&*next.matrix)?;
        Ok(joined.map(|matrix| {
            let (order, places) = (self.order.clone(), self.places.clone());
            Arc::new(Self {
                matrix,
                order,
                places,
            }) as Arc<dyn Matrix>
        }))
    }

    fn make_batch_invariant(&self) -> Result<Option<Arc<dyn Matrix>>> {
        Ok(None)
    }
}
