//! LoRA adapters on a GPU: several of them, and rows without one, in each step; and loaded and unloaded meanwhile.

use super::architectures::fixture;
use super::{BLOCK_SIZE, BLOCKS, Log, difference, gpu, loaded, model, shape, tokens};
use crate::common::rig::{Rig, Rows, Seq};
use crate::common::tiny::noise;
use crate::common::{PROMPT_WAIT, assert_idle, chains, collect, greedy, run};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineOptions, EngineThread, Request, SpecLimits};
use foretoken::model::{Adapter, AdapterLoader, LoadOptions, LoadedModel, ModelSource};
use foretoken::sampling::SamplingParams;
use foretoken::spec::{BudgetMode, DraftModel, Drafter};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writes an adapter of `model` as PEFT does, for the weights whose names contain one of `parts`; `salt` gives it values of
/// its own. Returns its folder.
fn write(
    folder: &Path,
    model: &dyn LoadedModel,
    salt: &str,
    rank: usize,
    parts: &[&str],
) -> PathBuf {
    let folder = folder.join(salt);
    std::fs::create_dir_all(&folder).unwrap();
    let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = HashMap::new();
    let all = model.lora_target().unwrap().weights();
    for (name, outputs, inputs) in all.filter(|(name, ..)| parts.iter().any(|p| name.contains(p))) {
        for (half, dims) in [("A", [rank, inputs]), ("B", [outputs, rank])] {
            let full = format!("base_model.model.{name}.lora_{half}.weight");
            let noise = noise(&format!("{salt}.{full}"), &dims);
            tensors.insert(full, (noise * 0.3).unwrap());
        }
    }
    assert!(!tensors.is_empty(), "{parts:?}");
    candle_core::safetensors::save(&tensors, folder.join("adapter_model.safetensors")).unwrap();
    folder
}

pub(super) fn adapter(model: &dyn LoadedModel, folder: &Path) -> Arc<dyn Adapter> {
    let target = model.lora_target().unwrap();
    target
        .load("a", folder, 16)
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Two adapters of `model`: one changes all weights, the other has a larger rank and changes few of them.
pub(super) fn two(folder: &Path, model: &dyn LoadedModel) -> [PathBuf; 2] {
    let all = write(folder, model, "one", 3, &[""]);
    [
        all,
        write(
            folder,
            model,
            "two",
            8,
            &["v_proj", "up", "out", "o_proj", "q_a"],
        ),
    ]
}

/// See [`Rig::in_company`]; `which` are the folders of the adapters.
pub(super) fn in_company(
    model: Box<dyn LoadedModel>,
    chunks: &[usize],
    which: &[Option<&Path>],
) -> Vec<Vec<Vec<f32>>> {
    let adapters: Vec<_> = which
        .iter()
        .map(|folder| folder.map(|folder| adapter(&*model, folder)))
        .collect();
    let vocab = model.info().vocab_size as u32;
    let prompt = tokens(chunks.iter().sum());
    let prompt: Vec<u32> = prompt.into_iter().map(|id| id % vocab).collect();
    Rig::new(model, BLOCKS, BLOCK_SIZE).in_company(adapters.into_iter(), &prompt, chunks)
}

/// `source` on the emulated GPU in bf16.
fn on_gpu(
    source: &ModelSource,
    gpu: &Device,
    seed: u64,
    enforce_eager: bool,
) -> Box<dyn LoadedModel> {
    let options = LoadOptions {
        dtype: Some(DType::BF16),
        device: gpu.clone(),
        seed,
        enforce_eager,
        ..LoadOptions::default()
    };
    loaded(source, options)
}

/// Of attention, of Mamba with an MLP, of shared experts, and of latent attention.
fn sources(folder: &Path) -> Vec<ModelSource> {
    let mut all = vec![
        shape(folder, "llama", 64, &[]),
        shape(folder, "qwen2", 80, &[]),
    ];
    let names = [
        "granite4_hybrid",
        "lfm2",
        "qwen2_moe",
        "deepseek_v2_groups",
        "glm4_moe_lite",
    ];
    all.extend(
        names
            .iter()
            .filter_map(|name| fixture(folder, &format!("architectures/{name}"), 64)),
    );
    all
}

#[test]
fn rows_with_adapters_have_the_logits_of_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for (i, source) in sources(folder.path()).iter().enumerate() {
        let open = |device: &Device, dtype| model(source, device, Some(dtype), 1);
        let [one, two] = two(
            &folder.path().join(format!("adapters-{i}")),
            &*open(&Device::Cpu, DType::F32),
        );
        let (one, two) = (Some(&*one), Some(&*two));
        let which = [one, None, two, two, one, None];
        let cases = [(DType::F32, 1e-4), (DType::BF16, 5e-2)];
        // Rounded activations may choose other experts.
        for (dtype, within) in &cases[..if i < 2 { 2 } else { 1 }] {
            let on = |device: &Device| in_company(open(device, *dtype), &[13, 1, 4], &which);
            let (here, there) = (on(&Device::Cpu), on(&gpu));
            assert!(
                here[0] != here[1] && here[1] != here[2] && here[1] == here[5],
                "{source:?}"
            );
            for (here, there) in here.iter().zip(&there) {
                let off = difference(here, there);
                assert!(off < *within, "{source:?}, {dtype:?}: off by {off}");
            }
        }
    }
}

