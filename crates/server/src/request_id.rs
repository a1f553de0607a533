//! The id of a request: the client's own or a new one. The response has it, and so do the log lines about
//! the request.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use std::fmt;
use std::sync::Arc;

pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The header in which Anthropic's clients look for the id.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Maximum bytes of an id that a client chooses.
const MAX_BYTES: usize = 128;

/// The id of a request: visible ASCII, of bounded length.
#[derive(Debug, Clone)]
pub(super) struct RequestId(pub Arc<str>);

impl RequestId {
    /// A new id.
    pub fn random() -> Self {
        Self(format!("req_{:032x}", rand::random::<u128>()).into())
    }

    /// The client's id; a new one if there is none that can be repeated in headers and log lines.
    pub fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(X_REQUEST_ID).map(HeaderValue::as_bytes);
        let given = given.filter(|id| {
            (1..=MAX_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
        });
        match given.and_then(|id| std::str::from_utf8(id).ok()) {
            Some(id) => Self(id.into()),
            None => Self::random(),
        }
    }

    /// Sets the header `name`.
    pub fn mark(&self, headers: &mut HeaderMap, name: HeaderName) {
        // Visible ASCII always is a value.
        if let Ok(value) = HeaderValue::from_str(&self.0) {
            headers.insert(name, value);
        }
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_cannot_be_repeated_are_replaced() {
        let of = |id: &[u8]| {
            let mut headers = HeaderMap::new();
            let id = HeaderValue::from_bytes(id).expect("a value");
            headers.insert(X_REQUEST_ID, id);
            RequestId::of(&headers).0
        };
        let longest = "x".repeat(MAX_BYTES);
        for kept in ["a", "{\"a\":1}", longest.as_str()] {
            assert_eq!(&*of(kept.as_bytes()), kept);
        }
        let too_long = "x".repeat(MAX_BYTES + 1);
        for replaced in ["", "a b", "a\tb", "\u{e9}", too_long.as_str()] {
            let id = of(replaced.as_bytes());
            assert!(id.starts_with("req_") && id.len() == 36, "{replaced}: {id}");
        }
        assert_ne!(RequestId::random().0, RequestId::random().0);
    }
}
