//! The two uses of a weight matrix: products and embedding lookups.

use crate::error::{Error, Result};
use crate::kernels::dense::{self, DenseMatrix};
use crate::kernels::quant::{self, QuantMatrix};
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use std::sync::Arc;

/// A weight `[outputs, inputs]`, as it is stored.
#[derive(Clone)]
pub enum Weight {
    /// Not quantized, on a GPU, in the compute dtype.
    Dense(Tensor),
    /// Not quantized, in our own layout; CPU only.
    Packed(Arc<DenseMatrix>),
    /// Quantized blocks in our own layout; CPU only.
    Tiled(Arc<QuantMatrix>),
    /// GGUF blocks that candle multiplies.
    Quantized(Arc<QTensor>),
}

impl Weight {
    /// An unquantized weight `[outputs, inputs]`: in `dtype` if given, otherwise in its own dtype, or in
    /// f32 if no kernel takes that one.
    ///
    /// # Errors
    /// If the tensor is not a matrix, or `dtype` is none of f32, f16 and bf16.
    pub fn dense(weight: &Tensor, dtype: Option<DType>) -> Result<Self> {
        let dtype = dtype.unwrap_or(match weight.dtype() {
            own @ (DType::F32 | DType::F16 | DType::BF16) => own,
            _ => DType::F32,
        });
        let weight = weight.to_dtype(dtype)?;
        Ok(match weight.device() {
            Device::Cpu => Self::Packed(Arc::new(DenseMatrix::new(&weight)?)),
            _ => Self::Dense(weight),
        })
    }
}

/// `x @ weight^T + bias`, where a row's bits depend only on that row (on a GPU: see
/// [`Linear::set_batch_invariant`]). Layers with the same input can be joined into one, with their
/// outputs side by side. A clone shares the weights.
#[derive(Clone)]
pub struct Linear {
    /// Not empty.
    weights: Vec<Product>,
    outputs: usize,
    bias: Option<Tensor>,
    /// Whether a GPU uses one order of additions for any number of rows.
    batch_invariant: bool,
}

#[derive(Clone)]
enum Product {
    Dense(Tensor),
    Packed(Arc<DenseMatrix>),
    Tiled(Arc<QuantMatrix>),
    Quantized(QMatMul),
}

/// Maximum rows per call of candle's CPU products. From [`MIN_ROWS`] to this many, a row has the same
/// bits for any number of rows (measured; `tests/it/rows.rs` checks it).
const MAX_ROWS: usize = 31;
/// Minimum rows per call of candle's CPU products: for a single row candle uses another kernel.
const MIN_ROWS: usize = 2;
/// Maximum rows of candle's GPU kernels for few rows.
const MAX_FEW_ROWS_ON_GPU: usize = 8;

