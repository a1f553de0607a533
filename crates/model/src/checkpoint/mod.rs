//! The files of a checkpoint: safetensors, GGUF, pickles; what they name and where it lies.

pub(crate) mod fingerprint;
pub(crate) mod finite;
pub(crate) mod gguf;
pub mod pickle;
pub(crate) mod raw_tensors;
pub mod safetensors_header;
pub(crate) mod shards;
pub(crate) mod tensor_source;
