//! Shared by the tests: toy engines, and a reference without batches or drafts.
#![allow(dead_code, reason = "each test file uses its part")]

#[cfg(feature = "train")]
pub mod distill_workshop;
pub mod grammar;
pub mod hooked;
pub mod hub;
pub mod llama;
pub mod memory;
pub mod plain;
pub mod plain_parallel;
pub mod process;
pub mod project;
pub mod refusals;
pub mod rig;
pub mod safetensors;
pub mod scripted;
pub mod server;
pub mod tiny;
pub mod tiny_folder;
pub mod tiny_gguf;

use foretoken::engine::{
    self, CollectedEvents, EngineHandle, EngineOptions, Events, Request, SpecLimits,
};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::toy::ToyModel;
use foretoken::model::{Adapter, Batch, Model};
use foretoken::sampling::{Rng, Sampler, SamplingParams, choose};
use foretoken::spec::{BudgetMode, DraftModel, Drafter, Lookahead, NgramDrafter, Tables};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, Mutex};

pub const VOCAB: usize = 32;
pub const MAX_LEN: usize = 256;
pub const SEED: u64 = 11;

/// The drafter for a toy target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Guess {
    Nothing,
    Ngram,
    Tables,
    Lookahead,
    /// A toy draft model with this noise: 0 is the target itself, 1 has nothing in common with it.
    Toy(f32),
}

/// The configuration of a toy engine.
#[derive(Debug, Clone)]
pub struct Toy {
    pub guess: Guess,
    pub num_blocks: usize,
    pub block_size: usize,
    pub eos: Vec<u32>,
    /// Seed of the interruptions of steps that may be interrupted; `None` = there are none.
    pub interruptions: Option<u64>,
    pub options: EngineOptions,
}

impl Default for Toy {
    fn default() -> Self {
        Self {
            guess: Guess::Toy(0.4),
            num_blocks: 256,
            block_size: 4,
            eos: Vec::new(),
            interruptions: None,
            options: EngineOptions {
                max_num_seqs: 16,
                max_num_batched_tokens: 128,
                spec: chains(4),
                // A toy's forward costs next to nothing, however many rows it has.
                spec_budget: BudgetMode::Fixed,
                ..EngineOptions::default()
            },
        }
    }
}

pub fn toy_model(noise: f32) -> ToyModel {
    ToyModel::new(VOCAB, MAX_LEN, SEED, noise)
}

impl Toy {
    /// The default engine with this drafter.
    pub fn guessing(guess: Guess) -> Self {
        Self {
            guess,
            ..Self::default()
        }
    }

    /// Lets prompts be read in the shortest chunks, so that those of a request alone grow, and interrupts these.
    pub fn interrupt(&mut self, seed: u64) {
        self.options.max_prompt_wait = std::time::Duration::ZERO;
        self.interruptions = Some(seed);
    }

    /// `model`, interrupted if this engine is to be.
    pub fn interrupting(&self, model: Box<dyn Model>) -> Box<dyn Model> {
        match self.interruptions {
            Some(seed) => hooked::interrupted(model, seed),
            None => model,
        }
    }

    pub fn start(&self) -> EngineHandle {
        self.start_with(toy_model(0.0))
    }

    /// The engine, and a lock that it takes for each forward.
    pub fn start_gated(&self) -> (EngineHandle, Arc<Mutex<()>>) {
        let target = toy_model(0.0);
        let gate = target.gate.clone();
        (self.start_with(target), gate)
    }

    pub fn start_with(&self, target: ToyModel) -> EngineHandle {
        let target = target.with_eos(&self.eos);
        let chunk = self.options.max_num_batched_tokens;
        let drafter: Option<Box<dyn Drafter>> = match self.guess {
            Guess::Nothing => None,
            Guess::Ngram => Some(Box::new(NgramDrafter::new(1, 3))),
            Guess::Tables => Some(Box::new(Tables::new(1 << 20))),
            Guess::Lookahead => Some(Box::new(Lookahead::default())),
            Guess::Toy(noise) => {
                let model = Box::new(toy_model(noise));
                let draft = DraftModel::new(model, self.num_blocks, self.block_size, chunk);
                Some(Box::new(draft.unwrap()))
            }
        };
        let options = self.options.clone();
        engine::spawn(
            self.interrupting(Box::new(target)),
            drafter,
            self.num_blocks,
            self.block_size,
            options,
        )
        .unwrap()
    }
}

pub fn read_json(file: impl AsRef<Path>) -> Value {
    let file = file.as_ref();
    let text = std::fs::read_to_string(file).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

/// Asserts that a text has all of these parts.
#[track_caller]
pub fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?}: {text}");
    }
}

/// The first sample of `metrics` whose line begins with `name`.
#[track_caller]
pub fn sample(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {metrics}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// A greedy request.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        params: SamplingParams::at(0.0),
        ..Default::default()
    }
}

