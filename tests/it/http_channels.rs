//! Answers in Harmony's channels over HTTP.

use crate::common::scripted::{CHAT, body, call, saying_as, with};
use crate::common::server::joined;
use serde_json::json;

/// The template of a model that writes in channels, as gpt-oss.
const CHANNELS: &str = "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}\n\
    {% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}<|end|>\
    {% for m in messages %}<|start|>{{ m.role }}\
    {% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>{{ m.role }}{% endif %}\
    {% for call in m.tool_calls or [] %} to=functions.{{ call.function.name }}{% endfor %}<|message|>{{ m.content }}<|end|>\
    {% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";

#[tokio::test]
async fn messages_in_channels_are_told_apart() {
    let says = "<|channel|>analysis<|message|>It may rain.<|end|><|start|>assistant<|channel|>commentary<|message|>\
        Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>\
        {\"city\": \"Zürich\"}";
    let server = saying_as(says, CHANNELS, |state| state).await;
    let message = &server.json(CHAT, &body()).await["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "It may rain.");
    assert_eq!(message["content"], "Let me look.");
    let calls = message["tool_calls"].as_array().expect("calls");
    assert_eq!(call(&calls[0]), ("get_weather", r#"{"city": "Zürich"}"#));
    let chunks = server.stream(CHAT, body()).await;
    let expected = ("Let me look.".into(), json!("tool_calls"));
    assert_eq!(joined(&chunks, 0), expected);
    let mut hidden = body();
    hidden["include_reasoning"] = false.into();
    let message = &server.json(CHAT, &hidden).await["choices"][0]["message"];
    assert!(message.get("reasoning_content").is_none());

    // The effort, and what was thought before, are shown to the model.
    let mut asked = body();
    asked["reasoning_effort"] = "high".into();
    let called = json!({"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls});
    let result = json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"});
    asked["messages"]
        .as_array_mut()
        .expect("messages")
        .extend([called, result]);
    let tokens = server.json("/tokenize", &asked).await["tokens"].clone();
    let prompt = server.json("/detokenize", &json!({"tokens": tokens})).await;
    let prompt = prompt["prompt"].as_str().expect("a prompt");
    for part in [
        "Reasoning: high",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "to=functions.get_weather",
    ] {
        assert!(prompt.contains(part), "{prompt}");
    }
    server.done().await;

    // What must be a call, or an object, is one; the model may think first.
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let object = json!({"type": "json_schema", "json_schema": {"name": "o", "schema": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]
    }}});
    let weather = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Bern\"}";
    let answer = "<|channel|>final<|message|>{\"a\": 1}";
    for (says, field, value) in [
        (weather, "tool_choice", json!("required")),
        (answer, "response_format", object),
    ] {
        for thought in ["", thought] {
            let server = saying_as(&format!("{thought}{says}"), CHANNELS, |state| state).await;
            let message =
                &server.json(CHAT, &with(field, value.clone())).await["choices"][0]["message"];
            assert_eq!(
                message["reasoning_content"] == "Hm.",
                !thought.is_empty(),
                "{message}"
            );
            match field {
                "tool_choice" => {
                    let call = call(&message["tool_calls"][0]);
                    assert_eq!(call, ("get_weather", r#"{"city": "Bern"}"#));
                }
                _ => assert_eq!(message["content"], "{\"a\": 1}"),
            }
            server.done().await;
        }
    }
}
