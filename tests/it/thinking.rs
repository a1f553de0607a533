//! How much a model thinks, over HTTP: a thought that has had its tokens is closed, with and without drafts.

use crate::common::scripted::{
    CHAT, PLAIN, TEMPLATE, body, call, saying_as, thinking, thought, tool, with,
};
use crate::common::server::{Server, joined};
use serde_json::{Value, json};

/// What the model would say where the mark is forced, each byte of which is a token.
const UNSAID: &str = "or else.";
/// Tokens of the mark.
const MARK: usize = "</think>".len();

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A chat without tools, whose template opens a thought if it is told to.
fn chat(opened: bool) -> Value {
    let mut chat = json!({
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "temperature": 0,
        "max_tokens": 200,
    });
    if opened {
        chat["chat_template_kwargs"] = json!({"enable_thinking": true});
    }
    chat
}

/// The choice of the answer to `asked`, and its tokens. It is the same without drafts, and as a stream.
async fn answer(server: &Server, asked: &Value) -> (Value, Value) {
    let whole = server.json(CHAT, asked).await;
    let choice = whole["choices"][0].clone();
    let mut plain = asked.clone();
    plain["spec_length"] = 0.into();
    let undrafted = server.json(CHAT, &plain).await;
    let message = |choice: &Value| {
        let mut message = choice["message"].clone();
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            call["id"] = Value::Null;
        }
        (message, choice["finish_reason"].clone())
    };
    assert_eq!(message(&choice), message(&undrafted["choices"][0]));
    let usage = &whole["usage"];
    for key in ["completion_tokens", "completion_tokens_details"] {
        let reasoning = |usage: &Value| match key {
            "completion_tokens" => usage[key].clone(),
            _ => usage[key]["reasoning_tokens"].clone(),
        };
        assert_eq!(reasoning(usage), reasoning(&undrafted["usage"]));
    }
    let chunks = server.stream(CHAT, asked.clone()).await;
    let reasoning = choice["message"]["reasoning_content"].as_str();
    assert_eq!(thought(&chunks), reasoning.unwrap_or_default());
    let content = choice["message"]["content"].as_str();
    assert_eq!(joined(&chunks, 0).0, content.unwrap_or_default());
    (choice, usage.clone())
}

#[tokio::test]
async fn a_thought_is_closed_after_its_tokens() {
    let (yes, tail) = (format!("{UNSAID}\n\nYes."), "\n\nYes.".len() + 1);
    for (says, opened, budget, reasoning, tokens) in [
        (format!("Hm, it{yes}"), true, 6, json!("Hm, it"), 6 + MARK),
        // The model opens it, and its mark does not count.
        (
            format!("<think>Hm, it{yes}"),
            false,
            6,
            json!("Hm, it"),
            1 + 6 + MARK,
        ),
        (yes.clone(), true, 0, Value::Null, MARK),
        (format!("<think>{yes}"), false, 0, Value::Null, 1 + MARK),
        // The model closes it earlier.
        (
            "Hm.</think>\n\nYes.".into(),
            true,
            4,
            json!("Hm."),
            3 + MARK,
        ),
        // No character is cut.
        (format!("Hm é{yes}"), true, 4, json!("Hm é"), 5 + MARK),
        // A text that does not begin with a thought has none.
        ("Yes.".into(), false, 2, Value::Null, 0),
    ] {
        let server = saying_as(&says, TEMPLATE, thinking).await;
        let mut asked = chat(opened);
        asked["thinking_token_budget"] = budget.into();
        let (choice, usage) = answer(&server, &asked).await;
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"], reasoning, "{says:?}");
        assert_eq!(message["content"], "Yes.", "{says:?}");
        assert_eq!(choice["finish_reason"], "stop");
        let counted = &usage["completion_tokens_details"]["reasoning_tokens"];
        assert_eq!(counted, tokens, "{says:?}");
        if tokens > 0 {
            assert_eq!(usage["completion_tokens"], tokens + tail);
        }
        server.done().await;
    }
}

