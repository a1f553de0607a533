//! What drafts of tables gain on a GPU, from one request at a time to many: the costs are those of
//! [`budget::gpu`](super::super::budget::gpu), and the host takes time for each draft while the GPU waits.

use super::super::budget::gpu::{ACCEPTANCE, Gpu, Rate, STEPS, STREAMS, WARM_UP, check, max_depth};
use super::super::cost::tests::Noise;
use super::tests::{input, state};
use super::*;
use crate::spec::draft::Source;
use foretoken_core::error::Result;
use foretoken_core::sampling::Acceptance;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The host's seconds for a draft: assumed.
const ASK: f64 = 15e-6;

/// Drafts chains of tokens each of which is accepted at `rate`; counts the drafts.
struct Chains {
    rate: f64,
    asked: Arc<AtomicUsize>,
}

impl Drafter for Chains {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        self.asked.fetch_add(requests.len(), Ordering::Relaxed);
        let draft = |request: &mut DraftRequest<'_>| {
            let mut draft = Draft::default();
            for depth in 1..=request.length as i32 {
                let score = self.rate.powi(depth) as f32;
                if score >= request.min_score {
                    draft.push(1, score, Source::Own);
                }
            }
            draft
        };
        Ok(requests.iter_mut().map(draft).collect())
    }
}

/// Tokens and seconds during the warm-up and after it.
fn with_tables(gpu: Gpu, streams: usize, rate: f64) -> [Rate; 2] {
    let noise = &mut Noise(streams as u64);
    let asked = Arc::new(AtomicUsize::new(0));
    let drafter = Chains {
        rate,
        asked: asked.clone(),
    };
    let cost = gpu.calibrated(streams, noise);
    let mut proposer = Proposer::new(Box::new(drafter), BudgetMode::Adaptive).with_target(cost);
    let mut states: Vec<SequenceState> = (0..streams as u64)
        .map(|id| SequenceState {
            id,
            ..state(0.0, Acceptance::Coupled)
        })
        .collect();
    let mut rates = [Rate::default(); 2];
    for step in 0..STEPS {
        let depth = max_depth(streams);
        let mut inputs: Vec<_> = states.iter_mut().map(|one| input(one, depth)).collect();
        let proposals = proposer.propose(&mut inputs, 10);
        let depths = proposals.iter().map(|proposal| proposal.draft.len());
        let drafting = ASK * asked.swap(0, Ordering::Relaxed) as f64;
        let phase = &mut rates[usize::from(step >= WARM_UP)];
        proposer.note_step(&phase.verify(gpu, (streams, rate), depths, drafting, noise));
    }
    rates
}

#[test]
fn tables_are_never_slower_at_any_load() {
    let mut of_best = Vec::new();
    for gpu in Gpu::ALL {
        for streams in STREAMS {
            for rate in ACCEPTANCE {
                let rates = with_tables(gpu, streams, rate);
                let drafting = |depth| f64::from(u8::from(depth > 0)) * ASK * streams as f64;
                of_best.push(check(gpu, streams, rate, rates, drafting));
            }
        }
    }
    let mean = of_best.iter().sum::<f64>() / of_best.len() as f64;
    assert!(mean > 0.95, "{mean} of the best fixed depth");
}
