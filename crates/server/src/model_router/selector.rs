//! The model that a request is for.

use super::fleet::Fleet;
use axum::http::Uri;
use axum::http::request::Parts;
use foretoken_core::error::{Error, RequestErrorKind, Result, json_words};
use serde::Deserialize;

/// The fields of a body that a router reads.
#[derive(Debug, Default, Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
}

/// What decides where a request goes.
#[derive(Debug, PartialEq)]
pub(super) struct Selector {
    /// The name of the model, if the request has one.
    model: Option<String>,
    /// Whether the answer is a stream of events, in which comments may come first.
    pub streams: bool,
}

impl Selector {
    /// Reads `model` of the body, or of the query where the body has none.
    ///
    /// # Errors
    /// `Invalid`, naming the field, if there is a body that is not JSON, or if a field is of a wrong type.
    pub fn of(parts: &Parts, body: &[u8]) -> Result<Self> {
        let fields = if body.is_empty() {
            Fields::default()
        } else {
            read(body)?
        };
        // Ollama's streams are lines of JSON.
        let has_events = parts.uri.path().starts_with("/v1/");
        Ok(Self {
            model: fields.model.or_else(|| in_query(&parts.uri)),
            streams: has_events && fields.stream == Some(true),
        })
    }

    /// The place of the model. A request without a name is for the only one.
    ///
    /// # Errors
    /// `NotFound`, or `Invalid` if there are several and none is named.
    pub fn choose(&self, fleet: &Fleet) -> Result<usize> {
        if let Some(name) = &self.model {
            return fleet.find(name);
        }
        let names: Vec<&str> = fleet.names().collect();
        if names.len() == 1 {
            return Ok(0);
        }
        let served = names.join(", ");
        Err(Error::invalid(
            "model",
            format!(
                "model is missing: name one of {served}, in the body or, where there is none, as ?model= in the address"
            ),
        ))
    }
}

fn read(body: &[u8]) -> Result<Fields> {
    let no_object = |what: &str| {
        let message = format!("the body must be a JSON object: {what}");
        Error::request(RequestErrorKind::Invalid, None, message)
    };
    // A list would be read as the values of the fields.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(no_object("it begins with another character"));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        let message = json_words(&e.inner().to_string());
        match path.as_str() {
            "model" | "stream" => Error::field(path.as_str(), format!(": {message}")),
            _ => no_object(&message),
        }
    })
}

/// The value of `model` in a query.
pub(super) fn in_query(uri: &Uri) -> Option<String> {
    let pairs = uri.query()?.split('&');
    let value = pairs
        .filter_map(|pair| pair.strip_prefix("model="))
        .next()?;
    Some(decoded(value)).filter(|name| !name.is_empty())
}

/// A value of a query without its escapes.
fn decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = match (first, after) {
            (b'%', [high, low, after @ ..]) => hex(*high)
                .zip(hex(*low))
                .map(|(h, l)| ((h << 4) | l, after)),
            _ => None,
        };
        let plain = if *first == b'+' { b' ' } else { *first };
        let (byte, after) = escaped.unwrap_or((plain, after));
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    let value = char::from(digit).to_digit(16)?;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn of(uri: &str, body: &str) -> Result<Selector> {
        let (parts, ()) = Request::builder().uri(uri).body(()).unwrap().into_parts();
        Selector::of(&parts, body.as_bytes())
    }

    #[test]
    fn the_model_is_read_from_body_or_query() {
        let selector = |model: Option<&str>, streams| Selector {
            model: model.map(str::to_owned),
            streams,
        };
        let chat = "/v1/chat/completions";
        for (uri, body, expected) in [
            (
                chat,
                r#"{"stream": true, "model": "a", "x": [{}]}"#,
                selector(Some("a"), true),
            ),
            (
                chat,
                r#"{"model": "a", "stream": null}"#,
                selector(Some("a"), false),
            ),
            (
                "/api/chat",
                r#"{"model": "a", "stream": true}"#,
                selector(Some("a"), false),
            ),
            (
                "/props?x=1&model=org%2Fa+b%",
                "",
                selector(Some("org/a b%"), false),
            ),
            (
                "/props?model=b",
                r#"{"model": "a"}"#,
                selector(Some("a"), false),
            ),
            ("/props?model=", "{}", selector(None, false)),
            ("/props", "", selector(None, false)),
        ] {
            assert_eq!(of(uri, body).unwrap(), expected, "{uri} {body}");
        }
    }

    #[test]
    fn wrong_bodies_are_named() {
        for (body, needle) in [
            (
                "{\"model\": 3}",
                "model: invalid type: integer `3`, expected a string",
            ),
            ("{\"model\": \"a\", \"stream\": \"yes\"}", "stream: "),
            ("[]", "the body must be a JSON object"),
            ("{", "the body must be a JSON object"),
            (
                "{\"model\": \"a\", \"model\": \"b\"}",
                "duplicate field `model`",
            ),
        ] {
            let error = of("/v1/completions", body).unwrap_err().to_string();
            assert!(error.contains(needle), "{body}: {error}");
        }
    }
}
