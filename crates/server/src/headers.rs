//! The headers of responses that only this server has.

use axum::Json;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Says to what `max_tokens` was cut.
pub(super) const MAX_TOKENS: HeaderName = HeaderName::from_static("x-foretoken-max-tokens");

/// Says what was left out of a request.
pub(super) const WARNING: HeaderName = HeaderName::from_static("x-foretoken-warning");

/// Maximum number of warnings that the header has.
const MAX_WARNINGS: usize = 8;

/// An answer, and what was left out of its request.
pub(super) struct Warned<T> {
    pub answer: T,
    pub warnings: Vec<String>,
}

impl<T> From<T> for Warned<T> {
    fn from(answer: T) -> Self {
        Self {
            answer,
            warnings: Vec::new(),
        }
    }
}

impl<T: Serialize> IntoResponse for Warned<T> {
    fn into_response(self) -> Response {
        let mut response = Json(self.answer).into_response();
        warn(response.headers_mut(), &self.warnings);
        response
    }
}

/// Says in a header and in the log what was left out of a request, if anything was.
pub(super) fn warn(headers: &mut HeaderMap, warnings: &[String]) {
    if warnings.is_empty() {
        return;
    }
    let (shown, others) = warnings.split_at(warnings.len().min(MAX_WARNINGS));
    let mut line = shown.join("; ");
    if !others.is_empty() {
        line.push_str(&format!("; and {} more", others.len()));
    }
    tracing::warn!("{line}");
    if let Ok(line) = HeaderValue::try_from(line) {
        headers.insert(WARNING, line);
    }
}
