//! Converts the body of `/v1/responses` to a chat.

use super::events::ResponseReply;
use super::input::{InputItem, conversation};
use super::options::{FlatChoice, ReasoningOptions, RequestEcho, TextOptions, Truncation};
use super::storing::{Storing, asked_items};
use super::tools::{PlacedTool, ResponseTool, ToolNames, tools};
use crate::content::TextOr;
use crate::context::Context;
use crate::headers::Warned;
use crate::openai::{Asked, Body};
use crate::reply::ReplyHeader;
use crate::stored::Items;
use crate::tool_choice::ToolMode;
use crate::wire::{self, Common, required, wrong};
use foretoken_core::error::{Error, FieldPath, RequestErrorKind, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The names of fields in chats, with their names in this API.
const NAMES: [(&str, &str); 13] = [
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tools.*.function", "tools.*"),
    ("tools.*.custom", "tools.*"),
    ("tools.*.tools.*.function", "tools.*.tools.*"),
    ("tools.*.tools.*.custom", "tools.*.tools.*"),
    ("input.*.tools.*.function", "input.*.tools.*"),
    ("input.*.tools.*.custom", "input.*.tools.*"),
    (
        "tool_choice.allowed_tools.tools.*.function",
        "tool_choice.tools.*",
    ),
    ("tool_choice.allowed_tools", "tool_choice"),
    ("tool_choice.function", "tool_choice"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
];

/// The values that `include` may have. Reasoning is not encrypted here, and there are no results of tools that this server
/// does not have: such fields are empty.
pub(super) const INCLUDABLE: [&str; 7] = [
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
];

/// How detailed summaries of reasoning may be asked for. Reasoning is shown as it is.
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];

/// The fields that only this API has.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(crate) struct ResponseFields {
    #[schemars(required)]
    input: Option<TextOr<InputItem>>,
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    tools: Option<Vec<ResponseTool>>,
    tool_choice: Option<FlatChoice>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextOptions>,
    reasoning: Option<ReasoningOptions>,
    include: Option<Vec<String>>,
    #[serde(rename = "truncation")]
    _truncation: Option<Truncation>,
    metadata: Option<Map<String, Value>>,
    /// Of tools that the server calls: it calls none.
    max_tool_calls: Option<usize>,
    /// A hint, as are the next two: the response repeats it.
    prompt_cache_key: Option<String>,
    safety_identifier: Option<String>,
    user: Option<String>,
    /// The id of a stored response, which the conversation continues.
    previous_response_id: Option<String>,
    /// Whether the response is stored, which is the default, unless the server stores none.
    store: Option<bool>,
    prompt: Option<Value>,
    logprobs: Option<Value>,
    add_special_tokens: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    include_reasoning: Option<bool>,
    enable_thinking: Option<bool>,
    thinking_token_budget: Option<i64>,
}

/// A body as a chat, and what its response needs besides.
struct ResponseChat {
    chat: Body<wire::ChatFields>,
    /// The items of the response that it continues.
    earlier: Items,
    echo: RequestEcho,
    names: ToolNames,
    /// What was left out.
    warnings: Vec<String>,
}

/// The answer of `/v1/responses/input_tokens`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseInputTokens")]
pub(crate) struct InputTokenCount {
    #[schemars(extend("const" = "response.input_tokens"))]
    object: &'static str,
    input_tokens: usize,
}

