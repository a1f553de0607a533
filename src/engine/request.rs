//! What goes into the engine and what comes out.

use crate::error::Error;
use crate::sampling::{SamplingParams, TokenLogprobs};

/// One sequence to generate. The engine checks it when it is submitted.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    /// Tokens to generate at most. 0 only computes the prompt (for its log-probabilities).
    /// `None` = up to the context limit.
    pub max_tokens: Option<usize>,
    /// Log-probabilities of each generated token, with so many alternatives.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's tokens, with so many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Draft tokens a round, at most the server's; `None` = the server's, 0 = no speculation.
    pub spec_length: Option<usize>,
    /// Accepts each draft token with this probability, in [0, 1], whatever the models say. Then the
    /// text is not the target's and means nothing; how long its rounds take is what is measured.
    /// Drafts are verified where this is `None`, which is what everyone but `bench` wants.
    pub synthetic_acceptance: Option<f64>,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOutput {
    pub id: u32,
    /// Present when the request asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_tokens` or the context limit.
    Length,
    /// An EOS or stop id; it is the last token that was sent, and no part of the text.
    Stop { token: u32 },
}

/// What speculation did for one request so far. Tokens that were accepted after the end of the text
/// are neither tested nor accepted here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecUsage {
    /// Rounds that carried at least one draft token.
    pub rounds: usize,
    /// Draft tokens proposed.
    pub drafted: usize,
    /// Draft tokens whose acceptance was decided: those before a round's first rejection, and it.
    pub tested: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
}

impl SpecUsage {
    /// Accepted over drafted; 0 when nothing was drafted.
    pub fn acceptance_rate(&self) -> f64 {
        self.accepted as f64 / (self.drafted as f64).max(1.0)
    }

    /// Accepted over tested: the alpha of Leviathan et al. 2023, section 3.1. 0 when nothing was tested.
    pub fn alpha(&self) -> f64 {
        self.accepted as f64 / (self.tested as f64).max(1.0)
    }

    /// Tokens a round, the corrected or bonus token included; 1 without rounds.
    pub fn mean_accepted_length(&self) -> f64 {
        1.0 + self.accepted as f64 / (self.rounds as f64).max(1.0)
    }
}

/// What the engine tells the holder of a request. The last one has `finish` set or is `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// Log-probabilities of the prompt, one a token; the first token has none. Sent once, before
    /// the first [`Event::Tokens`], when the request asked for it.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// The tokens of one round, in order; empty only when `max_tokens` was 0.
    Tokens {
        tokens: Vec<TokenOutput>,
        finish: Option<FinishReason>,
        /// Totals up to and including this round.
        spec: SpecUsage,
    },
    /// The request could not be finished.
    Failed(Error),
}
