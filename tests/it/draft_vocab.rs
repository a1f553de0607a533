//! `--draft-vocab`: the output layer of a draft is cut to some ids. It drafts no others, and no text changes.

use crate::common::process::foretoken;
use crate::common::rig::{Rig, Seq, smollm2_path};
use crate::common::tiny::{
    HIDDEN, Tensors, VOCAB, llama_config, noise, short_prompt, tensors, write_config, write_shards,
};
use crate::common::*;
use crate::head_fixtures::fixtures;
use candle_core::DType;
use foretoken::engine::{self, EngineHandle, Request};
use foretoken::error::Result;
use foretoken::kernels::quant::BlockType;
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{
    Batch, DraftVocabulary, Head, HeadKind, LoadOptions, LoadedModel, ModelSource, inspect, load,
    load_head, load_mtp,
};
use foretoken::sampling::Acceptance;
use foretoken::spec::{Draft, DraftModel, DraftPool, DraftRequest, Drafter, Forecast};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// Some ids of a tiny model, in no order.
const IDS: [u32; 12] = [60, 2, 3, 5, 8, 13, 21, 34, 55, 66, 0, 40];

fn options() -> LoadOptions {
    LoadOptions::of(DType::F32)
}

/// `options` for a draft that predicts `ids`, of a target in `target`.
fn cut(options: &LoadOptions, ids: &[u32], target: &ModelSource) -> LoadOptions {
    LoadOptions {
        draft_vocabulary: Some(DraftVocabulary {
            ids: ids.into(),
            target: Box::new((target.clone(), options.clone())),
        }),
        ..options.clone()
    }
}

/// A tiny Llama, whose output layer is its embedding or not.
fn tiny(is_tied: bool) -> (TempDir, ModelSource) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config(16);
    config["tie_word_embeddings"] = is_tied.into();
    let mut tensors: Tensors = tensors(16, DType::F32);
    if !is_tied {
        let name = "lm_head.weight";
        tensors.insert(name.into(), noise(name, &[VOCAB, HIDDEN]));
    }
    write_config(folder.path(), &config);
    write_shards(folder.path(), &tensors);
    let source = ModelSource::Folder(folder.path().to_owned());
    (folder, source)
}

/// Whether the `cut` logits are those of `all` for `ids`, and minus infinity for others.
#[track_caller]
fn assert_cut(cut: &[Vec<f32>], all: &[Vec<f32>], ids: &[u32], what: &str) {
    assert_eq!(cut.len(), all.len(), "{what}");
    for (cut, all) in cut.iter().zip(all) {
        assert_eq!(cut.len(), all.len(), "{what}");
        for (id, (cut, all)) in (0..).zip(cut.iter().zip(all)) {
            if ids.contains(&id) {
                assert_eq!(cut, all, "{what}: id {id}");
            } else {
                assert_eq!(*cut, f32::NEG_INFINITY, "{what}: id {id}");
            }
        }
    }
}

/// Rows are whole blocks, so those that are kept have the same bits, and the embedding of the others is still there.
#[test]
fn a_model_predicts_the_ids_alone_and_reads_all() {
    let logits = |source: &ModelSource, options: &LoadOptions, prompt: &[u32]| {
        let model = load(source, options).unwrap();
        Rig::new(model, 32, 4).feed(&mut Seq::default(), prompt)
    };
    let prompt = short_prompt(20);
    assert!(prompt.iter().any(|id| !IDS.contains(id)));
    for is_tied in [true, false] {
        let (_folder, source) = tiny(is_tied);
        for quantize in [None, Some(BlockType::Q8_0), Some(BlockType::Q4_0)] {
            let options = LoadOptions {
                quantize,
                ..options()
            };
            let all = logits(&source, &options, &prompt);
            let cut = cut(&options, &IDS, &source);
            let what = format!("tied: {is_tied}, {quantize:?}");
            assert_cut(&logits(&source, &cut, &prompt), &all, &IDS, &what);
            let plain = inspect(&source, &options).unwrap();
            let (model, inventory) = inspect(&source, &cut).unwrap();
            let saved = (HIDDEN * (VOCAB - IDS.len())) as f64;
            let multiplications = model.info().multiplications;
            assert_eq!(plain.0.info().multiplications - multiplications, saved);
            let sum = |of: &foretoken::model::Inventory| of.sum(|entry| entry.elements);
            let rows = if is_tied {
                IDS.len() as i64
            } else {
                IDS.len() as i64 - VOCAB as i64
            };
            let more = sum(&inventory) as i64 - sum(&plain.1) as i64;
            assert_eq!(more, rows * HIDDEN as i64, "{what}");
        }
    }
    // A GGUF file with a tied output layer in blocks.
    let source = ModelSource::Gguf(smollm2_path().into());
    let ids: Vec<u32> = (0..49_152).step_by(7).collect();
    let (options, prompt) = (LoadOptions::default(), [1, 9, 3000, 44]);
    let all = logits(&source, &options, &prompt);
    let cut = cut(&options, &ids, &source);
    assert_cut(&logits(&source, &cut, &prompt), &all, &ids, "GGUF");
}

