//! Converts the messages of a request to those of a chat.

use crate::conversation::{ChatMessage, MessageCall};
use crate::wire::wrong;
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// A message of a request.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaMessage")]
pub(super) struct Turn {
    role: String,
    content: Option<String>,
    /// What the assistant thought in an earlier turn.
    thinking: Option<String>,
    /// The calls of an earlier turn of the assistant.
    tool_calls: Option<Vec<Call>>,
    /// The function whose result a message of `tool` is.
    tool_name: Option<String>,
    /// The call that a message of `tool` answers.
    tool_call_id: Option<String>,
    /// There may be none.
    #[schemars(with = "Option<Vec<String>>")]
    images: Option<Vec<IgnoredAny>>,
    /// What else the template may ask for.
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Turn {
    /// Whether the model wrote a text, so that its answer continues it if it is the last one, as at Ollama.
    pub fn is_answer(&self) -> bool {
        let calls = self.tool_calls.as_deref().unwrap_or_default();
        self.role == "assistant" && calls.is_empty()
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaCallOfTurn")]
struct Call {
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaCalledFunction")]
struct CalledFunction {
    name: String,
    /// An object, or its JSON text.
    #[serde(default)]
    arguments: Value,
}

/// The calls of a chat. Clients of this API may leave out their ids, which templates may ask for.
#[derive(Debug, Default)]
struct Calls {
    count: usize,
    /// The ids and names of those that no message answers yet.
    open: Vec<(String, String)>,
}

impl Calls {
    fn add(&mut self, call: Call) -> MessageCall {
        let CalledFunction { name, arguments } = call.function;
        let id = call.id.unwrap_or_else(|| self.new_id());
        self.open.push((id.clone(), name.clone()));
        MessageCall::new(id, name, arguments)
    }

    /// The id of the first open call of this function, or of any if there is no name.
    fn answered(&mut self, name: Option<&str>) -> String {
        let is = |(_, called): &(String, String)| name.is_none_or(|name| name == called);
        match self.open.iter().position(is) {
            Some(at) => self.open.remove(at).0,
            None => self.new_id(),
        }
    }

    /// Nine letters and digits, as Mistral's templates ask for.
    fn new_id(&mut self) -> String {
        self.count += 1;
        format!("call{:05}", self.count)
    }
}

/// The messages of a chat that `turns` are.
///
/// # Errors
/// `Invalid`, naming the message and its key.
pub(super) fn messages(turns: Vec<Turn>) -> Result<Vec<ChatMessage>> {
    let mut calls = Calls::default();
    let turns = turns.into_iter().enumerate();
    turns
        .map(|(i, turn)| message(&FieldPath::from("messages").index(i), turn, &mut calls))
        .collect()
}

fn message(at: &FieldPath, turn: Turn, calls: &mut Calls) -> Result<ChatMessage> {
    refuse_images(at.key("images"), turn.images.as_deref())?;
    let mut others = turn.others;
    let is_tool = turn.role == "tool";
    let mut tool_call_id = turn.tool_call_id;
    if is_tool {
        match &tool_call_id {
            Some(id) => calls.open.retain(|(open, _)| open != id),
            None => tool_call_id = Some(calls.answered(turn.tool_name.as_deref())),
        }
    }
    if let Some(name) = turn.tool_name {
        if !is_tool {
            return wrong(at.key("tool_name"), "is possible only for messages of tool");
        }
        others.insert("name".into(), name.into());
    }
    let list = turn.tool_calls.unwrap_or_default().into_iter();
    Ok(ChatMessage {
        reasoning_content: turn.thinking.filter(|text| !text.is_empty()),
        tool_calls: Some(list.map(|call| calls.add(call)).collect()),
        tool_call_id,
        others,
        ..ChatMessage::new(&turn.role, turn.content.unwrap_or_default())
    })
}

/// Refuses images, which models here cannot read.
///
/// # Errors
/// `Invalid`, naming the field.
pub(super) fn refuse_images(at: FieldPath, images: Option<&[IgnoredAny]>) -> Result<()> {
    if images.is_some_and(|images| !images.is_empty()) {
        return wrong(
            at,
            "is not supported: the model reads text only; leave it out",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::checked;
    use serde_json::json;

    fn read(turns: Value) -> Result<Vec<ChatMessage>> {
        let turns = serde_json::from_value(turns).expect("messages");
        messages(turns).and_then(checked)
    }

    #[test]
    fn results_find_their_calls() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"a": 1}}});
        let chat = read(json!([
            {"role": "user", "content": "Hi", "images": []},
            {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("f"), call("g"), call("f")]},
            {"role": "tool", "tool_name": "g", "content": "1"},
            {"role": "tool", "tool_name": "f", "content": "2"},
            {"role": "tool", "content": "3"},
            {"role": "tool", "tool_name": "gone", "content": "4"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "x", "type": "function", "function": {"index": 0, "name": "f", "arguments": "{}"}},
            ]},
            {"role": "tool", "tool_call_id": "x", "content": "5"},
        ]));
        let chat = chat.expect("fine");
        let ids: Vec<Option<&str>> = chat.iter().map(|m| m.tool_call_id.as_deref()).collect();
        let expected = [
            None,
            None,
            Some("call00002"),
            Some("call00001"),
            Some("call00003"),
            Some("call00004"),
            None,
            Some("x"),
        ];
        assert_eq!(ids, expected);
        assert_eq!(chat[1].reasoning_content.as_deref(), Some("Hm."));
        assert_eq!(chat[0].tool_calls.as_ref().map(Vec::len), None);
        let calls = json!(chat[1].tool_calls);
        assert_eq!(calls[1]["id"], "call00002");
        assert_eq!(
            calls[1]["function"],
            json!({"name": "g", "arguments": {"a": 1}})
        );
        assert_eq!(chat[2].others["name"], "g");
    }

    #[test]
    fn what_is_not_read_is_refused_by_name() {
        for (turn, at) in [
            (
                json!({"role": "user", "content": "a", "images": ["AAAA"]}),
                "messages[0].images",
            ),
            (
                json!({"role": "user", "content": "a", "tool_name": "f"}),
                "messages[0].tool_name",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = read(json!([turn])).expect_err(at);
            assert_eq!(error.param().as_deref(), Some(at));
        }
    }
}
