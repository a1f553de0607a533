//! Converts the body of `/v1/responses` to a chat.

use super::events::Reply;
use super::input::messages;
use crate::error::{Error, Result};
use crate::http::context::Context;
use crate::http::openai::{ChatFields, Job, text_fields};
use crate::http::wire::{self, Common, required, wrong};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What chats call the fields, and what this API does.
const NAMES: [(&str, &str); 5] = [
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function", ""),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
];

/// What `include` may ask for: it is empty, because reasoning is not encrypted here.
const INCLUDABLE: &str = "reasoning.encrypted_content";

/// The fields that only this API has.
#[derive(Debug, Deserialize, JsonSchema)]
pub(in crate::http) struct Fields {
    input: Option<Value>,
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextOptions>,
    reasoning: Option<ReasoningOptions>,
    include: Option<Vec<String>>,
    metadata: Option<Map<String, Value>>,
    prompt: Option<Value>,
    logprobs: Option<Value>,
    add_special_tokens: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    include_reasoning: Option<bool>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct TextOptions {
    format: Option<Value>,
    /// A hint.
    verbosity: Option<String>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct ReasoningOptions {
    /// A hint.
    effort: Option<String>,
    summary: Option<String>,
    generate_summary: Option<String>,
}

impl Context<'_> {
    /// Reads the body of `/v1/responses`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn response(&self, body: &[u8]) -> Result<(Job, Reply)> {
        let (mut common, fields, structured) = text_fields::<Fields>(body)?;
        check_absent(&common, &fields)?;
        self.defaults.fill(&mut common);
        let shown = shown(&common, &fields);
        let format = fields.text.and_then(|text| text.format);
        let structured = structured.with_format(format.map(response_format), "text.format")?;
        let input = required("input", fields.input)?;
        let tools = fields.tools.map(|list| each(list, "tools", tool));
        let chat = ChatFields {
            common: Common {
                max_tokens: fields.max_output_tokens,
                ..common
            },
            fields: wire::Chat {
                messages: Some(messages(fields.instructions, input)?),
                tools: tools.transpose()?,
                tool_choice: fields.tool_choice.map(tool_choice).transpose()?,
                parallel_tool_calls: fields.parallel_tool_calls,
                add_special_tokens: fields.add_special_tokens,
                chat_template_kwargs: fields.chat_template_kwargs,
                include_reasoning: fields.include_reasoning,
                ..wire::Chat::default()
            },
            structured,
        };
        chat.common.refuse_chunk_options()?;
        let job = self.chat_job(chat).map_err(|e| e.renamed(&NAMES))?;
        let reply = Reply::new(&job.header, shown);
        Ok((job, reply))
    }
}

/// Checks fields of other APIs, and those that ask for what is not done here.
fn check_absent(common: &Common, fields: &Fields) -> Result<()> {
    let refused =
        |field: &str, advice: &str| wrong(field, format!("is not supported here: {advice}"));
    if common.max_tokens.is_some() {
        return refused("max_tokens", "use max_output_tokens");
    }
    if common.n.is_some_and(|n| n != 1) {
        return refused("n", "a response has one answer; leave it out");
    }
    if fields.prompt.is_some() {
        return refused(
            "prompt",
            "no prompts are stored; use input and instructions",
        );
    }
    if !matches!(fields.logprobs, None | Some(Value::Bool(false))) {
        return refused("logprobs", "leave it out");
    }
    let include = fields.include.as_deref().unwrap_or_default();
    if let Some(i) = include.iter().position(|name| name != INCLUDABLE) {
        return refused(&format!("include[{i}]"), "leave it out");
    }
    let reasoning = fields.reasoning.as_ref();
    for (field, wanted) in [
        ("reasoning.summary", reasoning.map(|r| &r.summary)),
        (
            "reasoning.generate_summary",
            reasoning.map(|r| &r.generate_summary),
        ),
    ] {
        // `auto` asks for the best one that there is.
        if wanted.is_some_and(|wanted| wanted.as_deref().is_some_and(|wanted| wanted != "auto")) {
            return refused(field, "reasoning is shown as it is; leave it out");
        }
    }
    Ok(())
}

/// What a response repeats of its request.
fn shown(common: &Common, fields: &Fields) -> Map<String, Value> {
    let text = fields.text.as_ref();
    let format = text.and_then(|text| text.format.clone());
    let mut shown_text = json!({"format": format.unwrap_or_else(|| json!({"type": "text"}))});
    if let Some(verbosity) = text.and_then(|text| text.verbosity.as_deref()) {
        shown_text["verbosity"] = verbosity.into();
    }
    let reasoning = fields.reasoning.as_ref();
    let shown = json!({
        "background": false,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": null,
        "metadata": fields.metadata.clone().unwrap_or_default(),
        "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": null,
        "reasoning": {
            "effort": reasoning.and_then(|r| r.effort.as_deref()),
            "summary": reasoning.and_then(|r| r.summary.as_deref()),
        },
        "store": false,
        "temperature": common.temperature.unwrap_or(1.0),
        "text": shown_text,
        "tool_choice": fields.tool_choice.clone().unwrap_or_else(|| "auto".into()),
        "tools": fields.tools.clone().unwrap_or_default(),
        "top_p": common.top_p.unwrap_or(1.0),
        "truncation": "disabled",
    });
    shown.as_object().cloned().unwrap_or_default()
}

/// The `response_format` of a chat for a `text.format`, whose schema is not in an object of its own.
fn response_format(mut format: Value) -> Value {
    let is_schema = format["type"] == "json_schema";
    match format.as_object_mut().filter(|_| is_schema) {
        None => format,
        Some(fields) => {
            let mut fields = std::mem::take(fields);
            let kind = fields.remove("type");
            json!({"type": kind, "json_schema": fields})
        }
    }
}

/// Converts each entry of a list.
fn each(
    list: Vec<Value>,
    field: &str,
    convert: fn(&str, Value) -> Result<Value>,
) -> Result<Vec<Value>> {
    let entries = list.into_iter().enumerate();
    entries
        .map(|(i, entry)| convert(&format!("{field}[{i}]"), entry))
        .collect()
}

/// A chat's tool, whose function is an object of its own.
fn tool(field: &str, mut tool: Value) -> Result<Value> {
    let Some(function) = tool.as_object_mut() else {
        return wrong(field, "must be an object with type and name");
    };
    if function
        .remove("type")
        .is_none_or(|kind| kind != "function")
    {
        let field = format!("{field}.type");
        return wrong(
            &field,
            "must be function: the server has no tools of its own",
        );
    }
    Ok(json!({"type": "function", "function": std::mem::take(function)}))
}

fn tool_choice(choice: Value) -> Result<Value> {
    if choice.is_null() || matches!(choice.as_str(), Some("none" | "auto" | "required")) {
        return Ok(choice);
    }
    match (&choice["type"], &choice["name"]) {
        (Value::String(kind), Value::String(name)) if kind == "function" => {
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        _ => Err(Error::invalid(
            "tool_choice",
            r#"tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}"#,
        )),
    }
}
