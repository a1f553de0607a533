//! Converts the items of a request to the messages of a chat.

use super::tools::{ResponseTool, shown_name};
use crate::content::{ContentPart, TextOr, some_lines};
use crate::conversation::{ChatMessage, MessageCall};
use crate::custom_tool::arguments;
use crate::object;
use crate::others::{OtherKey, given, refuse_inapplicable};
use crate::wire::{required, wrong};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// The name under which a model sees earlier calls of a shell.
const LOCAL_SHELL: &str = "local_shell";

/// An item: a message, a call, its result, reasoning, or further tools.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct InputItem {
    #[serde(rename = "type")]
    kind: Option<InputItemKind>,
    role: Option<InputRole>,
    /// What it may be depends on the type.
    #[schemars(with = "Option<TextOr<ContentPart>>")]
    content: Option<Value>,
    call_id: Option<String>,
    name: Option<String>,
    namespace: Option<String>,
    /// JSON text.
    arguments: Option<String>,
    /// The input of a custom tool.
    input: Option<String>,
    /// What a shell is to run.
    action: Option<Map<String, Value>>,
    /// Tools beside those of the request.
    tools: Option<Vec<ResponseTool>>,
    #[serde(default, deserialize_with = "some_lines")]
    #[schemars(with = "Option<TextOr<ContentPart>>")]
    output: Option<String>,
    /// What reasoning is shown by where it has no text.
    summary: Option<Value>,
    /// What a response told of the item.
    #[serde(rename = "id")]
    #[schemars(skip)]
    _id: Option<IgnoredAny>,
    #[serde(rename = "status")]
    #[schemars(skip)]
    _status: Option<IgnoredAny>,
    #[serde(rename = "phase")]
    #[schemars(skip)]
    _phase: Option<IgnoredAny>,
    /// What a client tells of the item's turn.
    #[serde(rename = "internal_chat_message_metadata_passthrough")]
    #[schemars(skip)]
    _passthrough: Option<IgnoredAny>,
    /// Only the server that wrote it can read it.
    #[serde(rename = "encrypted_content")]
    #[schemars(skip)]
    _encrypted: Option<IgnoredAny>,
    #[serde(flatten)]
    #[schemars(skip)]
    other: OtherKey,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "InputItemType")]
enum InputItemKind {
    Message,
    FunctionCall,
    FunctionCallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    LocalShellCall,
    LocalShellCallOutput,
    AdditionalTools,
    Reasoning,
    ItemReference,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum InputRole {
    User,
    Assistant,
    System,
    Developer,
}

impl InputItem {
    /// Refuses what belongs to items of other types. Further keys of reasoning tell how a client shows it, and ask for
    /// nothing.
    fn check(&self, at: &FieldPath, kind: InputItemKind) -> Result<()> {
        let other = self.other.0.as_ref();
        if let Some(key) = other.filter(|_| kind != InputItemKind::Reasoning) {
            return wrong(at.key(key.as_str()), "is not supported: leave it out");
        }
        let (name, has): (_, &[&str]) = match kind {
            InputItemKind::Message => ("message", &["role", "content"]),
            InputItemKind::FunctionCall => (
                "function_call",
                &["call_id", "name", "namespace", "arguments"],
            ),
            InputItemKind::FunctionCallOutput => ("function_call_output", &["call_id", "output"]),
            InputItemKind::CustomToolCall => (
                "custom_tool_call",
                &["call_id", "name", "namespace", "input"],
            ),
            InputItemKind::CustomToolCallOutput => {
                ("custom_tool_call_output", &["call_id", "name", "output"])
            }
            InputItemKind::LocalShellCall => ("local_shell_call", &["call_id", "action"]),
            InputItemKind::LocalShellCallOutput => {
                ("local_shell_call_output", &["call_id", "output"])
            }
            InputItemKind::AdditionalTools => ("additional_tools", &["role", "tools"]),
            InputItemKind::Reasoning => ("reasoning", &["content", "summary"]),
            InputItemKind::ItemReference => return Ok(()),
        };
        let given = given! {
            self, role, content, call_id, name, namespace, arguments, input, action, tools, output, summary
        };
        refuse_inapplicable(at, name, has, &given)
    }
}

impl InputRole {
    fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
            Self::Developer => "developer",
        }
    }
}

