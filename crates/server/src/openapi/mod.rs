//! The OpenAPI document of all routes. What requests may have comes from the types that read them.

mod route;
#[cfg(test)]
mod tests;

use super::context::LATEST;
use super::openai::Body;
use super::reply_objects::{ChatChoice, ChunkChoice, CompletionChoice, Reply};
use super::server_info::ServerDescription;
use super::state::{AppState, ModelObject};
use super::{
    INPUT_ITEMS, RESPONSE, adapter_routes, anthropic, embeddings, error, info, llama, ollama,
    rerank, responses, tei, tokenize, wire,
};
use axum::Json;
use axum::extract::State;
use route::Route;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// `GET /openapi.json`.
pub(super) async fn openapi(State(state): State<AppState>) -> Json<Value> {
    let models = state.models().into_iter();
    let names: Vec<String> = models.map(|model| model.id).collect();
    Json(document(&names))
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const LINES: &str = "application/x-ndjson";

/// The statuses with which a route that needs the engine refuses a body.
const BY_THE_ENGINE: &[u16] = &[400, 401, 403, 404, 408, 413, 415, 429, 500, 503];

/// The names of what may bring the key.
const BEARER: &str = "bearer";
const API_KEY: &str = "x-api-key";

/// The document of a server whose model has these names.
fn document(model_names: &[String]) -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    let mut schemas = Schemas(settings.into_generator());
    let paths = paths(&mut schemas);
    let mut schemas = schemas.0.take_definitions(true);
    let names = model_names.iter();
    let names = names.flat_map(|name| [name.clone(), format!("{name}{LATEST}")]);
    let names: Vec<Option<String>> = names.map(Some).chain([None]).collect();
    let model = json_schema!({"type": ["string", "null"], "enum": names});
    for schema in schemas.values_mut() {
        let names = schema.pointer_mut("/properties/model/type");
        if names.is_some_and(|kind| kind.is_array()) {
            schema["properties"]["model"] = model.clone().into();
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "foretoken",
            "version": env!("CARGO_PKG_VERSION"),
            "description": env!("CARGO_PKG_DESCRIPTION"),
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        // Any of them is enough.
        "security": [{BEARER: []}, {API_KEY: []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                BEARER: {"type": "http", "scheme": BEARER},
                API_KEY: {"type": "apiKey", "in": "header", "name": API_KEY},
            },
        },
    })
}

/// Collects the schemas that the paths refer to.
struct Schemas(SchemaGenerator);

impl Schemas {
    fn of<T: JsonSchema>(&mut self) -> Schema {
        self.0.subschema_for::<T>()
    }
}

fn paths(schemas: &mut Schemas) -> BTreeMap<&'static str, BTreeMap<&'static str, Value>> {
    let error = schemas.of::<error::ErrorBody>();
    let message_error = schemas.of::<anthropic::MessageError>();
    let ollama_error = schemas.of::<ollama::OllamaError>();
    let mut paths = BTreeMap::<_, BTreeMap<_, _>>::new();
    let routes = [
        generating(schemas),
        reading(schemas),
        telling(schemas),
        of_ollama(schemas),
    ];
    for route in routes.into_iter().flatten() {
        let error = if anthropic::has_route(route.path) {
            &message_error
        } else if ollama::has_route(route.path) {
            &ollama_error
        } else {
            &error
        };
        let path = paths.entry(route.path).or_default();
        path.insert(route.method, route.operation(error));
    }
    paths
}

