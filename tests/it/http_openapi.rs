//! The OpenAPI document against what the server really does.

use crate::common::Toy;
use crate::common::server::{LONG, Server, greedy};
use foretoken::http::{AppState, ServerInfo};
use foretoken::model::{EmbeddingSpec, Pooling};
use reqwest::{Method, Response};
use serde_json::{Value, json};

/// Checks `value` against a schema of `document`, as far as the document's schemas go.
fn check(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{what}: {value} under {schema}"));
    if let Some(to) = schema["$ref"].as_str() {
        let place = to.strip_prefix('#').unwrap();
        return check(document, document.pointer(place).unwrap(), value);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(forms) = schema[key].as_array() {
            let fits = |form: &&Value| check(document, form, value).is_ok();
            if forms.iter().filter(fits).count() == 0 {
                return wrong("no form fits");
            }
        }
    }
    let is = |kind: &str| match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    };
    let kinds = match &schema["type"] {
        Value::Null => Vec::new(),
        Value::String(kind) => vec![kind.as_str()],
        kinds => kinds
            .as_array()
            .unwrap()
            .iter()
            .map(|k| k.as_str().unwrap())
            .collect(),
    };
    if !kinds.is_empty() && !kinds.iter().any(|kind| is(kind)) {
        return wrong("another type");
    }
    let options = schema["enum"].as_array();
    if options.is_some_and(|options| !options.contains(value)) {
        return wrong("none of the values");
    }
    if schema.get("const").is_some_and(|only| only != value) {
        return wrong("another value");
    }
    if let Some(list) = value.as_array()
        && let Some(items) = schema.get("items")
    {
        list.iter()
            .try_for_each(|item| check(document, items, item))?;
    }
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    for name in schema["required"].as_array().into_iter().flatten() {
        if !object.contains_key(name.as_str().unwrap()) {
            return wrong(&format!("{name} is missing"));
        }
    }
    for (name, value) in object {
        match schema["properties"].get(name) {
            Some(schema) => check(document, schema, value)?,
            None if schema["additionalProperties"] == false => {
                return wrong(&format!("{name} is not documented"));
            }
            None => {}
        }
    }
    Ok(())
}

async fn server() -> Server {
    let info = ServerInfo {
        fingerprint: Some("fp_1".into()),
        drafter: Some(("tables".into(), 4)),
        ..ServerInfo::default()
    };
    let spec = EmbeddingSpec::new(Pooling::Last, true);
    let configure = |s: AppState| s.with_info(info).with_embeddings(Some(spec));
    Server::over(Toy::default().start(), configure, LONG).await
}

async fn document(server: &Server) -> Value {
    let response = server.get("/openapi.json").await;
    assert_eq!(response.headers()["content-type"], "application/json");
    response.json().await.unwrap()
}

/// The operation that answers, and the schema of an answer with this status.
async fn checked(document: &Value, path: &str, method: &Method, response: Response) -> Value {
    let status = response.status().as_u16().to_string();
    let operation = &document["paths"][path][method.as_str().to_lowercase()];
    let documented = &operation["responses"][&status];
    assert!(documented.is_object(), "{method} {path} answers {status}");
    let headers = documented["headers"].as_object().unwrap();
    for (name, header) in headers {
        assert!(header["required"] != true || response.headers().contains_key(name));
    }
    assert_eq!(headers["x-request-id"]["required"], true);
    for name in response.headers().keys() {
        let is_ours = name.as_str().starts_with("x-foretoken-");
        assert!(!is_ours || headers.contains_key(name.as_str()), "{name}");
    }
    let content = documented["content"].as_object().unwrap();
    let text = response.headers().get("content-type").map(|kind| {
        let kind = kind.to_str().unwrap().split(';').next().unwrap().to_owned();
        assert!(content.contains_key(&kind), "{method} {path}: {kind}");
        kind
    });
    let body = response.text().await.unwrap();
    match text.as_deref() {
        Some("application/json") => {
            let value = serde_json::from_str(&body).unwrap();
            let schema = &content["application/json"]["schema"];
            if let Err(what) = check(document, schema, &value) {
                panic!("{method} {path} {status}: {what}");
            }
            value
        }
        None => {
            assert!(content.is_empty() && body.is_empty(), "{method} {path}");
            Value::Null
        }
        Some(_) => body.into(),
    }
}