/// Tools, each with its place in the request.
type PlacedTools = Vec<(FieldPath, ResponseTool)>;

/// The messages for `instructions` and `input`, a text or a list of items, and the tools in these items.
///
/// # Errors
/// `Invalid`, naming the item.
pub(super) fn messages(
    instructions: Option<String>,
    input: TextOr<InputItem>,
) -> Result<(Vec<ChatMessage>, PlacedTools)> {
    const FIELD: &str = "input";
    let mut chat = Conversation::default();
    chat.messages
        .extend(instructions.map(|text| ChatMessage::new("system", text)));
    match input {
        TextOr::Text(text) => chat.messages.push(ChatMessage::new("user", text)),
        TextOr::List(items) if items.is_empty() => return wrong(FIELD, "must not be empty"),
        TextOr::List(items) => {
            for (i, item) in items.into_iter().enumerate() {
                chat.add(&FieldPath::from(FIELD).index(i), item)?;
            }
        }
    }
    chat.end_turn();
    Ok((chat.messages, chat.tools))
}

/// The messages so far.
#[derive(Default)]
struct Conversation {
    messages: Vec<ChatMessage>,
    /// The assistant's thoughts before the next part of its turn.
    thoughts: Vec<String>,
    tools: PlacedTools,
}

impl Conversation {
    fn add(&mut self, at: &FieldPath, item: InputItem) -> Result<()> {
        let kind = item.kind.unwrap_or(InputItemKind::Message);
        item.check(at, kind)?;
        match kind {
            InputItemKind::Message => {
                let role = required(at.key("role"), item.role)?;
                let at = at.key("content");
                let content = required(at.clone(), item.content)?;
                let content = object::read::<TextOr<ContentPart>>(&at, content)?.lines();
                if role == InputRole::Assistant {
                    self.assistant(content);
                } else {
                    self.other(ChatMessage::new(role.name(), content));
                }
            }
            InputItemKind::FunctionCall => {
                let id = required(at.key("call_id"), item.call_id)?;
                let name = required(at.key("name"), item.name)?;
                let name = shown_name(item.namespace.as_deref(), name);
                let arguments = required(at.key("arguments"), item.arguments)?;
                self.call(MessageCall::new(id, name, arguments.into()));
            }
            InputItemKind::CustomToolCall => {
                let id = required(at.key("call_id"), item.call_id)?;
                let name = required(at.key("name"), item.name)?;
                let name = shown_name(item.namespace.as_deref(), name);
                let input = required(at.key("input"), item.input)?;
                self.call(MessageCall::new(id, name, arguments(input)));
            }
            InputItemKind::LocalShellCall => {
                let id = required(at.key("call_id"), item.call_id)?;
                let action = required(at.key("action"), item.action)?;
                self.call(MessageCall::new(id, LOCAL_SHELL.into(), action.into()));
            }
            InputItemKind::AdditionalTools => {
                let at = at.key("tools");
                let tools = required(at.clone(), item.tools)?.into_iter().enumerate();
                self.tools
                    .extend(tools.map(|(i, tool)| (at.index(i), tool)));
            }
            InputItemKind::FunctionCallOutput
            | InputItemKind::CustomToolCallOutput
            | InputItemKind::LocalShellCallOutput => {
                let id = required(at.key("call_id"), item.call_id)?;
                let output = required(at.key("output"), item.output)?;
                self.other(ChatMessage::of_tool(id, output));
            }
            InputItemKind::Reasoning => self.think(reasoning(item.content, item.summary)),
            InputItemKind::ItemReference => {
                return wrong(
                    at.key("type"),
                    "must not be item_reference, because no items are stored: send the item",
                );
            }
        }
        Ok(())
    }

