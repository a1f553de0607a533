//! One sequence's draft while it grows, level by level.

use crate::spec::acceptance_model::{AcceptanceView, Estimate};
use crate::spec::draft::{Draft, DraftDist, Source};
use foretoken_core::sampling::{Guess, Sampler, distribution, guess};
use foretoken_kernels::sample::TokenChoice;

/// Nodes with less than this share of the score of their level's best node are not expanded: such a
/// wrong turn is not worth a row of the draft model.
const MIN_SHARE: f32 = 0.2;

/// A tree that grows by expanding the most probable nodes of its last level (EAGLE-2, Li et al. 2024,
/// section 4.1).
#[derive(Debug, Default)]
pub struct Growth {
    /// All guesses; those that are not worth verifying teach too.
    pub draft: Draft,
    /// The estimates of the draft's nodes, one for each.
    pub estimates: Vec<Estimate>,
    /// The nodes that were or will be fed to the model, parents first.
    fed: Vec<u16>,
    /// Number of the last nodes in `fed` that are to be fed and expanded next.
    open: usize,
    /// Number of the first nodes in `fed` that are a chain, whose K and V stay in the pool.
    trunk: usize,
}

/// The limits of a tree.
#[derive(Debug, Clone, Copy)]
pub struct GrowthLimits {
    /// Maximum number of nodes.
    pub nodes: usize,
    /// Maximum number of nodes expanded per level.
    pub width: usize,
    /// Nodes with a lower score are neither expanded nor returned.
    pub min_score: f32,
}

/// The rows with which open nodes are fed; parents as in
/// [`Batch::push_span`](foretoken_core::model::Batch::push_span).
#[derive(Debug, Default, PartialEq)]
pub struct TreeRows {
    pub tokens: Vec<u32>,
    pub parents: Vec<Option<u16>>,
}

/// A tree that has grown.
pub struct Grown {
    /// The best nodes.
    pub draft: Draft,
    /// All nodes, with their estimates.
    pub all: Draft,
    pub estimates: Vec<Estimate>,
}

impl Growth {
    /// The nodes to expand next; none if the tree is complete, or has not begun.
    pub fn open(&self) -> &[u16] {
        &self.fed[self.fed.len() - self.open..]
    }

    /// The nodes whose children are guessed next; `None` = the last token of the sequence.
    pub fn parents(&self) -> Vec<Option<u16>> {
        match self.open() {
            [] => vec![None],
            open => open.iter().copied().map(Some).collect(),
        }
    }

    /// The [`guesses`] after the node `parent`, whose row of logits this is. The `sampler` has the tokens before the
    /// draft.
    pub fn guess(
        &mut self,
        parent: Option<u16>,
        logits: &[f32],
        sampler: &mut Sampler,
        choice: TokenChoice,
        width: usize,
    ) -> Vec<Guess> {
        sampler.after(&self.path(parent), |sampler| {
            guesses(logits, sampler, choice, width, &mut self.draft.dists)
        })
    }

    /// The best nodes within the limits, and what all of them teach.
    pub fn finish(mut self, limits: &GrowthLimits) -> Grown {
        let draft = self.best(limits);
        self.draft.dists.clear();
        Grown {
            draft,
            all: self.draft,
            estimates: self.estimates,
        }
    }

    /// The nodes of the trunk.
    pub fn trunk(&self) -> &[u16] {
        &self.fed[..self.trunk]
    }

    /// Tokens from the first level down to `node`.
    pub fn path(&self, node: Option<u16>) -> Vec<u32> {
        self.draft.path_tokens(node.map(usize::from))
    }

    pub fn token(&self, node: u16) -> u32 {
        self.draft.tokens[usize::from(node)]
    }

    fn score(&self, node: u16) -> f32 {
        self.draft.scores[usize::from(node)]
    }

