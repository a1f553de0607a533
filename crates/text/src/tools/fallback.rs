//! Tools for models whose chat template knows none: they are described in the system message, and calls
//! and results become ordinary messages.

use super::{ToolFormat, WrittenCall};
use crate::json::{append_content, python_json};
use serde_json::{Value, json};
use std::borrow::Cow;

/// The key of what the model thought.
const THOUGHT: &str = "reasoning_content";

/// Rewrites `messages`, whose contents are texts, for a template that knows only system, user and
/// assistant messages with content. The first system message, or a new one, describes `tools` if there
/// are any, and how to call them in `format`.
pub fn without_tools(messages: &[Value], tools: &[Value], format: ToolFormat) -> Vec<Value> {
    let mut plain: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut after_rewritten = false;
    for message in messages {
        let rewritten = rewritten(message, format);
        let is_rewritten = rewritten.is_some();
        let message = rewritten.unwrap_or_else(|| message.clone());
        // Templates may refuse two messages of a role in a row, which the chat did not have before.
        let is_next = is_rewritten || after_rewritten;
        let last = plain
            .last_mut()
            .filter(|last| is_next && takes(last, &message));
        after_rewritten = is_rewritten || last.is_some();
        match last {
            Some(last) => append(last, message),
            None => plain.push(message),
        }
    }
    if !tools.is_empty() {
        let instructions = instructions(tools, format);
        match plain.first_mut().filter(|first| is_system(first)) {
            Some(system) => {
                system["content"] = format!("{}\n\n{instructions}", text(system)).into();
            }
            None => plain.insert(0, json!({"role": "system", "content": instructions})),
        }
    }
    plain
}

fn is_system(message: &Value) -> bool {
    message["role"] == "system" || message["role"] == "developer"
}

fn text(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

/// Whether nothing of `message` gets lost if it is appended to `last`.
fn takes(last: &Value, message: &Value) -> bool {
    let mut keys = message.as_object().into_iter().flatten();
    last["role"] == message["role"]
        && keys.all(|(key, value)| match key.as_str() {
            _ if value.is_null() => true,
            "role" | "content" => true,
            THOUGHT => last[THOUGHT].is_null(),
            _ => false,
        })
}

/// Adds the content of `message`, and its thought if it has one, to `last`.
fn append(last: &mut Value, mut message: Value) {
    if let Some(thought) = message.get_mut(THOUGHT).filter(|value| !value.is_null()) {
        last[THOUGHT] = thought.take();
    }
    append_content(last, "\n", text(&message));
}

/// A tool's message as a message of the user, or a message whose calls became part of its content. `None` for messages
/// that need no change.
fn rewritten(message: &Value, format: ToolFormat) -> Option<Value> {
    if message["role"] == "tool" {
        let content = text(message);
        let result = format!("<tool_response>\n{content}\n</tool_response>");
        return Some(json!({"role": "user", "content": result}));
    }
    let list = message.get("tool_calls")?.as_array()?;
    let arguments: Vec<Cow<'_, str>> = list.iter().map(arguments).collect();
    let calls = list
        .iter()
        .zip(&arguments)
        .map(|(call, arguments)| WrittenCall {
            name: call["function"]["name"].as_str().unwrap_or_default(),
            arguments,
        });
    let written = format.write(&calls.collect::<Vec<_>>());
    let content = match text(message) {
        "" => written,
        content => format!("{content}\n{written}"),
    };
    let mut message = message.clone();
    message.as_object_mut()?.remove("tool_calls");
    message["content"] = content.into();
    Some(message)
}

/// The JSON text of a call's arguments.
fn arguments(call: &Value) -> Cow<'_, str> {
    match &call["function"]["arguments"] {
        // The text that a model wrote, where it is not JSON.
        Value::String(text) => text.into(),
        value => python_json(value).unwrap_or_default().into(),
    }
}

/// Tells a model of its tools.
fn instructions(tools: &[Value], format: ToolFormat) -> String {
    let tools: Vec<String> = tools.iter().flat_map(python_json).collect();
    let tools = tools.join("\n");
    let is_json = !format.has_single_arguments();
    let example = format.write(&[WrittenCall {
        name: "<name of the function>",
        arguments: if is_json {
            r#"{"<name of an argument>": <its value>}"#
        } else {
            r#"{"<name of an argument>": "<its value>"}"#
        },
    }]);
    let as_json = if is_json { " as JSON" } else { "" };
    format!(
        "You can call these functions. Each line describes one as JSON:\n<tools>\n{tools}\n</tools>\n\n\
         To call a function, write its name and its arguments{as_json} in exactly this form:\n{example}\n\
         The result comes between <tool_response> and </tool_response>. Answer with it."
    )
}
