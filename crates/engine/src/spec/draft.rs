//! Drafts.

mod interface;

use foretoken_core::error::Result;
use foretoken_core::model::{MAX_TREE_NODES, is_chain};
use foretoken_core::sampling::Dist;
use foretoken_kernels::sample::DeviceRow;
use std::borrow::Cow;

pub use interface::{
    CacheScope, Committed, DraftContext, DraftCost, DraftRequest, Forecast, Proposal, SeqId,
};

/// The distribution that a draft token was drawn from: q of the acceptance rule.
#[derive(Debug, Clone, PartialEq)]
pub enum DraftDist {
    /// The distribution is in the memory of the host.
    Host(Dist),
    /// The distribution is in the memory of a GPU: call [`Draft::to_host`] before reading it.
    Device(DeviceRow),
}

impl From<Dist> for DraftDist {
    fn from(dist: Dist) -> Self {
        Self::Host(dist)
    }
}

impl DraftDist {
    /// The distribution.
    ///
    /// # Panics
    /// If it is in the memory of a GPU.
    pub fn on_host(&self) -> &Dist {
        match self {
            Self::Host(dist) => dist,
            Self::Device(_) => panic!("a distribution on the device is copied before it is used"),
        }
    }
}

/// Where a draft token comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The request's grammar, or the limit on its thought, which allows no other token.
    Grammar,
    /// A draft model, or the target's own layers.
    Model,
    /// Earlier tokens of the same request.
    Own,
    /// The output that the request predicts.
    Prediction,
    /// Answers to other requests.
    Pool,
    /// The target's best candidates where it last saw the same token.
    Recycled,
    /// Tokens that the target wrote after guessed tokens beside the text.
    Lookahead,
}

impl Source {
    /// All sources.
    pub const ALL: [Self; 7] = [
        Self::Grammar,
        Self::Model,
        Self::Own,
        Self::Prediction,
        Self::Pool,
        Self::Recycled,
        Self::Lookahead,
    ];

    /// The source's name in metrics and replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grammar => "grammar",
            Self::Model => "model",
            Self::Own => "own",
            Self::Prediction => "prediction",
            Self::Pool => "pool",
            Self::Recycled => "recycled",
            Self::Lookahead => "lookahead",
        }
    }
}

/// Guessed continuations of one sequence: a tree of tokens, ordered so that parents come before
/// their children. A chain is a tree in which every node has at most one child.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Draft {
    /// Token ids, one per node.
    pub tokens: Vec<u32>,
    /// Index of the node before each token; `None` = the token follows the sequence's last token.
    pub parents: Vec<Option<u16>>,
    /// Estimated probability, 0 to 1, that the node and all of its ancestors stand.
    pub scores: Vec<f32>,
    /// The source of each token.
    pub sources: Vec<Source>,
    /// The distribution each token was drawn from. Only for sampled requests under the
    /// [rejection rule](foretoken_core::sampling::Acceptance::Rejection); empty otherwise, and if no model predicted the
    /// tokens.
    pub dists: Vec<DraftDist>,
    /// A node that [`Draft::end_where_invalid`] cut off because the target does not have the id that was
    /// drawn. The rejection rule rejects it like any other, without a row.
    pub rejected: Option<RejectedNode>,
}

/// A node whose id the target does not have.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectedNode {
    /// The node before it.
    pub parent: Option<u16>,
    /// The distribution that its token was drawn from.
    pub dist: DraftDist,
    /// Whether the draft was a chain before it was cut.
    pub of_chain: bool,
}

impl Draft {
    /// Adds a token to the end of a chain.
    pub fn push(&mut self, token: u32, score: f32, source: Source) {
        let parent = self.tokens.len().checked_sub(1).map(|last| last as u16);
        self.add(token, parent, score, source);
    }

    /// Adds a token after node `parent`; returns its node.
    pub fn add(&mut self, token: u32, parent: Option<u16>, score: f32, source: Source) -> u16 {
        self.tokens.push(token);
        self.parents.push(parent);
        self.scores.push(score);
        self.sources.push(source);
        (self.tokens.len() - 1) as u16
    }

