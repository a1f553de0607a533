//! Verification on the GPU, without copying the logits to the host.

use super::draft::{Draft, DraftDist, Proposal};
use super::step::{StepInput, StepOutput, StepResult, decide};
use super::verify::{self, Verdict};
use foretoken_core::error::Result;
use foretoken_core::model::ForwardOutput;
use foretoken_core::sampling::{Acceptance, Guess, Purpose, Sampler, SamplingParams};
use foretoken_kernels::sample::{
    self, BestTokens, Chain, LogitsParams, MAX_BEST, NO_TOKEN, Node, ProcessedLogits,
    RowAdjustment, TokenChoice,
};
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

/// How rows of logits become tokens.
#[derive(Debug, Default)]
pub struct RowParams {
    pub params: Vec<LogitsParams>,
    pub adjustments: Vec<RowAdjustment>,
}

impl RowParams {
    /// Adds row `row` of the logits, for the position that `sampler` has reached.
    pub fn push(&mut self, row: u32, sampler: &Sampler, choice: TokenChoice) {
        self.params
            .push(logits_params(row, sampler.params(), choice));
        self.adjustments.extend(row_adjustments(row, sampler));
    }

    /// See [`sample::process_logits`].
    fn process(self, output: &ForwardOutput) -> candle_core::Result<ProcessedLogits> {
        sample::process_logits(&output.logits, self.params, self.adjustments, 0)
    }
}

/// At most `count` tokens of a row that a GPU has drawn, the likeliest first.
pub fn guesses_of(best: &BestTokens, row: usize, count: usize) -> Vec<Guess> {
    let guess = |(token, prob)| Guess { token, prob };
    best.of_row(row).take(count).map(guess).collect()
}

/// Computes each input's result from the logits of a step; `rows` has each input's range of logits
/// rows.
///
/// Copies an input's logits to the host only if it requests log-probabilities or a lossy rule, [`Sampler::needs_host`],
/// no token can be chosen, or the rejection rule applies to a tree or to a draft that [`Draft::needs_host`].
///
/// # Errors
/// If the device fails.
pub(super) fn decide_all(
    output: &ForwardOutput,
    inputs: &mut [StepInput<'_>],
    proposals: &[Proposal],
    rows: Vec<Range<usize>>,
    vocab_size: usize,
) -> Result<Vec<StepResult>> {
    let wanted = |place: usize| proposals[place].candidates.min(MAX_BEST);
    let on_host = |input: &mut StepInput<'_>, place: usize| -> Result<StepResult> {
        let logits = (output.logits).narrow(0, rows[place].start, rows[place].len())?;
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let draft = proposals[place].draft.to_host()?;
        Ok(decide(input, &draft, &logits, vocab_size, wanted(place)))
    };
    let mut outputs: Vec<_> = inputs.iter().map(|_| Ok(StepOutput::default())).collect();
    let (mut coupled_rows, mut rejection_rows) = (CoupledRows::default(), RejectionRows::default());
    for (place, rows) in rows.iter().enumerate() {
        let (input, draft) = (&mut inputs[place], &proposals[place].draft);
        if rows.is_empty() {
            continue;
        }
        // Lossy rules are computed on the host.
        let on_host_only = input.state.logprobs.is_some()
            || input.state.lossy.is_some()
            || !input.prompt_scores.is_empty()
            || input.state.sampler.needs_host();
        let coupled =
            input.state.synthetic_acceptance.is_none() && input.state.rule() == Acceptance::Coupled;
        if !on_host_only && coupled {
            coupled_rows.push(place, input, draft, rows.start as u32);
        } else if !on_host_only && draft.is_chain() && !draft.needs_host() {
            rejection_rows.push(place, input, draft, rows.start as u32);
        } else {
            outputs[place] = on_host(input, place)?;
        }
    }
    // All work is launched before the first copy to the host waits for it.
    let on_device = || coupled_rows.places.iter().chain(&rejection_rows.places);
    let best = match on_device().map(|&place| wanted(place)).max() {
        None | Some(0) => None,
        Some(count) => Some(sample::best_logits(&output.logits, count)?),
    };
    let drawn = coupled_rows.launch(output)?;
    let mut decided = rejection_rows.run(output, proposals)?;
    decided.extend(drawn.map_or(Ok(Vec::new()), |drawn| drawn.read(proposals))?);
    let best: Vec<Vec<u32>> = best.map_or(Ok(Vec::new()), |best| best.to_vec2())?;
    for (place, decided) in decided {
        let input = &mut inputs[place];
        outputs[place] = match decided {
            Some(mut decided) => {
                if wanted(place) > 0 {
                    let (draft, best) = (&proposals[place].draft, &best[rows[place].clone()]);
                    decided.candidates = candidates_of(input, draft, best);
                }
                Ok(decided)
            }
            // The host determines the reason.
            None => on_host(input, place)?,
        };
    }
    Ok(outputs)
}

