//! A tree from guesses that do not depend on the path before them, depth by depth.

use crate::spec::draft::{Draft, Source};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A token that is guessed for one depth.
#[derive(Debug, Clone, Copy)]
pub struct LevelCandidate {
    pub token: u32,
    /// Probability that it stands if the path before it does, 0 to 1.
    pub prob: f32,
}

/// Limits of a tree.
#[derive(Debug, Clone, Copy)]
pub struct ProductLimits {
    pub nodes: usize,
    /// Maximum number of a node's children.
    pub width: usize,
    /// Minimum score of a node.
    pub min_score: f32,
}

/// A node that may be added.
struct OpenNode {
    parent: Option<u16>,
    /// Score of the parent.
    above: f32,
    score: f32,
    /// Depth of the node, from 0.
    depth: usize,
    /// Rank of the node among the candidates of its depth.
    rank: usize,
}

/// The paths of highest probability within the limits; `levels` has the candidates of each depth, the most
/// probable first.
///
/// The probability of a path is a product with one factor per depth, so a path is less probable than those
/// from which it follows: its parent, and its sibling before it. A heap therefore finds the best tree
/// without looking at others (DDTree, arXiv 2604.12989, section 3).
pub fn tree(levels: &[Vec<LevelCandidate>], limits: &ProductLimits) -> Draft {
    let mut draft = Draft::default();
    let (mut considered, mut heap) = (Vec::new(), BinaryHeap::new());
    let consider = |heap: &mut BinaryHeap<_>, considered: &mut Vec<OpenNode>, open: OpenNode| {
        let level = levels.get(open.depth).into_iter().flatten();
        if let Some(candidate) = level.take(limits.width).nth(open.rank) {
            let score = open.above * candidate.prob;
            if score >= limits.min_score {
                // The bits of numbers that are not negative have their order.
                heap.push((score.max(0.0).to_bits(), Reverse(considered.len())));
                considered.push(OpenNode { score, ..open });
            }
        }
    };
    let first = |parent: Option<u16>, above: f32, depth: usize| OpenNode {
        parent,
        above,
        score: 0.0,
        depth,
        rank: 0,
    };
    consider(&mut heap, &mut considered, first(None, 1.0, 0));
    while draft.len() < limits.nodes
        && let Some((_, Reverse(at))) = heap.pop()
    {
        let OpenNode {
            parent,
            above,
            score,
            depth,
            rank,
        } = considered[at];
        let token = levels[depth][rank].token;
        let node = draft.add(token, parent, score, Source::Model);
        let child = first(Some(node), score, depth + 1);
        consider(&mut heap, &mut considered, child);
        let sibling = OpenNode {
            rank: rank + 1,
            ..first(parent, above, depth)
        };
        consider(&mut heap, &mut considered, sibling);
    }
    draft
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretoken_core::sampling::mix;
    use std::collections::HashSet;

    /// Random levels, the most probable first.
    fn levels(seed: u64, depth: usize, width: usize) -> Vec<Vec<LevelCandidate>> {
        let unit = |at: usize| (mix(seed ^ mix(at as u64)) >> 40) as f32 / (1 << 24) as f32;
        let level = |depth: usize| {
            let mut probs: Vec<f32> = (0..width).map(|rank| unit(16 * depth + rank)).collect();
            probs.sort_by(|a, b| b.total_cmp(a));
            let of = |(rank, prob)| LevelCandidate {
                token: (10 * depth + rank) as u32,
                prob,
            };
            probs.into_iter().enumerate().map(of).collect()
        };
        (0..depth).map(level).collect()
    }

    /// The probabilities of all paths, the highest first.
    fn all_paths(levels: &[Vec<LevelCandidate>], width: usize) -> Vec<f32> {
        let (mut all, mut last) = (Vec::<f32>::new(), vec![1.0f32]);
        for level in levels {
            let next = last.iter();
            last = next
                .flat_map(|above| level.iter().take(width).map(move |c| above * c.prob))
                .collect();
            all.extend(&last);
        }
        all.sort_by(|a, b| b.total_cmp(a));
        all
    }

    #[test]
    fn it_has_the_most_probable_paths() {
        for seed in 0..200 {
            let (depth, width) = (1 + seed as usize % 4, 1 + seed as usize % 3);
            let levels = levels(seed, depth, 3);
            let all = all_paths(&levels, width);
            for nodes in [0, 1, 2, 5, 9, 200] {
                let limits = ProductLimits {
                    nodes,
                    width,
                    min_score: 0.0,
                };
                let draft = tree(&levels, &limits);
                assert_eq!(draft.scores, all[..nodes.min(all.len())]);
                let mut seen = HashSet::new();
                for node in 0..draft.len() {
                    let parent = draft.parents[node].map(usize::from);
                    assert!(parent.is_none_or(|parent| parent < node));
                    let above = parent.map_or(1.0, |parent| draft.scores[parent]);
                    let depth =
                        std::iter::successors(parent, |&at| draft.parents[at].map(usize::from));
                    let level = &levels[depth.count()];
                    let found = level.iter().find(|c| c.token == draft.tokens[node]);
                    assert_eq!(draft.scores[node], above * found.unwrap().prob);
                    assert!(seen.insert((parent, draft.tokens[node])), "twice");
                }
            }
            let min_score = all[all.len() / 2];
            let limits = ProductLimits {
                nodes: 1000,
                width,
                min_score,
            };
            let draft = tree(&levels, &limits);
            assert!(draft.scores.iter().all(|&score| score >= min_score));
            let wanted = all.iter().filter(|&&score| score >= min_score);
            assert_eq!(draft.len(), wanted.count());
        }
    }
}
