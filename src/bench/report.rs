//! Computes and displays figures from runs. No clock and no engine here.

mod drafters;
mod loads;
mod prompts;
mod subject;
mod table;

use super::BenchMode;
use super::interval::{ERROR, Interval, Pair, Verdict, Work, min_pairs};
use super::measure::{Cost, Sample};
use crate::engine::{RankCount, SpecUsage};
use crate::error::{Error, Result};
use crate::prompts::Prompt;
use crate::sampling::Acceptance;
use crate::spec::expected_speed_up;
use serde::Serialize;
use std::path::Path;

pub use drafters::DrafterFigures;
pub use loads::{LoadFigures, StreamLoad, Throughput};
pub use prompts::PromptFigures;
pub use subject::Subject;

/// The runs of one prompt at one temperature: plain and in one speculative mode.
#[derive(Debug, Clone)]
pub struct MeasuredPair {
    id: String,
    category: String,
    prompt_tokens: usize,
    temperature: f32,
    way: BenchMode,
    plain: Timed,
    speculative: Timed,
    /// The decode times of the repeats.
    plain_seconds: Option<Interval>,
    spec_seconds: Option<Interval>,
    /// The text that speculation changed. `None` where texts may differ, too: see
    /// [`BenchMode::is_comparable`].
    differs: Option<Difference>,
}

/// A prompt in one decoding mode; times are medians over the repeats.
#[derive(Debug, Clone, Copy, Default)]
struct Timed {
    decoded: usize,
    decode_seconds: f64,
    tokens: usize,
    total_seconds: f64,
    spec: SpecUsage,
    cost: Cost,
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
    fn works(&self) -> Pair {
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
    fn work(&self) -> Work {
        Work {
            tokens: self.decoded as f64,
            seconds: self.decode_seconds,
        }
    }

    /// Decoded tokens per second.
    fn rate(&self) -> f64 {
        self.decoded as f64 / self.decode_seconds
    }

    /// Decoded tokens per step of the target.
    fn tokens_per_step(&self) -> f64 {
        self.decoded as f64 / self.cost.target_steps
    }

    fn add(&mut self, other: &Self) {
        self.decoded += other.decoded;
        self.decode_seconds += other.decode_seconds;
        self.tokens += other.tokens;
        self.total_seconds += other.total_seconds;
        self.spec = self.spec + other.spec;
        self.cost += other.cost;
    }
}

/// Whether a table shows 1.00 tokens per step or less: as many steps as plain decoding has cannot be faster.
fn has_one_token_per_step(tokens_per_step: f64) -> bool {
    tokens_per_step < 1.005
}

fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}

/// The median; the mean of the two middle values if their number is even; NaN if there are none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => f64::NAN,
        _ => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

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
    fn of<'a>(
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

/// All results of `bench`.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    subject: Subject,
    /// How the intervals were computed.
    intervals: IntervalMethod,
    temperatures: Vec<AtTemperature>,
    /// Figures of each drafter at each temperature, if several drafters were measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    drafters: Vec<DrafterFigures>,
    /// The best K for each temperature and otherwise equal mode, if several K were measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    best: Vec<Best>,
    /// The acceptance rates of both acceptance rules, if both were measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rules: Vec<RuleComparison>,
    /// Many requests at a time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    loads: Vec<LoadFigures>,
}

/// How the intervals of a report were computed.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct IntervalMethod {
    /// Share of errors of all modes at a temperature (and a number of streams) together.
    pub error: f64,
    /// Number of those modes. An interval of one of them has this part of the error (Bonferroni).
    pub modes: usize,
    /// The smallest number of pairs that have an interval.
    pub min_pairs: usize,
}

impl IntervalMethod {
    fn new(modes: usize) -> Self {
        let method = Self {
            error: ERROR,
            modes,
            min_pairs: 0,
        };
        Self {
            min_pairs: min_pairs(method.error_of_each()),
            ..method
        }
    }

    /// The error of one interval.
    fn error_of_each(self) -> f64 {
        self.error / self.modes.max(1) as f64
    }
}