    /// A chain of `tokens` that are certain to stand, and this draft after its end.
    pub fn after_forced(self, tokens: &[u32]) -> Self {
        if tokens.is_empty() {
            return self;
        }
        let mut draft = Self::default();
        for &token in tokens {
            draft.push(token, 1.0, Source::Grammar);
        }
        if !self.dists.is_empty() {
            let points = tokens.iter().map(|&token| Dist::Point(token).into());
            draft.dists = points.chain(self.dists).collect();
        }
        let end = tokens.len() as u16;
        let moved = |parent: Option<u16>| Some(parent.map_or(end - 1, |parent| parent + end));
        draft.parents.extend(self.parents.into_iter().map(moved));
        draft.tokens.extend(self.tokens);
        draft.scores.extend(self.scores);
        draft.sources.extend(self.sources);
        draft
    }

    /// Removes the nodes for which `keep` is false, and all that descend from them.
    pub fn retain(&mut self, keep: &[bool]) {
        let mut places: Vec<Option<u16>> = Vec::with_capacity(self.len());
        let old = std::mem::take(self);
        for (node, &keep) in keep.iter().enumerate() {
            let parent = old.parents[node].map(|parent| places[usize::from(parent)]);
            let kept = keep && parent != Some(None);
            places.push(kept.then(|| {
                self.dists.extend(old.dists.get(node).cloned());
                let (score, source) = (old.scores[node], old.sources[node]);
                self.add(old.tokens[node], parent.flatten(), score, source)
            }));
        }
    }

