//! Ollama's API: a request becomes a chat or a completion, and its reply lines of JSON. What would change the files of
//! models is not offered.

mod closed;
mod embed;
mod error;
mod events;
mod input;
mod models;
mod options;
mod request;

/// The type of an answer that is a stream of lines.
pub(super) const LINES: &str = events::LINES;

pub(super) use embed::{EmbedRequest, Embedded, EmbeddingRequest, OneEmbedding, embed, embeddings};
pub(super) use error::{OllamaError, OllamaFailure, has_route, not_offered};
pub(super) use events::Answer;
pub(super) use models::{
    ListedModel, ModelDescription, ModelRequest, Models, OllamaVersion, PullStatus, Running, ps,
    pull, show, tagged, tags, version,
};
pub(super) use request::{ChatFields, GenerateFields};
