//! The seconds that a forward of the target takes, by its rows and by the experts that they read, learned from the
//! forwards that run. Pure: the caller measures.
//!
//! In layers with experts, a step reads the weights of the experts that some row chose. So a row that chooses
//! what others chose is cheap, and one that brings new experts into memory is not: a step takes
//! `curve(rows) + each * experts` seconds. Before a step its experts are not known. `n` rows whose choices have
//! nothing to do with one another read `E (1 - (1 - k/E)^n)` of the `E` experts of a layer, if each chooses `k`
//! (Huang et al. 2025, MoESD, arXiv 2505.19645). Rows of one text share more than that. So rows count as fewer
//! such rows, by a factor for rows that gain a token anyway and another one for draft nodes, both learned from
//! the numbers of experts that steps read.

use super::cost::CostCurve;

/// Number of rows that a draft node counts as while nothing is known: rather too few, since one step with
/// drafts tells, and without any nothing does.
const FIRST_NODE: f64 = 0.5;
/// Rows may be less alike than chance has it, but not by much.
const MAX_COUNT: f64 = 1.5;
/// The weight of a step in what rows count as. The number of experts of a step is exact, but texts differ.
const COUNT_WEIGHT: f64 = 0.1;
/// The weight of what was known at first in what a draft node counts as, at each step without drafts: texts change.
const FORGET: f64 = 1.0 / 256.0;
/// Where so many rows read nearly all experts that one more changes less than this share of what the second row
/// does, the number of experts tells little of what rows count as.
const SATURATED: f64 = 0.1;
/// The least share of a measured forward that is not for experts.
const MIN_REST: f64 = 0.05;

/// A forward that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredForward {
    /// Number of rows of the forward.
    pub rows: usize,
    /// See [`ForwardOutput::experts_read`](foretoken_core::model::ForwardOutput::experts_read).
    pub experts_read: usize,
    /// Wall time of the forward, seconds.
    pub seconds: f64,
}

/// The cost of a target's steps. Without experts it is a [`CostCurve`].
#[derive(Debug, Clone)]
pub struct TargetCost {
    /// Seconds by rows, without those for experts.
    curve: CostCurve,
    layers: Vec<ExpertLayers>,
    /// Cost of an expert, in units of the curve's scale: a slower machine is slower at both.
    each: f64,
    /// The number of rows with nothing in common that another row counts as, and a draft node.
    row: f64,
    node: f64,
}

/// Layers that have the same numbers of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ExpertLayers {
    layers: f64,
    experts: f64,
    /// The probability that a row does not choose an expert.
    miss: f64,
}

impl TargetCost {
    /// The cost of a model of which nothing was measured. `layers` has, for each layer with experts, their number and
    /// that of a row.
    pub fn new(layers: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut grouped: Vec<ExpertLayers> = Vec::new();
        for (experts, per_row) in layers {
            let experts = experts as f64;
            let miss = 1.0 - per_row as f64 / experts;
            let same = |group: &&mut ExpertLayers| group.experts == experts && group.miss == miss;
            match grouped.iter_mut().find(same) {
                Some(group) => group.layers += 1.0,
                None => grouped.push(ExpertLayers {
                    layers: 1.0,
                    experts,
                    miss,
                }),
            }
        }
        Self {
            curve: CostCurve::default(),
            layers: grouped,
            each: 0.0,
            row: 1.0,
            node: FIRST_NODE,
        }
    }

    /// The cost of a model whose forwards are rounded up to the next one of `edges`; see [`CostCurve::with_edges`].
    pub fn with_edges(self, edges: Vec<usize>) -> Self {
        let curve = CostCurve::with_edges(edges);
        Self { curve, ..self }
    }

