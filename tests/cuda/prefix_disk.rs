//! The prefix cache on disk: blocks of K and V, and recurrent states, leave a GPU and come back.

use super::architectures::fixture;
use super::draft_steps::Counts;
use super::kv_cache_dtype::options;
use super::{BLOCK_SIZE, gpu, loaded};
use crate::common::{PROMPT_WAIT, assert_idle, greedy, run};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineOptions, EngineThread, Request};
use foretoken::kernels::quant::BlockType;
use foretoken::kernels::{KvMoves, StateShape, kv_move};
use foretoken::kv::{KvCacheDtype, KvForm, KvHeads, KvShape, KvStore, PoolGpus};
use foretoken::model::{KeptState, StateRows, StateStart};
use foretoken::spec::{BudgetMode, DraftContext, DraftModel};

const NUM_BLOCKS: usize = 5;

/// Pools in all forms that a GPU has.
fn store(dtype: DType, device: &Device) -> KvStore {
    let heads = |form| KvHeads {
        form,
        ..KvHeads::new(2, 64)
    };
    let shape = KvShape {
        layers: vec![
            KvHeads::new(2, 24),
            // V is a part of K.
            KvHeads {
                has_values: false,
                ..KvHeads::new(1, 40)
            },
            heads(Some(KvForm::Blocks(BlockType::Q8_0))),
            heads(Some(KvForm::Float8)),
        ],
        dtype,
        states: vec![
            StateShape {
                matrices: 24,
                window: 8,
                inputs: 3,
            };
            2
        ],
        gpus: PoolGpus::default(),
    };
    KvStore::new(shape, NUM_BLOCKS, BLOCK_SIZE, device).unwrap()
}

fn noise(len: usize, salt: usize) -> Vec<u8> {
    let byte = |i: usize| (((i + salt) * 2_654_435_761) >> 13) as u8;
    (0..len).map(byte).collect()
}

/// Moves of slots, which kernels do, find the rows where they were written, and no block has memory of another one.
#[test]
fn a_block_has_its_contents_after_it_was_elsewhere() {
    let gpu = gpu();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut kv = store(dtype, &gpu);
        let len = kv.block_bytes();
        let numbers = (2 * 2 * 24 + 40) * dtype.size_in_bytes();
        assert_eq!(len, BLOCK_SIZE * (numbers + 4 * 68 + 4 * 64));
        let contents: Vec<Vec<u8>> = (0..NUM_BLOCKS).map(|block| noise(len, block)).collect();
        for block in [3, 0, 4, 1, 2] {
            kv.write_block(block as u32, &contents[block]).unwrap();
        }
        for (block, contents) in contents.iter().enumerate() {
            assert!(
                kv.read_block(block as u32).unwrap() == *contents,
                "{dtype:?}"
            );
        }
        let slots = (0..BLOCK_SIZE).map(|i| (BLOCK_SIZE + i, 3 * BLOCK_SIZE + i));
        let slots = slots.map(|(from, to)| (from as u32, to as u32)).collect();
        let moves = KvMoves::new(slots, kv.num_slots()).unwrap();
        let pools = kv.layers.iter().flat_map(|(k, v)| [k, v]);
        let pools: Vec<_> = pools.filter(|pool| pool.elem_count() > 0).collect();
        let (moved, counts) = Counts::of(|| kv_move(&pools, &moves));
        moved.unwrap();
        if let Some(counts) = counts {
            assert_eq!((counts.kernels, counts.copies), (1, 1), "{dtype:?}");
        }
        for (block, from) in [(0, 0), (1, 1), (2, 2), (3, 1), (4, 4)] {
            assert!(
                kv.read_block(block).unwrap() == contents[from],
                "{dtype:?}, {block}"
            );
        }
        assert!(kv.read_block(NUM_BLOCKS as u32).is_err(), "there is none");
        assert!(kv.write_block(1, &contents[0][1..]).is_err());
    }
}

#[test]
fn a_state_has_its_values_after_it_was_elsewhere() {
    let gpu = gpu();
    let mut kv = store(DType::BF16, &gpu);
    let values: Vec<u8> = (0..64)
        .flat_map(|i| (i as f32 - 9.5).to_ne_bytes())
        .collect();
    kv.write_state(3, &values).unwrap();
    assert_eq!(kv.read_state(3).unwrap(), values);
    assert_eq!(kv.read_state(2).unwrap(), [0; 256]);
    assert!(kv.write_state(3, &values[4..]).is_err());
    // A sequence begins with it.
    let kept = KeptState {
        start: StateStart::CopyOf(3),
        ..KeptState::of_chunk(1, false)
    };
    let rows = StateRows {
        rows: 0..1,
        parents: Vec::new(),
        kept: Some(kept),
    };
    kv.prepare_states(&[rows]).unwrap();
    assert_eq!(kv.read_state(1).unwrap(), values);
}

/// With a draft model, whose blocks are kept, too, where the target has no recurrent states.
#[test]
fn a_prompt_is_computed_once_by_two_processes() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let (auto, q8_0, fp8) = (KvCacheDtype::Auto, KvCacheDtype::Q8_0, KvCacheDtype::Fp8);
    for (name, kv_cache_dtype) in [
        ("llama", auto),
        ("llama", q8_0),
        ("llama", fp8),
        ("deepseek_v3", auto),
        ("qwen3_5", auto),
    ] {
        let Some(source) = fixture(folder.path(), &format!("architectures/{name}"), 64) else {
            return;
        };
        let options = options(&gpu, DType::BF16, kv_cache_dtype);
        let is_recurrent = name == "qwen3_5";
        let disk = tempfile::tempdir().unwrap();
        let ask = |length: u32| {
            let target = loaded(&source, options.clone());
            let draft = (!is_recurrent).then(|| {
                let model = loaded(&source, options.clone());
                let draft = DraftModel::new(model, 32, BLOCK_SIZE, 256).unwrap();
                Box::new(draft) as _
            });
            let options = EngineOptions {
                prefix_cache_disk: Some(disk.path().into()),
                spec_budget: BudgetMode::Fixed,
                max_prompt_wait: PROMPT_WAIT,
                ..EngineOptions::default()
            };
            let engine = engine::spawn(target, draft, 32, BLOCK_SIZE, options).unwrap();
            let engine = EngineThread::new(engine, EngineThread::PATIENCE);
            let prompt: Vec<u32> = (0..length).map(|i| (i * i * 7 + i) % 251).collect();
            let answer = run(
                &engine,
                Request {
                    draft_context: DraftContext {
                        may_persist: true,
                        ..DraftContext::default()
                    },
                    ..greedy(&prompt, 12)
                },
            );
            assert_idle(&engine);
            let hits = engine.stats().prefix_cache_disk_hits.get();
            assert_eq!(hits as usize, answer.cached_tokens, "{name}");
            (answer.cached_tokens, answer.ids())
        };
        let (none, text) = ask(100);
        assert_eq!(none, 0, "{name}");
        let (known, again) = ask(100);
        assert!(
            known >= 4 * BLOCK_SIZE,
            "{name}, {kv_cache_dtype:?}: {known}"
        );
        assert_eq!(again, text, "{name}, {kv_cache_dtype:?}");
    }
}
