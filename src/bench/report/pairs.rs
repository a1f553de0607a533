//! What was measured of a prompt: plain and speculative runs, and whether their texts are the same.

use crate::bench::BenchMode;
use crate::bench::interval::{Interval, Pair, Work};
use crate::bench::measure::{Cost, Sample};
use crate::engine::SpecUsage;
use crate::prompts::Prompt;
use serde::Serialize;

/// The runs of one prompt at one temperature: plain and in one speculative mode.
#[derive(Debug, Clone)]
pub struct MeasuredPair {
    pub(super) id: String,
    pub(super) category: String,
    pub(super) prompt_tokens: usize,
    pub(super) temperature: f32,
    pub(super) way: BenchMode,
    pub(super) plain: Timed,
    pub(super) speculative: Timed,
    /// The decode times of the repeats.
    pub(super) plain_seconds: Option<Interval>,
    pub(super) spec_seconds: Option<Interval>,
    /// The text that speculation changed. `None` where texts may differ, too: see
    /// [`BenchMode::is_comparable`].
    pub(super) differs: Option<Difference>,
}

/// A prompt in one decoding mode; times are medians over the repeats.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Timed {
    pub(super) decoded: usize,
    pub(super) decode_seconds: f64,
    pub(super) tokens: usize,
    pub(super) total_seconds: f64,
    pub(super) spec: SpecUsage,
    pub(super) cost: Cost,
}

impl MeasuredPair {
    /// Summarizes the repeats, at least one per mode. Every repeat has the same tokens, since random
    /// numbers are addressed.
    pub fn new(
        prompt: &Prompt,
        temperature: f32,
        way: BenchMode,
        plain: &[Sample],
        speculative: &[Sample],
    ) -> Self {
        let both = plain.iter().zip(speculative);
        let differs = both
            .filter(|_| way.is_comparable(temperature))
            .find_map(|(a, b)| Difference::of_texts(prompt, &a.tokens, &b.tokens));
        let seconds = |runs: &[Sample]| Interval::range(runs.iter().map(|run| run.decode_seconds));
        Self {
            id: prompt.id.clone(),
            category: prompt.category.clone(),
            prompt_tokens: prompt.tokens.len(),
            temperature,
            way,
            plain: Timed::of(plain),
            speculative: Timed::of(speculative),
            plain_seconds: seconds(plain),
            spec_seconds: seconds(speculative),
            differs,
        }
    }

    /// The decoded tokens and times of both ways.
    pub(super) fn works(&self) -> Pair {
        Pair {
            plain: self.plain.work(),
            speculative: self.speculative.work(),
        }
    }
}

impl Timed {
    fn of(samples: &[Sample]) -> Self {
        let first = &samples[0];
        let mut cost = Cost::default();
        samples.iter().for_each(|sample| cost += sample.cost);
        Self {
            decoded: first.decoded,
            decode_seconds: median(samples.iter().map(|s| s.decode_seconds).collect()),
            tokens: first.tokens.len(),
            total_seconds: median(samples.iter().map(|s| s.total_seconds).collect()),
            spec: first.spec,
            cost: cost.over(samples.len()),
        }
    }

    /// The decoded tokens, and their time.
    pub(super) fn work(&self) -> Work {
        Work {
            tokens: self.decoded as f64,
            seconds: self.decode_seconds,
        }
    }

    /// Decoded tokens per second.
    pub(super) fn rate(&self) -> f64 {
        self.decoded as f64 / self.decode_seconds
    }

    /// Decoded tokens per step of the target.
    pub(super) fn tokens_per_step(&self) -> f64 {
        self.decoded as f64 / self.cost.target_steps
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.decoded += other.decoded;
        self.decode_seconds += other.decode_seconds;
        self.tokens += other.tokens;
        self.total_seconds += other.total_seconds;
        self.spec = self.spec + other.spec;
        self.cost += other.cost;
    }
}

/// The median; the mean of the two middle values if their number is even; NaN if there are none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => f64::NAN,
        _ => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

/// A text that speculation changed.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    pub id: String,
    pub category: String,
    /// Index of the first generated token that differs.
    pub token: usize,
}

impl Difference {
    /// Returns where the two texts of `prompt` differ.
    pub fn of_texts(prompt: &Prompt, plain: &[u32], speculative: &[u32]) -> Option<Self> {
        Some(Self {
            id: prompt.id.clone(),
            category: prompt.category.clone(),
            token: first_difference(plain, speculative)?,
        })
    }
}

pub(super) fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}
