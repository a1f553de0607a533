//! Several models at one address, each served by a process of its own that starts with the first request for it.
//!
//! `policy` decides which processes run, `fleet` starts and ends them, and `proxy` passes requests and answers on.

mod adapters;
mod catalog;
mod fleet;
mod listing;
mod loading;
mod metrics;
mod policy;
mod process;
mod proxy;
mod selector;
mod system;

pub use process::{API_KEY_VARIABLE, ModelLog, ModelSource, ModelSpec, SERVES};

use super::access::{OLLAMA_VERSION, OPEN, PAGE, authorize, guard, refusal};
use super::bodies::{Bodies, Received};
use super::encoding::SentBody;
use super::error::Refused;
use super::listener;
use super::ollama;
use super::origin::{OriginOptions, Origins};
use super::tls::Tls;
use super::{HEALTHY, Health, HttpLimits, full, identified, info, method_not_allowed, page, reply};
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router};
use fleet::{Fleet, FleetLimits};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use metrics::FleetMetrics;
use process::Launcher;
use prometheus::{Registry, TextEncoder};
use proxy::Forwarded;
use selector::Selector;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// The models of a router, and how it serves them.
pub struct RouterOptions {
    /// The models. Their names are distinct.
    pub models: Vec<ModelSpec>,
    /// Reads them anew, at most once a second, when clients ask for the list or for an unknown name; `None` = they stay.
    pub source: Option<ModelSource>,
    /// The program of their processes.
    pub program: PathBuf,
    /// Maximum number of processes at a time.
    pub max_loaded: usize,
    /// Time after which a process that no request uses ends; `None` = never.
    pub idle: Option<Duration>,
    /// Any of which is accepted, here and by the processes; empty = none is needed.
    pub api_keys: Vec<String>,
    /// The limits of connections and request bodies.
    pub limits: HttpLimits,
    /// With what clients speak TLS; `None` = without.
    pub tls: Option<Tls>,
    /// The allowed hosts and origins.
    pub origins: OriginOptions,
    /// The host that the operator chose to listen on.
    pub host: String,
    /// Whether the page is served.
    pub ui: bool,
    /// Time in which running requests may finish at the end.
    pub shutdown_timeout: Duration,
    /// Takes the log lines of the processes.
    pub log: ModelLog,
    /// The metrics, to which the router adds its own.
    pub registry: Registry,
}

/// What all handlers share.
#[derive(Clone)]
struct RouterState {
    fleet: Arc<Fleet>,
    api_keys: Arc<[String]>,
    bodies: Arc<Bodies>,
    registry: Registry,
    created: u64,
    ui: bool,
}

/// Serves until `shutdown` completes. Then it refuses new requests, lets the running ones finish for the time that the
/// options give, or until `abort` completes, and ends all processes.
///
/// # Errors
/// `Internal`, if the listener fails or the metrics are there already.
pub async fn serve(
    listener: TcpListener,
    options: RouterOptions,
    shutdown: impl Future<Output = ()>,
    abort: impl Future<Output = ()>,
) -> Result<()> {
    let (limits, tls) = (options.limits.clone(), options.tls.clone());
    let loopback = listener
        .local_addr()
        .is_ok_and(|address| address.ip().is_loopback());
    let origins = Origins::new(options.origins.clone(), &options.host).on_loopback(loopback);
    let state = RouterState::new(options)?;
    let fleet = state.fleet.clone();
    let (close, closing) = watch::channel(false);
    let router = router(state, Arc::new(origins));
    let connections = listener::run(listener, tls, router, full(None), limits, closing);
    let mut connections = tokio::spawn(connections);
    let time = tokio::spawn(fleet.clone().keep_time());
    let end = tokio::select! {
        Err(e) = &mut connections => Err(Error::internal(format!("the listener failed: {e}"))),
        () = shutdown => Ok(()),
    };
    tracing::info!("shutting down: running requests may finish");
    fleet.shut_down();
    tokio::select! {
        () = fleet.all_ended() => {}
        () = abort => {
            tracing::warn!("second signal: aborting the running requests");
            fleet.abort();
            fleet.all_ended().await;
        }
    }
    time.abort();
    close.send_replace(true);
    // Limited, because a client that has stopped reading must not keep the router running.
    if tokio::time::timeout(super::FLUSH, &mut connections)
        .await
        .is_err()
    {
        connections.abort();
    }
    end
}

