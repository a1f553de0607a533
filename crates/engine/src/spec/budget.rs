//! What is worth drafting and verifying: expected tokens against the seconds that they cost. Pure:
//! no tensors, no clock, no model.
//!
//! Each sequence of a step gains a token anyway. A draft node gains one more with the probability S
//! that it and all its ancestors stand, and adds a row to the step; the best tree is the set of
//! nodes of highest S (Li et al. 2024, EAGLE-2, section 4.2). The batch's tokens per second are
//! highest where sum(S) - price * seconds is, if the price of a second is that rate itself
//! (Dinkelbach 1967, on maxima of ratios). So the price is learned: the rate of plain decoding,
//! times the speed-up so far. All sequences compete for the same rows.
//!
//! Costs are known only of what runs. So a few steps have fewer or more nodes than seems best.

mod depths;
mod exploration;
mod forecast;
mod nodes;

use super::attention_cost::Attending;
use super::cost::{CostCurve, MAX_RATIO};
use super::learned::Learned;
use super::target_cost::TargetCost;
use exploration::Exploration;
pub use forecast::DraftForecast;
use nodes::{MIN_SCORE, RankedPrefix, best, ranked, tree};
use std::ops::Range;

/// Draft rows whose average price [`Budget::min_score`] compares, at least, and of each sequence.
const MIN_SCORE_ROWS: usize = 16;
const MIN_SCORE_ROWS_EACH: usize = 4;
/// Factor by which the gain of a node must exceed its cost: of many estimates, the ones that seem to pay are
/// rather too high.
const MARGIN: f64 = 1.1;
/// The weight of the steps before, at each step, in the estimate of the speed-up.
const DECAY: f64 = 0.995;
/// Time that must be saved to read a text for the sake of its drafts, over the time for reading: drafts take time, too, and
/// without any nothing is learned.
const READ_AND_DRAFT: f64 = 4.0;
/// The share of time that may be lost by steps without drafts that are run to compare with.
const CONTROL_SHARE: f64 = 0.0025;
/// One of this many steps may have another number of rows than seems best, to learn its cost: one
/// row more or less, or one in [`EXPLORE_REACH`].
const EXPLORE_EVERY: u64 = 16;
const EXPLORE_REACH: usize = 4;

/// How many draft tokens are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum BudgetMode {
    /// As many draft tokens as pay for themselves.
    #[default]
    Adaptive,
    /// All draft tokens that the limits allow; to measure with.
    Fixed,
}

/// Decides how deep to draft and what to verify, and learns the costs from the steps that run.
#[derive(Debug)]
pub struct Budget {
    mode: BudgetMode,
    /// Forwards of the target.
    target: TargetCost,
    /// Forwards of the draft model.
    draft: CostCurve,
    /// Averages over steps, relative to plain decoding's: tokens, and seconds.
    gained: f64,
    spent: f64,
    pruned: u64,
    /// Steps that have run.
    steps: u64,
    exploration: Exploration,
}

/// A step without its drafts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Base {
    /// Sequences that gain a token.
    pub sequences: usize,
    pub rows: usize,
    /// Tokens of each of these sequences, on average.
    pub context: usize,
}

/// A sequence's draft: the estimated probability that each node and all its ancestors stand, and
/// each node's parent, which comes before it; `None` = it follows the sequence's last token.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    pub scores: &'a [f32],
    pub parents: &'a [Option<u16>],
}

/// What is worth verifying.
#[derive(Debug, Clone)]
pub struct Selection {
    /// Of each draft, whether each node is verified.
    pub keep: Vec<Vec<bool>>,
    /// Of each draft, the tokens that the nodes worth verifying are expected to gain, less those that the time of
    /// their rows is worth.
    pub gains: Vec<f64>,
}

/// A step that has run.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepCost {
    /// Sequences that gained a token.
    pub sequences: usize,
    /// Rows of the target's forward without draft nodes.
    pub base_rows: usize,
    pub draft_nodes: usize,
    /// Tokens of a sequence before these rows, on average.
    pub context: usize,
    /// Experts that the target's forward read; see [`TargetCost`].
    pub experts_read: usize,
    /// New tokens of all sequences, accepted ones included, but none after the end of a text.
    pub tokens: usize,
    pub target_seconds: f64,
    /// Drafting, whether with a model or not.
    pub draft_seconds: f64,
}

impl Budget {
    /// A budget that knows no costs.
    pub fn new(mode: BudgetMode) -> Self {
        Self {
            mode,
            target: TargetCost::new([]),
            draft: CostCurve::default(),
            gained: 1.0,
            spent: 1.0,
            pruned: 0,
            steps: 0,
            exploration: Exploration::default(),
        }
    }

