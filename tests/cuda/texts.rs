//! Through the engine: texts do not depend on drafts, nor on where their tokens are drawn.

use super::{BLOCK_SIZE, BLOCKS, batch_invariant, configured, gpu, model, shape, tokens};
use crate::common::{PROMPT_WAIT, assert_idle, chains, collect, greedy, run};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineOptions, EngineThread, Request, SpecLimits};
use foretoken::error::Result;
use foretoken::model::{
    Head, HeadKind, LoadFormat, LoadOptions, LoadedModel, Model, ModelSource, load_head,
};
use foretoken::sampling::{Acceptance, SamplingParams};
use foretoken::spec::{BudgetMode, Committed, Draft, DraftModel, DraftRequest, Drafter, Source};
use serde_json::json;
use std::sync::{Arc, Mutex};

/// Maximum rows per step of the engine, fewer than the longest prompt has.
const STEP: usize = 64;

pub(super) fn start(
    target: Box<dyn Model>,
    draft: Option<Box<dyn Model>>,
    k: usize,
) -> EngineThread {
    let drafter = draft.map(|draft| {
        let draft = DraftModel::new(draft, BLOCKS, BLOCK_SIZE, STEP).unwrap();
        Box::new(draft) as Box<dyn Drafter>
    });
    start_with(target, drafter, chains(k), BudgetMode::Fixed)
}

pub(super) fn start_with(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    spec: SpecLimits,
    spec_budget: BudgetMode,
) -> EngineThread {
    let options = EngineOptions {
        max_num_seqs: 3,
        max_num_batched_tokens: STEP,
        spec,
        spec_budget,
        max_prompt_wait: PROMPT_WAIT,
        ..EngineOptions::default()
    };
    let engine = engine::spawn(target, drafter, BLOCKS, BLOCK_SIZE, options).unwrap();
    EngineThread::new(engine, EngineThread::PATIENCE)
}

/// Sampled requests with and without filters and penalties, and a greedy one with penalties.
pub(super) fn seeded() -> Vec<Request> {
    let params = SamplingParams {
        temperature: 0.8,
        ..SamplingParams::default()
    };
    let all = [
        params.clone(),
        SamplingParams {
            top_p: 0.8,
            repetition_penalty: 1.3,
            ..params.clone()
        },
        SamplingParams {
            top_k: 20,
            min_p: 0.01,
            frequency_penalty: 0.4,
            logit_bias: vec![(7, 3.0), (9, -100.0)],
            ..params.clone()
        },
        SamplingParams {
            temperature: 0.0,
            presence_penalty: 0.7,
            ..params
        },
    ];
    let numbered = (0..).zip(all);
    let requests = numbered.map(|(seed, params)| Request {
        params: SamplingParams { seed, ..params },
        ..greedy(&tokens(40), 40)
    });
    requests.collect()
}

#[test]
fn greedy_texts_do_not_depend_on_drafts() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = || model(&source, &gpu, Some(DType::BF16), 3);
    // One draft is the target itself, so it is right except where the kernels for prompts and for decoding
    // differ in the last bit; the other draft is hardly ever right.
    for (seed, k) in [(3, 5), (4, 3)] {
        let plain = start(target(), None, 0);
        let speculative = start(
            target(),
            Some(model(&source, &gpu, Some(DType::BF16), seed)),
            k,
        );
        for prompt in [&tokens(7)[..], &tokens(90)] {
            let request = greedy(prompt, 40);
            let (want, got) = (run(&plain, request.clone()), run(&speculative, request));
            assert_eq!(got.ids(), want.ids());
            let right = got.spec.accepted * 10 >= got.spec.tested * 9;
            assert_eq!(right, seed == 3, "{:?}", got.spec);
        }
        // In a batch there are more rows than a GPU gives the same bits for, so only the lengths are known.
        let submit = |len| speculative.submit(greedy(&tokens(len), 8)).unwrap();
        let requests = [5, 30, 70].map(submit);
        for events in requests {
            assert_eq!(collect(events).ids().len(), 8);
        }
        assert_idle(&plain);
        assert_idle(&speculative);
    }
}

