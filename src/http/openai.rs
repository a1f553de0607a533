//! Converts a request body to engine requests. Every check that is possible before the first byte of a
//! reply is made here or by [`Limits::check`](crate::engine::Limits::check).

use super::choice::{Choice, MessageRules, Rules};
use super::context::Context;
use super::object::Object;
use super::prompt::PromptTokens;
use super::reply::{Api, Header};
use super::stop::Stops;
use super::structured::Structured;
use super::tools::Tools;
use super::wire::{self, Common, OneOrMany, Prediction};
use crate::engine::Request;
use crate::error::{Error, Result};
use crate::sampling::{SamplingParams, mix};
use crate::spec::DraftContext;
use serde_json::{Map, Value};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// OpenAI's default for a completion's `max_tokens`.
const DEFAULT_MAX_TOKENS: usize = 16;
const MAX_N: usize = 128;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
const MAX_TOP_LOGPROBS: usize = 20;
const MAX_SALT_BYTES: usize = 1024;

/// A checked request body: the engine requests, and what is needed to build the reply.
pub(super) struct Job {
    pub header: Header,
    /// One per choice: n for each prompt, with the choices of a prompt next to each other.
    pub requests: Vec<Request>,
    pub choices: Vec<Choice>,
    pub stream: bool,
    pub include_usage: bool,
}

/// The fields of a chat, typed but not yet validated.
#[derive(Debug, Default)]
pub(super) struct ChatFields {
    pub common: Common,
    pub fields: wire::Chat,
    pub structured: Structured,
}

