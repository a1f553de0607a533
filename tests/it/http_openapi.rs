//! The OpenAPI document against what the server really does.

use crate::common::Toy;
use crate::common::refusals::{parsed, rows};
use crate::common::server::{Server, greedy};
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
    Server::over(Toy::default().start(), configure).await
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

/// Statuses, and the routes and bodies that have them.
const ASKED: &str = r#"
404 | /v1/completions | {"prompt": "a", "model": "b"}
200 | /v1/chat/completions | {"messages": TURNS, "max_tokens": 4, "logprobs": true, "top_logprobs": 2, "return_token_ids": true}
200 | /v1/chat/completions | {"messages": TURNS, "max_tokens": 4, "prediction": PREDICTED}
200 | /v1/chat/completions | {"messages": WITH_CALL, "max_tokens": 4}
400 | /v1/chat/completions | {"messages": TURNS, "tools": [{}]}
400 | /v1/chat/completions | {"messages": 1}
200 | /v1/responses | {"input": "hi", "max_output_tokens": 4}
200 | /v1/responses | {"input": TURNS, "max_output_tokens": 4}
400 | /v1/responses | {}
200 | /v1/responses/input_tokens | {"input": "hi"}
400 | /v1/responses/input_tokens | {}
200 | /v1/messages | {"messages": TURNS, "max_tokens": 4}
400 | /v1/messages | {"messages": TURNS}
404 | /v1/messages | {"messages": TURNS, "max_tokens": 4, "model": "b"}
200 | /v1/messages/count_tokens | {"messages": TURNS}
400 | /v1/messages/count_tokens | {}
200 | /api/chat | {"messages": TURNS, "stream": false, "options": {"num_predict": 4}}
200 | /api/chat | {}
400 | /api/chat | {"messages": 1}
200 | /api/generate | {"prompt": "hi", "stream": false, "options": {"num_predict": 4}}
200 | /api/generate | {"prompt": "hi", "options": {"num_predict": 4}}
404 | /api/generate | {"model": "b"}
200 | /api/embed | {"input": ["ab", "c"]}
400 | /api/embed | {"input": 1}
200 | /api/embeddings | {"prompt": "ab"}
200 | /api/show | {"model": "toy:latest"}
404 | /api/show | {"model": "b"}
200 | /api/pull | {"model": "toy"}
200 | /api/pull | {"model": "toy", "stream": false}
200 | /v1/embeddings | {"input": ["ab", "c"]}
200 | /v1/embeddings | {"input": [[0]], "encoding_format": "base64", "dimensions": 1}
400 | /v1/embeddings | {"input": ""}
200 | /embed | {"inputs": ["ab", "c"]}
400 | /embed | {}
200 | /v1/rerank | {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}
200 | /v1/rerank | {"query": "a", "texts": ["b", "c"], "return_text": true}
400 | /v1/rerank | {"query": "a"}
200 | /v1/score | {"text_1": "a", "text_2": ["b", {"text": "c"}]}
400 | /v1/score | {}
200 | /apply-template | {"messages": TURNS}
400 | /apply-template | {}
400 | /infill | {"input_prefix": "a"}
200 | /tokenize | {"prompt": "ab"}
200 | /tokenize | {"messages": WITH_CALL}
400 | /tokenize | {}
200 | /detokenize | {"tokens": [0, 1]}
400 | /detokenize | {"tokens": "a"}
200 | /reset_prefix_cache | {}
200 | /ping | {}
"#;

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
    let rows = rows::<3>(ASKED).map(|[status, path, body]| {
        let body = (body.replace("WITH_CALL", &with_call.to_string()))
            .replace("TURNS", &turns.to_string())
            .replace("PREDICTED", &predicted.to_string());
        (path, parsed(&body), status.parse::<u16>().unwrap())
    });
    let long = json!({"prompt": "a".repeat(1000), "max_tokens": 1});
    let completions = [
        (greedy("abc", 5), 200),
        (scored, 200),
        (ids, 200),
        (long, 400),
    ];
    let completions = completions.map(|(body, status)| ("/v1/completions", body, status));
    for (path, body, status) in rows.chain(completions) {
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
    let body = json!({"input": "hi", "max_output_tokens": 4});
    let stored = server.json("/v1/responses", &body).await;
    let id = stored["id"].as_str().unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        if methods.get("get").is_some() {
            let path_of = path.replace("{id}", "org/alias");
            let response = server.get(&path_of.replace("{response_id}", id)).await;
            assert_eq!(response.status(), 200, "{path}");
            checked(&document, path, &Method::GET, response).await;
        }
    }
    let unknown = server.get("/v1/models/other").await;
    checked(&document, "/v1/models/{id}", &Method::GET, unknown).await;
    let path = "/v1/responses/{response_id}";
    for _ in ["stored", "deleted"] {
        let url = format!("{}/v1/responses/{id}", server.url);
        let deleted = server.client.delete(url).send().await.unwrap();
        checked(&document, path, &Method::DELETE, deleted).await;
    }
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
    let told = server.read("/nothing").await;
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
