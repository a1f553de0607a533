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

mod nodes;

use super::cost::{CostCurve, MAX_RATIO};
use super::target_cost::TargetCost;
use nodes::{BudgetNode, MIN_SCORE, chain, probability, ranked, tree};

/// Draft rows whose average price [`Budget::min_score`] compares, at least, and of each sequence.
const MIN_SCORE_ROWS: usize = 16;
const MIN_SCORE_ROWS_EACH: usize = 4;
/// Factor by which the gain of a node must exceed its cost: of many estimates, the ones that seem to pay are
/// rather too high.
const MARGIN: f64 = 1.1;
/// The weight of the steps before, at each step, in the estimate of the speed-up.
const DECAY: f64 = 0.995;
/// The share of its time that a sequence without drafts may spend on probes.
const PROBE_SHARE: f64 = 0.0025;
/// Steps over which the price of feeding a backlog to the draft model is spread: texts are hundreds of
/// tokens long, but nobody knows how long this one will be.
const BACKLOG_STEPS: usize = 32;
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
}

/// A sequence's draft: the estimated probability that each node and all its ancestors stand, and
/// each node's parent, which comes before it; `None` = it follows the sequence's last token.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    pub scores: &'a [f32],
    pub parents: &'a [Option<u16>],
}

/// What a drafter with a model expects for a sequence before it drafts.
#[derive(Debug)]
pub struct DraftForecast<'a> {
    /// Probability that the first 1, 2, ... tokens of the draft stand. No deeper draft than this.
    pub path: &'a [f32],
    pub max_length: usize,
    /// Rows that the draft model must compute for its first token: 1, and what it has not seen.
    pub pending: usize,
    /// Whether one forward of the draft model gives all tokens, with a row for each after the pending ones.
    pub at_once: bool,
    /// Kept with the sequence.
    pub probe: &'a mut Probe,
}

/// What a sequence without drafts has saved for a look at whether they would pay now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Probe {
    seconds: f64,
    /// The step in which it saved last.
    step: Option<u64>,
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
#[derive(Debug, Clone, Copy)]
pub struct StepCost {
    /// Sequences that gained a token.
    pub sequences: usize,
    /// Rows of the target's forward without draft nodes.
    pub base_rows: usize,
    pub draft_nodes: usize,
    /// Experts that the target's forward read; see [`TargetCost`].
    pub experts_read: usize,
    /// New tokens of all sequences, accepted ones included.
    pub tokens: usize,
    pub target_seconds: f64,
    /// Drafting, whether with a model or not.
    pub draft_seconds: f64,
}

