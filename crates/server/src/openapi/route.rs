//! What the document says of a route.

use super::{BY_THE_ENGINE, EVENTS, JSON, LINES};
use crate::headers::{MAX_TOKENS, WARNING};
use crate::request_id::X_REQUEST_ID;
use axum::http::{HeaderName, StatusCode};
use schemars::{Schema, json_schema};
use serde_json::{Map, Value, json};

/// One method of a path.
pub(super) struct Route {
    pub method: &'static str,
    pub path: &'static str,
    pub summary: &'static str,
    pub body: Option<Schema>,
    /// Media types of the answer, and their schemas; none = an empty answer.
    pub answer: Vec<(&'static str, Schema)>,
    pub refusals: &'static [u16],
    /// Values that the query may have, each with its name and what it means.
    pub query: Vec<(&'static str, &'static str, Schema)>,
    /// Headers that the answer may have, and what they say.
    pub headers: Vec<(HeaderName, &'static str)>,
    /// Whether it needs the key, if the server has one.
    pub needs_key: bool,
}

impl Route {
    pub fn get(path: &'static str, summary: &'static str, answer: Schema) -> Self {
        Self {
            method: "get",
            path,
            summary,
            body: None,
            answer: vec![(JSON, answer)],
            refusals: &[401, 403, 500],
            query: Vec::new(),
            headers: Vec::new(),
            needs_key: true,
        }
    }

    /// A route that takes a body.
    pub fn post(path: &'static str, summary: &'static str, body: Schema, answer: Schema) -> Self {
        Self {
            method: "post",
            body: Some(body),
            refusals: &[400, 401, 403, 404, 408, 413, 415, 500, 503],
            ..Self::get(path, summary, answer)
        }
    }

    /// A route that generates, and can do so as a stream.
    pub fn generate(
        path: &'static str,
        summary: &'static str,
        body: Schema,
        answer: Schema,
    ) -> Self {
        let about_max = "To what max_tokens was cut, because the context has no room for more.";
        Self {
            answer: vec![(JSON, answer), (EVENTS, text())],
            headers: vec![(MAX_TOKENS, about_max)],
            ..Self::post(path, summary, body, Schema::default()).refusing(BY_THE_ENGINE)
        }
    }

    /// A route that leaves out what the model can answer without.
    pub fn with_warning(mut self) -> Self {
        let about = "What was left out of the request, such as tools that other servers run.";
        self.headers.push((WARNING, about));
        self
    }

    /// A route that can answer with lines of JSON, too.
    pub fn or_lines(mut self) -> Self {
        self.answer.truncate(1);
        self.answer.push((LINES, text()));
        self
    }

    /// A route that answers with a text.
    pub fn text(self, media: &'static str) -> Self {
        let answer = vec![(media, text())];
        Self { answer, ..self }
    }

    /// A route whose query may have this value.
    pub fn with_query(mut self, name: &'static str, about: &'static str, value: Schema) -> Self {
        self.query.push((name, about, value));
        self
    }

    pub fn refusing(self, refusals: &'static [u16]) -> Self {
        Self { refusals, ..self }
    }

    pub fn open(self, refusals: &'static [u16]) -> Self {
        let needs_key = false;
        Self { needs_key, ..self }.refusing(refusals)
    }

    pub fn operation(self, error: &Schema) -> Value {
        let about_id =
            "The id of the request: that of the same header of the request, or a new one.";
        let id = json!({"description": about_id, "schema": text(), "required": true});
        let response = |description: &str, content: Value| {
            let headers = json!({X_REQUEST_ID.as_str(): id});
            json!({"description": description, "headers": headers, "content": content})
        };
        let media = self.answer.iter();
        let content: Map<String, Value> = media
            .map(|(media, schema)| (media.to_string(), json!({"schema": schema})))
            .collect();
        let mut responses = json!({"200": response("OK", content.into())});
        for (name, about) in &self.headers {
            let header = json!({"description": about, "schema": text()});
            responses["200"]["headers"][name.as_str()] = header;
        }
        for &status in self.refusals {
            let reason = StatusCode::from_u16(status).ok();
            let reason = reason.and_then(|status| status.canonical_reason());
            let content = json!({JSON: {"schema": error}});
            responses[status.to_string()] = response(reason.unwrap_or_default(), content);
        }
        let mut operation = json!({"summary": self.summary, "responses": responses});
        if let Some(body) = self.body {
            let content = json!({JSON: {"schema": body}});
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        let ids = [
            ("id", "A name of the model; it may have slashes."),
            ("response_id", "The id of a stored response."),
        ];
        let ids = ids.into_iter();
        let ids = ids.filter(|(name, _)| self.path.contains(&format!("{{{name}}}")));
        let ids = ids.map(|(name, about)| {
            let schema = json!({"type": "string", "minLength": 1});
            json!({"name": name, "in": "path", "description": about, "schema": schema, "required": true})
        });
        let query = self.query.into_iter().map(|(name, about, schema)| {
            json!({"name": name, "in": "query", "description": about, "schema": schema})
        });
        let parameters: Vec<Value> = ids.chain(query).collect();
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if !self.needs_key {
            operation["security"] = json!([]);
        }
        operation
    }
}

fn text() -> Schema {
    json_schema!({"type": "string"})
}
