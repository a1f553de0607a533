//! Draft heads of the speculators library and of transformers: tiny random ones of their classes, made by
//! scripts/make-head-fixtures.py and scripts/make-transformers-head-fixtures.py, draft what their code drafts.

use crate::architectures::log_softmax;
use crate::common::rig::distance;
use crate::common::tiny::{open, short_prompt};
use crate::common::*;
use crate::taps::plain;
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineOptions, Request, SpecLimits};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::LoadedModel;
use foretoken::model::{
    Batch, Head, HeadKind, LoadOptions, ModelSource, PathRows, inspect_head, load_head,
};
use foretoken::sampling::{Acceptance, Sampler, SamplingParams};
use foretoken::spec::{
    BlockDrafter, BudgetMode, Committed, Draft, DraftContext, DraftModel, DraftRequest, Drafter,
};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Maximum difference of a log-probability and of a confidence.
const TOLERANCE: f32 = 1e-4;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub fn target() -> Box<dyn LoadedModel> {
    open(&fixtures().join("architectures/qwen3")).unwrap()
}

/// A head, and what the library computes with it.
struct Fixture {
    name: String,
    folder: PathBuf,
    /// The folder of its target.
    target: PathBuf,
    prompt: Vec<u32>,
    drafted: Vec<u32>,
    logprobs: Vec<Vec<f32>>,
    confidence: Option<Vec<f32>>,
}

impl Fixture {
    fn read(folder: PathBuf) -> Self {
        let file = folder.join("expected.safetensors");
        let all = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let ids = |name: &str| {
            let ids: &Tensor = &all[name];
            ids.to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap()
        };
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let is_assistant = folder.parent().unwrap().ends_with("assistants");
        let target = if is_assistant { &name } else { "qwen3" };
        Self {
            target: fixtures().join("architectures").join(target),
            name,
            prompt: ids("prompt"),
            drafted: ids("drafted"),
            logprobs: all["logprobs"].to_vec2().unwrap(),
            confidence: (all.get("confidence")).map(|values| values.to_vec1().unwrap()),
            folder,
        }
    }

    fn target(&self) -> Box<dyn LoadedModel> {
        open(&self.target).unwrap()
    }

    fn load(&self) -> Box<dyn Head> {
        load_beside(&self.folder, &*self.target()).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// The target's states of all tokens but the last.
    fn states(&self, head: &dyn Head) -> Tensor {
        let (states, _) = plain(self.target(), &self.prompt, head.reads());
        let known = self.prompt.len() - 1;
        Tensor::new(states[..known].to_vec(), &Device::Cpu).unwrap()
    }

    /// Compares the log-probabilities before the `step`-th token.
    fn compare(&self, step: usize, logits: &[f32]) {
        let found = log_softmax(logits);
        let wanted = &self.logprobs[step];
        let finite = |row: &[f32]| row.iter().map(|x| x.is_finite()).collect::<Vec<bool>>();
        assert_eq!(finite(&found), finite(wanted), "{}", self.name);
        let of = |row: &[f32]| row.iter().map(|x| x.max(-1e3)).collect::<Vec<f32>>();
        let far = distance(&of(&found), &of(wanted));
        assert!(far < TOLERANCE, "{}, token {step}: {far}", self.name);
    }
}

pub fn load(folder: &Path) -> Result<Box<dyn Head>, String> {
    load_beside(folder, &*target())
}

pub fn load_beside(folder: &Path, target: &dyn LoadedModel) -> Result<Box<dyn Head>, String> {
    let source = ModelSource::Folder(folder.to_owned());
    let kind = HeadKind::of(&source).map_err(|e| e.to_string())?;
    let kind = kind.expect("a head is recognized");
    let options = LoadOptions::of(DType::F32);
    load_head(&source, kind, &options, target).map_err(|e| e.to_string())
}

fn all() -> Vec<Fixture> {
    let of = |name: &str| std::fs::read_dir(fixtures().join(name)).unwrap();
    let entries = of("heads").chain(of("assistants"));
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 20);
    folders.into_iter().map(Fixture::read).collect()
}

