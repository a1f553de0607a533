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
    /// The data of an image or a document.
    #[schemars(with = "Option<Map<String, Value>>")]
    source: Option<IgnoredAny>,
    /// What a document is called, and where it is from.
    #[schemars(with = "Option<String>")]
    title: Option<IgnoredAny>,
    #[schemars(with = "Option<String>")]
    context: Option<IgnoredAny>,
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
    /// The model is told that there was one, where a tool has put it into the user's turn.
    Image,
    Document,
}

/// A part of the result of a call.
#[derive(Debug, Deserialize, JsonSchema)]
struct ResultPart {
    #[serde(rename = "type")]
    kind: ResultPartKind,
    text: Option<String>,
    tool_name: Option<String>,
    /// The data of an image or a document.
    #[schemars(with = "Option<Map<String, Value>>")]
    source: Option<IgnoredAny>,
    /// What a document is called, and where it is from.
    #[schemars(with = "Option<String>")]
    title: Option<IgnoredAny>,
    #[schemars(with = "Option<String>")]
    context: Option<IgnoredAny>,
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
    Document,
}

impl ResultPart {
    /// Refuses what belongs to parts of other types. Returns the name of its own.
    fn check(&self, at: &FieldPath) -> Result<&'static str> {
        let (name, has): (_, &[&str]) = match self.kind {
            ResultPartKind::Text => ("text", &["text"]),
            ResultPartKind::ToolReference => ("tool_reference", &["tool_name"]),
            ResultPartKind::Image => ("image", &["source"]),
            ResultPartKind::Document => ("document", &["source", "title", "context"]),
        };
        let given = given! { self, text, tool_name, source, title, context };
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
                InputBlockKind::Image | InputBlockKind::Document if is_of_tool => {
                    let line = self.leave_out(&at, name);
                    self.say(role, line);
                }
                _ if role == "user" => {
                    let what = "must be text or tool_result, because this model reads text only";
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
                ResultPartKind::Image | ResultPartKind::Document => self.leave_out(&at, name),
            });
        }
        Ok(lines.join("\n"))
    }

    /// The line that the model reads in the place of an image or a document. The client is told.
    fn leave_out(&mut self, at: &FieldPath, name: &str) -> String {
        self.warnings.push(format!(
            "{at}: this model reads text only, and the {name} was left out"
        ));
        format!("[{name}: this model reads text only]")
    }
}