/// With graphs and without; rows of the base model have the bits of a model for which no adapter was ever loaded.
#[test]
fn rows_have_the_same_bits_whatever_adapters_their_neighbours_have() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let open = |enforce_eager| on_gpu(&source, &gpu, 2, enforce_eager);
    let [one, two] = two(folder.path(), &*open(true));
    let chunks = [vec![9, 1, 1, 1, 1], vec![2; 4], vec![16, 4]].concat();
    let alone = |folder| in_company(open(true), &chunks, &[folder]).remove(0);
    let (one, two) = (Some(&*one), Some(&*two));
    let all = [alone(None), alone(one), alone(two)];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
    for (eager, which) in [
        (true, vec![one, None, two, one, one, None, two]),
        (false, vec![one, None, two, one, one, None, two]),
        (false, vec![None, two]),
        (false, vec![one]),
    ] {
        let before = Log::of_this_thread().len();
        let together = in_company(open(eager), &chunks, &which);
        let log = Log::of_this_thread().split_off(before).join("\n");
        assert_eq!(log.matches("is recorded").count() >= 2, !eager, "{log}");
        assert!(!log.contains("not recorded"), "{log}");
        for (i, (folder, logits)) in which.iter().zip(together).enumerate() {
            let place = [None, one, two].iter().position(|other| other == folder);
            assert!(
                logits == all[place.unwrap()],
                "row {i} of {}, eager: {eager}",
                which.len()
            );
        }
    }
}

/// Steps of one row of each of four texts. Half way, the adapter of two of them is replaced by one that is loaded then.
#[test]
fn graphs_take_in_adapters_that_are_loaded_later() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let run = |enforce_eager| {
        let model = on_gpu(&source, &gpu, 4, enforce_eager);
        let [one, two] = two(folder.path(), &*model);
        let target = model.lora_target().unwrap().clone();
        let load = |folder: &Path| target.load("a", folder, 16).unwrap();
        let later = write(folder.path(), &*model, "later", 5, &["q_proj", "down"]);
        let mut rig = Rig::new(model, BLOCKS, BLOCK_SIZE);
        let (one, two) = (load(&one), load(&two));
        let gone = Arc::downgrade(&two);
        let which = [Some(one.clone()), None, Some(two.clone()), Some(two)];
        let mut seqs: Vec<Seq> = which.into_iter().map(Seq::of_adapter).collect();
        let (mut logits, mut recorded) = (Vec::new(), Vec::new());
        for step in 0..12 {
            if step == 6 {
                // Freed by another thread, and in the memory of it something else is written.
                let old: Vec<_> = seqs
                    .iter_mut()
                    .skip(1)
                    .map(|seq| seq.adapter.take())
                    .collect();
                std::thread::spawn(move || drop(old)).join().unwrap();
                assert!(gone.upgrade().is_none());
                let later = load(&later);
                (seqs[1].adapter, seqs[2].adapter) = (Some(later.clone()), Some(later));
                seqs[0].adapter = None;
                seqs[3].adapter = Some(one.clone());
            }
            let token = [step * 31 % 512];
            let parts = seqs.iter_mut();
            let mut parts: Vec<Rows<'_>> = parts
                .map(|seq| Rows {
                    seq,
                    tokens: &token,
                    parents: &[],
                })
                .collect();
            logits.push(rig.forward(&mut parts));
            recorded.push(
                Log::of_this_thread()
                    .join("\n")
                    .matches("is recorded")
                    .count(),
            );
        }
        (logits, recorded)
    };
    let ((launched, _), (replayed, recorded)) = (run(true), run(false));
    assert!(replayed == launched);
    // One graph for all steps.
    assert_eq!(recorded[11] - recorded[0], 1, "{recorded:?}");
}

