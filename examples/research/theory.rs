//! The figures that papers expect of a run.

use super::sequoia::{BestTree, best_tree};
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// Trees that are looked for have at most so many nodes, the limit of `--spec-nodes`.
const MAX_NODES: usize = 64;

/// Figures of Leviathan et al. 2023 and of Sequoia, beside what was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Theory {
    /// Arithmetic operations of a draft token over those of a target token, by their parameters.
    pub draft_operations: f64,
    /// Expected operations a token over those of plain decoding, by Theorem 3.11 from alpha, K and
    /// `draft_operations`.
    pub expected_operations: f64,
    /// Measured operations a token over those of plain decoding, from the numbers of the target's rows and of draft
    /// tokens.
    pub operations: f64,
    /// The tree that Sequoia's dynamic program chooses, of the measured mean size; `None` without drafts.
    pub sequoia: Option<BestTree>,
}

/// A figure of `bench`; NaN if it was not measured.
pub fn figure(measured: &Value, name: &str) -> f64 {
    measured[name].as_f64().unwrap_or(f64::NAN)
}

impl Theory {
    /// `measured` has the figures of a group of prompts, as `bench --json` writes them; `k` is the depth of drafts at
    /// most.
    pub fn of(measured: &Value, k: usize, draft_operations: f64) -> Self {
        let of = |name| figure(measured, name);
        let (tokens, size) = (of("tokens"), of("mean_draft_length").round());
        let rates = measured["sibling_acceptance"].as_array();
        let rates: Vec<f64> = (rates.into_iter().flatten())
            .filter_map(Value::as_f64)
            .collect();
        let rows = tokens / of("tokens_per_step") + of("drafted");
        Self {
            draft_operations,
            expected_operations: expected_operations(of("alpha"), k, draft_operations),
            operations: (rows + of("drafted") * draft_operations) / tokens,
            sequoia: (size >= 1.0).then(|| best_tree((size as usize).min(MAX_NODES), k, &rates)),
        }
    }

    /// Writes the figures that the papers expect, beside those of `measured`.
    pub fn fmt_lines(&self, f: &mut fmt::Formatter<'_>, measured: &Value) -> fmt::Result {
        let of = |name| figure(measured, name);
        writeln!(
            f,
            "operations a token, over plain: {:.2} by Theorem 3.11 (c^ = {:.3}), {:.2} measured; speed-up {:.2}",
            self.expected_operations,
            self.draft_operations,
            self.operations,
            of("speed_up")
        )?;
        let Some(tree) = &self.sequoia else {
            return Ok(());
        };
        let levels: Vec<_> = tree.levels.iter().map(usize::to_string).collect();
        writeln!(
            f,
            "a tree of {} nodes: Sequoia's, levels of {}, expects {:.2} tokens a round; the budget's, {:.2} nodes, had {:.2}",
            tree.nodes,
            levels.join(", "),
            tree.tokens,
            of("mean_draft_length"),
            of("mean_accepted_length")
        )
    }
}

/// The factor by which the number of arithmetic operations grows for drafts of `k` tokens, each accepted with
/// probability `alpha`, at `share` of the target's operations (Leviathan et al. 2023, Theorem 3.11):
/// (1 - alpha)(k share + k + 1) / (1 - alpha^(k+1)); at alpha = 1 its limit.
pub fn expected_operations(alpha: f64, k: usize, share: f64) -> f64 {
    let tokens: f64 = (0..=k).map(|i| alpha.powi(i as i32)).sum();
    let k = k as f64;
    (k * share + k + 1.0) / tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a}, {b}");
    }

    #[test]
    fn operations_are_those_of_the_theorem() {
        for (alpha, k, share) in [(0.6_f64, 3, 0.05), (0.8, 5, 0.0), (0.0, 4, 0.1)] {
            let gamma = k as f64;
            let theorem =
                (1.0 - alpha) * (gamma * share + gamma + 1.0) / (1.0 - alpha.powi(k as i32 + 1));
            close(expected_operations(alpha, k, share), theorem);
        }
        close(expected_operations(1.0, 4, 0.0), 1.0);
        close(expected_operations(0.7, 0, 0.3), 1.0);
    }

    /// Table 1 of the paper: alpha 0.6, gamma 2 is 1.53 times the operations; 0.9, 10 is 1.6 times.
    #[test]
    fn operations_are_those_of_the_papers_table() {
        for (alpha, gamma, operations) in [
            (0.6, 2, 1.53),
            (0.7, 3, 1.58),
            (0.8, 2, 1.23),
            (0.8, 5, 1.63),
            (0.9, 2, 1.11),
            (0.9, 10, 1.60),
        ] {
            let found = expected_operations(alpha, gamma, 0.0);
            assert!(
                (found - operations).abs() < 0.01,
                "{alpha}, {gamma}: {found}"
            );
        }
    }

    #[test]
    fn measured_operations_count_rows_and_draft_tokens() {
        let measured = json!({
            "tokens": 25, "tokens_per_step": 2.5, "drafted": 30, "mean_draft_length": 3.0, "alpha": 0.75,
            "sibling_acceptance": [0.75, 0.75, 0.75, 0.75],
        });
        let theory = Theory::of(&measured, 3, 0.1);
        close(theory.operations, (10.0 + 33.0) / 25.0);
        let tree = theory.sequoia.unwrap();
        assert_eq!((tree.nodes, tree.levels.iter().sum()), (3, 3));
        let none =
            json!({"tokens": 5, "tokens_per_step": 1.0, "drafted": 0, "mean_draft_length": null});
        let none = Theory::of(&none, 3, 0.0);
        assert!(none.sequoia.is_none());
        close(none.operations, 1.0);
    }
}
