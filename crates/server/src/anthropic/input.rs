//! Converts the turns of a request to the messages of a chat.

use super::document::{Document, SearchResult, Source, joined};
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
    source: Option<Source>,
    /// What a document or a search result is called, and where a document is from.
    title: Option<String>,
    context: Option<String>,
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
    /// Those of an earlier text; of a document, whether the answer shall have some.
    #[schemars(skip)]
    citations: Option<Value>,
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
    /// The model is told that there was one, where a tool has put it into the user's turn.
    Image,
    /// A text; as an image if it is something else.
    Document,
    SearchResult,
}

/// A part of the result of a call.
#[derive(Debug, Deserialize, JsonSchema)]
struct ResultPart {
    #[serde(rename = "type")]
    kind: ResultPartKind,
    text: Option<String>,
    tool_name: Option<String>,
    source: Option<Source>,
    /// The text of a search result.
    content: Option<TextOr<ContentPart>>,
    /// What a document or a search result is called, and where a document is from.
    title: Option<String>,
    context: Option<String>,
    #[schemars(skip)]
    citations: Option<Value>,
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
    /// The model is told that there was one: tools return such without being asked.
    Image,
    /// A text; as an image if it is something else.
    Document,
    SearchResult,
}

impl ResultPart {
    /// Refuses what belongs to parts of other types. Returns the name of its own.
    fn check(&self, at: &FieldPath) -> Result<&'static str> {
        let (name, has): (_, &[&str]) = match self.kind {
            ResultPartKind::Text => ("text", &["text"]),
            ResultPartKind::ToolReference => ("tool_reference", &["tool_name"]),
            ResultPartKind::Image => ("image", &["source"]),
            ResultPartKind::Document => ("document", &["source", "title", "context"]),
            ResultPartKind::SearchResult => ("search_result", &["source", "title", "content"]),
        };
        let given = given! { self, text, tool_name, source, content, title, context };
        refuse_inapplicable(at, name, has, &given)?;
        Ok(name)
    }
}

impl InputBlock {
    /// Refuses what belongs to blocks of other types. Returns the name of its own.
    fn check(&self, at: &FieldPath) -> Result<&'static str> {
        let (name, has): (_, &[&str]) = match self.kind {
            InputBlockKind::Text => ("text", &["text"]),
            InputBlockKind::Thinking => ("thinking", &["thinking"]),
            InputBlockKind::RedactedThinking => ("redacted_thinking", &[]),
            InputBlockKind::ToolUse => ("tool_use", &["id", "name", "input"]),
            InputBlockKind::ToolResult => ("tool_result", &["tool_use_id", "content", "is_error"]),
            InputBlockKind::Image => ("image", &["source"]),
            InputBlockKind::Document => ("document", &["source", "title", "context"]),
            InputBlockKind::SearchResult => ("search_result", &["source", "title", "content"]),
        };
        let given = given! {
            self, text, thinking, id, name, input, tool_use_id, content, is_error, source, title, context
        };
        refuse_inapplicable(at, name, has, &given)?;
        Ok(name)
    }
}

/// What `system` and the turns of a request become.
#[derive(Debug, Default)]
pub(super) struct MergedTurns {
    pub messages: Vec<ChatMessage>,
    /// What was left out.
    pub warnings: Vec<String>,
}

/// The messages of `system` and `turns`.
///
/// # Errors
/// `Invalid`, naming the block.
pub(super) fn merged(
    system: Option<TextOr<ContentPart>>,
    turns: Vec<MessageTurn>,
) -> Result<MergedTurns> {
    const FIELD: &str = "messages";
    let Some(last) = turns.len().checked_sub(1) else {
        return wrong(FIELD, "must not be empty");
    };
    let mut merged = MergedTurns::default();
    let system = system.map(|system| ChatMessage::new("system", system.lines()));
    merged.messages.extend(system);
    for (i, turn) in turns.into_iter().enumerate() {
        let at = FieldPath::from(FIELD).index(i).key("content");
        match turn.role {
            TurnRole::User => merged.add("user", &at, turn.content)?,
            TurnRole::Assistant => {
                merged.answer(assistant(&at, turn.content)?);
                if let Some(message) = merged.messages.last().filter(|_| i == last) {
                    check_open(&at, message)?;
                }
            }
            TurnRole::System => merged.add("system", &at, turn.content)?,
        }
    }
    Ok(merged)
}

