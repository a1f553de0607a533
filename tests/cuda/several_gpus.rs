//! Models whose layers are on two or three GPUs: bits and texts are those of one. The emulated GPUs end the program if a kernel is
//! given memory of another GPU than its own, or something is read before it is there.

mod commands;

use super::architectures::fixture;
use super::lora::{in_company, two};
use super::quantized::{noise, weight};
use super::texts::{Trees, eagle3, seeded, start_with};
use super::{BLOCK_SIZE, BLOCKS, Gpu, expert_models, latent, loaded, logits, shape};
use crate::common::{PROMPT_WAIT, assert_idle, chains, collect, greedy, run};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineOptions, EngineThread, Request, SpecLimits};
use foretoken::kernels;
use foretoken::kernels::graph::Recorder;
use foretoken::kernels::quant::{BlockType, matmul_quantized};
use foretoken::model::{AdapterLoader, LoadOptions, LoadedModel, Model, ModelSource};
use foretoken::sampling::SamplingParams;
use foretoken::spec::{BudgetMode, DraftContext, DraftModel, Drafter, Tables};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Three GPUs of one machine.
struct Gpus {
    devices: Vec<Device>,
    _alone: Gpu,
}

/// `None`: there are fewer, which are not emulated.
fn gpus() -> Option<Gpus> {
    let alone = super::gpu();
    match kernels::devices("cuda", 3) {
        Ok(devices) => Some(Gpus {
            devices,
            _alone: alone,
        }),
        Err(_) if std::env::var_os("FORETOKEN_EMULATED_GPU").is_none() => None,
        Err(e) => panic!("{e}"),
    }
}

impl Gpus {
    /// On so many GPUs. Three have shares that differ.
    fn options(&self, seed: u64, gpus: usize) -> LoadOptions {
        LoadOptions {
            dtype: Some(DType::BF16),
            device: self.devices[0].clone(),
            more_devices: self.devices[1..gpus].to_vec(),
            shares: if gpus == 3 {
                vec![3., 1., 2.]
            } else {
                Vec::new()
            },
            seed,
            ..LoadOptions::default()
        }
    }

    /// `source` with random weights from `seed` on so many of them.
    fn load(&self, source: &ModelSource, seed: u64, gpus: usize) -> Box<dyn LoadedModel> {
        loaded(source, self.options(seed, gpus))
    }
}

/// A model of four layers.
fn four(folder: &Path) -> ModelSource {
    shape(folder, "llama", 64, &[("num_hidden_layers", 4)])
}

/// Attention with biases and with norms of heads, inputs of layers, experts, latent attention, and states.
fn sources(folder: &Path) -> Vec<ModelSource> {
    let mut all = vec![
        four(folder),
        shape(folder, "qwen2", 64, &[]),
        shape(folder, "qwen3", 128, &[]),
    ];
    all.extend(expert_models::sources(&folder.join("experts")));
    all.extend(latent::sources(&folder.join("latent")));
    let fixtures = [
        ("gemma4", 40),
        ("lfm2", 64),
        ("qwen3_next", 64),
        ("granite4_hybrid", 64),
    ];
    let fixtures =
        fixtures.map(|(name, dim)| fixture(folder, &format!("architectures/{name}"), dim));
    all.extend(fixtures.into_iter().flatten());
    all
}

/// A prompt of more rows than decoding has, one that continues it, decoding and verification.
#[test]
fn rows_have_the_bits_of_one_gpu() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (tokens, cuts) = (super::tokens(76), [50, 17, 1, 5, 1, 2]);
    for source in sources(folder.path()) {
        let mut one = own.load(&source, 1, 1);
        let layers = one.config().num_layers();
        let on = |model: &dyn LoadedModel| -> Vec<usize> {
            (0..layers).map(|layer| model.split().gpu(layer)).collect()
        };
        assert!(on(&*one).iter().all(|&gpu| gpu == 0), "{source:?}");
        let vocab = one.info().vocab_size as u32;
        let tokens: Vec<u32> = tokens.iter().map(|id| id % vocab).collect();
        let want = logits(&mut *one, &tokens, &cuts);
        for count in (2..=3).filter(|&count| count == 2 || layers > 3) {
            let mut all = own.load(&source, 1, count);
            let gpus = on(&*all);
            assert!(gpus.is_sorted() && gpus.starts_with(&[0]) && gpus.ends_with(&[count - 1]));
            // Pools are where their layers are.
            let (shape, whole) = (all.kv_shape(), one.kv_shape());
            let bytes = |gpu| shape.bytes_per_token_on(gpu) + shape.bytes_per_state_on(gpu);
            let bytes: Vec<usize> = (0..count).map(bytes).collect();
            assert_eq!(
                bytes.iter().sum::<usize>(),
                whole.bytes_per_token() + whole.bytes_per_state()
            );
            assert!(
                bytes.iter().all(|&bytes| bytes > 0),
                "{source:?}: {bytes:?}"
            );
            let found = logits(&mut *all, &tokens, &cuts);
            assert!(found == want, "{source:?} on {count} GPUs");
        }
    }
}

