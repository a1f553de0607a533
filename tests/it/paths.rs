//! The promises on every CPU instruction set: for each one, this file's tests run in a separate process,
//! with the environment variable that operators use.

use crate::common::rig::{Rig, Rows, Seq};
use crate::common::tiny::{llama_config, short_prompt, tensors, write_config, write_shards};
use crate::common::tiny_gguf::{llama3_factors, write_gguf};
use crate::common::{assert_idle, chains, collect, fixed_budget, greedy, run, sampled};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::engine::{self, EngineHandle, EngineOptions};
use foretoken::kernels::cpu::{Isa, VARIABLE};
use foretoken::kv::KvCacheDtype;
use foretoken::model::{LoadOptions, Model, ModelSource, load};
use foretoken::spec::{DraftModel, Drafter, NgramDrafter};
use std::process::Command;

const BLOCKS: usize = 256;
const BLOCK_SIZE: usize = 4;
const TOKENS: usize = 40;
/// Weights, and K and V.
type Kind = (GgmlDType, KvCacheDtype);
const KINDS: [Kind; 6] = [
    (GgmlDType::Q4_1, KvCacheDtype::Auto),
    (GgmlDType::Q8_0, KvCacheDtype::Auto),
    (GgmlDType::Q4K, KvCacheDtype::Auto),
    (GgmlDType::F16, KvCacheDtype::Auto),
    (GgmlDType::Q4_1, KvCacheDtype::Q8_0),
    (GgmlDType::Q8_0, KvCacheDtype::Bf16),
];

pub fn model((weights, kv_cache_dtype): Kind) -> Box<dyn Model> {
    let folder = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        kv_cache_dtype,
        ..LoadOptions::default()
    };
    if kv_cache_dtype == KvCacheDtype::Q8_0 {
        // Blocks have 32 values of a head, which is wider than the heads of these GGUF files.
        write_config(folder.path(), &llama_config(32));
        write_shards(folder.path(), &tensors(32, DType::BF16));
        let options = LoadOptions {
            quantize: Some(weights.into()),
            ..options
        };
        return load(&ModelSource::Folder(folder.path().into()), &options).unwrap();
    }
    let file = folder.path().join("model.gguf");
    let factors = llama3_factors(&llama_config(16));
    write_gguf(&file, &tensors(16, DType::F32), weights, &factors);
    load(&ModelSource::Gguf(file.into()), &options).unwrap()
}

/// An engine that reads prompts in chunks and drafts with `drafter`.
fn start(kind: Kind, drafter: Option<Box<dyn Drafter>>) -> EngineHandle {
    let options = EngineOptions {
        max_num_seqs: 8,
        max_num_batched_tokens: 40,
        ..fixed_budget(chains(4))
    };
    engine::spawn(model(kind), drafter, BLOCKS, BLOCK_SIZE, options).unwrap()
}

fn drafters(kind: Kind) -> [Option<Box<dyn Drafter>>; 3] {
    let draft = DraftModel::new(model(kind), BLOCKS, BLOCK_SIZE, 40).unwrap();
    [
        None,
        Some(Box::new(draft)),
        Some(Box::new(NgramDrafter::new(1, 3))),
    ]
}

#[test]
fn greedy_text_is_the_same_with_every_drafter_alone_and_at_once() {
    for kind in KINDS {
        let prompts = [3, 17, 50, 60].map(short_prompt);
        let mut alone: Vec<Vec<u32>> = Vec::new();
        for drafter in drafters(kind) {
            let engine = start(kind, drafter);
            if alone.is_empty() {
                let texts = prompts
                    .iter()
                    .map(|p| run(&engine, greedy(p, TOKENS)).ids());
                alone = texts.collect();
            }
            let twice = prompts.iter().chain(&prompts).map(|p| greedy(p, TOKENS));
            let receivers = engine.submit_all(twice.collect()).unwrap();
            for (i, receiver) in receivers.into_iter().enumerate() {
                assert_eq!(
                    collect(receiver).ids(),
                    alone[i % 4],
                    "{kind:?}, prompt {i}"
                );
            }
            assert_idle(&engine);
        }
    }
}