    /// Starts again from measured forwards. What an expert costs is what those with the same number of rows and
    /// different numbers of experts say; without such pairs, nothing.
    pub fn calibrate(&mut self, forwards: &[MeasuredForward]) {
        let mut forwards = forwards.to_vec();
        forwards.sort_by_key(|one| (one.rows, one.experts_read));
        let by_rows = || forwards.chunk_by(|a, b| a.rows == b.rows);
        let (mut products, mut squares) = (0.0, 0.0);
        for same in by_rows() {
            let (few, many) = (same[0], same[same.len() - 1]);
            let experts = (many.experts_read - few.experts_read) as f64;
            products += experts * (many.seconds - few.seconds);
            squares += experts * experts;
        }
        let each = if squares > 0.0 {
            f64::max(products / squares, 0.0)
        } else {
            0.0
        };
        let rest = |one: &MeasuredForward| {
            (one.seconds - each * one.experts_read as f64).max(MIN_REST * one.seconds)
        };
        let rest = by_rows().map(|same| {
            let sum: f64 = same.iter().map(rest).sum();
            (same[0].rows, sum / same.len() as f64)
        });
        self.curve.calibrate(&rest.collect::<Vec<_>>());
        self.each = each / self.curve.scale();
    }

    /// Learns from a step of `rows` rows and `nodes` draft nodes that read so many experts and took `seconds`.
    pub fn note(&mut self, rows: usize, nodes: usize, experts_read: usize, seconds: f64) {
        // Both parts share what was not expected. If the curve alone had it, what is noise for the sum would be much
        // for the curve of a model whose time goes to experts.
        let own = self.curve.seconds(rows + nodes);
        let all = self.seconds_of(rows + nodes, experts_read);
        self.curve.note(rows + nodes, seconds * (own / all));
        if !self.layers.is_empty() && rows > 0 {
            self.note_experts(rows, nodes, experts_read as f64);
        }
    }

    /// Learns what rows count as: normalized least mean squares (Haykin, Adaptive Filter Theory, chapter 6) on the
    /// number of experts, with the slope of the law at what was expected.
    fn note_experts(&mut self, rows: usize, nodes: usize, read: f64) {
        let (others, nodes) = ((rows - 1) as f64, nodes as f64);
        if nodes == 0.0 {
            self.node += FORGET * (FIRST_NODE - self.node);
        }
        let inputs = others * others + nodes * nodes;
        if inputs == 0.0 {
            return;
        }
        let (expected, slope) = self.experts(1.0 + self.row * others + self.node * nodes);
        let floor = SATURATED * self.experts(1.0).1;
        let missing = (read - expected) * slope / (slope * slope + floor * floor);
        if missing.is_finite() {
            let step = COUNT_WEIGHT * missing / inputs;
            self.row = (self.row + step * others).clamp(0.0, MAX_COUNT);
            self.node = (self.node + step * nodes).clamp(0.0, MAX_COUNT);
        }
    }

    /// Whether any step was measured.
    pub fn is_known(&self) -> bool {
        self.curve.is_known()
    }

    /// Whether the curve is settled at `rows` rows; see [`CostCurve::is_settled`].
    pub fn is_settled(&self, rows: usize) -> bool {
        self.curve.is_settled(rows)
    }

    /// Expected seconds of a step of `rows` rows and `nodes` draft nodes; 0 for none.
    pub fn seconds(&self, rows: usize, nodes: usize) -> f64 {
        self.curve.seconds(rows + nodes) + self.of_experts(self.expected_experts(rows, nodes))
    }

    /// Expected seconds of a step of `rows` rows, draft nodes included, that read so many experts.
    pub fn seconds_of(&self, rows: usize, experts_read: usize) -> f64 {
        self.curve.seconds(rows) + self.of_experts(experts_read as f64)
    }

    /// The number of experts that a step of `rows` rows and `nodes` draft nodes is expected to read.
    pub fn expected_experts(&self, rows: usize, nodes: usize) -> f64 {
        if rows + nodes == 0 {
            return 0.0;
        }
        let others = rows.saturating_sub(1) as f64;
        self.experts(1.0 + self.row * others + self.node * nodes as f64)
            .0
    }

    /// Expected seconds for an expert.
    pub fn expert_seconds(&self) -> f64 {
        self.of_experts(1.0)
    }

    fn of_experts(&self, experts: f64) -> f64 {
        self.curve.scale() * self.each * experts
    }

