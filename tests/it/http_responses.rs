//! `/v1/responses`: the same answers as a chat's, as items and events.

use crate::common::scripted::{self, CHAT, TEMPLATE, TWO_CALLS, saying, saying_as, thinking};
use serde_json::{Value, json};

pub const RESPONSES: &str = "/v1/responses";

/// A chat's tool as this API has it.
fn tool(of_chat: &Value) -> Value {
    let mut tool = of_chat["function"].clone();
    tool["type"] = "function".into();
    tool
}

/// The request of `scripted::body`.
fn body() -> Value {
    let chat = scripted::body();
    let tools = chat["tools"].as_array().expect("tools");
    json!({
        "input": chat["messages"][0]["content"],
        "tools": tools.iter().map(tool).collect::<Vec<_>>(),
        "temperature": 0,
    })
}

pub fn text_body() -> Value {
    json!({"input": "Hi", "temperature": 0})
}

fn chat_body(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "temperature": 0})
}

/// The deltas of the events with this name, joined.
fn deltas(events: &[(String, Value)], name: &str) -> String {
    let events = events.iter().filter(|(other, _)| other == name);
    events
        .map(|(_, data)| data["delta"].as_str().expect("a delta"))
        .collect()
}

/// The names of events, without repetitions of deltas.
pub fn order(events: &[(String, Value)]) -> String {
    let names = events
        .iter()
        .map(|(name, _)| name.strip_prefix("response."));
    let mut names: Vec<&str> = names.map(|name| name.expect("a prefix")).collect();
    names.dedup();
    names.join(" ")
}

/// The events of a message, and of a call.
const TEXT: &str = "output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done";
const CALL: &str =
    "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done";

/// A response without what differs between two of the same request.
fn settled(response: &Value) -> Value {
    let mut response = response.clone();
    for key in ["id", "created_at", "completed_at", "usage"] {
        assert!(response.get(key).is_some(), "{key}: {response}");
        response[key] = Value::Null;
    }
    for item in response["output"].as_array_mut().expect("items") {
        for key in ["id", "call_id"] {
            if item.get(key).is_some() {
                item[key] = Value::Null;
            }
        }
    }
    response
}

