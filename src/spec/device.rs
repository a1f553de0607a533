//! Verification of a step whose logits stay on a GPU.

use super::draft::Draft;
use super::runner::{Round, Turn, decide};
use crate::error::Result;
use crate::kernels::sample::{self, Chain, Edit, Node, Shaping};
use crate::model::Output;
use crate::sampling::{self, Dist, History, Purpose, Rng, shaping};
use std::ops::Range;

/// What follows from the logits of a step: for each turn its range of `rows` of them. Only the logits
/// of turns that want log-probabilities are copied to the host.
///
/// # Errors
/// Where the device fails.
pub(super) fn decide_all(
    output: &Output,
    turns: &[Turn<'_>],
    drafts: &[Draft],
    rows: Vec<Range<usize>>,
    vocab_size: usize,
) -> Result<Vec<Round>> {
    let mut rounds = vec![Round::default(); turns.len()];
    let mut verification = Verification::default();
    for (place, rows) in rows.into_iter().enumerate() {
        let (turn, draft) = (&turns[place], &drafts[place]);
        if rows.is_empty() {
            continue;
        }
        let scored = turn.logprobs.is_some() || !turn.prompt_scores.is_empty();
        let elsewhere = draft.dists.iter().any(|q| matches!(q, Dist::Dense(_)));
        if scored || elsewhere || !draft.is_chain() {
            let logits = output.logits.narrow(0, rows.start, rows.len())?;
            let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
            rounds[place] = decide(turn, &draft.to_host()?, &logits, vocab_size);
        } else {
            verification.push(place, turn, draft, rows.start as u32);
        }
    }
    verification.run(output, drafts, &mut rounds)?;
    Ok(rounds)
}

/// The turns that a GPU decides about.
#[derive(Default)]
struct Verification<'a> {
    places: Vec<usize>,
    shapings: Vec<Shaping>,
    edits: Vec<Edit>,
    chains: Vec<Chain<'a>>,
}

impl<'a> Verification<'a> {
    /// Adds a turn whose decided rows begin with row `first` of the logits.
    fn push(&mut self, place: usize, turn: &Turn<'_>, draft: &'a Draft, first: u32) {
        let rng = Rng {
            seed: turn.params.seed,
            position: turn.tokens.len(),
        };
        let nodes = draft.tokens.iter().zip(&draft.dists).enumerate();
        self.places.push(place);
        self.chains.push(Chain {
            row: self.shapings.len(),
            nodes: nodes
                .map(|(i, (&token, dist))| Node {
                    token,
                    uniform: rng.uniform(i, Purpose::Accept, 0),
                    q: match dist {
                        Dist::Device(row) => Some(row),
                        _ => None,
                    },
                })
                .collect(),
            forced: turn.synthetic_acceptance,
        });
        let mut history = History::new(turn.params, turn.tokens, turn.prompt_len);
        for i in 0..=draft.len() {
            let row = first + i as u32;
            let uniform = rng.uniform(i, Purpose::Sample, 0);
            self.shapings.push(shaping(row, turn.params, uniform));
            self.edits
                .extend(sampling::edits(row, turn.params, &history));
            if let Some(&token) = draft.tokens.get(i) {
                history.push(token);
            }
        }
    }

    /// Decides, and fills in the rounds of these turns.
    fn run(self, output: &Output, drafts: &[Draft], rounds: &mut [Round]) -> Result<()> {
        if self.chains.is_empty() {
            return Ok(());
        }
        let shaped = sample::shape(&output.logits, self.shapings, self.edits, false)?;
        let verdicts = shaped.verify(&self.chains)?;
        for (place, accepted) in self.places.into_iter().zip(verdicts) {
            let (draft, len) = (&drafts[place], accepted.len as usize);
            let mut tokens = draft.tokens[..len].to_vec();
            tokens.push(accepted.next);
            rounds[place] = Round {
                tokens,
                drafted: draft.len(),
                tested: draft.len().min(len + 1),
                ..Round::default()
            };
        }
        Ok(())
    }
}
