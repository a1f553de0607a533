use super::*;
use crate::structured::Structured;
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
    let common = wire::names::<wire::Common>();
    let structured = wire::names::<Structured>();
    let own: [(&str, &[&[&str]]); 17] = [
        (
            "ChatCompletionRequest",
            &[common, structured, wire::names::<wire::ChatFields>()],
        ),
        (
            "CompletionRequest",
            &[common, structured, wire::names::<wire::Completion>()],
        ),
        (
            "ResponseRequest",
            &[
                common,
                structured,
                wire::names::<responses::ResponseFields>(),
            ],
        ),
        (
            "MessageRequest",
            &[
                common,
                structured,
                wire::names::<anthropic::MessageFields>(),
            ],
        ),
        (
            "OllamaChatRequest",
            &[common, structured, wire::names::<ollama::ChatFields>()],
        ),
        (
            "OllamaGenerateRequest",
            &[common, structured, wire::names::<ollama::GenerateFields>()],
        ),
        (
            "OllamaEmbedRequest",
            &[wire::names::<ollama::EmbedRequest>()],
        ),
        (
            "OllamaEmbeddingRequest",
            &[wire::names::<ollama::EmbeddingRequest>()],
        ),
        (
            "OllamaModelRequest",
            &[wire::names::<ollama::ModelRequest>()],
        ),
        (
            "EmbeddingRequest",
            &[wire::names::<wire::EmbeddingFields>()],
        ),
        ("RerankRequest", &[wire::names::<rerank::RerankFields>()]),
        ("ScoreRequest", &[wire::names::<rerank::ScoreFields>()]),
        ("InfillRequest", &[wire::names::<llama::InfillFields>()]),
        ("TokenizeRequest", &[wire::names::<wire::Tokenize>()]),
        ("DetokenizeRequest", &[wire::names::<wire::Detokenize>()]),
        (
            "LoadLoraAdapterRequest",
            &[wire::names::<adapter_routes::LoadAdapter>()],
        ),
        (
            "UnloadLoraAdapterRequest",
            &[wire::names::<adapter_routes::UnloadAdapter>()],
        ),
    ];
    for (body, read) in own {
        let read: BTreeSet<&str> = read
            .iter()
            .flat_map(|names| names.iter().copied())
            .collect();
        assert!(!read.is_empty(), "{body}");
        let documented = properties(&document, body).keys().map(String::as_str);
        assert_eq!(documented.collect::<BTreeSet<_>>(), read, "{body}");
    }
    let options = properties(&document, "StreamOptions");
    let names = wire::names::<wire::StreamOptions>();
    assert!(names.iter().all(|name| options.contains_key(*name)));
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
    let generating = [
        "/api/chat",
        "/api/generate",
        "/infill",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    ];
    assert_eq!(with(&MAX_TOKENS), generating);
    let with_tools = [
        "/api/chat",
        "/apply-template",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    ];
    assert_eq!(with(&WARNING), with_tools);
    assert_eq!(with(&X_REQUEST_ID).len(), paths.len());
}
