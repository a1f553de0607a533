//! `/v1/messages`: the same answers as a chat's, as Anthropic's messages and events.

use crate::common::scripted::{self, CHAT, TEMPLATE, TWO_CALLS, saying, saying_as, thinking};
use reqwest::Response;
use serde_json::{Value, json};

pub const MESSAGES: &str = "/v1/messages";
pub const COUNT: &str = "/v1/messages/count_tokens";

/// A chat's tool as this API has it.
fn tool(of_chat: &Value) -> Value {
    let function = &of_chat["function"];
    json!({
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
        "cache_control": {"type": "ephemeral"},
    })
}

/// The request of `scripted::body`.
fn body() -> Value {
    let chat = scripted::body();
    let tools = chat["tools"].as_array().expect("tools");
    json!({
        "model": "toy",
        "max_tokens": 500,
        "messages": chat["messages"],
        "tools": tools.iter().map(tool).collect::<Vec<_>>(),
        "temperature": 0,
    })
}

pub fn text_body() -> Value {
    json!({"model": "toy", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0})
}

/// The names of events, without repetitions.
fn order(events: &[(String, Value)]) -> String {
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    names.join(" ")
}

/// The events of a block.
const BLOCK: &str = "content_block_start content_block_delta content_block_stop";

/// The content blocks that the events of a stream make, and how it ended.
fn assembled(events: &[(String, Value)]) -> (Vec<Value>, Value) {
    let (mut blocks, mut json) = (Vec::<Value>::new(), String::new());
    let mut end = Value::Null;
    for (name, data) in events {
        if name == "message_delta" {
            end = data["delta"].clone();
        }
        let Some(index) = data["index"].as_u64() else {
            continue;
        };
        assert_eq!(
            index as usize,
            blocks.len() - usize::from(name != "content_block_start")
        );
        let delta = &data["delta"];
        match name.as_str() {
            "content_block_start" => blocks.push(data["content_block"].clone()),
            "content_block_stop" => {
                if !json.is_empty() {
                    let input = serde_json::from_str(&json).expect("JSON");
                    blocks.last_mut().expect("a block")["input"] = input;
                    json.clear();
                }
            }
            _ => {
                let key = match delta["type"].as_str() {
                    Some("text_delta") => "text",
                    Some("thinking_delta") => "thinking",
                    Some("signature_delta") => "signature",
                    _ => {
                        assert_eq!(delta["type"], "input_json_delta");
                        json += delta["partial_json"].as_str().expect("a delta");
                        continue;
                    }
                };
                let block = blocks.last_mut().expect("a block");
                let so_far = block[key].as_str().expect("a text").to_owned();
                block[key] = (so_far + delta[key].as_str().expect("a delta")).into();
            }
        }
    }
    (blocks, end)
}

/// Content blocks without the ids of calls.
fn settled(content: &[Value]) -> Vec<Value> {
    let mut content = content.to_vec();
    for block in &mut content {
        if block["type"] == "tool_use" {
            assert!(block["id"].is_string());
            block["id"] = Value::Null;
        }
    }
    content
}

/// The type and message of an error with `status`.
pub async fn refused(response: Response, status: u16) -> (String, String) {
    assert_eq!(response.status().as_u16(), status);
    let body: Value = response.json().await.expect("JSON");
    assert_eq!(body["type"], "error", "{body}");
    let text = |key: &str| body["error"][key].as_str().expect("a string").to_owned();
    (text("type"), text("message"))
}

#[tokio::test]
async fn a_text_is_one_block() {
    let server = saying("Hello there.").await;
    let reply = server.json(MESSAGES, &text_body()).await;
    let content = json!([{"type": "text", "text": "Hello there."}]);
    for (key, value) in [
        ("type", json!("message")),
        ("role", json!("assistant")),
        ("model", json!("toy")),
        ("content", content.clone()),
        ("stop_reason", json!("end_turn")),
        ("stop_sequence", Value::Null),
    ] {
        assert_eq!(reply[key], value, "{key}");
    }
    let id = reply["id"].as_str().expect("an id");
    assert!(id.starts_with("msg_"), "{id}");
    let chat = server.json(CHAT, &text_body()).await;
    assert_eq!(chat["choices"][0]["message"]["content"], "Hello there.");
    let usage = &reply["usage"];
    let prompt = chat["usage"]["prompt_tokens"].as_u64().expect("tokens");
    assert_eq!(usage["input_tokens"], prompt);
    assert_eq!(usage["output_tokens"], chat["usage"]["completion_tokens"]);
    assert_eq!(usage["cache_read_input_tokens"], 0);

    let events = server.named_events(MESSAGES, text_body()).await;
    let expected = format!("message_start ping {BLOCK} message_delta message_stop");
    assert_eq!(order(&events), expected);
    let started = &events[0].1["message"];
    assert_eq!(started["content"], json!([]));
    assert_eq!(started["stop_reason"], Value::Null);
    // The prompt was cached by now.
    let input = |key: &str| started["usage"][key].as_u64().expect("tokens");
    assert_eq!(
        input("input_tokens") + input("cache_read_input_tokens"),
        prompt
    );
    let (blocks, end) = assembled(&events);
    assert_eq!(Value::from(blocks), content);
    let wanted = json!({"stop_reason": "end_turn", "stop_sequence": null});
    assert_eq!(end, wanted);
    let ended = &events[events.len() - 2].1["usage"];
    assert_eq!(ended["output_tokens"], usage["output_tokens"]);
    assert_eq!(ended["input_tokens"], started["usage"]["input_tokens"]);

    let counted = server.json(COUNT, &text_body()).await;
    assert_eq!(counted, json!({"input_tokens": prompt}));
    server.done().await;
}

