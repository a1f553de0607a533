//! What drafters are asked and told.

use super::Draft;
use candle_core::Tensor;
use foretoken_core::kv::PrefixRoot;
use foretoken_core::sampling::{Acceptance, Purpose, Rng, Sampler};
use foretoken_kernels::sample::TokenChoice;
use std::ops::Range;
use std::sync::Arc;

/// Identifies a sequence while it lives; later arrivals have larger ids.
pub type SeqId = u64;

/// Requests of different scopes share nothing that could tell one about the other, not even by timing.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheScope(pub u64);

impl CacheScope {
    /// The root of the scope's sequences in a pool; a head's begin after the token `first`.
    pub fn root(self, first: Option<u32>) -> PrefixRoot {
        PrefixRoot {
            scope: self.0,
            first,
        }
    }
}

/// What a drafter knows of a request besides its tokens.
#[derive(Debug, Default, Clone)]
pub struct DraftContext {
    /// The scope of the request's cached tokens.
    pub scope: CacheScope,
    /// The output that the request expects, as tokens; a hint. May be empty. The choices of a request share
    /// it.
    pub prediction: Arc<[u32]>,
    /// Whether something of the request may be kept longer than it runs: by a head that learns from it, and on disk for later
    /// requests with the same beginning.
    pub may_persist: bool,
}

impl DraftContext {
    /// The context of a request whose rows have the adapter `id`, a random number. It has a scope of its own that no later
    /// process has, and a head of the base model does not learn from it.
    pub fn of_adapter(self, id: u64) -> Self {
        Self {
            scope: CacheScope(self.scope.0 ^ id),
            may_persist: false,
            ..self
        }
    }
}

/// What a step verifies of one sequence, and what it must yield for the drafter.
#[derive(Debug, Clone, Default)]
pub struct Proposal {
    /// The draft; empty = plain decoding.
    pub draft: Draft,
    /// Number of the best next tokens of each verified row to yield.
    pub candidates: usize,
    /// Whether the step must yield the target's hidden states: the drafter reads them, or somebody learns from them.
    pub is_tapped: bool,
}

/// A request for a draft of one sequence.
#[derive(Debug)]
pub struct DraftRequest<'a> {
    /// The sequence to draft for.
    pub id: SeqId,
    /// All tokens of the sequence; the draft continues after the last.
    pub tokens: &'a [u32],
    /// Maximum depth of the draft (K), at least 1.
    pub length: usize,
    /// Maximum number of its levels that may cost a forward each, or a row of one forward each (see
    /// [`Forecast::at_once`]), at most `length`; 0 = only guesses that cost none.
    pub model_length: usize,
    /// Maximum number of its nodes, at least 1.
    pub nodes: usize,
    /// Maximum number of children of a node, at least 1; 1 = a chain.
    pub width: usize,
    /// Nodes with a lower score will not be verified: they need not be proposed.
    pub min_score: f32,
    /// Whether the draft must have the requested length, whatever it is worth.
    pub is_fixed: bool,
    /// A chain that tables guess for a draft model, which may verify it in one forward; see
    /// [`Cascade`](crate::spec::Cascade). May be empty.
    pub staged: Vec<u32>,
    /// Position of the first draft token in the target's sequence, which addresses its random
    /// numbers.
    pub position: usize,
    /// Has state for `tokens`. A drafter may push the tokens it drafts and leave them there: the
    /// caller removes them.
    pub sampler: &'a mut Sampler,
    /// The rule that will verify the draft; [`Acceptance::Coupled`] for every greedy request.
    pub acceptance: Acceptance,
    /// What the drafter knows of the request besides its tokens.
    pub context: &'a DraftContext,
}

impl<'a> DraftRequest<'a> {
    /// A request for a chain of up to `length` tokens after `tokens`, under the coupled rule.
    pub fn chain(
        id: SeqId,
        tokens: &'a [u32],
        length: usize,
        sampler: &'a mut Sampler,
        context: &'a DraftContext,
    ) -> Self {
        Self {
            id,
            tokens,
            length,
            model_length: length,
            nodes: length,
            width: 1,
            min_score: 0.0,
            is_fixed: false,
            staged: Vec::new(),
            position: tokens.len(),
            sampler,
            acceptance: Acceptance::Coupled,
            context,
        }
    }

