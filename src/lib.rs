//! **foretoken** serves Llama-architecture models over OpenAI's HTTP API and makes every token by
//! speculative decoding: a draft guesses, the target checks all guesses in one forward, and the
//! text is exactly what the target alone would have said. That rests on rows that have the same bits in
//! any forward: on the CPU always; on a GPU in forwards of up to 16 rows with weights in bf16 or f16, and
//! in all with `--batch-invariant` (the README's table says what holds where).
//!
//! The map, in the order in which a request meets it:
//!
//! - [`http`]: routes, wire types, SSE, metrics text. Knows [`text`] and [`engine`].
//! - [`text`]: tokenizer and chat template.
//! - [`engine`]: one thread; `receive -> schedule -> propose -> forward -> verify -> commit -> emit`.
//! - [`spec`]: drafters, the acceptance rule, and the runner that joins them to the target.
//! - [`sampling`]: one sequence's sampler, logits to distributions, and random numbers addressed by
//!   position.
//! - [`kv`]: paged pools that roll back with `truncate_to`.
//! - [`model`]: loading, and one decoder for the Llama family; [`gguf`]: files, and those that are
//!   a part of the program.
//! - [`kernels`]: one op each, its CPU and its CUDA side together.
//! - [`train`]: the subcommands `distill`, which trains a draft for a target, and `tokenizer`.
//! - [`bench`], [`generate`] and [`convert`]: subcommands; [`prompts`]: what they read and write.
//!   [`config`]: flags and TOML, used by `main` alone.
//! - [`files`]: what strangers supply, bounded; `parse`: what flags accept; `progress`: bars on a
//!   terminal.
//!
//! Imports go one way: `main -> http -> engine -> spec -> {model, kv, sampling}`,
//! `train -> {model, kv, kernels, text, sampling}`, `model -> {kv, kernels}`,
//! `kv -> kernels -> candle`, `http -> text`, `{text, model} -> {gguf, files}`; `error` imports nothing
//! of ours, and `sampling` nothing but the exponential that it shares with the kernels.

pub mod bench;
pub mod config;
pub mod convert;
pub mod engine;
pub mod error;
pub mod files;
mod float;
pub mod generate;
pub mod gguf;
pub mod http;
pub mod kernels;
pub mod kv;
pub mod model;
mod parse;
mod progress;
pub mod prompts;
pub mod sampling;
pub mod spec;
pub mod text;
pub mod train;
