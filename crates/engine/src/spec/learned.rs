//! What the budget and a drafter have learned, to be kept over restarts. It is only where they begin: what is measured
//! and seen counts more.

use super::displacement::Displacement;
use serde::{Deserialize, Serialize};

/// Most entries of a list.
pub(super) const MAX_ENTRIES: usize = 4096;

/// What was learned of a target, a drafter and a machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    /// Steps of the target by rows.
    pub target: Vec<LearnedCost>,
    /// Attention for a token before a step's rows, over a step of one row: for a sequence, and for a row.
    pub attention: [f64; 2],
    /// Forwards of the draft model by rows.
    pub draft: Vec<LearnedCost>,
    /// What a head costs the target's forwards beside its own.
    pub displacement: Displacement,
    /// What was seen of its guesses.
    pub drafts: LearnedDrafts,
}

/// What was seen of a drafter's guesses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedDrafts {
    /// Guesses of a model.
    pub nodes: Vec<LearnedCount>,
    /// Levels of a model's drafts.
    pub levels: Vec<LearnedCount>,
    /// Guesses of tables.
    pub tables: Vec<LearnedCount>,
}

/// The cost of forwards of some number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedCost {
    /// Rows of the forwards, on average.
    pub rows: usize,
    /// Over that of one row.
    pub cost: f64,
    /// Forwards that were seen, up to where more would not count.
    pub seen: u32,
}

/// Guesses of a kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedCount {
    /// What the guesses have in common.
    pub features: Vec<u8>,
    /// Guesses that stood.
    pub hits: f32,
    /// All of these guesses.
    pub n: f32,
}

impl Learned {
    /// Whether its sizes and values are possible.
    pub fn is_valid(&self) -> bool {
        let drafts = &self.drafts;
        let counts = [&drafts.nodes, &drafts.levels, &drafts.tables];
        let mut all = counts.iter().flat_map(|counts| counts.iter());
        let mut costs = self.target.iter().chain(&self.draft);
        self.target.len().max(self.draft.len()) <= MAX_ENTRIES
            && counts.iter().all(|counts| counts.len() <= MAX_ENTRIES)
            && all.all(|count| count.is_valid(usize::MAX))
            && costs.all(LearnedCost::is_valid)
            && self.displacement.is_valid()
            && self.attention.iter().all(|cost| (0.0..1.0).contains(cost))
    }
}

impl LearnedCost {
    fn is_valid(&self) -> bool {
        const MAX_ROWS: usize = 1 << 20;
        (1..MAX_ROWS).contains(&self.rows) && (1e-3..1e6).contains(&self.cost)
    }
}

impl LearnedCount {
    /// Whether it can be of guesses with at most so many features.
    pub fn is_valid(&self, max_features: usize) -> bool {
        (1..=max_features).contains(&self.features.len())
            && self.n.is_finite()
            && self.n > 0.0
            && (0.0..=self.n).contains(&self.hits)
    }
}
