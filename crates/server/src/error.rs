//! Converts the crate's error to the response that OpenAI's clients expect.

use super::encoding;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use foretoken_core::error::{Error, RequestErrorKind as Kind};
use schemars::JsonSchema;
use serde::Serialize;

/// Seconds after which a client should retry when the queue or the memory for bodies is full.
const RETRY_AFTER_SECONDS: u16 = 1;

/// The reason why a request was refused, for the log. A response has it as an extension.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub code: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// The failure in the server, if the error is not the client's fault.
    pub cause: Option<String>,
}

impl Refusal {
    pub fn of(error: &Error) -> Self {
        Self {
            code: Names::of(error).code,
            param: error.param(),
            cause: match error {
                Error::Request { .. } => None,
                Error::Setup(_) | Error::Internal(_) => Some(error.to_string()),
            },
        }
    }
}

/// The code of a prompt that is too long.
pub(super) const CONTEXT: &str = "context_length_exceeded";

/// Anthropic's type of what may succeed later.
const OVERLOADED: &str = "overloaded_error";

/// The names of an error in the APIs.
pub(super) struct Names {
    status: u16,
    /// OpenAI's type and code.
    kind: &'static str,
    code: &'static str,
    /// Anthropic's type.
    pub anthropic: &'static str,
}

impl Names {
    pub fn of(error: &Error) -> Self {
        const INVALID: &str = "invalid_request_error";
        const UNAVAILABLE: &str = "service_unavailable_error";
        let Error::Request { kind, param, .. } = error else {
            return Self {
                status: 500,
                kind: "server_error",
                code: "internal_error",
                anthropic: "api_error",
            };
        };
        let is_model = param.as_ref().is_some_and(|param| param.is("model"));
        let (status, kind, code, anthropic) = match kind {
            Kind::Invalid => (400, INVALID, "invalid_value", INVALID),
            Kind::ContextLengthExceeded => (400, INVALID, CONTEXT, INVALID),
            Kind::Unauthorized => {
                let kind = "authentication_error";
                (401, kind, "invalid_api_key", kind)
            }
            Kind::Forbidden => (403, INVALID, "forbidden", "permission_error"),
            Kind::NotFound if is_model => (404, INVALID, "model_not_found", "not_found_error"),
            Kind::NotFound => (404, INVALID, "not_found", "not_found_error"),
            Kind::MethodNotAllowed => (405, INVALID, "method_not_allowed", INVALID),
            Kind::Timeout => (408, INVALID, "request_timeout", "timeout_error"),
            Kind::TooLarge => (413, INVALID, "request_too_large", "request_too_large"),
            Kind::UnsupportedEncoding => (415, INVALID, "unsupported_encoding", INVALID),
            Kind::QueueFull => (429, "rate_limit_error", "queue_full", "rate_limit_error"),
            Kind::Overloaded => (503, UNAVAILABLE, "overloaded", OVERLOADED),
            Kind::ShuttingDown => (503, UNAVAILABLE, "shutting_down", OVERLOADED),
            Kind::ModelUnavailable => (503, UNAVAILABLE, "model_unavailable", "api_error"),
        };
        Self {
            status,
            kind,
            code,
            anthropic,
        }
    }
}

/// The kind of an error with this code, or with this type of Anthropic's, if the status of its answer alone does not tell it.
pub(super) fn kind_of(code: &str) -> Option<Kind> {
    match code {
        CONTEXT => Some(Kind::ContextLengthExceeded),
        "overloaded" | OVERLOADED => Some(Kind::Overloaded),
        "shutting_down" => Some(Kind::ShuttingDown),
        _ => None,
    }
}

/// The message of an error without the code that [`body`] adds to it.
pub(super) fn without_code(message: &str) -> &str {
    let code = format!(" ({CONTEXT})");
    message.strip_suffix(&code).unwrap_or(message)
}

/// An error in OpenAI's form.
#[derive(Serialize, JsonSchema)]
pub(super) struct ErrorBody {
    error: ErrorDetails,
}

#[derive(Serialize, JsonSchema)]
struct ErrorDetails {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// The field at fault.
    param: Option<String>,
    code: &'static str,
}

/// The body that tells of `error`.
pub(super) fn body(error: &Error) -> ErrorBody {
    let message = match error {
        // LangChain looks for the code in the message alone, and only then falls back to less.
        Error::Request {
            kind: Kind::ContextLengthExceeded,
            ..
        } => format!("{error} ({CONTEXT})"),
        _ => error.to_string(),
    };
    let Names { kind, code, .. } = Names::of(error);
    ErrorBody {
        error: ErrorDetails {
            message,
            kind,
            param: error.param(),
            code,
        },
    }
}

/// An error as a response of OpenAI's API.
pub(super) struct Refused(pub Error);

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        response(&self.0, Json(body(&self.0)))
    }
}

/// The response that tells of `error` in `body`.
pub(super) fn response(error: &Error, body: impl IntoResponse) -> Response {
    let status = StatusCode::from_u16(Names::of(error).status);
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, body).into_response();
    response.extensions_mut().insert(Refusal::of(error));
    let Error::Request { kind, .. } = error else {
        return response;
    };
    let (name, value) = match kind {
        Kind::QueueFull | Kind::Overloaded => (header::RETRY_AFTER, RETRY_AFTER_SECONDS.into()),
        Kind::Unauthorized => {
            let scheme = HeaderValue::from_static("Bearer");
            (header::WWW_AUTHENTICATE, scheme)
        }
        Kind::UnsupportedEncoding => {
            let accepted = HeaderValue::from_static(encoding::ACCEPTED);
            (header::ACCEPT_ENCODING, accepted)
        }
        _ => return response,
    };
    response.headers_mut().insert(name, value);
    response
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
            (Kind::ModelUnavailable, "model_unavailable", 503),
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
            let response = Refused(error).into_response();
            assert_eq!(response.status(), expected);
            let retry = response.headers().get(header::RETRY_AFTER);
            let later = matches!(kind, Kind::QueueFull | Kind::Overloaded);
            assert_eq!(retry.is_some(), later);
        }
        let unknown = Error::request(Kind::NotFound, Some("model"), "no such model");
        assert_eq!(json!(body(&unknown))["error"]["code"], "model_not_found");
        assert_eq!(
            Refused(Error::internal("bug")).into_response().status(),
            500
        );
    }
}
