//! Converts the items of a request to the messages of a chat.

use crate::error::Result;
use crate::http::wire::{string, wrong};
use serde_json::{Value, json};

/// The messages for `instructions` and `input`, a text or a list of items.
///
/// # Errors
/// `Invalid`, naming the item.
pub(super) fn messages(instructions: Option<String>, input: Value) -> Result<Vec<Value>> {
    let mut chat = Chat::default();
    if let Some(instructions) = instructions {
        chat.add("system", instructions);
    }
    match input {
        Value::String(text) => chat.add("user", text),
        Value::Array(items) => {
            if items.is_empty() {
                return wrong("input", "must not be empty");
            }
            for (i, item) in items.into_iter().enumerate() {
                chat.item(&format!("input[{i}]"), item)?;
            }
        }
        _ => return wrong("input", "must be a string or a list of items"),
    }
    Ok(chat.messages)
}

/// The messages so far.
#[derive(Default)]
struct Chat {
    messages: Vec<Value>,
    /// What the assistant thought before what comes next.
    reasoning: String,
}

impl Chat {
    fn add(&mut self, role: &str, content: String) {
        let mut message = json!({"role": role, "content": content});
        if role == "assistant" && !self.reasoning.is_empty() {
            message["reasoning_content"] = std::mem::take(&mut self.reasoning).into();
        }
        self.messages.push(message);
    }

    fn item(&mut self, at: &str, item: Value) -> Result<()> {
        if !item.is_object() {
            return wrong(at, "must be an object");
        }
        match item["type"].as_str() {
            Some("message") => self.message(at, &item),
            None if item["type"].is_null() => self.message(at, &item),
            Some("function_call") => self.call(at, &item),
            Some("function_call_output") => {
                let id = string(at, &item, "call_id")?;
                let content = content(&format!("{at}.output"), &item["output"])?;
                let message = json!({"role": "tool", "tool_call_id": id, "content": content});
                self.messages.push(message);
                Ok(())
            }
            Some("reasoning") => {
                self.reasoning.push_str(&reasoning(&item));
                Ok(())
            }
            Some("item_reference") => wrong(
                &format!("{at}.type"),
                "must not be item_reference, because no items are stored: send the item",
            ),
            _ => wrong(
                &format!("{at}.type"),
                "must be message, function_call, function_call_output or reasoning",
            ),
        }
    }

    fn message(&mut self, at: &str, message: &Value) -> Result<()> {
        let role = match message["role"].as_str() {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
            _ => {
                let field = format!("{at}.role");
                return wrong(&field, "must be user, assistant, system or developer");
            }
        };
        let content = content(&format!("{at}.content"), &message["content"])?;
        self.add(role, content);
        Ok(())
    }

    /// Adds a call to the assistant's last message, or to a new one.
    fn call(&mut self, at: &str, call: &Value) -> Result<()> {
        let call = json!({
            "id": string(at, call, "call_id")?,
            "type": "function",
            "function": {
                "name": string(at, call, "name")?,
                "arguments": string(at, call, "arguments")?,
            },
        });
        let is_assistant = |message: &Value| message["role"] == "assistant";
        if !self.messages.last().is_some_and(is_assistant) {
            self.add("assistant", String::new());
        }
        if let Some(message) = self.messages.last_mut() {
            match message["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => message["tool_calls"] = json!([call]),
            }
        }
        Ok(())
    }
}

/// The text of a message or an output: a string, or parts with text.
fn content(at: &str, content: &Value) -> Result<String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(i, part)| {
                let text = match part["type"].as_str() {
                    Some("input_text" | "output_text") => &part["text"],
                    Some("refusal") => &part["refusal"],
                    _ => {
                        let what =
                            "must be input_text, output_text or refusal: the model reads only text";
                        return wrong(&format!("{at}[{i}].type"), what);
                    }
                };
                match text.as_str() {
                    Some(text) => Ok(text),
                    None => wrong(&format!("{at}[{i}].text"), "must be a string"),
                }
            });
            Ok(texts.collect::<Result<Vec<_>>>()?.join("\n"))
        }
        _ => wrong(at, "must be a string or a list of parts"),
    }
}

/// The text of an earlier turn's reasoning. That of other servers may be encrypted, and is left out.
fn reasoning(item: &Value) -> String {
    let parts = item["content"].as_array().into_iter().flatten();
    let texts = parts.filter_map(|part| part["text"].as_str());
    texts.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn items_become_messages_and_calls_join_their_turn() {
        let input = json!([
            {"role": "user", "content": "Hi"},
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "Let me look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [
                {"type": "input_text", "text": "two"}]},
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        ]);
        let call = |id: &str, name: &str, arguments: &str| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"id": id, "type": "function", "function": function})
        };
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "developer", "content": "a\nb"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.",
             "tool_calls": [call("1", "f", "{}"), call("2", "g", "{\"a\": 1}")]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "assistant", "content": "", "tool_calls": [call("3", "f", "{}")]},
        ]);
        let read = messages(Some("Be brief.".into()), input).expect("items");
        assert_eq!(Value::from(read), expected);
        let text = messages(None, "Hi".into()).expect("a text");
        assert_eq!(text, [json!({"role": "user", "content": "Hi"})]);
    }

    #[test]
    fn wrong_items_are_named() {
        for (input, field) in [
            (json!(7), "input"),
            (json!([]), "input"),
            (json!(["Hi"]), "input[0]"),
            (json!([{"role": "tool", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "input_image"}]}]),
                "input[0].content[0].type",
            ),
            (
                json!([{"role": "user", "content": [{"type": "input_text"}]}]),
                "input[0].content[0].text",
            ),
            (
                json!([{"type": "item_reference", "id": "x"}]),
                "input[0].type",
            ),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (
                json!([{"type": "function_call", "name": "f", "arguments": "{}"}]),
                "input[0].call_id",
            ),
            (
                json!([{"type": "function_call_output", "call_id": "1"}]),
                "input[0].output",
            ),
        ] {
            match messages(None, input.clone()) {
                Err(Error::Request { param, message, .. }) => {
                    assert_eq!(param.as_deref(), Some(field), "{input}");
                    assert!(message.starts_with(field), "{message}");
                }
                other => panic!("{input}: {other:?}"),
            }
        }
    }
}
