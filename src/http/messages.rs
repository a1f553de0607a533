//! Checks the messages of a chat, and brings them into the form that templates expect.

use super::wire::wrong;
use crate::error::Result;
use serde_json::{Map, Value};

type Message = Map<String, Value>;

/// Where in the body a message is, for errors.
struct At(usize);

impl At {
    fn wrong<T>(&self, key: &str, what: &str) -> Result<T> {
        let field = format!("messages[{}]{key}", self.0);
        wrong(&field, what)
    }
}

/// Checks that each message has a role and what the role needs. Content becomes a string: a list of
/// text parts is joined, and missing content, as in a message that only calls tools, is an empty text.
/// The arguments of calls become objects. Other keys that are null are left out, because templates ask
/// whether a key is there.
///
/// # Errors
/// `Invalid`, naming the message and its key.
pub(super) fn checked(mut messages: Vec<Value>) -> Result<Vec<Value>> {
    if messages.is_empty() {
        return wrong("messages", "must not be empty");
    }
    for (i, message) in messages.iter_mut().enumerate() {
        let at = At(i);
        let Some(message) = message.as_object_mut() else {
            return at.wrong("", "must be an object with role and content");
        };
        message.retain(|_, value| !value.is_null());
        let role = message.get("role").and_then(Value::as_str);
        match role.map(str::to_owned).as_deref() {
            None => return at.wrong(".role", "must be a string"),
            Some("tool") if !is_text(message, "tool_call_id") => {
                let what = "must be the id of the call that this message answers";
                return at.wrong(".tool_call_id", what);
            }
            Some("function") => {
                return at.wrong(
                    ".role",
                    "must not be function, which is deprecated: use tool",
                );
            }
            Some(_) => {}
        }
        said(message, &at)?;
        content(message, &at)?;
    }
    Ok(messages)
}

fn is_text(message: &Message, key: &str) -> bool {
    message.get(key).is_some_and(Value::is_string)
}

fn content(message: &mut Message, at: &At) -> Result<()> {
    let content = message.entry("content").or_insert("".into());
    match content {
        Value::String(_) => Ok(()),
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| match part["type"].as_str() {
                Some("text") => part["text"].as_str(),
                Some("refusal") => part["refusal"].as_str(),
                _ => None,
            });
            let Some(texts) = texts.collect::<Option<Vec<_>>>() else {
                return at.wrong(".content", "may contain only parts of type text");
            };
            *content = texts.join("\n").into();
            Ok(())
        }
        _ => at.wrong(".content", "must be a string or a list of text parts"),
    }
}

/// Checks what an assistant says besides content.
fn said(message: &mut Message, at: &At) -> Result<()> {
    if message.contains_key("function_call") {
        return at.wrong(".function_call", "is deprecated: use tool_calls");
    }
    if message.contains_key("reasoning_content") && !is_text(message, "reasoning_content") {
        return at.wrong(".reasoning_content", "must be a string");
    }
    match message.get_mut("tool_calls") {
        None => {}
        Some(Value::Array(calls)) if calls.is_empty() => {
            message.remove("tool_calls");
        }
        Some(Value::Array(calls)) => {
            for (i, call) in calls.iter_mut().enumerate() {
                tool_call(call)
                    .or_else(|(key, what)| at.wrong(&format!(".tool_calls[{i}]{key}"), what))?;
            }
        }
        Some(_) => return at.wrong(".tool_calls", "must be a list"),
    }
    Ok(())
}

/// Checks a call of an earlier turn, and parses its arguments: templates write them as JSON. A model's
/// text that is no JSON stays one.
fn tool_call(call: &mut Value) -> Result<(), (&'static str, &'static str)> {
    if !call.is_object() {
        return Err(("", "must be an object with id, type and function"));
    }
    if !call["id"].is_string() {
        return Err((".id", "must be a string"));
    }
    match call.get("type") {
        None => call["type"] = "function".into(),
        Some(kind) if kind == "function" => {}
        Some(_) => return Err((".type", "must be function")),
    }
    let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
        return Err((".function", "must be an object with name and arguments"));
    };
    if !is_text(function, "name") {
        return Err((".function.name", "must be a string"));
    }
    let arguments = function.entry("arguments").or_insert("".into());
    let object = match arguments.as_str().map(str::trim) {
        None if arguments.is_object() => return Ok(()),
        None => {
            return Err((
                ".function.arguments",
                "must be a string that holds a JSON object",
            ));
        }
        Some("") => Some(Value::Object(Map::new())),
        Some(text) => serde_json::from_str(text).ok().filter(Value::is_object),
    };
    if let Some(object) = object {
        *arguments = object;
    }
    Ok(())
}
