//! The models of foretoken: from a name on the command line to networks that compute.
//!
//! - [`source`](ModelSource), [`hub`]: the files of the model that an operator names
//! - `checkpoint`: their formats and names of tensors; [`names`]: what Hugging Face and llama.cpp call a tensor
//! - `config`, `arch`: a model's configuration, by its keys and its architecture; `spec`: what its layers compute
//! - `weights`, `packed`: tensors become weights; `matrix`: the formats of weights in memory, and their products
//! - `layers`, `mixers`: the parts of a layer; `decoder`: the one decoder for all architectures; `lora`: adapters
//! - `heads`: draft heads; `load`: puts all of it together

mod arch;
mod checkpoint;
mod config;
mod decoder;
mod heads;
pub mod hub;
pub mod known;
mod layers;
mod load;
mod loaded;
mod lora;
mod matrix;
mod mixers;
pub mod names;
mod packed;
mod source;
mod spec;
mod split;
mod weights;

pub use checkpoint::fingerprint::{fingerprint, version};
pub use checkpoint::safetensors_header::TensorHeaders;
pub use checkpoint::shards::safetensors_files;
pub use checkpoint::{pickle, safetensors_header};
pub use config::ModelConfig;
pub use config::layer_list::LayerList;
pub use config::pooling::embedding_spec;
pub use config::reranker::reranker_spec;
pub use heads::HeadKind;
pub use heads::config::{HeadConfig, MAX_MARKOV_RANK};
pub use heads::rates::{RATES, to_json as rates_json};
pub use layers::linear::{Embedding, Linear};
pub use layers::rope::{RopeScaling, RopeSpec};
pub use load::{
    DraftVocabulary, LoadOptions, as_loaded, inspect, inspect_head, inspect_mtp, load, load_head,
    load_head_of, load_mtp, open_head,
};
pub use loaded::{Ends, HeadTarget, Layers, LoadedModel};
pub use lora::LoraTarget;
pub use matrix::{Matrix, Packed, Quantized, unquantized};
pub use source::{LoadFormat, ModelSource, only_gguf};
pub use spec::latent::LatentSpec;
pub use spec::mamba::MambaSpec;
pub use spec::{
    ExpertGroups, ExpertsSpec, KvSource, LayerSpec, MixerSpec, MlpSpec, ModelSpec, QkNorm,
    RopeRows, RouterScores, SharedExpert,
};
pub use split::LayerSplit;
pub use weights::Weights;
pub use weights::inventory::{Inventory, TensorEntry};
