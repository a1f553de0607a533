//! Drafting without a model: tables of what followed what.
//!
//! Three sources, merged into one tree: the request's own tokens and its predicted output (`own`),
//! other requests' answers and the target's own candidates for each token (`pool`). Each guess has
//! an estimated probability, learned from how often guesses like it stood; `tree` keeps those whose
//! paths are the most probable.

mod answers;
mod context_table;
mod guess;
mod lru;
mod own;
mod positions;
mod texts;
mod tree;

use super::draft::{Committed, Draft, DraftContext, DraftRequest, SeqId};
use super::drafter::Drafter;
use super::estimate::{Estimator, RequestBias};
use super::learned::LearnedDrafts;
use super::share::WorkShare;
use answers::Answers;
use context_table::{ContextTable, Owner};
use foretoken_core::error::Result;
use guess::Sources;
use std::collections::HashMap;
use texts::{Texts, TextsOf};
use tree::{TableCandidate, TableGrowth, TableLimits};

/// Probability that a guess of unknown kind stands.
const PRIOR: f32 = 0.15;

/// Candidates per row that are kept for reuse.
const CANDIDATES: usize = 8;

/// Tokens of texts that are indexed in one step, of all requests together: so that a long prompt that the
/// target need not read, or a long prediction, does not hold up the others. What is left is indexed in later
/// steps; until then less is known.
const MAX_INDEXED: usize = 1024;

/// The drafter of tables.
///
/// They take at most the memory that is set: half of it for what outlives a request, and nearly all of the
/// other half for the texts of requests that run, of which those contexts are forgotten first that were not
/// used for a long time. Besides, each request that runs has its last draft. A scope's tokens are drafted in
/// that scope only; what all scopes share is how often guesses of each kind stood.
#[derive(Debug)]
pub struct Tables {
    texts: Texts,
    pool: ContextTable,
    answers: Answers,
    estimator: Estimator,
    requests: HashMap<SeqId, RequestTables>,
    /// Tokens that may still be indexed in this step.
    room: usize,
    memory: usize,
}

/// What is known of a request while it runs.
#[derive(Debug)]
struct RequestTables {
    texts: TextsOf,
    bias: RequestBias,
    proposal: Option<TableDraft>,
    scope: u64,
    /// The answer to the request so far.
    answer: Vec<u32>,
}

/// The last draft of a request and all guesses that were considered for it.
#[derive(Debug)]
struct TableDraft {
    /// Tokens of the sequence then.
    len: usize,
    tokens: Vec<u32>,
    parents: Vec<Option<u16>>,
    candidates: Vec<TableCandidate>,
}

impl Tables {
    /// Empty tables of at most `memory` bytes.
    pub fn new(memory: usize) -> Self {
        let for_answers = memory / 32;
        Self {
            texts: Texts::new(memory / 2 - for_answers),
            pool: ContextTable::new(memory / 2),
            answers: Answers::new(for_answers),
            estimator: Estimator::new(PRIOR),
            requests: HashMap::new(),
            room: MAX_INDEXED,
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
        let prediction = &request.context.prediction;
        let state = RequestTables::of(
            &mut self.requests,
            &mut self.texts,
            // One that was not observed shares nothing.
            request.id,
            &[],
            request.context,
        );
        (self.texts).extend(&mut state.texts, request.tokens, prediction, &mut self.room);
        let growth = TableGrowth {
            sources: Sources {
                index: self.texts.index(),
                tokens: request.tokens,
                of_tokens: state.texts.of_tokens(),
                prediction,
                of_prediction: state.texts.of_prediction(),
                pool: &mut self.pool,
                scope: state.scope,
            },
            estimator: &self.estimator,
            bias: state.bias,
            limits: TableLimits {
                length: request.length,
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
        state.proposal = Some(TableDraft {
            len: request.tokens.len(),
            tokens: draft.tokens.clone(),
            parents: draft.parents.clone(),
            candidates,
        });
    }
}

impl RequestTables {
    /// The state of the request with this id and prompt.
    fn of<'a>(
        requests: &'a mut HashMap<SeqId, Self>,
        texts: &mut Texts,
        id: SeqId,
        prompt: &[u32],
        context: &DraftContext,
    ) -> &'a mut Self {
        requests.entry(id).or_insert_with(|| {
            let scope = context.scope.0;
            Self {
                texts: texts.open(scope, prompt, &context.prediction),
                bias: RequestBias::default(),
                proposal: None,
                scope,
                answer: Vec::new(),
            }
        })
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
            let of_parent = |candidate: &&TableCandidate| candidate.parent == parent;
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
        self.answers.step(&mut self.pool);
        let mut share = WorkShare::new(MAX_INDEXED, committed.len());
        for committed in committed {
            let (tokens, prediction) = (committed.tokens, &committed.context.prediction);
            let (prompt, answer) = tokens.split_at(committed.prompt_len.min(tokens.len()));
            let state = RequestTables::of(
                &mut self.requests,
                &mut self.texts,
                committed.id,
                prompt,
                committed.context,
            );
            share.give(|part| (self.texts).extend(&mut state.texts, tokens, prediction, part));
            state.learn(tokens, &mut self.estimator);
            self.answers.extend(&mut state.answer, answer);
            for (fed, best) in committed.candidates {
                self.pool.recycle(state.scope, *fed, best);
            }
        }
        // What is left is for the oldest ones that need more.
        self.room = share.left();
        for committed in committed {
            if let Some(state) = self.requests.get_mut(&committed.id) {
                let (tokens, prediction) = (committed.tokens, &committed.context.prediction);
                (self.texts).extend(&mut state.texts, tokens, prediction, &mut self.room);
            }
        }
    }

    fn forget(&mut self, id: SeqId) {
        if let Some(state) = self.requests.remove(&id) {
            self.texts.close(&state.texts);
            self.answers.forget(&state.answer);
        }
    }

    fn end(&mut self, id: SeqId) {
        if let Some(state) = self.requests.remove(&id) {
            self.texts.close(&state.texts);
            (self.answers).end(state.scope, state.answer, &mut self.pool);
        }
    }

    fn candidates(&self) -> usize {
        CANDIDATES
    }

    fn observes_late(&self) -> bool {
        true
    }

    fn learned(&mut self, to: &mut LearnedDrafts) {
        to.tables = self.estimator.learned();
    }

    fn recall(&mut self, learned: &LearnedDrafts) {
        self.estimator.recall(&learned.tables);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        let bytes = self.texts.bytes() + self.pool.bytes() + self.answers.bytes();
        if bytes > self.memory {
            return Err(format!("tables of {bytes} of {} bytes", self.memory));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
