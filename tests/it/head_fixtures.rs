//! Draft heads of the speculators library and of transformers: tiny random ones of their classes, made by
//! scripts/make-head-fixtures.py and scripts/make-transformers-head-fixtures.py, draft what their code drafts.

use crate::common::refusals::rows;
use crate::common::tiny::{open, short_prompt};
use crate::common::*;
use crate::taps::plain;
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, Request, SpecLimits};
use foretoken::model::{
    Head, HeadKind, LoadOptions, LoadedModel, ModelSource, inspect_head, load_head,
};
use foretoken::sampling::{Acceptance, Sampler, SamplingParams};
use foretoken::spec::{
    BlockDrafter, Committed, Draft, DraftContext, DraftModel, DraftRequest, Drafter,
};
use serde_json::Value as Json;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub fn target() -> Box<dyn LoadedModel> {
    open(&fixtures().join("architectures/qwen3")).unwrap()
}

/// A head, and what the library computes with it.
pub struct Fixture {
    pub name: String,
    folder: PathBuf,
    /// The folder of its target.
    target: PathBuf,
    pub prompt: Vec<u32>,
    pub drafted: Vec<u32>,
    pub logprobs: Vec<Vec<f32>>,
    pub confidence: Option<Vec<f32>>,
}

impl Fixture {
    pub fn read(folder: PathBuf) -> Self {
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

    pub fn load(&self) -> Box<dyn Head> {
        load_beside(&self.folder, &*self.target()).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// The target's states of all tokens but the last.
    pub fn states(&self, head: &dyn Head) -> Tensor {
        let (states, _) = plain(self.target(), &self.prompt, head.reads());
        let known = self.prompt.len() - 1;
        Tensor::new(states[..known].to_vec(), &Device::Cpu).unwrap()
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

pub fn all() -> Vec<Fixture> {
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
        let options = crowded(spec, 24);
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

/// Folders of heads, and the lines that say what they are.
const LAYOUTS: &str = "
heads/dflash | DFlash, blocks of 16, 2 layers with windows
heads/dspark | DSpark, a Markov head of rank 8, a confidence head, blocks of 5
heads/dspark_gated | DSpark, a gated Markov head of rank 8, a confidence head, blocks of 5
heads/dspark_rnn | DSpark, a recurrent Markov head of rank 8, a confidence head, blocks of 5
heads/dflash2 | DFlash 2, a selector among 6 tokens, blocks of 8
heads/dflash2_scaled | DFlash 2, a selector among 6 tokens, blocks of 8, 2 layers with windows
heads/domino | Domino, a GRU of width 12, a correction of rank 10, blocks of 5
heads/domino_specforge | Domino, a GRU of width 20, a correction of rank 6, blocks of 6
heads/jetspec | DFlash, blocks of 8, rows that see those before them
heads/lilicorr | LiLiCorr, 1 layers over 4 candidates, blocks of 6
heads/eagle31 | EAGLE-3.1, 3 norms before fc, 96 output ids
heads/eagle3_latent | EAGLE-3, latent attention, 96 output ids
heads/eagle3_layers | EAGLE-3, 3 layers
heads/eagle3_norm_before_fc | EAGLE-3, a norm before fc, the norm before the residual, 96 output ids
heads/peagle | P-EAGLE of 5 depths, 2 layers, the norm before the residual, 96 output ids
assistants/gemma4 | Gemma 4's assistant of 3 layers, 4 of 32 groups of ids
assistants/gemma4_large | Gemma 4's assistant of 2 layers
assistants/muse_glimmer | DFlash, blocks of 7, 2 layers with windows
";

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
    for [name, wanted] in rows::<2>(LAYOUTS) {
        let fixture = Fixture::read(fixtures().join(name));
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
    let mut config = read_json(from.join("config.json"));
    change(&mut config);
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    to
}