#[tokio::test]
async fn max_tokens_count_the_mark() {
    let server = saying_as(&format!("Hm, it{UNSAID}Yes."), TEMPLATE, thinking).await;
    let mut asked = chat(true);
    asked["thinking_token_budget"] = 6.into();
    for (max, content) in [(6 + MARK + 2, json!("Ye")), (6 + MARK, Value::Null)] {
        asked["max_tokens"] = max.into();
        let (choice, usage) = answer(&server, &asked).await;
        assert_eq!(choice["message"]["reasoning_content"], "Hm, it");
        assert_eq!(
            choice["message"]["content"].as_str().unwrap_or_default(),
            content.as_str().unwrap_or_default()
        );
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(usage["completion_tokens"], max);
    }
    server.done().await;
}

/// A grammar begins after the thought, whoever closes it.
#[tokio::test]
async fn a_grammar_follows_a_closed_thought() {
    let colour = json!({"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": ["red", "green"]}}});
    for (says, opened) in [
        ("Hm, it may be so, and so on and on.", true),
        ("<think>Hm, it may be so, and so on and on.", false),
    ] {
        for (key, value) in [
            ("tool_choice", json!("required")),
            ("response_format", colour.clone()),
        ] {
            let server = saying_as(says, TEMPLATE, thinking).await;
            let mut asked = chat(opened);
            asked["thinking_token_budget"] = 6.into();
            asked[key] = value;
            if key == "tool_choice" {
                let sides = json!({"sides": {"enum": ["six", "ten"]}});
                asked["tools"] = json!([tool("roll", sides)]);
            }
            let (choice, _) = answer(&server, &asked).await;
            let message = &choice["message"];
            assert_eq!(message["reasoning_content"], "Hm, it", "{message}");
            if key == "tool_choice" {
                let (name, arguments) = call(&message["tool_calls"][0]);
                assert_eq!(name, "roll");
                let six_or_ten = [r#"{"sides": "six"}"#, r#"{"sides": "ten"}"#];
                assert!(six_or_ten.contains(&arguments), "{arguments}");
            } else {
                let content = message["content"].as_str().expect("a content");
                assert!(["\"red\"", "\"green\""].contains(&content), "{content}");
            }
            server.done().await;
        }
    }
}

