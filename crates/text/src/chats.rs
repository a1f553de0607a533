//! Chats as prompts: which template a chat is rendered with, and what templates tell of a model.

use super::json::python_json;
use super::tools::{ToolFormat, without_tools};
use super::{Chat, ChatTemplate, ReasoningFormat, Text, harmony};
use foretoken_core::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

impl Text {
    /// Compiles the Jinja source of a template for this model.
    ///
    /// # Errors
    /// `Setup`, if it does not parse.
    pub(super) fn compile_template(&self, source: Option<&str>) -> Result<Option<ChatTemplate>> {
        let name = |id: Option<u32>| self.token_name(id?);
        let (bos, eos) = (name(self.special.bos), name(self.eos));
        let compile = |source| ChatTemplate::new(source, bos.as_deref(), eos.as_deref());
        source.map(compile).transpose()
    }

    /// Returns the format in which the model marks its reasoning, as far as its chat template tells; `None` if the
    /// template has no such marks.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        let format = ReasoningFormat::of_template(self.chat_template()?)?;
        if format != ReasoningFormat::Qwen3 {
            return Some(format);
        }
        let messages = [json!({"role": "user", "content": "Hello"})];
        let prompt = self.render_chat(&messages, true, &Map::new());
        let begun = prompt.is_ok_and(|prompt| format.begins_with_reasoning(&prompt));
        Some(if begun {
            ReasoningFormat::DeepseekR1
        } else {
            format
        })
    }

    /// The chat template's Jinja source.
    pub fn chat_template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// The Jinja source of the template for chats with tools, if that is another one.
    pub fn tool_template(&self) -> Option<&str> {
        self.tool_template.as_ref().map(ChatTemplate::source)
    }

    /// Whether the model has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The template for chats with tools.
    fn template_with_tools(&self) -> Option<&ChatTemplate> {
        self.tool_template.as_ref().or(self.template.as_ref())
    }

    /// Whether the model's chat template tells it of tools.
    pub fn knows_tools(&self) -> bool {
        self.template_with_tools()
            .is_some_and(ChatTemplate::knows_tools)
    }

    /// Returns why the model's chat template cannot tell the model of tools, although it can be applied to other
    /// chats.
    pub fn tools_refused(&self) -> Option<&str> {
        self.template_with_tools()?.tools_refused()
    }

    /// Whether the chat template refuses or drops system messages, so that they become part of the user's.
    pub fn lacks_system(&self) -> bool {
        self.template
            .as_ref()
            .is_some_and(ChatTemplate::lacks_system)
    }

    /// Returns the format in which the model writes tool calls, as far as its chat template tells. A model whose
    /// template knows no tools is told to write the format of its template's calls, or Hermes'.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        let template = self.template_with_tools()?;
        if template.knows_tools() {
            ToolFormat::of_template(template.source())
        } else {
            let of_history = ToolFormat::of_history(template.source());
            Some(of_history.unwrap_or(ToolFormat::Hermes))
        }
    }

    /// The format that `named` means for this model: see [`ToolFormat::in_template`].
    pub fn meant_tool_format(&self, named: ToolFormat) -> ToolFormat {
        match self.template_with_tools() {
            Some(template) => named.in_template(template.source()),
            None => named,
        }
    }

    /// [`ReasoningFormat::Harmony`], if the chat template writes its channels.
    pub fn channels(&self) -> Option<ReasoningFormat> {
        let source = self.template_with_tools()?.source();
        harmony::is_template(source).then_some(ReasoningFormat::Harmony)
    }

    /// Renders a chat without tools; see [`Text::render`].
    ///
    /// # Errors
    /// The errors of [`Text::render`].
    pub fn render_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let chat = Chat {
            messages,
            tools: &[],
            add_generation_prompt,
            extra,
        };
        self.render(chat, None)
    }

    /// Whether the chat template has the roles `query` and `document`, as those of rerankers have.
    pub fn knows_pairs(&self) -> bool {
        let has = |role: &str| {
            let quoted = ['"', '\''].map(|quote| format!("{quote}{role}{quote}"));
            let source = self.chat_template().unwrap_or_default();
            quoted.iter().any(|name| source.contains(name))
        };
        has("query") && has("document")
    }

    /// The prompt with which a reranker was converted, which is no Jinja: `{query}` and `{document}` stand for these.
    pub fn rerank_template(&self) -> Option<&str> {
        self.rerank_template.as_deref()
    }

    /// Renders a query and a document, messages of these roles, perhaps after one of `system`, to the prompt of a reranker.
    ///
    /// # Errors
    /// The errors of [`Text::render`].
    pub fn render_pair(&self, messages: &[Value]) -> Result<String> {
        let Some(template) = &self.template else {
            return Err(Error::invalid(
                "messages",
                "this model has no chat template",
            ));
        };
        template.render_as_is(&Chat::of(messages))
    }

    /// Renders a chat with the model's template to a prompt. If the template knows no tools, they, their
    /// calls and their results are written into the messages, calls in `format` (by default Hermes').
    /// Encode the prompt without special tokens: the template writes them itself.
    ///
    /// # Errors
    /// `Invalid`, if the model has no template or the template refuses the messages.
    pub fn render(&self, chat: Chat<'_>, format: Option<ToolFormat>) -> Result<String> {
        let Some(template) = &self.template else {
            return Err(Error::invalid(
                "messages",
                "this model has no chat template; use /v1/completions",
            ));
        };
        let messages: Cow<'_, [Value]> = if self.channels().is_some() {
            harmony::messages(chat.messages).into()
        } else {
            chat.messages.into()
        };
        let messages = &*messages;
        let chat = Chat { messages, ..chat };
        let about_tools =
            |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
        if chat.tools.is_empty() && !chat.messages.iter().any(about_tools) {
            return template.render(&chat);
        }
        let template = self.tool_template.as_ref().unwrap_or(template);
        if template.knows_tools() {
            return with_calls(template, &chat);
        }
        let format = format.unwrap_or(ToolFormat::Hermes);
        let messages = without_tools(chat.messages, chat.tools, format);
        template.render(&Chat {
            messages: &messages,
            tools: &[],
            ..chat
        })
    }
}

