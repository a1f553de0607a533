//! LoRA adapters against transformers and PEFT, in company, and in the engine; fixtures are made by
//! scripts/make-lora-fixtures.py.

use crate::architectures::{Fixture, TOLERANCE, fixture};
use crate::common::rig::{Rig, Seq};
use crate::common::tiny::open;
use crate::common::{assert_idle, chains, collect, crowded, greedy, reference, run, sampled};
use crate::glm_moe::write_gguf_of_glm_4v;
use crate::trees::RandomTrees;
use foretoken::engine::{self, EngineHandle, EngineOptions, Event, Request, SpecLimits};
use foretoken::model::Adapter;
use foretoken::model::AdapterLoader;
use foretoken::model::LoadedModel;
use foretoken::spec::{Drafter, Source, Tables};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest rank of the fixtures.
const MAX_RANK: usize = 4;

pub fn adapter_folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters");
    root.join(name)
}

/// The adapter of a fixture for `model`.
pub fn adapter(model: &dyn LoadedModel, name: &str) -> Arc<dyn Adapter> {
    let target = model.lora_target().unwrap();
    let loaded = target.load(name, &adapter_folder(name), MAX_RANK);
    loaded.unwrap_or_else(|e| panic!("{e}"))
}

fn base_of(name: &str) -> Fixture {
    fixture(name.split('-').next().unwrap())
}

