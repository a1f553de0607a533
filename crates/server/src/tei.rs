//! `/embed` of Text Embeddings Inference, for its clients in LangChain and LlamaIndex.

use super::caller::Caller;
use super::context::Context;
use super::embeddings::{self, EmbeddingJob};
use super::encoding::SentBody;
use super::error::Refused;
use super::object::JsonObject;
use super::state::AppState;
use super::wire::{self, CutOff, EmbeddingFields, PromptInput};
use axum::extract::State;
use axum::response::Response;
use foretoken_core::error::Result;
use schemars::JsonSchema;
use serde::Deserialize;

/// The names that fields of `/v1/embeddings` have here.
const NAMES: [(&str, &str); 1] = [("input", "inputs")];

/// The body of `/embed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "TeiEmbedRequest")]
pub(super) struct EmbedFields {
    model: Option<String>,
    #[schemars(required)]
    inputs: Option<PromptInput>,
    dimensions: Option<usize>,
    /// Whether vectors have the length 1, which is the default.
    normalize: Option<bool>,
    /// The name of the model's prompt that comes before each text.
    prompt_name: Option<String>,
    /// Whether inputs are cut off that are too long. Otherwise they are refused.
    truncate: Option<bool>,
    /// The side on which they are cut off, which is the right one by default.
    truncation_direction: Option<Side>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[schemars(rename = "TruncationDirection")]
enum Side {
    #[serde(alias = "left")]
    Left,
    #[serde(alias = "right")]
    Right,
}

/// `POST /embed`.
pub(super) async fn embed(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Response, Refused> {
    let read = state.read(body, |context, body| context.tei_embedding(body));
    let job = read.await?;
    Ok(embeddings::answer(&state, &caller, job, |vectors| vectors.list).await?)
}

impl Context<'_> {
    /// Reads the body of `/embed`.
    ///
    /// # Errors
    /// The errors of [`Context::embedding_job`].
    pub(super) fn tei_embedding(&self, body: &[u8]) -> Result<EmbeddingJob> {
        let read = [wire::names::<EmbedFields>()];
        let body = JsonObject::parse(body, &read)?;
        body.check_others(&read)?;
        let fields: EmbedFields = body.fields_with_lists(&["inputs"])?;
        let cut_off = match fields.truncation_direction {
            Some(Side::Left) => CutOff::Start,
            Some(Side::Right) | None => CutOff::End,
        };
        let job = self.embedding_job(EmbeddingFields {
            model: fields.model,
            input: fields.inputs,
            dimensions: fields.dimensions,
            normalize: Some(fields.normalize.unwrap_or(true)),
            prompt_name: fields.prompt_name,
            truncate: fields.truncate.unwrap_or(false).then_some(cut_off),
            ..EmbeddingFields::default()
        });
        job.map_err(|e| e.renamed(&NAMES))
    }
}
