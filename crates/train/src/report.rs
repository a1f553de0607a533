//! The figures of a run, and how they are printed.

use super::cost::Costs;
use super::loss::DraftMetrics;
use super::{Method, Objective};
use foretoken_core::model::DepthRates;
use foretoken_engine::spec::expected_speed_up;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest draft that the table considers, in tokens.
const MAX_DRAFT_TOKENS: usize = 8;
/// Maximum number of siblings in the trees that the table considers.
const RANKS: usize = 4;
/// Sizes of the trees that the table considers, in nodes.
const TREES: [usize; 3] = [8, 16, 32];

/// Means over the counted positions of the held-out rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Nats per position.
    pub loss: f64,
    /// The lower and upper bound of `E[sum_x min(p(x), q(x))]`, the acceptance rate at temperature 1
    /// (Leviathan et al. 2023, Corollary 3.6): without the target's tail, and with it as one id. With
    /// cross-entropy both are the mean probability of the text's tokens, which is not an acceptance rate.
    pub overlap: [f64; 2],
    /// Share of positions with the same most probable id, the acceptance rate at temperature 0. With
    /// cross-entropy: share of the text's tokens that are the most probable ones.
    pub agreement: f64,
    /// Share of positions at which the target's most probable id has rank 0, 1, .. in the draft's
    /// distribution.
    #[serde(default)]
    pub ranks: [f64; RANKS],
}

/// Sums over positions, from which an [`Evaluation`] is computed.
#[derive(Default)]
pub struct LossSums {
    sums: [f64; 4],
    ranks: [f64; RANKS],
    positions: f64,
}

impl LossSums {
    /// Adds the figures of the `counted` positions.
    pub fn add(&mut self, figures: &[DraftMetrics], counted: &[bool]) {
        for (figures, _) in figures.iter().zip(counted).filter(|(_, c)| **c) {
            let [lower, upper] = figures.overlap;
            let values = [figures.loss, lower, upper, figures.agrees];
            for (sum, value) in self.sums.iter_mut().zip(values) {
                *sum += f64::from(value);
            }
            if let Some(count) = self.ranks.get_mut(figures.rank) {
                *count += 1.0;
            }
            self.positions += 1.0;
        }
    }

    /// The means.
    pub fn mean(&self) -> Evaluation {
        let [loss, lower, upper, agreement] = self.sums.map(|sum| sum / self.positions.max(1.0));
        Evaluation {
            loss,
            overlap: [lower, upper],
            agreement,
            ranks: self.ranks.map(|count| count / self.positions.max(1.0)),
        }
    }
}

/// The line that is printed after `step`, of the figures of each depth.
pub fn line(depths: &[Evaluation], step: usize, objective: Objective) -> String {
    let all = |figure: fn(&Evaluation) -> f64| -> String {
        let figures = depths.iter().map(|depth| format!("{:.4}", figure(depth)));
        figures.collect::<Vec<_>>().join(" ")
    };
    match depths {
        [first] => first.line(step, objective),
        _ => format!(
            "step {step}: held-out loss {}, alpha at T=1 {}, at T=0 {} (by depth)",
            all(|depth| depth.loss),
            all(|depth| depth.overlap[0]),
            all(|depth| depth.agreement)
        ),
    }
}

impl Evaluation {
    fn line(&self, step: usize, objective: Objective) -> String {
        let Self {
            loss,
            overlap: [lower, upper],
            agreement,
            ..
        } = self;
        match objective {
            Objective::Kl => format!(
                "step {step}: held-out loss {loss:.4}, alpha at T=1 {lower:.4} to {upper:.4}, at T=0 {agreement:.4}"
            ),
            Objective::CrossEntropy => format!(
                "step {step}: held-out loss {loss:.4}, perplexity {:.2}, most probable token right {agreement:.4}",
                loss.exp()
            ),
        }
    }
}

/// The result of a run.
#[derive(Debug, Clone, Serialize)]
pub struct DistillReport {
    /// What was trained.
    pub method: Method,
    /// What the draft learned.
    pub objective: Objective,
    /// Steps made, including those of earlier sessions, and steps of the whole run.
    pub steps: usize,
    /// Steps of the whole run.
    pub of_steps: usize,
    /// Number of held-out rows, over which the evaluations are.
    pub held_out_rows: usize,
    /// Evaluation of the first drafted token before training; `trained` is that after it.
    pub untrained: Evaluation,
    /// Evaluation of the first drafted token after training.
    pub trained: Evaluation,
    /// Whether each drafted token is guessed with those before it, as they are in the text; a parallel
    /// head without a Markov head guesses each without the others.
    pub follows_paths: bool,
    /// Figures of the first, the second, .. drafted token of a trained head.
    pub depths: Vec<Evaluation>,
    /// Costs of the steps of draft and target, measured on this machine. `None` without a target.
    pub costs: Option<Costs>,
}

