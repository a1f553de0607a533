//! **foretoken** serves Llama and many other models over OpenAI's HTTP API and makes every token by
//! speculative decoding, by default for every request and at every temperature: a draft proposes tokens,
//! the target verifies all of them in one forward, and the text is exactly that of the target alone. This
//! requires that a row has the same bits in any forward. On the CPU it always does; on a GPU in forwards
//! of up to 256 rows, and in all forwards with `--batch-invariant` (see the table in docs/cuda.md).
//!
//! [`Foretoken`] embeds an engine, and the HTTP API, in another program; its page has an example. A drafter of one's own is a
//! [`spec::Drafter`].
//!
//! The features `embedded-model` (a small model with its draft) and `train` are on by default; `cuda` adds GPUs, and `otel`
//! traces.
//!
//! This crate is the facade of the workspace: it has the modules of the other crates under one name, and the commands of
//! the program.
//!
//! - [`http`] (`foretoken-server`): connections, routes, wire types, SSE, metrics.
//! - [`text`], [`grammar`], [`prompts`] (`foretoken-text`): tokenizers, chat templates, tool calls, structured output.
//! - [`engine`], [`spec`] (`foretoken-engine`): one thread; `receive -> schedule -> propose -> forward -> verify ->
//!   commit -> emit`; drafters, the budget, the acceptance rules.
//! - [`model`] (`foretoken-model` and the interface of `foretoken-core`): loading, one decoder for all architectures,
//!   draft heads.
//! - [`train`] (`foretoken-train`, feature `train`): training of drafts.
//! - [`kv`], [`sampling`], [`gguf`], [`error`], [`files`] (`foretoken-core`).
//! - [`kernels`] (`foretoken-kernels`): one op a file or folder, its CPU and CUDA sides together.
//! - [`mod@bench`], [`generate`], [`convert`], [`chat`]: commands; [`config`]: flags and TOML.

#[doc(hidden)]
pub mod assembly;
pub mod bench;
mod builder;
pub mod chat;
pub mod config;
pub mod convert;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
#[doc(hidden)]
pub mod gpus;
#[cfg(feature = "otel")]
pub mod otel;
#[cfg(not(feature = "otel"))]
#[path = "otel/absent.rs"]
pub mod otel;
#[doc(hidden)]
pub mod signals;
#[cfg(not(feature = "train"))]
#[path = "train/absent.rs"]
pub mod train;

pub use builder::{Drafting, Foretoken, Running};
/// In the version of the tensors and devices of [`model`] and [`spec`].
pub use candle_core;
pub use foretoken_core::{console, error, files, gguf, kv, sampling};
pub use foretoken_engine as engine;
pub use foretoken_engine::spec;
pub use foretoken_kernels as kernels;
pub use foretoken_server as http;
pub use foretoken_text as text;
pub use foretoken_text::{grammar, prompts};
#[cfg(feature = "train")]
pub use foretoken_train as train;
/// In the version of [`engine::Stats`].
pub use prometheus;

/// The interface between the engine and a model, and the models that can be loaded.
pub mod model {
    pub use foretoken_core::model::*;
    pub use foretoken_model::*;
}

use foretoken_core::parse;
