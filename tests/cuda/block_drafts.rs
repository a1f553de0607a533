//! Blocks of draft tokens on a GPU: it draws all of them, and they are those that the host chooses.

use super::draft_steps::{CHUNK, Counts};
use super::{BLOCK_SIZE, BLOCKS, gpu, model, shape, tokens};
use candle_core::DType;
use foretoken::sampling::{Acceptance, Mask, Sampler, SamplingParams};
use foretoken::spec::{BlockDrafter, Draft, DraftContext, DraftDist, DraftRequest, Drafter};
use std::sync::Arc;

const VOCAB: u32 = 512;
const LENGTH: usize = 4;

/// The draft for a text, and what it asks the GPU for.
fn draft(
    drafter: &mut BlockDrafter,
    params: &SamplingParams,
    (acceptance, width): (Acceptance, usize),
) -> (Draft, Option<Counts>) {
    let tokens = tokens(21);
    let mut sampler = Sampler::new(params.clone(), &tokens);
    let context = DraftContext::default();
    let request = DraftRequest {
        id: 1,
        tokens: &tokens,
        length: LENGTH,
        model_length: LENGTH,
        nodes: width * LENGTH,
        width,
        min_score: 0.0,
        is_fixed: false,
        staged: Vec::new(),
        position: tokens.len(),
        sampler: &mut sampler,
        acceptance,
        context: &context,
    };
    let (drafts, counts) = Counts::of(|| drafter.propose(&mut [request]).unwrap());
    assert_eq!(sampler.output_len(), 0);
    drafter.forget(1);
    assert_eq!(drafter.check_invariants(), Ok(()));
    (drafts.into_iter().next().unwrap(), counts)
}

/// Of a draft model with a mask token. A request that allows all ids is drawn on the host.
#[test]
fn a_gpu_draws_the_blocks_that_the_host_draws() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let mask = VOCAB as usize - 1;
    let source = shape(folder.path(), "llama", 64, &[("pard_token", mask)]);
    let drafter = || {
        let model = model(&source, &gpu, Some(DType::BF16), 3);
        BlockDrafter::of_model(model, BLOCKS, BLOCK_SIZE, CHUNK).unwrap()
    };
    let (mut there, mut here) = (drafter(), drafter());
    let params = |seed, temperature| SamplingParams {
        seed,
        temperature,
        ..SamplingParams::default()
    };
    let filtered = SamplingParams {
        top_k: 20,
        top_p: 0.9,
        logit_bias: vec![(7, 3.0), (9, -100.0)],
        ..params(4, 1.2)
    };
    let (coupled, rejection) = (Acceptance::Coupled, Acceptance::Rejection);
    let all = Mask::of(&(0..VOCAB).collect::<Vec<u32>>());
    for (params, kind) in [
        (params(1, 0.0), (coupled, 1)),
        (params(2, 0.0), (coupled, 3)),
        (params(3, 0.9), (coupled, 1)),
        (filtered.clone(), (coupled, 1)),
        (params(5, 0.9), (rejection, 1)),
        (filtered, (rejection, 1)),
    ] {
        let on_host = SamplingParams {
            allowed: Some(Arc::new(all.clone())),
            ..params.clone()
        };
        let (got, counts) = draft(&mut there, &params, kind);
        let (want, _) = draft(&mut here, &on_host, kind);
        assert_eq!(
            (&got.tokens, &got.parents),
            (&want.tokens, &want.parents),
            "{kind:?}"
        );
        assert!(got.len() >= LENGTH, "{kind:?}: {got:?}");
        if let Some(counts) = counts {
            assert_eq!(counts.waits, 1, "{kind:?}: {counts:?}");
        }
        // Verification reads the distributions where the tokens were drawn.
        let drawn = match kind.0 {
            Acceptance::Coupled => 0,
            Acceptance::Rejection => LENGTH,
        };
        assert_eq!((got.dists.len(), want.dists.len()), (drawn, drawn));
        let is_there = |dist: &DraftDist| matches!(dist, DraftDist::Device(_));
        assert!(got.dists.iter().all(is_there) && !want.dists.iter().any(is_there));
        let dists = got.to_host().unwrap().dists;
        for (got, want) in dists.iter().zip(&want.dists) {
            for id in 0..VOCAB {
                let gap = got.on_host().prob(id) - want.on_host().prob(id);
                assert!(gap.abs() < 1e-6, "{kind:?}, id {id}");
            }
        }
    }
}
