//! Structured output: grammars that a text must follow, as masks over the vocabulary.
//!
//! [`Compiler`] turns a [`GrammarSource`] into a [`Grammar`](foretoken_core::sampling::Grammar), which requests carry in their sampling
//! parameters. Each sequence's sampler has a
//! [`GrammarState`](foretoken_core::sampling::GrammarState), which gives the mask of the next token and goes back with the
//! sampler. The parser is llguidance's.

mod compiled;
mod compiler;
mod copies;
mod definitions;
mod kept;
mod lane;
mod names;
mod numbers;
mod patterns;
mod place;
mod prepare;
mod schema;
mod source;
mod state;
pub mod toy;
mod vocabulary;

pub use compiler::{Compiler, Waiter};
pub use definitions::{standalone, without_annotations};
pub use lane::ClientId;
pub use schema::resolve;
pub use source::{GrammarSource, MAX_SOURCE_BYTES, regex_literal};
pub use vocabulary::GrammarTokens;

#[cfg(test)]
mod tests;
