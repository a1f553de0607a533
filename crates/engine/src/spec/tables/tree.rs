//! The tree of the most probable guesses.

use super::guess::{GuessFeatures, Sources};
use crate::spec::draft::{Draft, Source};
use crate::spec::estimate::{Estimator, RequestBias};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Nodes whose path is less probable to stand are not drafted.
const MIN_SCORE: f32 = 0.02;

/// A guess that was considered: a node of the draft or not.
#[derive(Debug, Clone, Copy)]
pub struct TableCandidate {
    /// The node of the draft that it follows; `None` = the sequence's last token.
    pub parent: Option<u16>,
    pub token: u32,
    pub source: Source,
    pub features: GuessFeatures,
    /// Estimated probability that it stands if its parent does, by its features alone.
    pub p: f32,
}

/// Limits of a tree.
#[derive(Debug, Clone, Copy)]
pub struct TableLimits {
    /// Maximum depth of a node, 1 or more; at 1, no node has a child.
    pub length: usize,
    pub nodes: usize,
    /// Maximum number of children of a node; at 1, the tree is a chain.
    pub children: usize,
    /// Minimum score of a node.
    pub min_score: f32,
}

/// The sources, estimates and limits from which a tree is grown.
pub struct TableGrowth<'a> {
    pub sources: Sources<'a>,
    pub estimator: &'a Estimator,
    pub bias: RequestBias,
    pub limits: TableLimits,
}

impl TableGrowth<'_> {
    /// Adds nodes to `draft` at its leaves, the one whose path is the most probable first, as long as
    /// the limits allow. Returns everything that was considered.
    ///
    /// The nodes of the highest path probability are the tree that is expected to win the most tokens
    /// of all trees of its size (Sequoia, Chen et al. 2024, section 3.1; EAGLE-2, Li et al. 2024,
    /// section 4). A child's path is never more probable than its parent's, so a heap finds them.
    pub fn grow(mut self, draft: &mut Draft) -> Vec<TableCandidate> {
        let mut candidates = Vec::new();
        let mut open = BinaryHeap::new();
        let mut depths = depths(draft);
        if draft.is_empty() {
            self.expand(draft, &depths, None, &mut candidates, &mut open);
        }
        for node in 0..draft.len() {
            if !draft.parents.contains(&Some(node as u16)) {
                self.expand(
                    draft,
                    &depths,
                    Some(node as u16),
                    &mut candidates,
                    &mut open,
                );
            }
        }
        while draft.len() < self.limits.nodes
            && let Some(OpenCandidate { score, candidate }) = open.pop()
        {
            let TableCandidate {
                parent,
                token,
                source,
                ..
            } = candidates[candidate.0];
            let node = draft.add(token, parent, score, source);
            depths.push(1 + parent.map_or(0, |parent| depths[usize::from(parent)]));
            self.expand(draft, &depths, Some(node), &mut candidates, &mut open);
        }
        candidates
    }

    /// Considers the children of a node.
    fn expand(
        &mut self,
        draft: &Draft,
        depths: &[usize],
        parent: Option<u16>,
        candidates: &mut Vec<TableCandidate>,
        open: &mut BinaryHeap<OpenCandidate>,
    ) {
        let at = parent.map(usize::from);
        let (depth, score) = at.map_or((0, 1.0), |at| (depths[at], draft.scores[at]));
        if depth >= self.limits.length {
            return;
        }
        let first = candidates.len();
        for guess in self.sources.guesses(path(draft, parent)) {
            candidates.push(TableCandidate {
                parent,
                token: guess.token,
                source: guess.source,
                features: guess.features,
                p: self.estimator.probability(&guess.features),
            });
        }
        let children = &mut candidates[first..];
        children.sort_by(|a, b| b.p.total_cmp(&a.p));
        let adjusted = children.iter().map(|child| self.bias.adjust(child.p));
        // One of them at most can stand.
        let total = adjusted.clone().sum::<f32>().max(1.0);
        for (child, p) in adjusted.enumerate().take(self.limits.children) {
            let score = score * p / total;
            if score >= MIN_SCORE.max(self.limits.min_score) {
                let candidate = Reverse(first + child);
                open.push(OpenCandidate { score, candidate });
            }
        }
    }
}

/// The depth of each node; 1 = follows the sequence's last token.
fn depths(draft: &Draft) -> Vec<usize> {
    let mut depths: Vec<usize> = Vec::with_capacity(draft.len());
    for parent in &draft.parents {
        depths.push(1 + parent.map_or(0, |parent| depths[usize::from(parent)]));
    }
    depths
}

/// The tokens from a node up to the root.
fn path(draft: &Draft, node: Option<u16>) -> impl Iterator<Item = u32> {
    let nodes = std::iter::successors(node, |node| draft.parents[usize::from(*node)]);
    nodes.map(|node| draft.tokens[usize::from(node)])
}

/// A candidate that may become a node: the highest score first, then the first considered.
struct OpenCandidate {
    score: f32,
    candidate: Reverse<usize>,
}

impl Ord for OpenCandidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score.then(self.candidate.cmp(&other.candidate))
    }
}

impl PartialOrd for OpenCandidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OpenCandidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for OpenCandidate {}