/// Shares decide how many layers a GPU has.
#[test]
fn shares_of_the_weights_are_kept() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[("num_hidden_layers", 8)]);
    let first = |shares: &[f64]| {
        let options = LoadOptions {
            shares: shares.to_vec(),
            ..own.options(1, 2)
        };
        let model = loaded(&source, options);
        (0..8)
            .filter(|&layer| model.split().gpu(layer) == 0)
            .count()
    };
    // The first has the embedding and the output layer, too.
    let equal = first(&[]);
    assert!((1..=4).contains(&equal), "{equal}");
    assert!(first(&[9., 1.]) > equal && first(&[1., 9.]) == 1);
}

/// Drafters of all kinds, with chains and with trees, alone and together.
#[test]
fn texts_are_those_of_one_gpu() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = four(folder.path());
    let requests = || {
        let greedy = [5, 40].map(|len| greedy(&super::tokens(len), 16));
        seeded().into_iter().take(2).chain(greedy)
    };
    let plain = start_with(own.load(&source, 5, 1), None, chains(0), BudgetMode::Fixed);
    let want: Vec<Vec<u32>> = requests().map(|r| run(&plain, r).ids()).collect();
    assert_idle(&plain);
    drop(plain);
    let draft = |model: Box<dyn Model>| -> Box<dyn Drafter> {
        Box::new(DraftModel::new(model, BLOCKS, BLOCK_SIZE, 64).unwrap())
    };
    let target = |gpus| own.load(&source, 5, gpus);
    // It reads hidden states of layers on both GPUs, and of the last one.
    let head = eagle3(&source, &own.devices[0], &*target(2), [0, 3, 4]);
    let head = DraftModel::of_head(head, BLOCKS, BLOCK_SIZE, 64).unwrap();
    let texts = requests().zip(&want);
    let trees = Trees {
        texts: texts
            .map(|(r, text)| [&r.prompt[..], text].concat())
            .collect(),
        vocab: 512,
        candidates: Arc::default(),
    };
    type Case = (&'static str, usize, Option<Box<dyn Drafter>>);
    let drafters: [Case; 6] = [
        ("none", 3, None),
        ("tables", 2, Some(Box::new(Tables::new(1 << 20)))),
        (
            "a model on the first GPU",
            2,
            Some(draft(own.load(&source, 5, 1))),
        ),
        (
            "layers of all GPUs",
            3,
            Some(draft(target(3).subset(&[0, 2, 3]).unwrap())),
        ),
        ("a head", 2, Some(Box::new(head))),
        ("trees", 3, Some(Box::new(trees))),
    ];
    for (name, gpus, drafter) in drafters {
        let spec = SpecLimits {
            length: 4,
            nodes: 10,
            topk: 3,
        };
        let is_drafted = drafter.is_some();
        let engine = start_with(target(gpus), drafter, spec, BudgetMode::Fixed);
        let (mut drafted, mut accepted) = (0, 0);
        for (request, want) in requests().zip(&want) {
            let got = run(&engine, request.clone());
            assert_eq!(got.ids(), *want, "{name}: {request:?}");
            drafted += got.spec.drafted;
            accepted += got.spec.accepted;
        }
        let events = engine.submit_all(requests().collect()).unwrap();
        for (events, want) in events.into_iter().zip(&want) {
            assert_eq!(collect(events).ids(), *want, "{name}");
        }
        assert_eq!(drafted > 0, is_drafted, "{name}");
        // A random head is hardly ever right.
        let is_often_right = ["a model on the first GPU", "trees"].contains(&name);
        assert!(accepted > 0 || !is_often_right, "{name}");
        assert_idle(&engine);
    }
}

