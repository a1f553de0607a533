//! The model that a request is for.

use super::fleet::Fleet;
use crate::ollama;
use crate::query;
use axum::http::Uri;
use axum::http::request::Parts;
use foretoken_core::error::{Error, RequestErrorKind, Result, json_words};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// The fields of a body that a router reads.
#[derive(Debug, Default, Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
}

/// The same of a body of Ollama's API.
#[derive(Debug, Deserialize)]
struct OllamaFields {
    #[serde(default)]
    model: Option<String>,
    /// What older clients call `model`.
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
}

impl From<OllamaFields> for Fields {
    fn from(fields: OllamaFields) -> Self {
        Self {
            model: fields.model.or(fields.name),
            stream: fields.stream,
        }
    }
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
    /// Reads `model` of the body (`name` of Ollama's API), or of the query where the body has none.
    ///
    /// # Errors
    /// `Invalid`, naming the field, if there is a body that is not JSON, or if a field is of a wrong type.
    pub fn of(parts: &Parts, body: &[u8]) -> Result<Self> {
        let path = parts.uri.path();
        let fields = if body.is_empty() {
            Fields::default()
        } else if ollama::has_route(path) {
            read::<OllamaFields>(body)?.into()
        } else {
            read(body)?
        };
        // Ollama's streams are lines of JSON.
        let has_events = path.starts_with("/v1/");
        Ok(Self {
            model: fields.model.or_else(|| in_query(&parts.uri)),
            streams: has_events && fields.stream == Some(true),
        })
    }

    /// Whether the request names its model.
    pub fn names_model(&self) -> bool {
        self.model.is_some()
    }

    /// The place of the model. A request without a name is for the only one.
    ///
    /// # Errors
    /// `NotFound`, or `Invalid` if there are several and none is named.
    pub async fn choose(&self, fleet: &Arc<Fleet>) -> Result<usize> {
        if let Some(name) = &self.model {
            return fleet.find(name).await;
        }
        let catalog = &fleet.catalog;
        if let [only] = &catalog.served()[..] {
            return Ok(only.place);
        }
        Err(Error::invalid(
            "model",
            format!(
                "model is missing: name one of {}, in the body or, where there is none, as ?model= in the address",
                catalog.names()
            ),
        ))
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
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
            "model" | "name" | "stream" => Error::field(path.as_str(), format!(": {message}")),
            _ => no_object(&message),
        }
    })
}

/// The value of `model` in a query.
pub(super) fn in_query(uri: &Uri) -> Option<String> {
    query::value(uri, "model").filter(|name| !name.is_empty())
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
mod tests {
    use super::super::fleet::tests::{Folder, fleet};
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
            ("/api/show", r#"{"name": "a"}"#, selector(Some("a"), false)),
            (
                "/api/pull",
                r#"{"name": "a", "model": "b:latest"}"#,
                selector(Some("b:latest"), false),
            ),
            // Only Ollama's API has such a name.
            (chat, r#"{"name": 3}"#, selector(None, false)),
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

    #[tokio::test]
    async fn names_may_have_ollamas_tag() {
        let fleet = fleet(&["cat", "cat"], 1, None);
        let choose = async |path: &str, name: &str| {
            let body = format!("{{\"model\": \"{name}\"}}");
            let place = of(path, &body).unwrap().choose(&fleet).await;
            place.map_err(|e| e.to_string())
        };
        for path in ["/api/chat", "/v1/chat/completions", "/v1/messages"] {
            for name in ["m1", "m1:latest"] {
                assert_eq!(choose(path, name).await, Ok(1), "{path} {name}");
            }
            for name in ["m1:8b", "m2:latest"] {
                let error = choose(path, name).await.unwrap_err();
                assert!(error.contains("does not exist; served: m0, m1"), "{error}");
            }
        }
    }

    #[tokio::test]
    async fn a_known_name_with_a_tag_needs_no_look_for_new_models() {
        let folder = Arc::new(Folder::default());
        folder.set(&["a"]);
        let fleet = folder.fleet();
        let tagged = of("/api/chat", r#"{"model": "a:latest"}"#).unwrap();
        assert_eq!(tagged.choose(&fleet).await.unwrap(), 0);
        assert_eq!(folder.looks(), 0);
        let other = of("/api/chat", r#"{"model": "b:latest"}"#).unwrap();
        assert!(other.choose(&fleet).await.is_err());
        assert_eq!(folder.looks(), 1);
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
        let error = of("/api/show", "{\"name\": 3}").unwrap_err();
        assert_eq!(error.param().as_deref(), Some("name"));
    }
}
