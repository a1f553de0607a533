//! Inputs that each layer has of its own: of the token's id and of its embedding (Gemma 3n and 4, where they are
//! called per-layer embeddings).

use super::linear::{Embedding, Linear};
use super::norm::Norm;
use crate::config::ModelConfig;
use crate::names;
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::{Activation, glu};
use std::f64::consts::FRAC_1_SQRT_2;

/// Computes the inputs of all layers.
#[derive(Clone)]
pub(crate) struct LayerInputs {
    /// The embedding of token ids, `[vocab_size, layers * width]`.
    embedding: Embedding,
    /// Projects the rows of the model's embedding to `layers * width` values.
    projection: Linear,
    norm: Norm,
    width: usize,
    /// Factor of the projections.
    scale: f64,
}

/// What a layer adds to the residual stream for its input.
#[derive(Clone)]
pub(crate) struct LayerInput {
    gate: Linear,
    projection: Linear,
    norm: Norm,
    /// The place of its input among those of all layers.
    first: usize,
    width: usize,
}

impl LayerInputs {
    /// Reads the weights for inputs of `width` values per layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(config: &ModelConfig, width: usize, weights: &mut Weights) -> Result<Self> {
        let (hidden, all) = (config.hidden_size, config.num_layers() * width);
        let embedding = weights.embedding(names::LAYER_EMBEDDING, (config.vocab_size, all))?;
        Ok(Self {
            embedding: embedding.scaled(Some((width as f32).sqrt())),
            projection: weights.linear(names::LAYER_PROJECTION, (all, hidden), false)?,
            norm: Norm::load(weights, names::LAYER_NORM, width, config.spec.norm)?,
            width,
            scale: 1. / (hidden as f64).sqrt(),
        })
    }

    /// `[rows, layers * width]` for `tokens`, `[rows]` u32, whose embeddings are `x`, `[rows, hidden]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, tokens: &Tensor, x: &Tensor, eps: f32) -> Result<Tensor> {
        let projected = (self.projection.forward(x)? * self.scale)?;
        let normed = (self.norm).forward(&projected.reshape(((), self.width))?, eps)?;
        let of_ids = self.embedding.forward(tokens)?;
        let sum = (normed.reshape(of_ids.dims())? + of_ids)?;
        Ok((sum * FRAC_1_SQRT_2)?)
    }

    pub fn projection(&mut self) -> &mut Linear {
        &mut self.projection
    }
}

impl LayerInput {
    /// Reads the weights of layer `index`, whose input has `width` values; `at` names the layer's parts.
    ///
    /// # Errors
    /// Returns the errors of [`LayerInputs::load`].
    pub fn load(
        config: &ModelConfig,
        (index, width): (usize, usize),
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let (hidden, norm) = (config.hidden_size, at("post_per_layer_input_norm"));
        Ok(Self {
            gate: weights.linear(&at("per_layer_input_gate"), (width, hidden), false)?,
            projection: weights.linear(&at("per_layer_projection"), (hidden, width), false)?,
            norm: Norm::load(weights, &norm, hidden, config.spec.norm)?,
            first: index * width,
            width,
        })
    }

    /// The layer's own input, `[rows, width]`, out of the `inputs` of all layers, `[rows, layers * width]`.
    ///
    /// # Errors
    /// If `inputs` has too few layers.
    pub fn of(&self, inputs: &Tensor) -> Result<Tensor> {
        Ok(inputs.narrow(1, self.first, self.width)?.contiguous()?)
    }

    /// What is added to the residual stream `x`, `[rows, hidden]`, for `input`, `[rows, width]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor, input: &Tensor, eps: f32) -> Result<Tensor> {
        let gated = Tensor::cat(&[&self.gate.forward(x)?, input], 1)?;
        let gated = glu(&gated, Activation::GeluTanh)?;
        self.norm.forward(&self.projection.forward(&gated)?, eps)
    }

    pub fn linears(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate, &mut self.projection]
    }
}
