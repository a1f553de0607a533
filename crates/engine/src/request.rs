//! Inputs and outputs of the engine.

use super::stats::RequestTimes;
use crate::spec::{Draft, DraftContext, Source};
use foretoken_core::error::Error;
use foretoken_core::model::{Adapter, Pooling};
use foretoken_core::sampling::{Acceptance, LossyRule, SamplingParams, TokenLogprobs};
use std::fmt::Debug;
use std::ops::Add;
use std::sync::Arc;

/// Maximum number of tokens that a sequence counts in the queue besides its prompt: an answer of usual length,
/// because nobody knows how long it will be.
const ANSWER_TOKENS: usize = 256;

/// Cost of a sequence in the queue, in tokens. It has `tokens` so far, and its output may have `max_tokens` in all.
pub fn queue_cost(tokens: usize, max_tokens: usize) -> usize {
    tokens + max_tokens.min(ANSWER_TOKENS)
}

/// One sequence to generate. The engine checks it when it is submitted.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The name of the request in log lines, besides the engine's own number.
    pub name: Option<Arc<str>>,
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// The sampling parameters.
    pub params: SamplingParams,
    /// The adapter of its rows; `None` = the base model's own. It shares no prefix and no table with requests of
    /// others, whatever its scope.
    pub adapter: Option<Arc<dyn Adapter>>,
    /// Maximum number of tokens to generate. 0 only computes the prompt (for its
    /// log-probabilities). `None` = up to the context limit.
    pub max_tokens: Option<usize>,
    /// Asks for the embedding of the prompt, pooled like this, instead of tokens; see
    /// [`Request::embedding`].
    pub pooling: Option<Pooling>,
    /// Number of alternatives to return with the log-probability of each generated token.
    pub logprobs: Option<usize>,
    /// Number of alternatives to return with the log-probability of each prompt token.
    pub prompt_logprobs: Option<usize>,
    /// Maximum depth of drafts, at most the server's limit, which is the default; 0 = no speculation.
    pub spec_length: Option<usize>,
    /// Maximum number of draft tokens per round, at most the server's limit, which is the default.
    pub spec_nodes: Option<usize>,
    /// Maximum number of children of a draft node, at most the server's limit, which is the default.
    pub spec_topk: Option<usize>,
    /// The acceptance rule; `None` = the server's.
    pub acceptance: Option<Acceptance>,
    /// Replaces it by a rule that changes texts.
    pub lossy: Option<LossyRule>,
    /// What a drafter knows of the request besides its tokens.
    pub draft_context: DraftContext,
    /// Whether [`Event::Tokens`] says what was drafted.
    pub include_rounds: bool,
    /// Accepts each draft token with this probability, in [0, 1], whatever the models say. The text
    /// is then meaningless; only the time per round is measured. `None` verifies drafts, which is
    /// right for all callers but `bench`.
    pub synthetic_acceptance: Option<f64>,
    /// Whether it is one round of a text that its caller goes on with: it ends with its first token and the draft
    /// tokens after it that stand, at most `max_tokens` in all. The log has no line for it, because no text is done.
    pub single_round: bool,
    /// Who wants to know what became of it, besides the receiver of its events, who may leave before.
    pub watch: Option<Arc<dyn EndObserver>>,
}

impl Request {
    /// A request for the embedding of `prompt`.
    pub fn embedding(prompt: Vec<u32>, pooling: Pooling) -> Self {
        Self {
            prompt,
            max_tokens: Some(0),
            pooling: Some(pooling),
            ..Self::default()
        }
    }
}

/// An observer that is told of the end of a sequence.
pub trait EndObserver: Debug + Send + Sync {
    /// Called once, by the engine's thread, which waits for it.
    fn ended(&self, end: SequenceEnd);
}

/// A sequence that has ended.
#[derive(Debug, Clone, Copy)]
pub struct SequenceEnd {
    /// When the sequence arrived, was admitted and sent tokens.
    pub times: RequestTimes,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that were in the prefix cache.
    pub cached_tokens: usize,
    /// Number of generated tokens.
    pub output_tokens: usize,
    /// Speculation counts of the sequence.
    pub spec: SpecUsage,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOutput {
    /// The token id.
    pub id: u32,
    /// Present when the request asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

/// The draft of a round, and what became of its tokens. It waits until the client reads it, so it holds no more
/// than that: no distributions.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedDraft {
    nodes: Box<[VerifiedNode]>,
}

/// A draft token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VerifiedNode {
    /// The token id.
    pub token: u32,
    /// The node before, or `None` if it follows the sequence's last token.
    pub parent: Option<u16>,
    /// The source of the token.
    pub source: Source,
    /// Whether the token stands.
    pub fate: Fate,
}

/// Whether a draft token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The token does not stand, whether it was tested or not.
    Rejected,
    /// The token stands.
    Accepted,
    /// Accepted by a lossy rule alone.
    AcceptedLossily,
}

