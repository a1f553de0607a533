//! Inputs and outputs of a step, and verification on the host.

use super::draft::{Committed, Draft, DraftContext, DraftRequest, SeqId};
use super::verify::{Verdict, coupled, lossy, rejection, synthetic_acceptance};
use candle_core::Tensor;
use foretoken_core::kv::{BlockTable, PrefixRoot};
use foretoken_core::model::Adapter;
use foretoken_core::sampling::{
    Acceptance, LossyRule, NoToken, Purpose, Rng, Sampler, SamplingParams, TokenLogprobs, best,
    choose, distribution, logprobs,
};
use std::ops::Range;
use std::sync::Arc;

/// The part of a sequence's state that a step needs; each step borrows it.
#[derive(Debug)]
pub struct SequenceState {
    /// Order of arrival.
    pub id: SeqId,
    /// Prompt and output; pending tokens are `tokens[kv_len..]`.
    pub tokens: Vec<u32>,
    /// Number of prompt tokens, the first ones of `tokens`.
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the target's pool.
    pub kv_len: usize,
    /// The blocks of those tokens.
    pub table: BlockTable,
    /// Has state for `tokens`; a step leaves it unchanged.
    pub sampler: Sampler,
    /// Number of alternatives to return with the log-probability of each new token.
    pub logprobs: Option<usize>,
    /// Number of alternatives to return with the log-probability of each prompt token.
    pub prompt_logprobs: Option<usize>,
    /// The rule that verifies drafts.
    pub acceptance: Acceptance,
    /// Lets more draft tokens stand than [`SequenceState::acceptance`], which it replaces.
    pub lossy: Option<LossyRule>,
    /// What a drafter knows of the request besides its tokens.
    pub draft_context: DraftContext,
    /// The adapter of its rows, which its scope is of, too.
    pub adapter: Option<Arc<dyn Adapter>>,
    /// Accept draft tokens with this probability instead of verifying them; see
    /// [`synthetic_acceptance()`].
    pub synthetic_acceptance: Option<f64>,
}

/// The share of one sequence in a step: some of its pending rows, and possibly a draft after them.
#[derive(Debug)]
pub struct StepInput<'a> {
    /// The sequence's state. Its table has room for `kv_len + rows + nodes` tokens.
    pub state: &'a mut SequenceState,
    /// Number of pending tokens to feed.
    pub rows: usize,
    /// Whether to sample a token after the last pending one; `rows` must then include all of them.
    pub sample: bool,
    /// Maximum number of draft tokens.
    pub nodes: usize,
    /// Maximum depth of the draft.
    pub length: usize,
    /// Maximum number of children of a draft node.
    pub width: usize,
    /// Whether a draft may ever be requested, so that the drafter must observe the committed
    /// tokens.
    pub may_draft: bool,
    /// Prompt positions whose log-probabilities this step's rows must yield; the first is at least
    /// `kv_len + 1`.
    pub prompt_scores: Range<usize>,
    /// Positions of pending rows whose last hidden states this step must yield.
    pub pooled: Range<usize>,
}

/// The result of a step for one sequence.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// New tokens: those accepted from the draft, then the target's own. Empty without sampling.
    pub tokens: Vec<u32>,
    /// Nodes of the draft that were accepted, from the root down: all of `tokens` but the last.
    pub path: Vec<usize>,
    /// Nodes of `path` that stand by the request's lossy rule alone.
    pub lossy: Vec<usize>,
    /// Hidden states of the step's pending rows and of the path, if the drafter needs them.
    pub hidden: Option<Tensor>,
    /// Log-probabilities, one entry for each of `tokens`, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt, one entry for each of the input's `prompt_scores`.
    pub prompt_scores: Vec<TokenLogprobs>,
    /// Last hidden states of the input's `pooled` positions, one after the other.
    pub states: Vec<f32>,
    /// See [`Committed::candidates`](super::Committed::candidates).
    pub candidates: Vec<(u32, Vec<u32>)>,
    /// The draft that was verified, without its distributions.
    pub draft: Draft,
    /// Draft tokens whose acceptance was decided; of siblings one.
    pub tested: usize,
}

