//! The report as a text table.

use super::{AtTemperature, BenchMode, BenchReport, Best, GroupFigures, LoadFigures, distinct};
use crate::bench::interval::{Interval, Verdict};
use crate::sampling::Acceptance;
use std::fmt;

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.subject;
        let labels = Labels::of(self);
        let ways = &labels.ways;
        let lengths = distinct(ways.iter().map(|way| way.spec_length).filter(|&k| k > 0));
        let lengths: Vec<_> = lengths.iter().map(usize::to_string).collect();
        writeln!(
            f,
            "{}, drafted by {}, K = {}",
            s.model,
            labels.drafters(),
            lengths.join(", ")
        )?;
        writeln!(f, "{} with {} threads, {}", s.cpu, s.threads, s.device)?;
        let tables = if s.warm { "warm" } else { "cold" };
        writeln!(f, "tables: {tables}")?;
        let is_alone = self.loads.is_empty();
        writeln!(f, "\n{}", if is_alone { LEGEND } else { LOADS_LEGEND })?;
        for lengths in self.by_length() {
            fmt_lengths(f, lengths, &labels)?;
        }
        self.fmt_modes(f, &labels)?;
        self.fmt_loads(f, &labels)?;
        self.fmt_drafters(f)?;
        if ways.iter().any(|way| way.synthetic_acceptance.is_some()) {
            writeln!(
                f,
                "SYNTHETIC acceptance A: each draft token was accepted with probability A, whatever the models\n\
                computed. The texts are meaningless, so they were not compared."
            )?;
        }
        self.fmt_verdicts(f, &labels)
    }
}

const LEGEND: &str = "\
speed-up: decode tokens/s, speculative over plain; low, high: the ends of its interval. tok/step: tokens per target step. accepted,
drafted: tokens per round with a draft. c, verify: time of a draft step and of a speculative target
step, in plain target steps. expected: Theorem 3.8 of Leviathan et al. 2023, which assumes K drafted
tokens in every round and verify = 1.";

const LOADS_LEGEND: &str = "\
tok/s: tokens of all requests over the wall time, prompts included. speed-up: speculative over plain;
low, high: the ends of its interval. accepted, drafted: tokens per round with a draft.";

impl BenchReport {
    /// For each temperature, and number of streams, whether speculation helps.
    fn fmt_verdicts(&self, f: &mut fmt::Formatter<'_>, labels: &Labels) -> fmt::Result {
        let best = |group: &[AtTemperature]| {
            let best = AtTemperature::fastest(group)?;
            let place = format!("temperature {}", best.temperature);
            let overall = &best.overall;
            Some((
                place,
                Claim::of(overall.speed_up, overall.interval, overall.verdict),
                best.way,
            ))
        };
        let groups = self
            .temperatures
            .chunk_by(|a, b| a.temperature == b.temperature);
        let alone_best: Vec<_> =
            if (self.temperatures.iter()).any(|at| at.way.synthetic_acceptance.is_some()) {
                Vec::new()
            } else {
                groups.filter_map(best).collect()
            };
        let loads = self
            .loads
            .iter()
            .filter(|load| load.speed_up.is_finite())
            .map(|load| {
                let place = format!("temperature {}, {} streams", load.temperature, load.streams);
                (
                    place,
                    Claim::of(load.speed_up, load.interval, load.verdict),
                    load.way,
                )
            });
        let verdicts: Vec<_> = alone_best.into_iter().chain(loads).collect();
        if verdicts.is_empty() {
            return Ok(());
        }
        writeln!(f)?;
        for (place, claim, way) in &verdicts {
            let (drafter, k) = (labels.drafter(way), way.spec_length);
            writeln!(f, "{place}: {claim} with {drafter}, K up to {k}")?;
        }
        self.fmt_method(
            f,
            &verdicts
                .iter()
                .map(|(_, claim, _)| *claim)
                .collect::<Vec<_>>(),
        )
    }

    /// Says what intervals are, and what would decide.
    fn fmt_method(&self, f: &mut fmt::Formatter<'_>, claims: &[Claim]) -> fmt::Result {
        let method = &self.intervals;
        let units = if self.loads.is_empty() {
            "prompts"
        } else {
            "groups of requests"
        };
        if claims.iter().any(|claim| claim.interval.is_none()) {
            let few = method.min_pairs;
            writeln!(
                f,
                "fewer than {few} {units} have no interval, and decide nothing: more prompts do"
            )?;
        } else if claims
            .iter()
            .any(|claim| claim.verdict == Verdict::Undecided)
        {
            writeln!(f, "undecided: more prompts, or an idle machine, say more")?;
        }
        if claims.iter().any(|claim| claim.interval.is_some()) {
            let level = 100.0 * (1.0 - method.error);
            let modes = match method.modes {
                0 | 1 => String::new(),
                modes => format!(", for all {modes} modes together"),
            };
            writeln!(f, "in brackets: {level:.0}% intervals over {units}{modes}")?;
        }
        Ok(())
    }

