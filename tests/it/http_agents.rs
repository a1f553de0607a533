//! What coding agents send: tools in namespaces, tools of other servers, and choices among tools.

use crate::common::refusals::{parsed, rows};
use crate::common::scripted::{CHAT, body, saying, tool, with};
use crate::common::server::Server;
use crate::http_messages;
use serde_json::{Value, json};

pub const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

const WARNING: &str = "x-foretoken-warning";

const GRAMMAR: &str = r#"start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF line+ -> update_file
line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"#;

pub fn call(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// The first request of Codex, with fewer and shorter tools and instructions.
pub fn codex() -> Value {
    let message = |role: &str, texts: &[&str]| {
        let parts = texts
            .iter()
            .map(|text| json!({"type": "input_text", "text": text}));
        json!({"type": "message", "id": "msg_01a21f4c", "role": role, "content": parts.collect::<Vec<_>>()})
    };
    let function = |name: &str, parameter: &str| {
        let schema = json!({"type": "object", "properties": {parameter: {"type": "string"}},
            "required": [parameter], "additionalProperties": false});
        json!({"type": "function", "name": name, "description": "d", "strict": false, "parameters": schema})
    };
    json!({
        "model": "toy",
        "stream": true,
        "input": [
            message("developer", &["You are a coding agent."]),
            message("developer", &["<skills_instructions>", "<permissions instructions>"]),
            message("user", &["<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"]),
            message("user", &["The function add in calc.py subtracts. Fix it."]),
        ],
        "tools": [
            function("exec_command", "cmd"),
            {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {
                "type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Tools for sub-agents.", "tools": [
                function("close_agent", "target"), function("spawn_agent", "message")]},
            {"type": "web_search", "external_web_access": true},
            {"type": "image_generation", "output_format": "png"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": true,
        "reasoning": {"summary": "auto", "context": "all_turns"},
        "store": false,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a21f4c",
        "service_tier": "priority",
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "client_metadata": {"session_id": "01a21f4c"},
        "temperature": 0,
    })
}

/// The functions that a model sees for the tools of [`codex`].
fn shown() -> Value {
    let mut tools = codex()["tools"].as_array().expect("tools").clone();
    let functions = tools.remove(2)["tools"]
        .as_array()
        .expect("functions")
        .clone();
    let function = |tool: &Value, name: &str, description: &str| {
        let mut function = tool.as_object().expect("a tool").clone();
        function.remove("type");
        function.insert("name".into(), name.into());
        function.insert("description".into(), description.into());
        json!({"type": "function", "function": function})
    };
    let parameters = json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
        "additionalProperties": false});
    let description =
        format!("Edits files.\n\nIts input follows this grammar in Lark's syntax:\n{GRAMMAR}");
    json!([
        function(&tools[0], "exec_command", "d"),
        function(
            &json!({"parameters": parameters}),
            "apply_patch",
            &description
        ),
        function(
            &functions[0],
            "multi_agent_v1__close_agent",
            "Tools for sub-agents.\n\nd"
        ),
        function(&functions[1], "multi_agent_v1__spawn_agent", "d"),
    ])
}

pub fn whole(mut body: Value) -> Value {
    body["stream"] = false.into();
    body
}

/// The items of an answer without their ids.
pub fn settled(response: &Value) -> Vec<Value> {
    let mut items = response["output"].as_array().expect("items").clone();
    for item in &mut items {
        let item = item.as_object_mut().expect("an item");
        assert!(item.remove("id").is_some());
        item.remove("call_id");
    }
    items
}

async fn warning(server: &Server, path: &str, body: &Value) -> String {
    let response = server.post(path, body).await;
    assert_eq!(response.status(), 200, "{path}");
    let warning = response.headers().get(WARNING).expect("a warning");
    warning.to_str().expect("ASCII").to_owned()
}

#[tokio::test]
async fn functions_of_namespaces_are_called() {
    let says = call(
        "multi_agent_v1__spawn_agent",
        &json!({"message": "Test it."}),
    );
    let server = saying(&says).await;
    let left_out = "tools[3]: web_search is not available here and was left out; \
        tools[4]: image_generation is not available here and was left out";
    for body in [codex(), whole(codex())] {
        assert_eq!(warning(&server, RESPONSES, &body).await, left_out);
    }
    let reply = server.json(RESPONSES, &whole(codex())).await;
    assert_eq!(reply["tools"], codex()["tools"]);
    let arguments = "{\"message\":\"Test it.\"}";
    let expected = json!({"type": "function_call", "status": "completed", "namespace": "multi_agent_v1",
        "name": "spawn_agent", "arguments": arguments});
    assert_eq!(settled(&reply), [expected]);

    let events = server.named_events(RESPONSES, codex()).await;
    let of = |name: &str| {
        let found = events.iter().find(|(other, _)| other == name);
        &found.expect(name).1
    };
    let added = &of("response.output_item.added")["item"];
    assert_eq!(added["namespace"], "multi_agent_v1");
    assert_eq!(added["name"], "spawn_agent");
    assert_eq!(added["arguments"], "");
    let wanted = "spawn_agent";
    assert_eq!(of("response.function_call_arguments.done")["name"], wanted);
    assert_eq!(
        settled(&of("response.completed")["response"]),
        settled(&reply)
    );

    // The next turn, as a chat whose functions have the long names.
    let mut next = whole(codex());
    let input = next["input"].as_array_mut().expect("items");
    input.push(json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": null, "encrypted_content": "x"}));
    input.push(reply["output"][0].clone());
    input.push(
        json!({"type": "function_call_output", "call_id": reply["output"][0]["call_id"],
        "output": [{"type": "input_text", "text": "agent 1"}]}),
    );
    next["max_output_tokens"] = 1.into();
    let reply = server.json(RESPONSES, &next).await;
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut chat = json!({"max_tokens": 1, "temperature": 0, "tools": shown(), "messages": [
        said("developer", "You are a coding agent."),
        said("developer", "<skills_instructions>\n<permissions instructions>"),
        said("user", "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"),
        said("user", "The function add in calc.py subtracts. Fix it."),
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "multi_agent_v1__spawn_agent", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "1", "content": "agent 1"},
    ]});
    let tokens = server.json(CHAT, &chat).await["usage"]["prompt_tokens"].clone();
    assert_eq!(reply["usage"]["input_tokens"], tokens);
    // As a tool of the same kind.
    chat["tools"][1] = json!({"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR}}}});
    assert_eq!(
        server.json(CHAT, &chat).await["usage"]["prompt_tokens"],
        tokens
    );
    server.done().await;
}

/// Choices of tools, and the field that an error names.
const WRONG_CHOICES: &str = r#"
{"type": "web_search"} | tool_choice.type
{"type": "mcp", "server_label": "x"} | tool_choice.type
{"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]} | tool_choice.tools
{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "rm"}]} | tool_choice.tools[0].name
{"type": "function", "name": "spawn_agent"} | tool_choice.name
"#;

#[tokio::test]
async fn tools_of_other_servers_are_left_out_unless_they_are_required() {
    let server = saying("Hello").await;
    let mut chat = body();
    let hosted = json!({"type": "web_search", "search_context_size": "low"});
    chat["tools"]
        .as_array_mut()
        .expect("tools")
        .insert(1, hosted);
    let told = "tools[1]: web_search is not available here and was left out";
    assert_eq!(warning(&server, CHAT, &chat).await, told);
    let tokens = server.json(CHAT, &chat).await["usage"]["prompt_tokens"].clone();
    let without = server.json(CHAT, &body()).await["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens, without);
    let only_read = json!({"messages": chat["messages"], "tools": chat["tools"]});
    for path in ["/tokenize", "/apply-template"] {
        assert_eq!(warning(&server, path, &only_read).await, told, "{path}");
    }
    chat["tool_choice"] = json!({"type": "web_search"});
    let refused = server.refused(CHAT, &chat).await;
    assert_eq!(refused["param"], "tool_choice.type");
    let message = refused["message"].as_str().expect("a message");
    assert!(message.contains("web_search"), "{message}");
    let plain = server.post(CHAT, &body()).await;
    assert!(plain.headers().get(WARNING).is_none());
    server.done().await;

    let server = saying("Hello").await;
    let mut response = whole(codex());
    for [choice, param] in rows::<2>(WRONG_CHOICES) {
        response["tool_choice"] = parsed(choice);
        let refused = server.refused(RESPONSES, &response).await;
        assert_eq!(refused["param"], param);
    }
    response["tool_choice"] = "required".into();
    response["tools"] = json!([{"type": "web_search"}]);
    let refused = server.refused(RESPONSES, &response).await;
    assert_eq!(refused["param"], "tool_choice");
    let many = vec![json!({"type": "a\u{e4}\n"}); 10];
    response["tool_choice"] = "auto".into();
    response["tools"] = many.into();
    let told = warning(&server, RESPONSES, &response).await;
    assert!(told.starts_with("tools[0]: a?? is"), "{told}");
    assert!(told.ends_with("; and 2 more"), "{told}");
    server.done().await;

    let server = saying("Hello").await;
    let schema = json!({"type": "object", "properties": {}});
    let mut message = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [
        {"name": "Bash", "input_schema": schema},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]});
    let told = "tools[1]: web_search_20250305 is not available here and was left out";
    for path in [MESSAGES, "/v1/messages/count_tokens"] {
        assert_eq!(warning(&server, path, &message).await, told, "{path}");
    }
    message["tool_choice"] = json!({"type": "tool", "name": "web_search"});
    let (_, told) = http_messages::refused(server.post(MESSAGES, &message).await, 400).await;
    assert!(told.starts_with("tool_choice.name"), "{told}");
    assert!(told.contains("web_search_20250305"), "{told}");
    server.done().await;
}

#[tokio::test]
async fn calls_may_be_restricted_to_some_tools() {
    let server = saying(&call("add", &json!({"a": 1, "b": 2}))).await;
    let chosen = |mode: &str, names: &[&str]| {
        let tools = names
            .iter()
            .map(|name| json!({"type": "function", "function": {"name": name}}));
        let allowed = json!({"mode": mode, "tools": tools.collect::<Vec<_>>()});
        with(
            "tool_choice",
            json!({"type": "allowed_tools", "allowed_tools": allowed}),
        )
    };
    let choice = async |body: &Value| server.json(CHAT, body).await["choices"][0].clone();
    let of_name = |choice: &Value| choice["message"]["tool_calls"][0]["function"]["name"].clone();
    let reply = choice(&chosen("auto", &["add"])).await;
    assert_eq!(of_name(&reply), "add");
    // A call of another tool is a text.
    let reply = choice(&chosen("auto", &["get_weather"])).await;
    assert_eq!(reply["finish_reason"], "stop");
    assert!(reply["message"].get("tool_calls").is_none(), "{reply}");
    let reply = choice(&chosen("auto", &[])).await;
    assert!(reply["message"].get("tool_calls").is_none(), "{reply}");
    for (key, value) in [
        ("parallel_tool_calls", json!(false)),
        ("max_tokens", json!(200)),
    ] {
        let mut asked = chosen("required", &["get_weather"]);
        asked[key] = value;
        asked["max_tokens"] = 200.into();
        assert_eq!(of_name(&choice(&asked).await), "get_weather");
    }
    // All tools stay in the prompt.
    let tokens =
        async |body: &Value| server.json(CHAT, body).await["usage"]["prompt_tokens"].clone();
    assert_eq!(
        tokens(&chosen("auto", &["add"])).await,
        tokens(&body()).await
    );

    let mut response = whole(codex());
    response["tool_choice"] = json!({"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}, {"type": "image_generation"}]});
    response["max_output_tokens"] = 200.into();
    let reply = server.json(RESPONSES, &response).await;
    assert_eq!(reply["output"][0]["name"], "close_agent", "{reply}");
    assert_eq!(reply["tool_choice"], response["tool_choice"]);
    server.done().await;
}

/// Tools in items are tools of the request.
#[tokio::test]
async fn items_may_bring_tools() {
    let server = saying(&call("add", &json!({"a": 1}))).await;
    let mut function = tool("add", json!({"a": {"type": "integer"}}))["function"].clone();
    function["type"] = "function".into();
    let mut body = json!({"temperature": 0, "input": [
        {"type": "additional_tools", "role": "developer", "tools": [function]},
        {"role": "user", "content": "Add."},
    ]});
    let reply = server.json(RESPONSES, &body).await;
    assert_eq!(reply["output"][0]["type"], "function_call");
    body["input"][0]["tools"][0]["name"] = "a b".into();
    let refused = server.refused(RESPONSES, &body).await;
    assert_eq!(refused["param"], "input[0].tools[0].name");
    server.done().await;
}

/// A search finds tools, which can be called then; what cannot be told to the model is left out.
#[tokio::test]
async fn histories_of_codex_are_continued() {
    let says = call("calendar__create", &json!({"title": "Tea"}));
    let server = saying(&says).await;
    let found = json!({"type": "namespace", "name": "calendar", "description": "Events.", "tools": [
        {"type": "function", "name": "create", "description": "d", "strict": false, "defer_loading": true,
            "parameters": {"type": "object", "properties": {"title": {"type": "string"}}}}]});
    let mut body = whole(codex());
    body["tools"] = json!([]);
    let searched = [
        json!({"type": "tool_search_call", "call_id": "1", "status": "completed", "execution": "client",
            "arguments": {"query": "events"}}),
        json!({"type": "tool_search_output", "call_id": "1", "status": "completed", "execution": "client",
            "tools": [found]}),
        json!({"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "tea"}}),
        json!({"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": [
            {"type": "input_text", "text": "Make an event."}]}),
    ];
    body["input"]
        .as_array_mut()
        .expect("items")
        .extend(searched);
    let told = "input[6]: web_search_call is not available here and was left out";
    assert_eq!(warning(&server, RESPONSES, &body).await, told);
    let reply = server.json(RESPONSES, &body).await;
    let call = &reply["output"][0];
    assert_eq!(
        (&call["namespace"], &call["name"]),
        (&json!("calendar"), &json!("create")),
        "{reply}"
    );
    server.done().await;
}