    fn think(&mut self, text: String) {
        self.thoughts
            .extend(Some(text).filter(|text| !text.is_empty()));
    }

    /// Adds what somebody else says: the assistant's turn is over.
    fn other(&mut self, message: ChatMessage) {
        self.end_turn();
        self.messages.push(message);
    }

    /// Ends the assistant's turn. Thoughts without a text after them become a message of their own.
    fn end_turn(&mut self) {
        if !self.thoughts.is_empty() {
            self.assistant(String::new());
        }
    }

    fn assistant(&mut self, content: String) {
        let message = ChatMessage::new(InputRole::Assistant.name(), content);
        self.messages.push(message);
        self.add_thoughts();
    }

    /// Adds a call to the assistant's last message, or to a new one. A template shows one thought of a message: that
    /// before the call is a part of it.
    fn call(&mut self, call: MessageCall) {
        let is_assistant = |message: &ChatMessage| message.role == InputRole::Assistant.name();
        if self.messages.last().is_some_and(is_assistant) {
            self.add_thoughts();
        } else {
            self.assistant(String::new());
        }
        if let Some(message) = self.messages.last_mut() {
            message.tool_calls.get_or_insert_default().push(call);
        }
    }

    /// Adds what the assistant thought to its last message.
    fn add_thoughts(&mut self) {
        let thoughts = std::mem::take(&mut self.thoughts);
        if let Some(message) = self.messages.last_mut().filter(|_| !thoughts.is_empty()) {
            let before = message.reasoning_content.take();
            let all: Vec<String> = before.into_iter().chain(thoughts).collect();
            message.reasoning_content = Some(all.join("\n"));
        }
    }
}