    /// Maximum number of children of a node under its rule. A chain under the rejection rule: which siblings
    /// there are must not depend on what was drawn.
    pub fn max_siblings(&self) -> usize {
        match self.acceptance {
            Acceptance::Coupled => self.width,
            Acceptance::Rejection => 1,
        }
    }

    /// Whether its tokens are drawn at random.
    pub fn is_sampled(&self) -> bool {
        !self.sampler.params().is_greedy()
    }

    /// How the tokens of level `level` of the draft, from 0, are drawn.
    pub(in crate::spec) fn choice(&self, level: usize) -> TokenChoice {
        match self.acceptance {
            Acceptance::Coupled => TokenChoice::GumbelMax(self.rng().key(level)),
            Acceptance::Rejection => {
                TokenChoice::Quantile(self.rng().uniform(level, Purpose::Draft, 0))
            }
        }
    }

    /// The random numbers for the tokens of the draft.
    pub fn rng(&self) -> Rng {
        Rng::at(self.sampler.params().seed, self.position)
    }
}

/// The committed tokens of a sequence after a step.
#[derive(Debug, Clone)]
pub struct Committed<'a> {
    /// The sequence.
    pub id: SeqId,
    /// All of its tokens.
    pub tokens: &'a [u32],
    /// Number of its tokens that belong to the prompt.
    pub prompt_len: usize,
    /// Positions that the target computed in this step and that are committed: pending tokens, then
    /// accepted ones. The token that the step added itself is not included: it is pending.
    pub new: Range<usize>,
    /// The target's hidden states there, `[new.len(), taps * hidden_size]`, if the drafter reads or learns; see
    /// [`ForwardOutput::tapped`](foretoken_core::model::ForwardOutput::tapped). `None` if
    /// [`Drafter::taps`](crate::spec::Drafter::taps) is empty, or reading does not pay. It may be a view of a
    /// larger tensor: copy what is kept for long.
    pub hidden: Option<Tensor>,
    /// Each token after which the target predicted the next one in this step, rejected draft tokens
    /// included, with the target's best next tokens, the best first. Empty if
    /// [`Drafter::candidates`](crate::spec::Drafter::candidates) is 0.
    pub candidates: &'a [(u32, Vec<u32>)],
    /// [`Draft::parents`] of the draft that was verified, whose tokens are the last ones in `candidates`. Empty
    /// if `candidates` is.
    pub parents: &'a [Option<u16>],
    /// What the drafter knows of the request besides its tokens.
    pub context: &'a DraftContext,
}

impl<'a> Committed<'a> {
    /// The positions `new`, of which the drafter gets neither hidden states nor candidates.
    pub fn new(
        id: SeqId,
        tokens: &'a [u32],
        prompt_len: usize,
        new: Range<usize>,
        context: &'a DraftContext,
    ) -> Self {
        Self {
            id,
            tokens,
            prompt_len,
            new,
            hidden: None,
            candidates: &[],
            parents: &[],
            context,
        }
    }
}

/// What a drafter expects before it drafts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Forecast {
    /// Estimated probability that a draft has the right tokens down to depth 1, 2, ...
    pub path: Vec<f32>,
    /// The highest probability of the first token that what is known of it allows.
    pub hope: f32,
    /// Rows of the first forward: 1, and what the drafter has not seen.
    pub pending: usize,
    /// Whether the first forward drafts all levels, with a row for each after the pending ones; otherwise
    /// each level is a forward.
    pub at_once: bool,
}

/// Total cost of drafting, for the cost coefficient c of Leviathan et al. 2023, section 3.2.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftCost {
    /// Draft forwards that contained no prompt rows.
    pub steps: u64,
    /// Wall time of those, seconds.
    pub step_seconds: f64,
}
