//! What drafters give and are asked.

use crate::error::Result;
use crate::sampling::{Dist, SamplingParams};

/// Names a sequence for as long as it lives; later arrivals have larger ids.
pub type SeqId = u64;

/// Guessed continuations of one sequence: a tree of tokens, in an order in which parents come
/// before their children. A chain is a tree whose every node has one child.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    pub tokens: Vec<u32>,
    /// Index of the node before each token; `None` = it follows the sequence's last token.
    pub parents: Vec<Option<u16>>,
    /// What each token was drawn from: q of the acceptance rule.
    pub dists: Vec<Dist>,
}

impl Draft {
    /// Adds a token to the end of a chain.
    pub fn push(&mut self, token: u32, dist: Dist) {
        self.parents
            .push(self.tokens.len().checked_sub(1).map(|last| last as u16));
        self.tokens.push(token);
        self.dists.push(dist);
    }

    /// The draft with its distributions in the memory of the host.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn to_host(&self) -> Result<Self> {
        Ok(Self {
            dists: self
                .dists
                .iter()
                .map(Dist::to_host)
                .collect::<Result<_>>()?,
            ..self.clone()
        })
    }

    /// Number of draft tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether every node has at most one child, in order.
    pub fn is_chain(&self) -> bool {
        self.parents
            .iter()
            .enumerate()
            .all(|(i, parent)| parent.map(usize::from) == i.checked_sub(1))
    }
}

/// A request for one draft.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    pub id: SeqId,
    /// All tokens of the sequence; the draft continues after the last.
    pub tokens: &'a [u32],
    /// How many of them are prompt.
    pub prompt_len: usize,
    /// Draft tokens wanted, at least 1.
    pub length: usize,
    pub params: &'a SamplingParams,
}

/// What became of a sequence after verification.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    pub id: SeqId,
    /// All tokens that are certain now.
    pub tokens: &'a [u32],
}

/// What drafting cost so far, for the cost coefficient c of Leviathan et al. 2023, section 3.2.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftCost {
    /// Forwards of drafts that had no prompt in them.
    pub steps: u64,
    /// Wall time of those.
    pub step_seconds: f64,
}

/// Guesses continuations. A draft is advice: it may be shorter than asked or empty, and nothing
/// but speed depends on it.
pub trait Drafter: Send {
    /// One draft for each ask, in order, each at most `length` tokens. May keep state for the ids
    /// it sees until [`Drafter::forget`].
    ///
    /// # Errors
    /// Only if the device failed; having no idea or no room is an empty draft.
    fn propose(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Draft>>;

    /// Called once a round, after verification, for every id that was asked about in it: roll back
    /// what was computed for rejected tokens.
    fn observe(&mut self, _kept: &[Kept<'_>]) {}

    /// The sequence has ended or was preempted: free all that is held for it.
    fn forget(&mut self, _id: SeqId) {}

    /// Cost of drafting since the start.
    fn cost(&self) -> DraftCost {
        DraftCost::default()
    }

    /// Fraction of the drafter's own pool in use, 0 to 1.
    fn kv_usage(&self) -> f64 {
        0.0
    }

    /// Called when no sequence is alive: everything must be free.
    ///
    /// # Errors
    /// What is not.
    fn check_idle(&self) -> Result<(), String> {
        Ok(())
    }
}