    /// Whether all drafts are verified as they are.
    pub fn is_fixed(&self) -> bool {
        self.mode == BudgetMode::Fixed
    }

    /// Sets the cost of the target, which is known.
    pub fn with_target(self, target: TargetCost) -> Self {
        Self { target, ..self }
    }

    /// Sets the cost of the draft model, which is known.
    pub fn with_draft(self, draft: CostCurve) -> Self {
        Self { draft, ..self }
    }

    /// Seconds of the target's forwards; the caller may calibrate them.
    pub fn target(&mut self) -> &mut TargetCost {
        &mut self.target
    }

    /// Seconds of the draft model's forwards by rows, which the caller notes.
    pub fn draft_cost(&mut self) -> &mut CostCurve {
        &mut self.draft
    }

    /// Tokens per second over those of plain decoding, by the estimate for recent steps.
    pub fn speed_up(&self) -> f64 {
        self.gained / self.spent
    }

    /// Writes the costs that were learned.
    pub fn learned(&self, to: &mut Learned) {
        self.target.learned(to);
        to.draft = self.draft.learned();
    }

    /// Begins with costs that were learned at another time, beside those that were measured.
    pub fn recall(&mut self, learned: &Learned) {
        self.target.recall(learned);
        self.draft.recall(&learned.draft);
    }

    /// Draft nodes that were proposed and not verified, since the start.
    pub fn pruned(&self) -> u64 {
        self.pruned
    }

    /// Learns from a step. Those with prompt rows teach nothing: rows without logits cost less.
    pub fn observe(&mut self, step: &StepCost) {
        self.steps += 1;
        if step.sequences == 0 || step.base_rows != step.sequences {
            return;
        }
        self.exploration.save(step.target_seconds);
        let (rows, nodes, experts) = (step.base_rows, step.draft_nodes, step.experts_read);
        let (context, seconds) = (step.context, step.target_seconds);
        (self.target).note(rows, nodes, context, experts, seconds);
        let base = Base {
            sequences: step.sequences,
            rows,
            context,
        };
        let plain = self.step_seconds(base, 0);
        let attention = self.target.attention(attending(base, nodes));
        let expected = self.target.seconds_of(rows + nodes, experts) + attention;
        let ratio = (step.target_seconds + step.draft_seconds) / expected;
        let spent = ratio.clamp(1.0 / MAX_RATIO, MAX_RATIO) * expected / plain;
        let gained = step.tokens as f64 / step.sequences as f64;
        if spent.is_finite() {
            self.gained = DECAY * self.gained + (1.0 - DECAY) * gained;
            self.spent = DECAY * self.spent + (1.0 - DECAY) * spent;
        }
    }

    /// How long a step took, relative to what its rows and its context should take: in a unit that stays, whatever the
    /// speed of the machine is. An interrupted step has taken at most [`MAX_RATIO`] times as long as expected.
    pub fn relative_seconds(&self, step: &StepCost) -> f64 {
        let base = Base {
            sequences: step.sequences,
            rows: step.base_rows,
            context: step.context,
        };
        let ratio = step.target_seconds / self.step_seconds(base, step.draft_nodes);
        self.target.scale() * ratio.clamp(1.0 / MAX_RATIO, MAX_RATIO)
    }

