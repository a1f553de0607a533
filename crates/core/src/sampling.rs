//! Turns logits into a distribution, and provides random numbers addressed by position.
//!
//! The order of the logits processors: repetition penalty, presence and frequency penalties,
//! logit_bias, min_tokens (forbids stop ids), forbidden words, the ids that the request allows and those
//! that its grammar does, temperature, min-p, top-k, top-p. The logits of draft and target go through the
//! same processors, so `p` and `q` of the acceptance rule are the distributions that the request samples
//! from. Where a thought has had all of its tokens, the token that closes it is the only one left, whatever the
//! processors before the temperature say.

mod coupled;
mod grammar;
mod lossy;
mod mask;
mod sampler;
mod thought;
mod vocab;

pub use coupled::{Guess, best, choose, guess};
pub use foretoken_kernels::mix;
pub use grammar::{Grammar, GrammarRules, GrammarState};
pub use lossy::LossyRule;
pub use mask::Mask;
pub use sampler::{LogitAdjustment, Sampler, TextRules};
pub use thought::{ThoughtLimit, ThoughtMarks, TokenBytes};

use std::sync::Arc;

/// How tokens are chosen. The defaults sample the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy.
    pub temperature: f32,
    /// Keeps the smallest set of most probable tokens whose mass reaches this, in (0, 1]; 1 = off.
    pub top_p: f32,
    /// Number of most probable tokens kept; 0 = all.
    pub top_k: usize,
    /// Tokens below `min_p * max probability` are dropped, in [0, 1]; 0 = off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token in the output.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to logits, by token id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of all random numbers of the request.
    pub seed: u64,
    /// Stop ids are not sampled before the output has this many tokens.
    pub min_tokens: usize,
    /// Whether EOS does not end the text.
    pub ignore_eos: bool,
    /// Ids that end the text. The engine adds the model's EOS ids unless `ignore_eos` is set.
    pub stop_token_ids: Vec<u32>,
    /// The ids that may be chosen; `None` = all. Under a grammar, EOS may be, too, where the text can end.
    pub allowed: Option<Arc<Mask>>,
    /// Sequences of ids, none empty, that the output must not contain.
    pub bad_words: Arc<[Vec<u32>]>,
    /// The grammar that the text must follow.
    pub grammar: Option<Grammar>,
    /// The limit on the thought with which the text begins. Under a grammar, which has the thought, too, it is closed
    /// where the grammar allows that.
    pub thought: Option<ThoughtLimit>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            allowed: None,
            bad_words: Arc::default(),
            grammar: None,
            thought: None,
        }
    }
}

impl SamplingParams {
    /// Lower temperatures count as greedy: dividing by them would overflow f32.
    const GREEDY_BELOW: f32 = 1e-5;

    /// The defaults at a temperature; 0 = greedy.
    pub fn at(temperature: f32) -> Self {
        Self {
            temperature,
            ..Self::default()
        }
    }

    /// Whether the most probable token is always chosen.
    pub fn is_greedy(&self) -> bool {
        self.temperature < Self::GREEDY_BELOW
    }

    /// Whether tokens must be chosen on the host: the kernels of a GPU have no masks. A new parameter that they do not
    /// have belongs here.
    fn needs_host(&self) -> bool {
        self.allowed.is_some()
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// The rule by which draft tokens are accepted.
#[derive(
    Debug,
    Default,
    Clone,
    Copy,
    PartialEq,
    Eq,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Acceptance {
    /// A draft token stands if it is the token that the target draws with the position's own random
    /// numbers. A text does not depend on drafts.
    #[default]
    Coupled,
    /// A chain is verified as a block (Sun et al. 2024, arXiv 2403.10444): as many of its tokens stand as can. In a
    /// tree, a token x stands with probability min(1, p(x) / q(x)) (Leviathan et al. 2023). Sampled texts have the
    /// target's distribution, but depend on the drafts.
    Rejection,
}

/// A distribution over the vocabulary, after all logits processors.
#[derive(Debug, Clone, PartialEq)]
pub enum Dist {
    /// All mass on one token: greedy, or a draft token that no model predicted.
    Point(u32),
    /// Probability of each token id; sums to 1.
    Dense(Vec<f32>),
}

impl Dist {
    /// Probability of `token`.
    pub fn prob(&self, token: u32) -> f64 {
        match self {
            Self::Point(only) => f64::from(u8::from(*only == token)),
            Self::Dense(probs) => probs.get(token as usize).map_or(0.0, |&p| p.into()),
        }
    }

    /// The token at quantile `u` in [0, 1), in the order of token ids.
    pub fn sample(&self, u: f64) -> u32 {
        match self {
            Self::Point(only) => *only,
            Self::Dense(probs) => vocab::quantile(probs, u * vocab::sum(probs)),
        }
    }

    /// `norm(max(0, self - q))`, or `None` if nothing is left (`self == q`).
    pub fn residual(&self, q: &Dist) -> Option<Dist> {
        self.weighted_residual(1.0, q).0
    }

    /// `norm(max(0, weight * self - q))`, `None` if nothing is left, and its mass before it is normalized; `weight` is
    /// from 0 to 1.
    pub fn weighted_residual(&self, weight: f64, q: &Dist) -> (Option<Dist>, f64) {
        let probs = match self {
            Self::Point(only) => {
                let mass = (weight - q.prob(*only)).max(0.0);
                return ((mass > 0.0).then_some(Self::Point(*only)), mass);
            }
            Self::Dense(probs) => probs,
        };
        let mut rest = probs.clone();
        if weight < 1.0 {
            rest.iter_mut().for_each(|p| *p *= weight as f32);
        }
        match q {
            Self::Point(only) => {
                if let Some(p) = rest.get_mut(*only as usize) {
                    *p = 0.0;
                }
            }
            Self::Dense(q) => {
                for (p, q) in rest.iter_mut().zip(q) {
                    *p = (*p - q).max(0.0);
                }
            }
        }
        let mass = vocab::sum(&rest);
        if mass <= 0.0 {
            return (None, 0.0);
        }
        vocab::scale(&mut rest, 1.0 / mass);
        (Some(Self::Dense(rest)), mass)
    }
}

/// Why no token can be chosen from a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoToken {
    /// The logits contain NaN or infinity, or all are minus infinity.
    #[error("the model's logits are not finite")]
    NotFinite,
    /// The logits are valid, but what the request forbids and what it allows leave nothing.
    #[error(
        "logit_bias, penalties, min_tokens, allowed_token_ids, bad_words and the grammar leave no token to choose"
    )]
    AllForbidden,
    /// The grammar's parser has reached one of its limits.
    #[error("the text has made the grammar too complex to go on")]
    GrammarFailed,
}

