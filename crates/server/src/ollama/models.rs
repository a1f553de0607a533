//! The routes that tell which models there are. All are served from the start, under the names of `/v1/models`.

use super::error::OllamaFailure;
use super::events::{line, sent, written};
use crate::context::{Context, LATEST};
use crate::defaults::SamplingDefaults;
use crate::encoding::SentBody;
use crate::object::read_body;
use crate::state::{AppState, ModelObject};
use crate::wire::required;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Months, Utc};
use foretoken_core::error::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::hash::{DefaultHasher, Hash, Hasher};
use tokio_stream::iter;

/// The version of Ollama whose API this is. Clients refuse to talk to one that is too old for what they need: Codex asks
/// those from 0.13.4 on for responses. From 0.14.0 on, there are messages of Anthropic's API, too.
const API_VERSION: &str = "0.14.0";

/// The models stay as long as the server runs: none expires in so many months.
const FOREVER: Months = Months::new(12 * 100);

#[derive(Serialize, JsonSchema)]
pub(crate) struct OllamaVersion {
    version: &'static str,
}

/// `GET /api/version`.
pub(crate) async fn version() -> Json<OllamaVersion> {
    let version = API_VERSION;
    Json(OllamaVersion { version })
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaModels")]
pub(crate) struct Models {
    models: Vec<ListedModel>,
}

/// A name of the model, or an adapter.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaModel")]
pub(crate) struct ListedModel {
    name: String,
    model: String,
    modified_at: String,
    size: u64,
    digest: String,
    details: Details,
}

impl ListedModel {
    /// The model `name` of which no more is known, because it is not loaded.
    pub fn unloaded(name: &str, since: u64) -> Self {
        let name = tagged(name);
        Self {
            model: name.clone(),
            name,
            modified_at: at(since),
            size: 0,
            digest: String::new(),
            details: Details::default(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaRunningModels")]
pub(crate) struct Running {
    models: Vec<RunningModel>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaRunningModel")]
struct RunningModel {
    name: String,
    model: String,
    size: u64,
    digest: String,
    details: Details,
    expires_at: String,
    size_vram: u64,
    context_length: usize,
}

#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "OllamaModelDetails")]
struct Details {
    /// The base model of an adapter.
    parent_model: String,
    format: String,
    family: String,
    families: Vec<String>,
    parameter_size: String,
    quantization_level: String,
}

/// What tells which model is meant.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaModelRequest")]
pub(crate) struct ModelRequest {
    model: Option<String>,
    /// What older clients call `model`.
    name: Option<String>,
    stream: Option<bool>,
}

/// A model as `/api/show` describes it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaModelDescription")]
pub(crate) struct ModelDescription {
    modelfile: String,
    /// The context, and the sampling parameters of requests that do not name them, one on a line.
    parameters: String,
    /// The chat template, in Jinja.
    template: String,
    details: Details,
    model_info: Map<String, Value>,
    capabilities: Vec<&'static str>,
    modified_at: String,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaStatus")]
pub(crate) struct PullStatus {
    status: &'static str,
}

/// `GET /api/tags`.
pub(crate) async fn tags(State(state): State<AppState>) -> Json<Models> {
    let models = state.models().into_iter();
    let models = models.map(|model| {
        let name = tagged(&model.id);
        ListedModel {
            model: name.clone(),
            name,
            modified_at: created(&model),
            size: state.info.files.bytes,
            digest: digest(&state, &model),
            details: details(&state, &model),
        }
    });
    Json(Models {
        models: models.collect(),
    })
}

/// `GET /api/ps`.
pub(crate) async fn ps(State(state): State<AppState>) -> Json<Running> {
    let forever = Utc::now().checked_add_months(FOREVER);
    let expires_at = written(forever.unwrap_or(DateTime::<Utc>::MAX_UTC));
    let bytes = state.info.files.bytes;
    let models = state.models().into_iter();
    let models = models.map(|model| {
        let name = tagged(&model.id);
        RunningModel {
            model: name.clone(),
            name,
            size: bytes,
            digest: digest(&state, &model),
            details: details(&state, &model),
            expires_at: expires_at.clone(),
            size_vram: if state.info.device == "cuda" {
                bytes
            } else {
                0
            },
            context_length: model.max_model_len,
        }
    });
    Json(Running {
        models: models.collect(),
    })
}

/// `POST /api/show`.
pub(crate) async fn show(
    State(state): State<AppState>,
    body: SentBody,
) -> Result<Json<ModelDescription>, OllamaFailure> {
    let (model, _) = asked(&state, body).await?;
    let files = &state.info.files;
    let family = files.architecture.as_str();
    let context = state.context(None);
    let mut info = Map::new();
    info.insert("general.architecture".into(), family.into());
    // VS Code shows it as the model's name.
    info.insert("general.basename".into(), model.id.as_str().into());
    info.insert("general.parameter_count".into(), files.parameters.into());
    for (key, value) in [
        ("context_length", model.max_model_len),
        ("embedding_length", context.limits.embedding_size),
        ("vocab_size", context.limits.vocab_size),
    ] {
        info.insert(format!("{family}.{key}"), value.into());
    }
    Ok(Json(ModelDescription {
        modelfile: format!("FROM {}\n", model.root),
        parameters: parameters(context.defaults, model.max_model_len),
        template: state.text.chat_template().unwrap_or_default().to_owned(),
        details: details(&state, &model),
        model_info: info,
        capabilities: capabilities(&context),
        modified_at: created(&model),
    }))
}

/// `POST /api/pull`: a model that is served is there already, and others do not come.
pub(crate) async fn pull(
    State(state): State<AppState>,
    body: SentBody,
) -> Result<Response, OllamaFailure> {
    let (_, stream) = asked(&state, body).await?;
    let success = PullStatus { status: "success" };
    if !stream.unwrap_or(true) {
        return Ok(Json(success).into_response());
    }
    let status = "pulling manifest";
    let lines = [PullStatus { status }, success];
    Ok(sent(iter(lines.map(|status| line(&status)))))
}

/// The model that a body names, and whether the answer is to be streamed.
async fn asked(state: &AppState, body: SentBody) -> Result<(ModelObject, Option<bool>)> {
    let read = |_: &Context<'_>, body: &[u8]| {
        let asked: ModelRequest = read_body(body)?;
        let wanted = required("model", asked.model.or(asked.name))?;
        Ok((wanted, asked.stream))
    };
    let (wanted, stream) = state.read(body, read).await?;
    Ok((state.listed(&wanted)?, stream))
}

/// A name with a tag, which all names have here.
pub(crate) fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next();
    if last.is_some_and(|last| last.contains(':')) {
        name.to_owned()
    } else {
        format!("{name}{LATEST}")
    }
}

fn created(model: &ModelObject) -> String {
    at(model.created)
}

/// A time in seconds since 1970, as this API writes it.
fn at(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(0);
    written(DateTime::from_timestamp(seconds, 0).unwrap_or_default())
}

/// Differs where the model's files do, or the adapter.
fn digest(state: &AppState, model: &ModelObject) -> String {
    let adapter = model.parent.as_ref().map(|_| &model.root);
    let part = |part: u8| {
        let mut hasher = DefaultHasher::new();
        (&state.info.fingerprint, adapter, part).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    (0..4).map(part).collect()
}

fn details(state: &AppState, model: &ModelObject) -> Details {
    let files = &state.info.files;
    Details {
        parent_model: model.parent.clone().unwrap_or_default(),
        format: files.format.clone(),
        family: files.architecture.clone(),
        families: vec![files.architecture.clone()],
        parameter_size: size(files.parameters),
        quantization_level: files.quantization.clone(),
    }
}

/// A number of parameters for people: `134.5M`.
fn size(parameters: u64) -> String {
    match parameters {
        0..1_000_000 => format!("{:.1}K", parameters as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", parameters as f64 / 1e6),
        _ => format!("{:.1}B", parameters as f64 / 1e9),
    }
}

/// A name and a value on each line. There is no line after the last one: some clients cannot read an empty one.
fn parameters(defaults: &SamplingDefaults, context: usize) -> String {
    let lines = [
        ("num_ctx", Some(context as f64)),
        ("temperature", defaults.temperature),
        ("top_p", defaults.top_p),
        ("top_k", defaults.top_k.map(|k| k as f64)),
        ("min_p", defaults.min_p),
        ("repeat_penalty", defaults.repetition_penalty),
        ("num_predict", defaults.max_new_tokens.map(|max| max as f64)),
    ];
    let lines = lines.into_iter();
    let lines = lines.filter_map(|(name, value)| Some(format!("{name} {}", value?)));
    lines.collect::<Vec<_>>().join("\n")
}

/// What the model can be asked for.
fn capabilities(context: &Context<'_>) -> Vec<&'static str> {
    let generates = context.limits.generates;
    let can = [
        ("completion", generates),
        ("tools", generates && context.tool_format.is_some()),
        ("insert", generates && context.text.can_infill()),
        ("thinking", generates && context.reasoning_format.is_some()),
        ("embedding", context.embeddings.is_some()),
    ];
    let can = can.into_iter().filter(|(_, can)| *can);
    can.map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_get_a_tag_and_sizes_a_unit() {
        for (name, expected) in [
            ("toy", "toy:latest"),
            ("org/toy", "org/toy:latest"),
            ("toy:8b", "toy:8b"),
            ("host:80/toy", "host:80/toy:latest"),
        ] {
            assert_eq!(tagged(name), expected);
        }
        for (parameters, expected) in [
            (0, "0.0K"),
            (500_000, "500.0K"),
            (134_515_008, "134.5M"),
            (7_615_616_512, "7.6B"),
        ] {
            assert_eq!(size(parameters), expected);
        }
    }

    #[test]
    fn parameters_are_lines_of_which_none_is_empty() {
        let defaults = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            ..SamplingDefaults::default()
        };
        let lines = "num_ctx 4096\ntemperature 0.6\ntop_k 20";
        assert_eq!(parameters(&defaults, 4096), lines);
    }
}
