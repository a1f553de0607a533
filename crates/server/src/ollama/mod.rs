//! Ollama's API: a request becomes a chat or a completion, and its reply lines of JSON. What would change the files of
//! models is not offered.

mod embed;
mod error;
mod events;
mod input;
mod models;
mod options;
mod request;

pub(super) use embed::{EmbedRequest, Embedded, EmbeddingRequest, OneEmbedding, embed, embeddings};
pub(super) use error::{OllamaError, OllamaFailure, has_route, not_offered};
pub(super) use events::Answer;
pub(super) use models::{
    ModelDescription, ModelRequest, Models, OllamaVersion, PullStatus, Running, ps, pull, show,
    tags, version,
};
pub(super) use request::{Asked, ChatFields, GenerateFields};
