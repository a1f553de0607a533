use super::*;
use crate::headers::{MAX_TOKENS, WARNING};
use crate::request_id::X_REQUEST_ID;
use crate::structured::Structured;
use crate::wire::names;
use axum::http::HeaderName;
use serde_json::Map;
use std::collections::BTreeSet;

/// The document as it is sent.
fn document(model_names: &[String]) -> Value {
    json!(super::document(model_names))
}

fn properties<'a>(document: &'a Value, body: &str) -> &'a Map<String, Value> {
    let schema = &document["components"]["schemas"][body];
    schema["properties"].as_object().expect(body)
}

#[test]
fn every_route_is_in_the_document_and_no_other() {
    let document = document(&["m".into()]);
    let paths = document["paths"].as_object().expect("paths");
    let documented: BTreeSet<String> = paths
        .iter()
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().expect("methods");
            methods.keys().map(move |method| format!("{method} {path}"))
        })
        .collect();
    let page = ["get /".to_owned()];
    let routes = super::super::routes();
    let routed = routes.iter().map(|(method, path, _)| {
        let method = method.as_str().to_lowercase();
        format!("{method} {}", path.replace("{*", "{"))
    });
    assert_eq!(documented, routed.chain(page).collect());
}

#[test]
fn every_field_that_is_read_is_in_the_document() {
    let document = document(&["m".into()]);
    let generating = [
        ("ChatCompletionRequest", names::<wire::ChatFields>()),
        ("CompletionRequest", names::<wire::Completion>()),
        ("ResponseRequest", names::<responses::ResponseFields>()),
        ("MessageRequest", names::<anthropic::MessageFields>()),
        ("OllamaChatRequest", names::<ollama::ChatFields>()),
        ("OllamaGenerateRequest", names::<ollama::GenerateFields>()),
    ];
    let others = [
        ("OllamaEmbedRequest", names::<ollama::EmbedRequest>()),
        (
            "OllamaEmbeddingRequest",
            names::<ollama::EmbeddingRequest>(),
        ),
        ("OllamaModelRequest", names::<ollama::ModelRequest>()),
        ("EmbeddingRequest", names::<wire::EmbeddingFields>()),
        ("TeiEmbedRequest", names::<tei::EmbedFields>()),
        ("RerankRequest", names::<rerank::RerankFields>()),
        ("ScoreRequest", names::<rerank::ScoreFields>()),
        ("InfillRequest", names::<llama::InfillFields>()),
        ("TokenizeRequest", names::<wire::Tokenize>()),
        ("DetokenizeRequest", names::<wire::Detokenize>()),
        (
            "LoadLoraAdapterRequest",
            names::<adapter_routes::LoadAdapter>(),
        ),
        (
            "UnloadLoraAdapterRequest",
            names::<adapter_routes::UnloadAdapter>(),
        ),
    ];
    let generating = generating.map(|(body, own)| {
        (
            body,
            [names::<wire::Common>(), names::<Structured>(), own].concat(),
        )
    });
    let others = others.map(|(body, own)| (body, own.to_vec()));
    for (body, read) in generating.into_iter().chain(others) {
        let read: BTreeSet<&str> = read.into_iter().collect();
        assert!(!read.is_empty(), "{body}");
        let documented = properties(&document, body).keys().map(String::as_str);
        assert_eq!(documented.collect::<BTreeSet<_>>(), read, "{body}");
    }
    let options = properties(&document, "StreamOptions");
    let read = names::<wire::StreamOptions>();
    assert!(read.iter().all(|name| options.contains_key(*name)));
    assert_eq!(
        properties(&document, "TokenizeRequest")["model"]["enum"],
        json!(["m", "m:latest", null])
    );
    // What is a form of its own.
    let prompt = properties(&document, "CompletionRequest")["prompt"].to_string();
    assert!(prompt.contains("anyOf"), "{prompt}");
    let messages = &properties(&document, "ChatCompletionRequest")["messages"];
    assert_eq!(
        messages["items"]["$ref"],
        "#/components/schemas/ChatMessage"
    );
}

#[test]
fn every_reference_leads_to_a_schema() {
    fn check(value: &Value, document: &Value, count: &mut usize) {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(to)) = map.get("$ref") {
                    let place = to.strip_prefix('#').expect("in the document");
                    assert!(document.pointer(place).is_some(), "{to}");
                    *count += 1;
                }
                map.values().for_each(|value| check(value, document, count));
            }
            Value::Array(list) => list.iter().for_each(|value| check(value, document, count)),
            _ => {}
        }
    }
    let document = document(&["m".into()]);
    let mut count = 0;
    check(&document, &document, &mut count);
    assert!(count > 100, "{count}");
}

#[test]
fn headers_are_told_of_the_routes_that_send_them() {
    let document = document(&["m".into()]);
    let paths = document["paths"].as_object().expect("paths");
    let with = |name: &HeaderName| -> Vec<&str> {
        let has = |methods: &Value| {
            let mut methods = methods.as_object().into_iter().flatten();
            methods.any(|(_, method)| {
                let headers = &method["responses"]["200"]["headers"];
                headers[name.as_str()]["schema"].is_object()
            })
        };
        let paths = paths.iter().filter(|(_, methods)| has(methods));
        paths.map(|(path, _)| path.as_str()).collect()
    };
    let generating = "/api/chat /api/generate /infill /v1/chat/completions /v1/completions /v1/messages \
        /v1/responses";
    assert_eq!(with(&MAX_TOKENS).join(" "), generating);
    let with_tools = "/api/chat /apply-template /tokenize /v1/chat/completions /v1/messages \
        /v1/messages/count_tokens /v1/responses /v1/responses/input_tokens";
    assert_eq!(with(&WARNING).join(" "), with_tools);
    assert_eq!(with(&X_REQUEST_ID).len(), paths.len());
}
