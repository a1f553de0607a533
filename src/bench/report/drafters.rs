//! Compares drafters.

use super::{AtTemperature, BenchReport, distinct};
use crate::bench::interval::{Interval, Verdict};
use serde::Serialize;
use std::fmt;

/// The smallest speed-up of a drafter's worst category with which it is still recommended: runs differ by as much.
const MIN_WORST: f64 = 0.97;

/// Figures of a drafter at one temperature, in the mode of it that gains most.
#[derive(Debug, Clone, Serialize)]
pub struct DrafterFigures {
    pub temperature: f32,
    pub drafter: String,
    /// Speculative over plain rate, by category in the order of the prompts file.
    pub categories: Vec<CategorySpeedUp>,
    pub overall: f64,
    /// The interval of `overall`.
    pub interval: Option<Interval>,
    pub verdict: Verdict,
    pub tokens_per_step: f64,
    pub worst: f64,
    /// Whether it gains most of all drafters that help and whose worst category is at least 0.97.
    pub is_recommended: bool,
    /// Whether it would be recommended, too, and this run does not decide that it is slower than the recommended one.
    pub is_as_good: bool,
}

/// The speed-up of one category.
#[derive(Debug, Clone, Serialize)]
pub struct CategorySpeedUp {
    pub category: String,
    pub speed_up: f64,
}

impl DrafterFigures {
    /// The drafters of a report, by temperature; none if there is only one, or if acceptance is synthetic.
    pub(super) fn compare(report: &BenchReport) -> Vec<Self> {
        let names = &report.subject.drafters;
        let all = &report.temperatures;
        if names.len() < 2 || all.iter().any(|at| at.way.synthetic_acceptance.is_some()) {
            return Vec::new();
        }
        let mut figures = Vec::new();
        for temperature in distinct(all.iter().map(|at| at.temperature)) {
            let of = |(index, name): (usize, &String)| {
                let modes: Vec<_> = (all.iter())
                    .filter(|at| at.temperature == temperature && at.way.drafter == index)
                    .collect();
                let best = AtTemperature::fastest(modes)?;
                Some((Self::of(name, best), best))
            };
            let group: Vec<_> = names.iter().enumerate().filter_map(of).collect();
            let (mut group, measured): (Vec<Self>, Vec<_>) = group.into_iter().unzip();
            let is_harmless = |one: &Self| one.verdict == Verdict::Helps && one.worst >= MIN_WORST;
            let harmless = (0..group.len()).filter(|&index| is_harmless(&group[index]));
            let best = harmless.max_by(|&a, &b| group[a].overall.total_cmp(&group[b].overall));
            if let Some(best) = best {
                let error = report.intervals.error_of_each();
                for index in 0..group.len() {
                    let is_other = index != best && is_harmless(&group[index]);
                    let gain = || measured[index].gain(measured[best], error);
                    group[index].is_as_good =
                        is_other && !gain().is_some_and(|gain| gain.low > 1.0);
                }
                group[best].is_recommended = true;
            }
            figures.append(&mut group);
        }
        figures
    }

    fn of(name: &str, at: &AtTemperature) -> Self {
        let measured = at.categories.iter().filter(|one| one.speed_up.is_finite());
        let categories: Vec<_> = measured
            .map(|one| CategorySpeedUp {
                category: one.category.clone(),
                speed_up: one.speed_up,
            })
            .collect();
        let speed_ups = categories.iter().map(|one| one.speed_up);
        Self {
            temperature: at.temperature,
            drafter: name.into(),
            overall: at.overall.speed_up,
            interval: at.overall.interval,
            verdict: at.overall.verdict,
            tokens_per_step: at.overall.tokens_per_step,
            worst: speed_ups.fold(f64::INFINITY, f64::min),
            categories,
            is_recommended: false,
            is_as_good: false,
        }
    }
}

impl BenchReport {
    /// If drafters are compared: for each temperature a table of speed-ups, a column for each drafter, and
    /// which to take.
    pub(super) fn fmt_drafters(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self
            .drafters
            .chunk_by(|a, b| a.temperature == b.temperature);
        for group in groups {
            writeln!(
                f,
                "\ntemperature {}, speed-up by drafter",
                group[0].temperature
            )?;
            write!(f, "{:<16}", "category")?;
            for one in group {
                write!(f, "  {:>8}", one.drafter)?;
            }
            writeln!(f)?;
            let categories = group.iter().flat_map(|one| &one.categories);
            for category in distinct(categories.map(|one| &one.category)) {
                fmt_row(f, category, group, |one| {
                    let mut named = one.categories.iter();
                    let found = named.find(|one| one.category == *category);
                    found.map_or(f64::NAN, |one| one.speed_up)
                })?;
            }
            fmt_row(f, "overall", group, |one| one.overall)?;
            fmt_row(f, "worst category", group, |one| one.worst)?;
            fmt_advice(f, group)?;
        }
        Ok(())
    }
}

/// Writes which of the drafters of a temperature to take, in a line.
fn fmt_advice(f: &mut fmt::Formatter<'_>, group: &[DrafterFigures]) -> fmt::Result {
    let helping = group.iter().filter(|one| one.verdict == Verdict::Helps);
    let helping = helping.max_by(|a, b| a.overall.total_cmp(&b.overall));
    match (group.iter().find(|one| one.is_recommended), helping) {
        (Some(one), _) => {
            let (drafter, overall, worst) = (&one.drafter, one.overall, one.worst);
            write!(
                f,
                "take {drafter}: {overall:.2} x, and {worst:.2} x where it gains least"
            )?;
            let others = group.iter().filter(|one| one.is_as_good);
            let others: Vec<&str> = others.map(|one| one.drafter.as_str()).collect();
            if others.is_empty() {
                writeln!(f)
            } else {
                writeln!(
                    f,
                    "; as good, as far as this run tells: {}",
                    others.join(", ")
                )
            }
        }
        (None, Some(one)) => writeln!(
            f,
            "take {} with care: {:.2} x, but {:.2} x where it gains least; more prompts or --repeat say more",
            one.drafter, one.overall, one.worst
        ),
        (None, None) if group.iter().any(|one| one.verdict == Verdict::Undecided) => writeln!(
            f,
            "take none yet: undecided; more prompts, --repeat or an idle machine say more"
        ),
        (None, None) => writeln!(f, "take none: no drafter gains here"),
    }
}

fn fmt_row(
    f: &mut fmt::Formatter<'_>,
    label: &str,
    group: &[DrafterFigures],
    figure: impl Fn(&DrafterFigures) -> f64,
) -> fmt::Result {
    write!(f, "{label:<16}")?;
    for one in group {
        let width = one.drafter.chars().count().max(8);
        write!(f, "  {:>width$.2}", figure(one))?;
    }
    writeln!(f)
}
