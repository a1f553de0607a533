//! Drafting with a model that has another tokenizer (Timor et al. 2025, arXiv 2502.05202).
//!
//! The draft model reads its own encoding of the text so far. Its draft is text again, which the target's
//! tokenizer encodes after the target's last words, so tokens of both need not correspond one to one. The
//! target verifies tokens of its own, so the text is the target's under every acceptance rule.

mod encoding;
mod model;
mod proposal;
mod vocabulary;

pub use model::JointModel;
pub use vocabulary::{Tokenizer, Vocabulary};

use super::draft::{Committed, Draft, DraftCost, DraftRequest, Drafter, SeqId};
use super::draft_model::DraftModel;
use crate::error::Result;
use encoding::Encoding;
use proposal::{Proposal, Rates};
use std::collections::HashMap;

/// The state of one sequence.
#[derive(Default)]
struct Sequence {
    encoding: Encoding,
    /// The last one, until it is compared with the text.
    proposal: Option<Proposal>,
}

/// A drafter for a target, over a draft model with another tokenizer.
pub struct Translator {
    /// Its ids are those of the vocabulary. The last tokens of its sequences may change.
    inner: DraftModel,
    vocabulary: Vocabulary,
    sequences: HashMap<SeqId, Sequence>,
    rates: Rates,
}

impl Translator {
    /// A drafter with `inner`, whose model is a [`JointModel`] over the same `vocabulary`.
    pub fn new(inner: DraftModel, vocabulary: Vocabulary) -> Self {
        Self {
            inner,
            vocabulary,
            sequences: HashMap::new(),
            rates: Rates::default(),
        }
    }
}

impl Drafter for Translator {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        for request in requests.iter() {
            let state = self.sequences.entry(request.id).or_default();
            state.encoding.read(&self.vocabulary, request.tokens);
            state.proposal = None;
        }
        let state = |id| &self.sequences[&id];
        let is_read = |place: &usize| {
            let request = &requests[*place];
            state(request.id).encoding.has_read(request.tokens)
        };
        let places: Vec<usize> = (0..requests.len()).filter(is_read).collect();
        let mut inner: Vec<DraftRequest<'_>> = requests
            .iter_mut()
            .filter(|request| state(request.id).encoding.has_read(request.tokens))
            .map(|request| {
                let encoding = &state(request.id).encoding;
                let drafts = |count: usize| (count as f64 * encoding.tokens_each()).ceil() as usize;
                DraftRequest {
                    id: request.id,
                    tokens: encoding.tokens(),
                    length: drafts(request.length),
                    nodes: drafts(request.nodes),
                    width: request.width,
                    position: request.position,
                    sampler: &mut *request.sampler,
                    acceptance: request.acceptance,
                    context: request.context,
                }
            })
            .collect();
        let proposed = self.inner.propose(&mut inner)?;
        let mut drafts = vec![Draft::default(); requests.len()];
        for (place, draft) in places.into_iter().zip(proposed) {
            let request = &requests[place];
            if let Some(state) = self.sequences.get_mut(&request.id) {
                let ending = state.encoding.ending(&self.vocabulary, request.tokens);
                let base = request.tokens.len();
                let mut proposal =
                    Proposal::new(&self.vocabulary, &self.rates, &draft, base, ending);
                proposal.limit(request.length, request.nodes);
                drafts[place] = proposal.draft.clone();
                state.proposal = Some(proposal);
            }
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Vec<f32>> {
        let drafts = self.inner.forecast(request)?;
        let state = self.sequences.get(&request.id);
        let each = state.map_or(1.0, |state| state.encoding.tokens_each());
        // A target token stands if all of its draft tokens do.
        let at = |depth: usize| {
            let place = (depth as f64 * each).ceil() as usize - 1;
            let stands = self.rates.overall().powi(depth as i32) as f32;
            Some((drafts.get(place)? * stands).min(1.0))
        };
        Some((1..=request.length).map_while(at).collect())
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            let Some(state) = self.sequences.get_mut(&committed.id) else {
                continue;
            };
            if let Some(proposal) = state.proposal.take() {
                self.rates.learn(&proposal, committed.tokens);
            }
            let before = state.encoding.tokens().len();
            if !state.encoding.read(&self.vocabulary, committed.tokens) {
                continue;
            }
            let tokens = state.encoding.tokens();
            self.inner.observe(&[Committed {
                id: committed.id,
                tokens,
                prompt_len: committed.prompt_len.min(tokens.len()),
                new: before.min(tokens.len())..tokens.len(),
                hidden: None,
                candidates: &[],
                context: committed.context,
            }]);
        }
    }

    fn forget(&mut self, id: SeqId) {
        self.sequences.remove(&id);
        self.inner.forget(id);
    }

    fn end(&mut self, id: SeqId) {
        self.sequences.remove(&id);
        self.inner.end(id);
    }

    fn cost(&self) -> DraftCost {
        self.inner.cost()
    }

    fn kv_usage(&self) -> f64 {
        self.inner.kv_usage()
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.inner.check_invariants()
    }
}
