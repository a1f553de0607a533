//! What an adapter adds to the outputs of one linear layer.

use crate::matrix::{Matrix, unquantized};
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::LoraPart;
use std::sync::Arc;

/// `scale * B (A x)` for each of the weights that are side by side in a layer.
pub(super) struct LowRank {
    /// `A` of all weights, one below the other: `[sum of ranks, inputs]`.
    down: Arc<dyn Matrix>,
    ups: Vec<Up>,
}

/// The part of one weight.
struct Up {
    outputs: usize,
    /// `B`, `[outputs, rank]`, and the scale; `None` = nothing is added to these outputs.
    product: Option<(Arc<dyn Matrix>, f64)>,
}

impl LowRank {
    /// Joins the pairs of weights that are side by side in a layer. `None` = no weight has a pair.
    ///
    /// # Errors
    /// If the tensors are no matrices with the same inputs.
    pub fn new(parts: Vec<LoraPart>) -> Result<Option<Self>> {
        let of_parts: Vec<&Tensor> = (parts.iter())
            .filter_map(|part| Some(&part.pair.as_ref()?.down))
            .collect();
        let Some(first) = of_parts.first() else {
            return Ok(None);
        };
        let is_like_first = |a: &&Tensor| a.dtype() == first.dtype();
        let down = if of_parts.iter().all(is_like_first) {
            Tensor::cat(&of_parts, 0)?
        } else {
            let wide = of_parts.iter().map(|a| a.to_dtype(DType::F32));
            Tensor::cat(&wide.collect::<candle_core::Result<Vec<_>>>()?, 0)?
        };
        let ups = parts.into_iter().map(|part| {
            let product = match part.pair {
                Some(pair) => Some((unquantized(&pair.up, None)?, f64::from(pair.scale))),
                None => None,
            };
            let outputs = part.outputs;
            Ok(Up { outputs, product })
        });
        Ok(Some(Self {
            ups: ups.collect::<Result<_>>()?,
            down: unquantized(&down, None)?,
        }))
    }

    /// What is added to the outputs for `x`, `[rows, inputs]`, contiguous: `[rows, outputs]`.
    ///
    /// # Errors
    /// If `x` has another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, inner) = (x.dim(0)?, self.down.forward(x)?);
        let mut start = 0;
        let mut parts = Vec::with_capacity(self.ups.len());
        for Up { outputs, product } in &self.ups {
            parts.push(match product {
                Some((up, scale)) => {
                    let rank = up.shape().1;
                    let own = inner.narrow(1, start, rank)?;
                    start += rank;
                    up.forward(&(own.contiguous()? * *scale)?)?
                }
                None => Tensor::zeros((rows, *outputs), inner.dtype(), inner.device())?,
            });
        }
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            several => Ok(Tensor::cat(several, 1)?),
        }
    }
}