/// The figures of one temperature and one speculative mode.
#[derive(Debug, Clone, Serialize)]
pub struct AtTemperature {
    pub temperature: f32,
    #[serde(flatten)]
    pub(super) way: BenchMode,
    /// Figures of each category, in the order of the prompts file.
    pub categories: Vec<GroupFigures>,
    pub overall: GroupFigures,
    /// A row for each prompt, in the order of measurement.
    pub prompts: Vec<PromptFigures>,
    /// Texts that speculation changed; must be empty. Not checked where texts may differ.
    pub differing: Vec<Difference>,
}

/// The acceptance rates of both rules in otherwise equal modes.
#[derive(Debug, Clone, Serialize)]
pub struct RuleComparison {
    pub temperature: f32,
    pub spec_length: usize,
    pub spec_topk: usize,
    pub coupled_alpha: f64,
    pub rejection_alpha: f64,
    pub coupled_over_rejection: f64,
}

/// The K with the largest speed-up.
#[derive(Debug, Clone, Serialize)]
pub struct Best {
    pub temperature: f32,
    #[serde(flatten)]
    pub(super) way: BenchMode,
    pub speed_up: f64,
}

/// A text that speculation changed.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    pub id: String,
    pub category: String,
    /// Index of the first generated token that differs.
    pub token: usize,
}

/// The distinct values, in order of first occurrence.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

impl AtTemperature {
    /// Groups `pairs`, all of one temperature and way, by category.
    fn of(temperature: f32, way: BenchMode, error: f64, pairs: &[&MeasuredPair]) -> Self {
        let k = way.spec_length;
        let figures = |name: &str| {
            let named = pairs.iter().filter(|pair| pair.category == name);
            GroupFigures::of(name, k, error, named.copied())
        };
        let names = distinct(pairs.iter().map(|pair| pair.category.as_str()));
        Self {
            temperature,
            way,
            categories: names.into_iter().map(figures).collect(),
            overall: GroupFigures::of("overall", k, error, pairs.iter().copied()),
            prompts: pairs.iter().map(|pair| PromptFigures::of(pair)).collect(),
            differing: pairs
                .iter()
                .filter_map(|pair| pair.differs.clone())
                .collect(),
        }
    }

    /// The one of `all` with the largest speed-up, as far as that was measured: of those that help, if any does.
    fn fastest<'a>(all: impl IntoIterator<Item = &'a Self>) -> Option<&'a Self> {
        let all = all.into_iter();
        let measured = all.filter(|at| at.overall.speed_up.is_finite());
        let rank = |at: &Self| (at.overall.verdict == Verdict::Helps, at.overall.speed_up);
        measured.max_by(|a, b| {
            let ((a, fast), (b, faster)) = (rank(a), rank(b));
            a.cmp(&b).then(fast.total_cmp(&faster))
        })
    }

    /// The interval of the speed of the `other` mode over this one's, for the same prompts; `None` = it was not measured.
    fn gain(&self, other: &Self, error: f64) -> Option<Interval> {
        let both = self.prompts.iter().zip(&other.prompts);
        let pairs: Vec<_> = both.map(|(a, b)| a.against(b)).collect();
        Interval::of(&pairs, error)
    }
}

impl Best {
    /// Selects from figures that differ only in K; `None` if there is only one K, or no draft token was accepted.
    fn of(lengths: &[AtTemperature]) -> Option<Self> {
        let best = AtTemperature::fastest(lengths)?;
        let accepts = best.overall.verdict != Verdict::NothingAccepted;
        (lengths.len() > 1 && accepts).then_some(Self {
            temperature: best.temperature,
            way: best.way,
            speed_up: best.overall.speed_up,
        })
    }
}