/// An error if no token can be chosen; it does not affect other sequences.
pub type StepResult = Result<StepOutput, NoToken>;

impl SequenceState {
    /// The state of a text of which nothing is computed yet; its drafts have the coupled rule.
    pub fn new(id: SeqId, prompt: Vec<u32>, params: SamplingParams) -> Self {
        Self {
            id,
            sampler: Sampler::new(params, &prompt),
            prompt_len: prompt.len(),
            tokens: prompt,
            kv_len: 0,
            table: BlockTable::default(),
            logprobs: None,
            prompt_logprobs: None,
            acceptance: Acceptance::Coupled,
            lossy: None,
            draft_context: DraftContext::default(),
            adapter: None,
            synthetic_acceptance: None,
        }
    }

    /// The positions `new`, as drafters are told of them; see [`Committed::new`].
    pub fn committed(&self, new: Range<usize>) -> Committed<'_> {
        let context = &self.draft_context;
        Committed::new(self.id, &self.tokens, self.prompt_len, new, context)
    }

    /// Number of output tokens so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// What decides K and V in the target's pool besides the tokens.
    pub fn prefix_root(&self) -> PrefixRoot {
        self.draft_context.scope.root(None)
    }

    /// Adds one output token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.sampler.push(token);
        self.sampler.commit();
    }

    /// The random numbers for the next tokens.
    pub fn rng(&self) -> Rng {
        Rng::at(self.sampler.params().seed, self.tokens.len())
    }

    /// The rule by which this request's drafts are drawn and verified. For greedy requests both rules are the
    /// same; a lossy one relaxes the coupled rule.
    pub(super) fn rule(&self) -> Acceptance {
        if self.sampler.params().is_greedy() || self.lossy.is_some() {
            Acceptance::Coupled
        } else {
            self.acceptance
        }
    }

    /// Whether the budget must not change the size of the draft: under the rejection rule it must not
    /// depend on the draft's tokens, and with synthetic acceptance its cost is what is measured.
    pub(super) fn has_fixed_draft(&self) -> bool {
        self.synthetic_acceptance.is_some() || self.rule() == Acceptance::Rejection
    }

    /// The index of the first of `new` tokens that ends the text.
    pub fn end_among(&self, new: &[u32]) -> Option<usize> {
        let ends =
            |(i, &token): (usize, &u32)| self.sampler.ends_text(token, self.output_len() + i);
        new.iter().enumerate().position(ends)
    }

    /// Removes the tokens that a step pushed to the sampler.
    pub(super) fn restore_sampler(&mut self) {
        self.sampler.truncate(self.output_len());
    }
}

impl StepInput<'_> {
    /// The request to the drafter for this sequence; `min_score` is for drafts of no fixed size.
    pub(super) fn draft_request(&mut self, min_score: f32) -> DraftRequest<'_> {
        let (is_fixed, acceptance) = (self.state.has_fixed_draft(), self.state.rule());
        let (id, context) = (self.state.id, &self.state.draft_context);
        let (tokens, sampler) = (&self.state.tokens, &mut self.state.sampler);
        DraftRequest {
            nodes: self.nodes,
            width: self.width,
            min_score: if is_fixed { 0.0 } else { min_score },
            is_fixed,
            acceptance,
            ..DraftRequest::chain(id, tokens, self.length, sampler, context)
        }
    }
}

