//! What the engine and a plan of memory need to know of a configuration.

use super::ModelConfig;
use crate::mixers;
use crate::spec::LayerSpec;
use foretoken_core::kv::KvHeads;
use foretoken_core::model::ModelInfo;

impl ModelConfig {
    /// What the engine knows of a model with this configuration.
    pub fn info(&self) -> ModelInfo {
        let experts = self.spec.layers.iter().filter_map(LayerSpec::experts);
        ModelInfo {
            architecture: self.architecture.clone(),
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_position_embeddings: self.max_position_embeddings,
            eos_token_ids: self.eos_token_ids.clone(),
            mask_token: self.mask_token,
            is_bidirectional: self.spec.is_bidirectional(),
            experts: experts
                .map(|experts| (experts.count, experts.per_token))
                .collect(),
            multiplications: multiplications(self),
            row_values: row_values(self),
        }
    }
}

/// Multiplications of a token's forward, about.
fn multiplications(config: &ModelConfig) -> f64 {
    let hidden = config.hidden_size;
    let width = |layer: &LayerSpec| {
        mixers::cost(config, layer) + 3 * layer.active_width(config.intermediate_size)
    };
    let layers: usize = config.spec.layers.iter().map(width).sum();
    let vocabulary = config.draft_vocab_size.unwrap_or(config.vocab_size);
    (hidden * (layers + vocabulary)) as f64
}

/// Upper bound on the number of values that a forward keeps of a row at a time, without its logits: the live
/// activations of one layer.
fn row_values(model: &ModelConfig) -> usize {
    // Layers may differ: of each size the largest counts.
    let heads_of = |layer: &LayerSpec| {
        let KvHeads { count, dim, .. } = layer.kv_heads.unwrap_or(model.kv_heads());
        (model.num_heads + 2 * count) * dim
    };
    let layers = &model.spec.layers;
    let heads = layers.iter().map(heads_of).max().unwrap_or(0);
    let mlp = layers.iter().filter_map(|layer| layer.mlp_width).max();
    let mlp = mlp.unwrap_or(0).max(model.intermediate_size);
    let inputs = model.spec.layer_input_width.unwrap_or(0) * layers.len();
    let experts = layers.iter().filter_map(LayerSpec::experts);
    let experts =
        experts.map(|of| of.per_token * (2 * model.hidden_size + 3 * of.width) + of.count);
    let experts = experts.max().unwrap_or(0);
    4 * model.hidden_size + 2 * heads + 3 * mlp + experts + 2 * inputs
}