fn requests(adapters: &[Option<Arc<dyn Adapter>>]) -> Vec<Request> {
    let mut all = Vec::new();
    for adapter in adapters {
        let sampled = SamplingParams {
            seed: 3,
            ..SamplingParams::default()
        };
        let params = greedy(&[], 0).params;
        for (len, params) in [(50, params.clone()), (41, sampled), (33, params)] {
            all.push(Request {
                params,
                adapter: adapter.clone(),
                ..greedy(&tokens(len), 20)
            });
        }
    }
    all
}

/// Trees of drafts of the base model, chunks, preemption and prefix hits, with base and adapters in every step.
#[test]
fn texts_of_adapters_depend_on_nothing_but_the_request() {
    const FEW_BLOCKS: usize = 44;
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = || model(&source, &gpu, Some(DType::BF16), 3);
    let folders = two(folder.path(), &*target());
    let start = |blocks, spec, drafter: Option<Box<dyn Drafter>>| {
        let target = target();
        let [one, two] = folders
            .each_ref()
            .map(|folder| Some(adapter(&*target, folder)));
        let options = EngineOptions {
            max_num_seqs: 5,
            max_num_batched_tokens: 64,
            spec,
            spec_budget: BudgetMode::Fixed,
            max_prompt_wait: PROMPT_WAIT,
            max_loras: 2,
            ..EngineOptions::default()
        };
        let engine = engine::spawn(target, drafter, blocks, 4, options).unwrap();
        let engine = EngineThread::new(engine, EngineThread::PATIENCE);
        (engine, requests(&[None, one, two]))
    };
    let (plain, all) = start(4 * FEW_BLOCKS, chains(0), None);
    let alone: Vec<Vec<u32>> = all
        .into_iter()
        .map(|request| run(&plain, request).ids())
        .collect();
    assert_idle(&plain);
    assert!(alone[0] != alone[3] && alone[3] != alone[6] && alone[0] != alone[6]);
    let trees = SpecLimits {
        length: 4,
        nodes: 12,
        topk: 3,
    };
    let mut preempted = 0;
    for spec in [chains(0), chains(4), trees] {
        let drafted = spec.length > 0;
        let drafter = drafted.then(|| {
            let draft = DraftModel::new(target(), FEW_BLOCKS, 4, 64).unwrap();
            Box::new(draft) as Box<dyn Drafter>
        });
        let (engine, all) = start(FEW_BLOCKS, spec, drafter);
        let mut accepted = 0;
        for _ in 0..2 {
            let events = engine.submit_all(all.clone()).unwrap();
            for (i, events) in events.into_iter().enumerate() {
                let answer = collect(events);
                assert_eq!(answer.ids(), alone[i], "request {i}, {drafted}");
                accepted += answer.spec.accepted;
            }
        }
        let stats = engine.stats();
        preempted += stats.preemptions.get();
        let cached = stats.prefix_cache_hits.get();
        assert!(
            cached > 0 && (accepted > 0) == drafted,
            "{cached} cached tokens, {accepted} accepted"
        );
        drop(all);
        assert_idle(&engine);
    }
    assert!(preempted > 0);
}
