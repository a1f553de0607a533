//! Drafts, and the interface of drafters.

use crate::error::Result;
use crate::kernels::sample::DeviceRow;
use crate::model::{MAX_TREE_NODES, is_chain};
use crate::sampling::{Dist, Sampler};
use candle_core::Tensor;
use std::ops::Range;

/// Identifies a sequence while it lives; later arrivals have larger ids.
pub type SeqId = u64;

/// The distribution that a draft token was drawn from: q of the acceptance rule.
#[derive(Debug, Clone, PartialEq)]
pub enum DraftDist {
    Host(Dist),
    /// In the memory of a GPU: call [`Draft::to_host`] before reading it.
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

/// Guessed continuations of one sequence: a tree of tokens, ordered so that parents come before
/// their children. A chain is a tree in which every node has at most one child.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    pub tokens: Vec<u32>,
    /// Index of the node before each token; `None` = the token follows the sequence's last token.
    pub parents: Vec<Option<u16>>,
    /// The distribution each token was drawn from.
    pub dists: Vec<DraftDist>,
}

impl Draft {
    /// Adds a token to the end of a chain.
    pub fn push(&mut self, token: u32, dist: impl Into<DraftDist>) {
        self.parents
            .push(self.tokens.len().checked_sub(1).map(|last| last as u16));
        self.tokens.push(token);
        self.dists.push(dist.into());
    }

    /// The draft with its distributions in the memory of the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_host(&self) -> Result<Self> {
        let mut draft = self.clone();
        for dist in &mut draft.dists {
            if let DraftDist::Device(row) = dist {
                *dist = Dist::Dense(row.read()?).into();
            }
        }
        Ok(draft)
    }

    /// Whether any token was drawn from probabilities in host memory.
    pub fn has_host_dists(&self) -> bool {
        let host = |q: &DraftDist| matches!(q, DraftDist::Host(Dist::Dense(_)));
        self.dists.iter().any(host)
    }

    /// Cuts the draft before the first node that cannot be verified: after `length` or
    /// [`MAX_TREE_NODES`] nodes, at an id not below `vocab_size`, or at a parent that does not come
    /// before its node.
    pub fn end_where_invalid(&mut self, length: usize, vocab_size: usize) {
        let nodes = self.tokens.iter().zip(&self.parents).enumerate();
        let is_valid = |&(node, (&id, parent)): &(usize, (&u32, &Option<u16>))| {
            let follows = parent.is_none_or(|parent| usize::from(parent) < node);
            follows && (id as usize) < vocab_size
        };
        let mut len = nodes.take(length).take_while(is_valid).count();
        if !is_chain(&self.parents[..len]) {
            len = len.min(MAX_TREE_NODES);
        }
        self.tokens.truncate(len);
        self.parents.truncate(len);
        self.dists.truncate(len);
    }

    /// Number of draft tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether each node follows the one before it.
    pub fn is_chain(&self) -> bool {
        is_chain(&self.parents)
    }
}

/// A request for a draft of one sequence.
#[derive(Debug)]
pub struct DraftRequest<'a> {
    pub id: SeqId,
    /// All tokens of the sequence; the draft continues after the last.
    pub tokens: &'a [u32],
    /// Draft tokens wanted, at least 1.
    pub length: usize,
    /// Has state for `tokens`. A drafter may push the tokens it drafts and leave them there: the
    /// caller removes them.
    pub sampler: &'a mut Sampler,
}

/// The committed tokens of a sequence after a step.
#[derive(Debug, Clone)]
pub struct Committed<'a> {
    pub id: SeqId,
    /// All of its tokens.
    pub tokens: &'a [u32],
    /// Positions that the target computed in this step and that are committed: pending tokens, then
    /// accepted ones. The token that the step added itself is not included: it is pending.
    pub new: Range<usize>,
    /// The target's hidden states there, `[new.len(), taps * hidden_size]`; see
    /// [`Output::hidden`](crate::model::Output::hidden). `None` if [`Drafter::taps`] is empty. It
    /// may be a view of a larger tensor: copy what is kept for long.
    pub hidden: Option<Tensor>,
}

/// Total cost of drafting, for the cost coefficient c of Leviathan et al. 2023, section 3.2.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftCost {
    /// Draft forwards that contained no prompt rows.
    pub steps: u64,
    /// Wall time of those, seconds.
    pub step_seconds: f64,
}

/// Proposes continuations. A draft is advice: it may be shorter than requested or empty, and only
/// speed depends on it.
pub trait Drafter: Send {
    /// Returns one draft per request, in order, each of at most `length` tokens; ids are distinct.
    /// The caller cuts off what cannot be verified: see [`Draft::end_where_invalid`]. May keep
    /// state for the ids it sees until [`Drafter::forget`].
    ///
    /// # Errors
    /// Only if the device failed: return an empty draft when there is no guess, no room, or an
    /// unknown id. After an error the state for these ids is not specified; the caller forgets
    /// them.
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>>;

    /// Layers of the target whose hidden states [`Drafter::observe`] needs, as in
    /// [`Taps::layers`](crate::model::Taps); they never change.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// Called once per step, after verification, for every sequence of the step that may ever
    /// request a draft: first with its prompt, chunk by chunk, then with accepted tokens. Until an
    /// id is forgotten, each of its positions comes once and in order. When a draft is requested,
    /// all tokens but the last have come, or fewer if the step computes the end of a preempted
    /// sequence again. Roll back what was computed for rejected tokens.
    fn observe(&mut self, _committed: &[Committed<'_>]) {}

    /// The sequence ended, was preempted, or was part of a failed call of `propose`: free all state
    /// held for it. After a preemption it is observed from its start again; after a failure its
    /// earlier positions do not come again.
    fn forget(&mut self, _id: SeqId) {}

    /// Cost of drafting since the start.
    fn cost(&self) -> DraftCost {
        DraftCost::default()
    }

    /// Fraction of the drafter's own pool in use, 0 to 1.
    fn kv_usage(&self) -> f64 {
        0.0
    }

    /// Checks that its pool holds exactly the sequences it has state for.
    ///
    /// # Errors
    /// The inconsistency found.
    fn check_invariants(&self) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_ends_before_the_first_node_that_cannot_be_verified() {
        let len = |nodes: &[(u32, Option<u16>)], length| {
            let mut draft = Draft::default();
            for &(token, parent) in nodes {
                draft.push(token, Dist::Point(token));
                draft.parents[draft.tokens.len() - 1] = parent;
            }
            draft.end_where_invalid(length, 10);
            assert_eq!(draft.parents.len(), draft.len());
            assert_eq!(draft.dists.len(), draft.len());
            draft.len()
        };
        let tree = [(1, None), (2, None), (9, Some(1)), (3, Some(0))];
        assert_eq!(len(&tree, 4), 4);
        assert_eq!(len(&tree, 3), 3);
        let with = |node| [tree[0], tree[1], node, tree[3]];
        assert_eq!(len(&with((10, Some(1))), 4), 2, "an id that nobody knows");
        assert_eq!(len(&with((9, Some(2))), 4), 2, "its own parent");
        assert_eq!(len(&with((9, Some(3))), 4), 2, "a parent that comes later");
        let chain: Vec<_> = (0..70u16).map(|i| (1, i.checked_sub(1))).collect();
        assert_eq!(len(&chain, 70), 70);
        let star: Vec<_> = (0..70u16).map(|i| (1, (i > 0).then_some(0))).collect();
        assert_eq!(len(&star, 70), MAX_TREE_NODES);
    }
}