#[tokio::test]
async fn answers_and_refusals_have_the_shapes_of_the_document() {
    let server = server().await;
    let document = document(&server).await;
    assert_eq!(document["openapi"], "3.1.0");
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let turns = json!([{"role": "user", "content": "hi"}]);
    let with_call = json!([
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]);
    let scored = json!({"prompt": ["ab", "c"], "max_tokens": 3, "logprobs": 2, "echo": true, "n": 2, "return_token_ids": true});
    let ids = json!({"prompt": [[0, 1]], "max_tokens": 60, "stop": ["a", "b", "c"]});
    let predicted = json!({"type": "content", "content": "abc"});
    let bodies = [
        ("/v1/completions", greedy("abc", 5), 200),
        ("/v1/completions", scored, 200),
        ("/v1/completions", ids, 200),
        (
            "/v1/completions",
            json!({"prompt": "a".repeat(1000), "max_tokens": 1}),
            400,
        ),
        ("/v1/completions", json!({"prompt": "a", "model": "b"}), 404),
        (
            "/v1/chat/completions",
            json!({"messages": turns, "max_tokens": 4, "logprobs": true, "top_logprobs": 2, "return_token_ids": true}),
            200,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": turns, "max_tokens": 4, "prediction": predicted}),
            200,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": with_call, "max_tokens": 4}),
            200,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": turns, "tools": [{}]}),
            400,
        ),
        ("/v1/chat/completions", json!({"messages": 1}), 400),
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 4}),
            200,
        ),
        (
            "/v1/responses",
            json!({"input": turns, "max_output_tokens": 4}),
            200,
        ),
        ("/v1/responses", json!({}), 400),
        (
            "/v1/messages",
            json!({"messages": turns, "max_tokens": 4}),
            200,
        ),
        ("/v1/messages", json!({"messages": turns}), 400),
        (
            "/v1/messages",
            json!({"messages": turns, "max_tokens": 4, "model": "b"}),
            404,
        ),
        ("/v1/messages/count_tokens", json!({"messages": turns}), 200),
        ("/v1/messages/count_tokens", json!({}), 400),
        (
            "/api/chat",
            json!({"messages": turns, "stream": false, "options": {"num_predict": 4}}),
            200,
        ),
        ("/api/chat", json!({}), 200),
        ("/api/chat", json!({"messages": 1}), 400),
        (
            "/api/generate",
            json!({"prompt": "hi", "stream": false, "options": {"num_predict": 4}}),
            200,
        ),
        (
            "/api/generate",
            json!({"prompt": "hi", "options": {"num_predict": 4}}),
            200,
        ),
        ("/api/generate", json!({"model": "b"}), 404),
        ("/api/embed", json!({"input": ["ab", "c"]}), 200),
        ("/api/embed", json!({"input": 1}), 400),
        ("/api/embeddings", json!({"prompt": "ab"}), 200),
        ("/api/show", json!({"model": "toy:latest"}), 200),
        ("/api/show", json!({"model": "b"}), 404),
        ("/api/pull", json!({"model": "toy"}), 200),
        ("/api/pull", json!({"model": "toy", "stream": false}), 200),
        ("/v1/embeddings", json!({"input": ["ab", "c"]}), 200),
        (
            "/v1/embeddings",
            json!({"input": [[0]], "encoding_format": "base64", "dimensions": 1}),
            200,
        ),
        ("/v1/embeddings", json!({"input": ""}), 400),
        (
            "/v1/rerank",
            json!({"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
            200,
        ),
        ("/v1/rerank", json!({"query": "a"}), 400),
        (
            "/v1/score",
            json!({"text_1": "a", "text_2": ["b", {"text": "c"}]}),
            200,
        ),
        ("/v1/score", json!({}), 400),
        ("/apply-template", json!({"messages": turns}), 200),
        ("/apply-template", json!({}), 400),
        ("/infill", json!({"input_prefix": "a"}), 400),
        ("/tokenize", json!({"prompt": "ab"}), 200),
        ("/tokenize", json!({"messages": with_call}), 200),
        ("/tokenize", json!({}), 400),
        ("/detokenize", json!({"tokens": [0, 1]}), 200),
        ("/detokenize", json!({"tokens": "a"}), 400),
        ("/reset_prefix_cache", json!({}), 200),
        ("/ping", json!({}), 200),
    ];
    for (path, body, status) in bodies {
        let response = server.post(path, &body).await;
        assert_eq!(response.status(), status, "{path} {body}");
        checked(&document, path, &Method::POST, response).await;
        // What is answered fits the schema of what is asked, too.
        let operation = &document["paths"][path]["post"];
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        if status == 200
            && let Err(what) = check(&document, schema, &body)
        {
            panic!("{path}: {what}");
        }
    }
    for (path, methods) in document["paths"].as_object().unwrap() {
        if methods.get("get").is_some() {
            let response = server.get(&path.replace("{id}", "org/alias")).await;
            assert_eq!(response.status(), 200, "{path}");
            checked(&document, path, &Method::GET, response).await;
        }
    }
    let unknown = server.get("/v1/models/other").await;
    checked(&document, "/v1/models/{id}", &Method::GET, unknown).await;
    server.done().await;
}

#[tokio::test]
async fn the_chunks_of_streams_have_the_shapes_of_the_document() {
    let server = server().await;
    let document = document(&server).await;
    let options = json!({"include_usage": true, "include_speculation": true});
    let turns = json!([{"role": "user", "content": "hi"}]);
    for (path, name, body) in [
        (
            "/v1/completions",
            "Completion",
            json!({"prompt": "abcabcabc", "max_tokens": 30, "logprobs": 1, "return_token_ids": true}),
        ),
        (
            "/v1/chat/completions",
            "ChatCompletionChunk",
            json!({"messages": turns, "max_tokens": 30, "logprobs": true, "n": 2, "return_token_ids": true}),
        ),
    ] {
        let mut body = body;
        body["temperature"] = 0.into();
        body["stream_options"] = options.clone();
        let chunks = server.stream(path, body).await;
        assert!(
            chunks
                .iter()
                .any(|chunk| !chunk["choices"][0]["speculation"].is_null()),
            "{path}"
        );
        let schema = &document["components"]["schemas"][name];
        for chunk in chunks {
            if let Err(what) = check(&document, schema, &chunk) {
                panic!("{path}: {what}");
            }
        }
    }
    server.done().await;
}

#[tokio::test]
async fn the_document_knows_every_route_that_a_wrong_path_is_told() {
    let server = server().await;
    let document = document(&server).await;
    let told: Value = server.get("/nothing").await.json().await.unwrap();
    let message = told["error"]["message"].as_str().unwrap();
    let (_, routes) = message.split_once("; there are ").unwrap();
    let routes: Vec<&str> = routes.split(", ").collect();
    assert!(routes.len() > 15, "{message}");
    for route in routes {
        let (method, path) = route.split_once(' ').unwrap();
        let path = path.replace("{*id}", "{id}");
        assert!(
            document["paths"][&path][method.to_lowercase()].is_object(),
            "{route}"
        );
    }
    server.done().await;
}
