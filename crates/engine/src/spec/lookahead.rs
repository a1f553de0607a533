//! Drafting without a model: lookahead decoding (Fu et al. 2024, arXiv 2402.02057).
//!
//! The target runs parallel Jacobi iterations beside the text: a window of guessed tokens at the next positions, each
//! with the guesses of the last iterations at the positions after it. Every iteration adds the target's own choice to
//! each of these trajectories, so that it becomes an n-gram that the target wrote, though after guessed tokens.
//! N-grams that begin with the text's last token are the draft.
//!
//! The paper's attention mask of the window is that of a tree: the oldest tokens are a chain after the text, and
//! each has its trajectory as a branch (section 4.1, figure 2b; its lookahead branch). So window and draft are one tree.

use super::draft::{Committed, Draft, DraftRequest, SeqId, Source};
use super::drafter::Drafter;
use super::estimate::Estimator;
use foretoken_core::error::Result;
use foretoken_core::sampling::mix;
use std::collections::{HashMap, HashSet, VecDeque};

/// Tokens of an n-gram: the paper's N.
const NGRAM: usize = 4;
/// Tokens of a trajectory in the window.
const LEVELS: usize = NGRAM - 1;
/// Trajectories at most: the paper's W.
const MAX_COLUMNS: usize = 15;
/// N-grams that are kept of a text; the oldest are forgotten.
const MAX_NGRAMS: usize = 8192;
/// Probability that the token of an n-gram stands, before any was seen.
const PRIOR: f32 = 0.3;
/// Tokens that a row of the window is expected to win before that is known, and the number of rows for which
/// this counts.
const PRIOR_WORTH: f64 = 0.2;
const PRIOR_ROWS: f64 = 64.0;
/// The weight of the past in the worth of a row, by rows.
const DECAY: f64 = 0.999;

/// The drafter of lookahead decoding. It drafts trees: a request with chains gets none.
///
/// A row of the window wins nothing at once, but n-grams for later. Its score is what rows of the window have won
/// so far, each, in accepted tokens; so the budget runs the window only while it pays.
#[derive(Debug)]
pub struct Lookahead {
    texts: HashMap<SeqId, Trajectories>,
    estimator: Estimator,
    /// Averages over rows of the window: accepted tokens, and rows.
    won: f64,
    rows: f64,
}

/// What is known of a text.
#[derive(Debug, Default)]
struct Trajectories {
    /// The guesses of the last iterations, oldest first, at the positions i + 1, i + 2, ... after the text's last token.
    window: Vec<[u32; LEVELS]>,
    /// N-grams of the text, the latest last.
    ngrams: VecDeque<[u32; NGRAM]>,
    /// The last draft.
    proposal: Option<Proposal>,
}

#[derive(Debug)]
struct Proposal {
    /// Tokens of the sequence then, and the last of them.
    len: usize,
    last: u32,
    /// Columns of the window in it.
    columns: usize,
    /// The rest of its n-grams.
    candidates: Vec<[u32; LEVELS]>,
}

impl Default for Lookahead {
    fn default() -> Self {
        Self {
            texts: HashMap::new(),
            estimator: Estimator::new(PRIOR),
            won: PRIOR_WORTH * PRIOR_ROWS,
            rows: PRIOR_ROWS,
        }
    }
}

impl Trajectories {
    /// Fills the window with tokens of the text, drawn by a hash: the paper begins with random ones.
    fn fill(&mut self, tokens: &[u32]) {
        let guess = |place: usize| tokens[mix(place as u64) as usize % tokens.len()];
        let column = |i: usize| std::array::from_fn(|level| guess(i * LEVELS + level));
        self.window = (0..MAX_COLUMNS).map(column).collect();
    }

    /// Tokens that followed `token` in the latest n-grams that begin with it, at most `count` different continuations.
    fn candidates(&self, token: u32, count: usize) -> Vec<[u32; LEVELS]> {
        let mut found: Vec<[u32; LEVELS]> = Vec::new();
        let mut latest = self.ngrams.iter().rev();
        while found.len() < count
            && let Some(&[_, ref rest @ ..]) = latest.find(|ngram| ngram[0] == token)
        {
            if !found.contains(rest) {
                found.push(*rest);
            }
        }
        found
    }

    /// The path of tokens to the last one of a trajectory.
    fn path(&self, column: usize) -> impl Iterator<Item = u32> + '_ {
        let before = self.window[..=column].iter().map(|column| column[0]);
        before.chain(self.window[column][1..].iter().copied())
    }

    /// Takes the target's choices after the trajectories that were verified.
    fn iterate(&mut self, columns: usize, verified: &VerifiedRows<'_>) {
        let choice = |column| {
            let path: Vec<u32> = self.path(column).collect();
            let rows = verified.rows(&path);
            let last = rows.get(path.len().checked_sub(1)?)?;
            verified.0.candidates[*last].1.first().copied()
        };
        let next: Vec<Option<u32>> = (0..columns).map(choice).collect();
        for (column, next) in self.window.iter_mut().zip(next) {
            let Some(next) = next else { continue };
            let mut ngram = [next; NGRAM];
            ngram[..LEVELS].copy_from_slice(column);
            column.copy_from_slice(&ngram[1..]);
            if self.ngrams.len() == MAX_NGRAMS {
                self.ngrams.pop_front();
            }
            self.ngrams.push_back(ngram);
        }
    }
}

/// The rows that a step verified, with the target's choices after them.
struct VerifiedRows<'a>(&'a Committed<'a>);

