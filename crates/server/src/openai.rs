//! Converts a request body to engine requests. Every check that is possible before the first byte of a
//! reply is made here or by [`RequestLimits::check`](foretoken_engine::RequestLimits::check).

use super::beam::BeamFields;
use super::beam::search::BeamOptions;
use super::choice::Choice;
use super::choice_rules::{MessageRules, Rules};
use super::context::Context;
use super::numbers::within;
use super::object::JsonObject;
use super::prompt::{PromptOptions, PromptTokens};
use super::reply::{Api, ReplyHeader, new_id, now};
use super::structured::Structured;
use super::thinking::ThinkingFields;
use super::tools::Tools;
use super::wire::{self, Common, NO_LIMIT, Prediction, ThinkingField, required, wrong};
use axum::response::Response;
use foretoken_core::error::Result;
use foretoken_core::sampling::{LossyRule, mix};
use foretoken_engine::Request;
use foretoken_engine::spec::DraftContext;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// OpenAI's default for a completion's `max_tokens`.
const DEFAULT_MAX_TOKENS: usize = 16;
const MAX_N: usize = 128;
const MAX_SALT_BYTES: usize = 1024;
/// Stands for no seed, as in vLLM and llama.cpp.
const RANDOM_SEED: i64 = -1;

/// What a body asks for.
pub(crate) enum Asked<S> {
    /// A text, and the shape of its answer.
    Text(Box<(Job, S)>),
    /// What is answered without a text.
    Known(Box<Response>),
}

/// A checked request body: the engine requests, and what is needed to build the reply.
pub(super) struct Job {
    pub header: ReplyHeader,
    /// One per choice: n for each prompt, with the choices of a prompt next to each other.
    pub requests: Vec<Request>,
    pub choices: Vec<Choice>,
    pub stream: bool,
    pub include_usage: bool,
    /// Whether each chunk says what the reply has cost so far.
    pub continuous_usage: bool,
    /// The choices are the best texts that such a search finds.
    pub beams: Option<BeamOptions>,
    /// The least `max_tokens` to which a larger one was cut, because the context has no room for more.
    pub cut_to: Option<usize>,
    /// What was left out of the request.
    pub warnings: Vec<String>,
}

/// A body that asks for text, typed but not yet validated.
#[derive(Debug, Default, JsonSchema)]
#[schemars(rename = "{F}Request")]
pub(super) struct Body<F> {
    /// The fields that all APIs have.
    #[schemars(flatten)]
    pub common: Common,
    /// The fields that one API has.
    #[schemars(flatten)]
    pub fields: F,
    #[schemars(flatten)]
    pub structured: Structured,
}

impl<F: DeserializeOwned> Body<F> {
    /// The names of the fields.
    pub fn names() -> [&'static [&'static str]; 3] {
        [
            wire::names::<Common>(),
            wire::names::<F>(),
            wire::names::<Structured>(),
        ]
    }

    /// Reads a body.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn read(body: &[u8]) -> Result<Self> {
        let read = Self::names();
        let body = JsonObject::parse(body, &read)?;
        let read_body = Self {
            common: body.fields()?,
            fields: body.fields()?,
            structured: body.fields()?,
        };
        body.check_others(&read)?;
        Ok(read_body)
    }
}