/// Applies all logits processors (see the module) to one row of raw logits, `[vocab_size]`. If several
/// logits are the largest, the greedy choice is the lowest id.
///
/// # Errors
/// If no token can be chosen.
pub fn distribution(logits: &[f32], sampler: &Sampler) -> Result<Dist, NoToken> {
    let mut dist = weights(logits, sampler)?;
    if let Dist::Dense(probs) = &mut dist {
        let scale = 1.0 / vocab::sum(probs);
        vocab::scale(probs, scale);
    }
    Ok(dist)
}

/// The [`distribution`] before it is normalized: the largest weight is 1.
fn weights(logits: &[f32], sampler: &Sampler) -> Result<Dist, NoToken> {
    let params = sampler.params();
    let mut adjustments = sampler.adjustments().peekable();
    let masks = sampler.masks()?;
    if params.is_greedy() && adjustments.peek().is_none() && masks == [None, None] {
        let greatest = vocab::place(logits, vocab::max(logits).ok_or(NoToken::NotFinite)?);
        return greatest.map(Dist::Point).ok_or(NoToken::NotFinite);
    }
    let mut adjusted = logits.to_vec();
    apply(adjustments, masks, &mut adjusted);
    let Some(max) = vocab::max(&adjusted) else {
        let sound = vocab::max(logits).is_some();
        return Err(if sound {
            NoToken::AllForbidden
        } else {
            NoToken::NotFinite
        });
    };
    if params.is_greedy() {
        let greatest = vocab::place(&adjusted, max);
        return greatest.map(Dist::Point).ok_or(NoToken::NotFinite);
    }
    let mut probs = adjusted;
    vocab::weights(&mut probs, max, params.temperature);
    if params.min_p > 0.0 {
        // The largest weight is exactly 1.
        drop_below(&mut probs, params.min_p);
    }
    if params.top_k > 0 && params.top_k < probs.len() {
        let threshold = nth_largest(&probs, params.top_k);
        drop_below(&mut probs, threshold);
    }
    if params.top_p < 1.0 {
        keep_top_p(&mut probs, params.top_p);
    }
    Ok(Dist::Dense(probs))
}

/// Ignores ids beyond the logits: a draft model may have fewer ids than the request uses.
fn apply(
    adjustments: impl Iterator<Item = LogitAdjustment>,
    masks: [Option<&Mask>; 2],
    logits: &mut [f32],
) {
    for adjustment in adjustments {
        if let Some(logit) = logits.get_mut(adjustment.id as usize) {
            adjustment.apply(logit);
        }
    }
    for mask in masks.into_iter().flatten() {
        mask.apply(logits);
    }
}

/// The logits after all processors but temperature and filters.
fn adjusted(logits: &[f32], sampler: &Sampler) -> Result<Vec<f32>, NoToken> {
    let mut adjusted = logits.to_vec();
    apply(sampler.adjustments(), sampler.masks()?, &mut adjusted);
    Ok(adjusted)
}

fn drop_below(probs: &mut [f32], threshold: f32) {
    for p in probs {
        if *p < threshold {
            *p = 0.0;
        }
    }
}

/// The `n`-th largest value, `1 <= n <= values.len()`.
fn nth_largest(values: &[f32], n: usize) -> f32 {
    let mut values = values.to_vec();
    *values
        .select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a))
        .1
}