    /// Which nodes of each draft to verify in a step that is `base` without them. Parents of kept nodes are kept. A score
    /// that is no probability counts as 0, and one above its parent's as its parent's.
    pub fn select(&mut self, drafts: &[Candidates<'_>], base: Base) -> Selection {
        let all = self.is_fixed();
        let keep = drafts.iter().map(|draft| vec![all; draft.scores.len()]);
        let (keep, gains) = (keep.collect(), vec![0.0; drafts.len()]);
        let mut selection = Selection { keep, gains };
        if all {
            return selection;
        }
        let mut nodes = Vec::new();
        for (sequence, draft) in drafts.iter().enumerate() {
            nodes.extend(tree(sequence, draft));
        }
        let nodes = ranked(nodes);
        let price = self.price(base);
        let rows = self.verify_seconds(base, nodes.len());
        let mut offers = vec![RankedPrefix::default()];
        for (node, seconds) in nodes.iter().zip(&rows[1..]) {
            offers.push(RankedPrefix {
                gain: offers[offers.len() - 1].gain + node.score,
                cost: price * seconds,
            });
        }
        let mut best = best(&offers);
        let share = offers[best].value() / offers[best].gain.max(f64::MIN_POSITIVE);
        for node in &nodes[..best] {
            selection.gains[node.sequence] += share * node.score;
        }
        if base.rows == base.sequences {
            best = self.explore(best, &offers, base.rows);
        }
        for node in &nodes[..best] {
            selection.keep[node.sequence][node.index] = true;
        }
        let proposed: usize = drafts.iter().map(|draft| draft.scores.len()).sum();
        self.pruned += (proposed - best) as u64;
        selection
    }

    /// Takes `seconds` for reading a text whose drafts would pay if they were as good as they may be; returns false if
    /// these and the time for drafts are not saved.
    pub fn may_read(&mut self, seconds: f64) -> bool {
        let has_more = self.exploration.most() >= READ_AND_DRAFT * seconds;
        has_more && self.exploration.take(seconds, true)
    }

    /// The score below which no node is worth a row of a step that is `base` without drafts: half the price of a row
    /// where several are cheapest, since the prices are estimates.
    pub fn min_score(&self, base: Base) -> f32 {
        if self.is_fixed() {
            return 0.0;
        }
        let rows = MIN_SCORE_ROWS.max(MIN_SCORE_ROWS_EACH * base.sequences);
        let seconds = self.verify_seconds(base, rows);
        let each = (1..=rows).map(|rows| seconds[rows] / rows as f64);
        let least = each.fold(f64::INFINITY, f64::min);
        let price = 0.5 * self.price(base) * least;
        (price as f32).clamp(MIN_SCORE, 1.0)
    }

    /// Seconds that 0, 1, ..., `nodes` draft nodes add to a step.
    fn verify_seconds(&self, base: Base, nodes: usize) -> Vec<f64> {
        let without = self.step_seconds(base, 0);
        let seconds = |nodes| self.step_seconds(base, nodes) - without;
        (0..=nodes).map(seconds).collect()
    }

    /// Expected seconds of a step with so many draft nodes.
    fn step_seconds(&self, base: Base, nodes: usize) -> f64 {
        self.target.seconds(base.rows, nodes) + self.target.attention(attending(base, nodes))
    }

    /// `best`, or in some steps a number of nodes whose cost is to be learned: none, or one close to
    /// `best` that few steps had and that would pay at half the difference in cost, or twice the
    /// saving. Without this an estimate that is too high would stay, since what seems dear is not
    /// run.
    fn explore(&self, best: usize, offers: &[RankedPrefix], base_rows: usize) -> usize {
        if self.is_control() {
            return 0;
        }
        if self.steps % EXPLORE_EVERY != EXPLORE_EVERY - 1 {
            return best;
        }
        let might_pay = |&nodes: &usize| {
            let gain = offers[nodes].gain - offers[best].gain;
            let cost = offers[nodes].cost - offers[best].cost;
            gain > if nodes > best { cost / 2.0 } else { cost * 2.0 }
        };
        let reach = ((base_rows + best) / EXPLORE_REACH).max(1);
        let around = (1..=reach).flat_map(|by| [best + by, best.saturating_sub(by)]);
        let mut uncertain = around
            .filter(|&nodes| nodes < offers.len() && !self.target.is_settled(base_rows + nodes));
        uncertain.find(might_pay).unwrap_or(best)
    }

    /// Whether this step has no drafts. If all steps had some, dearer drafts could not be told from
    /// a slower machine.
    fn is_control(&self) -> bool {
        let lost = 1.0 - 1.0 / self.speed_up().max(1.0);
        let every = (lost / CONTROL_SHARE) as u64;
        self.steps % every.max(EXPLORE_EVERY) == EXPLORE_EVERY / 2
    }

    /// Seconds that the target takes for these positions of a prompt, in a step of their own.
    pub fn prompt_seconds(&self, positions: Range<usize>) -> f64 {
        let of = Attending {
            sequences: 1,
            rows: positions.len(),
            context: positions.start.midpoint(positions.end),
        };
        self.target.seconds(of.rows, 0) + self.target.attention(of)
    }

    /// Seconds that a sequence's part of a step takes if no sequence has a draft or reads a prompt.
    pub fn plain_share(&self, base: Base) -> f64 {
        let sequences = base.sequences.max(1);
        let plain = Base {
            sequences,
            rows: sequences,
            ..base
        };
        self.step_seconds(plain, 0) / sequences as f64
    }

    /// The tokens that a second must gain.
    pub fn price(&self, base: Base) -> f64 {
        MARGIN * self.speed_up().max(1.0) / self.plain_share(base)
    }
}

/// What the rows of a step with so many draft nodes attend to. Rows of prompts count as if they were of other sequences:
/// the step has them with drafts and without.
fn attending(base: Base, nodes: usize) -> Attending {
    Attending {
        sequences: base.sequences,
        rows: base.sequences + nodes,
        context: base.context,
    }
}

#[cfg(test)]
mod experts;
#[cfg(test)]
pub(super) mod gpu;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