/// A call within a thought that does not end is one, with a budget that is not used up. After a thought that was closed
/// before, it is part of the answer.
#[tokio::test]
async fn calls_are_made_with_a_budget() {
    let calls = r#"<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>"#;
    for (says, budget) in [
        (format!("<think>I look.\n{calls}"), 200),
        (format!("<think>I look.{UNSAID}\n{calls}"), 7),
    ] {
        let server = saying_as(&says, TEMPLATE, thinking).await;
        let mut asked = body();
        asked["thinking_token_budget"] = budget.into();
        let (choice, _) = answer(&server, &asked).await;
        let message = &choice["message"];
        assert_eq!(message["reasoning_content"], "I look.");
        assert_eq!(message["content"], Value::Null);
        assert_eq!(call(&message["tool_calls"][0]), ("add", r#"{"a": 1}"#));
        assert_eq!(choice["finish_reason"], "tool_calls");
        server.done().await;
    }
}

/// The template opens a thought, whatever it is told.
const STUBBORN: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\\n<think>\\n' }}";

#[tokio::test]
async fn every_api_says_that_the_model_is_not_to_think() {
    let says = format!("{UNSAID}\n\nYes.");
    let server = saying_as(&says, STUBBORN, thinking).await;
    let plain = chat(false);
    for (key, value) in [
        ("enable_thinking", json!(false)),
        ("reasoning_effort", json!("none")),
        ("thinking", json!({"type": "disabled"})),
        ("thinking_token_budget", json!(0)),
        ("chat_template_kwargs", json!({"enable_thinking": false})),
    ] {
        let mut asked = plain.clone();
        asked[key] = value;
        let (choice, _) = answer(&server, &asked).await;
        assert_eq!(choice["message"]["content"], "Yes.", "{asked}");
        assert!(choice["message"].get("reasoning_content").is_none());
    }
    let response =
        json!({"input": "Will it rain?", "temperature": 0, "reasoning": {"effort": "none"}});
    let output = server.json(RESPONSES, &response).await["output"].clone();
    let items = output.as_array().expect("items");
    assert_eq!(items.last().expect("one")["content"][0]["text"], "Yes.");
    let mut message = plain;
    message["thinking"] = json!({"type": "disabled"});
    let reply = server.json(MESSAGES, &message).await;
    let yes = json!([{"type": "text", "text": "Yes."}]);
    assert_eq!(reply["content"], yes);
    server.done().await;
    // A template that knows the switch opens no thought, and nothing is to be closed.
    let server = saying_as("Yes.", TEMPLATE, thinking).await;
    let mut asked = chat(false);
    asked["reasoning_effort"] = "none".into();
    let (choice, usage) = answer(&server, &asked).await;
    assert_eq!(choice["message"]["content"], "Yes.");
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 0);
    server.done().await;
}

#[tokio::test]
async fn a_budget_of_messages_and_responses_is_kept() {
    let server = saying_as(&format!("Hm, it{UNSAID}\n\nYes."), TEMPLATE, thinking).await;
    let message = json!({
        "messages": [{"role": "user", "content": "Will it rain?"}], "temperature": 0, "max_tokens": 99,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    });
    let reply = server.json(MESSAGES, &message).await;
    let expected = json!([
        {"type": "thinking", "thinking": "Hm, it", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]);
    assert_eq!(reply["content"], expected);
    let response = json!({
        "input": "Will it rain?", "temperature": 0, "enable_thinking": true, "thinking_token_budget": 6,
    });
    let reply = server.json(RESPONSES, &response).await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "Hm, it");
    assert_eq!(reply["output"][1]["content"][0]["text"], "Yes.");
    let tokens = &reply["usage"]["output_tokens_details"]["reasoning_tokens"];
    assert_eq!(tokens, 6 + MARK);
    server.done().await;
}

#[tokio::test]
async fn a_server_may_limit_all_thoughts() {
    let limited = |state| {
        let state = thinking(state).with_reasoning_budget(Some(6));
        state.expect("it marks its thoughts")
    };
    let server = saying_as(&format!("Hm, it{UNSAID}\n\nYes."), TEMPLATE, limited).await;
    let mut asked = chat(true);
    let (choice, _) = answer(&server, &asked).await;
    assert_eq!(choice["message"]["reasoning_content"], "Hm, it");
    asked["thinking_token_budget"] = (-1).into();
    let (choice, _) = answer(&server, &asked).await;
    assert_eq!(choice["message"]["content"], Value::Null);
    asked["thinking_token_budget"] = 2.into();
    let (choice, _) = answer(&server, &asked).await;
    assert_eq!(choice["message"]["reasoning_content"], "Hm");
    server.done().await;
}

#[tokio::test]
async fn a_model_that_marks_no_thoughts_has_no_budget() {
    let server = saying_as("Yes.", PLAIN, |state| {
        let refused = state.clone().with_reasoning_budget(Some(6)).err();
        let refused = refused.expect("nothing is marked").to_string();
        assert!(refused.contains("--reasoning-parser"), "{refused}");
        state
    })
    .await;
    let told = with("thinking_token_budget", json!(6));
    let told = server.refused(CHAT, &told).await;
    assert_eq!(told["param"], "thinking_token_budget");
    server.done().await;
}

/// In Harmony, the header of the answer closes a thought.
#[tokio::test]
async fn a_thought_in_channels_is_closed() {
    const HEADER: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";
    const CHANNELS: &str = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let unsaid = "x".repeat(HEADER.len());
    let says = format!("<|channel|>analysis<|message|>Hm, it{unsaid}Yes.");
    let server = saying_as(&says, CHANNELS, |state| {
        state.with_reasoning_budget(Some(6)).expect("channels")
    })
    .await;
    let (choice, _) = answer(&server, &chat(false)).await;
    assert_eq!(choice["message"]["reasoning_content"], "Hm, it");
    assert_eq!(choice["message"]["content"], "Yes.");
    server.done().await;

    // What closes it in good time does not change the answer.
    let again = "<|end|><|start|>assistant<|channel|>analysis<|message|>";
    let says = format!("<|channel|>analysis<|message|>Hm.{again}No.{HEADER}Yes, it may rain.");
    let server = saying_as(&says, CHANNELS, |state| state).await;
    let mut asked = chat(false);
    asked["thinking_token_budget"] = (again.len() + 30).into();
    let (choice, _) = answer(&server, &asked).await;
    assert_eq!(choice["message"]["reasoning_content"], "Hm.\nNo.");
    assert_eq!(choice["message"]["content"], "Yes, it may rain.");
    asked["tools"] = json!([tool("f", json!({}))]);
    let told = server.refused(CHAT, &asked).await;
    assert_eq!(told["param"], "thinking_token_budget");
    server.done().await;
}