/// The tokens whose next ones an input's rows predict, with the `best` next tokens of each row.
fn candidates_of(input: &StepInput<'_>, draft: &Draft, best: &[Vec<u32>]) -> Vec<(u32, Vec<u32>)> {
    let fed = input.state.tokens.last().into_iter().chain(&draft.tokens);
    let ids = |best: &Vec<u32>| best.iter().copied().filter(|&id| id != NO_TOKEN).collect();
    fed.zip(best)
        .map(|(&token, best)| (token, ids(best)))
        .collect()
}

/// An input's result; `None` if no token can be chosen.
type Decided = (usize, Option<StepOutput>);

fn step_output(draft: &Draft, path: Vec<usize>, next: u32, tested: usize) -> StepOutput {
    let accepted = path.iter().map(|&node| draft.tokens[node]);
    StepOutput {
        tokens: accepted.chain([next]).collect(),
        path,
        tested,
        ..StepOutput::default()
    }
}

/// The inputs under the coupled rule: their tokens are drawn on the GPU and compared with the drafts on
/// the host.
#[derive(Default)]
struct CoupledRows {
    places: Vec<usize>,
    /// The first row of each input.
    firsts: Vec<usize>,
    rows: RowParams,
}

impl CoupledRows {
    /// Adds an input whose logits rows start at row `first`. The row of a node is processed as that of
    /// a sequence with the tokens on the path to the node.
    fn push(&mut self, place: usize, input: &mut StepInput<'_>, draft: &Draft, first: u32) {
        self.places.push(place);
        self.firsts.push(self.rows.params.len());
        let rng = input.state.rng();
        for node in [None].into_iter().chain((0..draft.len()).map(Some)) {
            let row = first + node.map_or(0, |node| node as u32 + 1);
            let path = draft.path_tokens(node);
            let choice = TokenChoice::GumbelMax(rng.key(path.len()));
            let sampler = &mut input.state.sampler;
            sampler.after(&path, |sampler| self.rows.push(row, sampler, choice));
        }
    }

    /// Draws the tokens of all rows; `None` if there are no inputs.
    fn launch(self, output: &ForwardOutput) -> Result<Option<PendingDraw>> {
        if self.places.is_empty() {
            return Ok(None);
        }
        Ok(Some(PendingDraw {
            places: self.places,
            firsts: self.firsts,
            processed: self.rows.process(output)?,
        }))
    }
}

/// Tokens that are being drawn.
struct PendingDraw {
    places: Vec<usize>,
    firsts: Vec<usize>,
    processed: ProcessedLogits,
}

impl PendingDraw {
    /// Waits for the tokens and applies the coupled rule.
    fn read(self, proposals: &[Proposal]) -> Result<Vec<Decided>> {
        let tokens = self.processed.read()?;
        let inputs = self.places.into_iter().zip(self.firsts);
        let decided = inputs.map(|(place, first)| {
            let draft = &proposals[place].draft;
            let target = |path: &[usize]| {
                let token = tokens.token(first + path.last().map_or(0, |node| node + 1));
                (token != NO_TOKEN).then_some(token).ok_or(())
            };
            let verdict = verify::coupled(draft, target).ok();
            let output =
                |verdict: Verdict| step_output(draft, verdict.path, verdict.next, verdict.tested);
            (place, verdict.map(output))
        });
        Ok(decided.collect())
    }
}

/// The inputs under the rejection rule.
#[derive(Default)]
struct RejectionRows<'a> {
    places: Vec<usize>,
    rows: RowParams,
    chains: Vec<Chain<'a>>,
}

impl<'a> RejectionRows<'a> {
    /// Adds an input whose logits rows start at row `first`.
    fn push(&mut self, place: usize, input: &mut StepInput<'_>, draft: &'a Draft, first: u32) {
        let rng = input.state.rng();
        let nodes = draft.tokens.iter().enumerate();
        self.places.push(place);
        self.chains.push(Chain {
            row: self.rows.params.len(),
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
            self.rows.push(row, sampler, choice);
            if let Some(&token) = draft.tokens.get(i) {
                sampler.push(token);
            }
        }
        input.state.restore_sampler();
    }

    /// Verifies all inputs; returns each input's place and output, `None` if no token can be
    /// chosen.
    fn run(self, output: &ForwardOutput, proposals: &[Proposal]) -> Result<Vec<Decided>> {
        if self.chains.is_empty() {
            return Ok(Vec::new());
        }
        let verdicts = self.rows.process(output)?.verify(&self.chains)?;
        let decided = self.places.into_iter().zip(verdicts);
        let outputs = decided.map(|(place, accepted)| {
            let (draft, len) = (&proposals[place].draft, accepted.len as usize);
            let tested = draft.len().min(len + 1);
            let output = step_output(draft, (0..len).collect(), accepted.next, tested);
            (place, (accepted.next != NO_TOKEN).then_some(output))
        });
        Ok(outputs.collect())
    }
}