/// The text of an earlier turn's reasoning, or else its summary. That of other servers may be encrypted or of other
/// types: what is no text is left out.
fn reasoning(content: Option<Value>, summary: Option<Value>) -> String {
    let text = |content: Option<Value>| {
        let content = content.unwrap_or_default();
        if let Value::String(text) = content {
            return text;
        }
        let parts = content.as_array().into_iter().flatten();
        let texts = parts.filter_map(|part| part["text"].as_str());
        texts.collect::<Vec<_>>().join("\n")
    };
    let content = text(content);
    if content.is_empty() {
        text(summary)
    } else {
        content
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::JsonObject;
    use crate::wire;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    struct Asked {
        input: Option<TextOr<InputItem>>,
    }

    fn read(instructions: Option<String>, input: &Value) -> Result<Value> {
        let body = json!({"input": input}).to_string();
        let body = JsonObject::parse(body.as_bytes(), &[wire::names::<Asked>()])?;
        let input = required("input", body.fields::<Asked>()?.input)?;
        Ok(json!(messages(instructions, input)?.0))
    }

    #[test]
    fn items_become_messages_and_calls_join_their_turn() {
        let input = json!([
            {"role": "user", "content": "Hi"},
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "Hm."}, {"type": "encrypted", "data": 1}, 7,
                {"type": "thought", "text": "So."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "Let me look.", "refusal": null, "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [
                {"type": "input_text", "text": "two"}]},
            {"type": "function_call", "call_id": "3", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "4", "name": "patch",
                "input": "a\n"},
            {"type": "custom_tool_call_output", "call_id": "4", "name": "patch", "output": "done"},
            {"type": "local_shell_call", "call_id": "5", "status": "completed",
                "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "5", "output": "x"},
        ]);
        let call = |id: &str, name: &str, arguments: Value| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"id": id, "type": "function", "function": function})
        };
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "developer", "content": "a\nb"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.\nSo.",
             "tool_calls": [call("1", "f", "{}".into()), call("2", "g", "{\"a\": 1}".into())]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "assistant", "content": "", "tool_calls": [
                call("3", "n__f", "{}".into()), call("4", "patch", json!({"input": "a\n"}))]},
            {"role": "tool", "tool_call_id": "4", "content": "done"},
            {"role": "assistant", "content": "", "tool_calls": [
                call("5", "local_shell", json!({"type": "exec", "command": ["ls"]}))]},
            {"role": "tool", "tool_call_id": "5", "content": "x"},
        ]);
        let items = read(Some("Be brief.".into()), &input).expect("items");
        assert_eq!(items, expected);
        let text = read(None, &"Hi".into()).expect("a text");
        assert_eq!(text, json!([{"role": "user", "content": "Hi"}]));
    }

    #[test]
    fn thoughts_stay_in_their_turn() {
        let thought = |text: &str| {
            json!({"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": text}]})
        };
        let summary = json!({"type": "reasoning", "encrypted_content": "x", "summary": [
            {"type": "summary_text", "text": "S."}]});
        let says = |text: &str| json!({"role": "assistant", "content": text});
        let user = |text: &str| json!({"role": "user", "content": text});
        let calls = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let result =
            |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "x"});
        let made = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let input = json!([
            user("Hi"),
            thought("A."),
            says("Let me look."),
            thought("B."),
            calls("1"),
            thought("C."),
            calls("2"),
            result("1"),
            result("2"),
            thought("D."),
            thought("E."),
            user("Go on"),
            summary,
            says("Yes."),
            user("?"),
            thought("F."),
        ]);
        let expected = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "A.\nB.\nC.",
             "tool_calls": [made("1"), made("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            {"role": "tool", "tool_call_id": "2", "content": "x"},
            {"role": "assistant", "content": "", "reasoning_content": "D.\nE."},
            {"role": "user", "content": "Go on"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "S."},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "reasoning_content": "F."},
        ]);
        assert_eq!(read(None, &input).expect("items"), expected);
    }

    /// Open WebUI sends such items.
    #[test]
    fn reasoning_may_have_further_keys() {
        let input = json!([
            {"type": "reasoning", "content": "Hm.", "summary": null, "started_at": 1.5, "ended_at": 2.5, "duration": 1,
             "_tag_type": "think", "attributes": {"a": "b"}, "start_tag": "<think>", "end_tag": "</think>"},
            {"role": "assistant", "content": "Yes."},
        ]);
        let said = json!({"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."});
        assert_eq!(read(None, &input).expect("items"), json!([said]));
    }

    #[test]
    fn wrong_items_are_named() {
        for (input, field) in [
            (json!(7), "input"),
            (json!([]), "input"),
            (json!(["Hi"]), "input[0]"),
            (json!([["message", "user", "Hi"]]), "input[0]"),
            (
                json!([{"role": "user", "content": [["input_text", "Hi"]]}]),
                "input[0].content[0]",
            ),
            (json!([{"role": "user", "content": 7}]), "input[0].content"),
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
                json!([{"type": "custom_tool_call", "call_id": "1", "name": "f"}]),
                "input[0].input",
            ),
            (
                json!([{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]),
                "input[0].output[0].type",
            ),
            (
                json!([{"type": "additional_tools", "role": "developer"}]),
                "input[0].tools",
            ),
            (
                json!([{"role": "user", "content": "x", "output": "y"}]),
                "input[0].output",
            ),
            (
                json!([{"role": "user", "content": "x", "audio": {"id": "y"}}]),
                "input[0].audio",
            ),
            (
                json!([{"type": "reasoning", "content": "x", "arguments": "{}"}]),
                "input[0].arguments",
            ),
            (
                json!([{"role": "user", "content": [{"type": "input_text", "text": "x", "image_url": "y"}]}]),
                "input[0].content[0].image_url",
            ),
            (
                json!([{"type": "function_call", "name": "f", "arguments": "{}"}]),
                "input[0].call_id",
            ),
            (
                json!([{"type": "function_call_output", "call_id": "1"}]),
                "input[0].output",
            ),
        ] {
            let error = read(None, &input).expect_err("refused");
            assert_eq!(error.param().as_deref(), Some(field), "{input}");
            assert!(error.to_string().starts_with(field), "{error}");
        }
    }
}
