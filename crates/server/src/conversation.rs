//! The messages of a chat. All APIs bring theirs into this form, in which templates read them.

use super::checks::{required, wrong};
use super::content::{ContentPart, TextOr, lines};
use super::custom_tool::arguments;
use super::others::NoOthers;
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The field of chats.
pub(super) const FIELD: &str = "messages";

/// A message of a chat.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub(super) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or another one that the template knows.
    pub role: String,
    /// Missing content, as in a message that only calls tools, is an empty text.
    #[serde(default, deserialize_with = "lines")]
    #[schemars(with = "Option<TextOr<ContentPart>>")]
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls of an earlier turn of the assistant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<MessageCall>>,
    /// The call that a message of `tool` answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Whether the answer continues this message, the last one: as `continue_final_message`.
    #[serde(skip_serializing)]
    pub prefix: Option<bool>,
    /// What else the template may ask for.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CallOfTurn")]
pub(super) struct MessageCall {
    id: String,
    #[serde(rename = "type", default)]
    kind: CallKind,
    /// Required where the type is `function`. Templates know no other calls.
    function: Option<CalledFunction>,
    /// Required where the type is `custom`.
    #[serde(skip_serializing)]
    custom: Option<CalledTool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct CalledFunction {
    name: String,
    /// JSON text, or an object.
    #[serde(default)]
    arguments: Value,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A call of a custom tool.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "CalledCustomTool")]
struct CalledTool {
    name: String,
    input: String,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// The kinds of calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum CallKind {
    #[default]
    Function,
    Custom,
}

impl ChatMessage {
    /// A message with only a content.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            ..Self::default()
        }
    }

    /// The result of a call.
    pub fn of_tool(id: String, content: String) -> Self {
        Self {
            tool_call_id: Some(id),
            ..Self::new("tool", content)
        }
    }

    fn check(&mut self, at: &FieldPath) -> Result<()> {
        // Templates ask whether a key is there.
        self.others.retain(|_, value| !value.is_null());
        self.tool_calls.take_if(|calls| calls.is_empty());
        // Other servers call it so, and clients send it back by that name. Templates know this one.
        if let Some(Value::String(text)) = self.others.get("reasoning")
            && !text.is_empty()
        {
            self.reasoning_content.get_or_insert_with(|| text.clone());
        }
        match self.others.remove("refusal") {
            None => {}
            Some(Value::String(refusal)) if refusal.is_empty() || self.content.is_empty() => {
                self.content.push_str(&refusal);
            }
            Some(_) => return wrong(at.key("refusal"), "is not possible beside content"),
        }
        if self.others.contains_key("audio") {
            return wrong(at.key("audio"), "is not supported: leave it out");
        }
        if self.role == "function" {
            return wrong(
                at.key("role"),
                "must not be function, which is deprecated: use tool",
            );
        }
        if self.role == "tool" && self.tool_call_id.is_none() {
            return wrong(
                at.key("tool_call_id"),
                "must be the id of the call that this message answers",
            );
        }
        if self.others.contains_key("function_call") {
            return wrong(at.key("function_call"), "is deprecated: use tool_calls");
        }
        let calls = self.tool_calls.iter_mut().flatten();
        for (i, call) in calls.enumerate() {
            call.check(&at.key("tool_calls").index(i))?;
        }
        Ok(())
    }
}

impl MessageCall {
    /// `arguments` are JSON text, or an object.
    pub fn new(id: String, name: String, arguments: Value) -> Self {
        Self {
            id,
            kind: CallKind::Function,
            function: Some(CalledFunction::new(name, arguments)),
            custom: None,
            others: Map::new(),
        }
    }

    /// Makes a call of a function of it, whose arguments are an object if they can be one.
    fn check(&mut self, at: &FieldPath) -> Result<()> {
        if self.kind == CallKind::Custom {
            let call = required(at.key("custom"), self.custom.take())?;
            self.function = Some(CalledFunction::new(call.name, arguments(call.input)));
            self.kind = CallKind::Function;
        }
        if self.custom.is_some() {
            return wrong(at.key("type"), "must be custom where there is such a call");
        }
        let at = at.key("function");
        let Some(function) = &mut self.function else {
            return wrong(at, "is required");
        };
        if !function.parse_arguments() {
            return wrong(
                at.key("arguments"),
                "must be a string that holds a JSON object",
            );
        }
        Ok(())
    }
}