/// With `--batch-invariant`, in a pool that is too small for all of nine requests, of which some begin alike, and with
/// states.
#[test]
fn texts_depend_neither_on_preemption_nor_on_the_prefix_cache() {
    const FEW_BLOCKS: usize = 26;
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut sources = vec![four(folder.path())];
    sources.extend(fixture(folder.path(), "architectures/qwen3_5", 64));
    for source in sources {
        let target = |gpus| {
            let options = LoadOptions {
                batch_invariant: true,
                ..own.options(3, gpus)
            };
            loaded(&source, options)
        };
        let vocab = target(1).info().vocab_size as u32;
        let start = |gpus, blocks, drafted: bool| {
            let tables = drafted.then(|| Box::new(Tables::new(1 << 20)) as Box<dyn Drafter>);
            let options = EngineOptions {
                max_num_seqs: 9,
                max_num_batched_tokens: 64,
                spec: chains(if drafted { 4 } else { 0 }),
                spec_budget: BudgetMode::Fixed,
                max_prompt_wait: PROMPT_WAIT,
                ..EngineOptions::default()
            };
            let engine = engine::spawn(target(gpus), tables, blocks, BLOCK_SIZE, options);
            EngineThread::new(engine.unwrap(), EngineThread::PATIENCE)
        };
        let request = |i: usize| {
            let tokens = super::tokens([5, 80, 30, 17, 70, 3, 50, 26, 85][i]);
            let tokens: Vec<u32> = tokens.into_iter().map(|id| id % vocab).collect();
            let mut request = greedy(&tokens, 40);
            if i % 4 == 3 {
                request.params = SamplingParams {
                    seed: i as u64,
                    ..SamplingParams::default()
                };
            }
            request
        };
        let plain = start(1, BLOCKS, false);
        let alone: Vec<Vec<u32>> = (0..9).map(|i| run(&plain, request(i)).ids()).collect();
        assert_idle(&plain);
        drop(plain);
        for drafted in [false, true] {
            let engine = start(if drafted { 3 } else { 2 }, FEW_BLOCKS, drafted);
            for _ in 0..2 {
                let events = engine.submit_all((0..9).map(request).collect()).unwrap();
                for (i, events) in events.into_iter().enumerate() {
                    assert_eq!(collect(events).ids(), alone[i], "{source:?}: request {i}");
                }
            }
            let stats = engine.stats();
            assert!(stats.preemptions.get() > 0 && stats.prefix_cache_hits.get() > 0);
            assert_idle(&engine);
        }
    }
}

/// Adapters that change layers of all GPUs, and rows without one.
#[test]
fn rows_with_adapters_have_the_bits_of_one_gpu() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = four(folder.path());
    let [one, two] = two(folder.path(), &*own.load(&source, 2, 1));
    let which = [Some(&*one), None, Some(&*two), Some(&*one)];
    let on = |gpus| in_company(own.load(&source, 2, gpus), &[13, 1, 4], &which);
    let want = on(1);
    assert!(want[0] != want[1] && want[1] != want[2]);
    assert!(on(2) == want);
    assert!(on(3) == want);
}

/// Threads share the queue of one of several GPUs: an adapter that one loads is no part of what another records.
#[test]
fn an_adapter_is_loaded_beside_a_recording() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = own.load(&four(folder.path()), 2, 2);
    let [one, _] = two(folder.path(), &*model);
    let target = model.lora_target().unwrap();
    let gpu = &own.devices[0];
    let (weight, _) = weight(BlockType::Q4K, (64, 256), gpu);
    let x = noise(1, 256, DType::BF16, gpu);
    let (tell, told) = mpsc::channel();
    thread::scope(|threads| {
        let loading = threads.spawn(move || {
            told.recv().unwrap();
            target.load("a", &one, 16).map(drop)
        });
        let mut calls = 0;
        let work = || -> candle_core::Result<()> {
            calls += 1;
            matmul_quantized(&[&weight], &x, false)?;
            if calls == 2 {
                tell.send(()).unwrap();
                thread::sleep(Duration::from_millis(300));
            }
            Ok(())
        };
        // SAFETY: it is not replayed.
        let graph = unsafe { Recorder::default().record(gpu, work) };
        assert_eq!(graph.unwrap().nodes().unwrap(), 1);
        loading.join().unwrap().unwrap();
    });
}

/// What two GPUs have kept on a disk is used by two, by three, and by one.
#[test]
fn blocks_on_a_disk_are_those_of_one_gpu() {
    let Some(own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = four(folder.path());
    let disk = tempfile::tempdir().unwrap();
    let ask = |gpus| {
        let options = LoadOptions {
            batch_invariant: true,
            ..own.options(7, gpus)
        };
        let options_of_engine = EngineOptions {
            prefix_cache_disk: Some(disk.path().into()),
            spec_budget: BudgetMode::Fixed,
            max_prompt_wait: PROMPT_WAIT,
            ..EngineOptions::default()
        };
        let target = loaded(&source, options);
        let engine = engine::spawn(target, None, 32, BLOCK_SIZE, options_of_engine).unwrap();
        let engine = EngineThread::new(engine, EngineThread::PATIENCE);
        let request = Request {
            draft_context: DraftContext {
                may_persist: true,
                ..DraftContext::default()
            },
            ..greedy(&super::tokens(100), 12)
        };
        let answer = run(&engine, request);
        assert_idle(&engine);
        (answer.cached_tokens, answer.ids())
    };
    let (none, text) = ask(2);
    assert_eq!(none, 0);
    for gpus in [2, 3, 1] {
        let (known, again) = ask(gpus);
        assert!(known >= 4 * BLOCK_SIZE, "{gpus}: {known}");
        assert_eq!(again, text, "{gpus}");
    }
}
