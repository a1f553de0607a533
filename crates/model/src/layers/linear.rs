//! The two uses of a weight matrix: products and embedding lookups.

use crate::lora::{LinearPart, RowAdapters};
use crate::matrix::{Matrix, device_weights, join};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{Activation, ForwardLinear, glu, rms_norm};
use std::sync::Arc;

/// `(x @ weight^T + bias) * scales`, where a row's bits depend only on that row (on a GPU: see
/// `Linear::set_batch_invariant`). Layers with the same input can be joined into one, with their
/// outputs side by side. A clone shares the weights.
#[derive(Clone)]
pub struct Linear {
    /// Not empty.
    matrices: Vec<Arc<dyn Matrix>>,
    bias: Option<Tensor>,
    /// Factors of the outputs, with what biases and adapters add: `[outputs]` in the compute dtype.
    scales: Option<Tensor>,
    /// The weights that adapters know, in order; empty if they do not know all of its outputs.
    parts: Vec<LinearPart>,
    /// The place of this layer among those that adapters can change; `None` = it is none of them.
    site: Option<usize>,
}

impl Linear {
    /// A linear layer; `bias` is `[outputs]` in the compute dtype.
    pub fn new(matrix: Arc<dyn Matrix>, bias: Option<Tensor>) -> Self {
        Self {
            matrices: vec![matrix],
            bias,
            scales: None,
            parts: Vec::new(),
            site: None,
        }
    }

    /// Sets the factors of its outputs, `[outputs]` in the compute dtype; `None` = they are 1.
    pub(crate) fn scaled(self, scales: Option<Tensor>) -> Self {
        Self { scales, ..self }
    }

    /// Sets the weight that adapters know this layer by: `name`. Output `i` of the layer is row `order[i]` of the
    /// weight; `None` = row `i`.
    pub fn named(self, name: &str, order: Option<&[u32]>) -> Self {
        let (outputs, inputs) = self.shape();
        let part = LinearPart {
            name: name.to_owned(),
            outputs,
            inputs,
            order: order.map(Into::into),
        };
        Self {
            parts: vec![part],
            ..self
        }
    }

    /// Sets the order of the rows that adapters have, which is not that of this checkpoint: as [`Linear::named`].
    pub(crate) fn with_rows_of_adapters(mut self, order: Option<&[u32]>) -> Self {
        for part in &mut self.parts {
            part.order = order.map(Into::into);
        }
        self
    }