/// There are few enough rows for them to have the same bits as alone. Some drafts end before others, and
/// one waits for its penalties.
#[test]
fn drafts_of_different_lengths_share_steps() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 7);
    let engine = start(one(), Some(one()), 5);
    let request = |len: usize, spec_length, penalty| {
        let mut request = greedy(&tokens(len), 24);
        request.spec_length = Some(spec_length);
        request.params.repetition_penalty = penalty;
        request
    };
    let requests = [request(4, 5, 1.0), request(3, 2, 1.0), request(5, 3, 1.2)];
    let alone = requests.clone().map(|mut request| {
        request.spec_length = Some(0);
        run(&engine, request).ids()
    });
    let events = requests.map(|request| engine.submit(request).unwrap());
    for (events, alone) in events.into_iter().zip(alone) {
        let answer = collect(events);
        assert_eq!(answer.ids(), alone);
        assert_eq!(
            answer.spec.accepted, answer.spec.drafted,
            "{:?}",
            answer.spec
        );
    }
    assert_idle(&engine);
}

/// Tokens of requests with log-probabilities are drawn on the CPU, others on the device of the logits.
#[test]
fn sampled_texts_do_not_depend_on_where_they_are_drawn() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 5);
    let engine = start(one(), Some(one()), 3);
    for acceptance in [Acceptance::Coupled, Acceptance::Rejection] {
        for mut request in seeded() {
            request.acceptance = Some(acceptance);
            let there = run(&engine, request.clone());
            request.logprobs = Some(1);
            let here = run(&engine, request.clone());
            assert_eq!(there.ids(), here.ids(), "{request:?}");
            assert_eq!(there.spec.accepted, here.spec.accepted, "{request:?}");
            assert!(there.spec.accepted > 0, "{request:?}");
        }
    }
    assert_idle(&engine);
}

/// Under the coupled rule, for a draft that has the target's weights, and for one that has others; for chains,
/// whose tokens stay on the GPU, and for trees, of which every level is drawn there.
#[test]
fn seeded_texts_do_not_depend_on_draft_models() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = |seed| model(&source, &gpu, Some(DType::BF16), seed);
    let plain = start(one(5), None, 0);
    let want: Vec<Vec<u32>> = seeded().into_iter().map(|r| run(&plain, r).ids()).collect();
    assert_idle(&plain);
    for seed in [5, 6] {
        let draft = DraftModel::new(one(seed), BLOCKS, BLOCK_SIZE, STEP).unwrap();
        let spec = SpecLimits {
            length: 5,
            nodes: 10,
            topk: 3,
        };
        let engine = start_with(one(5), Some(Box::new(draft)), spec, BudgetMode::Fixed);
        for (mut request, want) in seeded().into_iter().zip(&want) {
            for (length, topk) in [(1, 1), (5, 1), (4, 3), (5, 2)] {
                request.spec_length = Some(length);
                request.spec_topk = Some(topk);
                let got = run(&engine, request.clone());
                assert_eq!(got.ids(), *want, "{request:?}");
                let right = got.spec.accepted >= want.len() / 3;
                assert!(right || seed == 6, "{:?} of {request:?}", got.spec);
                let branched = got.spec.drafted > got.spec.tested;
                assert!(branched || topk == 1, "{:?} of {request:?}", got.spec);
            }
        }
        assert_idle(&engine);
    }
    let draft = DraftModel::new(one(5), BLOCKS, BLOCK_SIZE, STEP).unwrap();
    let spec = SpecLimits {
        length: 5,
        ..SpecLimits::default()
    };
    let engine = start_with(one(5), Some(Box::new(draft)), spec, BudgetMode::Adaptive);
    for (request, want) in seeded().into_iter().zip(&want) {
        assert_eq!(run(&engine, request.clone()).ids(), *want, "{request:?}");
    }
    assert_idle(&engine);
}

