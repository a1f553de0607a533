//! Who may use the server: hosts and origins, keys, and errors in the form of a path's API.

use super::anthropic::{self, Failure};
use super::context::KeyIndex;
use super::error::Refused;
use super::ollama::{self, OllamaFailure};
use super::origin::Origins;
use super::state::AppState;
use axum::extract::{Request, State};
use axum::http::{HeaderName, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The header in which Anthropic's clients send the key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Where Ollama's clients ask for the version.
pub(super) const OLLAMA_VERSION: &str = "/api/version";

/// Routes that need no key, for supervisors, balancers and Prometheus, and for clients that look for a server.
pub(super) const OPEN: [&str; 9] = [
    "/health",
    "/healthz",
    "/livez",
    "/readyz",
    "/ping",
    "/load",
    "/version",
    "/metrics",
    OLLAMA_VERSION,
];

/// The page's route. It needs no key either: it asks for the key, and sends it with what it requests.
pub(super) const PAGE: &str = "/";

/// Checks host and origin, before anything else is said.
pub(super) async fn guard(
    State(origins): State<Arc<Origins>>,
    request: Request,
    next: Next,
) -> Response {
    match origins.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => refusal(request.uri().path(), error),
    }
}

/// Checks authorization and shutdown before the route is matched and the body is read: without the key, no
/// one learns which routes exist.
pub(super) async fn authorized(
    State(state): State<AppState>,
    mut request: Request,
    next: Next,
) -> Response {
    match admit(&state, &request) {
        Ok(key) => {
            if let Some(key) = key {
                request.extensions_mut().insert(key);
            }
            next.run(request).await
        }
        Err(error) => refusal(request.uri().path(), error),
    }
}

/// An error in the form of the API that `path` belongs to.
pub(super) fn refusal(path: &str, error: Error) -> Response {
    if anthropic::has_route(path) {
        Failure(error).into_response()
    } else if ollama::has_route(path) {
        OllamaFailure(error).into_response()
    } else {
        Refused(error).into_response()
    }
}

/// The key of a request that may be served; `None` if it needs none.
fn admit(state: &AppState, request: &Request) -> Result<Option<KeyIndex>> {
    let path = request.uri().path();
    let is_open = OPEN.contains(&path) || state.ui && path == PAGE;
    let key = if is_open || state.api_keys.is_empty() {
        None
    } else {
        Some(authorize(&state.api_keys, request)?)
    };
    if path.starts_with("/v1/") || ollama::has_route(path) && !is_open {
        state.ready()?;
    }
    Ok(key)
}

/// The key of `keys` that a request has.
///
/// # Errors
/// `Unauthorized`.
pub(super) fn authorize(keys: &[String], request: &Request) -> Result<KeyIndex> {
    let text = |name: HeaderName| request.headers().get(name)?.to_str().ok();
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let given = bearer.into_iter().chain(text(API_KEY));
    // Compared in constant time, so that response times reveal no prefix of a key.
    let is = |given: &str, key: &String| bool::from(given.as_bytes().ct_eq(key.as_bytes()));
    let mut found = given.filter_map(|given| keys.iter().position(|key| is(given, key)));
    found.next().map(KeyIndex).ok_or_else(|| {
        Error::request(
            RequestErrorKind::Unauthorized,
            None,
            "the API key is missing or wrong; send `Authorization: Bearer <key>` or `x-api-key: <key>`",
        )
    })
}