impl CalledFunction {
    fn new(name: String, arguments: Value) -> Self {
        Self {
            name,
            arguments,
            others: Map::new(),
        }
    }

    /// Makes an object of the arguments, because templates write them as JSON; a model's text that is no JSON
    /// stays one. Returns whether they may be arguments.
    fn parse_arguments(&mut self) -> bool {
        let arguments = &mut self.arguments;
        let object = match arguments {
            Value::Null => Some(Map::new()),
            Value::String(text) if text.trim().is_empty() => Some(Map::new()),
            Value::String(text) => serde_json::from_str(text).ok(),
            Value::Object(_) => None,
            _ => return false,
        };
        if let Some(object) = object {
            *arguments = object.into();
        }
        true
    }
}

/// Checks that each message has what its role needs, and parses the arguments of calls.
///
/// # Errors
/// `Invalid`, naming the message and its key.
pub(super) fn checked(mut messages: Vec<ChatMessage>) -> Result<Vec<ChatMessage>> {
    if messages.is_empty() {
        return wrong(FIELD, "must not be empty");
    }
    for (i, message) in messages.iter_mut().enumerate() {
        message.check(&FieldPath::from(FIELD).index(i))?;
    }
    Ok(messages)
}

/// The end of a chat's prompt, as a request asks for it.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct PromptEnd {
    /// Whether the beginning of the answer follows the last message.
    pub add_generation_prompt: Option<bool>,
    /// Whether the prompt ends within the last message.
    pub continue_final_message: Option<bool>,
}

impl PromptEnd {
    /// Whether the answer continues the last message.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn is_open(self, messages: &[ChatMessage]) -> Result<bool> {
        let is_open = continues_last(messages, self.continue_final_message == Some(true))?;
        if is_open && self.add_generation_prompt == Some(true) {
            let what = "must be false where the answer continues the last message: leave it out";
            return wrong("add_generation_prompt", what);
        }
        Ok(is_open)
    }
}

/// Returns whether the answer continues the last of `messages`: because the request asks for it, or the message does.
///
/// # Errors
/// `Invalid`, naming the message and its key, if it is not the last one that asks, or it cannot be continued.
fn continues_last(messages: &[ChatMessage], is_asked: bool) -> Result<bool> {
    let Some((last, before)) = messages.split_last() else {
        return Ok(false);
    };
    let at = |i| FieldPath::from(FIELD).index(i);
    if let Some(i) = before.iter().position(|m| m.prefix == Some(true)) {
        return wrong(at(i).key("prefix"), "is possible in the last message only");
    }
    if !is_asked && last.prefix != Some(true) {
        return Ok(false);
    }
    let at = at(before.len());
    if last.role != "assistant" {
        let what = "must be assistant in the last message where the answer continues it";
        return wrong(at.key("role"), what);
    }
    if last.tool_calls.is_some() {
        let what = "is not possible in the last message where the answer continues it";
        return wrong(at.key("tool_calls"), what);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_thought_has_one_of_two_names() {
        let thought = |keys: Value| {
            let mut message = json!({"role": "assistant", "content": "Yes."});
            let keys = keys.as_object().expect("an object").clone();
            message.as_object_mut().expect("an object").extend(keys);
            let messages = serde_json::from_value(json!([message])).expect("messages");
            checked(messages).expect("fine").remove(0).reasoning_content
        };
        for (keys, expected) in [
            (json!({"reasoning": "Hm."}), Some("Hm.")),
            (json!({"reasoning_content": "Hm."}), Some("Hm.")),
            (
                json!({"reasoning": "No.", "reasoning_content": "Hm."}),
                Some("Hm."),
            ),
            (json!({"reasoning": ""}), None),
            (json!({"reasoning": null}), None),
        ] {
            assert_eq!(thought(keys.clone()).as_deref(), expected, "{keys}");
        }
    }
}
