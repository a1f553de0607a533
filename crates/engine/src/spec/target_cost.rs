//! The seconds that a forward of the target takes, by its rows, by the tokens that they attend to and by the experts
//! that they read, learned from the forwards that run. Pure: the caller measures.
//!
//! In layers with experts, a step reads the weights of the experts that some row chose. So a row that chooses
//! what others chose is cheap, and one that brings new experts into memory is not: a step takes
//! `curve(rows) + each * experts` seconds. Before a step its experts are not known. `n` rows whose choices have
//! nothing to do with one another read `E (1 - (1 - k/E)^n)` of the `E` experts of a layer, if each chooses `k`
//! (Huang et al. 2025, MoESD, arXiv 2505.19645). Rows of one text share more than that. So rows count as fewer
//! such rows, by a factor for rows that gain a token anyway and another one for draft nodes, both learned from
//! the numbers of experts that steps read.

use super::attention_cost::{Attending, AttentionCost};
use super::cost::{CostCurve, MAX_RATIO};
use super::learned::Learned;

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
/// The share of what was learned at another time in the cost of attention.
const RECALLED: f64 = 0.5;
/// The least share of a measured forward that is not for experts.
const MIN_REST: f64 = 0.05;

/// A forward that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredForward {
    /// Number of rows of the forward.
    pub rows: usize,
    /// Number of tokens before the rows.
    pub context: usize,
    /// See [`ForwardOutput::experts_read`](foretoken_core::model::ForwardOutput::experts_read).
    pub experts_read: usize,
    /// Wall time of the forward, seconds.
    pub seconds: f64,
}

/// The cost of a target's steps. Without experts it is a `CostCurve`.
#[derive(Debug, Clone)]
pub struct TargetCost {
    /// Seconds by rows, without those for experts.
    curve: CostCurve,
    /// In units of the curve's scale.
    attention: AttentionCost,
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
            attention: AttentionCost::default(),
            layers: grouped,
            each: 0.0,
            row: 1.0,
            node: FIRST_NODE,
        }
    }

    /// The cost of a model whose forwards are rounded up to the next one of `edges`; see `CostCurve::with_edges`.
    pub fn with_edges(self, edges: Vec<usize>) -> Self {
        let curve = CostCurve::with_edges(edges);
        Self { curve, ..self }
    }

    /// Starts again from measured forwards of one sequence. What an expert costs is what those with the same number of
    /// rows and different numbers of experts say; without such pairs, nothing. What attention costs is what forwards
    /// with tokens before them take longer than those without; without two of them, nothing.
    pub fn calibrate(&mut self, forwards: &[MeasuredForward]) {
        let (later, mut forwards): (Vec<_>, Vec<_>) =
            forwards.iter().copied().partition(|one| one.context > 0);
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
        self.attention = self.measured_attention(&later);
    }

    /// See `CostCurve::believe`.
    pub fn believe(&mut self, observations: u32) {
        self.curve.believe(observations);
    }

    /// The cost of attention by forwards with tokens before them.
    fn measured_attention(&self, later: &[MeasuredForward]) -> AttentionCost {
        let few = later.iter().min_by_key(|one| one.rows);
        let many = later.iter().max_by_key(|one| one.rows);
        let (Some(few), Some(many)) = (few, many) else {
            return AttentionCost::default();
        };
        let attending = |one: &MeasuredForward| Attending {
            sequences: 1,
            rows: one.rows,
            context: one.context,
        };
        let costs = [few, many].map(|one| {
            let others = self.seconds_of(one.rows, one.experts_read);
            (one.seconds - others) / self.curve.scale()
        });
        AttentionCost::of((attending(few), attending(many)), costs)
    }

    /// Learns from a step of `rows` sequences with a row each and `nodes` draft nodes, after `context` tokens of each
    /// sequence, that read so many experts and took `seconds`.
    pub fn note(
        &mut self,
        rows: usize,
        nodes: usize,
        context: usize,
        experts_read: usize,
        seconds: f64,
    ) {
        // All parts share what was not expected. If the curve alone had it, what is noise for the sum would be much
        // for the curve of a model whose time goes to experts or to attention.
        let own = self.curve.seconds(rows + nodes);
        let of = Attending {
            sequences: rows,
            rows: rows + nodes,
            context,
        };
        let all = self.seconds_of(rows + nodes, experts_read) + self.attention(of);
        let expected = all / self.curve.scale();
        if self.curve.note(rows + nodes, seconds * (own / all)) {
            let ratio = (seconds / all).clamp(1.0 / MAX_RATIO, MAX_RATIO);
            self.attention.note(of, expected, ratio);
        }
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

    /// Writes what was learned.
    pub fn learned(&self, to: &mut Learned) {
        let one = self.curve.seconds(1) / self.curve.scale();
        to.target = self.curve.learned();
        to.attention = self.attention.costs().map(|cost| cost / one);
    }

    /// Begins with what was learned at another time, beside what was measured.
    pub fn recall(&mut self, learned: &Learned) {
        self.curve.recall(&learned.target);
        let one = self.curve.seconds(1) / self.curve.scale();
        let costs = learned.attention.map(|cost| cost * one);
        self.attention.recall(costs, RECALLED);
    }

    /// Whether any step was measured.
    pub fn is_known(&self) -> bool {
        self.curve.is_known()
    }

    /// The seconds that costs are multiples of, which follow the speed of the machine.
    pub fn scale(&self) -> f64 {
        self.curve.scale()
    }

    /// Whether the curve is settled at `rows` rows; see `CostCurve::is_settled`.
    pub fn is_settled(&self, rows: usize) -> bool {
        self.curve.is_settled(rows)
    }

    /// Expected seconds of attention to the tokens before the rows of a step.
    pub fn attention(&self, of: Attending) -> f64 {
        self.curve.scale() * self.attention.cost(of)
    }

    /// Expected seconds of a step of `rows` rows and `nodes` draft nodes, without [`TargetCost::attention`]; 0 for none.
    pub fn seconds(&self, rows: usize, nodes: usize) -> f64 {
        self.curve.seconds(rows + nodes) + self.of_experts(self.expected_experts(rows, nodes))
    }

    /// Expected seconds of a step of `rows` rows, draft nodes included, that read so many experts, without
    /// [`TargetCost::attention`].
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
pub(super) mod tests;