#[test]
fn a_seed_gives_the_same_text_in_a_batch() {
    for kind in [KINDS[2], KINDS[4]] {
        let [_, draft, _] = drafters(kind);
        let engine = start(kind, draft);
        let requests: Vec<_> = (0..6)
            .map(|i| sampled(&short_prompt(9 + i), TOKENS, i as u64))
            .collect();
        let alone: Vec<_> = requests
            .iter()
            .map(|r| run(&engine, r.clone()).ids())
            .collect();
        let together = engine.submit_all(requests).unwrap();
        for (receiver, alone) in together.into_iter().zip(alone) {
            assert_eq!(collect(receiver).ids(), alone, "{kind:?}");
        }
    }
}

/// The logits are the same bit for bit for a prompt at once, in chunks, and beside another sequence.
#[test]
fn batched_equals_single() {
    for kind in KINDS {
        let tokens = short_prompt(90);
        let whole = Rig::new(model(kind), BLOCKS, BLOCK_SIZE).feed(&mut Seq::default(), &tokens);
        let mut rig = Rig::new(model(kind), BLOCKS, BLOCK_SIZE);
        let (mut seq, mut other) = (Seq::default(), Seq::default());
        let mut at = 0;
        for rows in [1, 2, 30, 3, 1, 40, 8, 5] {
            let logits = rig.forward(&mut [
                Rows {
                    seq: &mut other,
                    tokens: &short_prompt(1 + rows / 2),
                    parents: &[],
                },
                Rows {
                    seq: &mut seq,
                    tokens: &tokens[at..at + rows],
                    parents: &[],
                },
            ]);
            assert_eq!(logits[1 + rows / 2..], whole[at..at + rows], "{kind:?}");
            at += rows;
        }
    }
}

/// K and V of an accepted path of a tree, moved together, have the bits of the same tokens fed as a
/// chain, and so have the logits of its nodes and of what follows. Also where more rows come before
/// the tree than an ancestor mask has bits.
#[test]
fn a_committed_path_equals_its_chain() {
    // 0 -> 1 -> 3, 0 -> 2 -> 4 -> 5, and a second root: 6 -> 7.
    let parents = [0, 1, 1, 2, 3, 5, 0, 7].map(|after: u16| after.checked_sub(1));
    let paths: [&[usize]; 5] = [&[0, 2, 4, 5], &[6, 7], &[0, 1, 3], &[6], &[]];
    let nodes: Vec<u32> = (0..8).map(|i| 3 + 5 * i).collect();
    for kind in KINDS {
        let mut rig = Rig::new(model(kind), BLOCKS, BLOCK_SIZE);
        for (context, pending) in [(5, 1), (5, 3), (9, 70)] {
            let before = short_prompt(context + pending);
            for path in paths {
                let case = format!("{kind:?}, {pending} rows behind {context}, {path:?}");
                let (mut seq, mut chain) = (Seq::default(), Seq::default());
                rig.feed(&mut seq, &before[..context]);
                let logits = rig.forward(&mut [Rows {
                    seq: &mut seq,
                    tokens: &[&before[context..], &nodes].concat(),
                    parents: &parents,
                }]);
                rig.commit(&mut seq, nodes.len(), path);
                let accepted = path.iter().map(|&node| nodes[node]);
                let tokens: Vec<u32> = before.iter().copied().chain(accepted).collect();
                let want = rig.feed(&mut chain, &tokens);
                for (&node, want) in path.iter().zip(&want[before.len()..]) {
                    assert!(&logits[pending + node] == want, "{case}: node {node}");
                }
                assert!(rig.kv_of(&seq) == rig.kv_of(&chain), "{case}: K and V");
                let next = [1, 2, 3];
                let (got, want) = (rig.feed(&mut seq, &next), rig.feed(&mut chain, &next));
                assert!(got == want, "{case}: what follows");
                rig.blocks.release(&mut seq.table);
                rig.blocks.release(&mut chain.table);
            }
        }
    }
}

#[test]
fn all_of_this_holds_on_every_isa() {
    if std::env::var_os(VARIABLE).is_some() {
        return; // This is one of the processes that are started below.
    }
    for name in Isa::NAMES {
        if Isa::detect(name).is_none() {
            println!("this CPU has no {name}: not run");
            continue;
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["paths::", "--test-threads", "2"])
            .env(VARIABLE, name)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: {text}");
        assert!(text.contains("5 passed"), "{name}: {text}");
    }
}
