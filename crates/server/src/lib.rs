//! The HTTP APIs, OpenAI's, Anthropic's, Ollama's and parts of others: routes, authorization, and graceful shutdown.

#![forbid(unsafe_code)]

mod acceptance;
mod access;
mod adapter_routes;
mod adapters;
mod answer;
mod anthropic;
mod beam;
mod beam_search;
mod blocks;
mod bodies;
mod caller;
mod checks;
mod choice;
mod choice_rules;
mod chunks;
mod connection;
mod content;
mod context;
mod conversation;
mod custom_tool;
mod defaults;
mod embedding_turns;
mod embeddings;
mod encoding;
mod error;
pub mod fuzzing;
mod headers;
mod in_process;
mod info;
mod limits;
mod lines;
mod listener;
mod llama;
mod load;
mod metrics;
pub mod model_router;
mod numbers;
mod object;
mod ollama;
mod openai;
mod openapi;
mod origin;
mod other_routes;
mod others;
mod page;
mod params;
mod paths;
mod piece;
mod prompt;
mod query;
mod relevance;
mod reply;
mod reply_objects;
mod request_id;
mod rerank;
mod responses;
mod server_info;
mod speculation;
mod state;
mod stop;
mod stored;
mod stream;
mod structured;
mod taken;
mod tei;
mod thinking;
mod tls;
mod tokenize;
mod tool_choice;
mod tools;
mod trace;
mod unsupported;
mod wire;

use access::{OLLAMA_VERSION, PAGE, authorized, guard, refusal};
use anthropic::Failure;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use caller::Caller;
use chunks::Chunks;
use context::Context;
use encoding::SentBody;
use error::Refused;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use headers::{MAX_TOKENS, Warned, warn};
use ollama::OllamaFailure;
use openai::{Asked, Job};
use schemars::JsonSchema;
use serde::Serialize;
use state::ModelObject;
use std::sync::Arc;
use std::time::Duration;
use stream::{Running, Shape};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use adapters::{AdapterLimits, Adapters};
/// In the version that [`router`] returns.
pub use axum;
pub use defaults::SamplingDefaults;
pub use in_process::{InProcess, WholeAnswer};
pub use limits::HttpLimits;
pub use origin::OriginOptions;
pub use server_info::{ModelFiles, ServerInfo};
pub use state::AppState;
pub use tls::Tls;
pub use trace::{ChoiceRecord, JobRecord, Observer, RequestRecord};

/// The routes of a stored response, and of the items that it answers.
const RESPONSE: &str = "/v1/responses/{response_id}";
const INPUT_ITEMS: &str = "/v1/responses/{response_id}/input_items";

/// Time that finished replies have to reach their clients after the engine has ended.
const FLUSH: Duration = Duration::from_secs(1);

/// Method, path and handler of each route but the page's.
fn routes() -> Vec<(Method, &'static str, MethodRouter<AppState>)> {
    const GET: Method = Method::GET;
    const POST: Method = Method::POST;
    let chat = generating::<Refused, _>(|context, body| in_chunks(context.chat(body)));
    let completion = generating::<Refused, _>(|context, body| in_chunks(context.completion(body)));
    let response = asking::<Refused, _>(|context, body| context.response(body));
    let message = generating::<Failure, _>(|context, body| context.message(body));
    let count_tokens = reading::<Failure, _>(|context, body| context.message_tokens(body));
    let input_tokens = reading::<Refused, _>(|context, body| context.response_tokens(body));
    let infill = generating::<Refused, _>(|context, body| context.infill(body));
    let apply_template = reading::<Refused, _>(|context, body| context.apply_template(body));
    let tokenize = reading::<Refused, _>(|context, body| context.tokenize(body));
    let detokenize = reading::<Refused, _>(|context, body| context.detokenize(body));
    let mut routes = vec![
        (POST, "/v1/chat/completions", chat),
        (POST, "/v1/completions", completion),
        (POST, "/v1/embeddings", post(embeddings::embeddings)),
        (POST, "/embed", post(tei::embed)),
        (GET, "/info", get(tei::info)),
        (POST, "/v1/rerank", post(rerank::rerank)),
        (POST, "/v1/score", post(rerank::score)),
        (POST, "/v1/responses", response),
        (POST, "/v1/responses/input_tokens", input_tokens),
        (GET, RESPONSE, get(responses::stored)),
        (Method::DELETE, RESPONSE, delete(responses::delete)),
        (GET, INPUT_ITEMS, get(responses::input_items)),
        (POST, "/v1/messages", message),
        (POST, "/v1/messages/count_tokens", count_tokens),
        (GET, "/v1/models", get(models)),
        (GET, "/v1/models/{*id}", get(model)),
        (POST, "/tokenize", tokenize),
        (POST, "/detokenize", detokenize),
        (POST, "/apply-template", apply_template),
        (POST, "/infill", infill),
        (POST, "/v1/load_lora_adapter", post(adapter_routes::load)),
        (
            POST,
            "/v1/unload_lora_adapter",
            post(adapter_routes::unload),
        ),
        (POST, "/reset_prefix_cache", post(reset_prefix_cache)),
        (GET, "/health", get(health)),
        (GET, "/healthz", get(health)),
        (GET, "/readyz", get(health)),
        (GET, "/livez", get(live)),
        (GET, "/ping", get(health)),
        (POST, "/ping", post(health)),
        (GET, "/load", get(info::load)),
        (GET, "/version", get(info::version)),
        (GET, "/server_info", get(info::server_info)),
        (GET, "/props", get(llama::props)),
        (GET, "/tokenizer_info", get(info::tokenizer_info)),
        (GET, "/openapi.json", get(openapi::openapi)),
        (GET, "/metrics", get(metrics::metrics)),
    ];
    routes.extend(ollama_routes());
    routes
}