/// A request sampled at temperature 1.
pub fn sampled(prompt: &[u32], max_tokens: usize, seed: u64) -> Request {
    Request {
        params: SamplingParams {
            seed,
            ..Default::default()
        },
        ..greedy(prompt, max_tokens)
    }
}

/// Waits for the end of a request.
pub fn collect(events: Events) -> CollectedEvents {
    events.blocking_collect().unwrap_or_else(|e| panic!("{e}"))
}

pub fn run(engine: &EngineHandle, request: Request) -> CollectedEvents {
    collect(engine.submit(request).unwrap())
}

/// Waits until `holds`, on a machine that does much else, too.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !holds() {
        let is_patient = started.elapsed() < std::time::Duration::from_secs(120);
        assert!(is_patient, "still not: {what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Waits until the engine is idle, and checks that both pools are empty and the thread is alive: the
/// thread panics if an invariant is violated.
pub fn assert_idle(engine: &EngineHandle) {
    let stats = engine.stats();
    let busy = || {
        stats.requests_running.get() + stats.requests_waiting.get() > 0
            || stats.kv_cache_usage.get() > 0.0
            || stats.draft_kv_cache_usage.get() > 0.0
    };
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while busy() && std::time::Instant::now() < patience {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(!engine.has_ended(), "the engine thread has panicked");
    assert!(!busy(), "blocks are held though no request is alive");
}

/// For tests of preemption and of near ties: so long that chunks of prompts, and with them what meets in the pool,
/// do not depend on how fast the machine is at the moment.
pub const PROMPT_WAIT: std::time::Duration = std::time::Duration::from_secs(3600);

/// Options with which all drafts are verified.
pub fn fixed_budget(spec: SpecLimits) -> EngineOptions {
    EngineOptions {
        spec,
        spec_budget: BudgetMode::Fixed,
        ..EngineOptions::default()
    }
}

/// Options with which requests wait for each other: four sequences and `rows` rows a step, and all drafts are verified.
pub fn crowded(spec: SpecLimits, rows: usize) -> EngineOptions {
    EngineOptions {
        max_num_seqs: 4,
        max_num_batched_tokens: rows,
        max_prompt_wait: PROMPT_WAIT,
        ..fixed_budget(spec)
    }
}

/// Drafts of at most `length` tokens without branches.
pub fn chains(length: usize) -> SpecLimits {
    tree_limits(length, length, 1)
}

/// Drafts of at most `nodes` tokens, `length` of them on a path, and `topk` siblings.
pub fn tree_limits(length: usize, nodes: usize, topk: usize) -> SpecLimits {
    SpecLimits {
        length,
        nodes,
        topk,
    }
}

/// The text of `request`, token by token from scratch: one sequence, no drafts, no reuse.
pub fn reference(model: &mut dyn Model, request: &Request) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    let end = tokens.len() + request.max_tokens.unwrap();
    let mut params = request.params.clone();
    if !params.ignore_eos {
        params.stop_token_ids.extend(&model.info().eos_token_ids);
    }
    while tokens.len() < end {
        let row = last_logits_with(model, &tokens, request.adapter.as_ref());
        let rng = Rng::at(params.seed, tokens.len());
        let sampler = sampler(&params, &tokens, request.prompt.len());
        let token = choose(&row, &sampler, rng.key(0)).unwrap();
        tokens.push(token);
        if sampler.ends_text(token, sampler.output_len()) {
            break;
        }
    }
    tokens.split_off(request.prompt.len())
}

/// The sampler of a request whose `tokens` begin with `prompt_len` prompt tokens.
pub fn sampler(params: &SamplingParams, tokens: &[u32], prompt_len: usize) -> Sampler {
    let (prompt, output) = tokens.split_at(prompt_len);
    let mut sampler = Sampler::new(params.clone(), prompt);
    output.iter().for_each(|&token| sampler.push(token));
    sampler
}

/// Logits after `tokens`, from an empty pool.
pub fn last_logits(model: &mut dyn Model, tokens: &[u32]) -> Vec<f32> {
    last_logits_with(model, tokens, None)
}

/// The same of an adapter's tokens.
fn last_logits_with(
    model: &mut dyn Model,
    tokens: &[u32],
    adapter: Option<&Arc<dyn Adapter>>,
) -> Vec<f32> {
    let blocks = tokens.len().div_ceil(16);
    let mut store = model.new_kv(blocks, 16).unwrap();
    let mut table = BlockTable::default();
    let mut blocks = BlockAllocator::new(blocks, 16);
    blocks.reserve(&mut table, tokens.len()).unwrap();
    let mut batch = Batch::default();
    batch.push_span(tokens, &[], 0, &table, 16);
    if let Some(adapter) = adapter {
        batch.adapt(tokens.len(), adapter);
    }
    batch.logits.push(tokens.len() as u32 - 1);
    let output = model.forward(&batch, &mut store).unwrap();
    output.logits.flatten_all().unwrap().to_vec1().unwrap()
}
