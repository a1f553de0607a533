//! All kinds of mixers: what is to be done for each kind of [`MixerSpec`], except for the states that it keeps.

mod attention;
mod delta_net;
mod latent;
mod mamba;
pub(crate) mod mixer;
mod short_conv;

use crate::config::ModelConfig;
use crate::spec::{LayerSpec, MixerSpec};
use crate::weights::Weights;
use attention::Attention;
use foretoken_core::error::Result;
use latent::LatentAttention;
use mixer::{MixerLayer, MixerParts};
use short_conv::ShortConv;

/// Reads the first half of a layer. `None` = it has none.
///
/// # Errors
/// A setup error that names a tensor that is missing or has a wrong shape.
pub fn load(parts: &MixerParts<'_>, weights: &mut Weights) -> Result<Option<MixerLayer>> {
    let layer = match parts.spec.mixer {
        MixerSpec::Attention => Attention::load(parts, weights),
        MixerSpec::Latent(latent) => LatentAttention::load(parts, weights, latent),
        MixerSpec::ShortConv(conv) => ShortConv::load(parts, weights, conv),
        MixerSpec::Delta(delta) => delta_net::load(parts, weights, delta),
        MixerSpec::Mamba(mamba) => mamba::load(parts, weights, mamba),
        MixerSpec::None => return Ok(None),
    };
    layer.map(Some)
}

/// Multiplications of a row in the first half of a layer, about, for each value of the residual stream.
pub fn cost(config: &ModelConfig, layer: &LayerSpec) -> usize {
    let (hidden, heads) = (config.hidden_size, config.num_heads);
    match layer.mixer {
        MixerSpec::Attention => {
            let gates = if layer.has_gate { heads } else { 0 };
            (2 * (heads + config.num_kv_heads) + gates) * config.head_dim
        }
        MixerSpec::Latent(latent) => latent.weights(heads, hidden) / hidden,
        MixerSpec::ShortConv(_) => 4 * hidden,
        MixerSpec::Delta(delta) => delta.shape.width() + delta.shape.values(),
        MixerSpec::Mamba(mamba) => mamba.shape.width() + mamba.shape.values(),
        MixerSpec::None => 0,
    }
}

/// What a GPU has no kernels for in the first half of a layer, and what it takes instead.
pub fn lack_on_gpu(layer: &LayerSpec) -> Option<(&'static str, &'static str)> {
    match layer.mixer {
        MixerSpec::Attention if !layer.has_gate => None,
        MixerSpec::Attention | MixerSpec::Delta(_) => Some((
            "linear attention and gates of attention are",
            "only softmax attention without gates is",
        )),
        MixerSpec::Latent(latent) => (!latent.fits_gpu()).then_some((
            "latent attention of this shape is",
            "only latent vectors of up to 512 values and up to 576 values of a token are, both in multiples of 8",
        )),
        MixerSpec::ShortConv(_) => Some(("short convolutions are", "only attention is")),
        MixerSpec::Mamba(_) => Some(("Mamba layers are", "only attention is")),
        MixerSpec::None => Some(("layers without attention are", "only those with it are")),
    }
}
