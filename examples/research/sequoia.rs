//! The tree that Sequoia would draft (Chen et al. 2024, arXiv 2402.12374, section 4.1).

use serde::Serialize;

/// A tree of draft tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BestTree {
    /// Number of the tree's draft tokens.
    pub nodes: usize,
    /// Expected tokens of a round: the accepted ones and the target's own.
    pub tokens: f64,
    /// Nodes of each level.
    pub levels: Vec<usize>,
}

/// The best tree of at most `nodes` draft tokens that is at most `depth` deep, if the child of rank k of an accepted
/// token is accepted with probability `rates[k]`: the one of the largest expected number of accepted tokens. There are no
/// more siblings than `rates`.
///
/// The dynamic program goes over sizes, depths and siblings: the best children from rank k on for n nodes are, for the
/// best m, a child of rank k with a tree of m nodes, and the best children from rank k + 1 on for the others.
pub fn best_tree(nodes: usize, depth: usize, rates: &[f64]) -> BestTree {
    let program = Program::solve(nodes, depth, rates);
    let mut levels = vec![0; depth];
    program.count(nodes, depth, 0, &mut levels);
    levels.retain(|&count| count > 0);
    BestTree {
        nodes: levels.iter().sum(),
        tokens: 1.0 + program.best(nodes, depth, 0),
        levels,
    }
}

/// The best children, by depth, by the rank of the first, and by the number of nodes in all.
struct Program {
    /// Expected accepted tokens, and the nodes of the first child's tree, itself included; 0 = there is no further child.
    solved: Vec<Vec<Vec<(f64, usize)>>>,
    ranks: usize,
}

impl Program {
    fn solve(nodes: usize, depth: usize, rates: &[f64]) -> Self {
        let mut program = Self {
            solved: Vec::with_capacity(depth + 1),
            ranks: rates.len(),
        };
        for level in 0..=depth {
            // By rank, the last first.
            let mut by_rank = vec![vec![(0.0, 0); nodes + 1]];
            for rate in rates.iter().rev().filter(|_| level > 0) {
                let rest = &by_rank[by_rank.len() - 1];
                let best = |total: usize| {
                    let mut best = (0.0, 0);
                    for first in 1..=total {
                        let below = program.best(first - 1, level - 1, 0);
                        let value = rate * (1.0 + below) + rest[total - first].0;
                        if value > best.0 {
                            best = (value, first);
                        }
                    }
                    best
                };
                let solved = (0..=nodes).map(best).collect();
                by_rank.push(solved);
            }
            by_rank.reverse();
            program.solved.push(by_rank);
        }
        program
    }

    /// The best of `nodes` nodes within `depth` levels whose first one has this rank.
    fn entry(&self, nodes: usize, depth: usize, rank: usize) -> (f64, usize) {
        if depth == 0 || rank >= self.ranks {
            return (0.0, 0);
        }
        self.solved[depth][rank][nodes]
    }

    fn best(&self, nodes: usize, depth: usize, rank: usize) -> f64 {
        self.entry(nodes, depth, rank).0
    }

    /// Adds the nodes of each level to `levels`, whose last `depth` are those of this tree.
    fn count(&self, nodes: usize, depth: usize, rank: usize, levels: &mut [usize]) {
        let (_, first) = self.entry(nodes, depth, rank);
        if first > 0 {
            let level = levels.len() - depth;
            levels[level] += 1;
            self.count(first - 1, depth - 1, 0, levels);
            self.count(nodes - first, depth, rank + 1, levels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretoken::sampling::mix;

    /// A tree by its children's trees, the first rank first.
    #[derive(Clone)]
    struct Tree(Vec<Tree>);

    /// All lists of at most `siblings` trees with `nodes` nodes together, each at most `depth` deep.
    fn forests(nodes: usize, depth: usize, siblings: usize, ranks: usize) -> Vec<Vec<Tree>> {
        if nodes == 0 {
            return vec![Vec::new()];
        }
        let mut all = Vec::new();
        if depth == 0 || siblings == 0 {
            return all;
        }
        for first in 1..=nodes {
            for below in forests(first - 1, depth - 1, ranks, ranks) {
                for rest in forests(nodes - first, depth, siblings - 1, ranks) {
                    all.push([&[Tree(below.clone())][..], &rest].concat());
                }
            }
        }
        all
    }

    fn expected(forest: &[Tree], rates: &[f64]) -> f64 {
        let of = |(tree, rate): (&Tree, &f64)| rate * (1.0 + expected(&tree.0, rates));
        forest.iter().zip(rates).map(of).sum()
    }

    /// The program finds what a search through all trees finds.
    #[test]
    fn no_tree_is_better() {
        for seed in 0..40_u64 {
            let mut rates: Vec<f64> = (0..3)
                .map(|rank| (mix(seed * 3 + rank) >> 11) as f64 / (1_u64 << 53) as f64)
                .collect();
            rates.sort_by(|a, b| b.total_cmp(a));
            // Siblings exclude each other.
            let sum: f64 = rates.iter().sum();
            rates
                .iter_mut()
                .for_each(|rate| *rate *= 0.9 / sum.max(1.0));
            for (nodes, depth) in [(1, 1), (3, 2), (5, 3), (6, 4), (7, 7), (7, 2)] {
                let sizes = 0..=nodes;
                let all = sizes.flat_map(|size| forests(size, depth, 3, 3));
                let best = all
                    .map(|forest| expected(&forest, &rates))
                    .fold(0.0, f64::max);
                let found = best_tree(nodes, depth, &rates);
                assert!(
                    (found.tokens - 1.0 - best).abs() < 1e-12,
                    "{rates:?}: {found:?}, {best}"
                );
                assert!(found.nodes <= nodes && found.levels.len() <= depth);
            }
        }
    }

    #[test]
    fn known_trees() {
        // Without siblings a chain, as deep as it may be.
        let chain = best_tree(5, 8, &[0.5]);
        assert_eq!(chain.levels, [1; 5]);
        assert!((chain.tokens - (1.0 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.03125)).abs() < 1e-12);
        assert_eq!(best_tree(5, 3, &[0.5]).levels, [1; 3]);
        // What is hardly ever accepted has siblings rather than children.
        assert_eq!(best_tree(3, 8, &[0.2, 0.15, 0.1]).levels, [3]);
        assert_eq!(best_tree(4, 8, &[0.9, 0.05]).levels, [1; 4]);
        assert!(best_tree(4, 8, &[]).levels.is_empty());
    }
}
