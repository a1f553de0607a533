//! Blocks of draft tokens on a GPU: it draws all of them, and they are those that the host chooses.

use super::draft_steps::{CHUNK, Counts};
use super::{BLOCK_SIZE, BLOCKS, configured, gpu, members, model, shape, tokens};
use candle_core::{DType, Device, Tensor};
use foretoken::model::{
    Head, HeadKind, LoadFormat, LoadOptions, LoadedModel, ModelSource, load_head,
};
use foretoken::sampling::{Acceptance, Mask, Sampler, SamplingParams, mix};
use foretoken::spec::{
    BlockDrafter, Committed, Draft, DraftContext, DraftDist, DraftRequest, Drafter,
};
use serde_json::{Value, json};
use std::sync::Arc;

const VOCAB: u32 = 512;
const LENGTH: usize = 4;
/// Tokens of the longest text: a model reads all of several texts in one round.
const TOKENS: usize = 12;

/// What a request asks for: how tokens are drawn, which rule accepts them, and how many siblings it takes.
type Asked = (SamplingParams, (Acceptance, usize));

/// The drafts for texts of different lengths, one for each of `asked`, in one round, and what they ask the GPU for. A head
/// has read these `hidden` states of all tokens but the last.
fn drafts(
    drafter: &mut BlockDrafter,
    hidden: Option<&Tensor>,
    asked: &[Asked],
) -> (Vec<Draft>, Option<Counts>) {
    let texts: Vec<_> = (0..asked.len()).map(|i| tokens(TOKENS - i)).collect();
    let context = DraftContext::default();
    let ids = 1u64..;
    let read = ids.clone().zip(&texts).filter(|_| hidden.is_some());
    for (id, tokens) in read {
        let rows = tokens.len() - 1;
        drafter.observe(&[Committed {
            id,
            tokens,
            prompt_len: tokens.len(),
            new: 0..rows,
            hidden: hidden.map(|states| states.narrow(0, 0, rows).unwrap()),
            candidates: &[],
            parents: &[],
            context: &context,
        }]);
    }
    let samplers = asked.iter().zip(&texts);
    let mut samplers: Vec<_> = samplers
        .map(|((params, _), tokens)| Sampler::new(params.clone(), tokens))
        .collect();
    let places = ids.clone().zip(&texts).zip(asked).zip(&mut samplers);
    let mut requests: Vec<_> = places
        .map(
            |(((id, tokens), &(_, (acceptance, width))), sampler)| DraftRequest {
                id,
                tokens,
                length: LENGTH,
                model_length: LENGTH,
                nodes: width * LENGTH,
                width,
                min_score: 0.0,
                is_fixed: false,
                staged: Vec::new(),
                position: tokens.len(),
                sampler,
                acceptance,
                context: &context,
            },
        )
        .collect();
    let (drafts, counts) = Counts::of(|| drafter.propose(&mut requests).unwrap());
    for (id, sampler) in ids.zip(&samplers) {
        assert_eq!(sampler.output_len(), 0);
        drafter.forget(id);
    }
    assert_eq!(drafter.check_invariants(), Ok(()));
    (drafts, counts)
}

/// Asserts that these drafters, which are alike, draft the same on the GPU and on the host, which draws for requests that
/// allow all ids. A round waits at most so often, for one request and for several.
fn assert_same([mut there, mut here]: [BlockDrafter; 2], hidden: Option<&Tensor>, waits: i64) {
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
    let all = Arc::new(Mask::of(&(0..VOCAB).collect::<Vec<u32>>()));
    let kinds = [
        (params(1, 0.0), (coupled, 1)),
        (params(2, 0.0), (coupled, 3)),
        (params(3, 0.9), (coupled, 1)),
        (filtered.clone(), (coupled, 1)),
        (params(5, 0.9), (rejection, 1)),
        (filtered, (rejection, 1)),
    ];
    // Each alone, and all in one round.
    for asked in kinds.chunks(1).chain([&kinds[..]]) {
        let on_host = |(params, kind): &Asked| {
            let allowed = Some(all.clone());
            let params = params.clone();
            (SamplingParams { allowed, ..params }, *kind)
        };
        let on_host: Vec<_> = asked.iter().map(on_host).collect();
        let (got, counts) = drafts(&mut there, hidden, asked);
        let (want, _) = drafts(&mut here, hidden, &on_host);
        if let Some(counts) = counts {
            assert!(counts.waits <= waits, "{} at once: {counts:?}", asked.len());
        }
        assert_eq!((got.len(), want.len()), (asked.len(), asked.len()));
        for ((got, want), (_, kind)) in got.iter().zip(&want).zip(asked) {
            assert_like(got, want, *kind);
        }
    }
}

