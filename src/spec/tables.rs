//! Drafting without a model: tables of what followed what.
//!
//! Three sources, merged into one tree: the request's own tokens and its predicted output (`own`),
//! other requests' answers and the target's own candidates for each token (`pool`). Each guess has
//! an estimated probability, learned from how often guesses like it stood; `tree` keeps those whose
//! paths are the most probable.

mod guess;
mod lru;
mod own;
mod pool;
mod tree;

use super::draft::{Committed, Draft, DraftContext, DraftRequest, Drafter, SeqId};
use super::estimate::{Estimator, RequestBias};
use crate::error::Result;
use guess::Sources;
use own::SuffixIndex;
use pool::{Owner, Pool};
use std::collections::HashMap;
use tree::{Candidate, Growth, Limits};

/// Probability that a guess of unknown kind stands.
const PRIOR: f32 = 0.15;

/// Candidates per row that are kept for reuse.
const CANDIDATES: usize = 8;

/// The drafter of tables.
///
/// Tables of a request take 150 to 300 bytes per token of its context, until it ends. All others take
/// at most the memory that is set. A scope's tokens are drafted in that scope only; what all scopes
/// share is how often guesses of each kind stood.
#[derive(Debug)]
pub struct Tables {
    pool: Pool,
    estimator: Estimator,
    requests: HashMap<SeqId, Request>,
    memory: usize,
}

/// What is known of a request while it runs.
#[derive(Debug, Default)]
struct Request {
    own: SuffixIndex,
    prediction: SuffixIndex,
    bias: RequestBias,
    proposal: Option<Proposal>,
    scope: u64,
    /// Its answer so far.
    answer: Vec<u32>,
}

/// The last draft of a request and all guesses that were considered for it.
#[derive(Debug)]
struct Proposal {
    /// Tokens of the sequence then.
    len: usize,
    tokens: Vec<u32>,
    parents: Vec<Option<u16>>,
    candidates: Vec<Candidate>,
}

impl Tables {
    /// Empty tables of at most `memory` bytes for what outlives a request.
    pub fn new(memory: usize) -> Self {
        Self {
            pool: Pool::new(memory),
            estimator: Estimator::new(PRIOR),
            requests: HashMap::new(),
            memory,
        }
    }

    /// Adds a text that all scopes may draft from, as in REST (He et al. 2023, arXiv 2311.08252). It
    /// takes room in the same memory as answers, and what is not used makes room for them.
    pub fn preload(&mut self, text: &[u32]) {
        self.pool.add(Owner::Corpus, text);
    }

    /// Continues a model's draft at its leaves, within the request's `length` and `nodes` (the
    /// horizontal cascade: Chen et al. 2023, arXiv 2312.11462). Its scores are taken as they are. What
    /// the tables proposed for its first token, if they were asked before the model, teaches them as well.
    pub fn extend(&mut self, request: &DraftRequest<'_>, draft: &mut Draft) {
        let state = self.requests.entry(request.id).or_default();
        state.index(request.tokens, request.tokens.len(), request.context);
        let growth = Growth {
            sources: Sources {
                own: &state.own,
                tokens: request.tokens,
                prediction: &state.prediction,
                predicted: &request.context.prediction,
                pool: &mut self.pool,
                scope: state.scope,
            },
            estimator: &self.estimator,
            bias: state.bias,
            limits: Limits {
                depth: request.length,
                nodes: request.nodes,
                children: request.width,
                min_score: request.min_score,
            },
        };
        let is_of_model = !draft.is_empty();
        let mut candidates = growth.grow(draft);
        if let Some(before) = state.proposal.take()
            && is_of_model
            && before.len == request.tokens.len()
        {
            let first = before.candidates.into_iter();
            candidates.extend(first.filter(|candidate| candidate.parent.is_none()));
        }
        state.proposal = Some(Proposal {
            len: request.tokens.len(),
            tokens: draft.tokens.clone(),
            parents: draft.parents.clone(),
            candidates,
        });
    }
}

impl Request {
    /// Indexes the first `len` tokens, and the prediction.
    fn index(&mut self, tokens: &[u32], len: usize, context: &DraftContext) {
        self.scope = context.scope.0;
        self.own.extend(tokens, len);
        self.prediction
            .extend(&context.prediction, context.prediction.len());
    }

    /// Learns from the tokens that came where the last draft was.
    fn learn(&mut self, tokens: &[u32], estimator: &mut Estimator) {
        let Some(proposal) = self
            .proposal
            .take_if(|proposal| proposal.len < tokens.len())
        else {
            return;
        };
        let mut parent = None;
        for &token in &tokens[proposal.len..] {
            let of_parent = |candidate: &&Candidate| candidate.parent == parent;
            let candidates = proposal.candidates.iter().filter(of_parent);
            for candidate in candidates {
                let stood = candidate.token == token;
                estimator.note(&candidate.features, stood);
                self.bias.note(candidate.p, stood);
            }
            let nodes = proposal.tokens.iter().zip(&proposal.parents);
            let Some(node) = nodes
                .enumerate()
                .position(|(_, node)| node == (&token, &parent))
            else {
                return;
            };
            parent = Some(node as u16);
        }
    }
}

impl Drafter for Tables {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let draft = |request: &mut DraftRequest<'_>| {
            let mut draft = Draft::default();
            self.extend(request, &mut draft);
            draft
        };
        Ok(requests.iter_mut().map(draft).collect())
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            let tokens = committed.tokens;
            let state = self.requests.entry(committed.id).or_default();
            state.index(tokens, committed.new.end, committed.context);
            state.learn(tokens, &mut self.estimator);
            let answer = tokens.get(committed.prompt_len..).unwrap_or_default();
            let added = answer.get(state.answer.len()..).unwrap_or_default();
            state.answer.extend_from_slice(added);
            for (fed, best) in committed.candidates {
                self.pool.recycle(state.scope, *fed, best);
            }
        }
    }

    fn forget(&mut self, id: SeqId) {
        self.requests.remove(&id);
    }

    fn end(&mut self, id: SeqId) {
        if let Some(state) = self.requests.remove(&id) {
            self.pool.add(Owner::Scope(state.scope), &state.answer);
        }
    }

    fn candidates(&self) -> usize {
        CANDIDATES
    }

    fn check_invariants(&self) -> Result<(), String> {
        match self.pool.bytes() {
            bytes if bytes <= self.memory => Ok(()),
            bytes => Err(format!("tables of {bytes} of {} bytes", self.memory)),
        }
    }
}

#[cfg(test)]
mod tests;
