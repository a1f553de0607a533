//! Ollama's API: errors as its clients expect them, before a stream and within it.

use crate::common::assert_has;
use crate::common::refusals::{change, rows};
use crate::common::scripted::saying;
use crate::common::server::{Fault, Server, slow};
use crate::http_ollama::{GENERATE, OLLAMA_CHAT, chat_body, lines, prompt_body, refused};
use foretoken::engine::EngineOptions;
use serde_json::json;

/// Routes, values of fields, and the name in the error. The tokenizer has no tokens for a suffix.
const REFUSED: &str = r#"
chat | messages = 7 | messages
chat | messages = [{"content": "a"}] | messages[0].role
chat | messages = [{"role": "user", "images": ["A"]}] | messages[0].images
chat | tools = [{"type": "function", "function": {"name": "a b"}}] | tools[0].function.name
chat | format = "xml" | format
chat | tools = [{"type": "custom", "custom": {"name": "patch"}}] | tools[0].type
chat | format = {"type": 7} | format
chat | response_format = {"type": "text"} | response_format
chat | options = {"temperature": 9} | options.temperature
chat | options = {"repeat_penalty": 0} | options.repeat_penalty
chat | options = {"stop": [""]} | options.stop
chat | options = {"mirostat": 2} | options.mirostat
chat | options = {"num_predict": "x"} | options.num_predict
chat | options = [] | options
chat | tool_choice = "required" | tool_choice
chat | keep_alive = [] | keep_alive
chat | n = 2 | n
chat | top_logprobs = 3 | top_logprobs
generate | best_of = 3 | best_of
chat | prompt = "Hi" | prompt
generate | images = ["A"] | images
generate | context = [1] | context
generate | template = "x" | template
generate | suffix = "x" | suffix
generate | messages = [{}] | messages
"#;

#[tokio::test]
async fn errors_have_ollamas_shape_and_names() {
    let server = saying("Hello").await;
    for [route, asked, named] in rows::<3>(REFUSED) {
        let (path, body) = match route {
            "generate" => (GENERATE, prompt_body()),
            _ => (OLLAMA_CHAT, chat_body()),
        };
        for stream in [false, true] {
            let mut body = body.clone();
            change(&mut body, asked);
            body["stream"] = stream.into();
            let message = refused(server.post(path, &body).await, 400).await;
            assert!(message.starts_with(named), "{named}: {message}");
        }
    }
    let mut raw = prompt_body();
    raw["raw"] = true.into();
    raw["system"] = "Be brief.".into();
    let message = refused(server.post(GENERATE, &raw).await, 400).await;
    assert!(
        message.starts_with("system needs a chat template"),
        "{message}"
    );
    let mut long = prompt_body();
    long["prompt"] = "a".repeat(5000).into();
    let message = refused(server.post(GENERATE, &long).await, 400).await;
    assert!(message.contains("maximum context length"), "{message}");
    let message = refused(server.get(OLLAMA_CHAT).await, 405).await;
    assert!(message.contains("GET"), "{message}");
    let message = refused(server.get("/api/nothing").await, 404).await;
    assert!(message.contains("POST /api/chat"), "{message}");
    for path in [
        "/api/create",
        "/api/copy",
        "/api/push",
        "/api/blobs/sha256:0",
    ] {
        let message = refused(server.post(path, &json!({})).await, 404).await;
        assert_has(&message, &["the model that it was started with"]);
    }
    let delete = server.client.delete(server.url.clone() + "/api/delete");
    refused(delete.send().await.expect("an answer"), 404).await;
    server.done().await;
}

#[tokio::test]
async fn a_failure_while_streaming_is_a_line() {
    let engine = slow(EngineOptions::default(), Some(Fault::Error));
    let server = Server::of(engine).await;
    let body = json!({
        "messages": [{"role": "user", "content": "ab"}], "ignore_eos": true, "spec_length": 0,
        "options": {"temperature": 0, "num_predict": 50},
    });
    let lines = lines(&server, OLLAMA_CHAT, &body).await;
    let (last, others) = lines.split_last().expect("a line");
    assert!(others.iter().all(|line| line["done"] == false));
    assert!(
        last["error"].is_string() && last["done"].is_null(),
        "{last}"
    );
    server.done().await;
}