#[tokio::test]
async fn calls_are_blocks_and_come_back_as_input() {
    let server = saying(TWO_CALLS).await;
    let reply = server.json(MESSAGES, &body()).await;
    let content = reply["content"].as_array().expect("blocks");
    let call = |name: &str, input: Value| {
        let caller = json!({"type": "direct"});
        json!({"type": "tool_use", "id": null, "name": name, "input": input, "caller": caller})
    };
    let expected = [
        json!({"type": "text", "text": "Let me look."}),
        call("get_weather", json!({"city": "Zürich"})),
        call("add", json!({"a": 1, "b": 2})),
    ];
    assert_eq!(settled(content), expected);
    assert_eq!(reply["stop_reason"], "tool_use");
    let chat = server.json(CHAT, &scripted::body()).await;
    let prompt = &chat["usage"]["prompt_tokens"];
    assert_eq!(reply["usage"]["input_tokens"], *prompt);
    assert_eq!(server.json(COUNT, &body()).await["input_tokens"], *prompt);

    let events = server.named_events(MESSAGES, body()).await;
    let blocks = format!("{BLOCK} {BLOCK} {BLOCK}");
    let expected_order = format!("message_start ping {blocks} message_delta message_stop");
    assert_eq!(order(&events), expected_order);
    let (blocks, end) = assembled(&events);
    assert_eq!(settled(&blocks), expected);
    assert_eq!(end["stop_reason"], "tool_use");

    // The next turn: the message, and what the calls gave.
    let results: Vec<Value> = content[1..]
        .iter()
        .map(|call| json!({"type": "tool_result", "tool_use_id": call["id"], "content": "7"}))
        .collect();
    let mut next = body();
    next["messages"] = json!([
        body()["messages"][0],
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]);
    let mut of_chat = scripted::body();
    let mut messages = vec![
        of_chat["messages"][0].clone(),
        chat["choices"][0]["message"].clone(),
    ];
    for call in &content[1..] {
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "7"}));
    }
    of_chat["messages"] = messages.into();
    of_chat["max_tokens"] = 1.into();
    let chat = server.json(CHAT, &of_chat).await;
    let counted = server.json(COUNT, &next).await;
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
    server.done().await;
}

