//! `/embed` and `/info` of Text Embeddings Inference, for its clients in LangChain and LlamaIndex.

use super::bodies;
use super::caller::Caller;
use super::context::Context;
use super::embedding_turns::MAX_JOBS;
use super::embeddings::{self, EmbeddingJob, MAX_INPUTS};
use super::encoding::SentBody;
use super::error::Refused;
use super::object::JsonObject;
use super::relevance::MAX_DOCUMENTS;
use super::server_info::ServerInfo;
use super::state::AppState;
use super::wire::{self, CutOff, EmbeddingFields, PromptInput};
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_core::model::{Pooling, RerankerSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// A model that embeds or ranks, and the limits of its requests.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TeiInfo")]
pub(super) struct TeiInfo {
    model_id: String,
    /// Always null, as are `sha` and `docker_label`.
    model_sha: (),
    /// The type of most of the weights, as the model's files call it.
    model_dtype: String,
    served_model_name: String,
    model_type: TeiModelType,
    max_concurrent_requests: usize,
    max_input_length: usize,
    max_batch_tokens: usize,
    max_batch_requests: usize,
    max_client_batch_size: usize,
    /// False: a request says whether what is too long is cut off.
    auto_truncate: bool,
    tokenization_workers: usize,
    version: &'static str,
    sha: (),
    docker_label: (),
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum TeiModelType {
    Embedding {
        pooling: &'static str,
    },
    /// One label: a document has one score.
    Reranker {
        id2label: BTreeMap<&'static str, &'static str>,
        label2id: BTreeMap<&'static str, usize>,
    },
}

/// `GET /info`.
pub(super) async fn info(State(state): State<AppState>) -> Result<Json<TeiInfo>, Refused> {
    Ok(Json(state.context(None).tei_info(&state.info)?))
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
    /// What `/info` tells.
    ///
    /// # Errors
    /// `NotFound`, if the model neither embeds nor ranks.
    fn tei_info(&self, info: &ServerInfo) -> Result<TeiInfo> {
        let max_model_len = self.limits.max_model_len;
        let (model_type, max_input_length, max_client_batch_size) = match (
            self.reranker,
            self.embeddings,
        ) {
            (Some(spec), _) => {
                const LABEL: &str = "LABEL_0";
                let kind = TeiModelType::Reranker {
                    id2label: BTreeMap::from([("0", LABEL)]),
                    label2id: BTreeMap::from([(LABEL, 0)]),
                };
                // The answer is a token, too.
                let is_answer = matches!(spec, RerankerSpec::Answer { .. });
                let max = max_model_len.saturating_sub(usize::from(is_answer));
                (kind, max, MAX_DOCUMENTS)
            }
            (None, Some(spec)) => {
                let pooling = match spec.pooling {
                    Pooling::Last => "last_token",
                    Pooling::Mean => "mean",
                };
                let kind = TeiModelType::Embedding { pooling };
                (kind, self.max_input(spec), MAX_INPUTS)
            }
            (None, None) => {
                let message = "/info is about models that embed or rank, and this one does not: use /server_info";
                return Err(Error::request(RequestErrorKind::NotFound, None, message));
            }
        };
        let served_model_name = self.model(None)?.name;
        let model_id = if info.model.is_empty() {
            served_model_name.clone()
        } else {
            info.model.clone()
        };
        Ok(TeiInfo {
            model_id,
            model_sha: (),
            model_dtype: info.files.quantization.clone(),
            served_model_name,
            model_type,
            max_concurrent_requests: MAX_JOBS,
            max_input_length,
            max_batch_tokens: info.max_num_batched_tokens,
            max_batch_requests: info.max_num_seqs,
            max_client_batch_size,
            auto_truncate: false,
            tokenization_workers: bodies::readers(),
            version: env!("CARGO_PKG_VERSION"),
            sha: (),
            docker_label: (),
        })
    }

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