impl MergedTurns {
    /// Adds what a user says and the results of calls, in their order, or instructions (`system`).
    fn add(&mut self, role: &str, at: &FieldPath, content: TextOr<InputBlock>) -> Result<()> {
        let blocks = match content {
            TextOr::Text(text) => {
                self.say(role, text);
                return Ok(());
            }
            TextOr::List(blocks) => blocks,
        };
        // Tools may add to what the user says after their results.
        let is_result = |block: &InputBlock| matches!(block.kind, InputBlockKind::ToolResult);
        let follows = self.messages.last().is_some_and(|last| last.role == "tool");
        let is_of_tool = role == "user" && (follows || blocks.iter().any(is_result));
        for (i, block) in blocks.into_iter().enumerate() {
            let at = at.index(i);
            let name = block.check(&at)?;
            match block.kind {
                InputBlockKind::Text => self.say(role, required(at.key("text"), block.text)?),
                InputBlockKind::ToolResult if role == "user" => {
                    let id = required(at.key("tool_use_id"), block.tool_use_id)?;
                    let mut content = self.result(&at.key("content"), block.content)?;
                    if block.is_error == Some(true) {
                        content = failed(content);
                    }
                    self.messages.push(ChatMessage::of_tool(id, content));
                }
                InputBlockKind::Image if is_of_tool => {
                    let line = self.leave_out(&at, name);
                    self.say(role, line);
                }
                InputBlockKind::Document if role == "user" => {
                    let document = Document {
                        source: block.source,
                        title: block.title,
                        context: block.context,
                        citations: block.citations,
                    };
                    let text = match document.text(&at)? {
                        Some(text) => text,
                        None if is_of_tool => self.leave_out(&at, name),
                        None => {
                            let what =
                                "must be text or content, because this model reads text only";
                            return wrong(at.key("source").key("type"), what);
                        }
                    };
                    self.say(role, text);
                }
                InputBlockKind::SearchResult if role == "user" => {
                    let content = block
                        .content
                        .map(|content| self.result(&at.key("content"), Some(content)));
                    let found = SearchResult {
                        source: block.source,
                        title: block.title,
                        content: content.transpose()?,
                        citations: block.citations,
                    };
                    self.say(role, found.text(&at)?);
                }
                _ if role == "user" => {
                    let what = "must be text, document, search_result or tool_result, because this model reads text only";
                    return wrong(at.key("type"), what);
                }
                _ => return wrong(at.key("type"), "must be text"),
            }
        }
        Ok(())
    }

    /// Adds to what this role said last, if nobody spoke since: turns of the same role are one.
    fn say(&mut self, role: &str, text: String) {
        match self.messages.last_mut().filter(|last| last.role == role) {
            Some(last) => {
                last.content.push('\n');
                last.content.push_str(&text);
            }
            None => self.messages.push(ChatMessage::new(role, text)),
        }
    }

    /// Adds a turn of the model, which is one with the turn before it if that is the model's, too.
    fn answer(&mut self, turn: ChatMessage) {
        let last = self.messages.last_mut();
        let Some(last) = last.filter(|last| last.role == turn.role) else {
            self.messages.push(turn);
            return;
        };
        last.content = joined(std::mem::take(&mut last.content), turn.content);
        if let Some(thought) = turn.reasoning_content {
            let before = last.reasoning_content.take();
            last.reasoning_content = Some(joined(before.unwrap_or_default(), thought));
        }
        if let Some(calls) = turn.tool_calls {
            last.tool_calls.get_or_insert_default().extend(calls);
        }
    }

    /// The text of the result of a call.
    fn result(&mut self, at: &FieldPath, content: Option<TextOr<ResultPart>>) -> Result<String> {
        let parts = match content {
            None => return Ok(String::new()),
            Some(TextOr::Text(text)) => return Ok(text),
            Some(TextOr::List(parts)) => parts,
        };
        let mut lines = Vec::new();
        for (i, part) in parts.into_iter().enumerate() {
            let at = at.index(i);
            let name = part.check(&at)?;
            lines.push(match part.kind {
                ResultPartKind::Text => required(at.key("text"), part.text)?,
                ResultPartKind::ToolReference => {
                    let tool = required(at.key("tool_name"), part.tool_name)?;
                    format!("Tool: {tool}")
                }
                ResultPartKind::Image => self.leave_out(&at, name),
                ResultPartKind::Document => {
                    let document = Document {
                        source: part.source,
                        title: part.title,
                        context: part.context,
                        citations: part.citations,
                    };
                    let text = document.text(&at)?;
                    text.unwrap_or_else(|| self.leave_out(&at, name))
                }
                ResultPartKind::SearchResult => {
                    let found = SearchResult {
                        source: part.source,
                        title: part.title,
                        content: part.content.map(TextOr::lines),
                        citations: part.citations,
                    };
                    found.text(&at)?
                }
            });
        }
        Ok(lines.join("\n"))
    }

    /// The line that the model reads in the place of an image, or of a document that is no text. The client is told.
    fn leave_out(&mut self, at: &FieldPath, name: &str) -> String {
        self.warnings.push(format!(
            "{at}: this model reads text only, and the {name} was left out"
        ));
        format!("[{name}: this model reads text only]")
    }
}

/// The result of a call that failed. Templates do not show that it did, so its text must.
fn failed(content: String) -> String {
    let first = content.split_whitespace().next();
    match first.map(str::to_ascii_lowercase) {
        None => "Error".into(),
        Some(word) if word.contains("error") => content,
        Some(_) => format!("Error: {content}"),
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
            InputBlockKind::ToolResult
            | InputBlockKind::Image
            | InputBlockKind::Document
            | InputBlockKind::SearchResult => {
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
mod tests;
