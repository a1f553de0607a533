//! `/v1/responses`: what is refused, by its status or by an event, and failures of a stream.

use crate::common::refusals::{change, rows};
use crate::common::scripted::saying;
use crate::common::server::{Fault, Server, error, slow};
use crate::http_responses::{RESPONSES, order, text_body};
use foretoken::engine::EngineOptions;
use serde_json::{Value, json};

/// Values of fields, and the field that an error names.
const REFUSED: &str = r#"
store = "yes" | store
background = true | background
previous_response_id = "resp_1" | previous_response_id
conversation = "conv_1" | conversation
conversation = {"id": "conv_1"} | conversation
truncation = "some" | truncation
prompt = {"id": "pmpt_1"} | prompt
max_tokens = 5 | max_tokens
stream_options = {"include_speculation": true} | stream_options.include_speculation
n = 2 | n
top_logprobs = 2 | top_logprobs
include = ["message.output_text.logprobs"] | include[0]
reasoning = {"summary": "long"} | reasoning.summary
reasoning = {"mode": "pro"} | reasoning.mode
response_format = {"type": "json_object"} | response_format
max_output_tokens = 0 | max_output_tokens
max_output_tokens = "many" | max_output_tokens
temperature = 9 | temperature
tools = [{"name": "f"}] | tools[0].type
tools = [{"type": "function", "name": "a b"}] | tools[0].name
tools = [{"type": "function", "name": "a", "parameters": []}] | tools[0].parameters
tool_choice = {"type": "function"} | tool_choice.name
tool_choice = "required" | tool_choice
text = {"format": {"type": "xml"}} | text.format.type
text = {"format": {"type": "json_schema", "schema": {}}} | text.format.name
input = [{"role": "user", "content": [{"type": "input_image"}]}] | input[0].content[0].type
input = null | input
"#;

#[tokio::test]
async fn what_is_not_done_is_refused_by_name() {
    let server = saying("Hello").await;
    for [asked, param] in rows::<2>(REFUSED) {
        for stream in [false, true] {
            let mut body = text_body();
            change(&mut body, asked);
            body["stream"] = stream.into();
            let refused = server.post(RESPONSES, &body).await;
            let status = refused.status().as_u16();
            assert_eq!(status, 400, "{asked}");
            let refused: Value = refused.json().await.expect("JSON");
            let error = &refused["error"];
            assert_eq!(error["param"], param, "{error}");
            let message = error["message"].as_str().expect("a message");
            let named = message.contains(param) || error["code"] == "context_length_exceeded";
            assert!(named, "{message}");
        }
    }
    let mut body = text_body();
    body["input"] = "a".repeat(5000).into();
    let refused = error(
        server.post(RESPONSES, &body).await,
        400,
        "context_length_exceeded",
    )
    .await;
    assert_eq!(refused["param"], "input");
    // Codex goes on without the image if the error is about its address.
    let image = json!({"type": "input_image", "image_url": "data:image/png;base64,AAAA"});
    let output = json!([{"type": "input_text", "text": "x"}, image]);
    body["input"] = json!([
        {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]);
    for stream in [false, true] {
        body["stream"] = stream.into();
        let refused = server.post(RESPONSES, &body).await;
        let refused = error(refused, 400, "invalid_value").await;
        assert_eq!(refused["param"], "input[1].output[1].image_url");
    }
    server.done().await;
}

/// Codex shortens its history only if an event says that it is too long.
#[tokio::test]
async fn a_stream_says_that_its_prompt_is_too_long() {
    let server = saying("Hello").await;
    let mut body = text_body();
    body["instructions"] = "Be brief.".into();
    // The second one is not counted.
    for length in [5000, 10_000] {
        body["input"] = "a".repeat(length).into();
        let events = server.named_events(RESPONSES, body.clone()).await;
        assert_eq!(order(&events), "created in_progress failed");
        for (i, (_, data)) in events.iter().enumerate() {
            assert_eq!(data["sequence_number"], i);
            assert_eq!(data["response"]["id"], events[0].1["response"]["id"]);
        }
        let failed = &events[2].1["response"];
        for (key, value) in [
            ("status", json!("failed")),
            ("model", json!("toy")),
            ("output", json!([])),
            ("instructions", json!("Be brief.")),
        ] {
            assert_eq!(failed[key], value, "{key}");
        }
        assert_eq!(failed["error"]["code"], "context_length_exceeded");
        let message = failed["error"]["message"].as_str().expect("a message");
        assert!(message.contains("maximum context length"), "{message}");
    }
    // Other refusals have their status.
    body["stream"] = true.into();
    body["model"] = "other".into();
    error(server.post(RESPONSES, &body).await, 404, "model_not_found").await;
    server.done().await;
}

#[tokio::test]
async fn a_failure_while_streaming_is_an_event() {
    let engine = slow(EngineOptions::default(), Some(Fault::Error));
    let server = Server::of(engine).await;
    let mut body =
        json!({"input": "ab", "temperature": 0, "ignore_eos": true, "max_output_tokens": 50});
    body["spec_length"] = 0.into();
    let events = server.named_events(RESPONSES, body).await;
    let (name, data) = &events[events.len() - 1];
    assert_eq!(name, "response.failed");
    assert_eq!(data["response"]["status"], "failed");
    assert_eq!(data["response"]["error"]["code"], "server_error");
    server.done().await;
}
