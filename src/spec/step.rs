//! What a step takes and gives per sequence, and what follows from its logits on the host.

use super::draft::{Draft, DraftRequest, SeqId};
use super::verify::{Verdict, synthetic_acceptance, verify};
use crate::kv::BlockTable;
use crate::sampling::{NoToken, Rng, Sampler, TokenLogprobs, distribution, logprobs};
use candle_core::Tensor;
use std::ops::Range;

/// A sequence, as far as steps need to know it. Lent to each step.
#[derive(Debug)]
pub struct SequenceState {
    /// Order of arrival.
    pub id: SeqId,
    /// Prompt and output; pending is `tokens[kv_len..]`.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the target's pool.
    pub kv_len: usize,
    /// Where they are.
    pub table: BlockTable,
    /// Knows the same tokens as `tokens`; a step leaves it as it was.
    pub sampler: Sampler,
    /// Alternatives wanted with the log-probability of each new token.
    pub logprobs: Option<usize>,
    /// Alternatives wanted with the log-probability of each of the prompt's tokens.
    pub prompt_logprobs: Option<usize>,
    /// Accepts drafts by chance instead of verifying them; see [`synthetic_acceptance()`].
    pub synthetic_acceptance: Option<f64>,
}

/// What one sequence does in a step: some rows of what is pending, and perhaps a draft after them.
#[derive(Debug)]
pub struct StepInput<'a> {
    /// Its table has room for `kv_len + rows + draft` tokens.
    pub state: &'a mut SequenceState,
    /// Pending tokens to feed now. If it is all of them, the step samples, unless `sample` is off.
    pub rows: usize,
    /// Whether a token is wanted after the last pending one.
    pub sample: bool,
    /// Draft tokens wanted at most.
    pub draft: usize,
    /// Whether a draft may ever be wanted, so that the drafter is told what is certain.
    pub may_draft: bool,
    /// Prompt positions whose log-probabilities are wanted from this step's rows; the first is at
    /// least `kv_len + 1`.
    pub prompt_scores: Range<usize>,
}

/// What a step gave one sequence.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// New tokens: those accepted from the draft, then the target's own. Empty without sampling.
    pub tokens: Vec<u32>,
    /// Nodes of the draft that were accepted, from the root down: all of `tokens` but the last.
    pub path: Vec<usize>,
    /// Hidden states of the step's pending rows and of the path, if the drafter wants them.
    pub hidden: Option<Tensor>,
    /// One for each of `tokens`, if wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// One for each of the input's `prompt_scores`.
    pub prompt_scores: Vec<TokenLogprobs>,
    pub drafted: usize,
    /// Draft tokens whose acceptance was decided.
    pub tested: usize,
}

/// A sequence whose token cannot be chosen fails alone.
pub type StepResult = Result<StepOutput, NoToken>;

impl SequenceState {
    /// Output tokens so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Adds one output token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.sampler.push(token);
    }

    /// The random numbers of the tokens that come next.
    pub fn rng(&self) -> Rng {
        Rng {
            seed: self.sampler.params().seed,
            position: self.tokens.len(),
        }
    }

    /// Takes back what a step has pushed to the sampler.
    pub(super) fn restore_sampler(&mut self) {
        self.sampler.truncate(self.output_len());
    }
}

impl StepInput<'_> {
    /// What a drafter is asked for this sequence.
    pub(super) fn draft_request(&mut self) -> DraftRequest<'_> {
        DraftRequest {
            id: self.state.id,
            tokens: &self.state.tokens,
            length: self.draft,
            sampler: &mut self.state.sampler,
        }
    }
}

/// Scores, distributions, verdict: all that follows from a sequence's logits, `[rows, vocab]`.
///
/// # Errors
/// Where a token that is wanted cannot be chosen.
pub(super) fn decide(
    input: &mut StepInput<'_>,
    draft: &Draft,
    logits: &[f32],
    vocab: usize,
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
    let rows: Vec<&[f32]> = rows.collect();
    let rng = input.state.rng();
    let sampler = &mut input.state.sampler;
    // The first row is that of the last pending token, and each node has one.
    let after = |node: Option<&usize>| rows[node.map_or(0, |node| node + 1)];
    let target = |path: &[usize]| {
        if let Some(&last) = path.last() {
            sampler.push(draft.tokens[last]);
        }
        distribution(after(path.last()), sampler)
    };
    let verdict = match input.state.synthetic_acceptance {
        None => verify(draft, target, &rng),
        Some(rate) => synthetic_acceptance(draft, rate, target, &rng),
    };
    input.state.restore_sampler();
    let Verdict { path, next, tested } = verdict?;
    let accepted = path.iter().map(|&node| draft.tokens[node]);
    let tokens: Vec<u32> = accepted.chain([next]).collect();
    let scored = input.state.logprobs.into_iter().flat_map(|top| {
        let before = [None].into_iter().chain(path.iter().map(Some));
        let scored = tokens.iter().zip(before);
        scored.map(move |(&token, node)| logprobs(after(node), token, top))
    });
    Ok(StepOutput {
        logprobs: scored.collect::<Result<_, _>>()?,
        prompt_scores,
        drafted: draft.len(),
        tested,
        tokens,
        path,
        hidden: None,
    })
}
