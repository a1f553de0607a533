//! Tool calls and reasoning over HTTP: what a scripted model writes becomes messages and deltas.

use crate::common::scripted::{
    CHAT, PLAIN, TEMPLATE, TWO_CALLS, body, call, saying, saying_as, thinking, thought, tool, with,
};
use crate::common::server::joined;
use foretoken::http::AppState;
use foretoken::text::ToolFormat;
use serde_json::{Map, Value, json};

#[tokio::test]
async fn calls_become_a_list_in_the_message() {
    let server = saying(TWO_CALLS).await;
    let reply = server.json(CHAT, &body()).await;
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], "Let me look.");
    let calls = message["tool_calls"].as_array().expect("calls");
    let read: Vec<_> = calls.iter().map(call).collect();
    let expected = [
        ("get_weather", r#"{"city": "Zürich"}"#),
        ("add", r#"{"a": 1, "b": 2}"#),
    ];
    assert_eq!(read, expected);
    let id = |i: usize| calls[i]["id"].as_str().expect("an id");
    assert!(id(0).starts_with("call_") && id(0) != id(1), "{calls:?}");
    assert!(message.get("reasoning_content").is_none());
    let accepted = &reply["usage"]["speculative_decoding"]["num_accepted_tokens"];
    assert!(accepted.as_u64() > Some(0), "{reply}");

    // Each choice has calls of its own, and log-probabilities of all its tokens.
    let mut several = with("n", json!(2));
    several["logprobs"] = true.into();
    let reply = server.json(CHAT, &several).await;
    for choice in reply["choices"].as_array().expect("choices") {
        let calls = choice["message"]["tool_calls"].as_array();
        assert_eq!(calls.map(Vec::len), Some(2));
        let tokens = choice["logprobs"]["content"].as_array().map(Vec::len);
        assert_eq!(tokens, Some(TWO_CALLS.len() + 1), "and the end");
    }
    server.done().await;
}

/// The shapes of OpenAI's chunks: a call's first delta has its id, name and no arguments, the others have
/// its index and more arguments, and the last chunk of a choice has an empty delta.
#[tokio::test]
async fn calls_are_streamed_as_deltas() {
    let server = saying(TWO_CALLS).await;
    let mut streamed = with("stream_options", json!({"include_usage": true}));
    streamed["n"] = 2.into();
    let mut chunks = server.stream(CHAT, streamed).await;
    let usage = chunks.pop().expect("usage");
    assert_eq!(
        usage["usage"]["completion_tokens"],
        2 * (TWO_CALLS.len() + 1)
    );
    for index in 0..2 {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let choices: Vec<&Value> = choices.filter(|c| c["index"] == index).collect();
        let wanted = json!({"role": "assistant", "content": ""});
        assert_eq!(choices[0]["delta"], wanted);
        let mut calls: Vec<(Value, String)> = Vec::new();
        let mut pieces = 0;
        for delta in choices.iter().map(|choice| &choice["delta"]) {
            let Some(list) = delta["tool_calls"].as_array() else {
                continue;
            };
            assert_eq!((list.len(), delta.as_object().map(Map::len)), (1, Some(1)));
            let place = list[0]["index"].as_u64().expect("an index") as usize;
            let arguments = list[0]["function"]["arguments"]
                .as_str()
                .expect("arguments");
            if place == calls.len() {
                assert_eq!(list[0]["type"].as_str(), Some("function"));
                assert_eq!(arguments, "");
                let id = list[0]["id"].as_str().expect("an id");
                assert!(id.starts_with("call_"), "{id}");
                calls.push((list[0]["function"]["name"].clone(), String::new()));
            } else {
                let expected = json!({"index": place, "function": {"arguments": arguments}});
                assert_eq!((place + 1, &list[0]), (calls.len(), &expected));
                calls[place].1 += arguments;
                pieces += 1;
            }
        }
        let expected = [
            (json!("get_weather"), r#"{"city": "Zürich"}"#.to_owned()),
            (json!("add"), r#"{"a": 1, "b": 2}"#.to_owned()),
        ];
        assert_eq!(calls, expected);
        assert!(
            pieces > 4,
            "arguments come as the model writes them: {pieces}"
        );
        let last = choices.last().expect("the end");
        assert_eq!(last["delta"], json!({}));
        assert_eq!(last["finish_reason"], "tool_calls");
        let finished = choices.iter().filter(|c| !c["finish_reason"].is_null());
        assert_eq!(finished.count(), 1);
    }
    assert_eq!(
        joined(&chunks, 0),
        ("Let me look.".into(), json!("tool_calls"))
    );
    server.done().await;
}

/// A message that only calls tools has no content.
#[tokio::test]
async fn without_text_there_is_no_content() {
    let server = saying("<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>").await;
    let message = &server.json(CHAT, &body()).await["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert_eq!(call(&message["tool_calls"][0]), ("add", "{}"));
    server.done().await;
}

#[tokio::test]
async fn what_is_no_call_is_content() {
    let unknown = "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>";
    let server = saying(unknown).await;
    let choice = server.json(CHAT, &body()).await["choices"][0].clone();
    assert_eq!(choice["message"]["content"], unknown);
    assert!(choice["message"].get("tool_calls").is_none());
    assert_eq!(choice["finish_reason"], "stop");
    let chunks = server.stream(CHAT, body()).await;
    assert_eq!(joined(&chunks, 0), (unknown.into(), json!("stop")));
    server.done().await;

    // Calls are looked for only where they may be made.
    let server = saying(TWO_CALLS).await;
    let choice = server.json(CHAT, &with("tool_choice", json!("none"))).await["choices"][0].clone();
    assert_eq!(choice["message"]["content"], TWO_CALLS);
    assert_eq!(choice["finish_reason"], "stop");
    server.done().await;
}

#[tokio::test]
async fn limits_and_stops_end_calls_too() {
    let server = saying(TWO_CALLS).await;
    // In the arguments of the first call.
    let cut = TWO_CALLS.find("rich").expect("the city");
    let choice = server.json(CHAT, &with("max_tokens", json!(cut))).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    let arguments = call(&choice["message"]["tool_calls"][0]).1;
    assert_eq!(arguments, r#"{"city": "Zü"#);

    let choice = server.json(CHAT, &with("stop", json!("1, "))).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["stop_reason"], "1, ");
    assert_eq!(call(&choice["message"]["tool_calls"][1]).1, "{\"a\": ");

    // Before a call that must be made is one, there is nothing.
    let mut short = with("max_tokens", json!(30));
    short["tool_choice"] = "required".into();
    let choice = server.json(CHAT, &short).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["content"], "");

    // One call: the text ends with it.
    let one = with("parallel_tool_calls", json!(false));
    let reply = server.json(CHAT, &one).await;
    let choice = &reply["choices"][0];
    assert_eq!(
        choice["message"]["tool_calls"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let first = TWO_CALLS.find("}}").expect("an end") + 2;
    assert_eq!(reply["usage"]["completion_tokens"], first);
    let chunks = server.stream(CHAT, one).await;
    assert_eq!(
        joined(&chunks, 0),
        ("Let me look.".into(), json!("tool_calls"))
    );
    server.done().await;
}

/// A request that sends back the calls of `message` with a result for each.
fn next_turn(message: &Value) -> Value {
    let mut asked = body();
    let messages = asked["messages"].as_array_mut().expect("messages");
    messages.push(message.clone());
    for call in message["tool_calls"].as_array().expect("calls") {
        let id = &call["id"];
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": "done"}));
    }
    asked
}

/// Mistral Small 3.2's template refuses calls with other ids than those of its models.
#[tokio::test]
async fn a_template_that_checks_ids_gets_calls_back() {
    const CHECKED: &str = "{{ tools | tojson }}{% for m in messages %}{% for call in m.tool_calls or [] %}\
        {{ raise_exception('id') if call.id | length != 9 }}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}\
        {% endfor %}{{ raise_exception('result') if m.role == 'tool' and m.tool_call_id | length != 9 }}{{ m.content }}{% endfor %}";
    let says = "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Zürich\"}[TOOL_CALLS]add[ARGS]{\"a\": 1, \"b\": 2}";
    let server = saying_as(says, CHECKED, |state| state).await;
    let message = server.json(CHAT, &body()).await["choices"][0]["message"].clone();
    let calls = message["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 2, "{message}");
    for call in calls {
        let id = call["id"].as_str().expect("an id");
        assert!(
            id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()),
            "{id}"
        );
    }
    let mut asked = next_turn(&message);
    assert_eq!(server.post(CHAT, &asked).await.status(), 200);

    // A chat that began elsewhere.
    asked["messages"][1]["tool_calls"][0]["id"] = "toolu_01A09q90".into();
    asked["messages"][2]["tool_call_id"] = "toolu_01A09q90".into();
    assert_eq!(server.post(CHAT, &asked).await.status(), 200);
    server.done().await;
}

/// Llama's templates refuse messages with several calls, so an answer has one.
#[tokio::test]
async fn a_template_that_takes_one_call_gets_no_more_back() {
    const SINGLE: &str = "{# <|python_tag|> #}{{ tools | tojson }}{% for m in messages %}\
        {{ raise_exception('single') if m.tool_calls and m.tool_calls | length != 1 }}{{ m.role }}: {{ m.content }}{% endfor %}";
    let says = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}; {\"name\": \"add\", \"parameters\": {\"a\": 1}}";
    let server = saying_as(says, SINGLE, |state| state).await;
    let message = server.json(CHAT, &body()).await["choices"][0]["message"].clone();
    let calls = message["tool_calls"].as_array().expect("calls");
    let calls: Vec<_> = calls.iter().map(call).collect();
    assert_eq!(calls, [("get_weather", r#"{"city": "Zürich"}"#)]);
    assert_eq!(message["content"], Value::Null);
    let chunks = server.stream(CHAT, body()).await;
    assert_eq!(joined(&chunks, 0), (String::new(), json!("tool_calls")));
    let mut asked = next_turn(&message);
    assert_eq!(server.post(CHAT, &asked).await.status(), 200);

    // Calls of another server.
    let calls = &mut asked["messages"][1]["tool_calls"];
    let mut second = calls[0].clone();
    second["id"] = "call_2".into();
    calls.as_array_mut().expect("calls").push(second);
    let result = json!({"role": "tool", "tool_call_id": "call_2", "content": "done"});
    let messages = asked["messages"].as_array_mut().expect("messages");
    messages.push(result);
    assert_eq!(server.post(CHAT, &asked).await.status(), 200);
    server.done().await;
}

/// A marker that is a special token is no text, but marks a call nevertheless.
#[tokio::test]
async fn other_formats_are_read_on_request() {
    let says = "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}]";
    let mistral = |state: AppState| state.with_tool_call_parser(Some(ToolFormat::Mistral));
    let server = saying_as(says, TEMPLATE, mistral).await;
    let message = &server.json(CHAT, &body()).await["choices"][0]["message"];
    assert_eq!(call(&message["tool_calls"][0]), ("add", r#"{"a": 1}"#));
    let id = message["tool_calls"][0]["id"].as_str().expect("an id");
    assert!(
        id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()),
        "{id}"
    );
    server.done().await;

    let says = "{\"name\": \"add\", \"parameters\": {\"a\": 1}}";
    let llama = |state: AppState| state.with_tool_call_parser(Some(ToolFormat::Llama3Json));
    let server = saying_as(says, PLAIN, llama).await;
    let message = &server.json(CHAT, &body()).await["choices"][0]["message"];
    assert_eq!(call(&message["tool_calls"][0]), ("add", r#"{"a": 1}"#));
    server.done().await;

    // Qwen2.5-Coder leaves out the markers.
    let says = "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```";
    let server = saying_as(says, TEMPLATE, |state| state).await;
    let reply = server.json(CHAT, &body()).await;
    let message = &reply["choices"][0]["message"];
    assert_eq!(call(&message["tool_calls"][0]), ("add", r#"{"a": 1}"#));
    assert_eq!(message["content"], Value::Null);
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
    let chunks = server.stream(CHAT, body()).await;
    assert_eq!(joined(&chunks, 0), (String::new(), json!("tool_calls")));
    server.done().await;

    let says = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n1\n</parameter>\n</function>\n</tool_call>";
    let qwen = |state: AppState| state.with_tool_call_parser(Some(ToolFormat::Qwen3Coder));
    let server = saying_as(says, TEMPLATE, qwen).await;
    let mut asked = body();
    let properties = json!({"a": {"type": "integer"}, "note": {"type": "string"}});
    asked["tools"] = json!([tool("add", properties)]);
    let message = &server.json(CHAT, &asked).await["choices"][0]["message"];
    let arguments = r#"{"a": 1, "note": "1"}"#;
    assert_eq!(call(&message["tool_calls"][0]), ("add", arguments));
    server.done().await;

    let unknown = "{{ tools | tojson }}{{ messages[0].content }}";
    let server = saying_as(says, unknown, |state| state).await;
    let told = server.refused(CHAT, &body()).await;
    assert_eq!(told["param"], "tools");
    let message = told["message"].as_str().expect("a message");
    let names = ToolFormat::ALL.map(ToolFormat::name).join(", ");
    let wanted = format!("--tool-call-parser ({names})");
    assert!(message.contains(&wanted), "{message}");
    server.done().await;
}

#[tokio::test]
async fn what_a_model_thinks_is_no_content() {
    let says = "<think>\nIt may rain.\n</think>\n\nYes. <tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    for (says, extra) in [
        (says, json!({})),
        // The template has begun it.
        (&says["<think>\n".len()..], json!({"enable_thinking": true})),
    ] {
        let server = saying_as(says, TEMPLATE, thinking).await;
        let asked = with("chat_template_kwargs", extra);
        let message = server.json(CHAT, &asked).await["choices"][0]["message"].clone();
        assert_eq!(message["reasoning_content"], "It may rain.");
        assert_eq!(message["content"], "Yes.");
        assert_eq!(call(&message["tool_calls"][0]), ("add", "{}"));

        let chunks = server.stream(CHAT, asked.clone()).await;
        assert_eq!(thought(&chunks), "It may rain.");
        assert_eq!(joined(&chunks, 0), ("Yes.".into(), json!("tool_calls")));

        let mut hidden = asked;
        hidden["include_reasoning"] = false.into();
        let message = server.json(CHAT, &hidden).await["choices"][0]["message"].clone();
        assert!(message.get("reasoning_content").is_none());
        assert_eq!(message["content"], "Yes.");
        server.done().await;
    }
    // Without a parser, reasoning is text; a special token of it is not shown.
    let server = saying(says).await;
    let message = &server.json(CHAT, &body()).await["choices"][0]["message"];
    assert_eq!(message["content"], "\nIt may rain.\n</think>\n\nYes.");
    server.done().await;
}

/// What a client sends back is what the template shows to the model.
#[tokio::test]
async fn calls_and_results_of_earlier_turns_are_shown() {
    let messages = json!([
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": null, "refusal": null, "function_call": null, "reasoning_content": "Hm.",
         "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\":\"Zürich\"}"}},
            {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "assistant", "content": "It rains.", "tool_calls": null},
    ]);
    let asked = json!({"messages": messages, "tools": [tool("now", json!({}))]});
    let weather = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>";
    let now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    for (template, expected) in [
        (
            TEMPLATE,
            format!(
                "<|im_start|>user\nHow is it?<|im_end|>\n<|im_start|>assistant\n\n{weather}\n{now}<|im_end|>\n\
                <|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\nIt rains.<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (
            PLAIN,
            format!(
                "<|im_start|>user\nHow is it?<|im_end|>\n<|im_start|>assistant\n{weather}\n{now}<|im_end|>\n\
                <|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n\
                <|im_start|>assistant\nIt rains.<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
    ] {
        let server = saying_as("Yes.", template, |state| state).await;
        let tokens = server.json("/tokenize", &asked).await["tokens"].clone();
        let prompt = server.json("/detokenize", &json!({"tokens": tokens})).await;
        let prompt = prompt["prompt"].as_str().expect("a prompt");
        let (system, rest) = prompt.split_once("<|im_end|>\n").expect("a system message");
        let tool = r#"{"type": "function", "function": {"name": "now","#;
        assert!(
            system.starts_with("<|im_start|>system\n") && system.contains(tool),
            "{system}"
        );
        assert_eq!(rest, expected);
        let reply = server.json(CHAT, &asked).await;
        let wanted = json!(tokens.as_array().map(Vec::len));
        assert_eq!(reply["usage"]["prompt_tokens"], wanted);
        server.done().await;
    }
}
