//! Checks the tools of a chat, and which of them the model may or must call.

use super::wire::wrong;
use crate::error::{Error, Result};
use serde_json::Value;

/// OpenAI's limits.
const MAX_TOOLS: usize = 128;
const MAX_NAME_BYTES: usize = 64;

/// Maximum bytes of the JSON of all tools.
const MAX_TOOLS_BYTES: usize = 256 * 1024;

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// As the client sent them.
    pub list: Vec<Value>,
    pub choice: ToolChoice,
}

/// What the model has to do.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// Answer with a text.
    #[default]
    None,
    /// Answer with a text, calls, or both.
    Auto,
    /// Call one or more tools.
    Required,
    /// Call the tool with this index once.
    Named(usize),
}

impl Tools {
    /// Checks `tools` and `tool_choice`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn read(tools: Option<Vec<Value>>, choice: Option<Value>) -> Result<Self> {
        let list = checked(tools.unwrap_or_default())?;
        let choice = choice.unwrap_or(Value::Null);
        let choice = match choice.as_str() {
            None if choice.is_null() => ToolChoice::Auto,
            Some("none") => ToolChoice::None,
            Some("auto") => ToolChoice::Auto,
            Some("required") if list.is_empty() => return Err(without_tools()),
            Some("required") => ToolChoice::Required,
            _ => ToolChoice::Named(named(&list, &choice)?),
        };
        let choice = if list.is_empty() {
            ToolChoice::None
        } else {
            choice
        };
        Ok(Self { list, choice })
    }

    /// Checks only `tools`.
    ///
    /// # Errors
    /// As [`Tools::read`].
    pub fn only(tools: Option<Vec<Value>>) -> Result<Vec<Value>> {
        checked(tools.unwrap_or_default())
    }

    /// The tools that the model may call.
    pub fn callable(&self) -> &[Value] {
        match self.choice {
            ToolChoice::None => &[],
            ToolChoice::Auto | ToolChoice::Required => &self.list,
            ToolChoice::Named(index) => &self.list[index..=index],
        }
    }
}

/// The name of a tool that was checked.
pub(super) fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

fn without_tools() -> Error {
    Error::invalid(
        "tool_choice",
        "tool_choice needs tools: give them, or leave it out",
    )
}

/// The index of the tool that `choice` names.
fn named(list: &[Value], choice: &Value) -> Result<usize> {
    if choice["type"] != "function" || !choice["function"]["name"].is_string() {
        let what = r#"must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}"#;
        return wrong("tool_choice", what);
    }
    if list.is_empty() {
        return Err(without_tools());
    }
    let wanted = name(choice);
    match list.iter().position(|tool| name(tool) == wanted) {
        Some(index) => Ok(index),
        None => {
            let names: Vec<&str> = list.iter().map(name).collect();
            let what = format!("must be one of the tools: {}", names.join(", "));
            wrong("tool_choice.function.name", what)
        }
    }
}

fn checked(list: Vec<Value>) -> Result<Vec<Value>> {
    if list.len() > MAX_TOOLS {
        let message = format!(
            "tools may have at most {MAX_TOOLS} entries, not {}",
            list.len()
        );
        return Err(Error::invalid("tools", message));
    }
    let bytes: usize = list.iter().map(|tool| tool.to_string().len()).sum();
    if bytes > MAX_TOOLS_BYTES {
        return wrong(
            "tools",
            format!("may have at most {MAX_TOOLS_BYTES} bytes, not {bytes}"),
        );
    }
    for (i, tool) in list.iter().enumerate() {
        let earlier = &list[..i];
        check(tool, earlier).map_err(|(key, what)| {
            let field = format!("tools[{i}]{key}");
            let message = format!("{field} {what}");
            Error::invalid(&field, message)
        })?;
    }
    Ok(list)
}

/// Checks a tool, whose name none of `earlier` may have.
fn check(tool: &Value, earlier: &[Value]) -> Result<(), (&'static str, String)> {
    if tool["type"] != "function" {
        return Err((".type", "must be function".into()));
    }
    let Some(function) = tool["function"].as_object() else {
        return Err((".function", "must be an object with a name".into()));
    };
    let absent_or = |key: &str, is: fn(&Value) -> bool| {
        function
            .get(key)
            .is_none_or(|value| value.is_null() || is(value))
    };
    let is_plain = |name: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(plain)
    };
    if !function
        .get("name")
        .and_then(Value::as_str)
        .is_some_and(is_plain)
    {
        let what = format!("must have 1 to {MAX_NAME_BYTES} letters, digits, _ and -");
        return Err((".function.name", what));
    }
    if earlier.iter().any(|other| name(other) == name(tool)) {
        return Err((".function.name", "must not be that of another tool".into()));
    }
    if !absent_or("description", Value::is_string) {
        return Err((".function.description", "must be a string".into()));
    }
    if !absent_or("strict", Value::is_boolean) {
        return Err((".function.strict", "must be a boolean".into()));
    }
    let is_object = |schema: &Value| {
        schema.is_object() && schema.get("type").is_none_or(|kind| kind == "object")
    };
    if !absent_or("parameters", is_object) {
        let what = "must be the JSON schema of an object";
        return Err((".function.parameters", what.into()));
    }
    Ok(())
}