/// The number of tokens that the sequences of a step gain: none after the end of a text, although draft tokens may be
/// accepted there.
pub(super) fn gained(inputs: &[StepInput<'_>], outputs: &[StepResult]) -> usize {
    let results = inputs.iter().zip(outputs);
    let gained = results.map(|(input, output)| {
        let tokens = output.as_ref().map_or(&[][..], |output| &output.tokens[..]);
        let end = input.state.end_among(tokens);
        end.map_or(tokens.len(), |end| end + 1)
    });
    gained.sum()
}

/// Computes a sequence's result (log-probabilities and verdict) from its `logits`, `[rows, vocab]`, with
/// the `candidates` best next tokens of each verified row.
///
/// # Errors
/// If a required token cannot be chosen.
pub(super) fn decide(
    input: &mut StepInput<'_>,
    draft: &Draft,
    logits: &[f32],
    vocab: usize,
    candidates: usize,
) -> StepResult {
    let mut rows = logits.chunks(vocab);
    let alternatives = input.state.prompt_logprobs.unwrap_or(0);
    let scored = input.prompt_scores.clone().zip(&mut rows);
    let prompt_scores = scored
        .map(|(position, row)| logprobs(row, input.state.tokens[position], alternatives))
        .collect::<Result<_, _>>()?;
    if !input.sample {
        return Ok(StepOutput {
            prompt_scores,
            ..StepOutput::default()
        });
    }
    // The first row is that of the last pending token; one row per draft node follows.
    let rows: Vec<&[f32]> = rows.collect();
    let verdict = verdict(input, draft, &rows);
    input.state.restore_sampler();
    let Verdict {
        path,
        next,
        tested,
        lossy,
    } = verdict?;
    let accepted = path.iter().map(|&node| draft.tokens[node]);
    let tokens: Vec<u32> = accepted.chain([next]).collect();
    let scored = input.state.logprobs.into_iter().flat_map(|top| {
        let before = [0].into_iter().chain(path.iter().map(|node| node + 1));
        let scored = tokens.iter().zip(before);
        scored.map(move |(&token, row)| (token, row, top))
    });
    let scored = scored.map(|(token, row, top)| logprobs(rows[row], token, top));
    let fed = input.state.tokens.last().into_iter().chain(&draft.tokens);
    let candidates = match candidates {
        0 => Vec::new(),
        count => fed
            .zip(&rows)
            .map(|(&token, row)| (token, best(row, count)))
            .collect(),
    };
    Ok(StepOutput {
        logprobs: scored.collect::<Result<_, _>>()?,
        prompt_scores,
        candidates,
        tested,
        tokens,
        path,
        lossy,
        ..StepOutput::default()
    })
}

/// Applies the request's acceptance rule. Leaves the accepted tokens in its sampler.
fn verdict(input: &mut StepInput<'_>, draft: &Draft, rows: &[&[f32]]) -> Result<Verdict, NoToken> {
    let (rng, rule) = (input.state.rng(), input.state.rule());
    let (synthetic, relaxed) = (input.state.synthetic_acceptance, input.state.lossy);
    let sampler = &mut input.state.sampler;
    let after = |path: &[usize], sampler: &mut Sampler| match path.last() {
        None => rows[0],
        Some(&last) => {
            sampler.push(draft.tokens[last]);
            rows[last + 1]
        }
    };
    if let (None, Some(relaxed)) = (synthetic, relaxed) {
        return lossy(draft, |path, children| {
            let row = after(path, sampler);
            let drawn = choose(row, sampler, rng.key(path.len()))?;
            let tokens: Vec<u32> = children.iter().map(|&node| draft.tokens[node]).collect();
            if tokens.is_empty() || tokens.contains(&drawn) {
                return Ok((drawn, None));
            }
            let uniform = |sibling| rng.uniform(path.len(), Purpose::Accept, sibling);
            let stands = relaxed.stands(row, sampler, &tokens, uniform)?;
            Ok((drawn, stands.map(|sibling| children[sibling])))
        });
    }
    if synthetic.is_none() && rule == Acceptance::Coupled {
        return coupled(draft, |path| {
            let row = after(path, sampler);
            choose(row, sampler, rng.key(path.len()))
        });
    }
    let target = |path: &[usize]| {
        let row = after(path, sampler);
        distribution(row, sampler)
    };
    match synthetic {
        None => rejection(draft, target, &rng),
        Some(rate) => synthetic_acceptance(draft, rate, target, &rng),
    }
}
