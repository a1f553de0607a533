//! A model's drafts, continued by tables, or replaced by theirs where those promise more.

use super::draft::{CacheScope, Committed, Draft, DraftRequest, Forecast, SeqId};
use super::drafter::Drafter;
use super::learned::LearnedDrafts;
use super::pool::DraftPool;
use super::tables::Tables;
use foretoken_core::error::Result;

/// Probability of a path of the tables from which a row of the draft model is cheaper than the forward that it saves: a
/// row costs at most about half of one.
const MIN_STAGED: f32 = 0.5;

/// Lets a drafter with a model draft first, and tables continue its drafts as far as they are likely to
/// (the horizontal cascade of CS-Drafting: Chen et al. 2023, arXiv 2312.11462, section 3.2). Where the
/// model drafts nothing, the tables draft alone; also where they expect to win as much as the model, as in
/// a text that repeats itself: they cost no forward.
///
/// Below a draft model, the tables draft for it, too (staged drafting: Spector and Re 2023, arXiv 2308.04623; the vertical
/// cascade of CS-Drafting): it verifies their likely chain in one forward instead of one for each token. Its draft
/// is the same, because the token that it draws is a function of its logits and the position's random numbers.
pub struct Cascade {
    first: Box<dyn Drafter>,
    tables: Tables,
}

impl Cascade {
    /// A cascade of `first` and `tables`.
    pub fn new(first: Box<dyn Drafter>, tables: Tables) -> Self {
        Self { first, tables }
    }

    /// The tables' draft, if it is expected to win as many tokens as the model's; the request then asks
    /// for no forwards of the model.
    fn draft_of_tables(&mut self, request: &mut DraftRequest<'_>) -> Option<Draft> {
        if request.is_fixed || request.model_length == 0 {
            return None;
        }
        let path = self.first.forecast(request)?.path;
        let of_model: f32 = path.iter().take(request.model_length).sum();
        let mut draft = Draft::default();
        self.tables.extend(request, &mut draft);
        let is_as_good = draft.scores.iter().sum::<f32>() >= of_model;
        if !is_as_good {
            request.staged = likely_chain(&draft);
            return None;
        }
        request.model_length = 0;
        Some(draft)
    }
}

/// The path of a draft along which each token is more likely than not.
fn likely_chain(draft: &Draft) -> Vec<u32> {
    let (mut chain, mut last) = (Vec::new(), None);
    while let Some(node) = draft
        .children(last)
        .find(|&node| draft.scores[node] >= MIN_STAGED)
    {
        chain.push(draft.tokens[node]);
        last = Some(node);
    }
    chain
}

impl Drafter for Cascade {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let alone: Vec<Option<Draft>> = (requests.iter_mut())
            .map(|request| self.draft_of_tables(request))
            .collect();
        let mut drafts = self.first.propose(requests)?;
        for ((request, draft), alone) in requests.iter().zip(&mut drafts).zip(alone) {
            match alone {
                Some(alone) => *draft = alone,
                // Under the rejection rule a draft has a fixed size.
                None if request.is_fixed => (),
                None => self.tables.extend(request, draft),
            }
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        self.first.forecast(request)
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.first.pool()
    }

    fn taps(&mut self) -> &[usize] {
        self.first.taps()
    }

