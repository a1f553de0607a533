//! Converts the turns of a request to the messages of a chat.

use crate::content::{ContentPart, HarmlessKeys, TextOr};
use crate::conversation::{ChatMessage, MessageCall};
use crate::others::{NoOthers, given, refuse_inapplicable};
use crate::wire::{required, wrong};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// A message of a request.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct MessageTurn {
    role: TurnRole,
    content: TextOr<InputBlock>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum TurnRole {
    User,
    Assistant,
    /// What some clients add to the field `system` later on.
    System,
}

impl MessageTurn {
    /// Whether the model wrote it, so that its answer continues it if it is the last one.
    pub fn is_answer(&self) -> bool {
        self.role == TurnRole::Assistant
    }
}

/// A part of a message.
#[derive(Debug, Deserialize, JsonSchema)]
struct InputBlock {
    #[serde(rename = "type")]
    kind: InputBlockKind,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<TextOr<ResultPart>>,
    is_error: Option<bool>,
    /// What proves that a thought is the server's own, or has it.
    #[serde(rename = "signature")]
    #[schemars(skip)]
    _signature: Option<IgnoredAny>,
    #[serde(rename = "data")]
    #[schemars(skip)]
    _data: Option<IgnoredAny>,
    /// Who calls: the model.
    #[serde(rename = "caller")]
    #[schemars(skip)]
    _caller: Option<IgnoredAny>,
    #[serde(rename = "citations")]
    #[schemars(skip)]
    _citations: Option<IgnoredAny>,
    #[serde(rename = "cache_control")]
    #[schemars(skip)]
    _cache_control: Option<IgnoredAny>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "InputBlockType")]
enum InputBlockKind {
    Text,
    Thinking,
    RedactedThinking,
    ToolUse,
    ToolResult,
}