/// An EAGLE-3 head with random weights for `target`, a Llama of `source`, of which it reads hidden states in `layers`. It
/// predicts some of the ids.
pub(super) fn eagle3(
    source: &ModelSource,
    device: &Device,
    target: &dyn LoadedModel,
    layers: [usize; 3],
) -> Box<dyn Head> {
    let ModelSource::Folder(path) = source else {
        panic!("{source:?}");
    };
    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let more = [
        ("architectures", json!(["LlamaForCausalLMEagle3"])),
        ("num_hidden_layers", 1.into()),
        ("draft_vocab_size", 200.into()),
        ("eagle_aux_hidden_state_layer_ids", json!(layers)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let source = configured(folder.path(), config, more);
    let options = LoadOptions {
        device: device.clone(),
        format: LoadFormat::Dummy,
        seed: 9,
        ..LoadOptions::default()
    };
    load_head(&source, HeadKind::Eagle3, &options, target).unwrap()
}

/// A head reads hidden states that stay on the GPU, of forwards that are graphs and of others.
#[test]
fn texts_do_not_depend_on_a_head() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = || model(&source, &gpu, Some(DType::BF16), 5);
    let plain = start(target(), None, 0);
    let want: Vec<Vec<u32>> = seeded().into_iter().map(|r| run(&plain, r).ids()).collect();
    assert_idle(&plain);
    let head = eagle3(&source, &gpu, &*target(), [0, 1, 2]);
    let draft = DraftModel::of_head(head, BLOCKS, BLOCK_SIZE, STEP).unwrap();
    let spec = SpecLimits {
        length: 4,
        nodes: 10,
        topk: 3,
    };
    let engine = start_with(target(), Some(Box::new(draft)), spec, BudgetMode::Fixed);
    for (mut request, want) in seeded().into_iter().zip(&want) {
        for (length, topk) in [(3, 1), (4, 3)] {
            request.spec_length = Some(length);
            request.spec_topk = Some(topk);
            let got = run(&engine, request.clone());
            assert_eq!(got.ids(), *want, "{request:?}");
            assert!(got.spec.drafted > 0, "{request:?}");
        }
    }
    assert_idle(&engine);
}

/// As in [`Committed::candidates`].
pub(super) type Candidates = Vec<(u32, Vec<u32>)>;

/// Drafts trees around texts that are known: most levels have the right token after wrong ones, and wrong
/// ones have children.
pub(super) struct Trees {
    pub texts: Vec<Vec<u32>>,
    pub vocab: u32,
    /// What the target's best next tokens were.
    pub candidates: Arc<Mutex<Candidates>>,
}

const DEPTH: usize = 4;

impl Trees {
    fn draft(&self, known: &[u32]) -> Draft {
        let text = self.texts.iter().find(|text| text.starts_with(known));
        let next = text.map_or(&[][..], |text| &text[known.len()..]);
        let (mut draft, mut right, mut wrong) = (Draft::default(), None, None);
        for (depth, &token) in next.iter().take(DEPTH).enumerate() {
            let other = |by: usize| (token + 1 + (known.len() + by) as u32 % 9) % self.vocab;
            let stray = draft.add(other(depth), wrong, 0.1, Source::Own);
            let sibling = draft.add(other(depth + 3), right, 0.1, Source::Pool);
            wrong = Some(if depth % 2 == 0 { stray } else { sibling });
            // Some drafts end early.
            if (known.len() + depth) % 7 == 6 {
                break;
            }
            right = Some(draft.add(token, right, 0.1, Source::Own));
        }
        draft
    }
}

impl Drafter for Trees {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let drafts = requests.iter().map(|request| self.draft(request.tokens));
        Ok(drafts.collect())
    }

    fn candidates(&self) -> usize {
        8
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for one in committed {
            let all = one.candidates.iter().cloned();
            self.candidates.lock().unwrap().extend(all);
        }
    }
}