/// The best draft length by Theorem 3.8 of Leviathan et al. 2023, and the expected speed-up.
pub fn best_length(alpha: f64, c: f64) -> (usize, f64) {
    (1..=MAX_DRAFT_TOKENS)
        .map(|k| (k, expected_speed_up(alpha, k, c)))
        .fold((0, f64::NEG_INFINITY), |best, next| {
            if next.1 > best.1 { next } else { best }
        })
}

/// The expected tokens of a round with a chain of `k` drafted tokens, the target's own included, if the
/// token at each depth is accepted with probability `alphas[depth]` after those before it. Deeper tokens
/// are accepted like the deepest known one.
pub fn expected_tokens(alphas: &[f64], k: usize) -> f64 {
    let last = alphas.last().copied().unwrap_or_default();
    let mut path = 1.0;
    let drafted = (0..k).map(|depth| {
        path *= alphas.get(depth).copied().unwrap_or(last);
        path
    });
    1.0 + drafted.sum::<f64>()
}

/// The expected tokens of a round with the best tree of `nodes` nodes for a greedy request, the target's
/// own included, and its depth: `ranks[depth]` has the shares at which the right token has rank 0, 1, .. at
/// that depth. Deeper ones are like the deepest known one, but no deeper than `max_depth`. The best tree
/// consists of the nodes with the highest path probability (Chen et al. 2024, "Sequoia", section 3.1).
pub fn best_tree(ranks: &[[f64; RANKS]], nodes: usize, max_depth: usize) -> (f64, usize) {
    let at = |depth: usize| {
        ranks
            .get(depth)
            .or(ranks.last())
            .copied()
            .unwrap_or_default()
    };
    // (path probability, depth), of all children of what the tree has.
    let mut open: Vec<(f64, usize)> = at(0).iter().map(|&share| (share, 1)).collect();
    let (mut tokens, mut deepest) = (1.0, 0);
    for _ in 0..nodes {
        let best = (0..open.len()).max_by(|&a, &b| open[a].0.total_cmp(&open[b].0));
        let Some(best) = best else { break };
        let (path, depth) = open.swap_remove(best);
        tokens += path;
        deepest = deepest.max(depth);
        if depth < max_depth {
            open.extend(at(depth).iter().map(|&share| (path * share, depth + 1)));
        }
    }
    (tokens, deepest)
}

impl DistillReport {
    /// How often a head's guesses were right; `None` = it was not measured.
    pub fn rates(&self) -> Option<DepthRates> {
        let is_measured = self.objective == Objective::Kl && !self.depths.is_empty();
        let rates = |figure: fn(&Evaluation) -> f64| {
            let rates = self.depths.iter().map(figure);
            rates.map(|rate| rate as f32).collect()
        };
        is_measured.then(|| DepthRates {
            greedy: rates(|depth| depth.agreement),
            sampled: rates(|depth| depth.overlap[0]),
        })
    }