/// A part of the result of a call.
#[derive(Debug, Deserialize, JsonSchema)]
struct ResultPart {
    #[serde(rename = "type")]
    kind: ResultPartKind,
    text: Option<String>,
    tool_name: Option<String>,
    #[serde(flatten)]
    #[schemars(skip)]
    _harmless: HarmlessKeys,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ResultPartType")]
enum ResultPartKind {
    Text,
    /// A tool that a search has found. All tools are in the prompt, so the model is told its name.
    ToolReference,
}

impl ResultPart {
    fn line(self, at: &FieldPath) -> Result<String> {
        let (name, has): (_, &[&str]) = match self.kind {
            ResultPartKind::Text => ("text", &["text"]),
            ResultPartKind::ToolReference => ("tool_reference", &["tool_name"]),
        };
        refuse_inapplicable(at, name, has, &given! { self, text, tool_name })?;
        match self.kind {
            ResultPartKind::Text => required(at.key("text"), self.text),
            ResultPartKind::ToolReference => {
                let name = required(at.key("tool_name"), self.tool_name)?;
                Ok(format!("Tool: {name}"))
            }
        }
    }
}

/// The text of the result of a call.
fn result(at: &FieldPath, content: Option<TextOr<ResultPart>>) -> Result<String> {
    let parts = match content {
        None => return Ok(String::new()),
        Some(TextOr::Text(text)) => return Ok(text),
        Some(TextOr::List(parts)) => parts.into_iter().enumerate(),
    };
    let lines: Result<Vec<String>> = parts.map(|(i, part)| part.line(&at.index(i))).collect();
    Ok(lines?.join("\n"))
}

impl InputBlock {
    /// Refuses what belongs to blocks of other types.
    fn check(&self, at: &FieldPath) -> Result<()> {
        let (name, has): (_, &[&str]) = match self.kind {
            InputBlockKind::Text => ("text", &["text"]),
            InputBlockKind::Thinking => ("thinking", &["thinking"]),
            InputBlockKind::RedactedThinking => ("redacted_thinking", &[]),
            InputBlockKind::ToolUse => ("tool_use", &["id", "name", "input"]),
            InputBlockKind::ToolResult => ("tool_result", &["tool_use_id", "content", "is_error"]),
        };
        let given =
            given! { self, text, thinking, id, name, input, tool_use_id, content, is_error };
        refuse_inapplicable(at, name, has, &given)
    }
}

/// The messages for `system` and `turns`.
///
/// # Errors
/// `Invalid`, naming the block.
pub(super) fn messages(
    system: Option<TextOr<ContentPart>>,
    turns: Vec<MessageTurn>,
) -> Result<Vec<ChatMessage>> {
    const FIELD: &str = "messages";
    let Some(last) = turns.len().checked_sub(1) else {
        return wrong(FIELD, "must not be empty");
    };
    let system = system.map(|system| ChatMessage::new("system", system.lines()));
    let mut messages = Vec::from_iter(system);
    for (i, turn) in turns.into_iter().enumerate() {
        let at = FieldPath::from(FIELD).index(i).key("content");
        match turn.role {
            TurnRole::User => turn_of("user", &at, turn.content, &mut messages)?,
            TurnRole::Assistant => {
                let message = assistant(&at, turn.content)?;
                if i == last {
                    check_open(&at, &message)?;
                }
                messages.push(message);
            }
            TurnRole::System => turn_of("system", &at, turn.content, &mut messages)?,
        }
    }
    Ok(messages)
}

/// Adds what a user says and the results of calls, in their order, or instructions (`system`).
fn turn_of(
    role: &str,
    at: &FieldPath,
    content: TextOr<InputBlock>,
    messages: &mut Vec<ChatMessage>,
) -> Result<()> {
    let blocks = match content {
        TextOr::Text(text) => {
            says(role, text, messages);
            return Ok(());
        }
        TextOr::List(blocks) => blocks,
    };
    for (i, block) in blocks.into_iter().enumerate() {
        let at = at.index(i);
        block.check(&at)?;
        match block.kind {
            InputBlockKind::Text => says(role, required(at.key("text"), block.text)?, messages),
            InputBlockKind::ToolResult if role == "user" => {
                let id = required(at.key("tool_use_id"), block.tool_use_id)?;
                let content = result(&at.key("content"), block.content)?;
                let mut result = ChatMessage::of_tool(id, content);
                // Templates may show it.
                if block.is_error == Some(true) {
                    result.others.insert("is_error".into(), true.into());
                }
                messages.push(result);
            }
            _ if role == "user" => return wrong(at.key("type"), "must be text or tool_result"),
            _ => return wrong(at.key("type"), "must be text"),
        }
    }
    Ok(())
}

/// Adds to what this role said last, if nobody spoke since: turns of the same role are one.
fn says(role: &str, text: String, messages: &mut Vec<ChatMessage>) {
    match messages.last_mut().filter(|last| last.role == role) {
        Some(last) => {
            last.content.push('\n');
            last.content.push_str(&text);
        }
        None => messages.push(ChatMessage::new(role, text)),
    }
}

/// Checks the last message of the model, which its answer continues.
fn check_open(at: &FieldPath, message: &ChatMessage) -> Result<()> {
    if message.tool_calls.is_some() {
        return wrong(
            at,
            "must have no tool_use in the last message: a message of the user must follow it with the tool_result",
        );
    }
    if message.content.ends_with(char::is_whitespace) {
        return wrong(
            at,
            "must not end with white space in the last message, which the answer continues",
        );
    }
    Ok(())
}

fn assistant(at: &FieldPath, content: TextOr<InputBlock>) -> Result<ChatMessage> {
    const ROLE: &str = "assistant";
    let blocks = match content {
        TextOr::Text(text) => return Ok(ChatMessage::new(ROLE, text)),
        TextOr::List(blocks) => blocks,
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let at = at.index(i);
        block.check(&at)?;
        match block.kind {
            InputBlockKind::Text => texts.push(required(at.key("text"), block.text)?),
            InputBlockKind::Thinking => {
                thoughts.push(required(at.key("thinking"), block.thinking)?)
            }
            // Only the server that wrote it can read it.
            InputBlockKind::RedactedThinking => {}
            InputBlockKind::ToolUse => {
                let input = required(at.key("input"), block.input)?;
                let name = required(at.key("name"), block.name)?;
                let id = required(at.key("id"), block.id)?;
                calls.push(MessageCall::new(id, name, input.into()));
            }
            InputBlockKind::ToolResult => {
                return wrong(at.key("type"), "must be text, tool_use or thinking");
            }
        }
    }
    Ok(ChatMessage {
        reasoning_content: (!thoughts.is_empty()).then(|| thoughts.join("\n")),
        tool_calls: (!calls.is_empty()).then_some(calls),
        ..ChatMessage::new(ROLE, texts.join("\n"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::JsonObject;
    use crate::wire;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    struct Asked {
        system: Option<TextOr<ContentPart>>,
        #[serde(deserialize_with = "Option::deserialize")]
        messages: Option<Vec<MessageTurn>>,
    }

    fn read(system: &Value, turns: &Value) -> Result<Value> {
        let body = json!({"system": system, "messages": turns}).to_string();
        let body = JsonObject::parse(body.as_bytes(), &[wire::names::<Asked>()])?;
        let asked: Asked = body.fields()?;
        Ok(json!(messages(
            asked.system,
            asked.messages.unwrap_or_default()
        )?))
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
                {"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": [
                    {"type": "text", "text": "one"}, {"type": "tool_reference", "tool_name": "Monitor"}]},
                {"type": "text", "text": "And?"}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]},
        ]);
        let system = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let later = json!([
            {"role": "system", "content": "c"},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        ]);
        let expected = json!([
            {"role": "system", "content": "a\nb\nc"},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "d\ne"},
        ]);
        assert_eq!(read(&system, &later).expect("fine"), expected);
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let expected = json!([
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": "Hi\nthere"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "one\nTool: Monitor", "is_error": true},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "tool", "tool_call_id": "2", "content": ""},
        ]);
        assert_eq!(read(&system, &turns).expect("fine"), expected);
    }

