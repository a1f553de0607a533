//! Tools and messages of chats that are wrong, and how errors name them.

use crate::common::refusals::{parsed, rows};
use crate::common::scripted::{CHAT, saying, tool, with};
use crate::common::server::error;
use serde_json::{Value, json};

/// Fields, what their values are parts of, the values, and the field that an error names.
const WRONG: &str = r#"
tools | as it is | {"name": "f"} | tools
tools | as it is | [{"function": {"name": "f"}}] | tools[0].type
tools | as it is | [{"type": "custom"}] | tools[0].custom
tools | as it is | [{"type": "functions", "function": {"name": "f"}}] | tools[0].function
tools | as it is | [{"type": "function"}] | tools[0].function
tools | function | {"description": "d"} | tools[0].function.name
tools | function | {"name": "a b"} | tools[0].function.name
tools | function | {"name": "f", "description": 1} | tools[0].function.description
tools | function | {"name": "f", "strict": "yes"} | tools[0].function.strict
tools | function | {"name": "f", "parameters": []} | tools[0].function.parameters
tools | function | {"name": "f", "parameters": {"type": "string"}} | tools[0].function.parameters
tool_choice | as it is | "always" | tool_choice
tool_choice | as it is | {"type": "allowed_tools"} | tool_choice.allowed_tools
tool_choice | as it is | {"type": "function", "function": {"name": "f"}} | tool_choice.function.name
parallel_tool_calls | as it is | "no" | parallel_tool_calls
functions | as it is | [{"name": "f"}] | functions
function_call | as it is | {"name": "f"} | function_call
messages | said | {"role": "tool", "content": "x"} | messages[1].tool_call_id
messages | said | {"role": "function", "name": "f", "content": "x"} | messages[1].role
messages | said | {"role": "assistant", "function_call": {"name": "f"}} | messages[1].function_call
messages | said | {"role": "assistant", "tool_calls": {}} | messages[1].tool_calls
messages | said | {"role": "assistant", "content": "a", "reasoning_content": 1} | messages[1].reasoning_content
messages | calls | "f" | messages[1].tool_calls[0]
messages | calls | {"function": {"name": "f"}} | messages[1].tool_calls[0].id
messages | calls | {"id": "1", "type": "custom"} | messages[1].tool_calls[0].custom
messages | calls | {"id": "1"} | messages[1].tool_calls[0].function
messages | calls | {"id": "1", "function": {}} | messages[1].tool_calls[0].function.name
messages | calls | {"id": "1", "function": {"name": "f", "arguments": 1}} | messages[1].tool_calls[0].function.arguments
"#;

#[tokio::test]
async fn wrong_tools_and_messages_are_named() {
    let server = saying("Yes.").await;
    let function = |function: Value| json!([{"type": "function", "function": function}]);
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let said = |message: Value| json!([{"role": "user", "content": "a"}, message]);
    let calls =
        |call: Value| said(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
    let many: Vec<Value> = (0..513)
        .map(|i| tool(&format!("t{i}"), json!({})))
        .collect();
    let long = [
        (
            function(json!({"name": "x".repeat(129)})),
            "tools[0].function.name",
        ),
        (
            json!([tool("f", json!({})), tool("f", json!({}))]),
            "tools[1].function.name",
        ),
        (json!(many), "tools"),
        (
            function(json!({"name": "f", "description": "d".repeat(1 << 20)})),
            "tools",
        ),
    ];
    let long = long.map(|(value, param)| ("tools", value, param));
    let allowed = json!({"mode": "auto", "tools": vec![named("f"); 513]});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": allowed});
    let allowed = ("tool_choice", allowed, "tool_choice.allowed_tools.tools");
    let all = rows::<4>(WRONG).map(|[key, kind, value, param]| {
        let value = parsed(value);
        let value = match kind {
            "function" => function(value),
            "said" => said(value),
            "calls" => calls(value),
            _ => value,
        };
        (key, value, param)
    });
    for (key, value, param) in all.chain(long).chain([allowed]) {
        let mut asked = with(key, value.clone());
        asked["stream"] = true.into();
        let response = server.post(CHAT, &asked).await;
        assert_eq!(response.status(), 400, "{key}: {value}");
        assert_eq!(
            error(response, 400, "invalid_value").await["param"],
            param,
            "{key}: {value}"
        );
    }
    for choice in [json!("required"), named("f")] {
        let mut asked = with("tool_choice", choice);
        asked["tools"] = json!([]);
        let told = server.refused(CHAT, &asked).await;
        assert_eq!(told["param"], "tool_choice");
    }
    // Schemas that no grammar can follow, or none that is kept.
    for property in [
        json!({"type": "nothing"}),
        json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64}),
    ] {
        let schema = json!({"type": "object", "properties": {"a": property}});
        let mut asked = with(
            "tools",
            function(json!({"name": "f", "parameters": schema})),
        );
        asked["tool_choice"] = "required".into();
        let told = server.refused(CHAT, &asked).await;
        assert_eq!(told["param"], "tools[0].function.parameters");
        let message = told["message"].as_str().expect("a message");
        assert!(message.contains("`#/properties/a"), "{message}");
    }
    server.done().await;
}