#[tokio::test]
async fn a_call_can_be_required_or_forbidden() {
    let server = saying("Hello").await;
    let mut body = body();
    for choice in [
        json!({"type": "any"}),
        json!({"type": "tool", "name": "add"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
    ] {
        body["tool_choice"] = choice.clone();
        let reply = server.json(MESSAGES, &body).await;
        let content = reply["content"].as_array().expect("blocks");
        let are_calls = content.iter().all(|block| block["type"] == "tool_use");
        assert!(are_calls && !content.is_empty(), "{reply}");
        assert_eq!(reply["stop_reason"], "tool_use", "{choice}");
        if choice["disable_parallel_tool_use"] == true {
            assert_eq!(content.len(), 1);
        }
    }
    server.done().await;
    let server = saying(TWO_CALLS).await;
    body["tool_choice"] = json!({"type": "none"});
    let reply = server.json(MESSAGES, &body).await;
    assert_eq!(reply["content"][0]["text"], TWO_CALLS);
    assert_eq!(reply["stop_reason"], "end_turn");
    server.done().await;
}

#[tokio::test]
async fn stop_reasons_tell_what_ended_the_text() {
    let server = saying("Hello there.").await;
    let mut body = text_body();
    body["stop_sequences"] = json!(["xyz", "there"]);
    let reply = server.json(MESSAGES, &body).await;
    assert_eq!(reply["content"][0]["text"], "Hello ");
    assert_eq!(reply["stop_reason"], "stop_sequence");
    assert_eq!(reply["stop_sequence"], "there");
    let (_, end) = assembled(&server.named_events(MESSAGES, body).await);
    let expected = json!({"stop_reason": "stop_sequence", "stop_sequence": "there"});
    assert_eq!(end, expected);
    let mut body = text_body();
    body["max_tokens"] = 5.into();
    let reply = server.json(MESSAGES, &body).await;
    assert_eq!(reply["content"][0]["text"], "Hello");
    assert_eq!(reply["stop_reason"], "max_tokens");
    // Only reads the prompt into the cache.
    body["max_tokens"] = 0.into();
    let reply = server.json(MESSAGES, &body).await;
    assert_eq!(reply["content"], json!([{"type": "text", "text": ""}]));
    assert_eq!(reply["stop_reason"], "max_tokens");
    assert_eq!(reply["usage"]["output_tokens"], 0);
    let (_, end) = assembled(&server.named_events(MESSAGES, body).await);
    assert_eq!(end["stop_reason"], "max_tokens");
    server.done().await;
}

#[tokio::test]
async fn what_a_model_thinks_is_a_block() {
    // With `thinking`, the template has begun it.
    let server = saying_as("It may rain.\n</think>\n\nYes.", TEMPLATE, thinking).await;
    let mut body = text_body();
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 50});
    let reply = server.json(MESSAGES, &body).await;
    let expected = json!([
        {"type": "thinking", "thinking": "It may rain.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]);
    assert_eq!(reply["content"], expected);
    let events = server.named_events(MESSAGES, body.clone()).await;
    let (blocks, _) = assembled(&events);
    assert_eq!(Value::from(blocks), expected);
    // The thought is signed just before its end.
    let of_thought = events.iter().filter(|(_, data)| data["index"] == 0);
    let of_thought: Vec<&Value> = of_thought.map(|(_, data)| data).collect();
    let [.., signed, ended] = of_thought[..] else {
        panic!("{events:?}")
    };
    let signature = json!({"type": "signature_delta", "signature": ""});
    assert_eq!(signed["delta"], signature);
    assert_eq!(ended["type"], "content_block_stop");
    // It may come back.
    let turn = json!({"role": "assistant", "content": expected});
    body["messages"] = json!([body["messages"][0], turn, body["messages"][0]]);
    server.json(COUNT, &body).await;
    server.done().await;

    // A model that marks no thoughts answers without, and the client is told.
    let server = saying("Hello").await;
    for (asks, is_told) in [
        (json!({"type": "enabled", "budget_tokens": 50}), true),
        (json!({"type": "adaptive"}), false),
        (json!({"type": "disabled"}), false),
    ] {
        body["thinking"] = asks;
        let response = server.post(MESSAGES, &body).await;
        assert_eq!(response.status(), 200);
        let warning = response.headers().get("x-foretoken-warning");
        let warning = warning.map(|value| value.to_str().expect("ASCII").to_owned());
        assert_eq!(warning.is_some(), is_told, "{warning:?}");
        assert!(warning.is_none_or(|text| text.contains("--reasoning-parser")));
        let reply = server.json(MESSAGES, &body).await;
        assert_eq!(reply["content"][0]["type"], "text");
    }
    server.done().await;
}

#[tokio::test]
async fn a_format_is_followed() {
    let server = saying("Hello").await;
    let schema = json!({
        "type": "object", "properties": {"answer": {"const": 42}}, "required": ["answer"],
        "additionalProperties": false,
    });
    let mut body = text_body();
    body["output_config"] = json!({"format": {"type": "json_schema", "schema": schema}});
    let reply = server.json(MESSAGES, &body).await;
    let text = reply["content"][0]["text"].as_str().expect("a text");
    let answer: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(answer, json!({"answer": 42}));
    server.done().await;
}

/// As Claude Code sends it.
#[tokio::test]
async fn agents_may_send_hints_hosted_tools_and_later_instructions() {
    let server = saying("Hello").await;
    let name = "mcp__".to_owned() + &"n".repeat(123);
    let schema = json!({"type": "object", "properties": {}});
    let mut plain = text_body();
    plain["tools"] = json!([{"name": name, "description": "Does it.", "input_schema": schema}]);
    let mut asked = plain.clone();
    let hints = [
        ("type", json!("custom")),
        ("cache_control", json!({"type": "ephemeral"})),
        ("defer_loading", json!(true)),
        ("eager_input_streaming", json!(true)),
        ("allowed_callers", json!(["direct"])),
    ];
    for (key, value) in hints {
        asked["tools"][0][key] = value;
    }
    let hosted = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8});
    asked["tools"].as_array_mut().expect("tools").push(hosted);
    asked["thinking"] = json!({"type": "adaptive"});
    asked["context_management"] =
        json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    let tokens = async |body: &Value| server.json(COUNT, body).await["input_tokens"].clone();
    assert_eq!(tokens(&asked).await, tokens(&plain).await);
    asked["messages"] = json!([
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ]);
    let reply = server.json(MESSAGES, &asked).await;
    assert_eq!(reply["content"][0]["text"], "Hello", "{reply}");
    server.done().await;
}

/// Clients count what they may have to shorten, and agents with many MCP servers have more tools than OpenAI allows.
#[tokio::test]
async fn prompts_beyond_the_context_and_hundreds_of_tools_are_counted() {
    let server = saying("Hello").await;
    let content = |length: usize| -> Value { "a".repeat(length).into() };
    let mut body = text_body();
    body["messages"][0]["content"] = content(20_000);
    let counted = server.json(COUNT, &body).await;
    let counted = counted["input_tokens"].as_u64().expect("tokens");
    assert!((20_001..20_100).contains(&counted), "{counted}");
    let mut prompt = json!({"prompt": content(20_000)});
    assert_eq!(server.json("/tokenize", &prompt).await["count"], 20_000);
    // But not all of what a body has room for.
    body["messages"][0]["content"] = content(300_000);
    let (_, message) = refused(server.post(COUNT, &body).await, 400).await;
    assert!(message.starts_with("prompt is too long: "), "{message}");
    prompt["prompt"] = content(300_000);
    assert_eq!(server.post("/tokenize", &prompt).await.status(), 400);
    let tool =
        |i: usize| json!({"name": format!("mcp__a__{i}"), "input_schema": {"type": "object"}});
    let mut body = text_body();
    body["tools"] = (0..512).map(tool).collect();
    let counted = server.json(COUNT, &body).await;
    assert!(counted["input_tokens"].as_u64() > Some(512), "{counted}");
    server.done().await;
}

/// Tools that clients run have types of Anthropic's, and no schemas.
#[tokio::test]
async fn a_shell_and_an_editor_are_called() {
    let says =
        "<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let server = saying(says).await;
    let mut asked = text_body();
    asked["tools"] = json!([
        {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000},
    ]);
    let response = server.post(MESSAGES, &asked).await;
    assert_eq!(response.status(), 200);
    assert!(response.headers().get("x-foretoken-warning").is_none());
    let reply: Value = response.json().await.expect("JSON");
    let call = json!({"type": "tool_use", "id": null, "name": "bash", "input": {"command": "ls"},
        "caller": {"type": "direct"}});
    let content = reply["content"].as_array().expect("blocks");
    assert_eq!(settled(content), [call]);
    server.done().await;

    // One that is required fits the schema.
    let server = saying("Hello").await;
    asked["max_tokens"] = 300.into();
    asked["tool_choice"] = json!({"type": "tool", "name": "str_replace_based_edit_tool"});
    let reply = server.json(MESSAGES, &asked).await;
    let block = &reply["content"][0];
    assert_eq!(block["name"], "str_replace_based_edit_tool", "{reply}");
    if reply["stop_reason"] == "tool_use" {
        let commands = ["view", "create", "str_replace", "insert"].map(Value::from);
        assert!(commands.contains(&block["input"]["command"]), "{reply}");
    }
    server.done().await;
}

/// As agents send what tools return without being asked for it.
#[tokio::test]
async fn results_may_be_images_and_failures() {
    let server = saying("Hello").await;
    let asked = |content: Value, is_error: bool| {
        let mut asked = body();
        let call = json!({"type": "tool_use", "id": "1", "name": "add", "input": {}});
        let result = json!({"type": "tool_result", "tool_use_id": "1", "is_error": is_error, "content": content});
        asked["messages"] = json!([
            asked["messages"][0],
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]);
        asked
    };
    let tokens = async |body: &Value| {
        let counted = server.json(COUNT, body).await;
        counted["input_tokens"].as_u64().expect("tokens")
    };
    // Each byte is a token.
    let fine = tokens(&asked("no file".into(), false)).await;
    let failed = tokens(&asked("no file".into(), true)).await;
    assert_eq!(failed - fine, "Error: ".len() as u64);

    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}});
    let shown = asked(json!([image]), false);
    let told = asked("[image: this model reads text only]".into(), false);
    assert_eq!(tokens(&shown).await, tokens(&told).await);
    let expected =
        "messages[2].content[0].content[0]: this model reads text only, and the image was left out";
    for path in [MESSAGES, COUNT] {
        let response = server.post(path, &shown).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.headers()["x-foretoken-warning"], expected);
        let response = server.post(path, &told).await;
        assert!(response.headers().get("x-foretoken-warning").is_none());
    }
    server.done().await;
}
