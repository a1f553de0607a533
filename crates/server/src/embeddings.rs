//! `/v1/embeddings`: texts or token ids become vectors.

use super::caller::Caller;
use super::context::{Context, ServedModel};
use super::encoding::SentBody;
use super::numbers::within;
use super::object::JsonObject;
use super::openai::salt;
use super::prompt::{WantedTokens, keep_last};
use super::state::AppState;
use super::wire::{self, CutOff, EncodingFormat, PromptInput, required, wrong};
use crate::error::Refused;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use foretoken_core::error::{Error, RequestErrorKind, Result, clipped};
use foretoken_core::model::EmbeddingSpec;
use foretoken_engine::spec::DraftContext;
use foretoken_engine::{CollectedEvents, Request, Series};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// The field with what is embedded.
const FIELD: &str = "input";
/// OpenAI's limits of one request.
pub(super) const MAX_INPUTS: usize = 2048;
const MAX_TOKENS: usize = 300_000;
/// Bytes of a value in an answer, as a number or in base64, before and after it is written.
const VALUE_BYTES: usize = 20;

/// A checked request body.
#[derive(Debug)]
pub(super) struct EmbeddingJob {
    model: String,
    /// One per input.
    requests: Vec<Request>,
    vectors: VectorOptions,
    /// Number of tokens of all inputs together.
    tokens: usize,
}

/// How the inputs of embeddings are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct InputOptions<'a> {
    /// What comes before each text.
    pub prompt: Option<&'a str>,
    pub add_special_tokens: bool,
    /// The value of `truncate_prompt_tokens`.
    pub truncate: Option<i64>,
    /// What is cut off an input that is too long, where `truncate` is not given.
    pub cut_off: CutOff,
    pub cache_salt: Option<&'a str>,
}

/// How vectors are changed before they are written.
#[derive(Debug, Clone)]
struct VectorOptions {
    spec: EmbeddingSpec,
    dimensions: usize,
    normalize: bool,
    format: EncodingFormat,
}

/// The token ids of an input that are kept.
#[derive(Debug, Clone, Copy)]
enum Keep {
    All,
    Last(usize),
    First(usize),
}

/// The answer to an embedding request.
#[derive(Serialize, JsonSchema)]
pub(super) struct EmbeddingList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    /// One per input, in their order.
    data: Vec<EmbeddingObject>,
    model: String,
    usage: PromptUsage,
}

#[derive(Serialize, JsonSchema)]
struct EmbeddingObject {
    #[schemars(extend("const" = "embedding"))]
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Vector {
    Float(Vec<f32>),
    /// The bytes of f32 in little-endian order.
    Base64(String),
}

/// The cost of a request that generates nothing.
#[derive(Serialize, JsonSchema)]
pub(super) struct PromptUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl PromptUsage {
    pub fn new(tokens: usize) -> Self {
        Self {
            prompt_tokens: tokens,
            total_tokens: tokens,
        }
    }
}

/// `POST /v1/embeddings`.
pub(super) async fn embeddings(
    State(state): State<AppState>,
    caller: Caller,
    body: SentBody,
) -> Result<Response, Refused> {
    let read = state.read(body, |context, body| context.embedding(body));
    Ok(answer(&state, &caller, read.await?, EmbeddingList::of).await?)
}

/// Computes the vectors of `job`, and answers with what `object` makes of them.
///
/// # Errors
/// `QueueFull`, or the engine's.
pub(super) async fn answer<T: Serialize + Send + 'static>(
    state: &AppState,
    caller: &Caller,
    job: EmbeddingJob,
    object: impl FnOnce(Vectors) -> T + Send + 'static,
) -> Result<Response> {
    let _in_flight = state.load.enter();
    let mut series = Series::begin(&state.engine)?;
    let turns = &state.embedding_turns;
    let values = job.requests.len() * job.vectors.dimensions;
    let room = turns.room(values * VALUE_BYTES).await?;
    let mut list = Vec::with_capacity(job.requests.len());
    let note = |computed: CollectedEvents| {
        list.push(job.vectors.of(computed.embedding));
        Ok(())
    };
    turns
        .run(&mut series, job.requests, &caller.id.0, note)
        .await?;
    let vectors = Vectors {
        model: job.model,
        list,
        tokens: job.tokens,
    };
    // Writing millions of numbers takes a while.
    let write = move || serde_json::to_vec(&object(vectors));
    let written = tokio::task::spawn_blocking(write).await;
    let bytes = written
        .map_err(|e| e.to_string())
        .and_then(|bytes| bytes.map_err(|e| e.to_string()))
        .map_err(|e| Error::internal(format!("writing the embeddings failed: {e}")))?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, room.body(bytes)).into_response())
}

