//! Ollama's API: the same answers as a chat's or a completion's, whole and as lines of JSON.

use crate::common::scripted::{self, CHAT, TEMPLATE, TWO_CALLS, saying, saying_as, thinking};
use crate::common::server::Server;
use reqwest::Response;
use serde_json::{Value, json};

pub const OLLAMA_CHAT: &str = "/api/chat";
pub const GENERATE: &str = "/api/generate";

pub fn chat_body() -> Value {
    json!({
        "model": "toy:latest",
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {"temperature": 0, "num_predict": 100},
    })
}

pub fn prompt_body() -> Value {
    json!({"model": "toy", "prompt": "Hi", "options": {"temperature": 0, "num_predict": 100}})
}

/// The whole answer.
pub async fn whole(server: &Server, path: &str, mut body: Value) -> Value {
    body["stream"] = false.into();
    server.json(path, &body).await
}

/// The lines of a stream, which is the default.
pub async fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let response = server.post(path, body).await;
    assert_eq!(response.status().as_u16(), 200, "{body}");
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    let text = response.text().await.expect("a whole stream");
    assert!(text.ends_with('\n'), "{text}");
    let read = |line: &str| serde_json::from_str(line).expect("JSON");
    text.lines().map(read).collect()
}

/// An answer without what differs from time to time: times, ids of calls, and how much was drafted and cached.
fn settled(answer: &Value) -> Value {
    let mut answer = answer.clone();
    let fields = answer.as_object_mut().expect("an object");
    fields.remove("speculative_decoding");
    fields.remove("prompt_eval_cached_count");
    for (key, value) in fields.iter_mut() {
        if key == "created_at" || key.ends_with("_duration") {
            assert!(!value.is_null(), "{key}");
            *value = Value::Null;
        }
    }
    let calls = answer.pointer_mut("/message/tool_calls");
    for call in calls.and_then(Value::as_array_mut).into_iter().flatten() {
        assert!(call["id"].is_string(), "{call}");
        call["id"] = Value::Null;
    }
    answer
}

/// The answer that the lines of a stream make.
fn joined(lines: &[Value]) -> Value {
    let (last, others) = lines.split_last().expect("a last line");
    assert_eq!(last["done"], true, "{last}");
    let mut answer = last.clone();
    let mut add = |path: &str, more: &Value| {
        let Some(more) = more.as_str() else { return };
        let (parent, key) = path.rsplit_once('/').expect("a path");
        let parent = answer.pointer_mut(parent).expect("an object");
        let so_far = parent[key].as_str().unwrap_or_default().to_owned();
        parent[key] = (so_far + more).into();
    };
    let (mut calls, mut logprobs) = (Vec::new(), Vec::new());
    for line in others {
        assert_eq!(line["done"], false, "{line}");
        assert!(line["done_reason"].is_null() && line["eval_count"].is_null());
        assert_eq!(line["model"], last["model"]);
        for path in [
            "/response",
            "/thinking",
            "/message/content",
            "/message/thinking",
        ] {
            add(path, line.pointer(path).unwrap_or(&Value::Null));
        }
        let more = line["message"]["tool_calls"].as_array();
        calls.extend(more.into_iter().flatten().cloned());
        let more = line["logprobs"].as_array();
        logprobs.extend(more.into_iter().flatten().cloned());
    }
    if !logprobs.is_empty() {
        answer["logprobs"] = logprobs.into();
    }
    if !calls.is_empty() {
        answer["message"]["tool_calls"] = calls.into();
    }
    answer
}

/// The whole answer, which the lines of the stream make, too.
async fn both(server: &Server, path: &str, body: &Value) -> Value {
    let answer = settled(&whole(server, path, body.clone()).await);
    let streamed = joined(&lines(server, path, body).await);
    assert_eq!(settled(&streamed), answer, "{body}");
    answer
}

/// The message of an error with `status`.
pub async fn refused(response: Response, status: u16) -> String {
    assert_eq!(response.status().as_u16(), status);
    let body: Value = response.json().await.expect("JSON");
    assert_eq!(body.as_object().map(|body| body.len()), Some(1), "{body}");
    body["error"].as_str().expect("a message").to_owned()
}

