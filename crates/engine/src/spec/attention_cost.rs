//! The cost of attention, which grows with the tokens that rows attend to. Pure: the caller measures.

/// How far what is learned may be from what was measured, as a factor.
const MAX_CHANGE: f64 = 8.0;
/// The least cost that two forwards tell: noise can hide what a few hundred tokens cost, but none cost nothing.
const LEAST: f64 = 1e-6;
/// The weight of a step in what is learned, if all of the step were attention.
const WEIGHT: f64 = 0.05;

/// The cost of attention for each token before a step's rows: once for a sequence, whose keys and values are read
/// once for all of its rows, and once more for each row. Both are in a unit of the caller's, which follows the
/// machine's speed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionCost {
    costs: [f64; 2],
    /// As measured before the first step. What was not measured costs nothing.
    measured: [f64; 2],
}

/// Rows of sequences that have as many tokens before them, on average.
#[derive(Debug, Clone, Copy)]
pub struct Attending {
    /// Number of sequences.
    pub sequences: usize,
    /// Rows of all sequences.
    pub rows: usize,
    /// Tokens before the rows of a sequence.
    pub context: usize,
}

impl AttentionCost {
    /// The cost of which two forwards of one sequence are known, each with its rows, the tokens before them and what
    /// attention to those cost.
    pub fn of((few, many): (Attending, Attending), costs: [f64; 2]) -> Self {
        let each = |of: &Attending, cost: f64| cost.max(0.0) / of.context.max(1) as f64;
        let (low, high) = (each(&few, costs[0]), each(&many, costs[1]));
        let rows = many.rows.saturating_sub(few.rows).max(1) as f64;
        // One row costs something, and several cost no less.
        let row = ((high - low) / rows).clamp(0.0, high / many.rows.max(1) as f64);
        let sequence = (low - row * few.rows as f64).max(0.0);
        let costs = [sequence, row].map(|cost| cost.max(LEAST));
        Self {
            costs,
            measured: costs,
        }
    }

    /// The cost of a step, and what it has for sequences and for rows.
    pub fn cost(&self, of: Attending) -> f64 {
        self.parts(of).iter().sum()
    }

    fn parts(&self, of: Attending) -> [f64; 2] {
        let ([sequence, row], context) = (self.costs, of.context as f64);
        let (sequences, rows) = (of.sequences as f64, of.rows as f64);
        [sequence * sequences * context, row * rows * context]
    }

    /// Learns from a step whose cost was `ratio` times `expected`: each part by its share, as least mean squares of
    /// logarithms do.
    pub fn note(&mut self, of: Attending, expected: f64, ratio: f64) {
        let parts = self.parts(of);
        for ((cost, measured), part) in self.costs.iter_mut().zip(self.measured).zip(parts) {
            let changed = *cost * ratio.powf(WEIGHT * (part / expected).clamp(0.0, 1.0));
            if changed.is_finite() {
                *cost = changed.clamp(measured / MAX_CHANGE, measured * MAX_CHANGE);
            }
        }
    }

    /// The costs for a sequence and for a row.
    pub fn costs(&self) -> [f64; 2] {
        self.costs
    }

    /// Moves the costs towards those that were learned at another time, which count as `share` of both. What was not
    /// measured now or then stays as it is.
    pub fn recall(&mut self, costs: [f64; 2], share: f64) {
        for ((cost, measured), known) in self.costs.iter_mut().zip(&mut self.measured).zip(costs) {
            if *measured > 0.0 && known > 0.0 {
                *cost += share * (known - *cost);
                *measured = *cost;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: usize, context: usize) -> Attending {
        Attending {
            sequences: 1,
            rows,
            context,
        }
    }

    #[test]
    fn two_forwards_tell_both_costs() {
        let both = (rows(1, 512), rows(8, 512));
        let cost = AttentionCost::of(both, [512.0 * 3.0, 512.0 * 10.0]);
        assert_eq!(cost.costs(), [2.0, 1.0]);
        assert_eq!(cost.cost(rows(4, 100)), 600.0);
        let many = Attending {
            sequences: 3,
            rows: 6,
            context: 10,
        };
        assert_eq!(cost.cost(many), 120.0);
        // Noise makes no cost negative.
        for costs in [[9.0, 1.0], [-1.0, 8.0], [-3.0, -1.0], [0.0, 0.0]] {
            let [sequence, row] = AttentionCost::of(both, costs).costs();
            assert!(sequence >= 0.0 && row >= 0.0, "{costs:?}");
        }
    }

    #[test]
    fn a_wrong_cost_is_corrected_and_stays_within_bounds() {
        let both = (rows(1, 512), rows(8, 512));
        let truth = AttentionCost::of(both, [512.0 * 3.0, 512.0 * 10.0]);
        let mut cost = AttentionCost::of(both, [512.0 * 4.5, 512.0 * 20.0]);
        let others = 1000.0;
        for step in 0..4000 {
            let of = rows(1 + step % 7, 40 * (1 + step % 50));
            let expected = others + cost.cost(of);
            cost.note(of, expected, (others + truth.cost(of)) / expected);
        }
        for of in [rows(1, 2000), rows(4, 500), rows(7, 2000)] {
            let ratio = cost.cost(of) / truth.cost(of);
            assert!((0.9..1.1).contains(&ratio), "{ratio}");
        }
        for ratio in [1e9, f64::NAN, 0.0] {
            (0..1000).for_each(|_| cost.note(rows(8, 4000), 1.0, ratio));
            assert!(
                cost.costs()
                    .iter()
                    .all(|&cost| cost.is_finite() && cost > 0.0)
            );
        }
    }
}