impl Context<'_> {
    /// Reads the body of `/v1/completions`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn completion(&self, body: &[u8]) -> Result<Job> {
        let read = [
            wire::names::<Common>(),
            wire::names::<wire::Completion>(),
            wire::names::<Structured>(),
        ];
        let body = Object::parse(body, &read)?;
        let common: Common = body.fields()?;
        let fields: wire::Completion = body.fields()?;
        let structured: Structured = body.fields()?;
        body.check_others(&read)?;
        let model = self.model(common.model.as_deref())?;
        let echo = fields.echo.unwrap_or(false);
        let mut plan = self.plan(&common)?;
        if let Some(best_of) = fields.best_of.filter(|&best_of| best_of != plan.n) {
            return Err(Error::invalid(
                "best_of",
                format!("best_of must equal n ({}), not {best_of}", plan.n),
            ));
        }
        if fields.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(Error::invalid(
                "suffix",
                "suffix is not supported: leave it out",
            ));
        }
        if common.max_tokens == Some(0) && !echo {
            return Err(Error::invalid(
                "max_tokens",
                "max_tokens must be at least 1, or echo must be true",
            ));
        }
        let max_logprobs = self.limits.max_logprobs;
        let logprobs = within("logprobs", fields.logprobs, 0..=max_logprobs)?;
        plan.template.logprobs = logprobs;
        plan.template.prompt_logprobs = logprobs.filter(|_| echo);
        plan.rules.logprobs = logprobs.is_some();
        plan.template.params.grammar = self.grammar(&structured)?;

        let prompt = fields
            .prompt
            .ok_or_else(|| Error::invalid("prompt", "prompt is required"))?;
        let special = fields.add_special_tokens.unwrap_or(true);
        let prompts = self.prompts(prompt, special, echo, plan.n)?;
        let mut header = Header::new(Api::Completion, model, self.fingerprint);
        header.logprobs = logprobs;
        let max_tokens = |prompt: &[u32]| {
            // Only the default is reduced to what fits the context; a requested value is not.
            let available = self
                .limits
                .max_model_len
                .saturating_sub(prompt.len())
                .max(1);
            Some(
                common
                    .max_tokens
                    .unwrap_or(DEFAULT_MAX_TOKENS.min(available)),
            )
        };
        self.job(header, plan, prompts, max_tokens)
    }

    /// Reads the body of `/v1/chat/completions`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn chat(&self, body: &[u8]) -> Result<Job> {
        let read = [
            wire::names::<Common>(),
            wire::names::<wire::Chat>(),
            wire::names::<Structured>(),
        ];
        let body = Object::parse(body, &read)?;
        let common: Common = body.fields()?;
        let fields: wire::Chat = body.fields()?;
        let structured: Structured = body.fields()?;
        body.check_others(&read)?;
        self.chat_job(ChatFields {
            common,
            fields,
            structured,
        })
    }

    /// Checks the fields of a chat, whichever API they came from.
    ///
    /// # Errors
    /// As [`Context::chat`].
    pub fn chat_job(&self, chat: ChatFields) -> Result<Job> {
        let ChatFields {
            common,
            fields,
            structured,
        } = chat;
        let model = self.model(common.model.as_deref())?;
        let mut plan = self.plan(&common)?;
        let max_field = match fields.max_completion_tokens {
            Some(_) => "max_completion_tokens",
            None => "max_tokens",
        };
        let max_tokens = fields.max_completion_tokens.or(common.max_tokens);
        if max_tokens == Some(0) {
            return Err(Error::invalid(
                max_field,
                format!("{max_field} must be at least 1"),
            ));
        }
        let max_top = MAX_TOP_LOGPROBS.min(self.limits.max_logprobs);
        let top = within("top_logprobs", fields.top_logprobs, 0..=max_top)?;
        let wanted = fields.logprobs.unwrap_or(false);
        if !wanted && top.is_some_and(|top| top > 0) {
            return Err(Error::invalid(
                "top_logprobs",
                "top_logprobs requires logprobs to be true",
            ));
        }
        plan.template.logprobs = wanted.then(|| top.unwrap_or(0));
        plan.rules.logprobs = wanted;

        let messages = fields
            .messages
            .ok_or_else(|| Error::invalid("messages", "messages is required"))?;
        let tools = Tools::read(fields.tools, fields.tool_choice)?;
        let prompt = self.chat_prompt(
            messages,
            &tools.list,
            fields.add_generation_prompt,
            fields.chat_template_kwargs,
        )?;
        let parallel = fields.parallel_tool_calls.unwrap_or(true);
        plan.rules.message = MessageRules {
            hide_reasoning: fields.include_reasoning == Some(false),
            ..self.message_rules(&prompt, &tools, parallel)?
        };
        plan.template.params.grammar =
            self.answer_grammar(&structured, &tools, &plan.rules.message)?;
        let special = fields.add_special_tokens.unwrap_or(false);
        let ids = self
            .encode(&prompt, special)
            .map_err(|e| rename(e, max_field))?;
        let mut header = Header::new(Api::Chat, model, self.fingerprint);
        header.logprobs = plan.template.logprobs;
        let prompts = vec![PromptTokens { ids, echo: None }];
        self.job(header, plan, prompts, |_| max_tokens)
            .map_err(|e| rename(e, max_field))
    }

    fn job(
        &self,
        mut header: Header,
        plan: Plan,
        prompts: Vec<PromptTokens>,
        max_tokens: impl Fn(&[u32]) -> Option<usize>,
    ) -> Result<Job> {
        header.prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        header.choices_per_prompt = plan.n;
        header.speculates = self.limits.spec_length > 0 && plan.template.spec_length != Some(0);
        let rules = Arc::new(plan.rules);
        let (mut requests, mut choices) = (Vec::new(), Vec::new());
        for prompt in prompts {
            let mut request = Request {
                max_tokens: max_tokens(&prompt.ids),
                prompt: prompt.ids,
                ..plan.template.clone()
            };
            check_min_tokens(&request)?;
            // The engine checks this as well; here it avoids copying a too long prompt n times.
            self.limits.check(&request)?;
            for _ in 0..plan.n {
                request.params.seed = choice_seed(plan.seed, choices.len() as u64);
                choices.push(Choice::new(rules.clone(), prompt.echo.clone()));
                requests.push(request.clone());
            }
        }
        Ok(Job {
            header,
            requests,
            choices,
            stream: plan.stream,
            include_usage: plan.include_usage,
        })
    }

    /// Checks the fields that both APIs share.
    fn plan(&self, common: &Common) -> Result<Plan> {
        let n = within("n", common.n, 1..=MAX_N)?.unwrap_or(1);
        let stream = common.stream.unwrap_or(false);
        let options = common.stream_options.as_ref();
        if options.is_some() && !stream {
            return Err(Error::invalid(
                "stream_options",
                "stream_options requires stream to be true",
            ));
        }
        for (field, wanted) in [
            (
                "continuous_usage_stats",
                options.and_then(|o| o.continuous_usage_stats),
            ),
            (
                "include_obfuscation",
                options.and_then(|o| o.include_obfuscation),
            ),
        ] {
            if wanted == Some(true) {
                let field = format!("stream_options.{field}");
                let message = format!("{field} is not supported: leave it out or set it to false");
                return Err(Error::invalid(&field, message));
            }
        }
        let params = sampling(common)?;
        // Checked before the prompts are processed.
        self.limits.check_params(&params)?;
        let rules = Rules {
            stops: stops(common.stop.as_ref())?,
            stop_token_ids: params.stop_token_ids.clone(),
            min_tokens: params.min_tokens,
            logprobs: false,
            message: MessageRules::default(),
        };
        let spec_length = common.spec_length.map(|k| k.min(self.limits.spec_length));
        let prediction = match spec_length.unwrap_or(self.limits.spec_length) {
            0 => Vec::new(),
            _ => self.prediction(common.prediction.as_ref())?,
        };
        Ok(Plan {
            n,
            stream,
            include_usage: options.and_then(|o| o.include_usage).unwrap_or(false),
            seed: common.seed.map_or_else(rand::random, |seed| seed as u64),
            rules,
            template: Request {
                params,
                spec_length,
                include_rounds: options.and_then(|o| o.include_speculation).unwrap_or(false),
                acceptance: common.acceptance,
                draft_context: DraftContext {
                    scope: self.scope(salt(common.cache_salt.as_deref())?),
                    prediction,
                },
                ..Request::default()
            },
        })
    }

    /// The tokens of a predicted text, as many as an answer can have.
    fn prediction(&self, prediction: Option<&Prediction>) -> Result<Vec<u32>> {
        let text = prediction.map(Prediction::text).unwrap_or_default();
        let max = self.limits.max_model_len;
        let mut ids = (self.text).encode(self.text.prefix_within(&text, max), false)?;
        ids.truncate(max);
        Ok(ids)
    }
}

