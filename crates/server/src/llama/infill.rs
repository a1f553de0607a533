//! Reads the bodies of `/infill` and `/apply-template`.

use super::reply::InfillShape;
use super::settings::GenerationSettings;
use crate::beam::BeamFields;
use crate::content::TextOr;
use crate::context::Context;
use crate::headers::Warned;
use crate::lines::LineRules;
use crate::numbers::within;
use crate::object::read_body;
use crate::openai::{Body, Job};
use crate::others::NoOthers;
use crate::prompt::PromptTokens;
use crate::reply::Api;
use crate::structured::Structured;
use crate::thinking::ThinkingFields;
use crate::tools::Tools;
use crate::wire::{ChatFields, Common, required, wrong};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_text::InfillText;
use foretoken_text::grammar::Waiter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::Duration;

/// Maximum number of other files.
const MAX_FILES: usize = 256;
/// Maximum number of a reply's fields that are named.
const MAX_FIELDS: usize = 64;
/// llama.cpp's number that stands for a random seed, besides -1.
const RANDOM_SEED: i64 = u32::MAX as i64;

/// The body of `/infill`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "InfillRequest")]
pub(crate) struct InfillFields {
    model: Option<String>,
    /// The text before the gap, up to the line with the gap.
    input_prefix: Option<String>,
    /// The text after the gap.
    input_suffix: Option<String>,
    /// Other files, the least important one first.
    input_extra: Option<Vec<ExtraFile>>,
    /// The beginning of the line with the gap.
    prompt: Option<String>,
    /// Maximum number of tokens; -1 = as many as the context has room for, 0 = the prompt is only read into the cache.
    n_predict: Option<i64>,
    max_tokens: Option<i64>,
    /// The text ends before a line that is indented by less.
    n_indent: Option<usize>,
    /// Milliseconds after which a line break ends the text; 0 = none.
    t_max_predict_ms: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repeat_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    /// The samplers that are used, if not all are.
    samplers: Option<Vec<String>>,
    seed: Option<i64>,
    stop: Option<TextOr<String>>,
    ignore_eos: Option<bool>,
    logit_bias: Option<Map<String, Value>>,
    stream: Option<bool>,
    /// Whether the reply has the ids of its tokens.
    return_tokens: Option<bool>,
    /// The fields that a reply has, if not all; `timings/prompt_ms` is one within another.
    response_fields: Option<Vec<String>>,
    cache_salt: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ExtraFile {
    filename: Option<String>,
    text: String,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// The prompt of a chat.
#[derive(Serialize, JsonSchema)]
pub(crate) struct AppliedTemplate {
    prompt: String,
}

impl InfillFields {
    /// The fields that all APIs have, by their names here. A parameter whose sampler is not used changes nothing.
    fn common(&mut self) -> Common {
        let samplers = self.samplers.as_deref();
        let off = |name: &str| samplers.is_some_and(|names| names.iter().all(|used| used != name));
        let value = |name: &str, value: Option<f64>, nothing: f64| {
            if off(name) { Some(nothing) } else { value }
        };
        Common {
            model: self.model.take(),
            // llama.cpp's sampler for infilling leaves next to nothing but the most probable token.
            temperature: value(
                "temperature",
                self.temperature,
                if off("infill") { 1.0 } else { 0.0 },
            ),
            top_k: if off("top_k") { Some(0) } else { self.top_k },
            top_p: value("top_p", self.top_p, 1.0),
            min_p: value("min_p", self.min_p, 0.0),
            repetition_penalty: value("penalties", self.repeat_penalty, 1.0),
            presence_penalty: value("penalties", self.presence_penalty, 0.0),
            frequency_penalty: value("penalties", self.frequency_penalty, 0.0),
            seed: self.seed.filter(|seed| *seed != RANDOM_SEED),
            stop: self.stop.take(),
            ignore_eos: self.ignore_eos,
            logit_bias: self.logit_bias.take(),
            stream: self.stream,
            cache_salt: self.cache_salt.take(),
            ..Common::default()
        }
    }

    /// Maximum number of tokens; `None` = as many as the context has room for.
    fn max_tokens(&self) -> Result<Option<usize>> {
        match self.n_predict.or(self.max_tokens) {
            None | Some(-1) => Ok(None),
            Some(count) => match usize::try_from(count) {
                Ok(count) => Ok(Some(count)),
                Err(_) => wrong(
                    "n_predict",
                    format!("must be -1 (no limit) or more, not {count}"),
                ),
            },
        }
    }

    fn line_rules(&self) -> LineRules {
        let millis = self.t_max_predict_ms.and_then(|ms| u64::try_from(ms).ok());
        LineRules {
            min_indent: self.n_indent.unwrap_or(0),
            max_time: millis.filter(|ms| *ms > 0).map(Duration::from_millis),
        }
    }
}

impl Context<'_> {
    /// Reads the body of `/infill`.
    ///
    /// # Errors
    /// `Invalid`, `NotFound` or `ContextLengthExceeded`, naming the field.
    pub(crate) fn infill(&self, body: &[u8]) -> Result<(Job, InfillShape)> {
        let mut fields: InfillFields = read_body(body)?;
        let files = fields.input_extra.as_ref().map_or(0, Vec::len);
        within("input_extra", Some(files), 0..=MAX_FILES)?;
        let named = fields.response_fields.as_ref().map_or(0, Vec::len);
        within("response_fields", Some(named), 0..=MAX_FIELDS)?;
        let max_tokens = fields.max_tokens()?;
        let mut common = fields.common();
        let none = BeamFields {
            use_beam_search: None,
            length_penalty: None,
            early_stopping: None,
        };
        let plan = self.plan(&mut common, &Structured::default(), none, &[]);
        let names = [("repetition_penalty", "repeat_penalty")];
        let mut plan = plan.map_err(|e| e.renamed(&names))?;
        if !plan.template.params.ignore_eos {
            let ends = self.text.infill_ends();
            plan.template.params.stop_token_ids.extend(ends);
        }
        plan.rules.lines = fields.line_rules();
        plan.rules.token_ids = plan.stream || fields.return_tokens == Some(true);
        let max_tokens = max_tokens.or(self.defaults.max_new_tokens);
        let (ids, truncated) = self.infill_ids(&fields, max_tokens)?;
        let tokens = ids.len();
        let prompt = PromptTokens { ids, echo: None };
        let job = self.job(Api::Completion, plan, vec![prompt], |_| max_tokens);
        let names = [("max_tokens", "n_predict"), ("prompt", "input_prefix")];
        let job = job.map_err(|e| e.renamed(&names))?;
        let max_model_len = self.limits.max_model_len;
        let settings = GenerationSettings::new(&common, max_tokens, max_model_len);
        let shape = InfillShape::new(&job, tokens, truncated, settings, fields.response_fields);
        Ok((job, shape))
    }

    /// The tokens of the prompt, and whether a part was left out.
    fn infill_ids(
        &self,
        fields: &InfillFields,
        max_tokens: Option<usize>,
    ) -> Result<(Vec<u32>, bool)> {
        let mut before = fields.input_prefix.clone().unwrap_or_default();
        before += fields.prompt.as_deref().unwrap_or_default();
        let files = fields.input_extra.iter().flatten();
        let name = |file: &ExtraFile| file.filename.clone().unwrap_or_else(|| "file".into());
        let names: Vec<String> = files.clone().map(name).collect();
        let texts = files.map(|file| file.text.as_str());
        let files: Vec<(&str, &str)> = names.iter().map(String::as_str).zip(texts).collect();
        let text = InfillText {
            before: &before,
            after: fields.input_suffix.as_deref().unwrap_or_default(),
            files: &files,
        };
        // At least half of the context is for the prompt.
        let max = self.limits.max_model_len;
        let answer = max_tokens.unwrap_or(max).clamp(1, max.div_ceil(2));
        let prompt = self
            .text
            .infill(text, true, Some(max.saturating_sub(answer)))?;
        let prompt = prompt.ok_or_else(|| {
            let message =
                "this model does not fill in: its tokenizer has no fill-in-the-middle tokens";
            Error::request(RequestErrorKind::Invalid, None, message)
        })?;
        Ok((prompt.ids, prompt.truncated))
    }

    /// Reads the body of `/apply-template`, which is that of a chat.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub(crate) fn apply_template(&self, body: &[u8]) -> Result<Warned<AppliedTemplate>> {
        let Body {
            common, mut fields, ..
        } = Body::<ChatFields>::read(body)?;
        self.model(common.model.as_deref())?;
        let end = fields.prompt_end();
        let thinking = ThinkingFields::of_chat(&mut fields);
        let messages = required("messages", fields.messages)?;
        let tools = Tools::read(fields.tools, fields.tool_choice)?;
        let thinking = self.thinking(thinking)?;
        let context = Context {
            // The text is not encoded, so that marks of names would only be seen.
            literal: None,
            waiter: Waiter::default(),
            ..*self
        };
        let chat = context.chat_prompt(messages, &tools.list, end, thinking.variables)?;
        let answer = AppliedTemplate {
            prompt: chat.prompt,
        };
        Ok(Warned {
            answer,
            warnings: tools.warnings,
        })
    }
}
