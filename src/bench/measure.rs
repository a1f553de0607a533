//! Runs one prompt once.

use crate::engine::{CollectedEvents, EngineHandle, Request, SpecUsage, Stats};
use crate::error::{Error, Result};
use std::ops::{AddAssign, Sub};
use std::time::Instant;

/// The result and cost of one run.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    pub tokens: Vec<u32>,
    /// Tokens after the first round, which counts as prompt processing.
    pub decoded: usize,
    /// Time from the arrival of the first round to that of the last.
    pub decode_seconds: f64,
    /// Time from submission to the arrival of the last round.
    pub total_seconds: f64,
    pub spec: SpecUsage,
    /// The engine's cost of the decoding steps.
    pub cost: Cost,
}

/// Number of forwards and their wall time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    pub target_seconds: f64,
    pub target_steps: f64,
    pub draft_seconds: f64,
    pub draft_steps: f64,
}

impl Cost {
    /// The mean of `n` such costs.
    pub fn over(self, n: usize) -> Self {
        self.with(self, |sum, _| sum / n as f64)
    }

    /// Each part of this and of the `other` cost, combined.
    fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            target_seconds: combine(self.target_seconds, other.target_seconds),
            target_steps: combine(self.target_steps, other.target_steps),
            draft_seconds: combine(self.draft_seconds, other.draft_seconds),
            draft_steps: combine(self.draft_steps, other.draft_steps),
        }
    }

    fn so_far(stats: &Stats) -> Self {
        Self {
            target_seconds: stats.target_seconds.get(),
            target_steps: stats.target_steps.get() as f64,
            draft_seconds: stats.draft_seconds.get(),
            draft_steps: stats.draft_steps.get() as f64,
        }
    }
}

impl Sub for Cost {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        self.with(earlier, |now, before| now - before)
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = self.with(other, |a, b| a + b);
    }
}

/// Generates one text with no other request in the engine, up to the context length.
///
/// # Errors
/// The engine rejected the request or failed.
pub fn generate(engine: &EngineHandle, mut request: Request) -> Result<Sample> {
    let room = engine.limits().max_model_len - request.prompt.len();
    request.max_tokens = request.max_tokens.map(|wanted| wanted.min(room));
    // The engine may be done before this thread runs again, so the steps are not counted from the first
    // token on; a step of prompt rows does not count anyway.
    let (started, cost) = (Instant::now(), Cost::so_far(engine.stats()));
    let mut events = engine.submit(request)?;
    let mut completion = CollectedEvents::default();
    let mut first = None;
    while completion.finish.is_none()
        && let Some(event) = events.blocking_recv()
    {
        completion.add(event)?;
        let prefilled = completion.tokens.len();
        first.get_or_insert_with(|| (Instant::now(), prefilled));
    }
    let now = Instant::now();
    let (since, prefilled) = first.ok_or_else(|| Error::internal("the engine returned no text"))?;
    Ok(Sample {
        decoded: completion.tokens.len() - prefilled,
        decode_seconds: (now - since).as_secs_f64(),
        total_seconds: (now - started).as_secs_f64(),
        cost: Cost::so_far(engine.stats()) - cost,
        tokens: completion.ids(),
        spec: completion.spec,
    })
}