    /// If drafters, rules or numbers of siblings are compared: each mode on one line, and the acceptance rates.
    fn fmt_modes(&self, f: &mut fmt::Formatter<'_>, labels: &Labels) -> fmt::Result {
        let ways = labels.ways.iter();
        let kinds = distinct(ways.map(|way| (way.drafter, way.acceptance, way.spec_topk)));
        if kinds.len() < 2 || self.temperatures.is_empty() {
            return Ok(());
        }
        for modes in self
            .temperatures
            .chunk_by(|a, b| a.temperature == b.temperature)
        {
            writeln!(f, "\ntemperature {}, all modes", modes[0].temperature)?;
            fmt_head(f, "mode", &GROUP_COLUMNS)?;
            for at in modes {
                fmt_row(f, &at.way.label(labels), &GROUP_COLUMNS, &at.overall)?;
            }
        }
        for rules in &self.rules {
            writeln!(
                f,
                "alpha at temperature {}, K = {}, siblings = {}: coupled {:.3}, rejection {:.3}, ratio {:.3}",
                rules.temperature,
                rules.spec_length,
                rules.spec_topk,
                rules.coupled_alpha,
                rules.rejection_alpha,
                rules.coupled_over_rejection
            )?;
        }
        Ok(())
    }

    fn fmt_loads(&self, f: &mut fmt::Formatter<'_>, labels: &Labels) -> fmt::Result {
        for at in self.loads.chunk_by(|a, b| a.temperature == b.temperature) {
            writeln!(f, "\ntemperature {}", at[0].temperature)?;
            write!(f, "{:>7} ", "streams")?;
            fmt_head(f, "mode", &LOAD_COLUMNS)?;
            for load in at {
                write!(f, "{:>7} ", load.streams)?;
                fmt_row(f, &load.way.label(labels), &LOAD_COLUMNS, load)?;
            }
        }
        Ok(())
    }
}

/// The names of modes.
struct Labels {
    /// All modes of the report.
    ways: Vec<BenchMode>,
    drafters: Vec<String>,
}

impl Labels {
    fn of(report: &BenchReport) -> Self {
        let alone = report.temperatures.iter().map(|at| at.way);
        let ways = distinct(alone.chain(report.loads.iter().map(|load| load.way)));
        let drafters = report.subject.drafters.clone();
        Self { ways, drafters }
    }

    fn drafter(&self, way: &BenchMode) -> String {
        let name = self.drafters.get(way.drafter);
        name.map_or_else(|| "nothing".into(), Clone::clone)
    }

    fn drafters(&self) -> String {
        self.drafters.join(", ")
    }
}

/// A speed-up and what it says.
#[derive(Clone, Copy)]
struct Claim {
    speed_up: f64,
    interval: Option<Interval>,
    verdict: Verdict,
}

impl Claim {
    fn of(speed_up: f64, interval: Option<Interval>, verdict: Verdict) -> Self {
        Self {
            speed_up,
            interval,
            verdict,
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:.2} x", self.verdict.words(), self.speed_up)?;
        match self.interval {
            Some(Interval { low, high }) => write!(f, " [{low:.2}, {high:.2}]"),
            None => Ok(()),
        }
    }
}

impl BenchMode {
    /// Returns the properties that distinguish this mode among all modes, except synthetic acceptance.
    fn label(&self, labels: &Labels) -> String {
        let (ways, mut parts) = (&labels.ways, Vec::new());
        if ways.iter().any(|way| way.drafter != self.drafter) {
            parts.push(labels.drafter(self));
        }
        if ways.iter().any(|way| way.acceptance != self.acceptance) {
            parts.push(match self.acceptance {
                Acceptance::Coupled => "coupled".to_owned(),
                Acceptance::Rejection => "rejection".to_owned(),
            });
        }
        if ways.iter().any(|way| way.spec_topk != self.spec_topk) {
            parts.push(match self.spec_topk {
                1 => "chain".to_owned(),
                topk => format!("tree {topk}"),
            });
        }
        if ways.iter().any(|way| way.spec_length != self.spec_length) {
            parts.push(format!("K = {}", self.spec_length));
        }
        parts.join(", ")
    }
}