    /// The experts that so many rows with nothing in common read, and how many more another one would, as a slope.
    fn experts(&self, rows: f64) -> (f64, f64) {
        let each = self.layers.iter().map(|group| {
            let missed = group.layers * group.experts * group.miss.powf(rows);
            // Where each row chooses all, `missed` is 0.
            let slope = -group.miss.max(f64::MIN_POSITIVE).ln() * missed;
            (group.layers * group.experts - missed, slope)
        });
        each.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::cost::tests::Noise;
    use super::*;

    /// Forwards of a model without experts, from rows and seconds.
    pub fn dense(forwards: &[(usize, f64)]) -> Vec<MeasuredForward> {
        let forward = |&(rows, seconds): &(usize, f64)| MeasuredForward {
            rows,
            experts_read: 0,
            seconds,
        };
        forwards.iter().map(forward).collect()
    }

    /// The layers of Qwen3-30B-A3B.
    const LAYERS: usize = 48;
    const EXPERTS: usize = 128;
    const PER_ROW: usize = 8;

    fn qwen() -> TargetCost {
        TargetCost::new([(EXPERTS, PER_ROW); LAYERS])
    }

    /// Expected distinct experts of rows with nothing in common.
    fn law(rows: f64) -> f64 {
        let miss = 1.0 - PER_ROW as f64 / EXPERTS as f64;
        (LAYERS * EXPERTS) as f64 * (1.0 - miss.powf(rows))
    }

    /// A machine: an expert takes 1/600, rows 1/3 and a 30th for each.
    fn seconds(rows: usize, experts: f64) -> f64 {
        (9.0 + rows as f64) / 30.0 + experts / 600.0
    }

    /// Forwards of rows that are all alike, and of rows that have nothing in common.
    fn measured(noise: &mut Noise, deviation: f64) -> Vec<MeasuredForward> {
        let mut forwards = Vec::new();
        for rows in [1, 2, 4, 6, 8, 16] {
            for independent in [1, rows] {
                let experts_read = law(independent as f64).round() as usize;
                let seconds = seconds(rows, experts_read as f64) * noise.factor(deviation);
                forwards.push(MeasuredForward {
                    rows,
                    experts_read,
                    seconds,
                });
            }
        }
        forwards
    }

    #[test]
    fn without_experts_it_is_the_curve() {
        let (mut cost, mut curve) = (TargetCost::new([]), CostCurve::default());
        let mut noise = Noise(1);
        for step in 0..500 {
            let (rows, nodes) = (1 + noise.below(5), noise.below(9));
            let took = 0.1 * (1.0 + 0.2 * (rows + nodes) as f64) * noise.factor(0.2);
            cost.note(rows, nodes, 0, took);
            curve.note(rows + nodes, took);
            assert_eq!(cost.seconds(rows, nodes), curve.seconds(rows + nodes));
            assert_eq!(cost.seconds_of(9, 0), curve.seconds(9), "step {step}");
        }
        assert_eq!(cost.seconds(0, 0), 0.0);
        let forwards = [(1, 0.1), (2, 0.15), (8, 0.4)];
        curve.calibrate(&forwards);
        cost.calibrate(&dense(&forwards));
        for rows in 0..40 {
            assert_eq!(cost.seconds(1, rows), curve.seconds(1 + rows));
        }
    }

    #[test]
    fn a_few_noisy_forwards_tell_what_an_expert_costs() {
        for seed in 0..20 {
            let mut cost = qwen();
            cost.calibrate(&measured(&mut Noise(seed), 0.05));
            let ratio = cost.expert_seconds() * 600.0;
            assert!((0.8..1.25).contains(&ratio), "{ratio} with seed {seed}");
            for rows in [1, 3, 8, 16] {
                for independent in [1.0, rows as f64] {
                    let experts = law(independent);
                    let ratio =
                        cost.seconds_of(rows, experts as usize) / seconds(rows, experts.floor());
                    assert!((0.8..1.2).contains(&ratio), "{ratio} of {rows} rows");
                }
            }
        }
    }

    #[test]
    fn experts_that_seem_to_cost_less_than_nothing_cost_nothing() {
        let forward = |rows, experts_read, seconds| MeasuredForward {
            rows,
            experts_read,
            seconds,
        };
        let mut cost = qwen();
        cost.calibrate(&[
            forward(1, 384, 1.0),
            forward(4, 384, 2.0),
            forward(4, 1300, 1.5),
        ]);
        assert_eq!(cost.expert_seconds(), 0.0);
        assert_eq!(cost.seconds_of(4, 1300), 1.75);
        // Or all of the time: then the curve keeps a little.
        cost.calibrate(&[
            forward(1, 384, 0.1),
            forward(4, 384, 0.1),
            forward(4, 1300, 9.0),
        ]);
        assert!(cost.seconds_of(1, 0) > 0.0 && cost.expert_seconds() > 0.0);
        // What was not measured in pairs says nothing of experts.
        cost.calibrate(&[forward(1, 384, 1.0), forward(4, 1300, 2.0)]);
        assert_eq!((cost.expert_seconds(), cost.seconds_of(4, 0)), (0.0, 2.0));
    }

    /// Steps of request rows and draft nodes together show what the rows have in common. The times of these
    /// steps are noise, and their machine is slower than the calibrated one.
    #[test]
    fn what_rows_have_in_common_is_learned() {
        for (row, node) in [(1.0, 1.0), (0.9, 0.3), (0.5, 0.6), (0.2, 0.1)] {
            let (mut cost, mut noise) = (qwen(), Noise(3));
            cost.calibrate(&measured(&mut noise, 0.0));
            let truth = |rows: usize, nodes: usize| {
                law(1.0 + row * (rows as f64 - 1.0) + node * nodes as f64)
            };
            for _ in 0..1000 {
                let (rows, nodes) = (1 + noise.below(4), noise.below(7));
                let experts = truth(rows, nodes) * noise.factor(0.1);
                let took = 2.0 * seconds(rows + nodes, experts) * noise.factor(0.1);
                cost.note(rows, nodes, experts as usize, took);
            }
            for (rows, nodes) in [(1, 0), (1, 4), (4, 0), (3, 5)] {
                let expected = cost.expected_experts(rows, nodes) / truth(rows, nodes);
                assert!(
                    (0.9..1.1).contains(&expected),
                    "{expected} of {rows}, {nodes}"
                );
                let truth = 2.0 * seconds(rows + nodes, truth(rows, nodes));
                let ratio = cost.seconds(rows, nodes) / truth;
                assert!((0.85..1.15).contains(&ratio), "{ratio} of {rows}, {nodes}");
            }
        }
    }

    #[test]
    fn what_draft_nodes_have_in_common_is_forgotten_without_drafts() {
        let mut cost = qwen();
        for _ in 0..200 {
            cost.note(1, 4, law(5.0) as usize, 1.0);
        }
        let dear = cost.expected_experts(1, 4);
        assert!((dear / law(5.0) - 1.0).abs() < 0.01);
        for _ in 0..2000 {
            cost.note(1, 0, law(1.0) as usize, 1.0);
        }
        assert!((cost.expected_experts(1, 4) / law(1.0 + 4.0 * FIRST_NODE) - 1.0).abs() < 0.01);
    }

    #[test]
    fn nothing_that_is_noted_makes_a_cost_that_is_no_number() {
        let mut noise = Noise(5);
        for layers in [
            vec![],
            vec![(4, 4)],
            vec![(1, 1), (128, 8)],
            vec![(4096, 1); 3],
        ] {
            let all: usize = layers.iter().map(|&(experts, _)| experts).sum();
            let mut cost = TargetCost::new(layers);
            // Rows take 1, and all experts together as much.
            let both = [0, all].map(|experts_read| MeasuredForward {
                rows: 2,
                experts_read,
                seconds: 1.0 + f64::from(u8::from(experts_read > 0)),
            });
            cost.calibrate(&both);
            assert_eq!(cost.expert_seconds() > 0.0, all > 0);
            for _ in 0..500 {
                let (rows, nodes) = (noise.below(300), noise.below(3) * noise.below(60));
                let magnitude = noise.below(14);
                let experts = noise.below(1 << magnitude);
                let took = [0.0, f64::NAN, -1.0, 1e9].get(noise.below(9)).copied();
                cost.note(rows, nodes, experts, took.unwrap_or_else(|| noise.unit()));
                let expected = cost.seconds(1 + rows, nodes);
                assert!(expected.is_finite() && expected > 0.0);
                assert!(cost.seconds(1 + rows, nodes + 1) >= expected * (1.0 - 1e-9));
                let read = |nodes| cost.expected_experts(1 + rows, nodes);
                assert!(read(nodes) <= read(nodes + 1) && read(nodes + 1) <= all as f64 + 1e-6);
                assert!(cost.seconds_of(9, all) >= cost.seconds_of(9, 0));
            }
        }
    }
}