/// Both texts, each on lines of its own; one that is empty has none.
fn joined(mut text: String, more: String) -> String {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text + &more
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
            InputBlockKind::ToolResult | InputBlockKind::Image | InputBlockKind::Document => {
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

    fn read_all(system: &Value, turns: &Value) -> Result<MergedTurns> {
        let body = json!({"system": system, "messages": turns}).to_string();
        let body = JsonObject::parse(body.as_bytes(), &[wire::names::<Asked>()])?;
        let asked: Asked = body.fields()?;
        merged(asked.system, asked.messages.unwrap_or_default())
    }

    /// The messages.
    fn read(system: &Value, turns: &Value) -> Result<Value> {
        Ok(json!(read_all(system, turns)?.messages))
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
            {"role": "tool", "tool_call_id": "1", "content": "Error: one\nTool: Monitor"},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "tool", "tool_call_id": "2", "content": ""},
        ]);
        assert_eq!(read(&system, &turns).expect("fine"), expected);
    }

    #[test]
    fn turns_of_the_model_are_one_message() {
        let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "f", "input": {}});
        let says = |content: Value| json!({"role": "assistant", "content": content});
        let mut turns = vec![
            json!({"role": "user", "content": "Hi"}),
            says(json!([{"type": "thinking", "thinking": "Hm."}])),
            says(json!([{"type": "text", "text": "Let me look."}])),
            says(json!([call("1")])),
            says(
                json!([{"type": "thinking", "thinking": "So."}, {"type": "text", "text": "And there."}, call("2")]),
            ),
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "one"}]}),
            says("Yes,".into()),
            says("it is.".into()),
        ];
        let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {}}});
        let expected = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Let me look.\nAnd there.", "reasoning_content": "Hm.\nSo.",
             "tool_calls": [call("1"), call("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "assistant", "content": "Yes,\nit is."},
        ]);
        let read = |turns: &[Value]| read(&Value::Null, &json!(turns));
        assert_eq!(read(&turns).expect("fine"), expected);
        // The last message, which the answer continues, is the whole one.
        turns.truncate(4);
        turns.push(says("There.".into()));
        let error = read(&turns).expect_err("refused");
        assert_eq!(error.param().as_deref(), Some("messages[4].content"));
    }

    #[test]
    fn results_say_that_a_call_failed() {
        let of = |content: Value| {
            let block = json!({"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": content});
            let turns = json!([{"role": "user", "content": [block]}]);
            read(&Value::Null, &turns).expect("fine")[0]["content"].clone()
        };
        for (content, expected) in [
            (json!("no such file"), "Error: no such file"),
            (
                json!([{"type": "text", "text": "no"}, {"type": "text", "text": "file"}]),
                "Error: no\nfile",
            ),
            (Value::Null, "Error"),
            (json!([]), "Error"),
            (json!(" \n"), "Error"),
            (json!("Error: no file"), "Error: no file"),
            (json!("ValueError: no"), "ValueError: no"),
            (
                json!("<tool_use_error>no</tool_use_error>"),
                "<tool_use_error>no</tool_use_error>",
            ),
            (json!("the error is"), "Error: the error is"),
        ] {
            assert_eq!(of(content), expected);
        }
    }

    #[test]
    fn images_and_documents_of_tools_are_left_out() {
        let data = |kind: &str| json!({"type": kind, "source": {"type": "base64", "media_type": "x/y", "data": "AAAA"}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let of_user = |content: Value| json!({"role": "user", "content": content});
        let result =
            |content: Value| json!({"type": "tool_result", "tool_use_id": "1", "content": content});
        let mut document = data("document");
        document["title"] = "a.pdf".into();
        // As Claude Code reads images and PDF files.
        let turns = json!([
            of_user(json!([result(json!([text("The page:"), data("image"), data("document")]))])),
            of_user(json!([result("PDF file read".into()), document, text("And?")])),
            {"role": "assistant", "content": "Yes."},
            of_user(json!([result("Read".into())])),
            of_user(json!([data("image")])),
        ]);
        let read = read_all(&Value::Null, &turns).expect("fine");
        let said = |message: &ChatMessage| (message.role.clone(), message.content.clone());
        let said: Vec<_> = read.messages.iter().map(said).collect();
        let (image, document) = (
            "[image: this model reads text only]",
            "[document: this model reads text only]",
        );
        let expected = [
            ("tool", format!("The page:\n{image}\n{document}")),
            ("tool", "PDF file read".into()),
            ("user", format!("{document}\nAnd?")),
            ("assistant", "Yes.".into()),
            ("tool", "Read".into()),
            ("user", image.into()),
        ];
        assert_eq!(said, expected.map(|(role, text)| (role.to_owned(), text)));
        let expected = [
            ("messages[0].content[0].content[1]", "image"),
            ("messages[0].content[0].content[2]", "document"),
            ("messages[1].content[1]", "document"),
            ("messages[4].content[0]", "image"),
        ];
        let told = |(at, name): (&str, &str)| {
            format!("{at}: this model reads text only, and the {name} was left out")
        };
        assert_eq!(read.warnings, expected.map(told));
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
                user(json!([{"type": "document", "source": {}}])),
                "messages[0].content[0].type",
            ),
            (
                both(json!([{"type": "image", "source": {}}])),
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
                    json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "search_result"}]}]),
                ),
                "messages[0].content[0].content[0].type",
            ),
            (
                user(
                    json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "text": "x"}]}]),
                ),
                "messages[0].content[0].content[0].text",
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
