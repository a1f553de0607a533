//! Converts the bodies of `/api/chat` and `/api/generate` to a chat or a completion.

use super::closed::close;
use super::events::{Answer, Form, OllamaReply};
use super::input::{self, Turn};
use super::options::{self, NAMES, Options};
use crate::context::Context;
use crate::conversation::ChatMessage;
use crate::openai::{Asked, Body, Job};
use crate::responses::FlatChoice;
use crate::structured::{FlatFormat, Structured};
use crate::tools::Tool;
use crate::wire::{self, Common, PromptInput, wrong};
use axum::Json;
use axum::response::IntoResponse;
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::time::Instant;

/// The fields that only `/api/chat` has.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaChat")]
pub(crate) struct ChatFields {
    /// None ask only whether the model is loaded.
    messages: Option<Vec<Turn>>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<FlatChoice>,
    parallel_tool_calls: Option<bool>,
    max_output_tokens: Option<usize>,
    include_reasoning: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    format: Option<Format>,
    #[schemars(with = "Option<Options>")]
    options: Option<Map<String, Value>>,
    think: Option<Think>,
    keep_alive: Option<KeepAlive>,
}

/// The fields that only `/api/generate` has.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaGenerate")]
pub(crate) struct GenerateFields {
    /// None, or an empty one without a suffix, asks only whether the model is loaded.
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    /// Whether the prompt is sent to the model as it is, and not as a chat's only message.
    raw: Option<bool>,
    include_reasoning: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    format: Option<Format>,
    #[schemars(with = "Option<Options>")]
    options: Option<Map<String, Value>>,
    think: Option<Think>,
    keep_alive: Option<KeepAlive>,
    /// There may be none, for the template is the model's own, or that of the prompt alone, which is as `raw`.
    template: Option<String>,
    /// There may be none: nothing is kept of earlier requests.
    #[schemars(with = "Option<Vec<u32>>")]
    context: Option<Vec<IgnoredAny>>,
    /// There may be none.
    #[schemars(with = "Option<Vec<String>>")]
    images: Option<Vec<IgnoredAny>>,
}

/// What the answer must be.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected \"json\" or a JSON schema")]
#[schemars(rename = "OllamaFormat")]
enum Format {
    Name(String),
    Schema(Map<String, Value>),
}

/// Whether the model thinks, or how much.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected true, false, \"low\", \"medium\", \"high\" or \"max\""
)]
#[schemars(rename = "OllamaThink")]
enum Think {
    Flag(bool),
    Effort(Effort),
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "OllamaEffort")]
enum Effort {
    Low,
    Medium,
    High,
    Max,
}

/// How long the model stays loaded, which it always does.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a number of seconds, or a text like \"5m\""
)]
#[schemars(rename = "OllamaKeepAlive")]
enum KeepAlive {
    Seconds(f64),
    Text(String),
}

