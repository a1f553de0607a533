//! The nodes that compete for the rows of a step.

use super::Candidates;
use super::forecast::{DraftForecast, probability};

/// Nodes with less probability are never verified.
pub(super) const MIN_SCORE: f32 = 0.02;

/// A node that competes for a row.
pub(super) struct BudgetNode {
    /// Score of the node, not above its parent's.
    pub score: f64,
    pub depth: usize,
    pub sequence: usize,
    pub index: usize,
}

/// The nodes of a draft.
pub(super) fn tree(sequence: usize, draft: &Candidates<'_>) -> Vec<BudgetNode> {
    let mut nodes: Vec<BudgetNode> = Vec::with_capacity(draft.scores.len());
    for (index, (&score, parent)) in draft.scores.iter().zip(draft.parents).enumerate() {
        let (limit, depth) = match parent.map(|parent| nodes.get(usize::from(parent))) {
            None => (1.0, 1),
            Some(Some(parent)) => (parent.score, parent.depth + 1),
            Some(None) => (0.0, 1),
        };
        nodes.push(BudgetNode {
            score: probability(score).min(limit),
            depth,
            sequence,
            index,
        });
    }
    nodes
}

/// The nodes that a forecast stands for.
pub(super) fn chain<'a>(
    sequence: usize,
    forecast: &'a DraftForecast<'_>,
) -> impl Iterator<Item = BudgetNode> + 'a {
    let path = forecast.path.iter().take(forecast.max_length);
    path.enumerate().scan(1f64, move |above, (index, &score)| {
        *above = above.min(probability(score));
        Some(BudgetNode {
            score: *above,
            depth: index + 1,
            sequence,
            index,
        })
    })
}

/// The nodes worth a thought, best first; parents come before their children.
pub(super) fn ranked(mut nodes: Vec<BudgetNode>) -> Vec<BudgetNode> {
    nodes.retain(|node| node.score >= f64::from(MIN_SCORE));
    let place = |node: &BudgetNode| (node.depth, node.sequence, node.index);
    nodes.sort_unstable_by(|a, b| {
        let by_score = b.score.total_cmp(&a.score);
        by_score.then_with(|| place(a).cmp(&place(b)))
    });
    nodes
}

/// The first nodes of a ranking, in tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RankedPrefix {
    /// Expected tokens.
    pub gain: f64,
    /// Tokens that the nodes must gain.
    pub cost: f64,
}

impl RankedPrefix {
    pub fn value(&self) -> f64 {
        self.gain - self.cost
    }
}

/// The first number of nodes that has the highest value. All are compared: the costs need not be
/// convex.
pub(super) fn best(offers: &[RankedPrefix]) -> usize {
    let mut best = 0;
    for (nodes, offer) in offers.iter().enumerate() {
        if offer.value() > offers[best].value() {
            best = nodes;
        }
    }
    best
}
