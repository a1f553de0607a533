//! Computes and displays figures from runs. No clock and no engine here.

mod drafters;
mod figures;
mod loads;
mod pairs;
mod prompts;
mod subject;
mod table;

use super::BenchMode;
use super::interval::{ERROR, Interval, Verdict, min_pairs};
use crate::error::{Error, Result};
use crate::sampling::Acceptance;
use serde::Serialize;
use std::path::Path;

pub use drafters::DrafterFigures;
pub use figures::GroupFigures;
pub use loads::{LoadFigures, StreamLoad, Throughput};
pub use pairs::{Difference, MeasuredPair};
pub use prompts::PromptFigures;
pub use subject::Subject;

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

#[cfg(test)]
mod tests;
