//! Ollama's API: the routes that tell which models there are, the key, and embeddings.

use crate::common::scripted::{self, TEMPLATE, saying_as, thinking};
use crate::common::server::Server;
use crate::common::tiny::open;
use crate::common::{Toy, assert_has};
use crate::embeddings::folder;
use crate::http_ollama::{lines, refused, whole};
use foretoken::engine::{self, EngineOptions};
use foretoken::http::{AppState, ModelFiles, ServerInfo};
use foretoken::model::{EmbeddingSpec, Pooling};
use foretoken::text::Text;
use serde_json::{Value, json};
use std::sync::Arc;

#[tokio::test]
async fn models_are_listed_as_clients_choose_them() {
    let info = ServerInfo {
        fingerprint: Some("fp_1".into()),
        files: ModelFiles {
            format: "gguf".into(),
            architecture: "llama".into(),
            parameters: 134_515_008,
            quantization: "Q4_1".into(),
            bytes: 1000,
        },
        ..ServerInfo::default()
    };
    let configure = |state: AppState| thinking(state.with_info(info));
    let server = saying_as("Hello", TEMPLATE, configure).await;
    let tags = server.read("/api/tags").await;
    let model = &tags["models"][0];
    let details = json!({
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": "134.5M", "quantization_level": "Q4_1",
    });
    for (key, value) in [
        ("name", json!("toy:latest")),
        ("model", json!("toy:latest")),
        ("size", json!(1000)),
        ("details", details.clone()),
    ] {
        assert_eq!(model[key], value, "{key}");
    }
    assert_eq!(model["digest"].as_str().map(str::len), Some(64));
    let running = server.read("/api/ps").await;
    assert_eq!(running["models"][0]["digest"], model["digest"]);
    assert_eq!(running["models"][0]["size_vram"], 0);
    assert_eq!(running["models"][0]["context_length"], scripted::MAX_LEN);
    let version = server.read("/api/version").await["version"].clone();
    let numbers = version.as_str().expect("a version").split('.');
    let numbers: Vec<u32> = numbers.map(|n| n.parse().expect("a number")).collect();
    // Codex does not talk to older ones.
    let is_new = numbers.as_slice() >= [0, 13, 4].as_slice();
    assert!(numbers.len() == 3 && is_new, "{version}");

    for body in [
        json!({"model": "toy"}),
        json!({"name": "toy:latest", "verbose": true}),
    ] {
        let shown = server.json("/api/show", &body).await;
        assert_eq!(shown["details"], details);
        assert_eq!(shown["template"], TEMPLATE);
        assert_eq!(shown["modified_at"], model["modified_at"]);
        let expected = json!(["completion", "tools", "thinking"]);
        assert_eq!(shown["capabilities"], expected);
        let expected = format!("num_ctx {}", scripted::MAX_LEN);
        assert_eq!(shown["parameters"], expected);
        let info = &shown["model_info"];
        assert_eq!(info["general.architecture"], "llama");
        assert_eq!(info["general.basename"], "toy");
        assert_eq!(info["general.parameter_count"], 134_515_008);
        assert_eq!(info["llama.context_length"], scripted::MAX_LEN);
    }
    let statuses = lines(&server, "/api/pull", &json!({"model": "toy"})).await;
    assert_eq!(statuses.last(), Some(&json!({"status": "success"})));
    let status = whole(&server, "/api/pull", json!({"name": "toy:latest"})).await;
    assert_eq!(status, json!({"status": "success"}));
    for path in ["/api/pull", "/api/show"] {
        let message = refused(server.post(path, &json!({"model": "llama3"})).await, 404).await;
        assert_has(&message, &["`llama3`", "toy"]);
        refused(server.post(path, &json!({})).await, 400).await;
    }
    // Clients look whether somebody is there.
    let head = server.client.head(server.url.clone() + "/").send().await;
    assert_eq!(head.expect("an answer").status().as_u16(), 200);
    server.done().await;
}