/// A weight of at most 1 as an integer, as the CUDA kernel has it: sums of integers do not depend on the order
/// of additions, so that a row is cut at the same token wherever it is decided.
fn mass(weight: f32) -> u64 {
    const ONE: f32 = (1_u64 << 44) as f32;
    (weight * ONE) as u64
}

/// Keeps the smallest set of most probable tokens whose share of the mass reaches `top_p`; of equally
/// probable ones the lower ids. The largest weight is 1. Sorts only as many candidates as it needs.
fn keep_top_p(probs: &mut [f32], top_p: f32) {
    let mut order: Vec<u32> = (0..probs.len() as u32)
        .filter(|&id| probs[id as usize] > 0.0)
        .collect();
    let total: u64 = order.iter().map(|&id| mass(probs[id as usize])).sum();
    let goal = (f64::from(top_p) * total as f64).ceil().max(1.0) as u64;
    let by_prob = |a: &u32, b: &u32| {
        probs[*b as usize]
            .total_cmp(&probs[*a as usize])
            .then(a.cmp(b))
    };
    let (mut sum, mut kept, mut sorted) = (0, 0, 0);
    while sum < goal && kept < order.len() {
        if kept == sorted {
            let more = (sorted * 8).max(64).min(order.len());
            if more < order.len() {
                order[sorted..].select_nth_unstable_by(more - sorted - 1, by_prob);
            }
            order[sorted..more].sort_unstable_by(by_prob);
            sorted = more;
        }
        sum += mass(probs[order[kept] as usize]);
        kept += 1;
    }
    for &id in &order[kept..] {
        probs[id as usize] = 0.0;
    }
}

/// The log-probability of a token under the target's unmodified distribution (natural logarithm of the
/// softmax of the raw logits), and those of the most probable tokens at its position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The log-probability of the token.
    pub logprob: f32,
    /// The most probable tokens, best first; as many as requested.
    pub top: Vec<(u32, f32)>,
}

/// The log-probabilities of `token` and of the `top` most probable tokens, from one row of raw logits.
///
/// # Errors
/// `NotFinite`, as in [`distribution`].
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> Result<TokenLogprobs, NoToken> {
    let max = vocab::max(logits).ok_or(NoToken::NotFinite)?;
    let mut weights = logits.to_vec();
    vocab::weights(&mut weights, max, 1.0);
    let norm = f64::from(max) + vocab::sum(&weights).ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - norm) as f32;
    let mut ids: Vec<u32> = Vec::new();
    if top > 0 {
        let by_logit = |a: &u32, b: &u32| {
            logits[*b as usize]
                .total_cmp(&logits[*a as usize])
                .then(a.cmp(b))
        };
        ids = (0..logits.len() as u32).collect();
        let top = top.min(ids.len());
        ids.select_nth_unstable_by(top - 1, by_logit);
        ids.truncate(top);
        ids.sort_unstable_by(by_logit);
    }
    Ok(TokenLogprobs {
        logprob: logprob(token),
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    })
}

/// The use of a random number. One position may need several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Sampling a draft token from q.
    Draft = 1,
    /// Accepting or rejecting a draft token.
    Accept = 2,
    /// Sampling a token that is not from the draft: from p, or from the residual of p.
    Sample = 3,
    /// The coupled draw of target and draft.
    GumbelMax = 4,
}

/// Random numbers that are addressed, not consumed: each is a pure function of the seed, the position of
/// the token that it decides and its purpose. So nothing else that runs can change them.
///
/// Those of [`Rng::uniform`] also depend on the position at which the step begins. A step that verifies a block looks
/// at random numbers of positions that it then leaves to the next step, which must not meet them again.
#[derive(Debug, Clone, Copy)]
pub struct Rng {
    /// The request's seed.
    pub seed: u64,
    /// Position in the sequence of the first token of the step.
    pub position: usize,
}

impl Rng {
    /// The numbers of a request with this seed, for a step that begins at `position`.
    pub fn at(seed: u64, position: usize) -> Self {
        Self { seed, position }
    }

    /// A number in [0, 1) for the token at [`Rng::position`]` + offset` in this step. `sibling` is the number of a
    /// draft tree's node among its siblings.
    pub fn uniform(&self, offset: usize, purpose: Purpose, sibling: usize) -> f64 {
        let address = [self.position, offset, purpose as usize, sibling];
        (self.bits(address) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The key of the random numbers with which [`choose`] and [`guess`] draw the token at
    /// [`Rng::position`]` + offset`, in whichever step.
    pub fn key(&self, offset: usize) -> u64 {
        self.bits([self.position + offset, Purpose::GumbelMax as usize, 0])
    }

    fn bits<const N: usize>(&self, address: [usize; N]) -> u64 {
        let fold = |state, word| mix(state ^ mix(word as u64));
        address.into_iter().fold(mix(self.seed), fold)
    }
}

#[cfg(test)]
mod tests;
