//! The layer of a checkpoint that predicts the token after the next one (multi-token prediction; DeepSeek-V3,
//! arXiv 2412.19437, section 2.2), as a draft head.
//!
//! All checkpoints compute `block(fc(norm(embedding), norm(hidden)))`, where the hidden states are those that the
//! target's output layer reads. What they name and what they share differs. Of several such layers the first drafts,
//! again and again; as the paper trains them, each reads the output of the one before.

use super::HeadKind;
use super::config::HeadConfig;
use crate::config::ModelConfig;
use crate::names;
use crate::spec::{ModelSpec, MtpLayout, MtpSpec};
use crate::weights::Weights;

/// Names of the parts of a layer for multi-token prediction, without `.weight`.
pub(crate) struct MtpNames {
    /// The product that makes the layer's input of a token's embedding and the hidden state.
    pub fc: String,
    /// The norm of the embedding before `fc`.
    pub embedding_norm: String,
    /// The norm of the hidden state before `fc`.
    pub hidden_norm: String,
    /// The norm before the output layer; `None` = it is the target's.
    pub norm: Option<String>,
    /// The layer's own embedding, which mostly equals the target's; `None` = it is the target's.
    pub embedding: Option<String>,
    /// The layer's own output layer, which mostly equals the target's; `None` = it is the target's.
    pub head: Option<String>,
    /// The prefix of the names of the other parts.
    pub layer: String,
    layout: MtpLayout,
}

impl MtpNames {
    /// The names in `weights`, the checkpoint of a model like `target`; `None` if it has no such layer.
    pub fn of(weights: &Weights, target: &ModelConfig) -> Option<Self> {
        let layout = target.spec.mtp.as_ref()?.layout;
        let after = |part: &str| names::layer(target.num_layers(), part);
        let names = match layout {
            MtpLayout::After => Self {
                fc: after("eh_proj"),
                embedding_norm: after("enorm"),
                hidden_norm: after("hnorm"),
                norm: Some(after("shared_head.norm")),
                embedding: Some(after("embed_tokens")),
                head: Some(after("shared_head.head")),
                layer: after(""),
                layout,
            },
            MtpLayout::Apart => Self {
                fc: "mtp.fc".into(),
                embedding_norm: "mtp.pre_fc_norm_embedding".into(),
                hidden_norm: "mtp.pre_fc_norm_hidden".into(),
                norm: Some("mtp.norm".into()),
                embedding: None,
                head: None,
                layer: "mtp.layers.0.".into(),
                layout,
            },
            // Without a norm of its own, its output has that of the model (its authors' code, and FastDeploy).
            MtpLayout::Ernie => Self {
                fc: "model.mtp_linear_proj.0".into(),
                embedding_norm: "model.mtp_emb_norm.0".into(),
                hidden_norm: "model.mtp_hidden_norm.0".into(),
                norm: None,
                embedding: None,
                head: None,
                layer: "model.mtp_block.0.".into(),
                layout,
            },
        };
        let has = |name: &String| weights.has(&format!("{name}.weight"));
        // In GGUF files the norm may be left out, too.
        let may_lack = weights.are_gguf();
        has(&names.fc).then(|| Self {
            norm: names.norm.filter(|name| !may_lack || has(name)),
            embedding: names.embedding.filter(has),
            head: names.head.filter(has),
            ..names
        })
    }

    /// The prefix in the checkpoint `weights` of all names of such layers. With [`MtpLayout::After`] it is the prefix
    /// of this layer only.
    pub fn start(&self, weights: &Weights) -> String {
        weights.stored_start(match self.layout {
            MtpLayout::After => &self.layer,
            MtpLayout::Apart => "mtp.",
            MtpLayout::Ernie => "model.mtp_",
        })
    }

    /// Whether a tensor is of this layer, and not of a further one; `rest` is its name after [`MtpNames::start`].
    pub fn owns(&self, rest: &str) -> bool {
        let index = match self.layout {
            MtpLayout::After => None,
            MtpLayout::Apart => names::layer_of_head(rest).map(|(index, _)| index),
            // The number is after the part: `block.0.mlp`, `linear_proj.0.weight`.
            MtpLayout::Ernie => rest.split('.').nth(1).and_then(|index| index.parse().ok()),
        };
        index.is_none_or(|index| index == 0)
    }
}

/// The configuration of a head that is the first of the layers `mtp` of `target`.
pub(crate) fn config(target: &ModelConfig, mtp: &MtpSpec) -> HeadConfig {
    let shape = ModelConfig {
        spec: ModelSpec {
            layers: vec![mtp.layer.clone()],
            norm: target.spec.norm,
            ..ModelSpec::default()
        },
        draft_vocab_size: None,
        ..target.clone()
    };
    HeadConfig {
        // As those of other tokens, the features of a drafted one are what the output layer reads.
        norm_output: true,
        ..HeadConfig::new(HeadKind::Eagle, shape)
    }
}
