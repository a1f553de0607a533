//! The two uses of a weight matrix: products and lookups.

use crate::error::Result;
use crate::kernels::quant::{self, QuantMatrix};
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use std::sync::Arc;

/// A weight `[outputs, inputs]`, as it is kept.
#[derive(Clone)]
pub enum Weight {
    /// In the compute dtype.
    Dense(Tensor),
    /// Blocks of 8 or 4 bits in our own layout; CPU only.
    Tiled(Arc<QuantMatrix>),
    /// GGUF blocks that candle multiplies.
    Quantized(Arc<QTensor>),
}

/// `x @ weight^T + bias`, where a row's bits depend on that row alone (on the CPU). Several layers
/// that take the same input may be joined to one, whose outputs follow one another.
#[derive(Clone)]
pub struct Linear {
    /// Not empty.
    weights: Vec<Product>,
    outputs: usize,
    bias: Option<Tensor>,
}

#[derive(Clone)]
enum Product {
    Dense(Tensor),
    Tiled(Arc<QuantMatrix>),
    Quantized(QMatMul),
}

/// Most rows that candle's CPU products are called with. Up to here they give a row the same bits
/// whatever the count (measured; `tests/rows.rs` guards it), if it is not below [`fewest_rows`].
const MOST_ROWS: usize = 31;

/// Fewest rows that keep candle's CPU products on the kernels that longer calls use. A single row
/// takes another one; so do dense products of up to 256 results.
fn fewest_rows(outputs: usize) -> usize {
    (256 / outputs.max(1) + 1).max(2)
}

impl Linear {
    /// A linear layer; `bias` is `[outputs]` in the compute dtype.
    ///
    /// # Errors
    /// Where candle cannot use the weight.
    pub fn new(weight: Weight, bias: Option<Tensor>) -> Result<Self> {
        let (outputs, weight) = match weight {
            Weight::Dense(w) => (w.dim(0)?, Product::Dense(w)),
            Weight::Tiled(w) => (w.shape().0, Product::Tiled(w)),
            Weight::Quantized(w) => (
                w.shape().dims()[0],
                Product::Quantized(QMatMul::from_arc(w)?),
            ),
        };
        Ok(Self {
            weights: vec![weight],
            outputs,
            bias,
        })
    }

    /// One layer that gives the outputs of all, in order.
    ///
    /// # Errors
    /// Where the biases cannot be joined.
    pub fn join(layers: Vec<Self>) -> Result<Self> {
        let bias = if layers.iter().any(|l| l.bias.is_some()) {
            let biases: Vec<Tensor> = layers
                .iter()
                .map(Self::bias_or_zeros)
                .collect::<Result<_>>()?;
            Some(Tensor::cat(&biases, 0)?)
        } else {
            None
        };
        Ok(Self {
            outputs: layers.iter().map(|l| l.outputs).sum(),
            weights: layers.into_iter().flat_map(|l| l.weights).collect(),
            bias,
        })
    }

    fn bias_or_zeros(&self) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => Ok(bias.clone()),
            None => Ok(Tensor::zeros(self.outputs, DType::F32, &Device::Cpu)?),
        }
    }

    /// `[rows, outputs]` for `x` `[rows, inputs]`, contiguous, in the compute dtype.
    ///
    /// # Errors
    /// Where `x` has another width, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.weights.len());
        let mut rest = self.weights.as_slice();
        while let Some(first) = rest.first() {
            // Neighbours in tiles are one call.
            let tiled: Vec<&QuantMatrix> = rest.iter().map_while(Product::tiled).collect();
            rest = &rest[tiled.len().max(1)..];
            parts.push(match first {
                Product::Tiled(_) => {
                    quant::matmul(&tiled, &x.to_dtype(DType::F32)?)?.to_dtype(x.dtype())?
                }
                Product::Dense(w) => by_rows(x, fewest_rows(w.dim(0)?), |x| x.matmul(&w.t()?))?,
                Product::Quantized(w) => by_rows(x, 2, |x| w.forward(x))?,
            });
        }
        let y = match parts.as_slice() {
            [one] => one.clone(),
            parts => Tensor::cat(parts, 1)?,
        };
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }
}

impl Product {
    fn tiled(&self) -> Option<&QuantMatrix> {
        match self {
            Self::Tiled(w) => Some(w),
            _ => None,
        }
    }
}

/// Applies `product` to runs of rows that it treats alike; runs of less than `fewest` rows are filled
/// up with zeros. A GPU takes all rows at once.
fn by_rows(
    x: &Tensor,
    fewest: usize,
    product: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let rows = x.dim(0)?;
    let most = MOST_ROWS.max(fewest);
    if !x.device().is_cpu() || (fewest..=most).contains(&rows) {
        return product(x);
    }
    let mut parts = Vec::with_capacity(rows.div_ceil(most));
    for start in (0..rows).step_by(most) {
        let len = most.min(rows - start);
        let part = x.narrow(0, start, len)?;
        parts.push(if len < fewest {
            let filled = part.pad_with_zeros(0, 0, fewest - len)?;
            product(&filled.contiguous()?)?.narrow(0, 0, len)?
        } else {
            product(&part.contiguous()?)?
        });
    }
    Tensor::cat(&parts, 0)
}

/// Token ids to rows.
pub struct Embedding {
    weight: Weight,
    dtype: DType,
    hidden: usize,
}

impl Embedding {
    /// A lookup in `weight` `[vocab, hidden]` that gives rows in `dtype`.
    pub fn new(weight: Weight, hidden: usize, dtype: DType) -> Self {
        Self {
            weight,
            dtype,
            hidden,
        }
    }

    /// `[ids.len(), hidden]` for `ids` `[n]` u32.
    ///
    /// # Errors
    /// Where an id is outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let rows = match &self.weight {
            Weight::Dense(w) => w.index_select(ids, 0)?,
            Weight::Quantized(w) => w.embedding(ids)?,
            Weight::Tiled(w) => {
                let ids = ids.to_vec1::<u32>()?;
                let mut rows = vec![0f32; ids.len() * self.hidden];
                for (row, &id) in rows.chunks_exact_mut(self.hidden).zip(&ids) {
                    if id as usize >= w.shape().0 {
                        let vocab = w.shape().0;
                        return Err(crate::error::Error::internal(format!(
                            "token {id} is outside the vocabulary of {vocab}"
                        )));
                    }
                    w.dequantize_row(id as usize, row);
                }
                Tensor::from_vec(rows, (ids.len(), self.hidden), &Device::Cpu)?
            }
        };
        Ok(rows.to_dtype(self.dtype)?)
    }

    /// The output layer that shares this weight.
    ///
    /// # Errors
    /// Where candle cannot use the weight.
    pub fn tied_head(&self) -> Result<Linear> {
        Linear::new(self.weight.clone(), None)
    }
}