impl Context<'_> {
    /// Reads the body of `/api/chat`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn ollama_chat(&self, body: &[u8]) -> Result<Asked<OllamaReply>> {
        let mut reading = Reading::of(Form::Chat);
        let Body {
            mut common,
            fields,
            structured,
        } = Body::<ChatFields>::read(body)?;
        reading.model = self.ollama_named(common.model.as_deref())?;
        let turns = fields.messages.unwrap_or_default();
        if turns.is_empty() {
            return Ok(reading.load(fields.keep_alive));
        }
        common.max_tokens = common.max_tokens.or(fields.max_output_tokens);
        fill(&mut common, fields.options, fields.think)?;
        refuse_custom(fields.tools.as_deref().unwrap_or_default())?;
        let is_open = turns.last().is_some_and(Turn::is_answer);
        let chat = Body {
            common,
            fields: wire::ChatFields {
                messages: Some(input::messages(turns)?),
                continue_final_message: is_open.then_some(true),
                tools: fields.tools,
                tool_choice: fields.tool_choice.map(FlatChoice::of_chat).transpose()?,
                parallel_tool_calls: fields.parallel_tool_calls,
                include_reasoning: fields.include_reasoning,
                logprobs: fields.logprobs,
                top_logprobs: fields.top_logprobs,
                ..self.ollama_thinking(fields.think)?
            },
            structured: formatted(structured, fields.format)?,
        };
        reading.job(self.chat_job(chat))
    }

    /// Reads the body of `/api/generate`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn ollama_generate(&self, body: &[u8]) -> Result<Asked<OllamaReply>> {
        let mut reading = Reading::of(Form::Generate);
        let Body {
            mut common,
            mut fields,
            structured,
        } = Body::<GenerateFields>::read(body)?;
        reading.model = self.ollama_named(common.model.as_deref())?;
        fields.check()?;
        if fields.prompt.is_none() && fields.suffix.is_none() {
            return Ok(reading.load(fields.keep_alive));
        }
        fill(&mut common, fields.options.take(), fields.think)?;
        let structured = formatted(structured, fields.format.take())?;
        let is_raw = fields.raw == Some(true) || fields.suffix.is_some();
        let body = Body {
            common,
            fields,
            structured,
        };
        reading.job(if is_raw || !self.text.has_chat_template() {
            self.raw_prompt(body)
        } else {
            self.one_turn(body)
        })
    }

    /// The completion that a prompt is which is sent as it is.
    fn raw_prompt(&self, body: Body<GenerateFields>) -> Result<Job> {
        let Body {
            common,
            fields,
            structured,
        } = body;
        let thinks = !matches!(fields.think, None | Some(Think::Flag(false)));
        let of_templates = [("system", fields.system.is_some()), ("think", thinks)];
        if let Some((field, _)) = of_templates.iter().find(|(_, is_set)| *is_set) {
            let what = "needs a chat template: leave it out, or leave out raw, template and suffix, with a model that has one";
            return wrong(*field, what);
        }
        let top_logprobs = fields.top_logprobs.unwrap_or(0);
        if top_logprobs > 0 && fields.logprobs != Some(true) {
            return wrong("top_logprobs", "requires logprobs to be true");
        }
        let completion = wire::Completion {
            prompt: Some(PromptInput::Text(fields.prompt.unwrap_or_default())),
            suffix: fields.suffix,
            logprobs: (fields.logprobs == Some(true)).then_some(top_logprobs),
            ..wire::Completion::default()
        };
        let body = Body {
            common,
            fields: completion,
            structured,
        };
        self.completion_job(body, usize::MAX)
            .map_err(|e| e.renamed(&[("logprobs", "top_logprobs")]))
    }

    /// The chat that a prompt is.
    fn one_turn(&self, body: Body<GenerateFields>) -> Result<Job> {
        let Body {
            common,
            fields,
            structured,
        } = body;
        let system = fields.system.map(|text| ChatMessage::new("system", text));
        let user = ChatMessage::new("user", fields.prompt.unwrap_or_default());
        let chat = wire::ChatFields {
            messages: Some(system.into_iter().chain([user]).collect()),
            include_reasoning: fields.include_reasoning,
            logprobs: fields.logprobs,
            top_logprobs: fields.top_logprobs,
            ..self.ollama_thinking(fields.think)?
        };
        let body = Body {
            common,
            fields: chat,
            structured,
        };
        self.chat_job(body)
            .map_err(|e| e.renamed(&[("messages", "prompt")]))
    }

    /// The name that a request has in `model`, as answers repeat it.
    ///
    /// # Errors
    /// The errors of [`Context::model`].
    pub fn ollama_named(&self, model: Option<&str>) -> Result<String> {
        let served = self.model(model)?;
        Ok(model.map_or(served.name, str::to_owned))
    }

    /// The fields of a chat that tell whether the model thinks.
    fn ollama_thinking(&self, think: Option<Think>) -> Result<wire::ChatFields> {
        let effort = match think {
            None => return Ok(wire::ChatFields::default()),
            Some(Think::Flag(_)) => None,
            Some(Think::Effort(Effort::Low)) => Some("low"),
            Some(Think::Effort(Effort::Medium)) => Some("medium"),
            Some(Think::Effort(Effort::High)) => Some("high"),
            Some(Think::Effort(Effort::Max)) => Some("max"),
        };
        let enabled = !matches!(think, Some(Think::Flag(false)));
        if enabled && self.reasoning_format.is_none() {
            let what = "is not supported by this model: leave it out, set it to false, or start the server with --reasoning-parser";
            return wrong("think", what);
        }
        Ok(wire::ChatFields {
            enable_thinking: Some(enabled),
            reasoning_effort: effort.map(str::to_owned),
            ..wire::ChatFields::default()
        })
    }
}

