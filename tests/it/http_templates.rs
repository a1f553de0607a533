//! Chats for templates that know less than the chat has, and calls of models that do not end their thoughts.

use crate::common::scripted::{
    CHAT, TEMPLATE, body, call, saying_as, thinking, thought, tool, with,
};
use crate::common::server::joined;
use serde_json::{Value, json};

/// As Gemma 2 and Mistral 0.2: user and assistant take turns, and nobody else speaks.
const TURNS: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\\n' }}";

/// What stands between the marks of each message of the prompt.
async fn turns(messages: Value, tools: Value) -> Vec<String> {
    let server = saying_as("Yes.", TURNS, |state| state).await;
    let asked = json!({"messages": messages, "tools": tools});
    let tokens = server.json("/tokenize", &asked).await["tokens"].clone();
    let prompt = server.json("/detokenize", &json!({"tokens": tokens})).await;
    let prompt = prompt["prompt"].as_str().expect("a prompt");
    let turns = prompt.split("<|im_start|>").skip(1);
    let turns = turns.map(|turn| turn.trim_end_matches("<|im_end|>\n").to_owned());
    let turns = turns.collect();
    assert_eq!(
        server.json(CHAT, &asked).await["choices"][0]["message"]["content"],
        "Yes."
    );
    server.done().await;
    turns
}

fn call_of(id: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}})
}

const CALL: &str = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

#[tokio::test]
async fn roles_take_turns_after_results() {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": "", "tool_calls": [call_of("1"), call_of("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "night"},
        {"role": "user", "content": "And?"},
    ]);
    let turns = turns(messages, json!([tool("now", json!({}))])).await;
    let [first, second, third, last] = turns.as_slice() else {
        panic!("{turns:?}");
    };
    assert!(
        first.starts_with("user\nBe brief.\n\nYou can call")
            && first.contains("{\"name\": \"now\",")
            && first.ends_with("\n\nWhen?"),
        "{first}"
    );
    assert_eq!(second, &format!("assistant\nI look.\n{CALL}\n{CALL}"));
    let results =
        "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>";
    assert_eq!(third, &format!("user\n{results}\nAnd?"));
    assert_eq!(last, "assistant\n");
}

/// As Claude Code sends it.
#[tokio::test]
async fn a_text_may_follow_a_result_in_a_turn() {
    let server = saying_as("Yes.", TURNS, |state| state).await;
    let asked = json!({
        "model": "toy", "max_tokens": 20, "system": "Be brief.",
        "tools": [{"name": "now", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "now", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "noon"}, {"type": "text", "text": "And?"}]},
        ],
    });
    let reply = server.json("/v1/messages", &asked).await;
    assert_eq!(reply["content"], json!([{"type": "text", "text": "Yes."}]));
    server.done().await;
}

const THOUGHT: &str =
    "<think>\nI look.\n<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>";

#[tokio::test]
async fn a_call_ends_a_thought_that_does_not_end() {
    let server = saying_as(THOUGHT, TEMPLATE, thinking).await;
    let choice = server.json(CHAT, &body()).await["choices"][0].clone();
    let message = &choice["message"];
    assert_eq!(message["reasoning_content"], "I look.");
    assert_eq!(message["content"], Value::Null);
    assert_eq!(call(&message["tool_calls"][0]), ("add", r#"{"a": 1}"#));
    assert_eq!(choice["finish_reason"], "tool_calls");

    let chunks = server.stream(CHAT, body()).await;
    assert_eq!(thought(&chunks), "I look.");
    let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    let calls = deltas.flat_map(|delta| delta["tool_calls"].as_array().into_iter().flatten());
    let arguments: String = calls
        .filter_map(|call| call["function"]["arguments"].as_str())
        .collect();
    assert_eq!(arguments, r#"{"a": 1}"#);
    assert_eq!(joined(&chunks, 0), (String::new(), json!("tool_calls")));
    server.done().await;
}

#[tokio::test]
async fn a_call_that_a_thought_mentions_is_none() {
    let server = saying_as(
        &format!("{THOUGHT} or not.\n</think>\n\nNo."),
        TEMPLATE,
        thinking,
    )
    .await;
    let mentioned = THOUGHT.trim_start_matches("<think>\n").to_owned() + " or not.";
    let choice = server.json(CHAT, &body()).await["choices"][0].clone();
    assert_eq!(choice["message"]["reasoning_content"], mentioned);
    assert_eq!(choice["message"]["content"], "No.");
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    assert_eq!(choice["finish_reason"], "stop");

    let chunks = server.stream(CHAT, body()).await;
    assert_eq!(thought(&chunks), mentioned);
    assert_eq!(joined(&chunks, 0), ("No.".into(), json!("stop")));
    server.done().await;
}

/// A grammar rules the calls after the thought, not a text within it, which is cut off here.
#[tokio::test]
async fn a_call_in_a_thought_is_none_where_a_grammar_rules_calls() {
    let server = saying_as(&format!("{THOUGHT} and so on"), TEMPLATE, thinking).await;
    let mut asked = with("tool_choice", json!("required"));
    asked["max_tokens"] = (THOUGHT.len() - "<think>".len() + 4).into();
    let choice = server.json(CHAT, &asked).await["choices"][0].clone();
    let thought = choice["message"]["reasoning_content"]
        .as_str()
        .expect("reasoning");
    assert!(thought.contains("</tool_call> an"), "{choice}");
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    assert_eq!(choice["finish_reason"], "length");
    server.done().await;
}
