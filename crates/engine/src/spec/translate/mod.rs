//! Drafting with a model that has another tokenizer (Timor et al. 2025, arXiv 2502.05202).
//!
//! The draft model reads its own encoding of the text so far. Its draft is text again, which the target's
//! tokenizer encodes after the target's last words, so tokens of both need not correspond one to one. The
//! target verifies tokens of its own, so the text is the target's under every acceptance rule.

mod encoding;
mod model;
mod translated_draft;
mod vocabulary;

pub use model::JointModel;
pub use vocabulary::{JointVocabulary, Tokenizer};

use super::draft::{CacheScope, Committed, Draft, DraftRequest, Forecast, SeqId};
use super::draft_model::DraftModel;
use super::drafter::Drafter;
use super::pool::DraftPool;
use super::share::WorkShare;
use encoding::{DraftEncoding, MAX_READ};
use foretoken_core::error::Result;
use foretoken_core::model::MAX_TREE_NODES;
use foretoken_core::sampling::{Sampler, SamplingParams, TextRules};
use std::collections::HashMap;
use translated_draft::{Rates, TranslatedDraft};

/// The state of one sequence.
#[derive(Default)]
struct TranslatedSequence {
    encoding: DraftEncoding,
    /// The last proposal, until it is compared with the text.
    proposal: Option<TranslatedDraft>,
}

/// A drafter for a target, over a draft model with another tokenizer.
pub struct Translator {
    /// The drafter over the joint vocabulary, whose ids it takes. The last tokens of its sequences may change.
    inner: DraftModel,
    vocabulary: JointVocabulary,
    sequences: HashMap<SeqId, TranslatedSequence>,
    rates: Rates,
}

/// Requests whose grammars and limits are set aside until it is dropped, as it is by a panic: the texts need them.
struct WithoutRules<'a, 'b> {
    requests: &'a mut [DraftRequest<'b>],
    /// The rules of the requests, with the number of output tokens where each was taken.
    rules: Vec<(usize, TextRules)>,
}

impl<'a, 'b> WithoutRules<'a, 'b> {
    fn of(requests: &'a mut [DraftRequest<'b>]) -> Self {
        let rules = (requests.iter_mut())
            .map(|request| (request.sampler.output_len(), request.sampler.take_rules()))
            .collect();
        Self { requests, rules }
    }
}

impl Drop for WithoutRules<'_, '_> {
    fn drop(&mut self) {
        let rules = self.rules.drain(..);
        for (request, (output_len, rules)) in self.requests.iter_mut().zip(rules) {
            request.sampler.truncate(output_len);
            request.sampler.put_rules(rules);
        }
    }
}

/// Draft tokens for `count` target tokens of which one takes `each`.
fn scaled(count: usize, each: f64) -> usize {
    (count as f64 * each).ceil() as usize
}