#[tokio::test]
async fn a_text_is_a_message_with_one_part() {
    let server = saying("Hello there.").await;
    let reply = server.json(RESPONSES, &text_body()).await;
    assert_eq!(reply["object"], "response");
    assert_eq!(reply["status"], "completed");
    assert_eq!(reply["model"], "toy");
    assert_eq!(reply["store"], true);
    let id = reply["id"].as_str().expect("an id");
    assert!(id.starts_with("resp_"), "{id}");
    let items = reply["output"].as_array().expect("items");
    assert_eq!(items.len(), 1);
    let part =
        json!({"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []});
    let expected = json!({
        "id": items[0]["id"], "type": "message", "role": "assistant", "status": "completed", "content": [part],
    });
    assert_eq!(items[0], expected);

    let chat = server.json(CHAT, &chat_body("Hi")).await;
    assert_eq!(chat["choices"][0]["message"]["content"], "Hello there.");
    let usage = &reply["usage"];
    assert_eq!(usage["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(usage["output_tokens"], chat["usage"]["completion_tokens"]);
    assert_eq!(usage["total_tokens"], chat["usage"]["total_tokens"]);
    let wanted = json!({"reasoning_tokens": 0});
    assert_eq!(usage["output_tokens_details"], wanted);
    let read = json!({"cached_tokens": 0, "cache_write_tokens": 0});
    assert_eq!(usage["input_tokens_details"], read);
    assert!(usage["speculative_decoding"]["num_drafts"].is_u64());

    let events = server.named_events(RESPONSES, text_body()).await;
    let expected = format!("created in_progress {TEXT} completed");
    assert_eq!(order(&events), expected);
    for (i, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], i);
    }
    let want = "Hello there.";
    assert_eq!(deltas(&events, "response.output_text.delta"), want);
    let (_, created) = &events[0];
    assert_eq!(created["response"]["status"], "in_progress");
    assert_eq!(created["response"]["output"], json!([]));
    let added = &events[2].1["item"];
    assert_eq!(added["status"], "in_progress");
    assert_eq!(added["content"], json!([]));
    for (_, data) in &events[3..events.len() - 2] {
        assert_eq!(data["item_id"], added["id"]);
        assert_eq!(data["output_index"], 0);
        assert_eq!(data["content_index"], 0);
    }
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(last["id"], created["response"]["id"]);
    assert_eq!(settled(last), settled(&reply));
    assert_eq!(events[events.len() - 2].1["item"], last["output"][0]);
    // The prompt was cached by now.
    let tokens = |usage: &Value| usage["total_tokens"].clone();
    assert_eq!(tokens(&last["usage"]), tokens(usage));
    server.done().await;
}

#[tokio::test]
async fn calls_are_items_and_come_back_as_input() {
    let server = saying(TWO_CALLS).await;
    let reply = server.json(RESPONSES, &body()).await;
    let items = reply["output"].as_array().expect("items");
    let kinds: Vec<_> = items.iter().map(|item| item["type"].as_str()).collect();
    assert_eq!(
        kinds,
        [
            Some("message"),
            Some("function_call"),
            Some("function_call")
        ]
    );
    assert_eq!(items[0]["content"][0]["text"], "Let me look.");
    let call = |item: &Value| (item["name"].clone(), item["arguments"].clone());
    assert_eq!(
        call(&items[1]),
        (json!("get_weather"), json!(r#"{"city": "Zürich"}"#))
    );
    assert_eq!(
        call(&items[2]),
        (json!("add"), json!(r#"{"a": 1, "b": 2}"#))
    );
    let chat = server.json(CHAT, &scripted::body()).await;
    assert_eq!(
        reply["usage"]["input_tokens"],
        chat["usage"]["prompt_tokens"]
    );
    assert_eq!(reply["tools"], body()["tools"]);

    let events = server.named_events(RESPONSES, body()).await;
    let expected = format!("created in_progress {TEXT} {CALL} {CALL} completed");
    assert_eq!(order(&events), expected);
    let arguments = deltas(&events, "response.function_call_arguments.delta");
    assert_eq!(arguments, r#"{"city": "Zürich"}{"a": 1, "b": 2}"#);
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(settled(last), settled(&reply));

    // The next turn: the items, and what the calls gave.
    let mut input = vec![json!({"role": "user", "content": body()["input"]})];
    input.extend(items.iter().cloned());
    for item in &items[1..] {
        input.push(
            json!({"type": "function_call_output", "call_id": item["call_id"], "output": "7"}),
        );
    }
    let outputs = input[1 + items.len()..].to_vec();
    let mut next = body();
    next["input"] = input.into();
    next["max_output_tokens"] = 1.into();
    let mut more = next.clone();
    more["input"] = outputs.into();
    more["previous_response_id"] = reply["id"].clone();
    let reply = server.json(RESPONSES, &next).await;
    let continued = server.json(RESPONSES, &more).await;
    let tokens = &continued["usage"]["input_tokens"];
    assert_eq!(tokens, &reply["usage"]["input_tokens"]);
    let mut next = scripted::body();
    let mut messages = vec![
        next["messages"][0].clone(),
        chat["choices"][0]["message"].clone(),
    ];
    for item in &items[1..] {
        messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": "7"}));
    }
    next["messages"] = messages.into();
    next["max_tokens"] = 1.into();
    let chat = server.json(CHAT, &next).await;
    assert_eq!(
        reply["usage"]["input_tokens"],
        chat["usage"]["prompt_tokens"]
    );
    server.done().await;
}

#[tokio::test]
async fn a_call_can_be_required() {
    let server = saying("Hello").await;
    let mut body = body();
    for choice in [
        json!("required"),
        json!({"type": "function", "name": "add"}),
    ] {
        body["tool_choice"] = choice.clone();
        body["max_output_tokens"] = 200.into();
        let reply = server.json(RESPONSES, &body).await;
        let items = reply["output"].as_array().expect("items");
        let are_calls = items.iter().all(|item| item["type"] == "function_call");
        assert!(are_calls && !items.is_empty(), "{reply}");
        assert_eq!(reply["tool_choice"], choice);
    }
    body["tool_choice"] = json!({"type": "function", "name": "rm"});
    let refused = server.refused(RESPONSES, &body).await;
    assert_eq!(refused["param"], "tool_choice.name");
    server.done().await;
}

#[tokio::test]
async fn what_a_model_thinks_is_an_item() {
    let server = saying_as(
        "<think>\nIt may rain.\n</think>\n\nYes.",
        TEMPLATE,
        thinking,
    )
    .await;
    let reply = server.json(RESPONSES, &text_body()).await;
    let items = reply["output"].as_array().expect("items");
    assert_eq!((items.len(), &items[0]["type"]), (2, &json!("reasoning")));
    let part = json!([{"type": "reasoning_text", "text": "It may rain."}]);
    assert_eq!(items[0]["content"], part);
    assert_eq!(items[0]["summary"], json!([]));
    assert_eq!(items[1]["content"][0]["text"], "Yes.");
    // The special token, the text, which is one token a byte, and the end, in whose last byte it is over.
    let thought = "\nIt may rain.\n</think>".len() + 1;
    assert_eq!(
        reply["usage"]["output_tokens_details"]["reasoning_tokens"],
        thought
    );

    let events = server.named_events(RESPONSES, text_body()).await;
    let thought = TEXT.replace("output_text", "reasoning_text");
    let expected = format!("created in_progress {thought} {TEXT} completed");
    assert_eq!(order(&events), expected);
    let wanted = "It may rain.";
    assert_eq!(deltas(&events, "response.reasoning_text.delta"), wanted);
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(settled(last), settled(&reply));
    // An earlier turn's reasoning is accepted.
    let mut next = text_body();
    let user = json!({"role": "user", "content": "Hi"});
    next["input"] = json!([user, items[0], items[1], user]);
    let whole = server.json(RESPONSES, &next).await;
    let mut next = text_body();
    next["previous_response_id"] = reply["id"].clone();
    let continued = server.json(RESPONSES, &next).await;
    let tokens = &continued["usage"]["input_tokens"];
    assert_eq!(tokens, &whole["usage"]["input_tokens"]);
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
    let format = json!({"type": "json_schema", "name": "it", "strict": true, "schema": schema});
    body["text"] = json!({"format": format});
    let reply = server.json(RESPONSES, &body).await;
    let text = reply["output"][0]["content"][0]["text"].as_str();
    let answer: Value = serde_json::from_str(text.expect("a text")).expect("JSON");
    assert_eq!(answer, json!({"answer": 42}));
    assert_eq!(reply["text"]["format"], format);
    let mut chat = chat_body("Hi");
    // Null is nothing, whatever it is called.
    let of_chat = json!({"name": "it", "schema": schema, "unknown": null});
    chat["response_format"] = json!({"type": "json_schema", "json_schema": of_chat});
    let chat = server.json(CHAT, &chat).await;
    assert_eq!(text, chat["choices"][0]["message"]["content"].as_str());

    body["text"]["format"]["schema"] = json!({"type": "nothing"});
    let refused = server.refused(RESPONSES, &body).await;
    assert_eq!(refused["param"], "text.format.schema");
    body["text"] = json!({"format": {"type": "text"}});
    server.json(RESPONSES, &body).await;
    server.done().await;
}

#[tokio::test]
async fn a_response_that_is_cut_off_is_incomplete() {
    let server = saying("Hello there.").await;
    let mut body = text_body();
    body["max_output_tokens"] = 5.into();
    let reply = server.json(RESPONSES, &body).await;
    assert_eq!(reply["status"], "incomplete");
    let expected = json!({"reason": "max_output_tokens"});
    assert_eq!(reply["incomplete_details"], expected);
    let item = &reply["output"][0];
    assert_eq!(item["status"], "incomplete");
    assert_eq!(item["content"][0]["text"], "Hello");
    let events = server.named_events(RESPONSES, body).await;
    let (name, data) = &events[events.len() - 1];
    assert_eq!(name, "response.incomplete");
    assert_eq!(data["response"]["output"][0]["status"], "incomplete");
    // The end at once is a message, too.
    let mut stopped = text_body();
    stopped["stop"] = "H".into();
    let reply = server.json(RESPONSES, &stopped).await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "");
    assert_eq!(reply["status"], "completed");
    server.done().await;
}

#[tokio::test]
async fn fields_of_chats_work_and_the_request_is_repeated() {
    let server = saying("Hello there.").await;
    let mut body = text_body();
    for (key, value) in [
        ("seed", json!(7)),
        ("top_k", json!(5)),
        ("min_p", json!(0.1)),
        ("spec_length", json!(0)),
        ("stop", json!(["there"])),
        ("instructions", json!("Be brief.")),
        ("metadata", json!({"a": "b"})),
        ("store", json!(false)),
        ("truncation", json!("disabled")),
        ("include", json!(["reasoning.encrypted_content"])),
        (
            "reasoning",
            json!({"effort": "low", "summary": "auto", "mode": "standard"}),
        ),
        ("user", json!("me")),
        ("safety_identifier", json!("a hash")),
        ("prompt_cache_key", json!("talks")),
        ("service_tier", json!("auto")),
        ("max_tool_calls", json!(3)),
        ("presence_penalty", json!(0.5)),
        ("previous_response_id", Value::Null),
        ("parallel_tool_calls", json!(false)),
        ("top_p", json!(0.5)),
    ] {
        body[key] = value;
    }
    let reply = server.json(RESPONSES, &body).await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "Hello ");
    assert!(reply["usage"].get("speculative_decoding").is_none());
    let keys = "instructions metadata parallel_tool_calls top_p truncation user safety_identifier prompt_cache_key \
        max_tool_calls presence_penalty";
    for key in keys.split(' ') {
        assert_eq!(reply[key], body[key], "{key}");
    }
    let shown = json!({"effort": "low", "summary": "auto"});
    assert_eq!(reply["reasoning"], shown);
    assert_eq!(reply["service_tier"], "default");
    server.done().await;
}

/// What the specification of Open Responses requires, also of a response that has just begun.
#[tokio::test]
async fn a_response_has_all_required_fields() {
    let server = saying("Hello there.").await;
    let events = server.named_events(RESPONSES, text_body()).await;
    let keys = "id object created_at completed_at status incomplete_details model previous_response_id instructions \
        output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty \
        top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier \
        metadata safety_identifier prompt_cache_key";
    for (_, data) in [&events[0], &events[events.len() - 1]] {
        let response = data["response"].as_object().expect("a response");
        for key in keys.split(' ') {
            assert!(response.contains_key(key), "{key}: {data}");
        }
    }
    server.done().await;
}