fn drafter(head: Box<dyn Head>, blocks: usize, chunk: usize) -> Box<dyn Drafter> {
    if head.masked_block().is_some() {
        Box::new(BlockDrafter::new(head, blocks, 4, chunk).unwrap())
    } else {
        Box::new(DraftModel::of_head(head, blocks, 4, chunk).unwrap())
    }
}

/// A pool for a head, and a table for one sequence in it.
fn pool(head: &dyn Head) -> (foretoken::kv::KvStore, BlockTable) {
    let mut table = BlockTable::default();
    BlockAllocator::new(16, 4).reserve(&mut table, 64).unwrap();
    (head.new_kv(16, 4).unwrap(), table)
}

/// Token by token; a row has its own outputs of the row before. It follows that row, or is in the place of the last row
/// of the prompt.
fn compare_chain(fixture: &Fixture, head: &mut dyn Head) {
    let (mut kv, table) = pool(head);
    let mut features = head.fuse(&fixture.states(head)).unwrap();
    let (mut context, mut new) = (0, fixture.prompt[1..].to_vec());
    for (step, &next) in fixture.drafted.iter().enumerate() {
        let mut batch = Batch::default();
        if step > 0 && head.drafts_in_place() {
            context = fixture.prompt.len() - 2;
            batch.written = vec![0];
        }
        batch.push_span(&new, &[], context, &table, 4);
        batch.features = Some(features);
        batch.logits = vec![new.len() as u32 - 1];
        let output = head.forward(&batch, &mut kv).unwrap();
        fixture.compare(step, &output.logits.to_vec2::<f32>().unwrap()[0]);
        features = output.features.unwrap();
        context += new.len();
        new = vec![next];
    }
}

/// All at once: the rows of the prompt, and then masks.
fn compare_masked_chain(fixture: &Fixture, head: &mut dyn Head, mask: &Tensor) {
    let (mut kv, table) = pool(head);
    let (depth, block) = (fixture.drafted.len(), head.masked_block().unwrap());
    let known = head.fuse(&fixture.states(head)).unwrap();
    let mut rows = fixture.prompt[1..].to_vec();
    rows.resize(rows.len() + depth - 1, block.mask);
    let mut batch = Batch::default();
    batch.push_span(&rows, &[], 0, &table, 4);
    let masks = mask.repeat((depth - 1, 1)).unwrap();
    batch.features = Some(Tensor::cat(&[known, masks], 0).unwrap());
    batch.logits = ((rows.len() - depth) as u32..rows.len() as u32).collect();
    let output = head.forward(&batch, &mut kv).unwrap();
    for (step, row) in (output.logits.to_vec2().unwrap()).iter().enumerate() {
        fixture.compare(step, row);
    }
}

/// A block after the context, and along the most probable path if the head follows paths.
fn compare_block(fixture: &Fixture, head: &mut dyn Head) {
    let (mut kv, table) = pool(head);
    let (depth, block) = (fixture.drafted.len(), head.masked_block().unwrap());
    assert_eq!(depth, block.max_depth());
    let states = fixture.states(head);
    let (known, rows) = (states.dim(0).unwrap(), block.rows(depth));
    let mut batch = Batch::default();
    batch.push_span(&fixture.prompt[..known], &[], 0, &table, 4);
    batch.context_features = Some(head.fuse(&states).unwrap());
    let mut tokens = vec![block.mask; rows];
    tokens[0] = fixture.prompt[known];
    batch.push_block(&tokens, known, &table, 4);
    let end = (known + rows) as u32;
    batch.logits = (end - depth as u32..end).collect();
    let output = head.forward(&batch, &mut kv).unwrap();
    let (mut before, mut states) = (tokens[0], None);
    for (step, &next) in fixture.drafted.iter().enumerate() {
        let logits = output.logits.narrow(0, step, 1).unwrap();
        if !head.follows_paths() {
            fixture.compare(step, &logits.to_vec2::<f32>().unwrap()[0]);
            continue;
        }
        let hidden = output.path_hidden.as_ref().unwrap();
        let hidden = hidden.narrow(0, step, 1).unwrap();
        let rows = PathRows {
            logits: &logits,
            hidden: &hidden,
            tokens: &[before],
            level: step,
            states: states.as_ref(),
        };
        let found = head.follow(&rows).unwrap();
        fixture.compare(step, &found.logits.to_vec2::<f32>().unwrap()[0]);
        let both = (found.confidence, &fixture.confidence);
        match both {
            (Some(found), Some(wanted)) => {
                let far = (found[0] - wanted[step]).abs();
                assert!(far < TOLERANCE, "{}: confidence {far}", fixture.name);
            }
            (found, wanted) => assert_eq!(found.is_some(), wanted.is_some(), "{}", fixture.name),
        }
        (before, states) = (next, found.states);
    }
}

