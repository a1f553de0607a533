//! **foretoken** serves Llama and many other models over OpenAI's HTTP API and makes every token by
//! speculative decoding, by default for every request and at every temperature: a draft proposes tokens,
//! the target verifies all of them in one forward, and the text is exactly that of the target alone. This
//! requires that a row has the same bits in any forward. On the CPU it always does; on a GPU in forwards
//! of up to 16 rows with weights in bf16 or f16, and in all forwards with `--batch-invariant` (see the
//! table in docs/cuda.md).
//!
//! The modules, in the order in which a request passes them:
//!
//! - [`http`]: connections, routes, wire types, SSE, metrics text. Uses [`text`] and [`engine`].
//! - [`text`]: tokenizer, chat template, and the reasoning, content and tool calls of a text.
//! - [`engine`]: one thread; `receive -> schedule -> propose -> forward -> verify -> commit -> emit`.
//! - [`spec`]: drafters, the budget that chooses which of their tokens are worth a row, the acceptance
//!   rules, and the runner that combines them with the target.
//! - [`grammar`]: structured output, as masks over the vocabulary.
//! - [`sampling`]: one sequence's sampler, logits to distributions, and random numbers addressed by
//!   position.
//! - [`kv`]: paged pools that roll back with `truncate_to`.
//! - [`model`]: loading, and one decoder for the Llama family; [`gguf`]: GGUF files, including the
//!   embedded ones.
//! - [`kernels`]: one op per file, its CPU and CUDA sides together.
//! - [`train`]: the subcommands `distill`, which trains a draft for a target, and `tokenizer`; and a head that
//!   learns while it serves.
//! - [`bench`], [`generate`] and [`convert`]: subcommands; [`prompts`]: what they read and write; [`chat`]: a
//!   client in the terminal, of any server.
//!   [`config`]: flags and TOML, used only by `main`.
//! - `fuzzing`: what the fuzzers in `fuzz/` call, and a test with their corpus.
//! - [`otel`]: traces of requests, if the program is built with them. Uses [`http`].
//! - [`files`]: limits on untrusted files; `parse`: value parsers of flags; `console`: what commands print.
//!
//! Imports go one way: `main -> http -> engine -> spec -> {model, kv, sampling, grammar}`,
//! `train -> {spec, model, kv, kernels, text, sampling}`, `model -> {kv, kernels}`,
//! `kv -> kernels -> candle`, `http -> text -> grammar`, `{text, model} -> {gguf, files}`; `error` imports no
//! other module, and `sampling` only [`grammar`] and the exponential that it shares with the kernels.

pub mod bench;
pub mod chat;
pub mod config;
pub mod console;
pub mod convert;
pub mod engine;
pub mod error;
pub mod files;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod gguf;
pub mod grammar;
pub mod http;
pub mod kernels;
pub mod kv;
pub mod model;
#[cfg(feature = "otel")]
pub mod otel;
#[cfg(not(feature = "otel"))]
#[path = "otel/absent.rs"]
pub mod otel;
mod parse;
pub mod prompts;
pub mod sampling;
pub mod spec;
pub mod text;
pub mod train;