/// Renders a chat with tools or calls. Some templates, as those of gpt-oss and Apertus, add descriptions to texts, which
/// fails where a tool has none.
fn with_calls(template: &ChatTemplate, chat: &Chat<'_>) -> Result<String> {
    let messages = match ToolFormat::of_template(template.source()) {
        Some(format) => in_form(format, chat.messages),
        None => chat.messages.into(),
    };
    let chat = &Chat {
        messages: &messages,
        ..*chat
    };
    let rendered = with_arguments(template, chat);
    if rendered.is_ok() {
        return rendered;
    }
    let Some(tools) = described(chat.tools) else {
        return rendered;
    };
    let described = Chat {
        tools: &tools,
        ..*chat
    };
    with_arguments(template, &described).or(rendered)
}

/// `tools` with a description of each, be it empty; `None` if each has one.
fn described(tools: &[Value]) -> Option<Vec<Value>> {
    let lacks_one = |tool: &Value| {
        let function = &tool["function"];
        function.is_object() && function["description"].is_null()
    };
    if !tools.iter().any(lacks_one) {
        return None;
    }
    let mut tools = tools.to_vec();
    for tool in tools.iter_mut().filter(|tool| lacks_one(tool)) {
        tool["function"]["description"] = "".into();
    }
    Some(tools)
}

/// Renders a chat whose calls have objects as arguments. Some templates, as DeepSeek's, take only JSON text.
fn with_arguments(template: &ChatTemplate, chat: &Chat<'_>) -> Result<String> {
    let rendered = template.render(chat);
    if rendered.is_ok()
        || !chat
            .messages
            .iter()
            .any(|message| message.get("tool_calls").is_some())
    {
        return rendered;
    }
    let mut messages = chat.messages.to_vec();
    for call in calls_of(&mut messages) {
        let arguments = &mut call["function"]["arguments"];
        if let (false, Ok(text)) = (arguments.is_string(), python_json(arguments)) {
            *arguments = text.into();
        }
    }
    let as_text = template.render(&Chat {
        messages: &messages,
        ..*chat
    });
    as_text.or(rendered)
}

/// `messages` with calls as templates of `format` take them.
fn in_form(format: ToolFormat, messages: &[Value]) -> Cow<'_, [Value]> {
    if format == ToolFormat::KimiK2 {
        numbered_ids(messages).into()
    } else if format == ToolFormat::Glm4 {
        calls_as_messages(&one_call_a_turn(messages)).into()
    } else if let Some(len) = format.id_len() {
        short_ids(messages, len).into()
    } else if format.is_single() {
        one_call_a_turn(messages).into()
    } else {
        messages.into()
    }
}

/// The calls of all messages.
fn calls_of(messages: &mut [Value]) -> impl Iterator<Item = &mut Value> {
    let lists = messages
        .iter_mut()
        .filter_map(|message| message.get_mut("tool_calls")?.as_array_mut());
    lists.flatten().filter(|call| call["function"].is_object())
}