#[test]
fn probabilities_are_those_of_the_library() {
    for fixture in all() {
        let mut head = fixture.load();
        let mask = head.mask_hidden().map(|hidden| head.fuse(hidden).unwrap());
        match mask {
            Some(mask) => compare_masked_chain(&fixture, &mut *head, &mask),
            None if head.masked_block().is_some() => compare_block(&fixture, &mut *head),
            None => compare_chain(&fixture, &mut *head),
        }
    }
}

/// The same heads with the flat configurations of DFlash's authors and of DeepSpec, which number the outputs of
/// the target's layers.
#[test]
fn flat_configurations_describe_the_same_heads() {
    // Layers with a window are causal unless a flag says otherwise.
    let dflash = |c: &mut Json| {
        c["dflash_config"] = json!({"mask_token_id": 255, "target_layer_ids": [0, 1]});
        c["num_target_layers"] = 2.into();
        "DFlashDraftModel"
    };
    let non_causal = |c: &mut Json| {
        c["is_causal"] = false.into();
        dflash(c)
    };
    let told_vllm = |c: &mut Json| {
        let class = dflash(c);
        c["dflash_config"]["causal"] = false.into();
        class
    };
    let dspark = |c: &mut Json| {
        c["target_layer_ids"] = json!([0, 1]);
        c["mask_token_id"] = 255.into();
        c["num_anchors"] = 512.into();
        "Qwen3DSparkModel"
    };
    let specforge = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "projector_type": "dspark",
            "attention_mode": "gqa", "confidence_head_alpha": 1.0
        });
        for key in [
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ] {
            c["dflash_config"][key] = c[key].take();
        }
        "DSparkDraftModel"
    };
    let dflash2 = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "conv_kernel_size": 3,
            "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6
        });
        "DFlash2DraftModel"
    };
    let domino = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "projector_type": "domino",
            "emb_dim": 10, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": true
        });
        "DFlashDraftModel"
    };
    type Change<'a> = &'a dyn Fn(&mut Json) -> &'static str;
    let cases: [(&str, Change<'_>); 10] = [
        ("dflash", &dflash),
        ("dflash_windows", &non_causal),
        ("dflash_windows", &told_vllm),
        ("dspark", &specforge),
        ("dspark_gated", &specforge),
        ("dflash2", &dflash2),
        ("domino", &domino),
        ("dspark", &dspark),
        ("dspark_gated", &dspark),
        ("dspark_rnn", &dspark),
    ];
    for (name, change) in cases {
        let to = changed(name, &|c| {
            let mut flat = c["transformer_layer_config"].clone();
            for key in [
                "block_size",
                "confidence_head_with_markov",
                "draft_vocab_size",
                "enable_confidence_head",
                "markov_head_type",
                "markov_rank",
            ] {
                flat[key] = c[key].clone();
            }
            let class = change(&mut flat);
            flat["architectures"] = json!([class]);
            *c = flat;
        });
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        let mut head = load(to.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        compare_block(&fixture, &mut *head);
    }
}

/// Early checkpoints of SpecForge have all that is not DFlash in a container.
#[test]
fn parts_may_be_in_a_container() {
    for (name, parts) in [
        ("domino_specforge", ["prefix_gru.", "embed_proj."]),
        ("dspark", ["markov_head.", "confidence_head."]),
    ] {
        let to = changed(name, &|_| {});
        let file = to.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let moved = stored.into_iter().map(|(name, tensor)| {
            if parts.iter().any(|part| name.starts_with(part)) {
                (format!("logit_head.{name}"), tensor)
            } else {
                (name, tensor)
            }
        });
        let moved: HashMap<String, Tensor> = moved.collect();
        candle_core::safetensors::save(&moved, &file).unwrap();
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        let mut head = load(to.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        compare_block(&fixture, &mut *head);
    }
}

/// Whatever the prompt's chunks were, and whatever was drafted before.
#[test]
fn drafts_are_those_of_the_library() {
    for fixture in all() {
        for (chunk, cut) in [(64, 0), (4, 7)] {
            let head = fixture.load();
            let states = fixture.states(&*head);
            let mut drafter = drafter(head, 64, chunk);
            let known = fixture.prompt.len() - 1;
            for new in [0..cut, cut..known] {
                if new.is_empty() {
                    continue;
                }
                let hidden = states.narrow(0, new.start, new.len()).unwrap();
                observe(&mut *drafter, &fixture.prompt, new, hidden);
            }
            for round in 0..2 {
                let found = propose(&mut *drafter, &fixture).tokens;
                assert_eq!(found, fixture.drafted, "{}, round {round}", fixture.name);
                assert_eq!(drafter.check_invariants(), Ok(()));
            }
        }
    }
}

/// What the budget is told of a token is what a confidence head says, not how probable the token is.
#[test]
fn a_confidence_head_scores_its_drafts() {
    for name in ["dspark", "dspark_gated", "dspark_rnn"] {
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        let head = fixture.load();
        let states = fixture.states(&*head);
        let mut drafter = drafter(head, 64, 64);
        let new = 0..fixture.prompt.len() - 1;
        observe(&mut *drafter, &fixture.prompt, new, states);
        let scores = propose(&mut *drafter, &fixture).scores;
        let (mut above, confidence) = (1.0, fixture.confidence.unwrap());
        assert_eq!(scores.len(), confidence.len());
        for (score, sure) in scores.into_iter().zip(confidence) {
            // Estimates have buckets, and begin with what they are told; no token here is more probable than 0.3.
            let found = score / above;
            assert!((found - sure).abs() < 0.2, "{name}: {found} {sure}");
            above = score;
        }
    }
}

/// Tells the drafter the hidden states of the positions `new` of a prompt.
fn observe(drafter: &mut dyn Drafter, prompt: &[u32], new: Range<usize>, hidden: Tensor) {
    drafter.observe(&[Committed {
        hidden: Some(hidden),
        ..Committed::new(1, prompt, prompt.len(), new, &DraftContext::default())
    }]);
}

/// A greedy chain.
fn propose(drafter: &mut dyn Drafter, fixture: &Fixture) -> Draft {
    let params = SamplingParams::at(0.0);
    let mut sampler = Sampler::new(params, &fixture.prompt);
    let depth = fixture.drafted.len();
    let context = DraftContext::default();
    let request = DraftRequest::chain(1, &fixture.prompt, depth, &mut sampler, &context);
    drafter.propose(&mut [request]).unwrap().remove(0)
}

/// With chunked prompts, batches, chains and trees, and preemption, greedy and sampled.
#[test]
fn texts_do_not_change() {
    let requests: Vec<Request> = [3usize, 30, 50, 11, 20, 40]
        .into_iter()
        .flat_map(|len| {
            let prompt = short_prompt(len);
            let mut rejected = greedy(&prompt, 20);
            rejected.acceptance = Some(Acceptance::Rejection);
            [
                greedy(&prompt, 20),
                sampled(&prompt, 20, len as u64),
                rejected,
            ]
        })
        .collect();
    let texts = |target: &Path, head: Option<&Fixture>, blocks: usize, spec: SpecLimits| {
        let drafter = head.map(|fixture| drafter(fixture.load(), blocks, 7));
        let options = EngineOptions {
            max_num_batched_tokens: 24,
            max_num_seqs: 4,
            spec,
            spec_budget: BudgetMode::Fixed,
            max_prompt_wait: PROMPT_WAIT,
            ..EngineOptions::default()
        };
        let target = open(target).unwrap();
        let engine = engine::spawn(target, drafter, blocks, 4, options).unwrap();
        let events = engine.submit_all(requests.clone()).unwrap();
        let texts: Vec<Vec<u32>> = events.into_iter().map(|e| collect(e).ids()).collect();
        assert_idle(&engine);
        let stats = engine.stats();
        let drafted = stats.spec_draft_tokens.get();
        (texts, drafted, stats.preemptions.get())
    };
    let tree = tree_limits(3, 9, 3);
    let (mut of_targets, mut preempting) = (HashMap::new(), 0);
    for fixture in all() {
        let target = &fixture.target;
        let plain = || texts(target, None, 256, chains(4)).0;
        let wanted = of_targets.entry(target.clone()).or_insert_with(plain);
        for (blocks, spec) in [(256, chains(4)), (26, chains(4)), (256, tree)] {
            let (found, drafted, preempted) = texts(target, Some(&fixture), blocks, spec);
            let name = &fixture.name;
            assert_eq!(&found, wanted, "{name} {blocks}");
            assert!(drafted > 100, "{name}: {drafted}");
            assert!(blocks == 26 || preempted == 0, "{name}: {preempted}");
            preempting += usize::from(preempted > 0);
        }
    }
    // Some drafts are so good that texts end before memory does.
    assert!(preempting > 15, "{preempting}");
}

/// One line says what a head is, also before its weights are there.
#[test]
fn a_head_says_its_layout() {
    for fixture in all() {
        let source = ModelSource::Folder(fixture.folder.clone());
        let kind = HeadKind::of(&source).unwrap().unwrap();
        let target = fixture.target();
        let inspected = inspect_head(&source, kind, &LoadOptions::default(), &*target);
        let (inspected, inventory) = inspected.unwrap();
        assert_eq!(inspected.layout(), fixture.load().layout());
        assert!(inventory.entries.len() > 8);
    }
    let wanted = [
        ("dflash", "DFlash, blocks of 16, 2 layers with windows"),
        (
            "dspark",
            "DSpark, a Markov head of rank 8, a confidence head, blocks of 5",
        ),
        (
            "dspark_gated",
            "DSpark, a gated Markov head of rank 8, a confidence head, blocks of 5",
        ),
        (
            "dspark_rnn",
            "DSpark, a recurrent Markov head of rank 8, a confidence head, blocks of 5",
        ),
        (
            "dflash2",
            "DFlash 2, a selector among 6 tokens, blocks of 8",
        ),
        (
            "dflash2_scaled",
            "DFlash 2, a selector among 6 tokens, blocks of 8, 2 layers with windows",
        ),
        (
            "domino",
            "Domino, a GRU of width 12, a correction of rank 10, blocks of 5",
        ),
        (
            "domino_specforge",
            "Domino, a GRU of width 20, a correction of rank 6, blocks of 6",
        ),
        (
            "jetspec",
            "DFlash, blocks of 8, rows that see those before them",
        ),
        (
            "lilicorr",
            "LiLiCorr, 1 layers over 4 candidates, blocks of 6",
        ),
        ("eagle31", "EAGLE-3.1, 3 norms before fc, 96 output ids"),
        ("eagle3_latent", "EAGLE-3, latent attention, 96 output ids"),
        ("eagle3_layers", "EAGLE-3, 3 layers"),
        (
            "eagle3_norm_before_fc",
            "EAGLE-3, a norm before fc, the norm before the residual, 96 output ids",
        ),
        (
            "peagle",
            "P-EAGLE of 5 depths, 2 layers, the norm before the residual, 96 output ids",
        ),
    ];
    for (name, wanted) in wanted {
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        assert_eq!(fixture.load().layout(), wanted);
    }
    for (name, wanted) in [
        (
            "gemma4",
            "Gemma 4's assistant of 3 layers, 4 of 32 groups of ids",
        ),
        ("gemma4_large", "Gemma 4's assistant of 2 layers"),
    ] {
        let fixture = Fixture::read(fixtures().join("assistants").join(name));
        assert_eq!(fixture.load().layout(), wanted);
    }
}

/// The head of the fixture `name` with a changed configuration.
pub fn changed(name: &str, change: &dyn Fn(&mut Json)) -> tempfile::TempDir {
    changed_in(&fixtures().join("heads").join(name), change)
}

/// The head in the folder `from` with a changed configuration.
pub fn changed_in(from: &Path, change: &dyn Fn(&mut Json)) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    let file = "model.safetensors";
    std::fs::copy(from.join(file), to.path().join(file)).unwrap();
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Json = serde_json::from_str(&text).unwrap();
    change(&mut config);
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    to
}