impl BenchReport {
    /// Groups `pairs` by temperature, way and category.
    pub(super) fn new(subject: Subject, pairs: &[MeasuredPair]) -> Self {
        let groups = distinct(pairs.iter().map(|pair| (pair.temperature, pair.way)));
        let intervals = IntervalMethod::new(distinct(pairs.iter().map(|pair| pair.way)).len());
        let error = intervals.error_of_each();
        let temperatures = groups.into_iter().map(|(temperature, way)| {
            let in_group =
                |pair: &&MeasuredPair| (pair.temperature, pair.way) == (temperature, way);
            let pairs: Vec<_> = pairs.iter().filter(in_group).collect();
            AtTemperature::of(temperature, way, error, &pairs)
        });
        let temperatures = temperatures.collect();
        let mut report = Self {
            intervals,
            temperatures,
            ..Self::of_loads(subject, Vec::new())
        };
        report.drafters = DrafterFigures::compare(&report);
        report.best = report.by_length().filter_map(Best::of).collect();
        report.rules = report.rules();
        report
    }

    /// The report of runs with many requests at a time.
    pub(super) fn of_loads(subject: Subject, loads: Vec<StreamLoad>) -> Self {
        let intervals = IntervalMethod::new(distinct(loads.iter().map(|load| load.way)).len());
        let error = intervals.error_of_each();
        Self {
            subject,
            intervals,
            temperatures: Vec::new(),
            drafters: Vec::new(),
            best: Vec::new(),
            rules: Vec::new(),
            loads: (loads.into_iter())
                .map(|load| LoadFigures::of(load, error))
                .collect(),
        }
    }

    /// Groups of figures that differ only in K.
    fn by_length(&self) -> impl Iterator<Item = &[AtTemperature]> {
        let key = |at: &AtTemperature| {
            let spec_length = 0;
            (
                at.temperature,
                BenchMode {
                    spec_length,
                    ..at.way
                },
            )
        };
        self.temperatures.chunk_by(move |a, b| key(a) == key(b))
    }

    /// Compares the acceptance rules.
    fn rules(&self) -> Vec<RuleComparison> {
        let coupled = self.temperatures.iter();
        let coupled = coupled.filter(|at| at.way.acceptance == Acceptance::Coupled);
        let rules = coupled.filter_map(|coupled| {
            let way = BenchMode {
                acceptance: Acceptance::Rejection,
                ..coupled.way
            };
            let same = |at: &&AtTemperature| (at.temperature, at.way) == (coupled.temperature, way);
            let rejection = self.temperatures.iter().find(same)?;
            let alphas = (coupled.overall.alpha, rejection.overall.alpha);
            Some(RuleComparison {
                temperature: coupled.temperature,
                spec_length: way.spec_length,
                spec_topk: way.spec_topk,
                coupled_alpha: alphas.0,
                rejection_alpha: alphas.1,
                coupled_over_rejection: alphas.0 / alphas.1,
            })
        });
        rules.collect()
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).expect("strings, numbers and lists");
        std::fs::write(path, json + "\n").map_err(|e| Error::in_file(path, e))
    }

    /// Writes the rows of the prompts as CSV.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn write_csv(&self, path: &Path) -> Result<()> {
        let mut csv = prompts::CSV_HEAD.to_owned() + "\n";
        for at in &self.temperatures {
            let drafter = self.subject.drafters.get(at.way.drafter);
            let drafter = drafter.map_or("", String::as_str);
            for prompt in &at.prompts {
                csv += &prompt.csv_line(at.temperature, drafter, &at.way);
            }
        }
        std::fs::write(path, csv).map_err(|e| Error::in_file(path, e))
    }

    /// Checks that texts are the same with and without speculation.
    ///
    /// # Errors
    /// `Internal`, naming the first text that differs.
    pub fn check_equal(&self) -> Result<()> {
        let alone = self.temperatures.iter().flat_map(|at| &at.differing);
        let among_others = self.loads.iter().flat_map(|load| &load.differing);
        let differing: Vec<_> = alone.chain(among_others).collect();
        match differing.first() {
            None => Ok(()),
            Some(first) => Err(Error::internal(format!(
                "speculation changed {} texts, the first at prompt {} ({}) at token {}",
                differing.len(),
                first.id,
                first.category,
                first.token
            ))),
        }
    }
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

#[cfg(test)]
mod tests;