    /// Adds the guesses after `parent`, the likeliest first.
    pub fn add(&mut self, parent: Option<u16>, guesses: &[Guess], view: &AcceptanceView<'_>) {
        let above = parent.map_or(1.0, |parent| self.score(parent));
        for (rank, guess) in guesses.iter().enumerate() {
            let estimate = view.estimate(rank, guess.prob);
            let score = above * estimate.adjusted;
            self.draft.add(guess.token, parent, score, Source::Model);
            self.estimates.push(estimate);
        }
    }

    /// Adds a guess at the end of a chain whose other nodes are its trunk. It belongs to the trunk if it
    /// `is_fed`, otherwise it is open.
    pub fn push(&mut self, guess: Guess, view: &AcceptanceView<'_>, is_fed: bool) {
        let node = self.draft.len() as u16;
        self.add(node.checked_sub(1), &[guess], view);
        self.fed.push(node);
        self.open = usize::from(!is_fed);
        self.trunk = self.fed.len() - self.open;
    }

    /// The only open node is being fed: all that follows descends from it.
    pub fn extend_trunk(&mut self) {
        self.trunk = self.fed.len();
    }

    /// Opens the best nodes of the level that begins with node `first`; none if there are none worth
    /// it, or no room.
    pub fn open_level(&mut self, first: usize, limits: &GrowthLimits) {
        let mut level: Vec<u16> = (first..self.draft.len()).map(|node| node as u16).collect();
        level.sort_by(|&a, &b| self.score(b).total_cmp(&self.score(a)).then(a.cmp(&b)));
        let best = level.first().map_or(0.0, |&node| self.score(node));
        let least = limits.min_score.max(MIN_SHARE * best);
        level.retain(|&node| self.score(node) >= least);
        let room = limits.nodes.saturating_sub(self.fed.len());
        level.truncate(limits.width.min(room));
        level.sort_unstable();
        if self.fed.len() - self.trunk <= 1 {
            // The last node was fed alone: all that follows descends from it.
            self.trunk = self.fed.len();
        }
        self.open = level.len();
        self.fed.extend(level);
    }

    /// The rows that give the logits of the open nodes, which are the last rows. A chain is fed node
    /// by node; a tree is fed whole below its trunk, since rows cannot mask what is in the pool.
    pub fn rows(&self) -> TreeRows {
        let nodes = &self.fed[self.trunk..];
        let row_of = |node: u16| nodes.iter().position(|&fed| fed == node);
        let parent_row = |&node: &u16| {
            let parent = self.draft.parents[usize::from(node)];
            parent.and_then(row_of).map(|row| row as u16)
        };
        TreeRows {
            tokens: nodes.iter().map(|&node| self.token(node)).collect(),
            parents: nodes.iter().map(parent_row).collect(),
        }
    }

    /// The parents of the nodes that [`Growth::rows`] feeds.
    pub fn fed_parents(&self) -> impl Iterator<Item = Option<u16>> + '_ {
        let nodes = self.fed[self.trunk..].iter();
        nodes.map(|&node| self.draft.parents[usize::from(node)])
    }

    /// The best nodes within the limits.
    fn best(&self, limits: &GrowthLimits) -> Draft {
        let mut draft = self.draft.clone();
        let mut order: Vec<usize> = (0..draft.len()).collect();
        // Parents come first: a child's score is no higher and its index is.
        order.sort_by(|&a, &b| draft.scores[b].total_cmp(&draft.scores[a]).then(a.cmp(&b)));
        let mut keep = vec![false; draft.len()];
        for node in order.into_iter().take(limits.nodes) {
            keep[node] = draft.scores[node] >= limits.min_score;
        }
        draft.retain(&keep);
        draft
    }
}

