//! The list of models, with their states.

use super::catalog::Served;
use super::fleet::ModelState;
use super::policy::Phase;
use super::proxy::{self, Forwarded};
use super::{Refusal, RouterState};
use crate::context::find_tagged;
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

/// Maximum time for a process to describe its model; without an answer only its name is told. Clients wait for a list for ten
/// seconds or so.
const TIMEOUT: Duration = Duration::from_secs(5);

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
    state.fleet.refresh().await;
    let served = state.fleet.catalog.served();
    let listed = served.iter().map(|model| listed(&state, model, &parts));
    Json(List {
        object: "list",
        data: join_all(listed).await.into_iter().flatten().collect(),
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
    let found = async {
        let gone = |what: String| Error::request(RequestErrorKind::NotFound, Some("model"), what);
        let Path(id) = id.map_err(|e| gone(e.body_text()))?;
        let place = state.fleet.find(&id).await?;
        let served = state.fleet.catalog.at(place);
        let mut listed = listed(&state, &served, &parts).await;
        let index = |name: &str| listed.iter().position(|listed| listed.model["id"] == *name);
        match find_tagged(&id, index) {
            Some(index) => Ok(listed.swap_remove(index)),
            None => Err(gone(format!("the model `{id}` does not exist any more"))),
        }
    };
    match found.await {
        Ok(listed) => Ok(Json(listed)),
        Err(error) => Err(Refusal { path, error }),
    }
}

/// What is told of a model and of its adapters. A process that runs describes them itself.
async fn listed(state: &RouterState, model: &Served, parts: &Parts) -> Vec<Listed> {
    let known = state.fleet.state(model.place);
    let described = match known.address {
        Some(address) => OPENAI.entries(address, parts).await,
        None => Vec::new(),
    };
    let base = &model.base;
    let listed = model.names.iter().map(|name| {
        let is_own = |one: &&Map<String, Value>| one.get("id").is_some_and(|id| *id == **name);
        let own = described.iter().find(is_own);
        let plain = || {
            let parent = Some(base).filter(|base| *base != name);
            let fields = json!({
                "id": name, "object": "model", "created": state.created, "owned_by": "foretoken", "parent": parent
            });
            fields.as_object().cloned().unwrap_or_default()
        };
        Listed {
            model: own.cloned().unwrap_or_else(plain),
            status: Status::of(&known),
        }
    });
    listed.collect()
}

impl Status {
    fn of(state: &ModelState) -> Self {
        Self {
            value: match state.phase {
                Phase::Loading => "loading",
                Phase::Loaded => "loaded",
                Phase::Unloaded | Phase::Stopping => "unloaded",
            },
            failed: state.failure.is_some(),
            error: state.failure.clone(),
        }
    }
}

/// A list of models that processes have.
struct ProcessList {
    path: &'static str,
    /// The field with the models.
    models: &'static str,
}

static OPENAI: ProcessList = ProcessList {
    path: "/v1/models",
    models: "data",
};

static OLLAMA: ProcessList = ProcessList {
    path: "/api/tags",
    models: "models",
};

static OLLAMA_RUNNING: ProcessList = ProcessList {
    path: "/api/ps",
    models: "models",
};

impl ProcessList {
    /// The entries in the list of the process at `address`; none if it does not answer.
    async fn entries(&self, address: SocketAddr, parts: &Parts) -> Vec<Map<String, Value>> {
        let asked = proxy::ask(address, Forwarded::get(self.path, parts));
        let list = async {
            let answer = timeout(TIMEOUT, asked).await.ok()?.ok()?;
            let mut list: Value = serde_json::from_slice(answer.body()).ok()?;
            serde_json::from_value(list[self.models].take()).ok()
        };
        list.await.unwrap_or_default()
    }

    /// The entries of a model and its adapters in a list of Ollama's API, each after its name; `None` for one that is not
    /// loaded.
    async fn tagged(
        &self,
        state: &RouterState,
        model: &Served,
        parts: &Parts,
    ) -> Vec<(String, Option<Value>)> {
        let entries = match state.fleet.state(model.place).address {
            Some(address) => self.entries(address, parts).await,
            None => Vec::new(),
        };
        let tagged = model.names.iter().map(|name| {
            let tagged = ollama::tagged(name);
            let of_name = |entry: &&Map<String, Value>| {
                entry.get("name").is_some_and(|name| *name == *tagged)
            };
            let entry = entries.iter().find(of_name).cloned();
            (name.clone(), entry.map(Value::Object))
        });
        tagged.collect()
    }

    /// The same of all models.
    async fn all(&self, state: &RouterState, parts: &Parts) -> Vec<(String, Option<Value>)> {
        state.fleet.refresh().await;
        let served = state.fleet.catalog.served();
        let told = served.iter().map(|model| self.tagged(state, model, parts));
        join_all(told).await.into_iter().flatten().collect()
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
    let told = OLLAMA.all(&state, &parts).await.into_iter();
    let models = told.map(|(name, entry)| {
        entry.unwrap_or_else(|| json!(ListedModel::unloaded(&name, state.created)))
    });
    Json(OllamaList {
        models: models.collect(),
    })
}

/// `GET /api/ps`: the models that are loaded.
pub(super) async fn ps(State(state): State<RouterState>, request: Request) -> Json<OllamaList> {
    let (parts, _) = request.into_parts();
    let told = OLLAMA_RUNNING.all(&state, &parts).await.into_iter();
    Json(OllamaList {
        models: told.filter_map(|(_, entry)| entry).collect(),
    })
}