impl Linear {
    /// A linear layer; `bias` is `[outputs]` in the compute dtype.
    ///
    /// # Errors
    /// If candle cannot use the weight.
    pub fn new(weight: Weight, bias: Option<Tensor>) -> Result<Self> {
        let (outputs, weight) = match weight {
            Weight::Dense(w) => (w.dim(0)?, Product::Dense(w)),
            Weight::Packed(w) => (w.shape().0, Product::Packed(w)),
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
            batch_invariant: false,
        })
    }

    /// Joins layers into one that computes the outputs of all, in order.
    ///
    /// # Errors
    /// If the biases cannot be joined.
    pub fn join(layers: Vec<Self>) -> Result<Self> {
        let bias = if layers.iter().any(|l| l.bias.is_some()) {
            let like = layers.iter().find_map(|l| l.bias.as_ref());
            let biases: Vec<Tensor> = layers
                .iter()
                .filter_map(|layer| Some(layer.bias_or_zeros(like?)))
                .collect::<Result<_>>()?;
            Some(Tensor::cat(&biases, 0)?)
        } else {
            None
        };
        let outputs = layers.iter().map(|l| l.outputs).sum();
        let mut weights: Vec<Product> = layers.into_iter().flat_map(|l| l.weights).collect();
        join_dense(&mut weights)?;
        Ok(Self {
            weights,
            outputs,
            bias,
            batch_invariant: false,
        })
    }

    /// Makes quantized weights on a GPU dense, in `dtype`: candle's kernels for them have an order of
    /// additions that depends on the number of rows. On the CPU nothing changes.
    ///
    /// # Errors
    /// If the device fails.
    pub fn make_dense(&mut self, dtype: DType) -> Result<()> {
        for weight in &mut self.weights {
            let dense = match &*weight {
                Product::Quantized(QMatMul::QTensor(w)) if w.device().is_cpu() => continue,
                Product::Quantized(QMatMul::QTensor(w)) => w.dequantize(&w.device())?,
                Product::Quantized(QMatMul::Tensor(w) | QMatMul::TensorF16(w)) => w.clone(),
                Product::Dense(_) | Product::Packed(_) | Product::Tiled(_) => continue,
            };
            *weight = Product::Dense(dense.to_dtype(dtype)?);
        }
        join_dense(&mut self.weights)
    }

    /// Uses one order of additions on a GPU for any number of rows. On the CPU nothing changes.
    ///
    /// # Errors
    /// A setup error if there is no such kernel for a weight.
    pub fn set_batch_invariant(&mut self) -> Result<()> {
        for dense in self.weights.iter().filter_map(Product::dense) {
            if !dense::has_kernel_on_device(dense)? {
                return Err(Error::setup(format!(
                    "--batch-invariant on a GPU needs weights in bf16 or f16 whose number of inputs is a multiple of 32: one is {:?} in {}",
                    dense.dims(),
                    dense.dtype().as_str()
                )));
            }
        }
        self.batch_invariant = true;
        Ok(())
    }

    /// Prepares for recording products in CUDA graphs, and returns the maximum number of rows that they
    /// may have. On a GPU, candle quantizes activations to a buffer of its own, which it frees when it
    /// needs a larger one; a graph would go on using the old one. So this makes candle allocate the
    /// largest buffer that products of few rows need. Products of many rows do not use it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn prepare_recording(&self) -> Result<usize> {
        let mut max_rows = usize::MAX;
        for weight in &self.weights {
            if let Product::Quantized(product) = weight
                && let QMatMul::QTensor(w) = product
            {
                let dims = (MAX_FEW_ROWS_ON_GPU, w.shape().dims2()?.1);
                product.forward(&Tensor::zeros(dims, DType::F32, &w.device())?)?;
                max_rows = MAX_FEW_ROWS_ON_GPU;
            }
        }
        Ok(max_rows)
    }

    fn bias_or_zeros(&self, like: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => Ok(bias.clone()),
            None => Ok(Tensor::zeros(self.outputs, like.dtype(), like.device())?),
        }
    }

    /// `[rows, outputs]` for `x` `[rows, inputs]`, contiguous, in the compute dtype (f32 on
    /// the CPU).
    ///
    /// # Errors
    /// If `x` has another width, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.weights.len());
        let mut rest = self.weights.as_slice();
        while let Some(first) = rest.first() {
            // Adjacent weights of the same kind share one call.
            let (part, count) = match first {
                Product::Tiled(_) => {
                    let run: Vec<_> = rest.iter().map_while(Product::tiled).collect();
                    (quant::matmul(&run, x)?, run.len())
                }
                Product::Packed(_) => {
                    let run: Vec<_> = rest.iter().map_while(Product::packed).collect();
                    (dense::matmul(&run, x)?, run.len())
                }
                Product::Dense(w) => (dense::matmul_on_device(w, x, self.batch_invariant)?, 1),
                Product::Quantized(w) => (by_rows(x, |x| w.forward(x))?, 1),
            };
            parts.push(part);
            rest = &rest[count..];
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

/// Makes one weight of several if all are dense: they can only share a call as one tensor.
fn join_dense(weights: &mut Vec<Product>) -> Result<()> {
    let dense: Vec<&Tensor> = weights.iter().filter_map(Product::dense).collect();
    if dense.len() > 1 && dense.len() == weights.len() {
        *weights = vec![Product::Dense(Tensor::cat(&dense, 0)?)];
    }
    Ok(())
}

impl Product {
    fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(w) => Some(w),
            _ => None,
        }
    }

    fn tiled(&self) -> Option<&QuantMatrix> {
        match self {
            Self::Tiled(w) => Some(w),
            _ => None,
        }
    }

    fn packed(&self) -> Option<&DenseMatrix> {
        match self {
            Self::Packed(w) => Some(w),
            _ => None,
        }
    }
}

/// Applies `product` to groups of [`MIN_ROWS`] to [`MAX_ROWS`] rows; a single row is padded with a row of
/// zeros. A GPU takes all rows at once.
fn by_rows(
    x: &Tensor,
    product: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let rows = x.dim(0)?;
    if !x.device().is_cpu() || (MIN_ROWS..=MAX_ROWS).contains(&rows) {
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

/// Maps token ids to rows. A clone shares the weight.
#[derive(Clone)]
pub struct Embedding {
    weight: Weight,
    dtype: DType,
    hidden: usize,
}

impl Embedding {
    /// A lookup in `weight` `[vocab, hidden]` that returns rows in `dtype`.
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
    /// If an id is outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let rows = match &self.weight {
            Weight::Dense(w) => w.index_select(ids, 0)?,
            Weight::Quantized(w) => w.embedding(ids)?,
            Weight::Tiled(w) => self.rows(ids, w.shape().0, |id, row| w.dequantize_row(id, row))?,
            Weight::Packed(w) => self.rows(ids, w.shape().0, |id, row| w.row(id, row))?,
        };
        Ok(rows.to_dtype(self.dtype)?)
    }

    /// The rows of `ids`, each written by `read`.
    fn rows(&self, ids: &Tensor, vocab: usize, read: impl Fn(usize, &mut [f32])) -> Result<Tensor> {
        let ids = ids.to_vec1::<u32>()?;
        let mut rows = vec![0f32; ids.len() * self.hidden];
        for (row, &id) in rows.chunks_exact_mut(self.hidden).zip(&ids) {
            if id as usize >= vocab {
                return Err(Error::internal(format!(
                    "token {id} is outside the vocabulary of {vocab}"
                )));
            }
            read(id as usize, row);
        }
        Ok(Tensor::from_vec(
            rows,
            (ids.len(), self.hidden),
            &Device::Cpu,
        )?)
    }

    /// The output layer that shares this weight.
    ///
    /// # Errors
    /// If candle cannot use the weight.
    pub fn tied_head(&self) -> Result<Linear> {
        Linear::new(self.weight.clone(), None)
    }
}
