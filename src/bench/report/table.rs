//! The report as a text table.

use super::{AtTemperature, Best, Figures, Report, distinct};
use std::fmt;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.subject;
        let lengths = distinct(self.temperatures.iter().map(|at| at.way.spec_length));
        let lengths: Vec<_> = lengths.iter().map(usize::to_string).collect();
        writeln!(
            f,
            "{}, drafted by {}, K = {}",
            s.model,
            s.drafter,
            lengths.join(", ")
        )?;
        writeln!(f, "{} with {} threads, {}", s.cpu, s.threads, s.device)?;
        for lengths in self.by_length() {
            fmt_lengths(f, lengths)?;
        }
        writeln!(
            f,
            "\n\
            speed-up: decode tokens/s, speculative over plain. accepted, drafted: tokens per round\n\
            with a draft. c, verify: time of a draft step and of a speculative target step, in plain\n\
            target steps. expected: Theorem 3.8 of Leviathan et al. 2023, which assumes K drafted\n\
            tokens in every round and verify = 1."
        )?;
        let mut ways = self.temperatures.iter().map(|at| at.way);
        if ways.any(|way| way.synthetic_acceptance.is_some()) {
            writeln!(
                f,
                "SYNTHETIC acceptance A: each draft token was accepted with probability A, whatever the models\n\
                computed. The texts are meaningless, so greedy ones were not compared."
            )?;
        }
        Ok(())
    }
}

/// Writes figures that differ only in K. Synthetic acceptance is the same in all categories, so each
/// K has one line.
fn fmt_lengths(f: &mut fmt::Formatter<'_>, lengths: &[AtTemperature]) -> fmt::Result {
    if let Some(rate) = lengths[0].way.synthetic_acceptance {
        let temperature = lengths[0].temperature;
        writeln!(
            f,
            "\ntemperature {temperature}, SYNTHETIC acceptance A = {rate}"
        )?;
        fmt_head(f, "draft length")?;
        for at in lengths {
            at.overall
                .fmt_row(f, &format!("K = {}", at.way.spec_length))?;
        }
    } else {
        for at in lengths {
            write!(f, "\ntemperature {}", at.temperature)?;
            if lengths.len() > 1 {
                write!(f, ", K = {}", at.way.spec_length)?;
            }
            writeln!(f)?;
            fmt_head(f, "category")?;
            for row in at.categories.iter().chain([&at.overall]) {
                row.fmt_row(f, &row.category)?;
            }
        }
    }
    Best::of(lengths).map_or(Ok(()), |best| best.fmt_line(f))
}

/// Writes the column names of [`Figures::fmt_row`].
fn fmt_head(f: &mut fmt::Formatter<'_>, label: &str) -> fmt::Result {
    writeln!(
        f,
        "{label:<16} {:>7} {:>7} {:>11} {:>11} {:>8} {:>6} {:>8} {:>7} {:>6} {:>6} {:>8} {:>9}",
        "prompts",
        "tokens",
        "plain tok/s",
        "spec tok/s",
        "speed-up",
        "alpha",
        "accepted",
        "drafted",
        "c",
        "verify",
        "expected",
        "meas/exp"
    )
}

impl Figures {
    fn fmt_row(&self, f: &mut fmt::Formatter<'_>, label: &str) -> fmt::Result {
        writeln!(
            f,
            "{label:<16} {:>7} {:>7} {:>11.2} {:>11.2} {:>8.2} {:>6.3} {:>8.2} {:>7.2} {:>6.3} {:>6.2} {:>8.2} {:>9.2}",
            self.prompts,
            self.tokens,
            self.plain_tokens_per_second,
            self.spec_tokens_per_second,
            self.speed_up,
            self.alpha,
            self.mean_accepted_length,
            self.mean_draft_length,
            self.c,
            self.verify_cost,
            self.expected_speed_up,
            self.measured_over_expected
        )
    }
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
