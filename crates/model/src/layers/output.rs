//! The output layer: from normed hidden states to logits over the vocabulary.

use super::linear::Linear;
use crate::config::ModelConfig;
use crate::heads::config::EndScales;
use crate::names;
use crate::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_kernels::{spread, widen_to, widened};

/// An output layer, possibly of some ids only. A clone shares the weights.
#[derive(Clone)]
pub struct OutputLayer {
    pub linear: Linear,
    /// `[outputs]` u32: the ids of the outputs, if they are not the whole vocabulary.
    pub ids: Option<Tensor>,
    /// `[vocab_size]` u32, on a GPU: the output of each id, or their number if it has none.
    pub places: Option<Tensor>,
    pub vocab_size: usize,
    /// Factor of the logits.
    pub scale: Option<f32>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
}

impl OutputLayer {
    /// The output layer `linear` of a model or head like `config`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::output_ids`].
    pub fn new(linear: Linear, weights: &mut Weights, config: &ModelConfig) -> Result<Self> {
        let ids = weights.output_ids(config)?;
        Ok(Self {
            linear,
            places: places_of(ids.as_ref(), config.vocab_size)?,
            ids,
            vocab_size: config.vocab_size,
            scale: config.spec.logit_scale,
            soft_cap: config.spec.logit_soft_cap,
        })
    }

    /// The output layer of a draft head: its own if `weights` contain one, otherwise that of the target.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn of_head(weights: &mut Weights, config: &ModelConfig, target: &Self) -> Result<Self> {
        if !weights.has(&format!("{}.weight", names::HEAD)) {
            return Ok(target.clone());
        }
        let linear = weights.output_linear(names::HEAD, config)?;
        Self::new(linear, weights, config)
    }

    /// This layer with the factor and the cap of a parallel head, if it has any.
    pub fn scaled(self, scales: EndScales) -> Self {
        if scales.logits.or(scales.soft_cap).is_none() {
            return self;
        }
        Self {
            scale: scales.logits,
            soft_cap: scales.soft_cap.filter(|&cap| cap > 0.),
            ..self
        }
    }

    /// This layer with the outputs of a model or head like `config` alone, which are those of `linear`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::output_ids`].
    pub fn cut_to(
        self,
        linear: Linear,
        weights: &mut Weights,
        config: &ModelConfig,
    ) -> Result<Self> {
        let ids = weights.output_ids(config)?;
        Ok(Self {
            linear,
            places: places_of(ids.as_ref(), self.vocab_size)?,
            ids,
            ..self
        })
    }

    /// Number of outputs.
    pub fn size(&self) -> usize {
        self.ids
            .as_ref()
            .map_or(self.vocab_size, |ids| ids.elem_count())
    }

    /// Logits `[rows, vocab_size]`, f32, for `x` `[rows, hidden]`; minus infinity for ids without an
    /// output.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_to(x, None)
    }

    /// As [`OutputLayer::forward`], in the first rows of `to`, `[rows or more, vocab_size]` f32, if there is such memory.
    ///
    /// # Errors
    /// If `to` has another shape, or the device fails.
    pub(crate) fn forward_to(&self, x: &Tensor, to: Option<&Tensor>) -> Result<Tensor> {
        self.finish_to(self.linear.forward(x)?, to)
    }

    /// The logits whose products are `logits`, `[rows, outputs]`, in `to` as those of [`OutputLayer::forward_to`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn finish_to(&self, mut logits: Tensor, to: Option<&Tensor>) -> Result<Tensor> {
        if let Some(scale) = self.scale {
            logits = (widened(&logits)? * f64::from(scale))?;
        }
        if let Some(cap) = self.soft_cap.map(f64::from) {
            logits = ((widened(&logits)? / cap)?.tanh()? * cap)?;
        }
        if let Some(places) = &self.places {
            return Ok(spread(&logits, places, to)?);
        }
        if let Some(ids) = &self.ids {
            let dims = (logits.dim(0)?, self.vocab_size);
            let never = Tensor::full(f32::NEG_INFINITY, dims, logits.device())?;
            let ids = ids.broadcast_as(logits.dims())?.contiguous()?;
            logits = never.scatter(&ids, &widened(&logits)?, 1)?;
        }
        let Some(to) = to else {
            return Ok(widened(&logits)?);
        };
        widen_to(to, &logits)?;
        Ok(to.narrow(0, 0, logits.dim(0)?)?)
    }

    /// `logits` of this layer with `bias`, `[rows, outputs]`, added.
    ///
    /// # Errors
    /// If the device fails.
    pub fn add_bias(&self, logits: &Tensor, bias: &Tensor) -> Result<Tensor> {
        if let Some(places) = &self.places {
            // Others stay minus infinity.
            return Ok((logits + spread(bias, places, None)?)?);
        }
        let bias = bias.to_dtype(DType::F32)?;
        let Some(ids) = &self.ids else {
            return Ok((logits + bias)?);
        };
        let ids = ids.broadcast_as(bias.dims())?.contiguous()?;
        Ok(logits.scatter_add(&ids, &bias.contiguous()?, 1)?)
    }
}

/// See [`OutputLayer::places`].
fn places_of(ids: Option<&Tensor>, vocab_size: usize) -> Result<Option<Tensor>> {
    let Some(ids) = ids.filter(|ids| ids.device().is_cuda()) else {
        return Ok(None);
    };
    let outputs: Vec<u32> = ids.to_vec1()?;
    let mut places = vec![outputs.len() as u32; vocab_size];
    for (place, &id) in (0..).zip(&outputs) {
        if let Some(to) = places.get_mut(id as usize) {
            *to = place;
        }
    }
    Ok(Some(Tensor::new(places, ids.device())?))
}