/// The logits of a head after some tokens, with random features.
fn logits_of_head(mut head: Box<dyn Head>) -> Vec<Vec<f32>> {
    const ROWS: usize = 5;
    let mut table = BlockTable::default();
    BlockAllocator::new(16, 4).reserve(&mut table, 32).unwrap();
    let mut kv = head.new_kv(16, 4).unwrap();
    let features = noise("features", &[ROWS, head.info().hidden_size]);
    let (mut batch, tokens) = (Batch::default(), [200, 1, 7, 100, 30]);
    batch.push_span(&tokens, &[], 0, &table, 4);
    match head.masked_block().filter(|_| head.mask_hidden().is_none()) {
        Some(block) => {
            batch.context_features = Some(features);
            let mut tokens = [block.mask; 4];
            tokens[0] = 9;
            batch.push_block(&tokens, ROWS, &table, 4);
            batch.logits = (ROWS as u32 + 1..batch.tokens.len() as u32).collect();
        }
        None => {
            batch.features = Some(features);
            batch.logits = (0..ROWS as u32).collect();
        }
    }
    let output = head.forward(&batch, &mut kv).unwrap();
    output.logits.to_vec2().unwrap()
}

/// Heads that share the output layer of their target get its rows from the target's checkpoint.
#[test]
fn heads_predict_the_ids_alone() {
    let source = ModelSource::Folder(fixtures().join("architectures/qwen3"));
    let target = load(&source, &options()).unwrap();
    let mut seen = (0, 0, 0);
    for entry in std::fs::read_dir(fixtures().join("heads")).unwrap() {
        let folder = entry.unwrap().path();
        let what = folder.display().to_string();
        let head = ModelSource::Folder(folder);
        let kind = HeadKind::of(&head).unwrap().unwrap();
        let cut = cut(&options(), &IDS, &source);
        match load_head(&head, kind, &cut, &*target) {
            Ok(cut) => {
                let whole = load_head(&head, kind, &options(), &*target).unwrap();
                let all = logits_of_head(whole);
                assert_cut(&logits_of_head(cut), &all, &IDS, &what);
                seen.0 += 1;
            }
            Err(error) => {
                let error = error.to_string();
                if error.contains("predicts only 96 of 256 ids as it is") {
                    seen.1 += 1;
                } else {
                    assert!(error.contains("heads that draft along paths"), "{error}");
                    seen.2 += 1;
                }
            }
        }
    }
    assert!(seen.0 >= 4 && seen.1 >= 3 && seen.2 >= 5, "{seen:?}");
}

/// Layers for further tokens with an output layer of their own, and such that share a tied or an untied one.
#[test]
fn layers_for_further_tokens_predict_the_ids_alone() {
    for name in ["qwen3_5", "glm4_moe", "deepseek_v3", "ernie4_5_moe"] {
        let source = ModelSource::Folder(fixtures().join("architectures").join(name));
        let target = load(&source, &options()).unwrap();
        let mtp = |options: &LoadOptions| load_mtp(&source, options, &*target).unwrap().unwrap();
        let cut = mtp(&cut(&options(), &IDS, &source));
        let all = logits_of_head(mtp(&options()));
        assert_cut(&logits_of_head(cut), &all, &IDS, name);
    }
}

/// A draft model that panics if it drafts an id that it should not.
struct Watched {
    model: DraftModel,
    drafted: Arc<AtomicUsize>,
}

impl Drafter for Watched {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let drafts = self.model.propose(requests)?;
        for id in drafts.iter().flat_map(|draft| &draft.tokens) {
            assert!(IDS.contains(id), "{id} was drafted");
            self.drafted.fetch_add(1, Ordering::Relaxed);
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        self.model.forecast(request)
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.model.pool()
    }
}