/// The routes of Ollama's API.
fn ollama_routes() -> [(Method, &'static str, MethodRouter<AppState>); 9] {
    const GET: Method = Method::GET;
    const POST: Method = Method::POST;
    let chat = asking::<OllamaFailure, _>(|context, body| context.ollama_chat(body));
    let generate = asking::<OllamaFailure, _>(|context, body| context.ollama_generate(body));
    [
        (POST, "/api/chat", chat),
        (POST, "/api/generate", generate),
        (POST, "/api/embed", post(ollama::embed)),
        (POST, "/api/embeddings", post(ollama::embeddings)),
        (GET, "/api/tags", get(ollama::tags)),
        (GET, "/api/ps", get(ollama::ps)),
        (POST, "/api/show", post(ollama::show)),
        (POST, "/api/pull", post(ollama::pull)),
        (GET, OLLAMA_VERSION, get(ollama::version)),
    ]
}

/// The server's answers to all paths, for a program that serves connections itself. What concerns these is then up to that
/// program: TLS, the number of connections and their timeouts, and, at an address of the loopback, the check of `Host`, for
/// which [`OriginOptions::allowed_hosts`] must have names. [`serve`] does all of this.
pub fn router(state: AppState) -> Router {
    let mut router = Router::new();
    if state.ui {
        router = router.route(PAGE, get(page::page));
    }
    for (_, path, handler) in routes() {
        router = router.route(path, handler);
    }
    let mut router = router
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(state.clone(), authorized));
    if let Some(cors) = state.origins.cors() {
        // Browsers ask without the key whether a page may send it.
        router = router.layer(cors);
    }
    let router = router
        .layer(middleware::from_fn_with_state(state.origins.clone(), guard))
        .with_state(state.clone());
    identified(router, state.observer)
}

/// `router` with an id for each request. In another router, because a router's own layers come after the
/// path was matched.
fn identified(router: Router, observer: Option<Arc<dyn Observer>>) -> Router {
    let identify = middleware::from_fn_with_state(observer, caller::identify);
    Router::new().fallback_service(router).layer(identify)
}

/// The answer on connections over the limit, which closes them.
fn full(observer: Option<Arc<dyn Observer>>) -> Router {
    let refuse = async |request: Request| {
        let message =
            "the server has as many connections as --max-connections allows; try again later";
        let error = Error::request(RequestErrorKind::Overloaded, None, message);
        let close = [(header::CONNECTION, "close")];
        (close, refusal(request.uri().path(), error))
    };
    identified(Router::new().fallback(refuse), observer)
}

/// Serves until `shutdown` completes. Then it refuses new requests with 503, lets the running ones
/// finish for at most `timeout`, fails the rest, and returns.
///
/// # Errors
/// `Internal`, if the engine ends without being asked to.
pub async fn serve(
    listener: TcpListener,
    state: AppState,
    shutdown: impl Future<Output = ()> + Send + 'static,
    timeout: Duration,
) -> Result<()> {
    let engine = state.engine.clone();
    let (close, closing) = watch::channel(false);
    let (limits, tls) = (state.limits.clone(), state.tls.clone());
    let address = listener.local_addr();
    let state = state.on_loopback(address.is_ok_and(|address| address.ip().is_loopback()));
    let full = full(state.observer.clone());
    let connections = listener::run(listener, tls, router(state), full, limits, closing);
    let mut connections = tokio::spawn(connections);
    let end = tokio::select! {
        Err(e) = &mut connections => {
            return Err(Error::internal(format!("the listener failed: {e}")));
        }
        Err(died) = engine.ended() => Err(died),
        () = shutdown => {
            tracing::info!("shutting down: running requests have at most {timeout:?} to finish");
            engine.drain();
            let end = tokio::time::timeout(timeout, engine.ended()).await;
            end.unwrap_or_else(|_| {
                tracing::warn!("shutting down: out of time, aborting the running requests");
                engine.abort();
                Ok(())
            })
        }
    };
    close.send_replace(true);
    // Limited, because a client that has stopped reading must not keep the server running.
    if tokio::time::timeout(FLUSH, &mut connections).await.is_err() {
        connections.abort();
    }
    end
}

