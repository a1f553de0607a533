//! Errors as Anthropic's clients expect them.

use crate::error::{Names, response};
use axum::Json;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, RequestErrorKind as Kind};
use schemars::JsonSchema;
use serde::Serialize;

/// Whether `path` is this API's.
pub(crate) fn has_route(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// An error of this API. Its status and headers are those of the others.
pub(crate) struct Failure(pub Error);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        response(&self.0, Json(body(&self.0)))
    }
}

/// An error in Anthropic's form.
#[derive(Serialize, JsonSchema)]
pub(crate) struct MessageError {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "error"))]
    kind: &'static str,
    error: MessageErrorDetails,
}

#[derive(Serialize, JsonSchema)]
struct MessageErrorDetails {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

/// The body that tells of `error`.
pub(crate) fn body(error: &Error) -> MessageError {
    let message = match error {
        // Clients recognize by these words that less may succeed.
        Error::Request {
            kind: Kind::ContextLengthExceeded,
            param: Some(param),
            ..
        } if param.is("max_tokens") => {
            format!("input length and `max_tokens` exceed context limit: {error}")
        }
        Error::Request {
            kind: Kind::ContextLengthExceeded,
            ..
        } => format!("prompt is too long: {error}"),
        _ => error.to_string(),
    };
    MessageError {
        kind: "error",
        error: MessageErrorDetails {
            kind: Names::of(error).anthropic,
            message,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_kind_has_a_type_and_keeps_its_status() {
        for (kind, expected, status) in [
            (Kind::Invalid, "invalid_request_error", 400),
            (Kind::Unauthorized, "authentication_error", 401),
            (Kind::NotFound, "not_found_error", 404),
            (Kind::MethodNotAllowed, "invalid_request_error", 405),
            (Kind::TooLarge, "request_too_large", 413),
            (Kind::UnsupportedEncoding, "invalid_request_error", 415),
            (Kind::QueueFull, "rate_limit_error", 429),
            (Kind::ShuttingDown, "overloaded_error", 503),
            (Kind::Overloaded, "overloaded_error", 503),
            (Kind::Forbidden, "permission_error", 403),
            (Kind::Timeout, "timeout_error", 408),
            (Kind::ModelUnavailable, "api_error", 503),
        ] {
            let error = Error::request(kind, Some("field"), "why");
            let expected = json!({"type": "error", "error": {"type": expected, "message": "why"}});
            assert_eq!(json!(body(&error)), expected);
            let response = Failure(error).into_response();
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["content-type"], "application/json");
            let retry = response.headers().contains_key("retry-after");
            let later = matches!(kind, Kind::QueueFull | Kind::Overloaded);
            assert_eq!(retry, later);
        }
        assert_eq!(
            json!(body(&Error::internal("bug")))["error"]["type"],
            "api_error"
        );
        let long = Error::request(Kind::ContextLengthExceeded, Some("messages"), "why");
        assert_eq!(
            json!(body(&long))["error"]["message"],
            "prompt is too long: why"
        );
        let both = Error::request(Kind::ContextLengthExceeded, Some("max_tokens"), "why");
        let message = "input length and `max_tokens` exceed context limit: why";
        assert_eq!(json!(body(&both))["error"]["message"], message);
        assert!(has_route("/v1/messages") && has_route("/v1/messages/count_tokens"));
        assert!(!has_route("/v1/messages_") && !has_route("/v1/models"));
    }
}
