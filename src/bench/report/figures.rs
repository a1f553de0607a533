//! Figures of a group of prompts.

use super::pairs::{MeasuredPair, Timed};
use crate::bench::interval::{Interval, Verdict};
use crate::engine::RankCount;
use crate::spec::expected_speed_up;
use serde::Serialize;

/// Figures of a group of prompts at one temperature. A ratio without measurements is NaN, in JSON null.
#[derive(Debug, Clone, Serialize)]
pub struct GroupFigures {
    pub category: String,
    pub prompts: usize,
    /// Tokens decoded in the speculative runs after the first round.
    pub tokens: usize,
    /// Decoded tokens per second of decode time, without prompt processing: the sum of tokens over
    /// all prompts, divided by the sum of each prompt's median time.
    pub plain_tokens_per_second: f64,
    pub spec_tokens_per_second: f64,
    /// Speculative over plain rate; at temperature 0 this is the ratio of total decode times.
    pub speed_up: f64,
    /// The interval of `speed_up` over prompts; `None` = too few prompts were measured.
    pub interval: Option<Interval>,
    /// The speed-ups of the slowest and of the fastest prompt; `None` = one was not measured.
    pub spread: Option<Interval>,
    pub verdict: Verdict,
    /// Speculative over plain rate, with prompt processing included.
    pub total_speed_up: f64,
    /// Tokens per target step of the speculative runs.
    pub tokens_per_step: f64,
    /// Acceptance rate: accepted over tested draft tokens.
    pub alpha: f64,
    /// Mean tokens per round with a draft, including the corrected or bonus token.
    pub mean_accepted_length: f64,
    /// Mean draft tokens per round with a draft.
    pub mean_draft_length: f64,
    /// Draft tokens of all rounds.
    pub drafted: usize,
    /// Acceptance rates of the first, second, ... siblings, as far as any was tested.
    pub sibling_acceptance: Vec<f64>,
    /// Time of a draft step over that of a plain target step.
    pub c: f64,
    /// Time of a speculative target step over that of a plain one; the theorem assumes 1.
    pub verify_cost: f64,
    /// The prediction of Theorem 3.8 from alpha, K and c.
    pub expected_speed_up: f64,
    pub measured_over_expected: f64,
}

impl GroupFigures {
    /// `spec_length` is the K of all `pairs`. The interval misses the speed-up with probability `error`.
    pub(super) fn of<'a>(
        category: &str,
        spec_length: usize,
        error: f64,
        pairs: impl IntoIterator<Item = &'a MeasuredPair>,
    ) -> Self {
        let (mut plain, mut spec) = (Timed::default(), Timed::default());
        let (mut works, mut speed_ups) = (Vec::new(), Vec::new());
        for pair in pairs {
            plain.add(&pair.plain);
            spec.add(&pair.speculative);
            works.push(pair.works());
            speed_ups.push(pair.speculative.rate() / pair.plain.rate());
        }
        let total_rate = |timed: &Timed| timed.tokens as f64 / timed.total_seconds;
        let usage = spec.spec;
        // Without a draft model, each draft token counts as one step.
        let steps = match spec.cost.draft_steps {
            0.0 => usage.drafted as f64,
            steps => steps,
        };
        let target_step = plain.cost.target_seconds / plain.cost.target_steps;
        let c = spec.cost.draft_seconds / steps / target_step;
        let speed_up = spec.rate() / plain.rate();
        let tokens_per_step = spec.tokens_per_step();
        let interval = Interval::of(&works, error);
        let accepts = usage.accepted > 0 && !has_one_token_per_step(tokens_per_step);
        let expected = expected_speed_up(usage.alpha(), spec_length, c);
        Self {
            category: category.into(),
            prompts: works.len(),
            tokens: spec.decoded,
            plain_tokens_per_second: plain.rate(),
            spec_tokens_per_second: spec.rate(),
            speed_up,
            interval,
            spread: Interval::range(speed_ups),
            verdict: Verdict::of(interval, accepts),
            total_speed_up: total_rate(&spec) / total_rate(&plain),
            tokens_per_step,
            alpha: usage.alpha(),
            mean_accepted_length: usage.mean_accepted_length(),
            mean_draft_length: usage.drafted as f64 / usage.rounds as f64,
            drafted: usage.drafted,
            sibling_acceptance: (usage.ranks.iter())
                .take_while(|rank| rank.tested > 0)
                .map(|&RankCount { tested, accepted }| accepted as f64 / tested as f64)
                .collect(),
            c,
            verify_cost: spec.cost.target_seconds / spec.cost.target_steps / target_step,
            expected_speed_up: expected,
            measured_over_expected: speed_up / expected,
        }
    }
}

/// Whether a table shows 1.00 tokens per step or less: as many steps as plain decoding has cannot be faster.
pub(super) fn has_one_token_per_step(tokens_per_step: f64) -> bool {
    tokens_per_step < 1.005
}