impl VerifiedRows<'_> {
    /// The row after the sequence's last token is that of the root; node i is row i + 1.
    fn child(&self, row: usize, token: u32) -> Option<usize> {
        let Self(step) = self;
        let is_child = |&child: &usize| {
            let parent = step.parents[child - 1].map_or(0, |parent| usize::from(parent) + 1);
            step.candidates[child].0 == token && parent == row
        };
        let rows = step.candidates.len().min(step.parents.len() + 1);
        (row + 1..rows).find(is_child)
    }

    /// The rows of the tokens of `path`, as far as it was verified.
    fn rows(&self, path: &[u32]) -> Vec<usize> {
        let mut rows = Vec::with_capacity(path.len());
        for &token in path {
            let Some(row) = self.child(rows.last().copied().unwrap_or(0), token) else {
                break;
            };
            rows.push(row);
        }
        rows
    }
}

/// A draft in which equal paths are one.
struct Trie<'a> {
    draft: Draft,
    request: &'a DraftRequest<'a>,
}

impl Trie<'_> {
    /// The node of `token` after `parent`; `None` if there is no room for it.
    fn add(&mut self, parent: Option<u16>, token: u32, score: f32) -> Option<u16> {
        let draft = &mut self.draft;
        let siblings: Vec<usize> = draft.children(parent.map(usize::from)).collect();
        if let Some(&node) = siblings.iter().find(|&&node| draft.tokens[node] == token) {
            draft.scores[node] = draft.scores[node].max(score);
            return Some(node as u16);
        }
        if siblings.len() == self.request.max_siblings() || draft.len() == self.request.nodes {
            return None;
        }
        Some(draft.add(token, parent, score, Source::Lookahead))
    }
}

impl Lookahead {
    /// Worth of a row of the window, in tokens.
    fn worth(&self) -> f32 {
        (self.won / self.rows).clamp(0.0, 1.0) as f32
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Draft {
        let worth = self.worth();
        let text = self.texts.entry(request.id).or_default();
        let (Some(&last), 2..) = (request.tokens.last(), request.max_siblings()) else {
            return Draft::default();
        };
        if text.window.is_empty() {
            text.fill(request.tokens);
        }
        let mut trie = Trie {
            draft: Draft::default(),
            request,
        };
        // Two fifths of the rows are for n-grams, in whole ones, and the rest for the window.
        let count = (2 * request.nodes / 5 / LEVELS).min(request.max_siblings() - 1);
        let candidates = text.candidates(last, count);
        for (rank, candidate) in candidates.iter().enumerate() {
            let (mut parent, mut score) = (None, 1.0);
            for (depth, &token) in candidate.iter().take(request.length).enumerate() {
                score *= self
                    .estimator
                    .probability(&[depth as u8, rank.min(3) as u8]);
                parent = trie.add(parent, token, score);
                if parent.is_none() {
                    break;
                }
            }
        }
        let room = (request.nodes - trie.draft.len()) / LEVELS;
        // The last column's trajectory goes as deep as the draft may.
        let deepest = (request.length + 1).saturating_sub(LEVELS);
        let columns = room.min(deepest).min(MAX_COLUMNS);
        // The chain comes first: it takes the last place among the siblings.
        let mut spine = Vec::new();
        for column in &text.window[..columns] {
            let parent = spine.last().copied();
            let Some(node) = trie.add(parent, column[0], worth) else {
                break;
            };
            spine.push(node);
        }
        for (&node, column) in spine.iter().zip(&text.window) {
            let mut parent = Some(node);
            for &token in &column[1..] {
                parent = parent.and_then(|parent| trie.add(Some(parent), token, worth));
            }
        }
        text.proposal = Some(Proposal {
            len: request.tokens.len(),
            last,
            columns: spine.len(),
            candidates,
        });
        trie.draft
    }

    /// Learns how often n-grams stand from the tokens that came, whether they were verified or not.
    fn learn(estimator: &mut Estimator, proposal: &Proposal, came: &[u32]) {
        for (rank, candidate) in proposal.candidates.iter().enumerate() {
            for (depth, (token, came)) in candidate.iter().zip(came).enumerate() {
                let features = [depth as u8, rank.min(3) as u8];
                estimator.note(&features, token == came);
                if token != came {
                    break;
                }
            }
        }
    }
}

impl Drafter for Lookahead {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let draft = |request: &mut DraftRequest<'_>| self.draft(request);
        Ok(requests.iter_mut().map(draft).collect())
    }

    fn candidates(&self) -> usize {
        1
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for step in committed {
            let Some(text) = self.texts.get_mut(&step.id) else {
                continue;
            };
            let new = |proposal: &mut Proposal| proposal.len < step.tokens.len();
            let Some(proposal) = text.proposal.take_if(new) else {
                continue;
            };
            let came = &step.tokens[proposal.len..];
            Self::learn(&mut self.estimator, &proposal, came);
            // A draft of what a grammar forces, which may be before this one, teaches nothing.
            if step.candidates.first().map(|(fed, _)| *fed) != Some(proposal.last) {
                continue;
            }
            let verified = VerifiedRows(step);
            text.iterate(proposal.columns, &verified);
            let of_ngrams: HashSet<usize> = (proposal.candidates.iter())
                .flat_map(|candidate| verified.rows(candidate))
                .collect();
            let of_window = step.parents.len().saturating_sub(of_ngrams.len());
            let kept = DECAY.powi(of_window as i32);
            self.won = kept * self.won + (came.len() - 1) as f64;
            self.rows = kept * self.rows + of_window as f64;
        }
    }

    fn forget(&mut self, id: SeqId) {
        self.texts.remove(&id);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        let fits = |text: &Trajectories| text.ngrams.len() <= MAX_NGRAMS;
        if self.texts.values().all(fits) {
            Ok(())
        } else {
            Err(format!("more than {MAX_NGRAMS} n-grams of a text"))
        }
    }
}

#[cfg(test)]
mod tests;