impl RouterState {
    fn new(options: RouterOptions) -> Result<Self> {
        let api_keys: Arc<[String]> = options.api_keys.into();
        let launcher = Launcher {
            program: options.program,
            api_keys: api_keys.clone(),
            log: options.log,
        };
        let limits = FleetLimits {
            max_loaded: options.max_loaded,
            idle: options.idle,
            shutdown_timeout: options.shutdown_timeout,
        };
        let metrics = FleetMetrics::new(&options.registry)?;
        Ok(Self {
            fleet: Fleet::new(options.models, options.source, launcher, limits, metrics),
            api_keys,
            bodies: Arc::new(Bodies::new(&options.limits)),
            registry: options.registry,
            created: reply::now(),
            ui: options.ui,
        })
    }
}

/// Path and handler of each route that the router answers itself. All of [`OPEN`] are here, because what is passed on may
/// start a process, for which a key is needed.
fn routes() -> [(&'static str, MethodRouter<RouterState>); 17] {
    [
        ("/v1/models", get(listing::models)),
        ("/v1/models/{*id}", get(listing::model)),
        ("/v1/models/load", post(load).get(model_named_load)),
        ("/v1/models/unload", post(unload).get(model_named_unload)),
        ("/v1/load_lora_adapter", post(adapters::load)),
        ("/v1/unload_lora_adapter", post(adapters::unload)),
        ("/api/tags", get(listing::tags)),
        ("/api/ps", get(listing::ps)),
        (OLLAMA_VERSION, get(ollama::version)),
        ("/health", get(health)),
        ("/healthz", get(health)),
        ("/readyz", get(health)),
        ("/livez", get(async || HEALTHY)),
        ("/ping", get(health).post(health)),
        ("/load", get(server_load)),
        ("/version", get(info::version)),
        ("/metrics", get(metrics)),
    ]
}

/// The router's answers to all paths.
fn router(state: RouterState, origins: Arc<Origins>) -> Router {
    let mut router = Router::new();
    if state.ui {
        // Most models have a chat template; the page notices where one has none.
        router = router.route(PAGE, get(async || page::document(true)));
    }
    for (path, handler) in routes() {
        router = router.route(path, handler);
    }
    let router = router
        .fallback(pass_on)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(state.clone(), authorized));
    let router = match origins.cors() {
        // Browsers ask without the key whether a page may send it.
        Some(cors) => router.layer(cors),
        None => router,
    };
    let router = router
        .layer(middleware::from_fn_with_state(origins, guard))
        .with_state(state);
    identified(router, None)
}

/// Checks the key before the route is matched and the body is read. The processes check it, too, because they keep what
/// clients with different keys have apart.
async fn authorized(State(state): State<RouterState>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let has_page = state.ui && path == PAGE;
    let is_open = OPEN.contains(&path) || has_page || state.api_keys.is_empty();
    match authorize(&state.api_keys, &request) {
        Err(error) if !is_open => refusal(path, error),
        _ => next.run(request).await,
    }
}

/// An error in the form of a path's API.
struct Refusal {
    path: String,
    error: Error,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        refusal(&self.path, self.error)
    }
}

/// Passes a request on to the process of its model, and the answer back.
async fn pass_on(State(state): State<RouterState>, request: Request) -> Result<Response, Refusal> {
    let path = request.uri().path().to_owned();
    let passed = pass(&state, request).await;
    passed.map_err(|error| Refusal { path, error })
}

async fn pass(state: &RouterState, request: Request) -> Result<Response> {
    let (parts, mut received) = receive(state, request).await?;
    let body = Bytes::from(std::mem::take(&mut received.bytes));
    let selector = Selector::of(&parts, &body)?;
    let model = selector.choose(&state.fleet).await?;
    let forwarded = Forwarded::new(&parts);
    let waiting = loading::Waiting {
        fleet: state.fleet.clone(),
        model,
        forwarded,
        body,
        _memory: received,
    };
    // A process that has just started has nothing that could be deleted.
    if parts.method.is_safe() || parts.method == Method::DELETE {
        waiting.loaded().await
    } else if selector.streams {
        waiting.stream(loading::BETWEEN_COMMENTS).await
    } else {
        waiting.whole().await
    }
}

