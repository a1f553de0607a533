//! The interface between the engine and a model.

mod adapter;
mod batch;
mod embedding;
mod interface;
mod reranker;
pub mod toy;

pub use adapter::{Adapter, AdapterLoader, AdapterRows};
pub use batch::{Batch, MAX_TREE_NODES, MaskedBlock, Taps, is_chain};
pub use embedding::{DenseActivation, DenseLayer, EmbeddingSpec, Pooling};
pub use foretoken_kernels::{KeptState, Span, StateRows, StateStart};
pub use interface::{
    DepthRates, DraftNetwork, Draw, ForwardOutput, GiveUp, Head, Model, ModelInfo, PathOutput,
    PathRows,
};
pub use reranker::{Classifier, RerankerSpec};
