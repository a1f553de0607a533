//! The second half of a layer: one MLP, or experts.

use super::experts::Experts;
use super::linear::Linear;
use super::mlp::Mlp;
use super::step::Step;
use crate::config::ModelConfig;
use crate::spec::{LayerSpec, MlpSpec};
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;

/// An MLP, or experts.
#[derive(Clone)]
pub(crate) enum FeedForward {
    Mlp(Mlp),
    Experts(Box<Experts>),
}

impl FeedForward {
    /// Reads the MLP or the experts of a layer like `spec`; `at` names the layer's parts. `None` = the layer has
    /// neither.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        spec: &LayerSpec,
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Option<Self>> {
        match spec.mlp {
            MlpSpec::None => Ok(None),
            MlpSpec::Experts(experts) => {
                let experts = Experts::load(config, (spec, experts), weights, at)?;
                Ok(Some(Self::Experts(Box::new(experts))))
            }
            _ => Ok(Some(Self::Mlp(Mlp::load(config, spec, weights, at)?))),
        }
    }

    /// The products that all rows use.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Mlp(mlp) => mlp.linears().into(),
            Self::Experts(experts) => experts.linears(),
        }
    }

    /// The products that adapters can change.
    pub fn adapted_linears(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Mlp(mlp) => mlp.linears().into(),
            Self::Experts(experts) => experts.adapted_linears(),
        }
    }

    /// The MLP, if it is a single one.
    pub fn mlp(&self) -> Option<&Mlp> {
        match self {
            Self::Mlp(mlp) => Some(mlp),
            Self::Experts(_) => None,
        }
    }

    /// The output, `[rows, hidden]`, for `x` of the same shape, the rows of `step` that attend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        match self {
            Self::Mlp(mlp) => mlp.forward(x, step.attending_adapters),
            Self::Experts(experts) => {
                let (y, read) = experts.forward(x, step.attending_adapters, step.eps())?;
                step.experts_read.update(|count| count + read);
                Ok(y)
            }
        }
    }
}