    /// The distribution that token `node` was drawn from.
    pub fn dist(&self, node: usize) -> Cow<'_, DraftDist> {
        let point = || Cow::Owned(Dist::Point(self.tokens[node]).into());
        self.dists.get(node).map_or_else(point, Cow::Borrowed)
    }

    /// The nodes after `node`; `None` = after the sequence's last token.
    pub fn children(&self, node: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        let after = node.map_or(0, |node| node + 1)..self.len();
        after.filter(move |&child| self.parents[child].map(usize::from) == node)
    }

    /// The nodes from the first level down to `node`; none for the sequence's last token.
    pub fn path(&self, node: Option<usize>) -> Vec<usize> {
        let above = |&node: &usize| self.parents[node].map(usize::from);
        let mut path: Vec<usize> = std::iter::successors(node, above).collect();
        path.reverse();
        path
    }

    /// The tokens of the [`path`](Self::path) to `node`.
    pub fn path_tokens(&self, node: Option<usize>) -> Vec<u32> {
        let path = self.path(node).into_iter();
        path.map(|node| self.tokens[node]).collect()
    }

    /// The draft with its distributions in the memory of the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_host(&self) -> Result<Self> {
        let mut draft = self.clone();
        let rejected = draft.rejected.as_mut().map(|node| &mut node.dist);
        for dist in draft.dists.iter_mut().chain(rejected) {
            if let DraftDist::Device(row) = dist {
                *dist = Dist::Dense(row.read()?).into();
            }
        }
        Ok(draft)
    }

    /// Whether only the host can verify it by the rejection rule: a token was drawn from probabilities in
    /// its memory, or is [rejected](Self::rejected) already.
    pub fn needs_host(&self) -> bool {
        let host = |q: &DraftDist| matches!(q, DraftDist::Host(Dist::Dense(_)));
        self.rejected.is_some() || self.dists.iter().any(host)
    }

    /// Cuts the draft before the first node that cannot be verified: after `nodes` or
    /// [`MAX_TREE_NODES`] nodes, beyond depth `length`, at an id not below `vocab_size`, or at a parent that
    /// does not come before its node.
    ///
    /// Whether there is an id to cut at depends on what was drawn, so under the rejection rule the cut
    /// itself would favour some tokens: the node becomes the [rejected](Self::rejected) one.
    pub fn end_where_invalid(&mut self, nodes: usize, length: usize, vocab_size: usize) {
        let mut depths: Vec<usize> = Vec::with_capacity(self.len());
        for (&id, &parent) in self.tokens.iter().zip(&self.parents).take(nodes) {
            let above = parent.map_or(Some(0), |parent| depths.get(usize::from(parent)).copied());
            let Some(above) = above.filter(|&above| above < length) else {
                break;
            };
            if id as usize >= vocab_size {
                let all = &self.parents[..self.len().min(nodes)];
                self.rejected = (self.dists.get(depths.len())).map(|dist| RejectedNode {
                    parent,
                    dist: dist.clone(),
                    of_chain: is_chain(all),
                });
                break;
            }
            depths.push(above + 1);
        }
        let mut len = depths.len();
        if !is_chain(&self.parents[..len]) {
            len = len.min(MAX_TREE_NODES);
        }
        self.tokens.truncate(len);
        self.parents.truncate(len);
        self.scores.truncate(len);
        self.sources.truncate(len);
        self.dists.truncate(len);
    }

    /// The draft without the distributions that its tokens were drawn from.
    pub fn without_dists(mut self) -> Self {
        self.dists = Vec::new();
        self.rejected = None;
        self
    }

    /// Number of draft tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the draft has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether each node follows the one before it.
    pub fn is_chain(&self) -> bool {
        is_chain(&self.parents)
    }

    /// Whether it was drawn as a chain, which does not depend on the ids that were drawn.
    pub fn is_drawn_as_chain(&self) -> bool {
        self.is_chain() && self.rejected.as_ref().is_none_or(|node| node.of_chain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(nodes: &[(u32, Option<u16>)]) -> Draft {
        let mut draft = Draft::default();
        for &(token, parent) in nodes {
            draft.add(token, parent, 0.5, Source::Own);
        }
        draft
    }

    #[test]
    fn a_draft_ends_before_the_first_node_that_cannot_be_verified() {
        let len = |nodes: &[(u32, Option<u16>)], most| {
            let mut draft = draft(nodes);
            draft.end_where_invalid(most, 70, 10);
            let others = [draft.parents.len(), draft.scores.len(), draft.sources.len()];
            assert_eq!(others, [draft.len(); 3]);
            draft.len()
        };
        let tree = [(1, None), (2, None), (9, Some(1)), (3, Some(0))];
        assert_eq!(len(&tree, 4), 4);
        assert_eq!(len(&tree, 3), 3);
        let with = |node| [tree[0], tree[1], node, tree[3]];
        assert_eq!(len(&with((10, Some(1))), 4), 2, "an id that nobody knows");
        assert_eq!(len(&with((9, Some(2))), 4), 2, "its own parent");
        assert_eq!(len(&with((9, Some(3))), 4), 2, "a parent that comes later");
        let mut deep = draft(&tree);
        deep.end_where_invalid(4, 1, 10);
        assert_eq!(deep.len(), 2);
        let chain: Vec<_> = (0..70u16).map(|i| (1, i.checked_sub(1))).collect();
        assert_eq!(len(&chain, 70), 70);
        let star: Vec<_> = (0..70u16).map(|i| (1, (i > 0).then_some(0))).collect();
        assert_eq!(len(&star, 70), MAX_TREE_NODES);
    }

    #[test]
    fn a_node_goes_with_its_ancestors() {
        let tree = [
            (1, None),
            (2, None),
            (3, Some(1)),
            (4, Some(0)),
            (5, Some(2)),
            (6, Some(3)),
        ];
        let mut kept = draft(&tree);
        kept.retain(&[false, true, true, true, true, true]);
        assert_eq!(kept.tokens, [2, 3, 5]);
        assert_eq!(kept.parents, [None, Some(0), Some(1)]);
        let mut kept = draft(&tree);
        kept.retain(&[true, false, true, true, true, false]);
        assert_eq!(
            (kept.tokens, kept.parents),
            (vec![1, 4], vec![None, Some(0)])
        );
        let children = |node| draft(&tree).children(node).collect::<Vec<_>>();
        assert_eq!((children(None), children(Some(0))), (vec![0, 1], vec![3]));
    }
}