#[tokio::test]
async fn the_key_is_needed_but_for_the_version() {
    let keyed = |state: AppState| state.with_api_keys(vec!["secret".into()]);
    let server = Server::over(Toy::default().start(), keyed).await;
    for path in ["/api/tags", "/api/ps", "/api/nothing"] {
        let message = refused(server.get(path).await, 401).await;
        assert!(message.contains("API key"), "{message}");
    }
    refused(server.post("/api/chat", &json!({})).await, 401).await;
    assert_eq!(server.get("/api/version").await.status().as_u16(), 200);
    let tags = server.client.get(server.url.clone() + "/api/tags");
    let tags = tags.bearer_auth("secret").send().await.expect("an answer");
    assert_eq!(tags.status().as_u16(), 200);
    server.done().await;
}

#[tokio::test]
async fn embeddings_are_those_of_the_other_api() {
    let spec = EmbeddingSpec::new(Pooling::Last, true);
    let model = open(&folder()).expect("opens");
    let engine = engine::spawn(model, None, 64, 4, EngineOptions::default()).expect("starts");
    let max = engine.limits().max_model_len;
    let server = Server::over(engine, |s| s.with_embeddings(Some(spec))).await;
    let input = json!(["abc", "b"]);
    let expected = server
        .json("/v1/embeddings", &json!({"input": input}))
        .await;
    let vector = |index: usize| &expected["data"][index]["embedding"];
    let body = json!({"model": "toy:latest", "input": input, "options": {"num_ctx": 1}});
    let reply = server.json("/api/embed", &body).await;
    assert_eq!(reply["model"], "toy:latest");
    assert_eq!(reply["embeddings"], json!([vector(0), vector(1)]));
    assert_eq!(reply["prompt_eval_count"], 4);
    let reply = server
        .json("/api/embed", &json!({"input": "abc", "keep_alive": 5}))
        .await;
    assert_eq!(reply["embeddings"], json!([vector(0)]));
    let reply = server
        .json("/api/embeddings", &json!({"prompt": "b"}))
        .await;
    assert_eq!(reply, json!({"embedding": vector(1)}));
    let reply = server
        .json("/api/embed", &json!({"input": "abc", "dimensions": 4}))
        .await;
    assert_eq!(reply["embeddings"][0].as_array().map(Vec::len), Some(4));
    // The end is cut off, unless it must not be.
    let (fits, long) = ("ab".repeat(max / 2), "ab".repeat(max));
    let cut = server.json("/api/embed", &json!({"input": long})).await;
    let fitting = server
        .json("/api/embed", &json!({"input": fits, "truncate": false}))
        .await;
    assert_eq!(cut["embeddings"], fitting["embeddings"]);
    let body = json!({"input": long, "truncate": false});
    let message = refused(server.post("/api/embed", &body).await, 400).await;
    assert!(message.starts_with("input 0"), "{message}");
    // None ask only whether the model is there.
    for input in [json!([]), json!(""), Value::Null] {
        let reply = server.json("/api/embed", &json!({"input": input})).await;
        assert_eq!(reply["embeddings"], json!([]));
    }
    let wanted = json!({"embedding": []});
    assert_eq!(server.json("/api/embeddings", &json!({})).await, wanted);
    let shown = server.json("/api/show", &json!({"model": "toy"})).await;
    // The fixture has no output layer.
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    server.done().await;
}

#[tokio::test]
async fn what_is_cut_keeps_the_token_that_ends_it() {
    let model = open(&folder()).expect("opens");
    let engine = engine::spawn(model, None, 64, 4, EngineOptions::default()).expect("starts");
    let max = engine.limits().max_model_len;
    // Each byte is a token, and another one ends a text.
    let text = Arc::new(Text::from_folder(&folder()).expect("a tokenizer"));
    let spec = EmbeddingSpec::new(Pooling::Last, true);
    let state = AppState::new(engine.clone(), text, vec!["toy".into()]).with_embeddings(Some(spec));
    let server = Server::over(engine, |_| state).await;
    let embedded = async |input: String| server.json("/api/embed", &json!({"input": input})).await;
    let (long, fits) = ("ab".repeat(max), "ab".repeat(max)[..max - 1].to_owned());
    let (long, fits) = (embedded(long).await, embedded(fits).await);
    assert_eq!(long["prompt_eval_count"], max);
    assert_eq!(long["embeddings"], fits["embeddings"]);
    server.done().await;
}
