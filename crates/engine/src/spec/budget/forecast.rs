//! What a drafter with a model expects for a sequence before it drafts.

use crate::spec::draft::Forecast;

/// Steps over which the price of feeding a backlog to the draft model is spread: texts are hundreds of
/// tokens long, but nobody knows how long this one will be.
const BACKLOG_STEPS: usize = 32;

/// What a drafter with a model expects for a sequence before it drafts.
#[derive(Debug, Clone, Copy)]
pub struct DraftForecast<'a> {
    /// Probability that the first 1, 2, ... tokens of the draft stand. No deeper draft than this.
    pub path: &'a [f32],
    /// The highest probability of the first token that what is known of it allows.
    pub hope: f32,
    pub max_length: usize,
    /// Rows that the draft model must compute for its first token: 1, and what it has not seen.
    pub pending: usize,
    /// Whether one forward of the draft model gives all tokens, with a row for each after the pending ones.
    pub at_once: bool,
}

impl<'a> DraftForecast<'a> {
    /// The forecast for a draft of at most `max_length` tokens.
    pub fn of(forecast: &'a Forecast, max_length: usize) -> Self {
        Self {
            path: &forecast.path,
            hope: forecast.hope,
            max_length,
            pending: forecast.pending,
            at_once: forecast.at_once,
        }
    }

    /// The forward of the draft model that gives the token at `depth`, from 1, and the rows that it adds
    /// there.
    pub fn rows_of(&self, depth: usize) -> (usize, usize) {
        match (self.at_once, depth) {
            (false, 1) => (0, self.first_rows()),
            (false, _) => (depth - 1, 1),
            (true, 1) => (0, self.pending + 1),
            (true, _) => (0, 1),
        }
    }

    /// The rows that the first token of a draft costs. A sequence that drafts in each step feeds what the
    /// step before gained. What is beyond that, such as a prompt, is fed once and serves all later drafts.
    fn first_rows(&self) -> usize {
        let expected: f64 = self.path.iter().copied().map(probability).sum();
        let each = (1 + expected.round() as usize).min(self.pending.max(1));
        each + self.pending.saturating_sub(each).div_ceil(BACKLOG_STEPS)
    }

    /// The path if its first token has the probability that it may have at best.
    pub fn hoped_path(&self) -> Vec<f32> {
        let first = self.path.first().copied().unwrap_or(0.0);
        let factor = (self.hope / first).max(1.0);
        let hoped = |p: &f32| {
            if first > 0.0 {
                (p * factor).min(1.0)
            } else {
                *p
            }
        };
        self.path.iter().map(hoped).collect()
    }
}

/// The score as a probability; 0 if it is none.
pub fn probability(score: f32) -> f64 {
    if (0.0..=1.0).contains(&score) {
        f64::from(score)
    } else {
        0.0
    }
}