/// Writes figures that differ only in K. Synthetic acceptance is the same in all categories, so each
/// K has one line.
fn fmt_lengths(
    f: &mut fmt::Formatter<'_>,
    lengths: &[AtTemperature],
    labels: &Labels,
) -> fmt::Result {
    if let Some(rate) = lengths[0].way.synthetic_acceptance {
        let temperature = lengths[0].temperature;
        writeln!(
            f,
            "\ntemperature {temperature}, SYNTHETIC acceptance A = {rate}"
        )?;
        fmt_head(f, "draft length", &GROUP_COLUMNS)?;
        for at in lengths {
            let label = format!("K = {}", at.way.spec_length);
            fmt_row(f, &label, &GROUP_COLUMNS, &at.overall)?;
        }
    } else {
        for at in lengths {
            write!(f, "\ntemperature {}", at.temperature)?;
            let label = at.way.label(labels);
            if !label.is_empty() {
                write!(f, ", {label}")?;
            }
            writeln!(f)?;
            fmt_head(f, "category", &GROUP_COLUMNS)?;
            for row in at.categories.iter().chain([&at.overall]) {
                fmt_row(f, &row.category, &GROUP_COLUMNS, row)?;
            }
        }
    }
    Best::of(lengths).map_or(Ok(()), |best| best.fmt_line(f))
}

/// A column of a table of `T`: its name, its width, the decimals of its figures, and the figure.
type Column<T> = (&'static str, usize, usize, fn(&T) -> f64);

/// An end of an interval; NaN = there is none.
fn end(interval: Option<Interval>, end: fn(Interval) -> f64) -> f64 {
    interval.map_or(f64::NAN, end)
}

const GROUP_COLUMNS: [Column<GroupFigures>; 15] = [
    ("prompts", 7, 0, |group| group.prompts as f64),
    ("tokens", 7, 0, |group| group.tokens as f64),
    ("plain tok/s", 11, 2, |group| group.plain_tokens_per_second),
    ("spec tok/s", 11, 2, |group| group.spec_tokens_per_second),
    ("speed-up", 8, 2, |group| group.speed_up),
    ("low", 5, 2, |group| end(group.interval, |range| range.low)),
    ("high", 5, 2, |group| {
        end(group.interval, |range| range.high)
    }),
    ("tok/step", 8, 2, |group| group.tokens_per_step),
    ("alpha", 6, 3, |group| group.alpha),
    ("accepted", 8, 2, |group| group.mean_accepted_length),
    ("drafted", 7, 2, |group| group.mean_draft_length),
    ("c", 6, 3, |group| group.c),
    ("verify", 6, 2, |group| group.verify_cost),
    ("expected", 8, 2, |group| group.expected_speed_up),
    ("meas/exp", 9, 2, |group| group.measured_over_expected),
];

const LOAD_COLUMNS: [Column<LoadFigures>; 10] = [
    ("requests", 8, 0, |load| load.requests as f64),
    ("tokens", 7, 0, |load| load.tokens as f64),
    ("plain tok/s", 11, 2, |load| load.plain_tokens_per_second),
    ("spec tok/s", 11, 2, |load| load.spec_tokens_per_second),
    ("speed-up", 8, 2, |load| load.speed_up),
    ("low", 5, 2, |load| end(load.interval, |range| range.low)),
    ("high", 5, 2, |load| end(load.interval, |range| range.high)),
    ("alpha", 6, 3, |load| load.alpha),
    ("accepted", 8, 2, |load| load.mean_accepted_length),
    ("drafted", 7, 2, |load| load.mean_draft_length),
];

/// Writes the names of `columns` after a `label`.
fn fmt_head<T>(f: &mut fmt::Formatter<'_>, label: &str, columns: &[Column<T>]) -> fmt::Result {
    write!(f, "{label:<16}")?;
    for (name, width, ..) in columns {
        write!(f, " {name:>width$}")?;
    }
    writeln!(f)
}

/// Writes the `figures` of a line after its `label`.
fn fmt_row<T>(
    f: &mut fmt::Formatter<'_>,
    label: &str,
    columns: &[Column<T>],
    figures: &T,
) -> fmt::Result {
    write!(f, "{label:<16}")?;
    for (_, width, decimals, figure) in columns {
        match figure(figures) {
            figure if figure.is_nan() => write!(f, " {:>width$}", "-")?,
            figure => write!(f, " {figure:>width$.decimals$}")?,
        }
    }
    writeln!(f)
}

impl Best {
    fn fmt_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, mark) = match self.way.synthetic_acceptance {
            Some(rate) => (format!(" for A = {rate}"), ", SYNTHETIC"),
            None => (String::new(), ""),
        };
        let (k, speed_up) = (self.way.spec_length, self.speed_up);
        writeln!(f, "best K{rate}: {k} (speed-up {speed_up:.2}){mark}")
    }
}