    #[test]
    fn wrong_blocks_are_named() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        let both = |content: Value| json!([{"role": "assistant", "content": content}, {"role": "user", "content": "x"}]);
        for (turns, field) in [
            (json!([]), "messages"),
            (
                json!([{"role": "assistant", "content": "x "}]),
                "messages[0].content",
            ),
            (
                json!([{"role": "assistant", "content": [
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]),
                "messages[0].content",
            ),
            (user(json!(1)), "messages[0].content"),
            (json!([["user", "x"]]), "messages[0]"),
            (user(json!([["text", "x"]])), "messages[0].content[0]"),
            (user(json!([7])), "messages[0].content[0]"),
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
                user(
                    json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference"}]}]),
                ),
                "messages[0].content[0].content[0].tool_name",
            ),
            (
                both(json!([{"type": "tool_use", "id": "1", "name": "f"}])),
                "messages[0].content[0].input",
            ),
            (
                user(json!([{"type": "tool_result", "tool_use_id": "1", "text": "x"}])),
                "messages[0].content[0].text",
            ),
            (
                user(json!([{"type": "text", "text": "x", "source": {}}])),
                "messages[0].content[0].source",
            ),
            (
                json!([{"role": "user", "content": "x", "name": "y"}]),
                "messages[0].name",
            ),
            (
                both(json!([{"type": "text", "text": "x", "input": {}}])),
                "messages[0].content[0].input",
            ),
            (
                json!([{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]),
                "messages[0].content[0].type",
            ),
            (
                both(json!([{"type": "server_tool_use"}])),
                "messages[0].content[0].type",
            ),
        ] {
            let error = read(&Value::Null, &turns).expect_err("refused");
            assert_eq!(error.param().as_deref(), Some(field), "{turns}");
            assert!(error.to_string().starts_with(field), "{error}");
        }
        assert!(read(&json!(1), &user("x".into())).is_err());
    }
}