    /// The table of a head. Without a measured cost of its steps there are no speed-ups.
    fn fmt_depths(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>10} {:>14} {:>20}",
            "drafted", "loss", "alpha at T=0", "alpha at T=1"
        )?;
        let untrained = ("untrained 1".to_owned(), &self.untrained);
        let depths = self.depths.iter().enumerate();
        let depths = depths.map(|(depth, figures)| (format!("token {}", depth + 1), figures));
        for (name, figures) in std::iter::once(untrained).chain(depths) {
            let [lower, upper] = figures.overlap;
            writeln!(
                f,
                "{name:<12} {:>10.4} {:>14.4} {:>20}",
                figures.loss,
                figures.agreement,
                format!("{lower:.4} to {upper:.4}")
            )?;
        }
        writeln!(
            f,
            "\n{:<12} {:>19} {:>19}",
            "chain of", "tokens at T=0", "tokens at T=1"
        )?;
        let alphas = |figure: fn(&Evaluation) -> f64| self.depths.iter().map(figure).collect();
        let at: [Vec<f64>; 2] = [alphas(|d| d.agreement), alphas(|d| d.overlap[0])];
        let mut best = [(0, 0.0); 2];
        let at_once = self.method == Method::Parallel;
        let max_depth = if at_once {
            self.depths.len()
        } else {
            usize::MAX
        };
        for k in 1..=MAX_DRAFT_TOKENS.min(max_depth) {
            write!(f, "{k:<12}")?;
            for (alphas, best) in at.iter().zip(&mut best) {
                let tokens = expected_tokens(alphas, k);
                let shown = match &self.costs {
                    None => format!("{tokens:.2}"),
                    Some(costs) => {
                        let steps = if at_once { 1 } else { k };
                        let cost = costs.of_rows(1 + k) + costs.draft * steps as f64;
                        let speed_up = tokens / cost;
                        if speed_up > best.1 {
                            *best = (k, speed_up);
                        }
                        format!("{tokens:.2} ({speed_up:.2} x)")
                    }
                };
                write!(f, " {shown:>19}")?;
            }
            writeln!(f)?;
        }
        let ranks: Vec<[f64; RANKS]> = self.depths.iter().map(|depth| depth.ranks).collect();
        for nodes in TREES {
            let (tokens, depth) = best_tree(&ranks, nodes, max_depth);
            writeln!(
                f,
                "tree of {nodes:<4} {tokens:>19.2}  ({depth} deep, at most {RANKS} siblings)"
            )?;
        }
        if let Some(costs) = &self.costs {
            let rows = costs
                .rows
                .iter()
                .map(|(rows, cost)| format!("{rows}: {cost:.2}"));
            let rows = rows.collect::<Vec<_>>().join(", ");
            let [(k0, x0), (k1, x1)] = best;
            let step = if at_once {
                "the head's one forward a round"
            } else {
                "a draft step"
            };
            writeln!(
                f,
                "\nhere {step} costs {:.3} target steps, and steps of so many rows {rows};\n\
                so the best chains are of {k0} at T=0 ({x0:.2} x) and of {k1} at T=1 ({x1:.2} x)",
                costs.draft
            )?;
        }
        let (given, counted) = if self.follows_paths {
            (", after accepted ones", "")
        } else {
            ("", ",\nas if the guesses of a block were independent")
        };
        writeln!(
            f,
            "\n\
            alpha: acceptance rate of a drafted token over held-out rows{given}; at\n\
            temperature 1 a lower bound (without the ids outside the target's top ones) and an upper\n\
            bound. tokens: expected per round, the target's own included{counted}."
        )
    }

    fn fmt_kl(&self, f: &mut fmt::Formatter<'_>, c: f64) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>10} {:>12} {:>16} {:>8} {:>10}",
            "draft", "loss", "temperature", "alpha", "best K", "speed-up"
        )?;
        for (name, figures) in [("untrained", &self.untrained), ("trained", &self.trained)] {
            let [lower, upper] = figures.overlap;
            let rows = [
                (0, figures.agreement, format!("{:.4}", figures.agreement)),
                (1, lower, format!("{lower:.4} to {upper:.4}")),
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
            alpha: acceptance rate over held-out rows. At temperature 1, a lower bound (without the ids\n\
            outside the target's top ones) and an upper bound (with those ids as one): a larger --top-k\n\
            brings them closer together.\n\
            speed-up: Theorem 3.8 of Leviathan et al. 2023 for the lower alpha, with the cost ratio\n\
            c = {c:.4}, measured here on the draft as it was written, in f32 (`foretoken convert`\n\
            makes it faster). `foretoken bench` measures the real speed-up. Below 1: do not draft."
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

impl fmt::Display for DistillReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{} of {} steps, {} held-out rows",
            self.steps, self.of_steps, self.held_out_rows
        )?;
        if self.method != Method::Draft {
            return self.fmt_depths(f);
        }
        match (self.objective, &self.costs) {
            (Objective::Kl, Some(costs)) => self.fmt_kl(f, costs.draft),
            _ => self.fmt_cross_entropy(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_the_likeliest_nodes() {
        let ranks = [[0.5, 0.3, 0.1, 0.0], [0.4, 0.2, 0.0, 0.0]];
        // 0.5, 0.3, 0.5 * 0.4, 0.3 * 0.4, then 0.1 or 0.5 * 0.2.
        let (tokens, depth) = best_tree(&ranks, 5, 9);
        assert!(
            (tokens - (1.0 + 0.5 + 0.3 + 0.2 + 0.12 + 0.1)).abs() < 1e-12,
            "{tokens}"
        );
        assert_eq!(depth, 2);
        let chain = [[0.5, 0.0, 0.0, 0.0]];
        assert_eq!(best_tree(&chain, 3, 9), (1.0 + 0.5 + 0.25 + 0.125, 3));
        // A block has no token after its last.
        assert_eq!(best_tree(&chain, 3, 2).0, 1.0 + 0.5 + 0.25);
    }

    #[test]
    fn the_best_length_maximizes_the_formula() {
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
    fn a_chain_is_worth_the_paths_that_stand() {
        assert_eq!(expected_tokens(&[0.5, 0.4], 0), 1.0);
        assert!((expected_tokens(&[0.5, 0.4], 2) - 1.7).abs() < 1e-12);
        assert!((expected_tokens(&[0.5, 0.4], 3) - 1.78).abs() < 1e-12);
    }

    #[test]
    fn only_counted_positions_count() {
        let figures = |loss, lower, upper, agrees, rank| DraftMetrics {
            loss,
            overlap: [lower, upper],
            agrees,
            rank,
        };
        let figures = [
            figures(1.0, 0.4, 0.5, 1.0, 0),
            figures(9.0, 9.0, 9.0, 9.0, 1),
            figures(3.0, 0.6, 0.7, 0.0, 2),
        ];
        let mut sums = LossSums::default();
        sums.add(&figures, &[true, false, true]);
        let mean = sums.mean();
        assert_eq!((mean.loss, mean.agreement), (2.0, 0.5));
        assert_eq!(mean.ranks, [0.5, 0.0, 0.5, 0.0]);
        assert!((mean.overlap[0] - 0.5).abs() < 1e-6);
        assert!((mean.overlap[1] - 0.6).abs() < 1e-6);
    }
}
