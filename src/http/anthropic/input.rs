//! Converts the turns of a request to the messages of a chat.

use crate::error::Result;
use crate::http::wire::{string, wrong};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// A message of a request.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Turn {
    role: Role,
    content: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Assistant,
}

/// The messages for `system` and `turns`.
///
/// # Errors
/// `Invalid`, naming the block.
pub(super) fn messages(system: Option<Value>, turns: Vec<Turn>) -> Result<Vec<Value>> {
    match turns.last() {
        None => return wrong("messages", "must not be empty"),
        Some(last) if last.role == Role::Assistant => {
            let what =
                "must end with a message of the user: to continue an answer is not supported";
            return wrong("messages", what);
        }
        Some(_) => {}
    }
    let mut messages = Vec::new();
    if let Some(system) = system.filter(|system| !system.is_null()) {
        let content = text("system", &system)?;
        messages.push(json!({"role": "system", "content": content}));
    }
    for (i, turn) in turns.into_iter().enumerate() {
        let at = format!("messages[{i}].content");
        match turn.role {
            Role::User => user(&at, &turn.content, &mut messages)?,
            Role::Assistant => messages.push(assistant(&at, &turn.content)?),
        }
    }
    Ok(messages)
}

/// Adds what a user says, and the results of calls, in their order.
fn user(at: &str, content: &Value, messages: &mut Vec<Value>) -> Result<()> {
    let blocks = match content {
        Value::String(said) => {
            says(said, messages);
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return wrong(at, "must be a string or a list of blocks"),
    };
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{i}]");
        match block["type"].as_str() {
            Some("text") => says(string(&at, block, "text")?, messages),
            Some("tool_result") => {
                let id = string(&at, block, "tool_use_id")?;
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => text(&format!("{at}.content"), content)?,
                };
                let mut result = json!({"role": "tool", "tool_call_id": id, "content": content});
                // Templates may show it.
                if block["is_error"] == true {
                    result["is_error"] = true.into();
                }
                messages.push(result);
            }
            _ => {
                let what = "must be text or tool_result: the model reads only text";
                return wrong(&format!("{at}.type"), what);
            }
        }
    }
    Ok(())
}

/// Adds to what the user said last, if nobody spoke since: turns of the same role are one.
fn says(text: &str, messages: &mut Vec<Value>) {
    let last = messages.last_mut().filter(|last| last["role"] == "user");
    match last.map(|last| &mut last["content"]) {
        Some(Value::String(said)) => {
            said.push('\n');
            said.push_str(text);
        }
        _ => messages.push(json!({"role": "user", "content": text})),
    }
}

fn assistant(at: &str, content: &Value) -> Result<Value> {
    let blocks = match content {
        Value::String(said) => return Ok(json!({"role": "assistant", "content": said})),
        Value::Array(blocks) => blocks,
        _ => return wrong(at, "must be a string or a list of blocks"),
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{i}]");
        match block["type"].as_str() {
            Some("text") => texts.push(string(&at, block, "text")?),
            Some("thinking") => thoughts.push(string(&at, block, "thinking")?),
            // Only the server that wrote it can read it.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                if !block["input"].is_object() {
                    return wrong(&format!("{at}.input"), "must be an object");
                }
                let name = string(&at, block, "name")?;
                calls.push(json!({
                    "id": string(&at, block, "id")?,
                    "type": "function",
                    "function": {"name": name, "arguments": block["input"]},
                }));
            }
            _ => {
                let what = "must be text, tool_use or thinking";
                return wrong(&format!("{at}.type"), what);
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.join("\n")});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

/// A string, or a list of text blocks.
fn text(at: &str, content: &Value) -> Result<String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().enumerate().map(|(i, block)| {
                let at = format!("{at}[{i}]");
                match block["type"].as_str() {
                    Some("text") => string(&at, block, "text"),
                    _ => {
                        let what = "must be text: the model reads nothing else";
                        wrong(&format!("{at}.type"), what)
                    }
                }
            });
            Ok(texts.collect::<Result<Vec<_>>>()?.join("\n"))
        }
        _ => wrong(at, "must be a string or a list of text blocks"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn read(system: Value, turns: Value) -> Result<Vec<Value>> {
        let turns = serde_json::from_value(turns).expect("turns");
        messages(Some(system), turns)
    }

    #[test]
    fn blocks_become_messages() {
        let cached = json!({"type": "ephemeral"});
        let turns = json!([
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "there", "cache_control": cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}], "is_error": true},
                {"type": "text", "text": "And?"}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]},
        ]);
        let system = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let expected = json!([
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": "Hi\nthere"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "one", "is_error": true},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "tool", "tool_call_id": "2", "content": ""},
        ]);
        assert_eq!(Value::from(read(system, turns).expect("fine")), expected);
    }

    #[test]
    fn wrong_blocks_are_named() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        let both = |content: Value| json!([{"role": "assistant", "content": content}, {"role": "user", "content": "x"}]);
        for (turns, field) in [
            (json!([]), "messages"),
            (json!([{"role": "assistant", "content": "x"}]), "messages"),
            (user(json!(1)), "messages[0].content"),
            (
                user(json!([{"type": "image", "source": {}}])),
                "messages[0].content[0].type",
            ),
            (
                user(json!([{"type": "text"}])),
                "messages[0].content[0].text",
            ),
            (
                user(json!([{"type": "tool_result"}])),
                "messages[0].content[0].tool_use_id",
            ),
            (
                user(
                    json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]),
                ),
                "messages[0].content[0].content[0].type",
            ),
            (
                both(json!([{"type": "tool_use", "id": "1", "name": "f"}])),
                "messages[0].content[0].input",
            ),
            (
                both(json!([{"type": "server_tool_use"}])),
                "messages[0].content[0].type",
            ),
        ] {
            match read(Value::Null, turns.clone()) {
                Err(Error::Request { param, message, .. }) => {
                    assert_eq!(param.as_deref(), Some(field), "{turns}");
                    assert!(message.starts_with(field), "{message}");
                }
                other => panic!("{turns}: {other:?}"),
            }
        }
        assert!(read(json!(1), user("x".into())).is_err());
    }
}