impl Context<'_> {
    /// Reads the body of `/v1/completions`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn completion(&self, body: &[u8]) -> Result<Job> {
        self.completion_job(Body::read(body)?, DEFAULT_MAX_TOKENS)
    }

    /// Checks the fields of a completion, whichever API they came from. Without a `max_tokens`, its texts have up to
    /// `default_max_tokens`, as far as the context has room for them.
    ///
    /// # Errors
    /// The errors of [`Context::completion`].
    pub fn completion_job(
        &self,
        body: Body<wire::Completion>,
        default_max_tokens: usize,
    ) -> Result<Job> {
        let Body {
            mut common,
            fields,
            structured,
        } = body;
        let unlimited = common.max_tokens.take_if(|max| *max == NO_LIMIT);
        let default_max_tokens = unlimited.unwrap_or(default_max_tokens);
        let echo = fields.echo.unwrap_or(false);
        let beams = BeamFields {
            use_beam_search: fields.use_beam_search,
            length_penalty: fields.length_penalty,
            early_stopping: fields.early_stopping,
        };
        let has_suffix = fields.suffix.as_ref().is_some_and(|text| !text.is_empty());
        let others = [("echo", echo), ("suffix", has_suffix)];
        let mut plan = self.plan(&mut common, &structured, beams, &others)?;
        plan.best_of = best_of(fields.best_of, &plan)?;
        if common.max_tokens == Some(0) && !echo {
            return wrong("max_tokens", "must be at least 1, or echo must be true");
        }
        let max_logprobs = self.limits.max_logprobs;
        let logprobs = within("logprobs", fields.logprobs, 0..=max_logprobs)?;
        // The best ones are found by their log-probabilities.
        let scored = (plan.best_of > plan.n).then_some(0);
        plan.template.logprobs = logprobs.or(scored);
        plan.template.prompt_logprobs = logprobs.filter(|_| echo);
        plan.rules.logprobs = logprobs.is_some();
        plan.template.params.grammar = self.grammar(&structured)?;

        let prompt = required("prompt", fields.prompt)?;
        let suffix = fields.suffix.filter(|suffix| !suffix.is_empty());
        if suffix.is_some() && !plan.template.params.ignore_eos {
            let ends = self.text.infill_ends();
            plan.template.params.stop_token_ids.extend(ends);
        }
        let options = PromptOptions {
            add_special_tokens: fields.add_special_tokens.unwrap_or(true),
            echo,
            keep: self.kept(fields.truncate_prompt_tokens, common.max_tokens)?,
            suffix: suffix.as_deref(),
        };
        let prompts = self.prompts(prompt, &options, plan.best_of)?;
        plan.rules.token_ids = fields.return_token_ids.unwrap_or(false);
        let max_tokens = |prompt: &[u32]| {
            let available = self
                .limits
                .max_model_len
                .saturating_sub(prompt.len())
                .max(1);
            let recommended = self.defaults.max_new_tokens.unwrap_or(usize::MAX);
            let default = default_max_tokens.min(recommended).min(available);
            Some(common.max_tokens.unwrap_or(default))
        };
        self.job(Api::Completion, plan, prompts, max_tokens)
    }

    /// Reads the body of `/v1/chat/completions`.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn chat(&self, body: &[u8]) -> Result<Job> {
        self.chat_job(Body::read(body)?)
    }

    /// Checks the fields of a chat, whichever API they came from.
    ///
    /// # Errors
    /// The errors of [`Context::chat`].
    pub fn chat_job(&self, body: Body<wire::ChatFields>) -> Result<Job> {
        let Body {
            mut common,
            mut fields,
            structured,
        } = body;
        let beams = BeamFields {
            use_beam_search: fields.use_beam_search,
            length_penalty: fields.length_penalty,
            early_stopping: fields.early_stopping,
        };
        let has_tools = fields.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let end = fields.prompt_end();
        let thinking = ThinkingFields::of_chat(&mut fields);
        let named = thinking.thinking.as_ref();
        let has_budget = named.is_some_and(ThinkingField::has_budget);
        let is_hidden = named.is_some_and(ThinkingField::is_hidden);
        let others = [
            ("tools", has_tools),
            ("thinking", has_budget),
            ("thinking_budget", thinking.budget.is_some()),
            (
                "thinking_token_budget",
                thinking.token_budget.is_some_and(|max| max >= 0),
            ),
        ];
        let mut plan = self.plan(&mut common, &structured, beams, &others)?;
        let limits = [
            ("max_completion_tokens", fields.max_completion_tokens),
            ("max_tokens", common.max_tokens),
            ("max_output_tokens", fields.max_output_tokens),
            ("n_predict", fields.n_predict),
        ];
        let given = limits.into_iter().find(|(_, max)| max.is_some());
        let (max_field, max_tokens) = given.unwrap_or(("max_tokens", None));
        let max_tokens = max_tokens.filter(|max| *max != NO_LIMIT);
        let may_only_read = max_field == "n_predict" && plan.beams.is_none();
        if max_tokens == Some(0) && !may_only_read {
            return wrong(max_field, "must be at least 1");
        }
        let max_top = self.limits.max_logprobs;
        let top = within("top_logprobs", fields.top_logprobs, 0..=max_top)?;
        let wanted = fields.logprobs.unwrap_or(false);
        if !wanted && top.is_some_and(|top| top > 0) {
            return wrong("top_logprobs", "requires logprobs to be true");
        }
        plan.template.logprobs = wanted.then(|| top.unwrap_or(0));
        plan.rules.logprobs = wanted;

        let messages = required("messages", fields.messages)?;
        let tools = Tools::read(fields.tools, fields.tool_choice)?;
        let mut thinking_plan = self.thinking(thinking)?;
        let chat = self.chat_prompt(messages, &tools.list, end, thinking_plan.variables.take())?;
        let parallel = fields.parallel_tool_calls.unwrap_or(true);
        let is_shown = fields.include_reasoning.or(is_hidden.then_some(false));
        plan.rules.message = MessageRules {
            hide_reasoning: is_shown == Some(false),
            ..self.message_rules(&chat, &tools, parallel)?
        };
        let grammar = self.answer_grammar(&structured, &tools, &plan.rules.message)?;
        plan.rules.message.has_grammar = grammar.is_some();
        plan.template.params.grammar = grammar;
        if plan.beams.is_none() {
            let limit = self.thought_limit(&thinking_plan, &plan.rules.message)?;
            plan.template.params.thought = limit;
        }
        let special = fields.add_special_tokens.unwrap_or(false);
        let keep = self.kept(fields.truncate_prompt_tokens, max_tokens)?;
        let ids = self.encode_chat(&chat.prompt, special, keep.into())?;
        plan.rules.token_ids = fields.return_token_ids.unwrap_or(false);
        let prompts = vec![PromptTokens { ids, echo: None }];
        let max_tokens = |prompt: &[u32]| {
            let available = self.limits.max_model_len.saturating_sub(prompt.len());
            let recommended = self.defaults.max_new_tokens;
            max_tokens.or(recommended.map(|max| max.min(available).max(1)))
        };
        let job = self.job(Api::Chat, plan, prompts, max_tokens);
        let mut job = job.map_err(|e| e.renamed(&[("max_tokens", max_field)]))?;
        job.warnings = tools.warnings;
        job.warnings.extend(thinking_plan.warning);
        Ok(job)
    }

    /// The job of `prompts`, whose answers have at most as many tokens as `max_tokens` says of a prompt.
    ///
    /// # Errors
    /// `Invalid` or `ContextLengthExceeded`, naming the field.
    pub fn job(
        &self,
        api: Api,
        mut plan: RequestPlan,
        prompts: Vec<PromptTokens>,
        max_tokens: impl Fn(&[u32]) -> Option<usize>,
    ) -> Result<Job> {
        if let Some(beams) = &mut plan.beams {
            beams.width = std::mem::replace(&mut plan.best_of, plan.n);
        }
        let (field, id) = match api {
            Api::Completion => ("prompt", "cmpl-"),
            Api::Chat => ("messages", "chatcmpl-"),
        };
        let ids = prompts.iter().map(|prompt| prompt.ids.clone());
        let header = ReplyHeader {
            api,
            id: new_id(id),
            created: now(),
            model: plan.model,
            fingerprint: self.fingerprint.cloned(),
            speculates: self.limits.spec_length > 0 && plan.template.spec_length != Some(0),
            lossy: plan.template.lossy.map(LossyRule::name),
            prompt_tokens: prompts.iter().map(|prompt| prompt.ids.len()).sum(),
            choices_per_prompt: plan.best_of,
            shown_per_prompt: plan.n,
            prompt_ids: plan.rules.token_ids.then(|| ids.collect()),
            logprobs: plan.template.logprobs.filter(|_| plan.rules.logprobs),
        };
        let rules = Arc::new(plan.rules);
        let (mut requests, mut choices) = (Vec::new(), Vec::new());
        let mut cut_to = None;
        for prompt in prompts {
            let asked = max_tokens(&prompt.ids);
            let cut = asked.and_then(|asked| self.cut(asked, prompt.ids.len()));
            cut_to = cut_to.into_iter().chain(cut).min();
            let mut request = Request {
                max_tokens: cut.or(asked),
                prompt: prompt.ids,
                ..plan.template.clone()
            };
            // The engine checks this as well; here it avoids copying a too long prompt n times.
            self.limits.check(&request, field)?;
            let room = (self.limits.max_model_len).saturating_sub(request.prompt.len());
            check_min_tokens(request.params.min_tokens, asked, room)?;
            for _ in 0..plan.best_of {
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
            continuous_usage: plan.continuous_usage,
            beams: plan.beams,
            cut_to,
            warnings: Vec::new(),
        })
    }

    /// What the context leaves of `max_tokens`, if that is less; `None` = all of it, or the prompt alone is too long, or it
    /// is to be refused.
    fn cut(&self, max_tokens: usize, prompt: usize) -> Option<usize> {
        let room = self.limits.max_model_len.saturating_sub(prompt);
        (room > 0 && max_tokens > room && !self.strict_max_tokens).then_some(room)
    }

    /// Checks the fields that both APIs share, and adds the defaults to them. `others` are as those of
    /// [`BeamFields::read`].
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub fn plan(
        &self,
        common: &mut Common,
        structured: &Structured,
        beams: BeamFields,
        others: &[(&'static str, bool)],
    ) -> Result<RequestPlan> {
        let model = self.model(common.model.as_deref())?;
        let beams = beams.read(common, structured, others)?;
        self.defaults.fill(common);
        let n = within("n", common.n, 1..=MAX_N)?.unwrap_or(1);
        let stream = common.stream.unwrap_or(false);
        let options = common.stream_options.as_ref();
        if options.is_some() && !stream {
            return wrong("stream_options", "requires stream to be true");
        }
        if options.is_some_and(|options| options.include_obfuscation == Some(true)) {
            const FIELD: &str = "stream_options.include_obfuscation";
            return wrong(FIELD, "is not supported: leave it out or set it to false");
        }
        // Checked before the prompts are processed.
        let mut params = self.sampling(common)?;
        let stops = self.stops(common)?;
        let stop_token_ids = params.stop_token_ids.clone();
        params.stop_token_ids.extend(stops.ids());
        let rules = Rules {
            stops,
            stop_token_ids,
            min_tokens: params.min_tokens,
            show_special: common.skip_special_tokens == Some(false),
            ..Rules::default()
        };
        let spec_length = common.spec_length.map(|k| k.min(self.limits.spec_length));
        let (acceptance, lossy) = common.acceptance_rule()?;
        let prediction = match spec_length.unwrap_or(self.limits.spec_length) {
            0 => [].into(),
            _ => self.prediction(common.prediction.as_ref())?.into(),
        };
        Ok(RequestPlan {
            model: model.name,
            n,
            best_of: n,
            beams,
            stream,
            include_usage: options.and_then(|o| o.include_usage).unwrap_or(false),
            continuous_usage: (options.and_then(|o| o.continuous_usage_stats)).unwrap_or(false),
            seed: match common.seed {
                None | Some(RANDOM_SEED) => rand::random(),
                Some(seed) => seed as u64,
            },
            rules,
            template: Request {
                adapter: model.adapter,
                params,
                spec_length,
                include_rounds: options.and_then(|o| o.include_speculation).unwrap_or(false),
                acceptance,
                lossy,
                draft_context: DraftContext {
                    scope: self.scope(salt(common.cache_salt.as_deref())?),
                    prediction,
                    // A salt asks that others learn nothing of the text.
                    may_persist: common.cache_salt.is_none(),
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
pub(super) struct RequestPlan {
    /// The model's name in the answer.
    model: String,
    /// Number of choices of each prompt that are shown.
    n: usize,
    /// Number of choices of each prompt, or of beams.
    best_of: usize,
    beams: Option<BeamOptions>,
    pub stream: bool,
    include_usage: bool,
    continuous_usage: bool,
    seed: u64,
    pub rules: Rules,
    /// A request without prompt, length and seed.
    pub template: Request,
}

/// The number of choices among which the best `n` are found.
fn best_of(asked: Option<usize>, plan: &RequestPlan) -> Result<usize> {
    const FIELD: &str = "best_of";
    let best_of = within(FIELD, asked, plan.n..=MAX_N)?.unwrap_or(plan.n);
    if plan.stream && best_of > plan.n {
        let what = format!(
            "must equal n ({}) if stream is true: which choices are the best is known at their end",
            plan.n
        );
        return wrong(FIELD, what);
    }
    Ok(best_of)
}

/// Checks the salt of a request's cache scope.
pub(super) fn salt(salt: Option<&str>) -> Result<Option<&str>> {
    match salt {
        Some(salt) if !(1..=MAX_SALT_BYTES).contains(&salt.len()) => wrong(
            "cache_salt",
            format!("must be a string of 1 to {MAX_SALT_BYTES} bytes"),
        ),
        salt => Ok(salt),
    }
}

/// Checks a request's `min_tokens` against the `max_tokens` that it asked for, and what the context has room for.
fn check_min_tokens(min: usize, max_tokens: Option<usize>, room: usize) -> Result<()> {
    let what = match max_tokens {
        Some(max) if min > max => format!("must be between 0 and max_tokens ({max}), not {min}"),
        _ if min > room => {
            format!("must be at most {room}, for which the context has room, not {min}")
        }
        _ => return Ok(()),
    };
    wrong("min_tokens", what)
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