/// The checked fields that both APIs share.
struct Plan {
    n: usize,
    stream: bool,
    include_usage: bool,
    seed: u64,
    rules: Rules,
    /// A request without prompt, length and seed.
    template: Request,
}

fn sampling(common: &Common) -> Result<SamplingParams> {
    let number = |field, value, range| -> Result<f32> {
        Ok(within(field, value, range)?.map_or(0.0, |x| x as f32))
    };
    let above_zero = |field, value: Option<f64>, max: f64| match value {
        Some(x) if !(x > 0.0 && x <= max) => Err(Error::invalid(
            field,
            format!("{field} must be greater than 0 and at most {max}, not {x}"),
        )),
        other => Ok(other.map_or(1.0, |x| (x as f32).max(f32::MIN_POSITIVE))),
    };
    let top_k = match common.top_k {
        Some(k) if k < -1 => {
            return Err(Error::invalid(
                "top_k",
                format!("top_k must be -1 or 0 (off) or more, not {k}"),
            ));
        }
        k => k.unwrap_or(0).max(0) as usize,
    };
    let temperature = within("temperature", common.temperature, 0.0..=2.0)?.unwrap_or(1.0);
    Ok(SamplingParams {
        temperature: temperature as f32,
        top_p: above_zero("top_p", common.top_p, 1.0)?,
        top_k,
        min_p: number("min_p", common.min_p, 0.0..=1.0)?,
        repetition_penalty: above_zero("repetition_penalty", common.repetition_penalty, 2.0)?,
        presence_penalty: number("presence_penalty", common.presence_penalty, -2.0..=2.0)?,
        frequency_penalty: number("frequency_penalty", common.frequency_penalty, -2.0..=2.0)?,
        logit_bias: logit_bias(common.logit_bias.as_ref())?,
        seed: 0,
        min_tokens: common.min_tokens.unwrap_or(0),
        ignore_eos: common.ignore_eos.unwrap_or(false),
        stop_token_ids: common.stop_token_ids.clone().unwrap_or_default(),
        grammar: None,
    })
}