/// What makes a value of a body.
type Read<T> = fn(&Context<'_>, &[u8]) -> Result<T>;

/// A route that answers a body with what `read` makes of it. `E` is the API's form of errors.
fn reading<E, T>(read: Read<Warned<T>>) -> MethodRouter<AppState>
where
    E: From<Error> + IntoResponse + 'static,
    T: Serialize + Send + 'static,
{
    post(async move |State(state): State<AppState>, body: SentBody| {
        Ok::<_, E>(state.read(body, read).await?)
    })
}

/// A route that generates what a body asks for. `read` makes a job of the body, and the shape of the answer.
fn generating<E, S>(read: Read<(Job, S)>) -> MethodRouter<AppState>
where
    E: From<Error> + IntoResponse + 'static,
    S: Shape,
{
    let handler = async move |State(state): State<AppState>, caller: Caller, body: SentBody| {
        let (job, shape) = state.read(body, read).await?;
        Ok::<_, E>(answer(&state, job, shape, caller).await?)
    };
    post(handler)
}

/// As [`generating`], for bodies that may be answered without a text.
fn asking<E, S>(read: Read<Asked<S>>) -> MethodRouter<AppState>
where
    E: From<Error> + IntoResponse + 'static,
    S: Shape,
{
    let handler = async move |State(state): State<AppState>, caller: Caller, body: SentBody| {
        Ok::<_, E>(match state.read(body, read).await? {
            Asked::Text(text) => {
                let (job, shape) = *text;
                answer(&state, job, shape, caller).await?
            }
            Asked::Known(answer) => *answer,
        })
    };
    post(handler)
}

/// The job of a completion or a chat, with the shape of its answer.
fn in_chunks(job: Result<Job>) -> Result<(Job, Chunks)> {
    let job = job?;
    let chunks = Chunks::new(&job);
    Ok((job, chunks))
}

async fn answer(
    state: &AppState,
    mut job: Job,
    shape: impl Shape,
    caller: Caller,
) -> Result<Response> {
    let (stream, beams, cut_to) = (job.stream, job.beams, job.cut_to);
    let warnings = std::mem::take(&mut job.warnings);
    if let Some(trace) = &caller.trace {
        trace.accepted(&mut job, shape.id());
    }
    let mut response = if let Some(beams) = beams {
        beam_search::collect(state, job, beams, shape, &caller).await?
    } else {
        let running = Running::start(state, job, &caller)?;
        if stream {
            running.stream(shape, caller)
        } else {
            running.collect(shape).await?
        }
    };
    if let Some(max) = cut_to {
        tracing::info!("max_tokens was cut to {max}, for which the context has room");
        response.headers_mut().insert(MAX_TOKENS, max.into());
    }
    warn(response.headers_mut(), &warnings);
    Ok(response)
}

#[derive(Serialize, JsonSchema)]
struct ModelList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<ModelObject>,
}

async fn models(State(state): State<AppState>) -> Json<ModelList> {
    Json(ModelList {
        object: "list",
        data: state.models(),
    })
}

async fn model(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, Refused> {
    let named =
        |e: PathRejection| Error::request(RequestErrorKind::NotFound, Some("model"), e.body_text());
    let Path(id) = id.map_err(named)?;
    Ok(Json(state.listed(&id)?))
}

#[derive(Serialize, JsonSchema)]
struct Health {
    #[schemars(extend("const" = "ok"))]
    status: &'static str,
}

/// The answer of a server that is well.
const HEALTHY: Json<Health> = Json(Health { status: "ok" });

async fn health(State(state): State<AppState>) -> Result<Json<Health>, Refused> {
    state.ready()?;
    Ok(HEALTHY)
}

/// Whether the process works. It does while it shuts down, so that no supervisor ends it earlier.
async fn live(State(state): State<AppState>) -> Result<Json<Health>, Refused> {
    if state.engine.has_ended() {
        state.ready()?;
    }
    Ok(HEALTHY)
}

async fn reset_prefix_cache(State(state): State<AppState>) -> Result<StatusCode, Refused> {
    state.engine.reset_prefix_cache().await?;
    Ok(StatusCode::OK)
}

async fn not_found(request: Request) -> Response {
    let path = request.uri().path();
    let message = ollama::not_offered(path).unwrap_or_else(|| {
        let known: Vec<String> = (routes().iter())
            .map(|(method, path, _)| format!("{method} {}", path.replace('*', "")))
            .collect();
        let instead = other_routes::instead_of(path);
        let instead = instead.map_or_else(String::new, |instead| format!(": {instead}"));
        format!(
            "there is no route {path}{instead}; there are {}",
            known.join(", ")
        )
    });
    refusal(
        path,
        Error::request(RequestErrorKind::NotFound, None, message),
    )
}

async fn method_not_allowed(method: Method, request: Request) -> Response {
    let path = request.uri().path();
    let known = routes();
    let accepted = known.iter().filter(|(_, known, _)| *known == path);
    let accepted: Vec<&str> = accepted.map(|(method, ..)| method.as_str()).collect();
    let instead = if accepted.is_empty() {
        let instead = other_routes::instead_of(path);
        instead.map_or_else(String::new, |instead| format!(": {instead}"))
    } else {
        format!(", but {}", accepted.join(" and "))
    };
    let message = format!("{path} does not accept {method}{instead}");
    let error = Error::request(RequestErrorKind::MethodNotAllowed, None, message);
    refusal(path, error)
}