impl Translator {
    /// A drafter with `inner`, whose model is a [`JointModel`] over the same `vocabulary`.
    pub fn new(inner: DraftModel, vocabulary: JointVocabulary) -> Self {
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
        let mut share = WorkShare::new(MAX_READ, requests.len());
        for request in requests.iter() {
            let state = self.sequences.entry(request.id).or_default();
            share.give(|part| (state.encoding).read(&self.vocabulary, request.tokens, part));
            state.proposal = None;
        }
        let state = |id| &self.sequences[&id];
        let is_read = |place: &usize| {
            let request = &requests[*place];
            state(request.id).encoding.has_read(request.tokens)
        };
        let places: Vec<usize> = (0..requests.len()).filter(is_read).collect();
        let mut all_each = 0.0;
        // The draft model continues its own encoding, whose last tokens need not end where the target's do.
        let free = WithoutRules::of(requests);
        let mut inner: Vec<DraftRequest<'_>> = (free.requests)
            .iter_mut()
            .filter(|request| state(request.id).encoding.has_read(request.tokens))
            .map(|request| {
                let encoding = &state(request.id).encoding;
                let each = encoding.tokens_each();
                all_each += each;
                DraftRequest {
                    id: request.id,
                    tokens: encoding.tokens(),
                    length: scaled(request.length, each),
                    model_length: match request.model_length {
                        0 => 0,
                        depth => scaled(depth, each),
                    },
                    // The model feeds all nodes of a tree in one forward.
                    nodes: scaled(request.nodes, each).min(MAX_TREE_NODES),
                    width: request.width,
                    min_score: request.min_score,
                    is_fixed: request.is_fixed,
                    staged: Vec::new(),
                    position: request.position,
                    sampler: &mut *request.sampler,
                    acceptance: request.acceptance,
                    context: request.context,
                }
            })
            .collect();
        let proposed = self.inner.propose(&mut inner);
        // For a level of the target's tokens the model needs this many forwards.
        let each = all_each / inner.len().max(1) as f64;
        drop(free);
        let proposed = proposed?;
        if let Some(pool) = self.inner.pool() {
            let forwards = pool.network.forwards.iter_mut();
            forwards.for_each(|(_, seconds)| *seconds *= each);
        }
        let mut drafts = vec![Draft::default(); requests.len()];
        for (place, draft) in places.into_iter().zip(proposed) {
            let request = &requests[place];
            if let Some(state) = self.sequences.get_mut(&request.id) {
                let ending = state.encoding.ending(&self.vocabulary, request.tokens);
                let base = request.tokens.len();
                let mut proposal =
                    TranslatedDraft::new(&self.vocabulary, &self.rates, &draft, base, ending);
                proposal.limit(request.model_length, request.nodes);
                drafts[place] = proposal.draft.clone();
                state.proposal = Some(proposal);
            }
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let state = self.sequences.get(&request.id);
        let read = state.filter(|state| state.encoding.has_read(request.tokens));
        let Some(state) = read else {
            // About as much as the draft model has to read of its own tokens.
            return self.inner.forecast(request);
        };
        let each = state.encoding.tokens_each();
        // The draft model looks at the temperature only, and its tokens are not the request's.
        let mut sampler = Sampler::new(
            SamplingParams::at(request.sampler.params().temperature),
            &[],
        );
        let inner = self.inner.forecast(&DraftRequest {
            tokens: state.encoding.tokens(),
            length: scaled(request.length, each),
            sampler: &mut sampler,
            staged: Vec::new(),
            ..*request
        })?;
        // A target token stands if all of its draft tokens do.
        let overall = self.rates.overall() as f32;
        let path = (1..=request.length).scan(1.0f32, |before, depth| {
            let drafts = inner.path.get(scaled(depth, each) - 1)?;
            *before = before.min(drafts * overall.powi(depth as i32));
            Some(*before)
        });
        Some(Forecast {
            path: path.collect(),
            hope: inner.hope * overall,
            pending: inner.pending,
            at_once: inner.at_once,
        })
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.inner.pool()
    }

    fn resume(&mut self, _: SeqId, _: &[u32], _: CacheScope, len: usize) -> usize {
        // The draft model finds its own tokens when it drafts.
        len
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        let mut share = WorkShare::new(MAX_READ, committed.len());
        for committed in committed {
            let Some(state) = self.sequences.get_mut(&committed.id) else {
                continue;
            };
            if let Some(proposal) = state.proposal.take() {
                self.rates.learn(&proposal, committed.tokens);
            }
            let before = state.encoding.tokens().len();
            let encoding = &mut state.encoding;
            if !share.give(|part| encoding.read(&self.vocabulary, committed.tokens, part)) {
                continue;
            }
            let tokens = state.encoding.tokens();
            let prompt_len = committed.prompt_len.min(tokens.len());
            let new = before.min(tokens.len())..tokens.len();
            let (id, context) = (committed.id, committed.context);
            self.inner
                .observe(&[Committed::new(id, tokens, prompt_len, new, context)]);
        }
    }

    fn forget(&mut self, id: SeqId) {
        self.sequences.remove(&id);
        self.inner.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::vocabulary::tests::WordTokenizer;
    use super::*;
    use crate::spec::draft::DraftContext;
    use foretoken_core::model::toy::ToyModel;
    use foretoken_core::sampling::Acceptance;
    use foretoken_text::grammar::{Compiler, GrammarSource, toy::ToyTokens};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    /// A text without its grammar would be another one.
    #[test]
    fn a_panic_takes_no_grammar_with_it() {
        let letters = ToyTokens::new((b'a'..=b'j').map(|letter| [letter]), &[9]);
        let source = GrammarSource::Regex("ef[a-d]".into());
        let grammar = Compiler::new(Arc::new(letters)).compile("regex", &source);
        let params = SamplingParams {
            grammar: Some(grammar.expect("a good pattern")),
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(params, &[1]);
        sampler.push(4);
        let context = DraftContext::default();
        let mut requests = [DraftRequest::chain(1, &[1, 4], 2, &mut sampler, &context)];
        let drafting = || {
            let free = WithoutRules::of(&mut requests);
            assert!(!free.requests[0].sampler.has_grammar());
            free.requests[0].sampler.push(7);
            panic!("as the test wants");
        };
        assert!(catch_unwind(AssertUnwindSafe(drafting)).is_err());
        assert_eq!(sampler.output_len(), 1);
        let grammar = sampler.grammar().expect("it is back");
        assert_eq!(grammar.forced(1), [5]);
    }

    /// The tree of a draft model whose tokens are shorter than the target's.
    #[test]
    fn a_tree_has_no_more_nodes_than_a_forward_takes() {
        const TARGET: [&str; 3] = ["</s>", " ab", " ba"];
        const DRAFT: [&str; 5] = ["</s>", " a", " b", "a", "b"];
        let words = |tokens: &[&str]| Box::new(WordTokenizer::new(tokens, false));
        let (target, draft) = (words(&TARGET), words(&DRAFT));
        let vocabulary = JointVocabulary::new(target, draft, TARGET.len(), DRAFT.len());
        let toy = Box::new(ToyModel::new(DRAFT.len(), 1 << 10, 1, 0.0));
        let model = Box::new(JointModel::new(toy, &vocabulary));
        let inner = DraftModel::new(model, 64, 16, 256).expect("memory");
        let mut translator = Translator::new(inner, vocabulary);
        let prompt: Vec<u32> = (0..40).map(|i| 1 + i % 2).collect();
        let params = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let request = DraftRequest {
            id: 1,
            tokens: &prompt,
            length: 16,
            model_length: 16,
            nodes: MAX_TREE_NODES,
            width: 4,
            min_score: 0.0,
            is_fixed: true,
            staged: Vec::new(),
            position: prompt.len(),
            sampler: &mut Sampler::new(params, &prompt),
            acceptance: Acceptance::Coupled,
            context: &DraftContext::default(),
        };
        translator.propose(&mut [request]).expect("no failure");
        let forwards = translator.pool().expect("a pool").network.forwards.len();
        assert!(forwards > 10, "{forwards} levels");
    }

    /// The long prompts of many requests are read in many steps.
    #[test]
    fn a_step_reads_a_bounded_number_of_tokens() {
        const TOKENS: [&str; 4] = ["</s>", "a", "b", " a"];
        let words = || Box::new(WordTokenizer::new(&TOKENS, false));
        let vocabulary = JointVocabulary::new(words(), words(), TOKENS.len(), TOKENS.len());
        let toy = Box::new(ToyModel::new(TOKENS.len(), 1 << 10, 1, 0.0));
        let model = Box::new(JointModel::new(toy, &vocabulary));
        let inner = DraftModel::new(model, 8, 16, 64).expect("memory");
        let mut translator = Translator::new(inner, vocabulary);
        let prompt: Vec<u32> = (0..300).map(|i| 1 + i % 3).collect();
        let context = DraftContext::default();
        let committed: Vec<Committed<'_>> = (0..16)
            .map(|id| Committed::new(id, &prompt, prompt.len(), 0..prompt.len(), &context))
            .collect();
        let params = SamplingParams::default();
        let mut samplers = vec![Sampler::new(params, &prompt); committed.len()];
        let read = |translator: &Translator| -> usize {
            let states = translator.sequences.values();
            states.map(|state| state.encoding.num_read()).sum()
        };
        let mut before = 0;
        for _ in 0..3 {
            let requests = (0..).zip(&mut samplers);
            let mut requests: Vec<DraftRequest<'_>> = requests
                .map(|(id, sampler)| DraftRequest::chain(id, &prompt, 1, sampler, &context))
                .collect();
            translator.propose(&mut requests).expect("no failure");
            assert_eq!(read(&translator), (before + MAX_READ).min(16 * 300));
            translator.observe(&committed);
            before = (before + 2 * MAX_READ).min(16 * 300);
            assert_eq!(read(&translator), before);
        }
    }
}
