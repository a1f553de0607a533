//! The list of models, with their states.

use super::policy::Phase;
use super::proxy::{self, Forwarded};
use super::{Refusal, RouterState};
use crate::ollama::{self, ListedModel};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use foretoken_core::error::{Error, RequestErrorKind};
use futures_util::future::join_all;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum time for a process to describe its model; without an answer only its name is told.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A model in OpenAI's form, with the state that llama.cpp's router gives.
#[derive(Serialize)]
pub(super) struct Listed {
    #[serde(flatten)]
    model: Map<String, Value>,
    status: Status,
}

/// The state of a model.
#[derive(Serialize)]
struct Status {
    /// `unloaded`, `loading` or `loaded`.
    value: &'static str,
    /// Whether its last process ended by itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
    /// How it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
pub(super) struct List {
    object: &'static str,
    data: Vec<Listed>,
}

/// `GET /v1/models`.
pub(super) async fn models(State(state): State<RouterState>, request: Request) -> Json<List> {
    let (parts, _) = request.into_parts();
    let models = 0..state.fleet.names().count();
    let listed = models.map(|model| listed(&state, model, &parts));
    Json(List {
        object: "list",
        data: join_all(listed).await,
    })
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(state): State<RouterState>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json<Listed>, Refusal> {
    let (parts, _) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let found = id
        .map_err(|e| Error::request(RequestErrorKind::NotFound, Some("model"), e.body_text()))
        .and_then(|Path(id)| state.fleet.find(&id));
    match found {
        Ok(model) => Ok(Json(listed(&state, model, &parts).await)),
        Err(error) => Err(Refusal { path, error }),
    }
}

/// What is told of a model. One that is loaded describes itself.
async fn listed(state: &RouterState, model: usize, parts: &Parts) -> Listed {
    let name = state.fleet.name(model);
    let known = state.fleet.state(model);
    let described = match known.address {
        Some(address) => OPENAI.entry(address, name, parts).await,
        None => None,
    };
    let status = Status {
        value: match known.phase {
            Phase::Loading => "loading",
            Phase::Loaded => "loaded",
            Phase::Unloaded | Phase::Stopping => "unloaded",
        },
        failed: known.failure.is_some(),
        error: known.failure,
    };
    let plain = || {
        let fields = json!({"id": name, "object": "model", "created": state.created, "owned_by": "foretoken"});
        fields.as_object().cloned().unwrap_or_default()
    };
    Listed {
        model: described.unwrap_or_else(plain),
        status,
    }
}

/// A list of models that processes have.
struct ProcessList {
    path: &'static str,
    /// The field with the models.
    models: &'static str,
    /// The field of a model with its name.
    name: &'static str,
}

static OPENAI: ProcessList = ProcessList {
    path: "/v1/models",
    models: "data",
    name: "id",
};

static OLLAMA: ProcessList = ProcessList {
    path: "/api/tags",
    models: "models",
    name: "name",
};

static OLLAMA_RUNNING: ProcessList = ProcessList {
    path: "/api/ps",
    models: "models",
    name: "name",
};

impl ProcessList {
    /// The entry `name` in the list of the process at `address`.
    async fn entry(
        &self,
        address: SocketAddr,
        name: &str,
        parts: &Parts,
    ) -> Option<Map<String, Value>> {
        let asked = proxy::ask(address, Forwarded::get(self.path, parts));
        let answer = timeout(TIMEOUT, asked).await.ok()?.ok()?;
        let list: Value = serde_json::from_slice(answer.body()).ok()?;
        let mut models = list[self.models].as_array()?.iter();
        let model = models.find(|model| model[self.name] == name)?;
        model.as_object().cloned()
    }

    /// The entry of a model in a list of Ollama's API; `None` if it is not loaded.
    async fn tagged(&self, state: &RouterState, model: usize, parts: &Parts) -> Option<Value> {
        let address = state.fleet.state(model).address?;
        let name = ollama::tagged(state.fleet.name(model));
        let entry = self.entry(address, &name, parts).await?;
        Some(Value::Object(entry))
    }
}

/// Models in Ollama's form.
#[derive(Serialize)]
pub(super) struct OllamaList {
    models: Vec<Value>,
}

/// `GET /api/tags`: all models. Only the name is known of those that are not loaded.
pub(super) async fn tags(State(state): State<RouterState>, request: Request) -> Json<OllamaList> {
    let (parts, _) = request.into_parts();
    let models = 0..state.fleet.names().count();
    let told = join_all(models.map(|model| OLLAMA.tagged(&state, model, &parts))).await;
    let unloaded = |name| json!(ListedModel::unloaded(name, state.created));
    let models = told.into_iter().zip(state.fleet.names());
    let models = models.map(|(told, name)| told.unwrap_or_else(|| unloaded(name)));
    Json(OllamaList {
        models: models.collect(),
    })
}

/// `GET /api/ps`: the models that are loaded.
pub(super) async fn ps(State(state): State<RouterState>, request: Request) -> Json<OllamaList> {
    let (parts, _) = request.into_parts();
    let models = 0..state.fleet.names().count();
    let told = models.map(|model| OLLAMA_RUNNING.tagged(&state, model, &parts));
    Json(OllamaList {
        models: join_all(told).await.into_iter().flatten().collect(),
    })
}
