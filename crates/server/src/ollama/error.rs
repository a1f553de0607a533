//! Errors as Ollama's clients expect them.

use crate::error::response;
use axum::Json;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use schemars::JsonSchema;
use serde::Serialize;

/// What the paths of this API begin with.
const API: &str = "/api/";
/// Routes of this API that change which models there are.
const NOT_OFFERED: [&str; 5] = ["create", "copy", "delete", "push", "blobs"];

/// Whether `path` is this API's.
pub(crate) fn has_route(path: &str) -> bool {
    path.starts_with(API)
}

/// Why the route `path` is not there, if this API has one elsewhere.
pub(crate) fn not_offered(path: &str) -> Option<String> {
    let first = path.strip_prefix(API)?.split('/').next()?;
    NOT_OFFERED.contains(&first).then(|| {
        format!("{path} is not supported: this server has the model that it was started with, and makes, copies, deletes and pushes none")
    })
}

/// An error of this API. Its status and headers are those of the others.
pub(crate) struct OllamaFailure(pub Error);

impl From<Error> for OllamaFailure {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for OllamaFailure {
    fn into_response(self) -> Response {
        response(&self.0, Json(OllamaError::of(&self.0)))
    }
}

/// An error in Ollama's form.
#[derive(Serialize, JsonSchema)]
pub(crate) struct OllamaError {
    error: String,
}

impl OllamaError {
    /// The body, or the line, that tells of `error`.
    pub fn of(error: &Error) -> Self {
        let error = error.to_string();
        Self { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_told_apart() {
        assert!(has_route("/api/chat") && has_route("/api/nothing"));
        assert!(!has_route("/api") && !has_route("/v1/api/chat") && !has_route("/apis/chat"));
        for path in ["/api/create", "/api/blobs/sha256:0"] {
            let why = not_offered(path).expect(path);
            assert!(why.starts_with(path), "{why}");
        }
        for path in ["/api/chat", "/create", "/api/created"] {
            assert_eq!(not_offered(path), None);
        }
    }
}
