//! What a layer with a state has in place of attention.

use super::delta_net;
use super::layer_spec::MixerSpec;
use super::layer_step::Step;
use super::linear::Linear;
use super::mamba;
use super::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::kv::LayerPool;
use foretoken_kernels::{DeltaWeights, MambaWeights};
use std::sync::Arc;

/// The weights of such a layer besides its products. A clone shares them.
#[derive(Clone)]
pub(super) enum Recurrent {
    Delta(Arc<DeltaWeights>),
    Mamba(Arc<MambaWeights>),
}

impl Recurrent {
    /// Reads the weights of a layer like `spec`, with norms that add `eps`; `at` names the layer's parts. `None` = the
    /// layer has no state.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
        spec: &MixerSpec,
        eps: f32,
    ) -> Result<Option<Self>> {
        Ok(match spec {
            MixerSpec::Delta(delta) => Some(Self::Delta(
                delta_net::load(weights, at, delta, eps)?.into(),
            )),
            MixerSpec::Mamba(mamba) => {
                Some(Self::Mamba(mamba::load(weights, at, mamba, eps)?.into()))
            }
            MixerSpec::Attention
            | MixerSpec::Latent(_)
            | MixerSpec::ShortConv(_)
            | MixerSpec::None => None,
        })
    }

    /// Reads the products of its rows of `inputs` values.
    ///
    /// # Errors
    /// Returns the errors of [`Recurrent::load`].
    pub fn products(
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
        spec: &MixerSpec,
        inputs: usize,
    ) -> Result<Option<Linear>> {
        Ok(match spec {
            MixerSpec::Delta(delta) => Some(delta_net::products(weights, at, delta, inputs)?),
            MixerSpec::Mamba(mamba) => {
                let shape = (mamba.shape.width(), inputs);
                Some(weights.linear(&at("mamba.in_proj"), shape, mamba.has_bias)?)
            }
            MixerSpec::Attention
            | MixerSpec::Latent(_)
            | MixerSpec::ShortConv(_)
            | MixerSpec::None => None,
        })
    }

    /// The outputs of rows with these products, whose sequences go on with their states in `pool`.
    ///
    /// # Errors
    /// If the device fails, or a sequence has no state.
    pub fn forward(
        &self,
        products: &Tensor,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        let mut states = pool.states()?;
        Ok(match self {
            Self::Delta(delta) => {
                foretoken_kernels::delta_net(products, delta, step.states, &mut states)?
            }
            Self::Mamba(mamba) => {
                foretoken_kernels::mamba(products, mamba, step.states, &mut states)?
            }
        })
    }
}