/// The vectors of a job.
#[derive(Default)]
pub(super) struct Vectors {
    model: String,
    /// One per input, in their order.
    pub list: Vec<Vector>,
    /// Number of tokens of all inputs together.
    pub tokens: usize,
}

impl Default for Vector {
    fn default() -> Self {
        Self::Float(Vec::new())
    }
}

impl EmbeddingList {
    fn of(vectors: Vectors) -> Self {
        let object = |(index, embedding)| EmbeddingObject {
            object: "embedding",
            index,
            embedding,
        };
        Self {
            object: "list",
            data: vectors.list.into_iter().enumerate().map(object).collect(),
            model: vectors.model,
            usage: PromptUsage::new(vectors.tokens),
        }
    }
}

impl VectorOptions {
    /// The first values of an embedding (Matryoshka embeddings: Kusupati et al. 2022, arXiv 2205.13147),
    /// then normalized.
    fn of(&self, pooled: Vec<f32>) -> Vector {
        let mut values = self.spec.project(pooled);
        values.truncate(self.dimensions);
        if self.normalize {
            let sum: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
            // As torch does it.
            let length = sum.sqrt().max(1e-12);
            for x in &mut values {
                *x = (f64::from(*x) / length) as f32;
            }
        }
        match self.format {
            EncodingFormat::Float => Vector::Float(values),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}

impl Context<'_> {
    /// Reads the body of `/v1/embeddings`.
    ///
    /// # Errors
    /// `Invalid`, `NotFound` or `ContextLengthExceeded`, naming the field.
    pub(super) fn embedding(&self, body: &[u8]) -> Result<EmbeddingJob> {
        let read = [wire::names::<wire::EmbeddingFields>()];
        let body = JsonObject::parse(body, &read)?;
        body.check_others(&read)?;
        self.embedding_job(body.fields_with_lists(&[FIELD])?)
    }

    /// Checks the fields of an embedding request, whichever API they came from.
    ///
    /// # Errors
    /// The errors of [`Context::embedding`].
    pub(super) fn embedding_job(&self, fields: wire::EmbeddingFields) -> Result<EmbeddingJob> {
        let model = self.model(fields.model.as_deref())?;
        let Some(spec) = self.embeddings else {
            let message = "this model does not say how its hidden states become embeddings: start the server with --pooling last or --pooling mean";
            return Err(Error::request(RequestErrorKind::Invalid, None, message));
        };
        let size = spec.size(self.limits.embedding_size);
        // 0 is what Infinity's client sends where it wants all.
        let dimensions = fields.dimensions.filter(|count| *count > 0);
        let dimensions = within("dimensions", dimensions, 1..=size)?.unwrap_or(size);
        if fields.truncate.is_some() && fields.truncate_prompt_tokens.is_some() {
            return wrong(
                "truncate",
                "is not possible beside truncate_prompt_tokens: leave one out",
            );
        }
        let options = InputOptions {
            prompt: chosen_prompt(spec, &fields)?,
            add_special_tokens: fields.add_special_tokens.unwrap_or(true),
            truncate: fields.truncate_prompt_tokens,
            cut_off: fields.truncate.unwrap_or_default(),
            cache_salt: fields.cache_salt.as_deref(),
        };
        let input = required(FIELD, fields.input)?;
        let requests = self.embedding_requests(spec, &model, input, options)?;
        Ok(EmbeddingJob {
            tokens: requests.iter().map(|request| request.prompt.len()).sum(),
            model: model.name,
            requests,
            vectors: VectorOptions {
                spec: spec.clone(),
                dimensions,
                normalize: fields.normalize.unwrap_or(spec.normalize),
                format: fields.encoding_format.unwrap_or_default(),
            },
        })
    }

    /// Maximum number of tokens of an input.
    pub(super) fn max_input(&self, spec: &EmbeddingSpec) -> usize {
        let max = self.limits.max_model_len;
        spec.max_tokens.unwrap_or(max).min(max)
    }

    /// The requests for the embeddings of `input`, which errors call `input`.
    ///
    /// # Errors
    /// `Invalid` or `ContextLengthExceeded`, naming the field.
    pub(super) fn embedding_requests(
        &self,
        spec: &EmbeddingSpec,
        model: &ServedModel,
        input: PromptInput,
        options: InputOptions<'_>,
    ) -> Result<Vec<Request>> {
        let draft_context = DraftContext {
            scope: self.scope(salt(options.cache_salt)?),
            prediction: Arc::default(),
            may_persist: false,
        };
        let max = self.max_input(spec);
        let keep = match (self.kept(options.truncate, Some(0))?, options.cut_off) {
            (Some(keep), _) => Keep::Last(keep.min(max)),
            (None, CutOff::Start) => Keep::Last(max),
            (None, CutOff::End) => Keep::First(max),
            (None, CutOff::None) => Keep::All,
        };
        let mut requests = Vec::new();
        let mut tokens = 0;
        for ids in self.inputs(input, options, keep)? {
            let request = Request {
                draft_context: draft_context.clone(),
                adapter: model.adapter.clone(),
                ..Request::embedding(ids?, spec.pooling)
            };
            let checked = self.limits.check(&request, FIELD);
            checked.map_err(|e| at(e, requests.len()))?;
            if request.prompt.len() > max {
                let (index, len) = (requests.len(), request.prompt.len());
                return wrong(
                    FIELD,
                    format!(
                        "{index} (from 0) has {len} tokens, but max_seq_length of this model is {max}; truncate or truncate_prompt_tokens cuts off the rest"
                    ),
                );
            }
            tokens += request.prompt.len();
            if tokens > MAX_TOKENS {
                return wrong(
                    FIELD,
                    format!("may have at most {MAX_TOKENS} tokens in all, and has more"),
                );
            }
            requests.push(request);
        }
        Ok(requests)
    }

    /// The token ids of each input that are kept, tokenized when it is asked for.
    fn inputs<'a>(
        &'a self,
        input: PromptInput,
        options: InputOptions<'a>,
        keep: Keep,
    ) -> Result<Box<dyn Iterator<Item = Result<Vec<u32>>> + 'a>> {
        let (prompt, special) = (options.prompt, options.add_special_tokens);
        let encode = move |(index, mut text): (usize, String)| {
            if text.is_empty() {
                return Err(empty(index));
            }
            if let Some(prompt) = prompt {
                text.insert_str(0, prompt);
            }
            let ids = match keep {
                Keep::All => self.encode(FIELD, &text, special, WantedTokens::Fitting),
                Keep::Last(keep) => self.encode(FIELD, &text, special, WantedTokens::Last(keep)),
                Keep::First(keep) => self.encode_first(&text, special, keep),
            };
            ids.map_err(|e| at(e, index))
        };
        let check = move |(index, mut ids): (usize, Vec<u32>)| {
            match keep {
                Keep::All => {}
                Keep::Last(keep) => keep_last(&mut ids, keep),
                Keep::First(keep) => ids.truncate(keep),
            }
            if ids.is_empty() {
                return Err(empty(index));
            }
            match ids
                .iter()
                .find(|&&id| id as usize >= self.limits.vocab_size)
            {
                Some(&id) => Err(at(unknown_token(id, self.limits.vocab_size), index)),
                None => Ok(ids),
            }
        };
        let count = match &input {
            PromptInput::Text(_) | PromptInput::Ids(_) => 1,
            PromptInput::Texts(texts) => texts.len(),
            PromptInput::IdLists(lists) => lists.len(),
        };
        if !(1..=MAX_INPUTS).contains(&count) {
            return wrong(
                FIELD,
                format!("must have 1 to {MAX_INPUTS} texts or lists of token ids, not {count}"),
            );
        }
        Ok(match input {
            PromptInput::Text(text) => Box::new([text].into_iter().enumerate().map(encode)),
            PromptInput::Texts(texts) => Box::new(texts.into_iter().enumerate().map(encode)),
            PromptInput::Ids(ids) => Box::new([ids].into_iter().enumerate().map(check)),
            PromptInput::IdLists(lists) => Box::new(lists.into_iter().enumerate().map(check)),
        })
    }
}

