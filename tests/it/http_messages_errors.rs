//! `/v1/messages`: errors as Anthropic's clients expect them, before a stream and within it.

use crate::common::Toy;
use crate::common::refusals::{change, rows};
use crate::common::scripted::saying;
use crate::common::server::{Fault, Server, slow};
use crate::http_messages::{COUNT, MESSAGES, refused, text_body};
use foretoken::engine::EngineOptions;
use foretoken::http::AppState;
use serde_json::json;

/// Values of fields, and the name with which an error begins.
const REFUSED: &str = r#"
max_tokens = null | max_tokens
max_tokens = -1 | max_tokens
messages = null | messages
messages = [] | messages
messages = [{"role": "robot", "content": "x"}] | messages[0].role
messages = [{"role": "user", "content": [{"type": "image", "source": {}}]}] | messages[0].content[0].type
messages = [{"role": "assistant", "content": "x "}] | messages
system = 7 | system
stop_sequences = [""] | stop_sequences
stop_sequences = "x" | stop_sequences
temperature = 9 | temperature
thinking = {"type": "maybe"} | thinking.type
tools = [{"name": "a"}] | tools[0].input_schema
tools = [{"name": "a b", "input_schema": {}}] | tools[0].name
tools = [{"name": "a", "input_schema": []}] | tools[0].input_schema
tools = [{"type": "memory_20250818", "name": "memory"}] | tools[0].type
tools = [{"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1}] | tools[0].type
tool_choice = {"type": "any"} | tool_choice
tool_choice = {"type": "tool"} | tool_choice.name
tool_choice = {"type": "some"} | tool_choice.type
output_config = {"format": {"type": "xml"}} | output_config.format.type
mcp_servers = [{"name": "x"}] | mcp_servers
container = "x" | container
n = 2 | n
"#;

#[tokio::test]
async fn errors_have_anthropics_shape() {
    let server = saying("Hello").await;
    for [asked, named] in rows::<2>(REFUSED) {
        for stream in [false, true] {
            let mut body = text_body();
            change(&mut body, asked);
            body["stream"] = stream.into();
            let (kind, message) = refused(server.post(MESSAGES, &body).await, 400).await;
            assert_eq!(kind, "invalid_request_error");
            assert!(message.starts_with(named), "{named}: {message}");
        }
    }
    let mut body = text_body();
    body["messages"][0]["content"] = "a".repeat(5000).into();
    let (kind, message) = refused(server.post(MESSAGES, &body).await, 400).await;
    assert_eq!(kind, "invalid_request_error");
    assert!(message.starts_with("prompt is too long: "), "{message}");
    body["model"] = "other".into();
    let (kind, _) = refused(server.post(MESSAGES, &body).await, 404).await;
    assert_eq!(kind, "not_found_error");
    let (kind, _) = refused(server.post(COUNT, &body).await, 404).await;
    assert_eq!(kind, "not_found_error");
    let (kind, _) = refused(server.get(MESSAGES).await, 405).await;
    assert_eq!(kind, "invalid_request_error");
    let (kind, _) = refused(server.get("/v1/messages/batches").await, 404).await;
    assert_eq!(kind, "not_found_error");
    server.done().await;
}

#[tokio::test]
async fn the_key_may_be_in_anthropics_header() {
    let keyed = |state: AppState| state.with_api_keys(vec!["secret".into()]);
    let server = Server::over(Toy::default().start(), keyed).await;
    let body =
        json!({"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let post = |header: &'static str, value: &'static str| {
        let request = server.client.post(server.url.clone() + MESSAGES);
        request.header(header, value).json(&body).send()
    };
    for (header, value) in [
        ("x-api-key", "wrong"),
        ("authorization", "secret"),
        ("x-api-key", ""),
    ] {
        let response = post(header, value).await.expect("an answer");
        let (kind, _) = refused(response, 401).await;
        assert_eq!(kind, "authentication_error");
    }
    for (header, value) in [("x-api-key", "secret"), ("authorization", "Bearer secret")] {
        let response = post(header, value).await.expect("an answer");
        assert_eq!(response.status().as_u16(), 200, "{header}");
    }
    server.done().await;
}

#[tokio::test]
async fn a_failure_while_streaming_is_an_event() {
    let engine = slow(EngineOptions::default(), Some(Fault::Error));
    let server = Server::of(engine).await;
    let body = json!({
        "messages": [{"role": "user", "content": "ab"}], "max_tokens": 50, "temperature": 0,
        "ignore_eos": true, "spec_length": 0,
    });
    let events = server.named_events(MESSAGES, body).await;
    assert_eq!(events[0].0, "message_start");
    let (name, data) = &events[events.len() - 1];
    assert_eq!(name, "error");
    assert_eq!(data["error"]["type"], "api_error");
    server.done().await;
}