/// The first nodes of a ranking, in tokens.
#[derive(Debug, Clone, Copy, Default)]
struct RankedPrefix {
    /// Expected tokens.
    gain: f64,
    /// Tokens that the nodes must gain.
    cost: f64,
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
        let (rows, nodes, experts) = (step.base_rows, step.draft_nodes, step.experts_read);
        self.target.note(rows, nodes, experts, step.target_seconds);
        let plain = self.target.seconds(step.sequences, 0);
        let expected = self.target.seconds_of(rows + nodes, experts);
        let ratio = (step.target_seconds + step.draft_seconds) / expected;
        let spent = ratio.clamp(1.0 / MAX_RATIO, MAX_RATIO) * expected / plain;
        let gained = step.tokens as f64 / step.sequences as f64;
        if spent.is_finite() {
            self.gained = DECAY * self.gained + (1.0 - DECAY) * gained;
            self.spent = DECAY * self.spent + (1.0 - DECAY) * spent;
        }
    }

    /// Which nodes of each draft to verify in a step of `sequences` sequences that has `base_rows`
    /// rows without them. Parents of kept nodes are kept. A score that is no probability counts as
    /// 0, and one above its parent's as its parent's.
    pub fn select(
        &mut self,
        drafts: &[Candidates<'_>],
        base_rows: usize,
        sequences: usize,
    ) -> Selection {
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
        let price = self.price(sequences);
        let rows = self.verify_seconds(base_rows, nodes.len());
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
        if base_rows == sequences {
            best = self.explore(best, &offers, base_rows);
        }
        for node in &nodes[..best] {
            selection.keep[node.sequence][node.index] = true;
        }
        let proposed: usize = drafts.iter().map(|draft| draft.scores.len()).sum();
        self.pruned += (proposed - best) as u64;
        selection
    }

    /// The depth to draft to for each sequence, before a model drafts. A level is one forward of the draft
    /// model over all sequences that are drafted for that deep, or a row of its only forward for each of them
    /// ([`DraftForecast::at_once`]). The depth is 0 where drafting does not pay, except for a probe of depth 1
    /// now and then: its outcome is known even if [`Budget::select`] prunes the node.
    ///
    /// Call it at most once per step, with all sequences that may draft: those that do not, save for their
    /// next probe, also for the steps since the last call.
    pub fn depths(
        &self,
        forecasts: &mut [DraftForecast<'_>],
        base_rows: usize,
        sequences: usize,
    ) -> Vec<usize> {
        if self.is_fixed() {
            return forecasts.iter().map(|one| one.max_length).collect();
        }
        let (nodes, offers) = self.plan(forecasts, base_rows, sequences);
        let mut best = best(&offers);
        if base_rows == sequences {
            best = self.explore(best, &offers, base_rows);
        }
        let mut depths = vec![0; forecasts.len()];
        let nodes = nodes.iter().take(best);
        nodes.for_each(|node| depths[node.sequence] += 1);
        self.probe(&mut depths, forecasts, sequences);
        depths
    }

    /// Seconds that drafts of a model are expected to save each of `sequences` sequences in a step, at the
    /// depth that pays best; 0 if none pays. `path` and `at_once` are as in [`DraftForecast`].
    pub fn saved_seconds(&self, path: &[f32], at_once: bool, sequences: usize) -> f64 {
        let mut probes = vec![Probe::default(); sequences];
        let forecast = |probe| DraftForecast {
            path,
            max_length: path.len(),
            pending: 1,
            at_once,
            probe,
        };
        let forecasts: Vec<_> = probes.iter_mut().map(forecast).collect();
        let (_, offers) = self.plan(&forecasts, sequences, sequences);
        offers[best(&offers)].value() / self.price(sequences) / sequences.max(1) as f64
    }

    /// The nodes that a draft model may draft, best first, down to the depth that is worth most, and what
    /// the first 0, 1, ... of them are worth.
    fn plan(
        &self,
        forecasts: &[DraftForecast<'_>],
        base_rows: usize,
        sequences: usize,
    ) -> (Vec<BudgetNode>, Vec<RankedPrefix>) {
        let price = self.price(sequences);
        let deepest = forecasts.iter().map(|one| one.path.len()).max();
        let verify = self.verify_seconds(base_rows, deepest.unwrap_or(0));
        let nodes = forecasts.iter().enumerate();
        // Nodes are ranked by what they gain: one with a long backlog would stand before cheaper ones.
        let nodes = nodes.filter(|(_, one)| self.backlog_pays(one, price, &verify));
        let mut nodes = ranked(nodes.flat_map(|(at, one)| chain(at, one)).collect());
        let verify = self.verify_seconds(base_rows, nodes.len());
        let deepest = nodes.iter().map(|node| node.depth).max().unwrap_or(0);
        let (mut chosen, mut depth) = (vec![RankedPrefix::default()], 1);
        let mut known = Vec::new();
        let mut draft_seconds = |rows: usize| {
            let next = known.len();
            known.extend((next..=rows).map(|rows| self.draft_seconds(rows)));
            known[rows]
        };
        // A deep node that comes before shallow ones may open a level that does not pay.
        for limit in 1..=deepest {
            // Rows and seconds of each forward of the draft model.
            let mut forwards = vec![(0, 0.0); limit];
            let mut drafting = 0.0;
            let mut offers = vec![RankedPrefix::default()];
            let allowed = nodes.iter().filter(|node| node.depth <= limit);
            for (node, seconds) in allowed.zip(&verify[1..]) {
                let (forward, added) = forecasts[node.sequence].rows_of(node.depth);
                let (rows, before) = &mut forwards[forward];
                *rows += added;
                let after = draft_seconds(*rows);
                drafting += after - std::mem::replace(before, after);
                offers.push(RankedPrefix {
                    gain: offers[offers.len() - 1].gain + node.score,
                    cost: price * (seconds + drafting),
                });
            }
            if limit == 1 || offers[best(&offers)].value() > chosen[best(&chosen)].value() {
                (chosen, depth) = (offers, limit);
            }
        }
        nodes.retain(|node| node.depth <= depth);
        (nodes, chosen)
    }

    /// Whether a sequence's draft can gain what its rows and its backlog cost, where others pay for the rest
    /// of the draft model's forwards. `verify` has the seconds of 0, 1, ... nodes.
    fn backlog_pays(&self, forecast: &DraftForecast<'_>, price: f64, verify: &[f64]) -> bool {
        let (_, first) = forecast.rows_of(1);
        if forecast.at_once || first <= 1 {
            return true;
        }
        let backlog = self.draft_seconds(first) - self.draft_seconds(1);
        let mut gain = 0.0;
        chain(0, forecast).any(|node| {
            gain += node.score;
            gain > price * (backlog + verify[node.depth])
        })
    }

    /// Lets sequences with depth 0 save, and raises the depth to 1 for those that can pay for it.
    fn probe(&self, depths: &mut [usize], forecasts: &mut [DraftForecast<'_>], sequences: usize) {
        let share = self.plain_share(sequences);
        let busy = depths.iter().zip(&*forecasts);
        let rows = busy.map(|(&depth, one)| (1..=depth).map(move |depth| one.rows_of(depth)));
        let first = rows.flatten().filter(|(forward, _)| *forward == 0);
        let mut rows: usize = first.map(|(_, rows)| rows).sum();
        let idle = depths.iter_mut().zip(forecasts);
        for (depth, one) in idle.filter(|(depth, one)| **depth == 0 && one.max_length > 0) {
            let last = one.probe.step.replace(self.steps);
            let steps = last.map_or(1, |last| self.steps.saturating_sub(last).max(1));
            one.probe.seconds += PROBE_SHARE * share * steps as f64;
            let with = rows + one.pending.max(1) + usize::from(one.at_once);
            let cost = self.draft_seconds(with) - self.draft_seconds(rows);
            if one.probe.seconds >= cost {
                one.probe.seconds -= cost;
                (*depth, rows) = (1, with);
            }
        }
    }

    /// The score below which no node is worth a row of a step of `sequences` sequences that has
    /// `base_rows` rows without drafts: half the price of a row where several are cheapest, since
    /// the prices are estimates.
    pub fn min_score(&self, base_rows: usize, sequences: usize) -> f32 {
        if self.is_fixed() {
            return 0.0;
        }
        let rows = MIN_SCORE_ROWS.max(MIN_SCORE_ROWS_EACH * sequences);
        let seconds = self.verify_seconds(base_rows, rows);
        let each = (1..=rows).map(|rows| seconds[rows] / rows as f64);
        let least = each.fold(f64::INFINITY, f64::min);
        let price = 0.5 * self.price(sequences) * least;
        (price as f32).clamp(MIN_SCORE, 1.0)
    }

    /// Seconds that 0, 1, ..., `nodes` draft nodes add to a step of `base_rows` rows.
    fn verify_seconds(&self, base_rows: usize, nodes: usize) -> Vec<f64> {
        let seconds = |nodes| self.target.seconds(base_rows, nodes);
        (0..=nodes).map(|node| seconds(node) - seconds(0)).collect()
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

    /// Seconds of a forward of the draft model. Free while either curve is unknown: only a step
    /// with a draft teaches both.
    fn draft_seconds(&self, rows: usize) -> f64 {
        if self.target.is_known() && self.draft.is_known() {
            self.draft.seconds(rows)
        } else {
            0.0
        }
    }

    /// Seconds that a sequence's part of a step without drafts takes, in a step of so many.
    pub fn plain_share(&self, sequences: usize) -> f64 {
        let sequences = sequences.max(1);
        self.target.seconds(sequences, 0) / sequences as f64
    }

    /// The tokens that a second must gain.
    pub fn price(&self, sequences: usize) -> f64 {
        MARGIN * self.speed_up().max(1.0) / self.plain_share(sequences)
    }
}

impl DraftForecast<'_> {
    /// The forward of the draft model that gives the token at `depth`, from 1, and the rows that it adds
    /// there.
    fn rows_of(&self, depth: usize) -> (usize, usize) {
        match (self.at_once, depth) {
            (false, 1) => (0, self.first_rows()),
            (false, _) => (depth - 1, 1),
            (true, 1) => (0, self.pending + 1),
            (true, _) => (0, 1),
        }
    }

    /// The rows that the first token of a draft costs. A sequence that drafts in each step feeds what the
    /// step before gained. What is beyond that, such as a prompt, is fed once and serves all later drafts.
    fn first_rows(&self) -> usize {
        let expected: f64 = self.path.iter().copied().map(probability).sum();
        let each = (1 + expected.round() as usize).min(self.pending.max(1));
        each + self.pending.saturating_sub(each).div_ceil(BACKLOG_STEPS)
    }
}

impl RankedPrefix {
    fn value(&self) -> f64 {
        self.gain - self.cost
    }
}

/// The first number of nodes that has the highest value. All are compared: the costs need not be
/// convex.
fn best(offers: &[RankedPrefix]) -> usize {
    let mut best = 0;
    for (nodes, offer) in offers.iter().enumerate() {
        if offer.value() > offers[best].value() {
            best = nodes;
        }
    }
    best
}

#[cfg(test)]
mod experts;
#[cfg(test)]
pub(super) mod gpu;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
