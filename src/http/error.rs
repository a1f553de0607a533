//! Converts the crate's error to the response that OpenAI's clients expect.

use super::encoding;
use crate::error::{Error, RequestErrorKind as Kind};
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

/// Seconds after which a client should retry when the queue or the memory for bodies is full.
const RETRY_AFTER_SECONDS: u16 = 1;

/// Why a request was refused, for the log. A response has it as an extension.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub code: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// What has failed here, if it is not the client's fault.
    pub cause: Option<String>,
}

impl Refusal {
    pub fn of(error: &Error) -> Self {
        match error {
            Error::Request { kind, param, .. } => Self {
                code: names(*kind, param.as_deref()).1,
                param: param.clone(),
                cause: None,
            },
            Error::Setup(_) | Error::Internal(_) => Self {
                code: INTERNAL,
                param: None,
                cause: Some(error.to_string()),
            },
        }
    }
}

const INTERNAL: &str = "internal_error";
const CONTEXT: &str = "context_length_exceeded";

/// An error in OpenAI's form.
#[derive(Serialize, JsonSchema)]
pub(super) struct ErrorBody<'a> {
    error: ErrorDetails<'a>,
}

#[derive(Serialize, JsonSchema)]
struct ErrorDetails<'a> {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// The field at fault.
    param: Option<&'a str>,
    code: &'static str,
}

/// The body that tells of `error`.
pub(super) fn body(error: &Error) -> ErrorBody<'_> {
    let (kind, param, code) = match error {
        Error::Request { kind, param, .. } => {
            let (kind, code) = names(*kind, param.as_deref());
            (kind, param.as_deref(), code)
        }
        Error::Setup(_) | Error::Internal(_) => ("server_error", None, INTERNAL),
    };
    let message = match error {
        // LangChain looks for the code in the message alone, and only then falls back to less.
        Error::Request {
            kind: Kind::ContextLengthExceeded,
            ..
        } => format!("{error} ({CONTEXT})"),
        _ => error.to_string(),
    };
    ErrorBody {
        error: ErrorDetails {
            message,
            kind,
            param,
            code,
        },
    }
}

fn names(kind: Kind, param: Option<&str>) -> (&'static str, &'static str) {
    match kind {
        Kind::Invalid => ("invalid_request_error", "invalid_value"),
        Kind::ContextLengthExceeded => ("invalid_request_error", CONTEXT),
        Kind::Unauthorized => ("authentication_error", "invalid_api_key"),
        Kind::NotFound if param == Some("model") => ("invalid_request_error", "model_not_found"),
        Kind::NotFound => ("invalid_request_error", "not_found"),
        Kind::MethodNotAllowed => ("invalid_request_error", "method_not_allowed"),
        Kind::Forbidden => ("invalid_request_error", "forbidden"),
        Kind::Timeout => ("invalid_request_error", "request_timeout"),
        Kind::TooLarge => ("invalid_request_error", "request_too_large"),
        Kind::UnsupportedEncoding => ("invalid_request_error", "unsupported_encoding"),
        Kind::QueueFull => ("rate_limit_error", "queue_full"),
        Kind::Overloaded => ("service_unavailable_error", "overloaded"),
        Kind::ShuttingDown => ("service_unavailable_error", "shutting_down"),
    }
}

fn status(error: &Error) -> StatusCode {
    match error {
        Error::Request { kind, .. } => match kind {
            Kind::Invalid | Kind::ContextLengthExceeded => StatusCode::BAD_REQUEST,
            Kind::Unauthorized => StatusCode::UNAUTHORIZED,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::Timeout => StatusCode::REQUEST_TIMEOUT,
            Kind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::UnsupportedEncoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::QueueFull => StatusCode::TOO_MANY_REQUESTS,
            Kind::Overloaded | Kind::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        },
        Error::Setup(_) | Error::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = status(&self);
        let mut response = (status, Json(body(&self))).into_response();
        response.extensions_mut().insert(Refusal::of(&self));
        let headers = response.headers_mut();
        match self {
            Error::Request {
                kind: Kind::QueueFull | Kind::Overloaded,
                ..
            } => {
                headers.insert(header::RETRY_AFTER, RETRY_AFTER_SECONDS.into());
            }
            Error::Request {
                kind: Kind::Unauthorized,
                ..
            } => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Error::Request {
                kind: Kind::UnsupportedEncoding,
                ..
            } => {
                let accepted = HeaderValue::from_static(encoding::ACCEPTED);
                headers.insert(header::ACCEPT_ENCODING, accepted);
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_kind_has_its_status_and_shape() {
        for (kind, code, expected) in [
            (Kind::Invalid, "invalid_value", 400),
            (Kind::ContextLengthExceeded, "context_length_exceeded", 400),
            (Kind::Unauthorized, "invalid_api_key", 401),
            (Kind::NotFound, "not_found", 404),
            (Kind::Forbidden, "forbidden", 403),
            (Kind::Timeout, "request_timeout", 408),
            (Kind::Overloaded, "overloaded", 503),
            (Kind::MethodNotAllowed, "method_not_allowed", 405),
            (Kind::TooLarge, "request_too_large", 413),
            (Kind::UnsupportedEncoding, "unsupported_encoding", 415),
            (Kind::QueueFull, "queue_full", 429),
            (Kind::ShuttingDown, "shutting_down", 503),
        ] {
            let error = Error::request(kind, Some("field"), "why");
            let body = json!(body(&error));
            assert_eq!(body["error"]["code"], code);
            let message = match kind {
                Kind::ContextLengthExceeded => "why (context_length_exceeded)",
                _ => "why",
            };
            assert_eq!(body["error"]["message"], message);
            assert_eq!(body["error"]["param"], "field");
            assert!(body["error"]["type"].is_string());
            let response = error.into_response();
            assert_eq!(response.status(), expected);
            let retry = response.headers().get(header::RETRY_AFTER);
            let later = matches!(kind, Kind::QueueFull | Kind::Overloaded);
            assert_eq!(retry.is_some(), later);
        }
        let unknown = Error::request(Kind::NotFound, Some("model"), "no such model");
        assert_eq!(json!(body(&unknown))["error"]["code"], "model_not_found");
        assert_eq!(Error::internal("bug").into_response().status(), 500);
    }
}
