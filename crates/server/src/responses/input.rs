//! Converts the items of a request to the messages of a chat.

use super::tools::{PlacedTool, ResponseTool, shown_name};
use crate::content::{ContentPart, TextOr};
use crate::conversation::{ChatMessage, MessageCall};
use crate::custom_tool::arguments;
use crate::object;
use crate::others::{OtherKey, given, refuse_inapplicable};
use crate::stored::StoredItem;
use crate::wire::{required, wrong};
use foretoken_core::error::{Error, FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::sync::Arc;

/// The field with the items.
pub(super) const FIELD: &str = "input";

/// The names under which a model sees earlier calls of a shell, and searches for tools.
const LOCAL_SHELL: &str = "local_shell";
const TOOL_SEARCH: &str = "tool_search";

/// The type of a part of a content that only the server that wrote it can read.
const ENCRYPTED: &str = "encrypted_content";

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
    /// JSON text; an object of a search for tools.
    arguments: Option<Value>,
    /// The input of a custom tool.
    input: Option<String>,
    /// What a shell is to run.
    action: Option<Map<String, Value>>,
    /// Tools beside those of the request.
    tools: Option<Vec<ResponseTool>>,
    /// The agent that says something to another.
    author: Option<String>,
    /// The agent to which it is said.
    recipient: Option<String>,
    #[schemars(with = "Option<TextOr<ContentPart>>")]
    output: Option<Value>,
    /// What reasoning is shown by where it has no text.
    summary: Option<Value>,
    /// What a response told of the item. Of a reference: which item it stands for.
    #[schemars(with = "Option<String>")]
    id: Option<Value>,
    #[serde(rename = "status")]
    #[schemars(skip)]
    _status: Option<IgnoredAny>,
    #[serde(rename = "phase")]
    #[schemars(skip)]
    _phase: Option<IgnoredAny>,
    /// Who calls a function: the model, or a program that it wrote.
    #[serde(rename = "caller")]
    #[schemars(skip)]
    _caller: Option<IgnoredAny>,
    /// Who has searched for tools.
    #[serde(rename = "execution")]
    #[schemars(skip)]
    _execution: Option<IgnoredAny>,
    /// What a client tells of the item's turn.
    #[serde(rename = "internal_chat_message_metadata_passthrough")]
    #[schemars(skip)]
    _passthrough: Option<IgnoredAny>,
    /// Only the server that wrote it can read it.
    #[schemars(skip)]
    encrypted_content: Option<IgnoredAny>,
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
    ToolSearchCall,
    ToolSearchOutput,
    AgentMessage,
    WebSearchCall,
    ImageGenerationCall,
    Reasoning,
    ItemReference,
    #[serde(alias = "compaction_summary")]
    Compaction,
    ContextCompaction,
    CompactionTrigger,
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
    /// An item of a stored conversation.
    ///
    /// # Errors
    /// `Internal`: it was read before.
    pub(super) fn of_stored(item: &StoredItem) -> Result<Self> {
        let read = serde_json::from_str(item.json.get());
        read.map_err(|e| Error::internal(format!("a stored item: {e}")))
    }

    /// The id of the item that this one refers to.
    fn reference(&self) -> Option<&str> {
        let id = self.id.as_ref().and_then(Value::as_str);
        id.filter(|_| self.kind == Some(InputItemKind::ItemReference))
    }

    /// The item itself, or the one that it refers to, if `stored` has that.
    fn resolved(self, stored: impl Fn(&str) -> Option<Arc<StoredItem>>) -> Result<Self> {
        let found = self.reference().and_then(stored);
        found.map_or(Ok(self), |item| Self::of_stored(&item))
    }

    /// Refuses what belongs to items of other types. Further keys of reasoning tell how a client shows it, and ask for
    /// nothing; those of what is left out may be any.
    fn check(&self, at: &FieldPath, kind: InputItemKind) -> Result<()> {
        let (name, has): (_, &[&str]) = match kind {
            InputItemKind::Message => ("message", &["role", "content"]),
            InputItemKind::FunctionCall => (
                "function_call",
                &["call_id", "name", "namespace", "arguments"],
            ),
            InputItemKind::FunctionCallOutput => (
                "function_call_output",
                &["call_id", "name", "namespace", "output"],
            ),
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
            InputItemKind::ToolSearchCall => ("tool_search_call", &["call_id", "arguments"]),
            InputItemKind::ToolSearchOutput => ("tool_search_output", &["call_id", "tools"]),
            InputItemKind::AgentMessage => ("agent_message", &["author", "recipient", "content"]),
            InputItemKind::Reasoning => ("reasoning", &["content", "summary"]),
            InputItemKind::WebSearchCall
            | InputItemKind::ImageGenerationCall
            | InputItemKind::ItemReference
            | InputItemKind::Compaction
            | InputItemKind::ContextCompaction
            | InputItemKind::CompactionTrigger => return Ok(()),
        };
        let other = self.other.0.as_ref();
        if let Some(key) = other.filter(|_| kind != InputItemKind::Reasoning) {
            return wrong(at.key(key.as_str()), "is not supported: leave it out");
        }
        let given = given! {
            self, role, content, call_id, name, namespace, arguments, input, action, tools, author, recipient, output,
            summary
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

/// What the items of a request become.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    pub messages: Vec<ChatMessage>,
    /// The tools in the items.
    pub tools: Vec<PlacedTool>,
    /// What was left out.
    pub warnings: Vec<String>,
    /// The assistant's thoughts before the next part of its turn.
    thoughts: Vec<String>,
}

/// The conversation of `instructions`, the items of an earlier response, and `input`, a text or a list of items, which may
/// refer to those that `stored` has.
///
/// # Errors
/// `Invalid`, naming the item.
pub(super) fn conversation(
    instructions: Option<String>,
    earlier: &[Arc<StoredItem>],
    input: TextOr<InputItem>,
    stored: impl Fn(&str) -> Option<Arc<StoredItem>>,
) -> Result<Conversation> {
    let mut chat = Conversation::default();
    chat.messages
        .extend(instructions.map(|text| ChatMessage::new("system", text)));
    for item in earlier {
        let at = FieldPath::from("previous_response_id");
        chat.add(&at, InputItem::of_stored(item)?)?;
    }
    match input {
        TextOr::Text(text) => chat.other(ChatMessage::new("user", text)),
        TextOr::List(items) if items.is_empty() => return wrong(FIELD, "must not be empty"),
        TextOr::List(items) => {
            let mut references = HashSet::new();
            for (i, item) in items.into_iter().enumerate() {
                let at = FieldPath::from(FIELD).index(i);
                // Otherwise a short body could be a conversation of any length.
                let id = item.reference();
                if id.is_some_and(|id| !references.insert(id.to_owned())) {
                    return wrong(
                        at.key("id"),
                        "must not be that of another reference: leave it out",
                    );
                }
                chat.add(&at, item.resolved(&stored)?)?;
            }
        }
    }
    chat.end_turn();
    Ok(chat)
}

/// The error of a reference to what is not stored, or no longer.
pub(super) fn not_stored<T>(at: &FieldPath) -> Result<T> {
    wrong(
        at.key("id"),
        "must be the id of an item that a stored response has added: send the item itself",
    )
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
                let at = at.key("arguments");
                let arguments = required(at.clone(), item.arguments)?;
                if !arguments.is_string() {
                    return wrong(at, "must be a string that holds a JSON object");
                }
                self.call(MessageCall::new(id, name, arguments));
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
            InputItemKind::AdditionalTools => self.add_tools(at, item.tools, false)?,
            InputItemKind::ToolSearchCall => {
                let at_arguments = at.key("arguments");
                let arguments = required(at_arguments.clone(), item.arguments)?;
                if !arguments.is_object() {
                    return wrong(at_arguments, "must be an object");
                }
                match item.call_id {
                    Some(id) => self.call(MessageCall::new(id, TOOL_SEARCH.into(), arguments)),
                    // Another server has searched.
                    None => self.leave_out(at, "tool_search_call"),
                }
            }
            InputItemKind::ToolSearchOutput => {
                let tools = item.tools.iter().flatten();
                let names: Vec<String> = tools.flat_map(ResponseTool::shown_names).collect();
                self.add_tools(at, item.tools, true)?;
                if let Some(id) = item.call_id {
                    let found = match &names[..] {
                        [] => "No tool was found.".to_owned(),
                        names => format!("These tools can be called now:\n{}", names.join("\n")),
                    };
                    self.other(ChatMessage::of_tool(id, found));
                }
            }
            InputItemKind::AgentMessage => {
                let author = required(at.key("author"), item.author)?;
                let recipient = required(at.key("recipient"), item.recipient)?;
                let content = required(at.key("content"), item.content)?;
                let (readable, is_encrypted) = readable(content);
                let text = object::read::<TextOr<ContentPart>>(&at.key("content"), readable)?;
                if is_encrypted {
                    self.leave_out(&at.key("content"), ENCRYPTED);
                }
                let text = text.lines();
                if !text.is_empty() {
                    let text = format!("Message from {author} to {recipient}:\n{text}");
                    self.other(ChatMessage::new(InputRole::User.name(), text));
                }
            }
            InputItemKind::WebSearchCall => self.leave_out(at, "web_search_call"),
            InputItemKind::ImageGenerationCall => self.leave_out(at, "image_generation_call"),
            InputItemKind::FunctionCallOutput
            | InputItemKind::CustomToolCallOutput
            | InputItemKind::LocalShellCallOutput => {
                let id = required(at.key("call_id"), item.call_id)?;
                let at = at.key("output");
                let output = required(at.clone(), item.output)?;
                refuse_images(&at, &output)?;
                let output = object::read::<TextOr<ContentPart>>(&at, output)?.lines();
                self.other(ChatMessage::of_tool(id, output));
            }
            InputItemKind::Reasoning => self.think(reasoning(item.content, item.summary)),
            InputItemKind::ContextCompaction if item.encrypted_content.is_none() => {
                self.leave_out(at, "context_compaction");
            }
            // Without what it stands for, the answer would be to another conversation.
            InputItemKind::Compaction | InputItemKind::ContextCompaction => {
                return wrong(
                    at.key("type"),
                    "must not be compaction, which only the server that wrote it can read: send the items that it stands for",
                );
            }
            InputItemKind::CompactionTrigger => {
                return wrong(
                    at.key("type"),
                    "must not be compaction_trigger, because nothing is compacted here: ask for a summary in a message",
                );
            }
            InputItemKind::ItemReference => return not_stored(at),
        }
        Ok(())
    }

    /// Adds tools of an item. Those that a search has found may be known already.
    fn add_tools(
        &mut self,
        at: &FieldPath,
        tools: Option<Vec<ResponseTool>>,
        is_found: bool,
    ) -> Result<()> {
        let at = at.key("tools");
        let tools = required(at.clone(), tools)?.into_iter().enumerate();
        self.tools.extend(tools.map(|(i, tool)| PlacedTool {
            at: at.index(i),
            tool,
            is_found,
        }));
        Ok(())
    }

    /// The model can answer without it; the client is told.
    fn leave_out(&mut self, at: &FieldPath, kind: &str) {
        self.warnings.push(format!(
            "{at}: {kind} is not available here and was left out"
        ));
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

/// Refuses the images of an output by their addresses: an error about one tells Codex to go on without the image.
fn refuse_images(at: &FieldPath, output: &Value) -> Result<()> {
    let mut parts = output.as_array().into_iter().flatten();
    match parts.position(|part| part["type"] == "input_image") {
        Some(i) => wrong(
            at.index(i).key("image_url"),
            "is not possible, because this model reads text only: send a part of the type input_text",
        ),
        None => Ok(()),
    }
}

/// A content without its encrypted parts, and whether there were any.
fn readable(content: Value) -> (Value, bool) {
    match content {
        Value::Array(mut parts) => {
            let count = parts.len();
            parts.retain(|part| part["type"] != ENCRYPTED);
            let is_encrypted = parts.len() < count;
            (parts.into(), is_encrypted)
        }
        other => (other, false),
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
mod tests;
