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
use foretoken_kernels::MAX_GPU_STATE_ROWS;
use latent::LatentAttention;
use mixer::{MixerLayer, MixerParts};

/// Reads the first half of a layer. `None` = it has none.
///
/// # Errors
/// A setup error that names a tensor that is missing or has a wrong shape.
pub fn load(parts: &MixerParts<'_>, weights: &mut Weights) -> Result<Option<MixerLayer>> {
    let layer = match parts.spec.mixer {
        MixerSpec::Attention => Attention::load(parts, weights),
        MixerSpec::Latent(latent) => LatentAttention::load(parts, weights, latent),
        MixerSpec::ShortConv(conv) => short_conv::load(parts, weights, conv),
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
            let gates = if layer.gate.is_some() { heads } else { 0 };
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
pub fn lack_on_gpu(layer: &LayerSpec) -> Option<(String, String)> {
    let state_rows = match layer.mixer {
        MixerSpec::Latent(latent) if !latent.fits_gpu() => {
            return Some((
                "latent attention of this shape is".into(),
                "only latent vectors of up to 512 values and up to 576 values of a token are, both in multiples of 8".into(),
            ));
        }
        MixerSpec::Delta(delta) => delta.shape.key_dim,
        MixerSpec::Mamba(mamba) => mamba.shape.state_dim,
        MixerSpec::Attention | MixerSpec::Latent(_) | MixerSpec::ShortConv(_) | MixerSpec::None => {
            0
        }
    };
    (state_rows > MAX_GPU_STATE_ROWS).then(|| {
        (
            format!("states of heads with {state_rows} rows are"),
            format!("up to {MAX_GPU_STATE_ROWS} rows are"),
        )
    })
}
