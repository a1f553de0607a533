//! Heads of other sizes than 64 and 128 values, of several sizes in one model, LayerNorm, and norms of rotated heads and of
//! values: texts do not depend on drafts, trees, preemption, the prefix cache or other requests.

use super::architectures::fixture;
use super::texts::{Trees, start_with};
use super::{BLOCK_SIZE, BLOCKS, gpu, loaded, model};
use crate::common::{PROMPT_WAIT, assert_idle, chains, collect, greedy, run};
use candle_core::DType;
use foretoken::engine::{self, EngineOptions, EngineThread, Request, SpecLimits};
use foretoken::kv::KvCacheDtype;
use foretoken::model::{HeadKind, LoadFormat, LoadOptions, LoadedModel, load_head};
use foretoken::sampling::SamplingParams;
use foretoken::spec::{BudgetMode, DraftModel, Drafter};
use std::sync::Arc;

/// Maximum rows per step.
const STEP: usize = 64;
/// Tokens that the fixtures of architectures know.
pub(super) const VOCAB: u32 = 256;
/// Slots of a block, and blocks for a few of the requests.
const FEW_SLOTS: usize = 4;
const FEW_BLOCKS: usize = 34;
/// The architectures, and values of a head: Gemma 4 has twice as many in layers without a window, LayerNorm is in
/// parallel blocks and in sequence, and Hunyuan has norms of rotated heads.
const MODELS: [(&str, usize); 5] = [
    ("gemma4", 40),
    ("gemma4_large", 160),
    ("cohere2", 80),
    ("starcoder2", 64),
    ("hunyuan", 48),
];

/// Requests of which most begin alike.
fn requests() -> Vec<Request> {
    let prompt = |len: u32, kept: u32| -> Vec<u32> {
        let token = |i| if i < kept { i * 37 } else { i * 53 + len };
        (0..len).map(|i| token(i) % 251).collect()
    };
    let sampled = |prompt: &[u32], seed| Request {
        params: SamplingParams {
            seed,
            ..SamplingParams::default()
        },
        ..greedy(prompt, 20)
    };
    vec![
        greedy(&prompt(50, 40), 20),
        greedy(&prompt(60, 40), 20),
        sampled(&prompt(41, 38), 1),
        greedy(&prompt(7, 0), 20),
        sampled(&prompt(50, 40), 2),
        greedy(&prompt(33, 32), 20),
    ]
}

/// Makes the drafter of a model, which the function loads, by its texts.
type MakeDrafter = fn(&dyn Fn() -> Box<dyn LoadedModel>, &[Vec<u32>]) -> Box<dyn Drafter>;

/// The model itself drafts.
pub(super) const ITSELF: MakeDrafter = |load, _| {
    let draft = DraftModel::new(load(), FEW_BLOCKS, FEW_SLOTS, STEP).unwrap();
    Box::new(draft)
};

/// Trees of drafts that are often right.
pub(super) const OFTEN_RIGHT: MakeDrafter = |_, texts| {
    Box::new(Trees {
        texts: texts.to_vec(),
        vocab: VOCAB,
        candidates: Arc::default(),
    })
};

#[test]
fn texts_depend_on_nothing_but_the_request() {
    test_texts(&MODELS, KvCacheDtype::Auto, ITSELF);
}

/// Texts of these architectures, with heads of so many values and such a KV cache, depend neither on trees of drafts nor on
/// preemption, the prefix cache or other requests.
pub(super) fn test_texts(
    models: &[(&str, usize)],
    kv_cache_dtype: KvCacheDtype,
    make_drafter: MakeDrafter,
) {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for &(name, dim) in models {
        let Some(source) = fixture(folder.path(), &format!("architectures/{name}"), dim) else {
            return;
        };
        let options = LoadOptions {
            dtype: Some(DType::BF16),
            device: gpu.clone(),
            seed: 3,
            kv_cache_dtype,
            ..LoadOptions::default()
        };
        let target = || loaded(&source, options.clone());
        let start = |blocks: usize, spec: SpecLimits, drafter: Option<Box<dyn Drafter>>| {
            let options = EngineOptions {
                max_num_seqs: 4,
                max_num_batched_tokens: STEP,
                spec,
                spec_budget: BudgetMode::Fixed,
                // Prompts are read at once on an emulated GPU, too, so that all texts grow together.
                max_prompt_wait: PROMPT_WAIT,
                ..EngineOptions::default()
            };
            let engine = engine::spawn(target(), drafter, blocks, FEW_SLOTS, options).unwrap();
            EngineThread::new(engine, EngineThread::PATIENCE)
        };
        let plain = start(4 * FEW_BLOCKS, chains(0), None);
        let alone: Vec<Vec<u32>> = (requests().into_iter())
            .map(|request| run(&plain, request).ids())
            .collect();
        assert_idle(&plain);
        let texts = requests().into_iter().zip(&alone);
        let texts: Vec<Vec<u32>> = texts
            .map(|(request, text)| [&request.prompt[..], text].concat())
            .collect();
        let trees = SpecLimits {
            length: 4,
            nodes: 12,
            topk: 3,
        };
        for spec in [chains(0), trees] {
            let drafted = spec.length > 0;
            let drafter = drafted.then(|| make_drafter(&target, &texts));
            let engine = start(FEW_BLOCKS, spec, drafter);
            let mut accepted = 0;
            for _ in 0..2 {
                let events = engine.submit_all(requests()).unwrap();
                for (i, events) in events.into_iter().enumerate() {
                    let answer = collect(events);
                    assert_eq!(answer.ids(), alone[i], "{name}, request {i}, {drafted}");
                    accepted += answer.spec.accepted;
                }
            }
            let stats = engine.stats();
            let (preempted, cached) = (stats.preemptions.get(), stats.prefix_cache_hits.get());
            assert!(
                preempted > 0 && cached > 0 && (accepted > 0) == drafted,
                "{name}: {preempted} preemptions, {cached} cached tokens, {accepted} accepted"
            );
            assert_idle(&engine);
        }
    }
}

/// Gemma 4's assistants read K and V of layers whose heads have different sizes.
#[test]
fn texts_do_not_depend_on_an_assistant() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = |kind: &str| fixture(folder.path(), &format!("{kind}/gemma4_large"), 40);
    let (Some(of_target), Some(of_head)) = (source("architectures"), source("assistants")) else {
        return;
    };
    let target = || model(&of_target, &gpu, Some(DType::BF16), 3);
    let options = LoadOptions {
        device: gpu.clone(),
        format: LoadFormat::Dummy,
        seed: 4,
        ..LoadOptions::default()
    };
    let head = load_head(&of_head, HeadKind::Assistant, &options, &*target()).unwrap();
    let draft = DraftModel::of_head(head, BLOCKS, BLOCK_SIZE, STEP).unwrap();
    let plain = start_with(target(), None, chains(0), BudgetMode::Fixed);
    let drafter = Some(Box::new(draft) as Box<dyn Drafter>);
    let engine = start_with(target(), drafter, chains(3), BudgetMode::Fixed);
    for request in requests() {
        let (want, got) = (run(&plain, request.clone()), run(&engine, request));
        assert_eq!(got.ids(), want.ids());
        assert!(got.spec.drafted > 0, "{:?}", got.spec);
    }
    assert_idle(&plain);
    assert_idle(&engine);
}