    /// Makes it number `site` of the layers that adapters can change; returns its weights.
    pub(crate) fn set_site(&mut self, site: usize) -> &[LinearPart] {
        self.site = Some(site);
        &self.parts
    }

    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize) {
        let outputs = self.matrices.iter().map(|matrix| matrix.shape().0);
        let inputs = self.matrices.first().map_or(0, |matrix| matrix.shape().1);
        (outputs.sum(), inputs)
    }

    /// Joins layers into one that computes the outputs of all, in order.
    ///
    /// # Errors
    /// If the weights, biases or factors cannot be joined.
    pub fn join(layers: Vec<Self>) -> Result<Self> {
        let bias = joined(&layers, |layer| layer.bias.as_ref(), Tensor::zeros)?;
        let scales = joined(&layers, |layer| layer.scales.as_ref(), Tensor::ones)?;
        let has_parts = layers.iter().all(|layer| !layer.parts.is_empty());
        let (mut matrices, mut parts) = (Vec::new(), Vec::new());
        for layer in layers {
            matrices.extend(layer.matrices);
            parts.extend(layer.parts);
        }
        Ok(Self {
            matrices: join(matrices)?,
            bias,
            scales,
            parts: if has_parts { parts } else { Vec::new() },
            site: None,
        })
    }

    /// Uses one order of additions on a GPU for any number of rows. On the CPU nothing changes.
    ///
    /// # Errors
    /// A setup error if there is no such kernel for a weight.
    pub(crate) fn set_batch_invariant(&mut self) -> Result<()> {
        for matrix in &mut self.matrices {
            if let Some(other) = matrix.make_batch_invariant()? {
                *matrix = other;
            }
        }
        Ok(())
    }

    /// The layer as a part of a forward in one launch; `None` if a weight is neither quantized nor dense on a GPU, or
    /// outputs have factors.
    pub(crate) fn in_one_launch(&self) -> Option<ForwardLinear<'_>> {
        if self.scales.is_some() {
            return None;
        }
        let mut weights = Vec::new();
        for matrix in &self.matrices {
            weights.extend(device_weights(&**matrix)?);
        }
        Some(ForwardLinear {
            weights,
            bias: self.bias.as_ref(),
        })
    }

    /// `[rows, outputs]` for `x` `[rows, inputs]`, contiguous, in the compute dtype (f32 on
    /// the CPU).
    ///
    /// # Errors
    /// If `x` has another width, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.times_scales(self.products(x)?)
    }

    /// The outputs without their factors.
    fn products(&self, x: &Tensor) -> Result<Tensor> {
        let y = match self.matrices.as_slice() {
            [one] => one.forward(x)?,
            several => {
                let parts = several.iter().map(|matrix| matrix.forward(x));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }

    fn times_scales(&self, y: Tensor) -> Result<Tensor> {
        Ok(match &self.scales {
            Some(scales) => y.broadcast_mul(scales)?,
            None => y,
        })
    }

    /// As [`Linear::forward`], plus what the adapters of the rows add.
    ///
    /// # Errors
    /// Returns the errors of [`Linear::forward`].
    pub(crate) fn forward_adapted(&self, x: &Tensor, adapters: &RowAdapters) -> Result<Tensor> {
        let y = self.products(x)?;
        if let Some(site) = self.site {
            adapters.add(site, x, &y)?;
        }
        self.times_scales(y)
    }

    /// `activation(gate) * up`, where `gate` and `up` are the halves of [`Linear::forward_adapted`].
    ///
    /// # Errors
    /// Returns the errors of [`Linear::forward`].
    pub(crate) fn forward_gated(
        &self,
        x: &Tensor,
        adapters: &RowAdapters,
        activation: Activation,
    ) -> Result<Tensor> {
        if let ([one], None, None, true) = (
            &self.matrices[..],
            &self.bias,
            &self.scales,
            adapters.are_none(),
        ) && let Some(y) = one.forward_gated(x, activation)?
        {
            return Ok(y);
        }
        Ok(glu(&self.forward_adapted(x, adapters)?, activation)?)
    }
}

/// The vectors `of` all layers, one after the other, with `missing` ones for the outputs of layers without; `None` = no
/// layer has one.
fn joined(
    layers: &[Linear],
    of: impl Fn(&Linear) -> Option<&Tensor>,
    missing: impl Fn(usize, DType, &Device) -> candle_core::Result<Tensor>,
) -> Result<Option<Tensor>> {
    let Some(like) = layers.iter().find_map(&of) else {
        return Ok(None);
    };
    let one = |layer: &Linear| -> Result<Tensor> {
        match of(layer) {
            Some(vector) => Ok(vector.clone()),
            None => Ok(missing(layer.shape().0, like.dtype(), like.device())?),
        }
    };
    let all: Vec<Tensor> = layers.iter().map(one).collect::<Result<_>>()?;
    Ok(Some(Tensor::cat(&all, 0)?))
}

/// Maps token ids to rows. A clone shares the weight.
#[derive(Clone)]
pub struct Embedding {
    matrix: Arc<dyn Matrix>,
    dtype: DType,
    /// Factor of the rows.
    scale: Option<f32>,
    /// The RMSNorm of the rows: its weight, ones, `[hidden]`, and what it adds to the mean square.
    norm: Option<(Tensor, f32)>,
}

impl Embedding {
    /// A lookup in `matrix`, `[vocab, hidden]`, that returns rows in `dtype`.
    pub fn new(matrix: Arc<dyn Matrix>, dtype: DType) -> Self {
        Self {
            matrix,
            dtype,
            scale: None,
            norm: None,
        }
    }

    /// This embedding, with its rows multiplied by `scale`; `None` = as they are. They then have no norm.
    pub fn scaled(self, scale: Option<f32>) -> Self {
        Self {
            scale: scale.filter(|&scale| scale != 1.),
            norm: None,
            ..self
        }
    }

    /// This embedding with an RMSNorm without weights of its rows of `hidden` values, on `device`. The norm adds `eps` to the
    /// mean square.
    ///
    /// # Errors
    /// If the device has no memory.
    pub(crate) fn normed(self, hidden: usize, eps: f32, device: &Device) -> Result<Self> {
        let norm = Some((Tensor::ones(hidden, self.dtype, device)?, eps));
        Ok(Self { norm, ..self })
    }

    /// `[ids.len(), hidden]` for `ids` `[n]` u32.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut rows = self.matrix.rows(ids, self.dtype)?;
        if let Some(scale) = self.scale {
            rows = (rows * f64::from(scale))?;
        }
        match &self.norm {
            Some((weight, eps)) => Ok(rms_norm(&rows, weight, *eps)?),
            None => Ok(rows),
        }
    }

    /// The output layer that shares this weight.
    pub fn tied_head(&self) -> Linear {
        Linear::new(self.matrix.clone(), None)
    }
}