#[tokio::test]
async fn a_text_is_whole_or_comes_in_lines() {
    let server = saying("Hello there.").await;
    let answer = both(&server, OLLAMA_CHAT, &chat_body()).await;
    let chat = server
        .json(CHAT, &json!({"messages": chat_body()["messages"]}))
        .await;
    let (prompt, tokens) = (
        &chat["usage"]["prompt_tokens"],
        &chat["usage"]["completion_tokens"],
    );
    let expected = json!({
        "model": "toy:latest",
        "created_at": null,
        "message": {"role": "assistant", "content": "Hello there."},
        "done": true,
        "done_reason": "stop",
        "total_duration": null,
        "load_duration": null,
        "prompt_eval_count": prompt,
        "prompt_eval_duration": null,
        "eval_count": tokens,
        "eval_duration": null,
    });
    assert_eq!(answer, expected);
    // A prompt is a chat of one message.
    let answer = both(&server, GENERATE, &prompt_body()).await;
    assert_eq!(answer["response"], "Hello there.");
    assert_eq!(answer["model"], "toy");
    assert_eq!(answer["prompt_eval_count"], *prompt);

    let mut body = chat_body();
    body["options"]["num_predict"] = 5.into();
    let answer = both(&server, OLLAMA_CHAT, &body).await;
    assert_eq!(answer["message"]["content"], "Hello");
    assert_eq!(answer["done_reason"], "length");
    assert_eq!(answer["eval_count"], 5);
    body["options"] =
        json!({"temperature": 0, "num_predict": -1, "stop": ["there"], "num_ctx": 8192});
    let answer = both(&server, OLLAMA_CHAT, &body).await;
    assert_eq!(answer["message"]["content"], "Hello ");
    assert_eq!(answer["done_reason"], "stop");
    let times = whole(&server, OLLAMA_CHAT, chat_body()).await;
    let time = |key: &str| times[key].as_u64().expect("nanoseconds");
    let parts = time("prompt_eval_duration") + time("eval_duration");
    assert_eq!((parts, time("load_duration")), (time("total_duration"), 0));
    assert!(time("prompt_eval_duration") > 0 && time("eval_duration") > 0);
    // The prompt was cached by now, as it was for the chat.
    let cached = &chat["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(times["prompt_eval_cached_count"], *cached);
    assert!(cached.as_u64() > Some(0), "{chat}");
    server.done().await;
}

#[tokio::test]
async fn calls_come_when_they_are_complete_and_go_back_as_history() {
    let server = saying(TWO_CALLS).await;
    let of_chat = scripted::body();
    let mut body = chat_body();
    body["options"]["num_predict"] = 300.into();
    body["messages"] = of_chat["messages"].clone();
    body["tools"] = of_chat["tools"].clone();
    let answer = both(&server, OLLAMA_CHAT, &body).await;
    let call = |index: usize, name: &str, arguments: Value| {
        let function = json!({"index": index, "name": name, "arguments": arguments});
        json!({"id": null, "function": function})
    };
    let calls = json!([
        call(0, "get_weather", json!({"city": "Zürich"})),
        call(1, "add", json!({"a": 1, "b": 2})),
    ]);
    assert_eq!(answer["message"]["content"], "Let me look.");
    assert_eq!(answer["message"]["tool_calls"], calls);
    assert_eq!(answer["done_reason"], "stop");
    let chat = server.json(CHAT, &of_chat).await;
    assert_eq!(answer["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
    let mut one = body.clone();
    one["parallel_tool_calls"] = false.into();
    let answer = both(&server, OLLAMA_CHAT, &one).await;
    assert_eq!(answer["message"]["tool_calls"], json!([calls[0]]));
    let mut asked = body.clone();
    asked["tool_choice"] = "none".into();
    let answer = both(&server, OLLAMA_CHAT, &asked).await;
    assert!(answer["message"].get("tool_calls").is_none(), "{answer}");
    asked["tool_choice"] = json!({"type": "function", "name": "f"});
    let message = refused(server.post(OLLAMA_CHAT, &asked).await, 400).await;
    assert!(message.starts_with("tool_choice.name must"), "{message}");

    // The next turn, as clients send it: without ids.
    let calls = json!([
        {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}},
        {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
    ]);
    let turns = body["messages"].as_array_mut().expect("messages");
    turns.push(json!({"role": "assistant", "content": "Let me look.", "tool_calls": calls}));
    turns.push(json!({"role": "tool", "tool_name": "add", "content": "3"}));
    body["options"]["num_predict"] = 1.into();
    let answer = whole(&server, OLLAMA_CHAT, body).await;
    let mut next = of_chat;
    let turns = next["messages"].as_array_mut().expect("messages");
    let message = chat["choices"][0]["message"].clone();
    turns.push(message.clone());
    turns.push(
        json!({"role": "tool", "tool_call_id": message["tool_calls"][1]["id"], "content": "3"}),
    );
    next["max_tokens"] = 1.into();
    let chat = server.json(CHAT, &next).await;
    assert_eq!(answer["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
    server.done().await;
}

#[tokio::test]
async fn what_a_model_thinks_stands_beside_its_text() {
    // With `think`, the template has begun it.
    let server = saying_as("It may rain.\n</think>\n\nYes.", TEMPLATE, thinking).await;
    for think in [json!(true), json!("low"), json!("max")] {
        let mut body = chat_body();
        body["think"] = think.clone();
        let answer = both(&server, OLLAMA_CHAT, &body).await;
        let expected = json!({"role": "assistant", "content": "Yes.", "thinking": "It may rain."});
        assert_eq!(answer["message"], expected, "{think}");
        body["include_reasoning"] = false.into();
        let answer = both(&server, OLLAMA_CHAT, &body).await;
        let hidden = json!({"role": "assistant", "content": "Yes."});
        assert_eq!(answer["message"], hidden, "{think}");
        let mut body = prompt_body();
        body["think"] = think;
        let answer = both(&server, GENERATE, &body).await;
        assert_eq!(answer["response"], "Yes.");
        assert_eq!(answer["thinking"], "It may rain.");
        body["include_reasoning"] = false.into();
        let answer = both(&server, GENERATE, &body).await;
        assert_eq!(answer["response"], json!("Yes."));
        assert_eq!(answer.get("thinking"), None);
    }
    let mut body = chat_body();
    body["think"] = true.into();
    let turn = json!({"role": "assistant", "content": "Yes.", "thinking": "It may rain."});
    body["messages"] = json!([body["messages"][0], turn, body["messages"][0]]);
    whole(&server, OLLAMA_CHAT, body.clone()).await;
    server.done().await;

    let server = saying("Hello").await;
    for (think, says) in [
        (json!(true), "--reasoning-parser"),
        (json!("most"), "\"max\""),
    ] {
        body["think"] = think;
        let message = refused(server.post(OLLAMA_CHAT, &body).await, 400).await;
        assert!(
            message.starts_with("think") && message.contains(says),
            "{message}"
        );
    }
    body["think"] = false.into();
    let answer = whole(&server, OLLAMA_CHAT, body).await;
    assert_eq!(answer["message"]["content"], "Hello");
    server.done().await;
}

#[tokio::test]
async fn a_format_is_followed() {
    let server = saying("Hello").await;
    let schema = json!({
        "type": "object", "properties": {"answer": {"const": 42}}, "required": ["answer"],
        "additionalProperties": false,
    });
    let check = async |server: &Server, path: &str, mut body: Value| {
        body["format"] = schema.clone();
        let answer = both(server, path, &body).await;
        let text = answer.pointer("/message/content");
        let text = text.or(answer.get("response")).and_then(Value::as_str);
        let answer: Value = serde_json::from_str(text.expect("a text")).expect("JSON");
        assert_eq!(answer, json!({"answer": 42}));
    };
    check(&server, OLLAMA_CHAT, chat_body()).await;
    check(&server, GENERATE, prompt_body()).await;
    let mut body = chat_body();
    body["format"] = "json".into();
    body["options"]["num_predict"] = 1.into();
    let answer = whole(&server, OLLAMA_CHAT, body).await;
    assert_eq!(answer["message"]["content"], "{");
    server.done().await;
    // The scripted model answers prompts of one length.
    let server = saying("Hello").await;
    let mut raw = prompt_body();
    raw["raw"] = true.into();
    check(&server, GENERATE, raw).await;
    server.done().await;
}

/// As Prism sends them, a library for Laravel.
#[tokio::test]
async fn options_may_repeat_fields() {
    let server = saying("Hello there.").await;
    let mut body = chat_body();
    body["think"] = false.into();
    let expected = whole(&server, OLLAMA_CHAT, body.clone()).await;
    body["keep_alive"] = "5m".into();
    body["options"]["keep_alive"] = "5m".into();
    body["options"]["thinking"] = false.into();
    let answer = whole(&server, OLLAMA_CHAT, body.clone()).await;
    assert_eq!(answer["message"], expected["message"]);
    body["options"]["thinking"] = true.into();
    let message = refused(server.post(OLLAMA_CHAT, &body).await, 400).await;
    assert!(message.starts_with("options.thinking"), "{message}");
    server.done().await;
}

/// As ollama-ai-provider-v2 sends it, a provider of the AI SDK that Cline has.
#[tokio::test]
async fn a_chat_may_have_max_output_tokens() {
    let server = saying("Hello there.").await;
    let mut body = json!({
        "model": "toy", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "think": false,
        "max_output_tokens": 4,
    });
    let answer = whole(&server, OLLAMA_CHAT, body.clone()).await;
    assert_eq!(answer["message"]["content"], "Hell");
    assert_eq!(answer["done_reason"], "length");
    body["options"] = json!({"num_predict": 5});
    let answer = whole(&server, OLLAMA_CHAT, body).await;
    assert_eq!(answer["message"]["content"], "Hello");
    server.done().await;
}

#[tokio::test]
async fn a_raw_prompt_is_a_completion() {
    let server = saying("Hello there.").await;
    let completion = json!({"prompt": "Hi", "max_tokens": 100, "temperature": 0});
    let completion = server.json("/v1/completions", &completion).await;
    let mut body = prompt_body();
    body["raw"] = true.into();
    body["system"] = "".into();
    body["context"] = json!([]);
    let answer = both(&server, GENERATE, &body).await;
    assert_eq!(answer["response"], completion["choices"][0]["text"]);
    assert_eq!(
        answer["prompt_eval_count"],
        completion["usage"]["prompt_tokens"]
    );
    // As Tabby asks for it.
    let mut bare = prompt_body();
    bare["template"] = "{{ .Prompt }}".into();
    let same = both(&server, GENERATE, &bare).await;
    assert_eq!(same["response"], answer["response"]);
    assert_eq!(same["prompt_eval_count"], answer["prompt_eval_count"]);
    // It may be longer than a completion is by default.
    body["options"] = json!({"temperature": 0});
    assert_eq!(
        both(&server, GENERATE, &body).await["response"],
        answer["response"]
    );
    // A template knows instructions.
    let mut body = prompt_body();
    body["system"] = "Be brief.".into();
    let answer = both(&server, GENERATE, &body).await;
    let turns = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]);
    let chat = server
        .json(CHAT, &json!({"messages": turns, "max_tokens": 1}))
        .await;
    assert_eq!(answer["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
    server.done().await;
}

#[tokio::test]
async fn logprobs_are_those_of_a_chat() {
    let server = saying("Hello there.").await;
    let asked = json!({
        "messages": chat_body()["messages"], "temperature": 0, "logprobs": true, "top_logprobs": 2,
    });
    let chat = server.json(CHAT, &asked).await;
    let expected = &chat["choices"][0]["logprobs"]["content"];
    assert_eq!(
        expected[0]["top_logprobs"].as_array().map(Vec::len),
        Some(2)
    );
    for (path, mut body) in [(OLLAMA_CHAT, chat_body()), (GENERATE, prompt_body())] {
        body["logprobs"] = true.into();
        body["top_logprobs"] = 2.into();
        let answer = both(&server, path, &body).await;
        assert_eq!(answer["logprobs"], *expected, "{path}");
    }
    server.done().await;
    let server = saying("Hello there.").await;
    let mut raw = prompt_body();
    raw["raw"] = true.into();
    raw["logprobs"] = true.into();
    let answer = both(&server, GENERATE, &raw).await;
    let count = answer["logprobs"].as_array().map(Vec::len);
    assert_eq!(count.map(Value::from), Some(answer["eval_count"].clone()));
    raw["top_logprobs"] = 10_000.into();
    let message = refused(server.post(GENERATE, &raw).await, 400).await;
    assert!(
        message.starts_with("top_logprobs must be between"),
        "{message}"
    );
    server.done().await;
}

#[tokio::test]
async fn an_empty_request_asks_whether_the_model_is_loaded() {
    let server = saying("Hello").await;
    for (path, key, empty) in [
        (OLLAMA_CHAT, "messages", json!([])),
        (OLLAMA_CHAT, "messages", Value::Null),
        (GENERATE, "prompt", json!("")),
        (GENERATE, "prompt", Value::Null),
    ] {
        for (keep_alive, reason) in [(json!("5m"), "load"), (json!(0), "unload")] {
            let body = json!({"model": "toy", key: empty, "keep_alive": keep_alive});
            let answer = server.json(path, &body).await;
            assert_eq!(answer["done"], true);
            assert_eq!(answer["done_reason"], reason, "{path} {body}");
            let text = answer
                .pointer("/message/content")
                .or(answer.get("response"));
            assert_eq!(text, Some(&json!("")), "{answer}");
        }
        let body = json!({"model": "other"});
        let message = refused(server.post(path, &body).await, 404).await;
        assert!(message.contains("`other`"), "{message}");
    }
    server.done().await;
}
