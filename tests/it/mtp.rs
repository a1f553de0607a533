//! The layer of a checkpoint that predicts further tokens: as its authors' code computes it, and through the engine.

use crate::architectures::{Fixture, TOLERANCE, fixture, log_softmax, write_gguf};
use crate::common::rig::{Rig, Seq, argmax, distance};
use crate::common::tiny::open;
use crate::common::{PROMPT_WAIT, assert_idle, chains, collect, greedy, sampled};
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineOptions};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{Batch, Head, LoadOptions, Model, ModelSource, Taps, load_mtp};
use foretoken::spec::{BudgetMode, DraftModel, Drafter};
use std::path::Path;

fn options() -> LoadOptions {
    LoadOptions {
        dtype: Some(DType::F32),
        ..LoadOptions::default()
    }
}

fn head(path: &Path, target: &dyn Model) -> Option<Box<dyn Head>> {
    let source = match path.extension() {
        Some(_) => ModelSource::Gguf(path.to_owned().into()),
        None => ModelSource::Folder(path.to_owned()),
    };
    load_mtp(&source, &options(), target).unwrap()
}

/// The target's hidden states of all tokens of the prompt but the last.
fn states(path: &Path, prompt: &[u32]) -> Tensor {
    let mut rig = Rig::new(open(path).unwrap(), 32, 4);
    let mut seq = Seq::default();
    let rows = prompt.len() - 1;
    rig.blocks.reserve(&mut seq.table, rows).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&prompt[..rows], &[], 0, &seq.table, 4);
    batch.taps = Some(Taps {
        layers: vec![rig.model.config().num_layers()],
        rows: (0..rows as u32).collect(),
    });
    let output = rig.model.forward(&batch, &mut rig.kv).unwrap();
    output.hidden.unwrap()
}

/// Compares the drafts of the layer of `path` with those that the fixture has.
fn compare(fixture: &Fixture, path: &Path) {
    let stored = fixture.folder.join("expected.safetensors");
    let stored = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
    let drafted = stored["mtp_drafted"].to_dtype(DType::U32).unwrap();
    let drafted: Vec<u32> = drafted.to_vec1().unwrap();
    let wanted: Vec<Vec<f32>> = stored["mtp_logprobs"].to_vec2().unwrap();
    let target = open(path).unwrap();
    let mut head = head(path, &*target).unwrap();
    let mut table = BlockTable::default();
    BlockAllocator::new(16, 4).reserve(&mut table, 64).unwrap();
    let mut kv = head.new_kv(16, 4).unwrap();
    let mut features = head.fuse(&states(path, &fixture.prompt)).unwrap();
    let (mut context, mut new) = (0, fixture.prompt[1..].to_vec());
    for (next, wanted) in drafted.iter().zip(&wanted) {
        let mut batch = Batch::default();
        batch.push_span(&new, &[], context, &table, 4);
        batch.features = Some(features);
        batch.logits = vec![new.len() as u32 - 1];
        let output = head.forward(&batch, &mut kv).unwrap();
        let found = &output.logits.to_vec2::<f32>().unwrap()[0];
        let far = distance(&log_softmax(found), wanted);
        assert!(far < TOLERANCE, "{}: {far}", fixture.name());
        assert_eq!(argmax(found), *next);
        (features, context) = (output.hidden.unwrap(), context + new.len());
        new = vec![*next];
    }
}

#[test]
fn its_probabilities_are_those_of_the_parts_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let fixture = fixture(name);
        compare(&fixture, &fixture.folder);
        let how = std::fs::read_to_string(fixture.folder.join("gguf.json")).unwrap();
        let how = serde_json::from_str(&how).unwrap();
        write_gguf(&fixture, &how, &file, |all| all);
        compare(&fixture, &file);
    }
}

/// A checkpoint without the layer has no such head, nor has one of another architecture.
#[test]
fn not_every_checkpoint_has_one() {
    for name in ["qwen3_next", "qwen3", "glm4_moe"] {
        let fixture = fixture(name);
        let target = fixture.open();
        assert!(head(&fixture.folder, &*target).is_none(), "{name}");
    }
}

/// Its drafts change no text, in batches, with chunks, preemption and a prefix cache, and some are accepted.
#[test]
fn its_drafts_change_no_text() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let fixture = fixture(name);
        let prompt = |kept: usize, other: u32| [&fixture.prompt[..kept], &[other, 7]].concat();
        // With so much of the noise that drafts share, even random weights agree now and then.
        let hot = |prompt: &[u32], seed: u64| {
            let mut request = sampled(prompt, 24, seed);
            request.params.temperature = 8.;
            request
        };
        let requests = vec![
            greedy(&fixture.prompt, 24),
            hot(&prompt(40, 3), 5),
            greedy(&prompt(40, 4), 24),
            hot(&prompt(13, 3), 6),
            greedy(&prompt(21, 4), 24),
        ];
        let texts = |drafter: Option<Box<dyn Drafter>>| {
            let options = EngineOptions {
                max_num_seqs: 4,
                max_num_batched_tokens: 20,
                spec: chains(3),
                spec_budget: BudgetMode::Fixed,
                max_prompt_wait: PROMPT_WAIT,
                ..EngineOptions::default()
            };
            let engine = engine::spawn(fixture.open(), drafter, 24, 4, options).unwrap();
            let mut texts = Vec::new();
            let mut accepted = 0;
            for _ in 0..2 {
                for answer in engine.submit_all(requests.clone()).unwrap() {
                    let answer = collect(answer);
                    accepted += answer.spec.accepted;
                    texts.push(answer.ids());
                }
            }
            assert_idle(&engine);
            let stats = engine.stats();
            (texts, accepted, stats.preemptions.get())
        };
        let (plain, ..) = texts(None);
        let target = fixture.open();
        let head = head(&fixture.folder, &*target).unwrap();
        let drafter = DraftModel::of_head(head, 24, 4, 16).unwrap();
        let (drafted, accepted, preempted) = texts(Some(Box::new(drafter)));
        assert_eq!(drafted, plain, "{name}");
        assert!(preempted > 0, "{name}");
        assert!(accepted > 0, "{name}: none accepted");
    }
}

/// Its states are not cut back to what was accepted, so it drafts neither for others nor for itself.
#[test]
fn a_model_with_states_cannot_draft() {
    let target = fixture("qwen3_5").open();
    for model in [fixture("qwen3_5").open(), target.subset(&[0, 3]).unwrap()] {
        let refused = DraftModel::new(model, 24, 4, 16).map(drop);
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("linear attention or Mamba cannot draft"),
            "{error}"
        );
    }
    // The layers with attention alone can.
    DraftModel::new(target.subset(&[3]).unwrap(), 24, 4, 16).unwrap();
}