fn start(target: Box<dyn LoadedModel>, drafter: Option<Watched>) -> EngineHandle {
    let drafter = drafter.map(|drafter| Box::new(drafter) as Box<dyn Drafter>);
    engine::spawn(target, drafter, 256, 4, Toy::default().options).unwrap()
}

#[test]
fn texts_are_the_same_and_no_other_id_is_drafted() {
    let (_folder, source) = tiny(true);
    let target = || load(&source, &options()).unwrap();
    let draft = load(&source, &cut(&options(), &IDS, &source)).unwrap();
    let drafted = Arc::<AtomicUsize>::default();
    let watched = Watched {
        model: DraftModel::new(draft, 256, 4, 64).unwrap(),
        drafted: drafted.clone(),
    };
    let (plain, cut) = (start(target(), None), start(target(), Some(watched)));
    let mut accepted = 0;
    for seed in 0..6 {
        let prompt = &short_prompt(30)[seed as usize..];
        let likely = Request {
            params: foretoken::sampling::SamplingParams {
                // Of the ids, so that some drafts stand.
                logit_bias: IDS.map(|id| (id, 3.0)).to_vec(),
                ignore_eos: true,
                seed,
                ..Default::default()
            },
            ..greedy(prompt, 40)
        };
        for request in [
            greedy(prompt, 40),
            sampled(prompt, 40, seed),
            likely.clone(),
        ] {
            let answer = run(&cut, request.clone());
            assert_eq!(answer.ids(), run(&plain, request).ids());
            accepted += answer.spec.accepted;
        }
        // The text is another one, but drafts stand, and no id is refused.
        let rejection = Request {
            acceptance: Some(Acceptance::Rejection),
            ..likely
        };
        let answer = run(&cut, rejection);
        assert_eq!(answer.ids().len(), 40);
        assert!(answer.spec.accepted > 0);
    }
    assert!(accepted > 20, "{accepted}");
    assert!(drafted.load(Ordering::Relaxed) > 200);
    assert_idle(&cut);
    assert!(!cut.has_ended());
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let (folder, source) = tiny(true);
    let refused = |ids: &[u32]| {
        let error = load(&source, &cut(&options(), ids, &source)).map(drop);
        error.unwrap_err().to_string()
    };
    assert!(refused(&[3, VOCAB as u32]).contains("id 67 is not below the draft's vocab_size 67"));
    let mut config = llama_config(16);
    config["draft_vocab_size"] = 20.into();
    write_config(folder.path(), &config);
    assert!(refused(&[3]).contains("predicts only 20 of 67 ids as it is"));
}

/// Runs the program; what it says.
fn run_program(line: &str, file: &Path) -> (bool, String, String) {
    let line = line.replace("FILE", &file.display().to_string());
    let output = foretoken().args(line.split_whitespace()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.success(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// The program reads a file of ids, and counts them in a corpus: of a draft with a tied output layer, its rows are added.
#[test]
fn the_program_cuts_a_draft_model() {
    let folder = tempfile::tempdir().unwrap();
    let (ids, corpus) = (folder.path().join("ids"), folder.path().join("c.txt"));
    let all: Vec<u32> = (0..8000).collect();
    std::fs::write(&ids, serde_json::to_string(&all).unwrap()).unwrap();
    std::fs::write(&corpus, "The river is long. The river is wide.\n").unwrap();
    let model = smollm2_path().display().to_string();
    let check = format!("check --model {model} --draft-model {model} --num-blocks 64");
    let (ok, said, log) = run_program(&format!("{check} --draft-vocab FILE"), &ids);
    assert!(ok && said.contains("(model, 139.1 M, "), "{said} {log}");
    let line = format!("{check} --draft-vocab 100 --tables-corpus FILE");
    let (ok, said, log) = run_program(&line, &corpus);
    assert!(ok && said.contains("(model, 134.6 M, "), "{said} {log}");
    // Nothing drafts, so nothing is counted.
    let plain = format!("check --model {model} --num-blocks 64 --speculative-decoding=false");
    for vocabulary in ["100", "100 --tables-corpus /no/such/corpus", "/no/such/ids"] {
        let (ok, _, log) = run_program(&format!("{plain} --draft-vocab {vocabulary}"), &ids);
        assert!(ok, "{vocabulary}: {log}");
    }
    std::fs::write(&ids, "[49152]").unwrap();
    let (ok, _, log) = run_program(&format!("{check} --draft-vocab FILE"), &ids);
    assert!(
        !ok && log.contains("id 49152 is not below the target's vocab_size 49152"),
        "{log}"
    );
}