    fn candidates(&self) -> usize {
        self.tables.candidates()
    }

    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        self.first.resume(id, tokens, scope, len)
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        self.first.observe(committed);
        self.tables.observe(committed);
    }

    fn learns(&self) -> bool {
        self.first.learns()
    }

    fn learn(&mut self, committed: &[Committed<'_>]) {
        self.first.learn(committed);
    }

    fn forget(&mut self, id: SeqId) {
        self.first.forget(id);
        self.tables.forget(id);
    }

    fn end(&mut self, id: SeqId) {
        self.first.end(id);
        self.tables.end(id);
    }

    fn learned(&mut self, to: &mut LearnedDrafts) {
        self.first.learned(to);
        self.tables.learned(to);
    }

    fn recall(&mut self, learned: &LearnedDrafts) {
        self.first.recall(learned);
        self.tables.recall(learned);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        self.first.check_invariants()?;
        self.tables.check_invariants()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::draft::{DraftContext, Source};
    use crate::spec::draft_model::DraftModel;
    use foretoken_core::sampling::{Sampler, SamplingParams, mix};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A model whose first token it expects to be right in every other draft, and whose later ones never.
    struct OneTokenModel {
        forwards: Arc<AtomicUsize>,
    }

    impl Drafter for OneTokenModel {
        fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
            let draft = |request: &DraftRequest<'_>| {
                let mut draft = Draft::default();
                if request.model_length > 0 {
                    self.forwards.fetch_add(1, Ordering::Relaxed);
                    draft.push(7, 0.5, Source::Model);
                }
                draft
            };
            Ok(requests.iter().map(draft).collect())
        }

        fn forecast(&self, _: &DraftRequest<'_>) -> Option<Forecast> {
            Some(Forecast {
                path: vec![0.5, 0.0, 0.0],
                hope: 0.5,
                pending: 1,
                at_once: false,
            })
        }
    }

    /// Drafts after each token of `text`; returns how often the model ran in the last quarter.
    fn forwards(text: &[u32]) -> usize {
        let forwards = Arc::new(AtomicUsize::new(0));
        let model = OneTokenModel {
            forwards: forwards.clone(),
        };
        let mut cascade = Cascade::new(Box::new(model), Tables::new(1 << 20));
        let mut at_last_quarter = 0;
        for len in 1..text.len() {
            let tokens = &text[..len];
            if len == text.len() * 3 / 4 {
                at_last_quarter = forwards.load(Ordering::Relaxed);
            }
            let mut sampler = Sampler::new(SamplingParams::default(), tokens);
            let context = DraftContext::default();
            let request = DraftRequest::chain(1, tokens, 3, &mut sampler, &context);
            let draft = cascade.propose(&mut [request]).unwrap().remove(0);
            assert!(!draft.is_empty());
            let committed = Committed::new(1, &text[..=len], 1, len - 1..len, &context);
            cascade.observe(&[committed]);
        }
        forwards.load(Ordering::Relaxed) - at_last_quarter
    }

    /// The tables' likely chain is what the draft model verifies, where it drafts.
    #[test]
    fn the_likely_chain_ends_where_it_becomes_unlikely() {
        let mut draft = Draft::default();
        let first = draft.add(1, None, 0.3, Source::Own);
        let second = draft.add(2, None, 0.7, Source::Own);
        draft.add(3, Some(first), 0.2, Source::Own);
        let third = draft.add(4, Some(second), 0.6, Source::Own);
        draft.add(5, Some(third), 0.4, Source::Own);
        assert_eq!(likely_chain(&draft), [2, 4]);
        assert!(likely_chain(&Draft::default()).is_empty());
    }

    /// The draft of a sampled request after `tokens`, four of which are its prompt.
    fn propose(drafter: &mut dyn Drafter, tokens: &[u32], context: &DraftContext) -> Draft {
        let mut sampler = Sampler::new(SamplingParams::default(), &tokens[..4]);
        tokens[4..].iter().for_each(|&id| sampler.push(id));
        let request = DraftRequest::chain(1, tokens, 4, &mut sampler, context);
        drafter.propose(&mut [request]).unwrap().remove(0)
    }

    /// A model's drafts of a text that the tables know in part, and the forwards that they took.
    fn drafts(
        drafter: &mut dyn Drafter,
        text: &[u32],
        context: &DraftContext,
    ) -> (Vec<Draft>, usize) {
        let (mut drafts, mut forwards, mut len) = (Vec::new(), 0, 8);
        while len < text.len() {
            let draft = propose(drafter, &text[..len], context);
            if draft.sources.iter().all(|source| *source == Source::Model) {
                forwards += drafter.pool().unwrap().network.forwards.len();
                drafts.push(draft);
            }
            let next = (len + 5).min(text.len());
            let new = len - 1..next - 1;
            drafter.observe(&[Committed::new(1, &text[..next], 4, new, context)]);
            len = next;
        }
        (drafts, forwards)
    }

    /// The drafts are those of the model alone, with fewer forwards where the tables below it guess right: here the
    /// request predicts its text, but for every tenth token.
    #[test]
    fn a_draft_model_verifies_what_the_tables_guess() {
        let model = || {
            let toy = foretoken_core::model::toy::ToyModel::new(32, 1024, 5, 0.0);
            DraftModel::new(Box::new(toy), 256, 4, 64).unwrap()
        };
        // What the model itself writes, so that its drafts are better than the tables'.
        let mut text: Vec<u32> = (0..8).collect();
        let mut writer = model();
        while text.len() < 400 {
            let draft = propose(&mut writer, &text, &DraftContext::default());
            text.extend(draft.tokens);
        }
        let mut prediction = text.clone();
        (prediction.iter_mut().step_by(10)).for_each(|id| *id = (*id + 1) % 32);
        let context = DraftContext {
            prediction: prediction.into(),
            ..DraftContext::default()
        };
        let mut cascade = Cascade::new(Box::new(model()), Tables::new(1 << 20));
        let (staged, forwards) = drafts(&mut cascade, &text, &context);
        let (plain, of_plain) = drafts(&mut model(), &text, &context);
        let same = staged.iter().filter(|draft| plain.contains(draft));
        assert_eq!(same.count(), staged.len());
        let each = |forwards: usize, drafts: &[Draft]| forwards as f64 / drafts.len() as f64;
        let (each, of_plain) = (each(forwards, &staged), each(of_plain, &plain));
        assert!(
            staged.len() > 20 && each < 0.7 * of_plain,
            "{each}, {of_plain}"
        );
    }

    #[test]
    fn the_model_rests_where_a_text_repeats_itself() {
        let repeating: Vec<u32> = (0..200).map(|i| i % 9).collect();
        assert!(forwards(&repeating) < 5, "{}", forwards(&repeating));
        let other: Vec<u32> = (0..200).map(|i| mix(i) as u32 % 30_000).collect();
        assert!(forwards(&other) > 45, "{}", forwards(&other));
    }
}