/// The routes that generate, and the one that counts what they would read.
fn generating(schemas: &mut Schemas) -> Vec<Route> {
    let chat = schemas.of::<Body<wire::ChatFields>>();
    let completion = schemas.of::<Body<wire::Completion>>();
    let response = schemas.of::<Body<responses::ResponseFields>>();
    let embedding = schemas.of::<wire::EmbeddingFields>();
    let message = schemas.of::<Body<anthropic::MessageFields>>();
    // Chunks are not answers of their own, but clients want to know them.
    schemas.of::<Reply<ChunkChoice>>();
    vec![
        Route::generate(
            "/v1/chat/completions",
            "The answer to a chat; streamed, its events are ChatCompletionChunk.",
            chat,
            schemas.of::<Reply<ChatChoice>>(),
        )
        .with_warning(),
        Route::generate(
            "/v1/completions",
            "A prompt's continuation; streamed, its events are Completion, too.",
            completion,
            schemas.of::<Reply<CompletionChoice>>(),
        ),
        Route::post(
            "/v1/embeddings",
            "The embeddings of texts, or of lists of token ids.",
            embedding,
            schemas.of::<embeddings::EmbeddingList>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::post(
            "/embed",
            "The embeddings of texts, in the form of Text Embeddings Inference.",
            schemas.of::<tei::EmbedFields>(),
            schemas.of::<Vec<embeddings::Vector>>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::post(
            "/v1/rerank",
            "Documents by their relevance for a query.",
            schemas.of::<rerank::RerankFields>(),
            schemas.of::<rerank::RerankAnswer>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::post(
            "/v1/score",
            "The relevance of documents for queries, pair by pair.",
            schemas.of::<rerank::ScoreFields>(),
            schemas.of::<rerank::ScoreList>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::generate(
            "/infill",
            "What is missing in a text, in llama.cpp's form; streamed, its last event is such an answer.",
            schemas.of::<llama::InfillFields>(),
            schemas.of::<llama::InfillReply<'_>>(),
        ),
        Route::generate(
            "/v1/responses",
            "A response.",
            response.clone(),
            schemas.of::<responses::ResponseObject>(),
        )
        .with_warning(),
        Route::post(
            "/v1/responses/input_tokens",
            "The number of tokens that a response's prompt has.",
            response,
            schemas.of::<responses::InputTokenCount>(),
        )
        .with_warning(),
        Route::get(
            RESPONSE,
            "A stored response.",
            schemas.of::<responses::ResponseObject>(),
        )
        .refusing(&[400, 401, 403, 404, 503]),
        Route::get(
            INPUT_ITEMS,
            "The items that a stored response answers.",
            schemas.of::<responses::InputItemList<'_>>(),
        )
        .with_query(
            "limit",
            "Number of items.",
            json_schema!({"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        )
        .with_query(
            "order",
            "Whether the first items come first.",
            json_schema!({"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
        )
        .with_query(
            "after",
            "The id of the item before the first one.",
            json_schema!({"type": "string"}),
        )
        .refusing(&[400, 401, 403, 404, 503]),
        Route {
            method: "delete",
            ..Route::get(
                RESPONSE,
                "Forgets a stored response.",
                schemas.of::<responses::DeletedResponse>(),
            )
        }
        .refusing(&[401, 403, 404, 503]),
        Route::generate(
            "/v1/messages",
            "A message, in Anthropic's form.",
            message.clone(),
            schemas.of::<anthropic::Message>(),
        )
        .with_warning(),
        Route::post(
            "/v1/messages/count_tokens",
            "The number of tokens that a message's prompt has.",
            message,
            schemas.of::<anthropic::TokenCount>(),
        )
        .with_warning(),
    ]
}

/// The other routes that take a body.
fn reading(schemas: &mut Schemas) -> Vec<Route> {
    let text_or_chat = schemas.of::<wire::Tokenize>();
    let tokens = schemas.of::<wire::Detokenize>();
    vec![
        Route::post(
            "/tokenize",
            "The tokens of a prompt, or of messages.",
            text_or_chat,
            schemas.of::<tokenize::Tokens>(),
        )
        .with_warning(),
        Route::post(
            "/detokenize",
            "The text of tokens.",
            tokens,
            schemas.of::<tokenize::DetokenizedText>(),
        ),
        Route::post(
            "/apply-template",
            "The prompt of a chat.",
            schemas.of::<Body<wire::ChatFields>>(),
            schemas.of::<llama::AppliedTemplate>(),
        )
        .with_warning(),
        Route::post(
            "/v1/load_lora_adapter",
            "Loads a LoRA adapter, with --allow-runtime-lora-updating.",
            schemas.of::<adapter_routes::LoadAdapter>(),
            Schema::default(),
        )
        .text("text/plain"),
        Route::post(
            "/v1/unload_lora_adapter",
            "Unloads a LoRA adapter, with --allow-runtime-lora-updating.",
            schemas.of::<adapter_routes::UnloadAdapter>(),
            Schema::default(),
        )
        .text("text/plain"),
        Route {
            method: "post",
            answer: Vec::new(),
            ..Route::get(
                "/reset_prefix_cache",
                "Forgets the cached prefixes.",
                Schema::default(),
            )
        }
        .refusing(&[401, 403, 500, 503]),
    ]
}

/// The routes of Ollama's API.
fn of_ollama(schemas: &mut Schemas) -> Vec<Route> {
    let answer = schemas.of::<ollama::Answer>();
    let chat = schemas.of::<Body<ollama::ChatFields>>();
    let prompt = schemas.of::<Body<ollama::GenerateFields>>();
    let embed = schemas.of::<ollama::EmbedRequest>();
    let embedding = schemas.of::<ollama::EmbeddingRequest>();
    let model = schemas.of::<ollama::ModelRequest>();
    let tags = schemas.of::<ollama::Models>();
    let running = schemas.of::<ollama::Running>();
    let version = schemas.of::<ollama::OllamaVersion>();
    let about_chat = "The answer to a chat, in Ollama's form; streamed, each line is one.";
    let about_prompt = "The answer to a prompt, in Ollama's form; streamed, each line is one.";
    let about_pull = "Whether a model is served, in Ollama's form.";
    let about_show = "What a model is, in Ollama's form.";
    let about_embed = "The embeddings of texts, in Ollama's form.";
    let about_embedding = "The embedding of a text, in Ollama's older form.";
    let about_tags = "The names of the model, in Ollama's form.";
    vec![
        Route::generate("/api/chat", about_chat, chat, answer.clone())
            .or_lines()
            .with_warning(),
        Route::generate("/api/generate", about_prompt, prompt, answer).or_lines(),
        Route::post(
            "/api/embed",
            about_embed,
            embed,
            schemas.of::<ollama::Embedded>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::post(
            "/api/embeddings",
            about_embedding,
            embedding,
            schemas.of::<ollama::OneEmbedding>(),
        )
        .refusing(BY_THE_ENGINE),
        Route::post(
            "/api/show",
            about_show,
            model.clone(),
            schemas.of::<ollama::ModelDescription>(),
        ),
        Route::post(
            "/api/pull",
            about_pull,
            model,
            schemas.of::<ollama::PullStatus>(),
        )
        .or_lines(),
        Route::get("/api/tags", about_tags, tags).refusing(&[401, 403, 503]),
        Route::get("/api/ps", "As /api/tags: all are loaded.", running).refusing(&[401, 403, 503]),
        Route::get("/api/version", "The version of Ollama's API.", version).open(&[403]),
    ]
}

/// The routes that say what the server is and how it is.
fn telling(schemas: &mut Schemas) -> Vec<Route> {
    let none = Schema::default;
    let health = schemas.of::<super::Health>();
    let as_health = |path| Route::get(path, "As /health.", health.clone()).open(&[403, 503]);
    let alive = "Whether the process works, also while it shuts down.";
    let probes = [
        as_health("/healthz"),
        as_health("/readyz"),
        Route::get("/livez", alive, health.clone()).open(&[403, 503]),
    ];
    let ping = |method| Route {
        method,
        ..as_health("/ping")
    };
    let pings = [ping("get"), ping("post")];
    let models = schemas.of::<super::ModelList>();
    let model = schemas.of::<ModelObject>();
    let load = schemas.of::<info::ServerLoad>();
    let version = schemas.of::<info::Version>();
    let info = schemas.of::<ServerDescription>();
    let tokenizer = schemas.of::<info::TokenizerInfo>();
    let props = schemas.of::<llama::Props>();
    let about_tei = "A model that embeds or ranks, in the form of Text Embeddings Inference.";
    let about_tokenizer = "What a client that renders chats itself needs.";
    let document = json_schema!({"type": "object"});
    let routes = [
        Route::get("/v1/models", "The names of the model.", models).refusing(&[401, 403, 503]),
        Route::get("/v1/models/{id}", "One of the names.", model).refusing(&[401, 403, 404, 503]),
        Route::get("/health", "Whether requests are accepted.", health).open(&[403, 503]),
        Route::get("/load", "How many requests are being answered.", load).open(&[403]),
        Route::get("/version", "The program's version.", version).open(&[403]),
        Route::get("/metrics", "Prometheus' text format.", none())
            .text("text/plain")
            .open(&[403, 500]),
        Route::get("/server_info", "What is served, and how.", info),
        Route::get("/props", "What is served, in llama.cpp's form.", props),
        Route::get("/info", about_tei, schemas.of::<tei::TeiInfo>())
            .refusing(&[401, 403, 404, 500]),
        Route::get("/tokenizer_info", about_tokenizer, tokenizer),
        Route::get("/openapi.json", "This document.", document),
        Route::get("/", "The page, unless --no-ui.", none())
            .text("text/html")
            .open(&[401, 403, 404]),
    ];
    routes.into_iter().chain(pings).chain(probes).collect()
}