/// Asserts that a GPU has drawn the same draft as the host.
fn assert_like(got: &Draft, want: &Draft, kind: (Acceptance, usize)) {
    assert_eq!(
        (&got.tokens, &got.parents),
        (&want.tokens, &want.parents),
        "{kind:?}"
    );
    assert!(got.len() >= LENGTH, "{kind:?}: {got:?}");
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

#[test]
fn a_gpu_draws_the_blocks_of_a_model_that_the_host_draws() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let mask = VOCAB as usize - 1;
    let source = shape(folder.path(), "llama", 64, &[("pard_token", mask)]);
    let drafters = [(); 2].map(|()| {
        let model = model(&source, &gpu, Some(DType::BF16), 3);
        BlockDrafter::of_model(model, BLOCKS, BLOCK_SIZE, CHUNK).unwrap()
    });
    assert_same(drafters, None, 1);
}

/// A parallel head with random weights for `target`, a Llama of `source`, both of whose layers it reads; `layout` is added to
/// its config.
fn head(
    source: &ModelSource,
    gpu: &Device,
    target: &dyn LoadedModel,
    layout: &Value,
) -> Box<dyn Head> {
    let ModelSource::Folder(path) = source else {
        panic!("{source:?}");
    };
    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["model_type"] = "qwen3".into();
    config["block_size"] = (LENGTH + 1).into();
    let folder = tempfile::tempdir().unwrap();
    let source = configured(folder.path(), config, members(layout));
    let options = LoadOptions {
        device: gpu.clone(),
        format: LoadFormat::Dummy,
        seed: 9,
        ..LoadOptions::default()
    };
    load_head(&source, HeadKind::Parallel, &options, target).unwrap()
}

/// Of heads whose tokens do not depend on one another, and of those that follow paths, level by level.
#[test]
fn a_gpu_draws_the_blocks_of_heads_that_the_host_draws() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = model(&source, &gpu, Some(DType::BF16), 5);
    let (rows, width) = (TOKENS - 1, 2 * 256);
    let state = |i: usize| (mix(i as u64) % 2001) as f32 / 1000. - 1.;
    let states = (0..rows * width).map(state).collect();
    let hidden = Tensor::from_vec(states, (rows, width), &gpu).unwrap();
    let hidden = hidden.to_dtype(DType::BF16).unwrap();
    let dflash = json!({
        "architectures": ["DFlashDraftModel"], "num_target_layers": 2,
        "dflash_config": { "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1] }
    });
    let dspark = json!({
        "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1],
        "mask_token_id": VOCAB - 1, "num_anchors": 512, "markov_rank": 8,
        "markov_head_type": "vanilla", "enable_confidence_head": true,
        "confidence_head_with_markov": true
    });
    // A level of a path has its tokens and their confidence.
    for (layout, waits) in [(dflash, 1), (dspark, 2 * LENGTH as i64)] {
        let drafters = [(); 2].map(|()| {
            let head = head(&source, &gpu, &*target, &layout);
            BlockDrafter::new(head, BLOCKS, BLOCK_SIZE, CHUNK).unwrap()
        });
        assert_same(drafters, Some(&hidden), waits);
    }
}