/// Every row of a tree is drawn after its own path, and the target's best next tokens come with it: of all
/// rows, wherever they are found.
#[test]
fn seeded_texts_do_not_depend_on_trees() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 5);
    let plain = start(one(), None, 0);
    let texts: Vec<Vec<u32>> = seeded()
        .into_iter()
        .map(|request| [request.prompt.clone(), run(&plain, request).ids()].concat())
        .collect();
    let candidates = Arc::default();
    let trees = Trees {
        texts: texts.clone(),
        vocab: 512,
        candidates: Arc::clone(&candidates),
    };
    let spec = SpecLimits {
        length: DEPTH,
        nodes: 3 * DEPTH,
        topk: 3,
    };
    let engine = start_with(one(), Some(Box::new(trees)), spec, BudgetMode::Fixed);
    for (text, mut request) in texts.iter().zip(seeded()) {
        let got = run(&engine, request.clone());
        let all = [request.prompt.clone(), got.ids()].concat();
        assert_eq!(all, *text, "{request:?}");
        assert!(got.spec.accepted > 20, "{:?} of {request:?}", got.spec);
        let there = std::mem::take(&mut *candidates.lock().unwrap());
        // The same on the host.
        request.logprobs = Some(1);
        assert_eq!(
            run(&engine, request.clone()).ids(),
            got.ids(),
            "{request:?}"
        );
        let here = std::mem::take(&mut *candidates.lock().unwrap());
        assert!(there.len() > 40, "{} rows", there.len());
        assert!(there.iter().all(|(_, best)| best.len() == 8));
        assert_eq!(there, here, "{request:?}");
    }
    assert_idle(&engine);
    assert_idle(&plain);
}

/// With `--batch-invariant`: nine concurrent requests, short and long, drafted and sampled, in a pool that
/// is too small for all of them, have the same texts as alone and without drafts.
#[test]
fn batch_invariant_texts_depend_on_nothing_but_the_request() {
    const SEQUENCES: usize = 9;
    const FEW_BLOCKS: usize = 26;
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = || batch_invariant(&source, &gpu, 3);
    let start = |drafted: bool| {
        let drafter = drafted.then(|| {
            let draft = DraftModel::new(target(), FEW_BLOCKS, BLOCK_SIZE, STEP).unwrap();
            Box::new(draft) as Box<dyn Drafter>
        });
        let options = EngineOptions {
            max_num_seqs: SEQUENCES,
            max_num_batched_tokens: STEP,
            spec: chains(if drafted { 5 } else { 0 }),
            spec_budget: BudgetMode::Fixed,
            // Prompts are read at once on an emulated GPU, too, so that all texts grow together.
            max_prompt_wait: PROMPT_WAIT,
            ..EngineOptions::default()
        };
        let engine = engine::spawn(target(), drafter, FEW_BLOCKS, BLOCK_SIZE, options).unwrap();
        EngineThread::new(engine, EngineThread::PATIENCE)
    };
    let request = |i: usize| {
        let mut request = greedy(&tokens([5, 90, 30, 17, 70, 3, 50, 26, 110][i])[..], 40);
        if i % 4 == 3 {
            request.params = SamplingParams {
                seed: i as u64,
                ..SamplingParams::default()
            };
        }
        request
    };
    let plain = start(false);
    let alone: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|i| run(&plain, request(i)).ids())
        .collect();
    assert_idle(&plain);
    for drafted in [false, true] {
        let engine = start(drafted);
        let requests = (0..SEQUENCES).map(request).collect();
        let events = engine.submit_all(requests).unwrap();
        for (i, events) in events.into_iter().enumerate() {
            let answer = collect(events);
            assert_eq!(answer.ids(), alone[i], "request {i}, drafted: {drafted}");
            if drafted {
                assert!(answer.spec.accepted > 0, "request {i}");
            }
        }
        assert!(
            engine.stats().preemptions.get() > 0,
            "the pool is too large"
        );
        assert_idle(&engine);
    }
}