/// `messages` as GLM-4's template takes them: each call is a message of its own, with the function's name as `metadata`, and
/// results have a role of their own.
fn calls_as_messages(messages: &[Value]) -> Vec<Value> {
    let mut all = Vec::with_capacity(messages.len());
    for message in messages {
        let mut message = message.clone();
        if message["role"] == "tool" {
            message["role"] = "observation".into();
        }
        let calls: Vec<Value> = calls_of(std::slice::from_mut(&mut message))
            .map(|call| call["function"].take())
            .collect();
        if let Some(message) = message.as_object_mut() {
            message.remove("tool_calls");
        }
        let has_text = message["content"]
            .as_str()
            .is_some_and(|text| !text.is_empty());
        if calls.is_empty() || has_text {
            all.push(message);
        }
        for function in calls {
            let arguments = &function["arguments"];
            let text = arguments.as_str().map(str::to_owned);
            let text = text.or_else(|| python_json(arguments).ok());
            all.push(json!({
                "role": "assistant", "metadata": function["name"], "content": text.unwrap_or_default()
            }));
        }
    }
    all
}

/// `messages` with the ids that Kimi's models give calls, which its template writes in place of the functions' names.
fn numbered_ids(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    // A client may use an id again in a later turn.
    let (mut ids, mut number) = (HashMap::new(), 0);
    for message in &mut messages {
        for call in calls_of(std::slice::from_mut(message)) {
            let name = call["function"]["name"].as_str().unwrap_or_default();
            let id = Value::from(format!("functions.{name}:{number}"));
            let before = std::mem::replace(&mut call["id"], id.clone());
            ids.insert(before.to_string(), id);
            number += 1;
        }
        let is_result = message["role"] == "tool";
        if is_result && let Some(id) = ids.get(&message["tool_call_id"].to_string()) {
            message["tool_call_id"] = id.clone();
        }
    }
    messages
}

/// `messages` with ids of `len` letters and digits, which Mistral's templates expect, in place of others: a chat may have
/// begun at another server. An id has the same new one everywhere.
fn short_ids(messages: &[Value], len: usize) -> Vec<Value> {
    let fits = |id: &str| id.len() == len && id.bytes().all(|b| b.is_ascii_alphanumeric());
    let mut messages = messages.to_vec();
    let mut used: HashSet<String> = HashSet::new();
    for_each_id(&mut messages, |id| {
        used.extend(id.as_str().filter(|id| fits(id)).map(str::to_owned));
    });
    let numbers = (0u64..).map(|number| format!("{number:0len$}"));
    let mut free = numbers.filter(|id| !used.contains(id));
    let mut ids: HashMap<String, String> = HashMap::new();
    for_each_id(&mut messages, |id| {
        if let Some(foreign) = id.as_str().filter(|id| !fits(id)) {
            let new = ids.entry(foreign.to_owned());
            let new = new.or_insert_with(|| free.next().unwrap_or_default());
            *id = Value::from(new.clone());
        }
    });
    messages
}

/// `messages` in which each call is a turn with its result. Turns whose results do not follow in the order of the calls
/// stay as they are.
fn one_call_a_turn(messages: &[Value]) -> Vec<Value> {
    let mut turns = Vec::new();
    let mut rest = messages;
    while let Some((message, after)) = rest.split_first() {
        rest = after;
        let calls = message["tool_calls"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let (results, later) = after.split_at_checked(calls.len()).unwrap_or_default();
        let answers = |(call, result): (&Value, &Value)| {
            result["role"] == "tool" && result["tool_call_id"] == call["id"]
        };
        let are_answered = calls.len() == results.len() && calls.iter().zip(results).all(answers);
        if calls.len() < 2 || !are_answered {
            turns.push(message.clone());
            continue;
        }
        let mut turn = message.clone();
        for (call, result) in calls.iter().zip(results) {
            turn["tool_calls"] = vec![call.clone()].into();
            turns.extend([turn.clone(), result.clone()]);
            // What the message says, it says once.
            turn = json!({"role": message["role"], "content": ""});
        }
        rest = later;
    }
    turns
}

/// Passes the ids of all calls to `change`, those of calls and those of their results.
fn for_each_id(messages: &mut [Value], mut change: impl FnMut(&mut Value)) {
    for message in messages {
        for call in calls_of(std::slice::from_mut(message)) {
            if let Some(id) = call.get_mut("id") {
                change(id);
            }
        }
        if let Some(id) = message.get_mut("tool_call_id") {
            change(id);
        }
    }
}

#[cfg(test)]
mod tests;
