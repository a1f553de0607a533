//! What the crates of foretoken share: the interface between the engine and a model ([`model`]), paged KV pools
//! ([`kv`]), sampling ([`sampling`]), GGUF files ([`gguf`]), errors ([`error`]), and the limits of untrusted files
//! ([`files`]).

#![forbid(unsafe_code)]

pub mod console;
pub mod error;
pub mod files;
pub mod gguf;
pub mod kv;
pub mod model;
#[cfg(feature = "clap")]
pub mod parse;
pub mod sampling;
