//! The limits that requests are checked against.

use super::request::Request;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_core::sampling::SamplingParams;

/// Maximum number of stop ids of a request, not counting EOS.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Maximum number of tokens that a request may bias.
pub const MAX_LOGIT_BIASES: usize = 1024;

/// The limits that a request is checked against. All lengths are in tokens.
#[derive(Debug, Clone)]
pub struct RequestLimits {
    /// Maximum length of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Number of token ids of the model; ids are below it.
    pub vocab_size: usize,
    /// Maximum number of alternatives that a client may ask for with a log-probability. The server checks it; the
    /// engine returns as many as a request asks for.
    pub max_logprobs: usize,
    /// Maximum number of requests in the queue.
    pub max_waiting: usize,
    /// Maximum number of prompt tokens of all sequences of a request.
    pub max_prompt_tokens: usize,
    /// Maximum depth of drafts; 0 = the server does not speculate.
    pub spec_length: usize,
    /// Whether the model has an output layer; without one it serves embeddings only.
    pub generates: bool,
    /// Number of values of a hidden state, of which an embedding is made.
    pub embedding_size: usize,
    /// Whether requests may have adapters.
    pub takes_adapters: bool,
}

impl RequestLimits {
    /// Checks a request against the engine's limits; an API may have narrower ranges of sampling
    /// parameters. `field` is what the caller calls the prompt.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self, request: &Request, field: &str) -> Result<()> {
        let prompt = request.prompt.len();
        let max = self.max_model_len;
        if request.pooling.is_none() && !self.generates {
            let message = "this model has no output layer (lm_head), so it generates no text: use /v1/embeddings";
            return Err(Error::request(RequestErrorKind::Invalid, None, message));
        }
        if request.adapter.is_some() && !self.takes_adapters {
            return Err(Error::invalid("model", "this server takes no adapters"));
        }
        if request.pooling.is_some() && request.max_tokens != Some(0) {
            return Err(Error::invalid(
                "max_tokens",
                "max_tokens of an embedding must be 0",
            ));
        }
        if prompt == 0 {
            let message = format!("the {field} must have at least one token");
            return Err(Error::invalid(field, message));
        }
        if let Some(&id) = request
            .prompt
            .iter()
            .find(|&&id| id as usize >= self.vocab_size)
        {
            return Err(Error::unknown_token(field, id, self.vocab_size));
        }
        let wanted = prompt.saturating_add(request.max_tokens.unwrap_or(1));
        if wanted > max {
            let (completion, or_completion) = match request.max_tokens {
                Some(0) => ("0".into(), ""),
                Some(tokens) => (tokens.to_string(), " or completion"),
                None => ("at least 1".into(), ""),
            };
            return Err(Error::request(
                RequestErrorKind::ContextLengthExceeded,
                Some(if prompt < max { "max_tokens" } else { field }),
                // OpenAI's wording: clients recognize by it that a shorter prompt may succeed.
                format!(
                    "This model's maximum context length is {max} tokens. However, you requested \
                     {wanted} tokens ({prompt} in the {field}, {completion} in the completion). \
                     Please reduce the length of the {field}{or_completion}."
                ),
            ));
        }
        self.check_params(&request.params)
    }

    /// Checks the numbers in `params`, and its ids and their number, because every step looks at each of them.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check_params(&self, params: &SamplingParams) -> Result<()> {
        let (share, any) = (0.0..=1.0, f32::MIN..=f32::MAX);
        let positive = f32::MIN_POSITIVE..=f32::MAX;
        for (field, number, range) in [
            ("temperature", params.temperature, 0.0..=f32::MAX),
            ("top_p", params.top_p, share.clone()),
            ("min_p", params.min_p, share),
            ("repetition_penalty", params.repetition_penalty, positive),
            ("presence_penalty", params.presence_penalty, any.clone()),
            ("frequency_penalty", params.frequency_penalty, any),
        ] {
            if !range.contains(&number) {
                let message = format!("{field} must be within {range:?}, not {number}");
                return Err(Error::invalid(field, message));
            }
        }
        let stop_ids = params.stop_token_ids.iter().copied();
        let biased = params.logit_bias.iter().map(|&(id, _)| id);
        self.check_ids("stop_token_ids", stop_ids, MAX_STOP_TOKEN_IDS)?;
        self.check_ids("logit_bias", biased, MAX_LOGIT_BIASES)?;
        let thought = params.thought.as_ref();
        let closing = thought.map_or(&[][..], |limit| limit.marks.closing());
        let closing = closing.iter().copied();
        self.check_ids("thinking_token_budget", closing, MAX_STOP_TOKEN_IDS)
    }

    fn check_ids(
        &self,
        field: &str,
        mut ids: impl ExactSizeIterator<Item = u32>,
        max: usize,
    ) -> Result<()> {
        let count = ids.len();
        if count > max {
            let message = format!("{field} may have at most {max} entries, not {count}");
            return Err(Error::invalid(field, message));
        }
        match ids.find(|&id| id as usize >= self.vocab_size) {
            Some(id) => Err(Error::unknown_token(field, id, self.vocab_size)),
            None => Ok(()),
        }
    }
}
