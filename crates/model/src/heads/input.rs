//! What a draft head reads: the features that it makes of its target's hidden states, and the rows that it makes of
//! features and tokens.

use super::HeadKind;
use super::config::{FcNorm, HeadConfig};
use super::mtp::MtpNames;
use crate::layers::linear::Linear;
use crate::layers::norm::Norm;
use crate::weights::Weights;
use crate::{Ends, ModelConfig};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};

/// The `features` of a batch, contiguous, or zeros where it has none.
pub(super) fn features_of(
    features: Option<&Tensor>,
    dims: [usize; 2],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    Ok(match features {
        Some(features) if features.dims() == dims => features.contiguous()?,
        Some(other) => {
            return Err(Error::internal(format!("features {other:?} for {dims:?}")));
        }
        None => Tensor::zeros(&dims, dtype, device)?,
    })
}

/// How hidden states of the target become the features that a head reads.
pub(crate) struct Fusion {
    /// The norms of the hidden states: one of those of all layers side by side, or one of each layer.
    before: Vec<Norm>,
    /// Projects the hidden states to the features. Without it they are the features.
    fc: Option<Linear>,
    /// The norm of the features.
    after: Option<Norm>,
    eps: f32,
    /// The dtype of the features.
    dtype: DType,
}

impl Fusion {
    /// The fusion of a head whose features are what the target's output layer reads.
    pub fn of_last(weights: &Weights, target: &ModelConfig, ends: &Ends) -> Self {
        Self {
            before: vec![ends.norm.clone()],
            fc: None,
            after: None,
            eps: target.rms_norm_eps as f32,
            dtype: weights.dtypes().activations,
        }
    }

    /// Reads the fusion of `head`, which reads so many `layers` of a target of hidden size `width`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        head: &HeadConfig,
        weights: &mut Weights,
        (layers, width): (usize, usize),
    ) -> Result<Self> {
        let (hidden, reads) = (head.shape.hidden_size, layers * width);
        let before = match head.fc_norm {
            FcNorm::None => Vec::new(),
            FcNorm::Whole => vec![Norm::rms(weights, "input_norm", reads)?],
            FcNorm::EachLayer => (0..layers)
                .map(|layer| Norm::rms(weights, &format!("fc_norm.{layer}"), width))
                .collect::<Result<_>>()?,
        };
        let fc = Some(weights.linear("fc", (hidden, reads), false)?);
        let after = match head.kind {
            HeadKind::Parallel => Some(Norm::rms(weights, "hidden_norm", hidden)?),
            _ => None,
        };
        Ok(Self {
            before,
            fc,
            after,
            eps: head.shape.rms_norm_eps as f32,
            dtype: weights.dtypes().activations,
        })
    }

    /// The features, `[rows, features]`, of hidden states, `[rows, layers * hidden size of the target]`.
    ///
    /// # Errors
    /// If the shape is another one, or the device fails.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        // Hidden states may be a view of the states of other sequences, too.
        let mut x = hidden.to_dtype(self.dtype)?.contiguous()?;
        x = match self.before.as_slice() {
            [] => x,
            [whole] => whole.forward(&x, self.eps)?,
            each => {
                let parts = x.chunk(each.len(), 1)?;
                let normed = each.iter().zip(&parts);
                let normed = normed.map(|(norm, part)| norm.forward(&part.contiguous()?, self.eps));
                Tensor::cat(&normed.collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        if let Some(fc) = &self.fc {
            x = fc.forward(&x)?;
        }
        match &self.after {
            Some(norm) => norm.forward(&x, self.eps),
            None => Ok(x),
        }
    }
}

/// How a row is made of the embedding and the features of a token.
pub(crate) struct TokenInput {
    /// The norms of embedding and features; EAGLE-1 has none.
    norms: Option<(Norm, Norm)>,
    join: Join,
}

/// How embedding and features, side by side, are read.
enum Join {
    /// A product of both is the residual stream. The first layer may have a norm of it (MTP).
    Project(Linear),
    /// The attention of the first layer reads both. The residual stream begins with the features, as they are before
    /// or after their norm.
    Wide { normed_residual: bool },
}

impl TokenInput {
    /// Reads the input of an EAGLE head. The first layer's names begin with `first`. Features have `width` values.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn of_eagle(
        head: &HeadConfig,
        weights: &mut Weights,
        first: &str,
        width: usize,
    ) -> Result<Self> {
        let hidden = head.shape.hidden_size;
        if head.kind == HeadKind::Eagle {
            let has_bias = weights.has("fc.bias");
            let fc = weights.linear("fc", (hidden, hidden + width), has_bias)?;
            return Ok(Self {
                norms: None,
                join: Join::Project(fc),
            });
        }
        let mut norm = |part| Norm::rms(weights, &format!("{first}.{part}"), hidden);
        Ok(Self {
            norms: Some((norm("input_layernorm")?, norm("hidden_norm")?)),
            join: Join::Wide {
                normed_residual: head.norm_before_residual,
            },
        })
    }

    /// Reads the input of the layer for further tokens with these `names`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn of_mtp(names: &MtpNames, weights: &mut Weights, config: &ModelConfig) -> Result<Self> {
        let hidden = config.hidden_size;
        let mut norm = |name: &str| Norm::load(weights, name, hidden, config.spec.norm);
        let norms = Some((norm(&names.embedding_norm)?, norm(&names.hidden_norm)?));
        let fc = weights.linear(&names.fc, (hidden, 2 * hidden), false)?;
        Ok(Self {
            norms,
            join: Join::Project(fc),
        })
    }

    /// The residual stream of rows with these embeddings and features, and what the attention of the first layer reads,
    /// if it is not what the layer makes of the stream.
    ///
    /// # Errors
    /// If the shapes do not match, or the device fails.
    pub fn forward(
        &self,
        embedded: &Tensor,
        features: &Tensor,
        eps: f32,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (embedded, normed) = match &self.norms {
            Some((of_embedding, of_features)) => (
                of_embedding.forward(embedded, eps)?,
                of_features.forward(features, eps)?,
            ),
            None => (embedded.clone(), features.clone()),
        };
        let both = Tensor::cat(&[&embedded, &normed], 1)?;
        Ok(match &self.join {
            Join::Project(fc) => (fc.forward(&both)?, None),
            Join::Wide {
                normed_residual: true,
            } => (normed, Some(both)),
            Join::Wide { .. } => (features.clone(), Some(both)),
        })
    }
}