/// What differs from what transformers computes with the adapter.
fn compare(model: Box<dyn LoadedModel>, name: &str) -> Result<(), String> {
    let seq = Seq::of_adapter(Some(adapter(&*model, name)));
    Fixture::read(&adapter_folder(name)).compare_with(model, seq, TOLERANCE)
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(adapter_folder("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert!(names.len() >= 5, "{names:?}");
    names
}

#[test]
fn log_probabilities_and_greedy_texts_are_those_of_peft() {
    for name in names() {
        compare(base_of(&name).open(), &name).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// llama.cpp's conversion reorders the rows of q and k of a Llama, and not those of a GLM.
#[test]
fn an_adapter_computes_the_same_over_a_gguf_file() {
    let mut count = 0;
    for name in names() {
        let base = base_of(&name);
        if !base.folder.join("gguf.json").exists() {
            continue;
        }
        let (_folder, file) = base.converted(&base.conversion());
        compare(open(&file).unwrap(), &name).unwrap_or_else(|e| panic!("{name}: {e}"));
        count += 1;
    }
    assert!(count >= 4, "{count}");
}

/// Files of a GLM for images have other rows of q and k than those for which adapters are trained.
#[test]
fn an_adapter_computes_the_same_over_a_gguf_file_of_glm_4v() {
    let folder = tempfile::tempdir().unwrap();
    let (file, name) = (folder.path().join("model.gguf"), "glm-fused");
    write_gguf_of_glm_4v(&base_of(name), &file);
    compare(open(&file).unwrap(), name).unwrap();
}

/// See [`Rig::in_company`].
fn in_company(chunks: &[usize], which: &[Option<&str>]) -> Vec<Vec<Vec<f32>>> {
    let base = fixture("llama");
    let model = base.open();
    let adapters: Vec<_> = which
        .iter()
        .map(|name| name.map(|name| adapter(&*model, name)))
        .collect();
    let mut rig = Rig::new(model, 64, 4);
    rig.in_company(adapters.into_iter(), &base.prompt, chunks)
}

/// Bit for bit, whoever shares the forward, and however a text is divided; the base's rows have those bits that they have
/// without any adapter.
#[test]
fn rows_do_not_know_the_adapters_of_their_neighbours() {
    let (one, two) = (Some("llama-all"), Some("llama-some"));
    let alone = |name| in_company(&[32], &[name]).remove(0);
    let all = [alone(None), alone(one), alone(two)];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
    for chunks in [&[32][..], &[1, 9, 2, 20], &[13, 13, 6]] {
        let which = [one, None, two, one, one, None];
        let together = in_company(chunks, &which);
        for (name, logits) in which.into_iter().zip(together) {
            let place = [None, one, two].iter().position(|other| *other == name);
            assert!(logits == all[place.unwrap()], "{name:?} in {chunks:?}");
        }
    }
}

/// An engine over the fixture, and the adapters.
fn start(
    drafter: Option<Box<dyn Drafter>>,
    spec: SpecLimits,
    blocks: usize,
) -> (EngineHandle, [Option<Arc<dyn Adapter>>; 3]) {
    let model = fixture("llama").open();
    let [one, two] = ["llama-all", "llama-some"].map(|name| Some(adapter(&*model, name)));
    let options = EngineOptions {
        max_loras: 4,
        ..crowded(spec, 20)
    };
    let engine = engine::spawn(model, drafter, blocks, 4, options).unwrap();
    (engine, [None, one, two])
}

fn of(request: Request, adapter: &Option<Arc<dyn Adapter>>) -> Request {
    Request {
        adapter: adapter.clone(),
        ..request
    }
}

/// Drafts, trees, chunks, preemption and prefix hits, with base and adapters in every batch: each text is the one that
/// its adapter generates alone, from scratch.
#[test]
fn the_engine_changes_no_text_of_an_adapter() {
    let base = fixture("llama");
    let model = base.open();
    let tree = SpecLimits {
        nodes: 6,
        topk: 3,
        ..chains(4)
    };
    let trees = RandomTrees::new(base.open(), model.subset(&[0]).unwrap());
    let drafters: [(Option<Box<dyn Drafter>>, SpecLimits); 3] = [
        (None, SpecLimits::default()),
        (Some(Box::new(Tables::new(1 << 20))), chains(4)),
        (Some(Box::new(trees)), tree),
    ];
    let mut model = base.open();
    for (drafter, spec) in drafters {
        let speculates = drafter.is_some();
        let (engine, adapters) = start(drafter, spec, 24);
        let mut requests = Vec::new();
        for adapter in &adapters {
            requests.push(of(greedy(&base.prompt, 24), adapter));
            requests.push(of(greedy(&base.prompt[..40], 24), adapter));
            requests.push(of(sampled(&base.prompt, 24, 5), adapter));
        }
        let wanted = requests.iter().map(|r| reference(&mut *model, r));
        let wanted: Vec<Vec<u32>> = wanted.collect();
        let expected = Fixture::read(&adapter_folder("llama-all"));
        assert_eq!(expected.prompt.len(), base.prompt.len());
        let mut accepted = 0;
        for _ in 0..2 {
            let answers = engine.submit_all(requests.clone()).unwrap();
            for (answer, want) in answers.into_iter().zip(&wanted) {
                let answer = collect(answer);
                assert_eq!(&answer.ids(), want);
                accepted += answer.spec.accepted;
            }
        }
        assert_idle(&engine);
        let stats = engine.stats();
        let (preempted, cached) = (stats.preemptions.get(), stats.prefix_cache_hits.get());
        assert!(
            preempted > 0 && cached > 0 && speculates == (accepted > 0),
            "{preempted} preemptions, {cached} cached tokens, {accepted} accepted"
        );
    }
}

/// The same prompt is computed anew for each adapter, and for each load of one.
#[test]
fn prefixes_are_not_shared_between_adapters() {
    let base = fixture("llama");
    let (engine, adapters) = start(None, SpecLimits::default(), 200);
    let again = adapter(&*base.open(), "llama-all");
    let again = Some(again);
    for adapter in adapters.iter().chain([&again]) {
        let request = of(greedy(&base.prompt, 2), adapter);
        assert_eq!(
            run(&engine, request.clone()).cached_tokens,
            0,
            "{adapter:?}"
        );
        assert_eq!(run(&engine, request).cached_tokens, 44, "{adapter:?}");
    }
    assert_idle(&engine);
}

/// Draft tokens of a request that come from answers to other requests.
fn drafted_from_others(engine: &EngineHandle, request: Request) -> usize {
    let request = Request {
        include_rounds: true,
        ..request
    };
    let mut events = engine.submit(request).unwrap();
    let mut count = 0;
    while let Some(event) = events.blocking_recv() {
        let Event::Tokens { round, finish, .. } = event else {
            panic!("{event:?}")
        };
        let nodes = round.iter().flat_map(|round| round.nodes());
        count += nodes
            .filter(|node| matches!(node.source, Source::Pool | Source::Recycled))
            .count();
        if finish.is_some() {
            break;
        }
    }
    count
}

/// What one adapter has answered is drafted for its own requests only.
#[test]
fn tables_are_not_shared_between_adapters() {
    let prompt: Vec<u32> = (100..110).collect();
    let drafted = [0, 1, 2].map(|asked: usize| {
        let (engine, adapters) = start(Some(Box::new(Tables::new(1 << 20))), chains(4), 200);
        let mut text = Vec::new();
        for _ in 0..3 {
            text = run(&engine, of(greedy(&prompt, 24), &adapters[1])).ids();
        }
        let start = [&prompt[..], &text[..5]].concat();
        let count = drafted_from_others(&engine, of(greedy(&start, 12), &adapters[asked]));
        assert_idle(&engine);
        count
    });
    assert!(
        drafted[0] == 0 && drafted[1] > 0 && drafted[2] == 0,
        "{drafted:?}"
    );
}

/// A request goes on with what it began with.
#[test]
fn an_adapter_lives_as_long_as_its_requests() {
    let base = fixture("llama");
    let (engine, [_, one, _]) = start(None, SpecLimits::default(), 200);
    let weak = Arc::downgrade(one.as_ref().unwrap());
    let request = of(greedy(&base.prompt, 40), &one);
    let want = reference(&mut *base.open(), &request);
    let answer = engine.submit(request).unwrap();
    drop(one);
    assert_eq!(collect(answer).ids(), want);
    assert_idle(&engine);
    assert!(weak.upgrade().is_none());
}

/// A model that takes no adapters says so, instead of answering as the base.
#[test]
fn an_engine_without_adapters_refuses_them() {
    let base = fixture("llama");
    let model = base.open();
    let one = Some(adapter(&*model, "llama-all"));
    let engine = engine::spawn(model, None, 24, 4, EngineOptions::default()).unwrap();
    let refused = engine.submit(of(greedy(&base.prompt, 2), &one));
    let error = refused.map(drop).unwrap_err().to_string();
    assert!(error.contains("takes no adapters"), "{error}");
}
