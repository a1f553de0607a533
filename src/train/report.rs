//! Figures of a run, and how they are shown.

use super::Objective;
use crate::bench::expected_speed_up;
use crate::error::Result;
use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest draft that the table looks at, in tokens.
const MOST_DRAFTED: usize = 8;

/// Means over the counted positions of the held-out rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Nats a position.
    pub loss: f64,
    /// Bounds of `E[sum_x min(p(x), q(x))]`, the acceptance rate at temperature 1 (Leviathan et al.
    /// 2023, Corollary 3.6): without the target's tail, and with it as one id. With cross-entropy:
    /// the mean probability of the text's tokens, twice, which is no acceptance rate.
    pub overlap: [f64; 2],
    /// Share of positions with the same most probable id, the acceptance rate at temperature 0.
    /// With cross-entropy: share of tokens of the text that are the most probable.
    pub agreement: f64,
}

/// Sums that become an [`Evaluation`].
#[derive(Default)]
pub struct Sums {
    sums: [f64; 4],
    positions: f64,
}

impl Sums {
    /// Adds loss, both bounds of the overlap, and agreement, `[positions]` each, where `counted` says so.
    pub fn add(&mut self, figures: [&Tensor; 4], counted: &[bool]) -> Result<()> {
        for (sum, figure) in self.sums.iter_mut().zip(figures) {
            let values = figure.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let kept = values.iter().zip(counted).filter(|(_, counted)| **counted);
            *sum += kept.map(|(&value, _)| f64::from(value)).sum::<f64>();
        }
        self.positions += counted.iter().filter(|counted| **counted).count() as f64;
        Ok(())
    }

    /// The means.
    pub fn mean(&self) -> Evaluation {
        let [loss, least, most, agreement] = self.sums.map(|sum| sum / self.positions);
        Evaluation {
            loss,
            overlap: [least, most],
            agreement,
        }
    }
}

impl Evaluation {
    /// The line of `step`.
    pub fn line(&self, step: usize, objective: Objective) -> String {
        let Self {
            loss,
            overlap: [least, most],
            agreement,
        } = self;
        match objective {
            Objective::Kl => format!(
                "step {step}: held-out loss {loss:.4}, alpha at T=1 {least:.4} to {most:.4}, at T=0 {agreement:.4}"
            ),
            Objective::CrossEntropy => format!(
                "step {step}: held-out loss {loss:.4}, perplexity {:.2}, most probable token right {agreement:.4}",
                loss.exp()
            ),
        }
    }
}

/// What a run has come to.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub objective: Objective,
    /// Steps made, those of earlier sessions included, and steps of the whole run.
    pub steps: usize,
    pub of_steps: usize,
    pub held_out_rows: usize,
    pub untrained: Evaluation,
    pub trained: Evaluation,
    /// A draft step in target steps, measured on this machine. `None` without a target.
    pub cost_ratio: Option<f64>,
}

/// The draft length that Theorem 3.8 finds best, and the speed-up that it expects.
pub fn best_length(alpha: f64, c: f64) -> (usize, f64) {
    (1..=MOST_DRAFTED)
        .map(|k| (k, expected_speed_up(alpha, k, c)))
        .fold((0, f64::NEG_INFINITY), |best, next| {
            if next.1 > best.1 { next } else { best }
        })
}

impl Report {
    fn fmt_kl(&self, f: &mut fmt::Formatter<'_>, c: f64) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>10} {:>12} {:>16} {:>8} {:>10}",
            "draft", "loss", "temperature", "alpha", "best K", "speed-up"
        )?;
        for (name, figures) in [("untrained", &self.untrained), ("trained", &self.trained)] {
            let [least, most] = figures.overlap;
            let rows = [
                (0, figures.agreement, format!("{:.4}", figures.agreement)),
                (1, least, format!("{least:.4} to {most:.4}")),
            ];
            for (temperature, alpha, shown) in rows {
                let (k, speed_up) = best_length(alpha, c);
                writeln!(
                    f,
                    "{name:<12} {:>10.4} {temperature:>12} {shown:>16} {k:>8} {speed_up:>10.2}",
                    figures.loss
                )?;
            }
        }
        writeln!(
            f,
            "\n\
            alpha: over held-out rows; at temperature 1 without the ids outside of the target's top\n\
            ones, and with them as if they were one: a larger --top-k brings the two together.\n\
            speed-up: Theorem 3.8 of Leviathan et al. 2023 for the lower alpha, with the cost ratio\n\
            c = {c:.4}, measured here on the draft as it was written, in f32 (`foretoken convert`\n\
            makes it faster). `foretoken bench` measures all of it. Below 1: do not draft."
        )
    }

    fn fmt_cross_entropy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>10} {:>12} {:>12}",
            "draft", "loss", "perplexity", "token right"
        )?;
        for (name, figures) in [("untrained", &self.untrained), ("trained", &self.trained)] {
            let perplexity = figures.loss.exp();
            writeln!(
                f,
                "{name:<12} {:>10.4} {perplexity:>12.2} {:>12.4}",
                figures.loss, figures.agreement
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{} of {} steps, {} held-out rows",
            self.steps, self.of_steps, self.held_out_rows
        )?;
        match (self.objective, self.cost_ratio) {
            (Objective::Kl, Some(c)) => self.fmt_kl(f, c),
            _ => self.fmt_cross_entropy(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_length_is_that_of_the_formula() {
        let formula = |alpha: f64, k: i32, c: f64| {
            (1.0 - alpha.powi(k + 1)) / ((1.0 - alpha) * (c * f64::from(k) + 1.0))
        };
        for (alpha, c) in [(0.8, 0.05), (0.5, 0.1), (0.9, 0.02), (0.1, 0.5)] {
            let (k, speed_up) = best_length(alpha, c);
            assert!((speed_up - formula(alpha, k as i32, c)).abs() < 1e-12);
            for other in 1..=8 {
                assert!(formula(alpha, other, c) <= speed_up + 1e-12);
            }
        }
        assert_eq!(best_length(1.0, 0.0), (8, 9.0));
    }

    #[test]
    fn only_counted_positions_count() {
        let tensor = |values: &[f32]| Tensor::new(values, &candle_core::Device::Cpu).unwrap();
        let (loss, least, most, agreement) = (
            tensor(&[1.0, 9.0, 3.0]),
            tensor(&[0.4, 9.0, 0.6]),
            tensor(&[0.5, 9.0, 0.7]),
            tensor(&[1.0, 9.0, 0.0]),
        );
        let mut sums = Sums::default();
        let counted = [true, false, true];
        sums.add([&loss, &least, &most, &agreement], &counted)
            .unwrap();
        let mean = sums.mean();
        assert_eq!((mean.loss, mean.agreement), (2.0, 0.5));
        assert!((mean.overlap[0] - 0.5).abs() < 1e-6);
        assert!((mean.overlap[1] - 0.6).abs() < 1e-6);
    }
}