/// What comes before each text: the prompt that the request chooses, or else the model's default.
///
/// # Errors
/// `Invalid`, if the model has no such prompt, or there is no text that it could come before.
fn chosen_prompt<'a>(
    spec: &'a EmbeddingSpec,
    fields: &wire::EmbeddingFields,
) -> Result<Option<&'a str>> {
    let by_kind = fields.input_type.as_deref().filter(|kind| !kind.is_empty());
    let by_name = fields
        .prompt_name
        .as_deref()
        .filter(|name| !name.is_empty());
    let (field, name, prompt) = match (by_kind, by_name) {
        (None, None) => return Ok(spec.prompt.as_deref()),
        (Some(kind), None) => ("input_type", kind, spec.prompt_of(kind)),
        (None, Some(name)) => {
            let prompt = spec.prompts.get(name).map(String::as_str);
            ("prompt_name", name, prompt)
        }
        (Some(_), Some(_)) => {
            return wrong(
                "prompt_name",
                "is not possible beside input_type: leave one out",
            );
        }
    };
    let Some(prompt) = prompt else {
        let names: Vec<&str> = spec.prompts.keys().map(String::as_str).collect();
        let known = match names.as_slice() {
            [] => "the model has none: leave it out".to_owned(),
            names => format!("those of the model are {}", clipped(&names.join(", "))),
        };
        let name = clipped(name);
        return wrong(
            field,
            format!("{name:?} is not the name of a prompt: {known}"),
        );
    };
    let is_ids = matches!(
        fields.input,
        Some(PromptInput::Ids(_) | PromptInput::IdLists(_))
    );
    if is_ids && !prompt.is_empty() {
        return wrong(
            field,
            "puts a prompt before texts, not before token ids: send texts, or leave it out",
        );
    }
    Ok(Some(prompt))
}

fn empty(index: usize) -> Error {
    let message = format!("input {index} (from 0) must not be empty");
    Error::invalid(FIELD, message)
}

fn unknown_token(id: u32, vocab_size: usize) -> Error {
    let error = Error::unknown_token(FIELD, id, vocab_size);
    Error::invalid(
        FIELD,
        format!(
            "{error}. Token ids must be those of this model's tokenizer; LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False"
        ),
    )
}

/// The error, if it is about the inputs, as one about input `index`.
fn at(error: Error, index: usize) -> Error {
    match error {
        Error::Request {
            kind,
            message,
            param: Some(param),
            ..
        } if param.is(FIELD) => {
            let message = format!("input {index} (from 0): {message}");
            Error::request(kind, Some(FIELD), message)
        }
        other => other,
    }
}