impl GenerateFields {
    /// Refuses what is not done. Texts that are empty become none.
    fn check(&mut self) -> Result<()> {
        for text in [
            &mut self.prompt,
            &mut self.suffix,
            &mut self.system,
            &mut self.template,
        ] {
            text.take_if(|text| text.is_empty());
        }
        let is_prompt = |template: &mut String| template.replace(' ', "") == "{{.Prompt}}";
        if self.template.take_if(is_prompt).is_some() {
            self.raw = Some(true);
        }
        input::refuse_images("images".into(), self.images.as_deref())?;
        if self.context.as_ref().is_some_and(|ids| !ids.is_empty()) {
            let what = "is not supported: leave it out; /api/chat takes earlier turns as messages";
            return wrong("context", what);
        }
        if self.template.is_some() {
            let what = "is not supported: leave it out, or send the whole prompt with raw: true";
            return wrong("template", what);
        }
        Ok(())
    }
}

/// A body that is being read.
struct Reading {
    form: Form,
    model: String,
    started: Instant,
}

impl Reading {
    fn of(form: Form) -> Self {
        Self {
            form,
            model: String::new(),
            started: Instant::now(),
        }
    }

    /// The answer to a body that only asks whether the model is loaded, which it is.
    fn load(self, keep_alive: Option<KeepAlive>) -> Asked<OllamaReply> {
        let unloads = keep_alive.is_some_and(|time| time.is_none());
        let answer = Answer::load(self.form, self.model, unloads);
        Asked::Known(Box::new(Json(answer).into_response()))
    }

    /// What `job` asks for. Errors about its fields name those of this API.
    fn job(self, job: Result<Job>) -> Result<Asked<OllamaReply>> {
        let job = job.map_err(|e| e.renamed(&NAMES))?;
        let reply = OllamaReply::new(self.form, self.model, &job.header, self.started);
        Ok(Asked::Text(Box::new((job, reply))))
    }
}

impl KeepAlive {
    /// Whether the model is to stay no longer.
    fn is_none(&self) -> bool {
        match self {
            Self::Seconds(seconds) => *seconds == 0.0,
            Self::Text(text) => {
                let zero = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                zero.parse() == Ok(0.0)
            }
        }
    }
}

/// Refuses tools whose input is a text: the arguments of calls are objects in this API.
fn refuse_custom(tools: &[Tool]) -> Result<()> {
    match tools.iter().position(Tool::is_custom) {
        Some(i) => wrong(
            FieldPath::from("tools").index(i).key("type"),
            "must be function: this API has no calls with a text; /v1/chat/completions has them",
        ),
        None => Ok(()),
    }
}

/// Brings the fields that all APIs have into their form.
fn fill(
    common: &mut Common,
    mut options: Option<Map<String, Value>>,
    think: Option<Think>,
) -> Result<()> {
    if common.n.is_some_and(|n| n != 1) {
        return wrong(
            "n",
            "is not supported here: there is one answer; leave it out",
        );
    }
    common.refuse_chunk_options()?;
    common.stream.get_or_insert(true);
    if let Some(options) = &mut options {
        drop_repeated(options, think);
    }
    options::add(options, common)
}

/// Drops the option by which Prism, a library for Laravel, repeats `think`. Ollama does not know it.
fn drop_repeated(options: &mut Map<String, Value>, think: Option<Think>) {
    const THINKING: &str = "thinking";
    let repeated = options.get(THINKING).cloned();
    let repeated = repeated.and_then(|value| serde_json::from_value::<Think>(value).ok());
    if repeated.is_some() && repeated == think {
        options.shift_remove(THINKING);
    }
}

fn formatted(structured: Structured, format: Option<Format>) -> Result<Structured> {
    const FIELD: &str = "format";
    let format = match format {
        None => None,
        Some(Format::Name(name)) => match name.as_str() {
            "" => None,
            "json" => Some(FlatFormat::json_object()),
            _ => return wrong(FIELD, "must be \"json\" or a JSON schema"),
        },
        Some(Format::Schema(mut schema)) => {
            close(&mut schema);
            Some(FlatFormat::json_schema(schema.into()))
        }
    };
    structured.with_format(format, FIELD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_model_is_unloaded_by_a_time_of_nothing() {
        let is_none = |time: Value| {
            let time: KeepAlive = serde_json::from_value(time).expect("a time");
            time.is_none()
        };
        for time in [json!(0), json!(0.0), json!("0"), json!("0s"), json!("0m")] {
            assert!(is_none(time.clone()), "{time}");
        }
        for time in [json!(-1), json!(300), json!("5m"), json!("-1s"), json!("")] {
            assert!(!is_none(time.clone()), "{time}");
        }
    }
}
