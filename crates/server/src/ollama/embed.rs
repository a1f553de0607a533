//! `/api/embed`, and the older `/api/embeddings` for one text.

use super::error::OllamaFailure;
use super::events::nanoseconds;
use crate::caller::Caller;
use crate::content::TextOr;
use crate::context::Context;
use crate::embeddings::{self, EmbeddingJob, Vector, Vectors};
use crate::encoding::SentBody;
use crate::object::JsonObject;
use crate::state::AppState;
use crate::wire::{self, CutOff, EmbeddingFields, PromptInput};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Result;
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Instant;

/// The body of `/api/embed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaEmbedRequest")]
pub(crate) struct EmbedRequest {
    model: Option<String>,
    /// None, or an empty one, asks only whether the model is loaded.
    input: Option<TextOr<String>>,
    /// Whether the ends of inputs are cut off that are too long, as they are by default. They are else refused.
    truncate: Option<bool>,
    dimensions: Option<usize>,
    /// Those that sample, or load a model, change no embedding.
    #[serde(rename = "options")]
    #[schemars(with = "Option<Map<String, Value>>")]
    _options: Option<IgnoredAny>,
}

/// The body of `/api/embeddings`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaEmbeddingRequest")]
pub(crate) struct EmbeddingRequest {
    model: Option<String>,
    /// None, or an empty one, asks only whether the model is loaded.
    prompt: Option<String>,
    /// As those of `/api/embed`.
    #[serde(rename = "options")]
    #[schemars(with = "Option<Map<String, Value>>")]
    _options: Option<IgnoredAny>,
}

/// The answer of `/api/embed`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbeddings")]
pub(crate) struct Embedded {
    model: String,
    /// One per input, in their order.
    embeddings: Vec<Vector>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// The answer of `/api/embeddings`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaEmbedding")]
pub(crate) struct OneEmbedding {
    embedding: Vector,
}

/// What a body asks for: a job, if there is any input, and the model's name as the client has it.
type Asked = (Option<EmbeddingJob>, String);

/// `POST /api/embed`.
pub(crate) async fn embed(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Response, OllamaFailure> {
    let started = Instant::now();
    let read = state.read(body, |context, body| context.ollama_embed(body));
    let (job, model) = read.await?;
    let answer = move |vectors: Vectors| Embedded {
        model,
        embeddings: vectors.list,
        total_duration: nanoseconds(started.elapsed()),
        load_duration: 0,
        prompt_eval_count: vectors.tokens,
    };
    let Some(job) = job else {
        return Ok(Json(answer(Vectors::default())).into_response());
    };
    Ok(embeddings::answer(&state, &caller, job, answer).await?)
}

/// `POST /api/embeddings`.
pub(crate) async fn embeddings(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Response, OllamaFailure> {
    let read = state.read(body, |context, body| context.ollama_embedding(body));
    let (job, _) = read.await?;
    let answer = |vectors: Vectors| OneEmbedding {
        embedding: vectors.list.into_iter().next().unwrap_or_default(),
    };
    let Some(job) = job else {
        return Ok(Json(answer(Vectors::default())).into_response());
    };
    Ok(embeddings::answer(&state, &caller, job, answer).await?)
}

impl Context<'_> {
    /// Reads the body of `/api/embed`.
    ///
    /// # Errors
    /// The errors of [`Context::embedding_job`].
    pub fn ollama_embed(&self, body: &[u8]) -> Result<Asked> {
        let fields: EmbedRequest = read(body)?;
        let input = fields.input.map(|input| match input {
            TextOr::Text(text) => vec![text],
            TextOr::List(texts) => texts,
        });
        let embedding = EmbeddingFields {
            model: fields.model,
            dimensions: fields.dimensions,
            truncate: fields.truncate.unwrap_or(true).then_some(CutOff::End),
            ..EmbeddingFields::default()
        };
        self.embedding_asked(embedding, input)
    }

    /// Reads the body of `/api/embeddings`.
    ///
    /// # Errors
    /// The errors of [`Context::embedding_job`].
    pub fn ollama_embedding(&self, body: &[u8]) -> Result<Asked> {
        let fields: EmbeddingRequest = read(body)?;
        let embedding = EmbeddingFields {
            model: fields.model,
            truncate: Some(CutOff::End),
            ..EmbeddingFields::default()
        };
        let asked = self.embedding_asked(embedding, fields.prompt.map(|text| vec![text]));
        asked.map_err(|e| e.renamed(&[("input", "prompt")]))
    }

    fn embedding_asked(
        &self,
        mut fields: EmbeddingFields,
        input: Option<Vec<String>>,
    ) -> Result<Asked> {
        let model = self.ollama_named(fields.model.as_deref())?;
        let input = input.filter(|texts| texts.iter().any(|text| !text.is_empty()));
        let job = input.map(|texts| {
            fields.input = Some(PromptInput::Texts(texts));
            self.embedding_job(fields)
        });
        Ok((job.transpose()?, model))
    }
}

/// Reads the fields of a body, which may have many inputs.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let read = [wire::names::<T>()];
    let body = JsonObject::parse(body, &read)?;
    body.check_others(&read)?;
    body.fields_with_lists(&["input"])
}
