//! The attention heads of a model's layers, as `check` shows them.

use crate::model::{LayerSpec, MixerSpec, ModelConfig};
use serde::Serialize;
use std::fmt;

/// The attention heads of some layers, and the number of these layers.
#[derive(Debug, Serialize)]
pub struct HeadCounts {
    pub layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Whether keys and values of all heads are products of one latent row, which is what is kept.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_latent: bool,
}

impl HeadCounts {
    /// Counts the layers with attention of `shape` by their heads. The counts come in the order of the first layers
    /// that have such heads.
    pub fn of_layers(shape: &ModelConfig) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        let attends =
            |layer: &&LayerSpec| matches!(layer.mixer, MixerSpec::Attention | MixerSpec::Latent(_));
        for layer in shape.spec.layers.iter().filter(attends) {
            let kv = layer.kv_heads.unwrap_or(shape.kv_heads());
            let is_same =
                |found: &&mut Self| found.kv_heads == kv.count && found.head_dim == kv.dim;
            match all.iter_mut().find(is_same) {
                Some(found) => found.layers += 1,
                None => all.push(Self {
                    layers: 1,
                    heads: shape.num_heads,
                    kv_heads: kv.count,
                    head_dim: kv.dim,
                    is_latent: matches!(layer.mixer, MixerSpec::Latent(_)),
                }),
            }
        }
        all
    }
}

impl fmt::Display for HeadCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (heads, dim, kv) = (self.heads, self.head_dim, self.kv_heads);
        if self.is_latent {
            return write!(f, "{heads} heads over one latent row of {dim}");
        }
        write!(f, "{heads} heads of {dim} ({kv} of keys and values)")
    }
}