/// Receives the body of a request, and decodes it.
async fn receive(state: &RouterState, request: Request) -> Result<(Parts, Received)> {
    let (parts, body) = request.into_parts();
    let head = Request::from_parts(parts.clone(), body);
    let Ok(sent) = SentBody::from_request(head, &()).await;
    Ok((parts, state.bodies.receive(sent).await?))
}

/// That a request of llama.cpp's router was done.
#[derive(Serialize)]
struct Success {
    success: bool,
}

/// `POST /models/load`: starts the process of a model, and answers before it is loaded.
async fn load(State(state): State<RouterState>, request: Request) -> Result<Response, Refusal> {
    let fleet = state.fleet.clone();
    named(&state, request, |model| fleet.preload(model)).await
}

/// `POST /models/unload`: asks the process of a model to end, if there is one.
async fn unload(State(state): State<RouterState>, request: Request) -> Result<Response, Refusal> {
    let fleet = state.fleet.clone();
    named(&state, request, |model| fleet.unload(model)).await
}

/// Does something with the model that a request names.
async fn named(
    state: &RouterState,
    request: Request,
    act: impl FnOnce(usize),
) -> Result<Response, Refusal> {
    let path = request.uri().path().to_owned();
    let model = async {
        let (parts, received) = receive(state, request).await?;
        let selector = Selector::of(&parts, &received.bytes)?;
        selector.choose(&state.fleet).await
    };
    let model = model.await.map_err(|error| Refusal { path, error })?;
    act(model);
    Ok(Json(Success { success: true }).into_response())
}

/// A model may have the name of a route.
async fn model_named_load(state: State<RouterState>, request: Request) -> Response {
    let id = Path("load".to_owned());
    listing::model(state, Ok(id), request).await.into_response()
}

async fn model_named_unload(state: State<RouterState>, request: Request) -> Response {
    let id = Path("unload".to_owned());
    listing::model(state, Ok(id), request).await.into_response()
}

/// Whether requests are taken. Not while the router ends, so that balancers send none.
async fn health(State(state): State<RouterState>) -> Result<Json<Health>, Refused> {
    state.fleet.ready()?;
    Ok(HEALTHY)
}

/// How many requests are being answered.
#[derive(Serialize)]
struct ServerLoad {
    server_load: usize,
}

/// `GET /load`.
async fn server_load(State(state): State<RouterState>) -> Json<ServerLoad> {
    let server_load = state.fleet.load();
    Json(ServerLoad { server_load })
}

/// `GET /metrics`: the router's own, or with `?model=` those of a model's process, which is not started for them.
async fn metrics(State(state): State<RouterState>, request: Request) -> Result<Response, Refusal> {
    let (parts, _) = request.into_parts();
    let text = async {
        let Some(name) = selector::in_query(&parts.uri) else {
            let text = TextEncoder::new().encode_to_string(&state.registry.gather());
            let text = text.map_err(|e| Error::internal(format!("metrics: {e}")))?;
            return Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response());
        };
        // The names of those that there are need a key.
        let place = state.fleet.catalog.called(&name);
        let model = place.ok_or_else(|| {
            let message = format!("the model `{name}` does not exist");
            Error::request(RequestErrorKind::NotFound, Some("model"), message)
        })?;
        let Some(address) = state.fleet.state(model).address else {
            let message = format!("the model `{name}` is not loaded");
            let kind = RequestErrorKind::ModelUnavailable;
            return Err(Error::request(kind, Some("model"), message));
        };
        let answer = proxy::ask(address, Forwarded::get("/metrics", &parts)).await?;
        Ok(answer.map(Body::from))
    };
    let path = parts.uri.path().to_owned();
    text.await.map_err(|error| Refusal { path, error })
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
mod tests;
