//! Converts the body of `/v1/messages` to a chat.

use super::events::Reply;
use super::input::{self, Turn};
use crate::error::{Error, Result};
use crate::http::context::Context;
use crate::http::openai::{ChatFields, Job, text_fields};
use crate::http::tools::Tools;
use crate::http::wire::{self, OneOrMany, wrong};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What chats call the fields, and what this API does.
const NAMES: [(&str, &str); 5] = [
    (".function.parameters", ".input_schema"),
    (".function", ""),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
];

/// The fields that only this API has.
#[derive(Debug, Deserialize, JsonSchema)]
pub(in crate::http) struct Fields {
    system: Option<Value>,
    messages: Option<Vec<Turn>>,
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    output_format: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    include_reasoning: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

/// Whether the model thinks. How many tokens it may think is a hint.
#[derive(Debug, Deserialize, JsonSchema)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct OutputConfig {
    format: Option<Value>,
}

impl Context<'_> {
    /// Reads the body of `/v1/messages`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn message(&self, body: &[u8]) -> Result<(Job, Reply)> {
        let chat = self.message_chat(body)?;
        if chat.common.max_tokens.is_none() {
            return wrong("max_tokens", "is required");
        }
        chat.common.refuse_chunk_options()?;
        let job = self.chat_job(chat).map_err(|e| e.renamed(&NAMES))?;
        let reply = Reply::new(&job.header);
        Ok((job, reply))
    }

    /// The number of tokens of the prompt for the body of `/v1/messages/count_tokens`.
    ///
    /// # Errors
    /// As [`Context::message`].
    pub fn message_tokens(&self, body: &[u8]) -> Result<usize> {
        let chat = self.message_chat(body)?;
        self.model(chat.common.model.as_deref())?;
        let fields = chat.fields;
        let prompt = Tools::read(fields.tools, fields.tool_choice).and_then(|tools| {
            let messages = fields.messages.unwrap_or_default();
            self.chat_prompt(messages, &tools.list, None, fields.chat_template_kwargs)
        });
        let prompt = prompt.map_err(|e| e.renamed(&NAMES))?;
        let ids = self.encode(&prompt, false);
        let ids = ids.map_err(|e| e.renamed(&[("prompt", "messages")]))?;
        Ok(ids.len())
    }

    fn message_chat(&self, body: &[u8]) -> Result<ChatFields> {
        let (mut common, fields, structured) = text_fields::<Fields>(body)?;
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
            common.stop = Some(OneOrMany::Many(sequences));
        }
        let turns = fields.messages.unwrap_or_default();
        let config = fields.output_config.unwrap_or_default();
        let format = config.format.or(fields.output_format);
        let structured = structured.with_format(format.map(response_format), "output_config")?;
        let parallel = fields.tool_choice.as_ref();
        let parallel = parallel.and_then(|choice| choice.disable_parallel_tool_use);
        Ok(ChatFields {
            common,
            fields: wire::Chat {
                messages: Some(input::messages(fields.system, turns)?),
                tools: fields.tools.map(tools).transpose()?,
                tool_choice: fields.tool_choice.map(tool_choice).transpose()?,
                parallel_tool_calls: parallel.map(|disabled| !disabled),
                chat_template_kwargs: self
                    .thinking(fields.thinking.as_ref(), fields.chat_template_kwargs)?,
                include_reasoning: fields.include_reasoning,
                ..wire::Chat::default()
            },
            structured,
        })
    }

    /// Tells the template whether the model thinks, if the request says so.
    fn thinking(
        &self,
        thinking: Option<&Thinking>,
        kwargs: Option<Map<String, Value>>,
    ) -> Result<Option<Map<String, Value>>> {
        const FIELD: &str = "thinking";
        let enabled = match thinking.map(|thinking| thinking.kind.as_str()) {
            None => return Ok(kwargs),
            Some("disabled") => false,
            Some("enabled" | "adaptive") if self.reasoning_format.is_some() => true,
            Some("enabled" | "adaptive") => {
                let message = "thinking is not supported by this model: leave it out, or start the server with --reasoning-parser";
                return Err(Error::invalid(FIELD, message));
            }
            Some(_) => {
                return wrong("thinking.type", "must be enabled, adaptive or disabled");
            }
        };
        let mut kwargs = kwargs.unwrap_or_default();
        kwargs
            .entry("enable_thinking")
            .or_insert_with(|| enabled.into());
        Ok(Some(kwargs))
    }
}

/// The `response_format` of a chat, whose schema has a name.
fn response_format(format: Value) -> Value {
    if format["type"] == "json_schema" {
        let schema = json!({"name": "answer", "schema": format["schema"]});
        json!({"type": "json_schema", "json_schema": schema})
    } else {
        format
    }
}

/// A chat's tools. What tells how they are cached is left out: everything is.
fn tools(list: Vec<Value>) -> Result<Vec<Value>> {
    let tool = |(i, mut tool): (usize, Value)| {
        let wrong = |key: &str, what: &str| {
            let field = format!("tools[{i}]{key}");
            let message = format!("{field} {what}");
            Error::invalid(&field, message)
        };
        let Some(fields) = tool.as_object_mut() else {
            return Err(wrong("", "must be an object with name and input_schema"));
        };
        match fields.remove("type") {
            None | Some(Value::Null) => {}
            Some(kind) if kind == "custom" => {}
            Some(_) => {
                let what = "must be custom: the server has no tools of its own";
                return Err(wrong(".type", what));
            }
        }
        fields.remove("cache_control");
        let schema = fields.remove("input_schema");
        let schema = schema.ok_or_else(|| wrong(".input_schema", "is required"))?;
        fields.insert("parameters".into(), schema);
        Ok(json!({"type": "function", "function": std::mem::take(fields)}))
    };
    list.into_iter().enumerate().map(tool).collect()
}

fn tool_choice(choice: Choice) -> Result<Value> {
    match (choice.kind.as_str(), choice.name) {
        ("auto", _) => Ok("auto".into()),
        ("any", _) => Ok("required".into()),
        ("none", _) => Ok("none".into()),
        ("tool", Some(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
        ("tool", None) => wrong(
            "tool_choice.name",
            "is required where tool_choice.type is tool",
        ),
        _ => wrong("tool_choice.type", "must be auto, any, tool or none"),
    }
}
