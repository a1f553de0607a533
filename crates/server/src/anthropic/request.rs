//! Converts the body of `/v1/messages` to a chat.

use super::client_tools;
use super::events::MessageReply;
use super::input::{self, MessageTurn};
use crate::content::{ContentPart, TextOr};
use crate::context::Context;
use crate::headers::Warned;
use crate::openai::{Body, Job};
use crate::others::NoOthers;
use crate::structured::FlatFormat;
use crate::tool_choice::{ToolChoice, ToolMode};
use crate::tools::{Function, Tool};
use crate::wire::{self, ThinkingField, required, wrong};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The names of fields in chats, with their names in this API.
const NAMES: [(&str, &str); 7] = [
    ("tools.*.function.parameters", "tools.*.input_schema"),
    ("tools.*.function", "tools.*"),
    ("tool_choice.function", "tool_choice"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
    ("n_predict", "max_tokens"),
];

/// The fields that only this API has.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "Message")]
pub(crate) struct MessageFields {
    system: Option<TextOr<ContentPart>>,
    #[serde(deserialize_with = "Option::deserialize")]
    #[schemars(required)]
    messages: Option<Vec<MessageTurn>>,
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<MessageTool>>,
    tool_choice: Option<MessageToolChoice>,
    thinking: Option<ThinkingField>,
    enable_thinking: Option<bool>,
    thinking_token_budget: Option<i64>,
    output_config: Option<OutputConfig>,
    output_format: Option<FlatFormat>,
    chat_template_kwargs: Option<Map<String, Value>>,
    include_reasoning: Option<bool>,
    parallel_tool_calls: Option<bool>,
    /// What of earlier turns may be left out of the prompt: nothing is.
    #[serde(rename = "context_management")]
    #[schemars(with = "Option<Map<String, Value>>")]
    _context_management: Option<IgnoredAny>,
}

/// The type of tools that the request describes. The server has none of its own.
const CUSTOM: &str = "custom";

/// A tool, whose function is no object of its own.
#[derive(Debug, Deserialize, JsonSchema)]
struct MessageTool {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(flatten)]
    function: Function,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct MessageToolChoice {
    #[serde(rename = "type")]
    kind: ChoiceKind,
    /// Required where the type is `tool`.
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ChoiceKind {
    Auto,
    Any,
    None,
    Tool,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct OutputConfig {
    format: Option<FlatFormat>,
    /// For the chat template, if it has a variable `reasoning_effort`.
    effort: Option<String>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

impl Context<'_> {
    /// Reads the body of `/v1/messages`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn message(&self, body: &[u8]) -> Result<(Job, MessageReply)> {
        let (mut chat, warnings) = self.message_chat(body)?;
        match chat.common.max_tokens {
            None => return wrong("max_tokens", "is required"),
            Some(wire::NO_LIMIT) => return wrong("max_tokens", "must be at least 0"),
            // The prompt is only read into the cache.
            Some(0) => chat.fields.n_predict = chat.common.max_tokens.take(),
            Some(_) => (),
        }
        chat.common.refuse_chunk_options()?;
        let mut job = self.chat_job(chat).map_err(|e| e.renamed(&NAMES))?;
        job.warnings.extend(warnings);
        let reply = MessageReply::new(&job.header);
        Ok((job, reply))
    }

    /// The number of tokens of the prompt for the body of `/v1/messages/count_tokens`.
    ///
    /// # Errors
    /// The errors of [`Context::message`].
    pub fn message_tokens(&self, body: &[u8]) -> Result<Warned<TokenCount>> {
        let (chat, left_out) = self.message_chat(body)?;
        let counted = self.chat_tokens(chat);
        let (input_tokens, mut warnings) = counted.map_err(|e| e.renamed(&NAMES))?;
        warnings.extend(left_out);
        let answer = TokenCount { input_tokens };
        Ok(Warned { answer, warnings })
    }

    /// The chat that a body is, and what was left out of it.
    fn message_chat(&self, body: &[u8]) -> Result<(Body<wire::ChatFields>, Vec<String>)> {
        let Body {
            mut common,
            fields,
            structured,
        } = Body::<MessageFields>::read(body)?;
        if common.n.is_some_and(|n| n != 1) {
            return wrong(
                "n",
                "is not supported here: a message has one answer; leave it out",
            );
        }
        if let Some(sequences) = fields.stop_sequences {
            if common.stop.is_some() {
                return wrong(
                    "stop",
                    "and stop_sequences exclude each other: leave one out",
                );
            }
            common.stop = Some(TextOr::List(sequences));
        }
        let turns = fields.messages.unwrap_or_default();
        let is_open = turns.last().is_some_and(MessageTurn::is_answer);
        let config = fields.output_config.unwrap_or_default();
        let mut format = config.format.or(fields.output_format);
        if let Some(format) = &mut format {
            format.schema.name.get_or_insert("answer".into());
        }
        let structured = structured.with_format(format, "output_config")?;
        let parallel = fields.tool_choice.as_ref();
        let parallel = parallel.and_then(|choice| choice.disable_parallel_tool_use);
        let parallel = parallel.map(|disabled| !disabled);
        let merged = input::merged(fields.system, turns)?;
        let chat = Body {
            common,
            fields: wire::ChatFields {
                messages: Some(merged.messages),
                continue_final_message: is_open.then_some(true),
                tools: fields.tools.map(tools).transpose()?,
                tool_choice: fields.tool_choice.map(tool_choice).transpose()?,
                parallel_tool_calls: parallel.or(fields.parallel_tool_calls),
                chat_template_kwargs: fields.chat_template_kwargs,
                thinking: fields.thinking,
                enable_thinking: fields.enable_thinking,
                thinking_token_budget: fields.thinking_token_budget,
                reasoning_effort: config.effort,
                include_reasoning: fields.include_reasoning,
                ..wire::ChatFields::default()
            },
            structured,
        };
        Ok((chat, merged.warnings))
    }
}

/// A chat's tools. Those of other types are Anthropic's: some are run by clients, the others by its servers.
fn tools(list: Vec<MessageTool>) -> Result<Vec<Tool>> {
    let tool = |(i, tool): (usize, MessageTool)| {
        let at = FieldPath::from("tools").index(i);
        if let Some(kind) = tool.kind.as_deref().filter(|kind| *kind != CUSTOM) {
            let mut function = tool.function;
            return Ok(if client_tools::describe(&at, kind, &mut function)? {
                Tool::function(at, function)
            } else {
                Tool::hosted(at, kind, Some(function.name))
            });
        }
        required(at.key("input_schema"), tool.function.parameters.as_ref())?;
        Ok(Tool::function(at, tool.function))
    };
    list.into_iter().enumerate().map(tool).collect()
}

fn tool_choice(choice: MessageToolChoice) -> Result<ToolChoice> {
    if choice.name.is_some() && !matches!(choice.kind, ChoiceKind::Tool) {
        return wrong("tool_choice.name", "requires the type tool");
    }
    match choice.kind {
        ChoiceKind::Auto => Ok(ToolChoice::Mode(ToolMode::Auto)),
        ChoiceKind::Any => Ok(ToolChoice::Mode(ToolMode::Required)),
        ChoiceKind::None => Ok(ToolChoice::Mode(ToolMode::None)),
        ChoiceKind::Tool => required("tool_choice.name", choice.name).map(ToolChoice::named),
    }
}
