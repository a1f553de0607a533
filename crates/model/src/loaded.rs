//! Models that were read from checkpoints.

use crate::config::ModelConfig;
use crate::layers::Layer;
use crate::layers::linear::Embedding;
use crate::layers::norm::Norm;
use crate::layers::output::OutputLayer;
use crate::layers::rope::RopeTables;
use crate::lora::LoraTarget;
use crate::split::LayerSplit;
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::model::Model;

/// A model with all that its checkpoint says of it.
pub trait LoadedModel: Model {
    /// Shapes, layers, special ids and limits.
    fn config(&self) -> &ModelConfig;

    /// What adapters can change of the model; `None` if it takes no adapters.
    fn lora_target(&self) -> Option<&LoraTarget> {
        None
    }

    /// The GPUs of the layers.
    fn split(&self) -> &LayerSplit;

    /// The first and the last layer of the model; `None` if it has none to share.
    fn ends(&self) -> Option<Ends>;

    /// All layers of the model, of which a head may share some.
    fn layers(&self) -> Layers;

    /// A model of these `layers` (ascending indices) of this one, which shares its weights.
    ///
    /// # Errors
    /// A setup error if a layer does not exist.
    fn subset(&self, layers: &[usize]) -> Result<Box<dyn LoadedModel>>;
}

/// The first and the last layer of a model, which draft heads may share.
#[derive(Clone)]
pub struct Ends {
    pub(crate) embedding: Embedding,
    /// The norm before the output layer.
    pub(crate) norm: Norm,
    pub(crate) output: OutputLayer,
}

/// The layers of a model, and the position embeddings that they use. They share its weights.
pub struct Layers {
    pub(crate) all: Vec<Layer>,
    pub(crate) ropes: RopeTables,
    pub(crate) split: LayerSplit,
}

/// What a head needs of its target, which may be elsewhere.
pub struct HeadTarget {
    /// The configuration of the target.
    pub config: ModelConfig,
    pub(crate) ends: Ends,
    pub(crate) layers: Layers,
}

impl HeadTarget {
    /// The parts of `target` that a head needs. The head shares their weights.
    ///
    /// # Errors
    /// A setup error if it has no first and last layer to share.
    pub fn of(target: &dyn LoadedModel) -> Result<Self> {
        let config = target.config().clone();
        let ends = target.ends().ok_or_else(|| {
            Error::setup(format!(
                "{}: this model cannot have a head",
                config.architecture
            ))
        })?;
        let layers = target.layers();
        Ok(Self {
            config,
            ends,
            layers,
        })
    }

    /// The embeddings of `ids`, `[n]` u32: `[n, hidden]`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        self.ends.embedding.forward(ids)
    }
}
