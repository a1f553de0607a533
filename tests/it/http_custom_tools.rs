//! Custom tools, whose input is a text: of chats and of responses.

use crate::common::scripted::{CHAT, saying, with};
use crate::http_agents::{RESPONSES, call, codex, settled, whole};
use serde_json::{Value, json};

/// The text of a patch, and a call that has it.
const PATCH: &str = "*** Begin Patch\n*** Update File: calc.py\n-    return a - b\n+    return a + b  # \"ä\" \\ 😀\n*** End Patch\n";

fn patch_call() -> String {
    "I fix it.\n".to_owned() + &call("apply_patch", &json!({"input": PATCH}))
}

#[tokio::test]
async fn custom_tools_take_a_text() {
    let server = saying(&patch_call()).await;
    let reply = server.json(RESPONSES, &whole(codex())).await;
    let items = settled(&reply);
    assert_eq!(items[0]["content"][0]["text"], "I fix it.");
    let expected = json!({"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": PATCH});
    assert_eq!(items[1..], [expected]);

    let events = server.named_events(RESPONSES, codex()).await;
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let expected = [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert!(names.ends_with(&expected), "{names:?}");
    let of = |wanted: &str| {
        let wanted = format!("response.{wanted}");
        let found = events.iter().filter(move |(name, _)| *name == wanted);
        found.map(|(_, data)| data).collect::<Vec<_>>()
    };
    let deltas = of("custom_tool_call_input.delta");
    assert!(deltas.len() > 4, "the input comes as the model writes it");
    let input: String = deltas
        .iter()
        .filter_map(|data| data["delta"].as_str())
        .collect();
    assert_eq!(input, PATCH);
    let added = of("output_item.added")[1];
    assert_eq!(added["item"]["input"], "");
    assert_eq!(deltas[0]["item_id"], added["item"]["id"]);
    assert_eq!(of("custom_tool_call_input.done")[0]["input"], PATCH);
    assert_eq!(settled(&of("completed")[0]["response"]), items);

    server.done().await;

    let server = saying(&patch_call()).await;
    let response = reply;
    let mut chat = with(
        "tools",
        json!([{"type": "custom", "custom": {"name": "apply_patch"}}]),
    );
    let reply = server.json(CHAT, &chat).await;
    let message = &reply["choices"][0]["message"];
    let call = &message["tool_calls"][0];
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
    let expected = json!({"id": call["id"], "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}});
    assert_eq!(*call, expected);
    let chunks = server.stream(CHAT, chat.clone()).await;
    let deltas = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0));
    let deltas: Vec<&Value> = deltas.collect();
    assert_eq!(deltas[0]["type"], "custom");
    assert_eq!(deltas[0]["custom"]["name"], "apply_patch");
    let input: String = deltas
        .iter()
        .filter_map(|delta| delta["custom"]["input"].as_str())
        .collect();
    assert_eq!(input, PATCH);
    assert!(deltas.iter().all(|delta| delta.get("function").is_none()));

    // A required call follows a regular expression.
    let format =
        json!({"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]{2,5}"}});
    chat["tools"][0]["custom"]["format"] = format;
    chat["tool_choice"] = json!({"type": "custom", "custom": {"name": "apply_patch"}});
    chat["max_tokens"] = 200.into();
    let reply = server.json(CHAT, &chat).await;
    let input = &reply["choices"][0]["message"]["tool_calls"][0]["custom"]["input"];
    let input = input.as_str().expect("an input");
    assert!(
        (2..=5).contains(&input.len()) && input.bytes().all(|b| b"ab".contains(&b)),
        "{reply}"
    );
    chat["tools"][0]["custom"]["format"]["grammar"]["definition"] = "(".into();
    let told = server.refused(CHAT, &chat).await;
    assert_eq!(told["param"], "tools[0].custom.format");

    // A grammar in Lark that does not compile is refused, whether a call is required or not, if one is possible.
    for choice in ["auto", "required"] {
        let grammar = json!({"syntax": "lark", "definition": "start: begin end"});
        chat["tools"][0]["custom"]["format"]["grammar"] = grammar;
        chat["tool_choice"] = choice.into();
        let told = server.refused(CHAT, &chat).await;
        assert_eq!(told["param"], "tools[0].custom.format.grammar.definition");
        let message = told["message"].as_str().expect("a message");
        assert!(message.contains("begin"), "{message}");
    }
    chat["tool_choice"] = "none".into();
    server.json(CHAT, &chat).await;
    let tool = |i: usize| {
        let mut tool = chat["tools"][0].clone();
        tool["custom"]["name"] = format!("patch_{i}").into();
        tool
    };
    let many: Vec<Value> = (0..9).map(tool).collect();
    chat["tools"] = many.into();
    let told = server.refused(CHAT, &chat).await;
    assert_eq!(told["param"], "tools");
    let mut wrong = whole(codex());
    wrong["tools"][1]["format"]["definition"] = "start: begin end".into();
    let told = server.refused(RESPONSES, &wrong).await;
    assert_eq!(told["param"], "tools[1].format.definition");
    server.done().await;

    // The next turns are the same.
    let server = saying("Hello").await;
    server.json(RESPONSES, &json!({"input": "Hi"})).await;
    let items = &response["output"];
    let input = json!([
        {"role": "user", "content": "Fix it."},
        items[0],
        items[1],
        {"type": "custom_tool_call_output", "call_id": items[1]["call_id"], "output": "Done."},
    ]);
    let next = json!({"input": input, "max_output_tokens": 1});
    let input_tokens = server.json(RESPONSES, &next).await["usage"]["input_tokens"].clone();
    let next = json!({"max_tokens": 1, "messages": [
        {"role": "user", "content": "Fix it."},
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "Done."},
    ]});
    let prompt_tokens = server.json(CHAT, &next).await["usage"]["prompt_tokens"].clone();
    assert_eq!(prompt_tokens, input_tokens);
    server.done().await;
}
