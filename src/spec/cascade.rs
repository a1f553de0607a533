//! A model's drafts, continued by tables, or replaced by theirs where those promise more.

use super::draft::{CacheScope, Committed, Draft, DraftRequest, Forecast, SeqId};
use super::drafter::Drafter;
use super::pool::DraftPool;
use super::tables::Tables;
use crate::error::Result;

/// Lets a drafter with a model draft first, and tables continue its drafts as far as they are likely to
/// (the horizontal cascade of CS-Drafting: Chen et al. 2023, arXiv 2312.11462, section 3.2). Where the
/// model drafts nothing, the tables draft alone; also where they expect to win as much as the model, as in
/// a text that repeats itself: they cost no forward.
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
        if request.is_fixed || request.model_depth == 0 {
            return None;
        }
        let path = self.first.forecast(request)?.path;
        let of_model: f32 = path.iter().take(request.model_depth).sum();
        let mut draft = Draft::default();
        self.tables.extend(request, &mut draft);
        let is_as_good = draft.scores.iter().sum::<f32>() >= of_model;
        is_as_good.then(|| {
            request.model_depth = 0;
            draft
        })
    }
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

    fn check_invariants(&mut self) -> Result<(), String> {
        self.first.check_invariants()?;
        self.tables.check_invariants()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{Acceptance, Sampler, SamplingParams, mix};
    use crate::spec::draft::{DraftContext, Source};
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
                if request.model_depth > 0 {
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
            let request = DraftRequest {
                id: 1,
                tokens,
                length: 3,
                model_depth: 3,
                nodes: 3,
                width: 1,
                min_score: 0.0,
                is_fixed: false,
                position: len,
                sampler: &mut sampler,
                acceptance: Acceptance::Coupled,
                context: &DraftContext::default(),
            };
            let draft = cascade.propose(&mut [request]).unwrap().remove(0);
            assert!(!draft.is_empty());
            cascade.observe(&[Committed {
                id: 1,
                tokens: &text[..=len],
                prompt_len: 1,
                new: len - 1..len,
                hidden: None,
                candidates: &[],
                parents: &[],
                context: &DraftContext::default(),
            }]);
        }
        forwards.load(Ordering::Relaxed) - at_last_quarter
    }

    #[test]
    fn the_model_rests_where_a_text_repeats_itself() {
        let repeating: Vec<u32> = (0..200).map(|i| i % 9).collect();
        assert!(forwards(&repeating) < 5, "{}", forwards(&repeating));
        let other: Vec<u32> = (0..200).map(|i| mix(i) as u32 % 30_000).collect();
        assert!(forwards(&other) > 45, "{}", forwards(&other));
    }
}
