//! Verification on the GPU, without copying the logits to the host.

use super::draft::{Draft, DraftDist};
use super::step::{StepInput, StepOutput, StepResult, decide};
use crate::error::Result;
use crate::kernels::sample::{
    self, Chain, LogitsParams, NO_TOKEN, Node, RowAdjustment, TokenChoice,
};
use crate::model::Output;
use crate::sampling::{Purpose, Sampler, SamplingParams};
use std::ops::Range;

/// The parameters for row `row` of the logits, to be applied after its adjustments.
pub fn logits_params(row: u32, params: &SamplingParams, choice: TokenChoice) -> LogitsParams {
    LogitsParams {
        row,
        top_k: u32::try_from(params.top_k).unwrap_or(0),
        temperature: if params.is_greedy() {
            0.0
        } else {
            params.temperature
        },
        min_p: params.min_p,
        top_p: params.top_p,
        choice,
    }
}

/// The adjustments of row `row` of the logits.
pub fn row_adjustments(row: u32, sampler: &Sampler) -> impl Iterator<Item = RowAdjustment> + '_ {
    sampler.adjustments().map(move |adjustment| RowAdjustment {
        row,
        id: adjustment.id,
        repetition: adjustment.repetition,
        subtract: adjustment.subtract,
        bias: adjustment.bias,
    })
}

/// Computes each input's result from the logits of a step; `rows` has each input's range of logits
/// rows. Copies an input's logits to the host only if it requests log-probabilities, its draft is a
/// tree or has distributions in host memory, or no token can be chosen.
///
/// # Errors
/// If the device fails.
pub(super) fn decide_all(
    output: &Output,
    inputs: &mut [StepInput<'_>],
    drafts: &[Draft],
    rows: Vec<Range<usize>>,
    vocab_size: usize,
) -> Result<Vec<StepResult>> {
    let on_host =
        |input: &mut StepInput<'_>, draft: &Draft, rows: &Range<usize>| -> Result<StepResult> {
            let logits = output.logits.narrow(0, rows.start, rows.len())?;
            let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
            Ok(decide(input, &draft.to_host()?, &logits, vocab_size, 0))
        };
    let mut outputs: Vec<_> = inputs.iter().map(|_| Ok(StepOutput::default())).collect();
    let mut verification = Verification::default();
    for (place, rows) in rows.iter().enumerate() {
        let (input, draft) = (&mut inputs[place], &drafts[place]);
        if rows.is_empty() {
            continue;
        }
        let scored = input.state.logprobs.is_some() || !input.prompt_scores.is_empty();
        if scored || draft.has_host_dists() || !draft.is_chain() {
            outputs[place] = on_host(input, draft, rows)?;
        } else {
            verification.push(place, input, draft, rows.start as u32);
        }
    }
    for (place, decided) in verification.run(output, drafts)? {
        outputs[place] = match decided {
            Some(decided) => Ok(decided),
            // The host determines the reason.
            None => on_host(&mut inputs[place], &drafts[place], &rows[place])?,
        };
    }
    Ok(outputs)
}

/// The inputs to verify on the GPU.
#[derive(Default)]
struct Verification<'a> {
    places: Vec<usize>,
    params: Vec<LogitsParams>,
    adjustments: Vec<RowAdjustment>,
    chains: Vec<Chain<'a>>,
}

impl<'a> Verification<'a> {
    /// Adds an input whose logits rows start at row `first`.
    fn push(&mut self, place: usize, input: &mut StepInput<'_>, draft: &'a Draft, first: u32) {
        let rng = input.state.rng();
        let nodes = draft.tokens.iter().enumerate();
        self.places.push(place);
        self.chains.push(Chain {
            row: self.params.len(),
            nodes: nodes
                .map(|(i, &token)| Node {
                    token,
                    uniform: rng.uniform(i, Purpose::Accept, 0),
                    q: match draft.dists.get(i) {
                        Some(DraftDist::Device(row)) => Some(row),
                        _ => None,
                    },
                })
                .collect(),
            synthetic_acceptance: input.state.synthetic_acceptance,
        });
        let sampler = &mut input.state.sampler;
        for i in 0..=draft.len() {
            let row = first + i as u32;
            let choice = TokenChoice::Quantile(rng.uniform(i, Purpose::Sample, 0));
            self.params
                .push(logits_params(row, sampler.params(), choice));
            self.adjustments.extend(row_adjustments(row, sampler));
            if let Some(&token) = draft.tokens.get(i) {
                sampler.push(token);
            }
        }
        input.state.restore_sampler();
    }

    /// Verifies all inputs; returns each input's place and output, `None` if no token can be
    /// chosen.
    fn run(self, output: &Output, drafts: &[Draft]) -> Result<Vec<(usize, Option<StepOutput>)>> {
        if self.chains.is_empty() {
            return Ok(Vec::new());
        }
        let processed = sample::process_logits(&output.logits, self.params, self.adjustments, 0)?;
        let verdicts = processed.verify(&self.chains)?;
        let decided = self.places.into_iter().zip(verdicts);
        let outputs = decided.map(|(place, accepted)| {
            let (draft, len) = (&drafts[place], accepted.len as usize);
            let mut tokens = draft.tokens[..len].to_vec();
            tokens.push(accepted.next);
            let output = StepOutput {
                tokens,
                path: (0..len).collect(),
                drafted: draft.len(),
                tested: draft.len().min(len + 1),
                ..StepOutput::default()
            };
            (place, (accepted.next != NO_TOKEN).then_some(output))
        });
        Ok(outputs.collect())
    }
}
