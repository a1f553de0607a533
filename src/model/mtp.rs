//! The layer of a checkpoint that predicts the token after the next one (multi-token prediction; DeepSeek-V3,
//! arXiv 2412.19437, section 2.2; Qwen3-Next, Qwen 3.5), as a draft head.

use super::config::ModelConfig;
use super::layer_spec::{LayerSpec, MixerSpec, ModelSpec};
use super::names;
use super::weights::Weights;
use crate::error::{Error, Result};

/// How its parts are called.
pub(super) struct MtpNames {
    /// From a token's embedding and the hidden state to the layer's input.
    pub fc: String,
    /// Of both before it.
    pub embedding_norm: String,
    pub hidden_norm: String,
    /// Before the output layer.
    pub norm: String,
    /// The layer's parts begin so.
    pub layer: String,
}

impl MtpNames {
    /// Those in `weights`, the checkpoint of a model like `target`; `None` if it has no such layer.
    pub fn of(weights: &Weights, target: &ModelConfig) -> Option<Self> {
        let names = if weights.are_gguf() {
            let of = |part: &str| names::layer(target.num_layers(), part);
            Self {
                fc: of("nextn.eh_proj"),
                embedding_norm: of("nextn.enorm"),
                hidden_norm: of("nextn.hnorm"),
                norm: of("nextn.shared_head_norm"),
                layer: of(""),
            }
        } else {
            let of = |part: &str| format!("mtp.{part}");
            Self {
                fc: of("fc"),
                embedding_norm: of("pre_fc_norm_embedding"),
                hidden_norm: of("pre_fc_norm_hidden"),
                norm: of("norm"),
                layer: of("layers.0."),
            }
        };
        weights
            .has(&format!("{}.weight", names.fc))
            .then_some(names)
    }
}

/// The configuration of the layer, which is like those of `target` that have attention.
///
/// # Errors
/// If none has.
pub(super) fn config(target: &ModelConfig) -> Result<ModelConfig> {
    let attends = |layer: &&LayerSpec| layer.mixer == MixerSpec::Attention;
    let layer = target.spec.layers.iter().find(attends);
    let layer = layer.ok_or_else(|| Error::setup("no layer of the model has attention"))?;
    Ok(ModelConfig {
        spec: ModelSpec {
            layers: vec![layer.clone()],
            norm: target.spec.norm,
            ..ModelSpec::default()
        },
        draft_vocab_size: None,
        ..target.clone()
    })
}
