//! The OpenAPI document of all routes. What requests may have comes from the types that read them.

mod inputs;
#[cfg(test)]
mod tests;

use super::reply_objects::{ChatChoice, ChunkChoice, CompletionChoice, Reply};
use super::server_info::ServerDescription;
use super::state::{AppState, Model};
use super::structured::Structured;
use super::{anthropic, embeddings, info, responses, wire};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// `GET /openapi.json`.
pub(super) async fn openapi(State(state): State<AppState>) -> Json<Value> {
    Json(document(&state.model_names))
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// Where the document has its schemas.
const SCHEMAS: &str = "/components/schemas";

/// The document of a server whose model has these names.
fn document(model_names: &[String]) -> Value {
    let names: Vec<Value> = (model_names.iter().map(|name| name.as_str().into()))
        .chain([Value::Null])
        .collect();
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = SCHEMAS.into();
    let mut schemas = Schemas {
        generator: settings.into_generator(),
        bodies: Map::new(),
        model: json!({"type": ["string", "null"], "enum": names}),
    };
    let paths = paths(&mut schemas);
    let mut components = schemas.generator.take_definitions(true);
    components.extend(schemas.bodies);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "foretoken",
            "version": env!("CARGO_PKG_VERSION"),
            "description": env!("CARGO_PKG_DESCRIPTION"),
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// Collects the schemas that the paths refer to.
struct Schemas {
    generator: SchemaGenerator,
    bodies: Map<String, Value>,
    /// The names that a request may give to the model.
    model: Value,
}

/// Makes the schema of a type that is a part of a body.
type Part = fn(&mut SchemaGenerator) -> Schema;

impl Schemas {
    fn of<T: JsonSchema>(&mut self) -> Value {
        self.generator.subschema_for::<T>().to_value()
    }

    /// A body whose fields are those of several types. `exact` are fields that the types leave open.
    fn body(
        &mut self,
        name: &str,
        parts: &[Part],
        required: &[&str],
        exact: Vec<(&str, Value)>,
    ) -> Value {
        let mut fields = Map::new();
        for part in parts {
            let schema = part(&mut self.generator).to_value();
            if let Some(own) = schema["properties"].as_object() {
                fields.extend(own.clone());
            }
        }
        fields.insert("model".into(), self.model.clone());
        for (name, schema) in exact {
            let schema = if required.contains(&name) {
                schema
            } else {
                json!({"anyOf": [schema, {"type": "null"}]})
            };
            fields.insert(name.into(), schema);
        }
        let body = json!({"type": "object", "properties": fields, "required": required});
        self.bodies.insert(name.into(), body);
        json!({"$ref": format!("#{SCHEMAS}/{name}")})
    }
}

/// One method of a path.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    body: Option<Value>,
    /// Media types of the answer, and their schemas; none = an empty answer.
    answer: Vec<(&'static str, Value)>,
    refusals: &'static [u16],
    /// Whether it needs the key, if the server has one.
    needs_key: bool,
}

impl Operation {
    fn get(path: &'static str, summary: &'static str, answer: Value) -> Self {
        Self {
            method: "get",
            path,
            summary,
            body: None,
            answer: vec![(JSON, answer)],
            refusals: &[401, 403, 500],
            needs_key: true,
        }
    }

    /// What takes a body.
    fn post(path: &'static str, summary: &'static str, body: Value, answer: Value) -> Self {
        Self {
            method: "post",
            body: Some(body),
            refusals: &[400, 401, 403, 404, 408, 413, 415, 500, 503],
            ..Self::get(path, summary, answer)
        }
    }

    /// What generates, and can do so as a stream.
    fn generate(path: &'static str, summary: &'static str, body: Value, answer: Value) -> Self {
        Self {
            answer: vec![(JSON, answer), (EVENTS, json!({"type": "string"}))],
            refusals: &[400, 401, 403, 404, 408, 413, 415, 429, 500, 503],
            ..Self::post(path, summary, body, Value::Null)
        }
    }

    fn open(self, refusals: &'static [u16]) -> Self {
        Self {
            refusals,
            needs_key: false,
            ..self
        }
    }

    fn json(self, error: &Value) -> Value {
        let id = json!({
            "x-request-id": {
                "description": "The id of the request: that of the same header of the request, or a new one.",
                "schema": {"type": "string"},
                "required": true,
            },
        });
        let content: Map<String, Value> = (self.answer.into_iter())
            .map(|(media, schema)| (media.into(), json!({"schema": schema})))
            .collect();
        let mut responses = Map::new();
        responses.insert(
            "200".into(),
            json!({"description": "OK", "headers": id, "content": content}),
        );
        for &status in self.refusals {
            let reason = StatusCode::from_u16(status).ok();
            let reason = reason.and_then(|status| status.canonical_reason());
            let content = json!({JSON: {"schema": error}});
            let response = json!({
                "description": reason.unwrap_or_default(),
                "headers": id,
                "content": content,
            });
            responses.insert(status.to_string(), response);
        }
        let mut operation = json!({"summary": self.summary, "responses": responses});
        if let Some(body) = self.body {
            operation["requestBody"] =
                json!({"required": true, "content": {JSON: {"schema": body}}});
        }
        if self.path.contains("{id}") {
            operation["parameters"] = json!([{
                "name": "id",
                "in": "path",
                "required": true,
                "description": "A name of the model; it may have slashes.",
                "schema": {"type": "string", "minLength": 1},
            }]);
        }
        if !self.needs_key {
            operation["security"] = json!([]);
        }
        operation
    }
}

fn paths(schemas: &mut Schemas) -> Map<String, Value> {
    let error = schemas.of::<super::error::ErrorBody>();
    let message_error = schemas.of::<anthropic::ErrorBody>();
    let mut paths = Map::new();
    let operations = [generating(schemas), reading(schemas), telling(schemas)];
    for operation in operations.into_iter().flatten() {
        let error = if anthropic::has_route(operation.path) {
            &message_error
        } else {
            &error
        };
        let method = operation.method;
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[method] = operation.json(error);
    }
    paths
}

/// The routes that generate, and the one that counts what they would read.
fn generating(schemas: &mut Schemas) -> Vec<Operation> {
    let format = schemas.of::<inputs::ResponseFormat>();
    let chat = vec![
        ("messages", schemas.of::<Vec<inputs::ChatMessage>>()),
        ("tools", schemas.of::<Vec<inputs::Tool>>()),
        ("tool_choice", schemas.of::<inputs::ToolChoice>()),
        ("response_format", format.clone()),
    ];
    let chat = schemas.body("ChatCompletionRequest", CHAT, &["messages"], chat);
    let completion = vec![("response_format", format)];
    let completion = schemas.body("CompletionRequest", COMPLETION, &["prompt"], completion);
    let input = vec![("input", schemas.of::<inputs::ResponseInput>())];
    let response = schemas.body("ResponseRequest", RESPONSE, &["input"], input);
    let embedding = schemas.body("EmbeddingRequest", EMBEDDING, &["input"], Vec::new());
    let required = ["messages", "max_tokens"];
    let message = schemas.body("MessageRequest", MESSAGE, &required, Vec::new());
    let counted = schemas.body("CountTokensRequest", MESSAGE, &["messages"], Vec::new());
    // Chunks are not answers of their own, but clients want to know them.
    schemas.of::<Reply<ChunkChoice>>();
    vec![
        Operation::generate(
            "/v1/chat/completions",
            "The answer to a chat; streamed, its events are ChatCompletionChunk.",
            chat,
            schemas.of::<Reply<ChatChoice>>(),
        ),
        Operation::generate(
            "/v1/completions",
            "A prompt's continuation; streamed, its events are Completion, too.",
            completion,
            schemas.of::<Reply<CompletionChoice>>(),
        ),
        Operation {
            refusals: &[400, 401, 403, 404, 408, 413, 415, 429, 500, 503],
            ..Operation::post(
                "/v1/embeddings",
                "The embeddings of texts, or of lists of token ids.",
                embedding,
                schemas.of::<embeddings::EmbeddingList>(),
            )
        },
        Operation::generate(
            "/v1/responses",
            "A response, without state.",
            response,
            schemas.of::<responses::ResponseObject>(),
        ),
        Operation::generate(
            "/v1/messages",
            "A message, in Anthropic's form.",
            message,
            schemas.of::<anthropic::Message>(),
        ),
        Operation::post(
            "/v1/messages/count_tokens",
            "The number of tokens that a message's prompt has.",
            counted,
            schemas.of::<super::TokenCount>(),
        ),
    ]
}

/// The other routes that take a body.
fn reading(schemas: &mut Schemas) -> Vec<Operation> {
    let messages = vec![
        ("messages", schemas.of::<Vec<inputs::ChatMessage>>()),
        ("tools", schemas.of::<Vec<inputs::Tool>>()),
    ];
    let tokenize = schemas.body("TokenizeRequest", TOKENIZE, &[], messages);
    let detokenize = schemas.body("DetokenizeRequest", DETOKENIZE, &["tokens"], Vec::new());
    vec![
        Operation::post(
            "/tokenize",
            "The tokens of a prompt, or of messages.",
            tokenize,
            schemas.of::<super::Tokens>(),
        ),
        Operation::post(
            "/detokenize",
            "The text of tokens.",
            detokenize,
            schemas.of::<super::DetokenizedText>(),
        ),
        Operation {
            method: "post",
            answer: Vec::new(),
            refusals: &[401, 403, 500, 503],
            ..Operation::get(
                "/reset_prefix_cache",
                "Forgets the cached prefixes.",
                Value::Null,
            )
        },
    ]
}

/// The routes that say what the server is and how it is.
fn telling(schemas: &mut Schemas) -> Vec<Operation> {
    let text = json!({"type": "string"});
    let health = schemas.of::<super::Health>();
    let ping = |method| Operation {
        method,
        ..Operation::get("/ping", "As /health.", health.clone()).open(&[403, 503])
    };
    vec![
        Operation {
            refusals: &[401, 403, 503],
            ..Operation::get(
                "/v1/models",
                "The names of the model.",
                schemas.of::<super::ModelList>(),
            )
        },
        Operation {
            refusals: &[401, 403, 404, 503],
            ..Operation::get(
                "/v1/models/{id}",
                "One of the names.",
                schemas.of::<Model>(),
            )
        },
        ping("get"),
        ping("post"),
        Operation::get("/health", "Whether requests are accepted.", health).open(&[403, 503]),
        Operation::get(
            "/load",
            "How many requests are being answered.",
            schemas.of::<info::ServerLoad>(),
        )
        .open(&[403]),
        Operation::get(
            "/version",
            "The program's version.",
            schemas.of::<info::Version>(),
        )
        .open(&[403]),
        Operation {
            answer: vec![("text/plain", text.clone())],
            ..Operation::get("/metrics", "Prometheus' text format.", Value::Null).open(&[403, 500])
        },
        Operation::get(
            "/server_info",
            "What is served, and how.",
            schemas.of::<ServerDescription>(),
        ),
        Operation::get(
            "/tokenizer_info",
            "What a client that renders chats itself needs.",
            schemas.of::<info::TokenizerInfo>(),
        ),
        Operation::get("/openapi.json", "This document.", json!({"type": "object"})),
        Operation {
            answer: vec![("text/html", text)],
            ..Operation::get("/", "The page, unless --no-ui.", Value::Null).open(&[401, 403, 404])
        },
    ]
}

fn part<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    T::json_schema(generator)
}

const CHAT: &[Part] = &[part::<wire::Common>, part::<wire::Chat>, part::<Structured>];
const COMPLETION: &[Part] = &[
    part::<wire::Common>,
    part::<wire::Completion>,
    part::<Structured>,
];
const EMBEDDING: &[Part] = &[part::<wire::Embedding>];
const RESPONSE: &[Part] = &[
    part::<wire::Common>,
    part::<responses::Fields>,
    part::<Structured>,
];
const MESSAGE: &[Part] = &[
    part::<wire::Common>,
    part::<anthropic::Fields>,
    part::<Structured>,
];
const TOKENIZE: &[Part] = &[part::<wire::Tokenize>];
const DETOKENIZE: &[Part] = &[part::<wire::Detokenize>];