/// The guesses after a row of `logits`, at most `width`, the likeliest first, for the position that `sampler` has
/// reached. Adds to `dists` the distribution from which a token was drawn, which the rejection rule needs.
pub fn guesses(
    logits: &[f32],
    sampler: &Sampler,
    choice: TokenChoice,
    width: usize,
    dists: &mut Vec<DraftDist>,
) -> Vec<Guess> {
    let quantile = match choice {
        TokenChoice::GumbelMax(key) => {
            return guess(logits, sampler, key, width).unwrap_or_default();
        }
        TokenChoice::Quantile(quantile) => quantile,
    };
    let Ok(dist) = distribution(logits, sampler) else {
        return Vec::new();
    };
    let token = dist.sample(quantile);
    let prob = dist.prob(token) as f32;
    dists.push(dist.into());
    vec![Guess { token, prob }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::acceptance_model::{AcceptanceModel, History};

    fn guesses(tokens: &[u32]) -> Vec<Guess> {
        let prob = |i: usize| 0.6 / (1 << i) as f32;
        let all = tokens.iter().enumerate();
        all.map(|(i, &token)| Guess {
            token,
            prob: prob(i),
        })
        .collect()
    }

    const WIDE: GrowthLimits = GrowthLimits {
        nodes: 64,
        width: 2,
        min_score: 0.0,
    };

    /// A chain is fed one row at a time; from the first branch on, all rows below the trunk.
    #[test]
    fn a_tree_is_fed_below_its_trunk() {
        let (acceptance, history) = (AcceptanceModel::default(), History::default());
        let view = acceptance.view(&history, false);
        let mut growth = Growth::default();
        growth.add(None, &guesses(&[10]), &view);
        growth.open_level(0, &WIDE);
        assert_eq!(growth.rows().tokens, [10]);
        growth.add(Some(0), &guesses(&[20, 21]), &view);
        growth.open_level(1, &WIDE);
        assert_eq!((growth.trunk(), growth.open()), (&[0][..], &[1, 2][..]));
        let rows = growth.rows();
        assert_eq!(
            (rows.tokens, rows.parents),
            (vec![20, 21], vec![None, None])
        );
        growth.add(Some(1), &guesses(&[30, 31]), &view);
        growth.add(Some(2), &guesses(&[32]), &view);
        growth.open_level(3, &WIDE);
        assert_eq!(growth.trunk(), [0]);
        let rows = growth.rows();
        assert_eq!(rows.tokens[..2], [20, 21]);
        assert_eq!(rows.parents[..2], [None, None]);
        assert_eq!(growth.open().len(), 2);
        for (node, parent) in growth.open().iter().zip(&rows.parents[2..]) {
            let parent = parent.map(|row| rows.tokens[usize::from(row)]);
            assert_eq!(growth.path(Some(*node))[1], parent.unwrap());
        }
    }

    #[test]
    fn limits_keep_the_best_nodes_and_their_ancestors() {
        let (acceptance, history) = (AcceptanceModel::default(), History::default());
        let view = acceptance.view(&history, true);
        let mut growth = Growth::default();
        growth.add(None, &guesses(&[1, 2, 3]), &view);
        growth.open_level(0, &WIDE);
        assert_eq!(growth.open().len(), 2);
        for parent in [0, 1] {
            growth.add(Some(parent), &guesses(&[4, 5]), &view);
        }
        for nodes in 0..8 {
            let best = growth.best(&GrowthLimits { nodes, ..WIDE });
            assert_eq!(best.len(), nodes.min(7));
            let mut scores = growth.draft.scores.clone();
            scores.sort_by(|a, b| b.total_cmp(a));
            let sum: f32 = best.scores.iter().sum();
            assert!((sum - scores[..best.len()].iter().sum::<f32>()).abs() < 1e-5);
        }
        let min_score = growth.draft.scores[1];
        let best = growth.best(&GrowthLimits { min_score, ..WIDE });
        assert!(best.scores.iter().all(|&score| score >= min_score));
        growth.open_level(3, &GrowthLimits { nodes: 3, ..WIDE });
        assert_eq!(growth.open().len(), 1, "room for one more");
        growth.open_level(7, &WIDE);
        assert!(growth.open().is_empty());
    }
}