impl Context<'_> {
    /// Reads the body of `/v1/responses`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field; `ContextLengthExceeded`, if no stream can say so.
    pub fn response(&self, body: &[u8]) -> Result<Asked<ResponseReply>> {
        let ResponseChat {
            chat,
            earlier,
            echo,
            names,
            warnings,
        } = self.response_chat(body)?;
        let storing = echo.store.then(|| self.storing(earlier, body));
        let storing = storing.transpose()?;
        let (model, streams) = (chat.common.model.clone(), chat.common.stream == Some(true));
        let mut job = match self.chat_job(chat).map_err(|e| e.renamed(&NAMES)) {
            Ok(job) => job,
            // Codex shortens its history only if an event of a stream says so.
            Err(
                error @ Error::Request {
                    kind: RequestErrorKind::ContextLengthExceeded,
                    ..
                },
            ) if streams => {
                let header = ReplyHeader::without_prompt(self.model(model.as_deref())?.name);
                let reply = ResponseReply::new(&header, echo, names);
                return Ok(Asked::Known(Box::new(reply.refused(&error))));
            }
            Err(error) => return Err(error),
        };
        job.warnings.extend(warnings);
        let reply = ResponseReply::new(&job.header, echo, names).storing(storing);
        Ok(Asked::Text(Box::new((job, reply))))
    }

    /// The number of tokens of the prompt for the body of `/v1/responses/input_tokens`.
    ///
    /// # Errors
    /// The errors of [`Context::response`].
    pub fn response_tokens(&self, body: &[u8]) -> Result<Warned<InputTokenCount>> {
        let ResponseChat { chat, warnings, .. } = self.response_chat(body)?;
        let counted = self.chat_tokens(chat);
        let (input_tokens, mut all) = counted.map_err(|e| e.renamed(&NAMES))?;
        all.extend(warnings);
        let answer = InputTokenCount {
            object: "response.input_tokens",
            input_tokens,
        };
        Ok(Warned {
            answer,
            warnings: all,
        })
    }

    /// The chat that a body is.
    fn response_chat(&self, body: &[u8]) -> Result<ResponseChat> {
        let Body {
            mut common,
            fields,
            structured,
        } = Body::<ResponseFields>::read(body)?;
        check_absent(&common, &fields)?;
        let is_stored = self.is_stored(fields.store)?;
        self.defaults.fill(&mut common);
        let echo = echo(&common, &fields, is_stored);
        let format = fields.text.and_then(|text| text.format);
        let structured = structured.with_format(format, "text.format")?;
        let input = required("input", fields.input)?;
        common.max_tokens = fields.max_output_tokens;
        let stored = |id: &str| self.responses.item(self.api_key, id);
        let earlier = self.earlier(fields.previous_response_id.as_deref())?;
        let conversation = conversation(fields.instructions, &earlier, input, stored)?;
        let own = fields.tools.unwrap_or_default().into_iter().enumerate();
        let own = own.map(|(i, tool)| PlacedTool {
            at: FieldPath::from("tools").index(i),
            tool,
            is_found: false,
        });
        let (tools, names) = tools(own.chain(conversation.tools).collect())?;
        let tool_choice = fields.tool_choice.map(FlatChoice::of_chat).transpose()?;
        let chat = Body {
            common,
            fields: wire::ChatFields {
                messages: Some(conversation.messages),
                tools: Some(tools),
                tool_choice,
                parallel_tool_calls: fields.parallel_tool_calls,
                add_special_tokens: fields.add_special_tokens,
                reasoning_effort: fields.reasoning.and_then(|reasoning| reasoning.effort),
                chat_template_kwargs: fields.chat_template_kwargs,
                include_reasoning: fields.include_reasoning,
                enable_thinking: fields.enable_thinking,
                thinking_token_budget: fields.thinking_token_budget,
                ..wire::ChatFields::default()
            },
            structured,
        };
        chat.common.refuse_chunk_options()?;
        Ok(ResponseChat {
            chat,
            earlier,
            echo,
            names,
            warnings: conversation.warnings,
        })
    }

    /// Whether a response is stored whose request says this of it.
    ///
    /// # Errors
    /// `Invalid`, if it is to be stored, and none is here.
    fn is_stored(&self, store: Option<bool>) -> Result<bool> {
        let is_on = self.responses.is_on();
        if store == Some(true) && !is_on {
            return wrong(
                "store",
                "is not possible: no responses are stored in a batch, or with --max-stored-responses 0; leave it out or set it to false",
            );
        }
        Ok(store.unwrap_or(is_on))
    }

    /// Where the response to `body` is stored, after the items of an earlier one.
    fn storing(&self, mut items: Items, body: &[u8]) -> Result<Storing> {
        items.extend(asked_items(body, |id| {
            self.responses.item(self.api_key, id)
        })?);
        Ok(Storing {
            store: self.responses.clone(),
            key: self.api_key.map(str::to_owned),
            items,
        })
    }

    /// The conversation up to the end of the stored response `id`.
    ///
    /// # Errors
    /// `Invalid`, if there is none.
    fn earlier(&self, id: Option<&str>) -> Result<Items> {
        let Some(id) = id else {
            return Ok(Items::new());
        };
        let found = self.responses.items(self.api_key, id);
        found.map_or_else(
            || {
                wrong(
                    "previous_response_id",
                    "must be the id of a stored response, and this one is not, or no longer: send the whole conversation as input",
                )
            },
            Ok,
        )
    }
}

/// Checks fields of other APIs, and those that ask for what is not done here.
fn check_absent(common: &Common, fields: &ResponseFields) -> Result<()> {
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
    if let Some(i) = include
        .iter()
        .position(|name| !INCLUDABLE.contains(&name.as_str()))
    {
        let field = FieldPath::from("include").index(i);
        return wrong(field, "is not supported here: leave it out");
    }
    let reasoning = fields.reasoning.as_ref();
    let summary = reasoning.and_then(|asked| asked.summary.as_deref());
    let generated = reasoning.and_then(|asked| asked.generate_summary.as_deref());
    let mode = reasoning.and_then(|asked| asked.mode.as_deref());
    if mode.is_some_and(|mode| mode != "standard") {
        return refused("reasoning.mode", "leave it out or set it to \"standard\"");
    }
    for (name, wanted) in [("summary", summary), ("generate_summary", generated)] {
        if wanted.is_some_and(|wanted| !SUMMARIES.contains(&wanted)) {
            let field = format!("reasoning.{name}");
            return refused(&field, "reasoning is shown as it is; leave it out");
        }
    }
    Ok(())
}

fn echo(common: &Common, fields: &ResponseFields, is_stored: bool) -> RequestEcho {
    let mut text = fields.text.clone().unwrap_or_default();
    text.format.get_or_insert_default();
    RequestEcho {
        background: false,
        frequency_penalty: common.frequency_penalty.unwrap_or(0.0),
        instructions: fields.instructions.clone(),
        max_output_tokens: fields.max_output_tokens,
        max_tool_calls: fields.max_tool_calls,
        metadata: fields.metadata.clone().unwrap_or_default(),
        parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
        presence_penalty: common.presence_penalty.unwrap_or(0.0),
        previous_response_id: fields.previous_response_id.clone(),
        prompt_cache_key: fields.prompt_cache_key.clone(),
        reasoning: fields.reasoning.clone().unwrap_or_default(),
        safety_identifier: fields.safety_identifier.clone(),
        service_tier: "default",
        store: is_stored,
        temperature: common.temperature.unwrap_or(1.0),
        text,
        tool_choice: (fields.tool_choice.clone()).unwrap_or(FlatChoice::Mode(ToolMode::Auto)),
        tools: fields.tools.clone().unwrap_or_default(),
        top_logprobs: 0,
        top_p: common.top_p.unwrap_or(1.0),
        truncation: "disabled",
        user: fields.user.clone(),
    }
}