fn logit_bias(map: Option<&Map<String, Value>>) -> Result<Vec<(u32, f32)>> {
    map.into_iter()
        .flatten()
        .map(|(id, bias)| {
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            id.parse().ok().zip(bias.map(|bias| bias as f32)).ok_or_else(|| {
                Error::invalid(
                    "logit_bias",
                    format!("logit_bias must map token ids to numbers between -100 and 100, not {id:?} to {}", map.map_or(&Value::Null, |m| &m[id])),
                )
            })
        })
        .collect()
}

fn stops(stop: Option<&OneOrMany>) -> Result<Stops> {
    let stops = match stop {
        None => &[],
        Some(OneOrMany::One(stop)) => std::slice::from_ref(stop),
        Some(OneOrMany::Many(stops)) => stops.as_slice(),
    };
    let fits = |stop: &String| (1..=MAX_STOP_BYTES).contains(&stop.len());
    if stops.len() > MAX_STOPS || !stops.iter().all(fits) {
        return Err(Error::invalid(
            "stop",
            format!(
                "stop must be a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_BYTES} bytes"
            ),
        ));
    }
    Ok(Stops::new(stops.iter().cloned()))
}

/// Checks the salt of a request's cache scope.
fn salt(salt: Option<&str>) -> Result<Option<&str>> {
    match salt {
        Some(salt) if !(1..=MAX_SALT_BYTES).contains(&salt.len()) => Err(Error::invalid(
            "cache_salt",
            format!("cache_salt must be a string of 1 to {MAX_SALT_BYTES} bytes"),
        )),
        salt => Ok(salt),
    }
}

fn check_min_tokens(request: &Request) -> Result<()> {
    let min = request.params.min_tokens;
    match request.max_tokens {
        Some(max) if min > max => Err(Error::invalid(
            "min_tokens",
            format!("min_tokens must be between 0 and max_tokens ({max}), not {min}"),
        )),
        _ => Ok(()),
    }
}

fn within<T: PartialOrd + Display>(
    field: &str,
    value: Option<T>,
    range: RangeInclusive<T>,
) -> Result<Option<T>> {
    match value {
        Some(x) if !range.contains(&x) => Err(Error::invalid(
            field,
            format!(
                "{field} must be between {} and {}, not {x}",
                range.start(),
                range.end()
            ),
        )),
        other => Ok(other),
    }
}

/// Renames the engine's fields in an error to those of a chat request.
pub(super) fn rename(error: Error, max_field: &str) -> Error {
    match error {
        Error::Request {
            kind,
            message,
            param,
        } => Error::Request {
            kind,
            message: message.replace("the prompt", "the messages"),
            param: param.map(|param| match param.as_str() {
                "prompt" => "messages".into(),
                "max_tokens" => max_field.into(),
                _ => param,
            }),
        },
        other => other,
    }
}

/// The seed of a choice, by its index in the reply, so that no two choices share one, whatever their
/// prompts. The first choice has the request's seed itself; the others are hashes of it.
fn choice_seed(seed: u64, choice: u64) -> u64 {
    match choice {
        0 => seed,
        choice => mix(seed ^ mix(choice)),
    }
}

#[cfg(test)]
mod tests;