impl VerifiedDraft {
    /// The record of `draft`, whose nodes in `path` stand. Its nodes in `lossy` stand by a lossy rule alone.
    pub(super) fn new(draft: &Draft, path: &[usize], lossy: &[usize]) -> Self {
        let node = |node: usize| VerifiedNode {
            token: draft.tokens[node],
            parent: draft.parents[node],
            source: draft.sources[node],
            fate: if lossy.contains(&node) {
                Fate::AcceptedLossily
            } else if path.contains(&node) {
                Fate::Accepted
            } else {
                Fate::Rejected
            },
        };
        Self {
            nodes: (0..draft.len()).map(node).collect(),
        }
    }

    /// All draft tokens, each after the one before it in the text.
    pub fn nodes(&self) -> &[VerifiedNode] {
        &self.nodes
    }

    /// The accepted ones, from the root down. The tokens of the round are these and one of the target, unless the
    /// text ends before.
    pub fn path(&self) -> impl Iterator<Item = (usize, &VerifiedNode)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter(|(_, node)| node.fate != Fate::Rejected)
    }

    /// Whether the target's own token replaces a draft token that the target rejected there.
    pub fn is_corrected(&self) -> bool {
        let last = self.path().last().map(|(node, _)| node as u16);
        self.nodes.iter().any(|node| node.parent == last)
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_tokens` or the context limit.
    Length,
    /// An EOS or stop id; it is the last token sent and not part of the text.
    Stop {
        /// The token that ended the text.
        token: u32,
    },
}

impl FinishReason {
    /// The reason in metrics and log lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop { .. } => "stop",
        }
    }
}

/// Siblings that are counted apart.
pub const MAX_RANKS: usize = 4;

/// Decisions about the draft token of one rank among its siblings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankCount {
    /// Draft tokens whose acceptance was decided.
    pub tested: usize,
    /// Draft tokens accepted, at most `tested`.
    pub accepted: usize,
}

/// Speculation counts of one request so far. Tokens accepted after the end of the text count as
/// neither tested nor accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecUsage {
    /// Rounds that carried at least one draft token.
    pub rounds: usize,
    /// Draft tokens proposed.
    pub drafted: usize,
    /// Draft tokens whose acceptance was decided: those before a round's first rejection, and the
    /// rejected one.
    pub tested: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
    /// Draft tokens that a lossy rule alone accepted.
    pub lossy: usize,
    /// Decisions in which there was a first, second, ... draft token among siblings, and those that it won: the
    /// acceptance vector of Sequoia (Chen et al. 2024, section 4.1).
    pub ranks: [RankCount; MAX_RANKS],
    /// Draft tokens proposed that came from [`DraftContext::prediction`].
    pub predicted: usize,
    /// Draft tokens from [`DraftContext::prediction`] that were accepted.
    pub predicted_accepted: usize,
}

impl Add for SpecUsage {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            rounds: self.rounds + other.rounds,
            drafted: self.drafted + other.drafted,
            tested: self.tested + other.tested,
            accepted: self.accepted + other.accepted,
            lossy: self.lossy + other.lossy,
            ranks: std::array::from_fn(|rank| RankCount {
                tested: self.ranks[rank].tested + other.ranks[rank].tested,
                accepted: self.ranks[rank].accepted + other.ranks[rank].accepted,
            }),
            predicted: self.predicted + other.predicted,
            predicted_accepted: self.predicted_accepted + other.predicted_accepted,
        }
    }
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

    /// Tokens per round, including the corrected or bonus token; 1 without rounds.
    pub fn mean_accepted_length(&self) -> f64 {
        1.0 + self.accepted as f64 / (self.rounds as f64).max(1.0)
    }
}

/// An event that the engine sends to the request's receiver. The last one has `finish` set, or is
/// `Embedding` or `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// Log-probabilities of the prompt, one per token; the first token has none. Sent once, before
    /// the first [`Event::Tokens`], if the request asked for it.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// The tokens of one round, in order; empty only when `max_tokens` was 0.
    Tokens {
        /// The tokens that the round adds to the output.
        tokens: Vec<TokenOutput>,
        /// The round's draft, if the request has [`Request::include_rounds`].
        round: Option<VerifiedDraft>,
        /// Why the text ended; `None` = more events follow.
        finish: Option<FinishReason>,
        /// Totals up to and including this round.
        spec: SpecUsage,
        /// Tokens of the prompt that were not computed because the prefix cache had them.
        cached_tokens: usize,
    },
    /// The embedding of the prompt, not normalized, with as many values as the model's hidden states have:
    /// the only event of a request that asked for it.
    Embedding {
        /// The embedding, one value per dimension of the hidden states.
        values: Vec<f32>,
        /// Tokens of the prompt that were not computed because the prefix cache had them.
        cached_tokens: usize,
    },
    /// The request could not be finished.
    Failed(Error),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;

    /// A token, and a draft token, takes no more than `SECURITY.md` says until its client reads it.
    #[test]
    fn events_that_wait_are_small() {
        let token = size_of::<Event>() + size_of::<TokenOutput>();
        assert!(token <= 250, "{token}");
        assert!(size_of::<(u32, f32)>() <= 8);
        assert_eq!(size_of::<VerifiedNode>(), 12);
        let draft = size_of::<VerifiedDraft>();
        assert_eq!(size_of::<Option<VerifiedDraft>>(), draft);
    }
}
