//! What a layer may have between its first and its last product in place of attention over keys and values of heads.

use super::config::ModelConfig;
use super::delta_net::DeltaNet;
use super::inputs::Angles;
use super::latent::LatentAttention;
use super::layer_spec::LayerSpec;
use super::layer_step::Step;
use super::linear::Linear;
use super::short_conv::ShortConv;
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::kernels::AttentionParams;
use crate::kv::LayerPool;
use candle_core::Tensor;

/// See the module.
#[derive(Clone)]
pub(super) enum Mixer {
    Conv(ShortConv),
    Delta(DeltaNet),
    Latent(LatentAttention),
}

impl Mixer {
    /// Reads that of a layer like `spec`, if it has one; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        (config, spec): (&ModelConfig, &LayerSpec),
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Option<Self>> {
        if let Some(conv) = spec.conv {
            let conv = ShortConv::load(weights, &at("conv.conv"), config.hidden_size, conv)?;
            return Ok(Some(Self::Conv(conv)));
        }
        if let Some(delta) = &spec.delta {
            let delta = DeltaNet::load(weights, at, delta, config.rms_norm_eps as f32)?;
            return Ok(Some(Self::Delta(delta)));
        }
        let Some(latent) = spec.latent else {
            return Ok(None);
        };
        let latent = LatentAttention::load(weights, at, (spec, latent), config.num_heads)?;
        Ok(Some(Self::Latent(latent)))
    }

    /// Its products beside the layer's first and last.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let latent = match self {
            Self::Latent(latent) => Some(latent),
            _ => None,
        };
        latent.into_iter().flat_map(LatentAttention::linears)
    }

    /// Writes what other rows read of rows with these `products`, `[rows, outputs]`, and these angles; returns what
    /// [`Mixer::forward`] takes of each row.
    ///
    /// # Errors
    /// If the device fails, or there are no angles for a rotation.
    pub fn write(
        &self,
        products: &Tensor,
        step: &Step<'_>,
        angles: Option<&Angles>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        match (self, angles) {
            (Self::Conv(conv), _) => conv.write(products, step, pool.tokens()?),
            (Self::Delta(delta), _) => delta.forward(products, step, pool),
            (Self::Latent(latent), Some(angles)) => {
                latent.write(products, step, angles, &pool.tokens()?.0)
            }
            (Self::Latent(_), None) => Err(Error::internal("latent attention without a RoPE")),
        }
    }

    /// What the layer's last product reads, `[rows, inputs]`, for what [`Mixer::write`] returned of the rows that attend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forward(
        &self,
        q: &Tensor,
        step: &Step<'_>,
        params: AttentionParams<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        match self {
            Self::Conv(conv) => conv.forward(q, step.spans, pool.tokens()?),
            Self::Delta(_) => Ok(q.contiguous()?),
            Self::Latent(latent) => latent.forward(q, step.spans, params, &pool.tokens()?.0),
        }
    }
}
