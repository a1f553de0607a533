//! Drafts by a parallel head: whatever it guesses, no text changes, and its pool is right.

use crate::common::*;
use crate::engine::{
    Dice, assert_always_accepted, assert_distributed_as_the_target, few_ids, is_lossless,
};
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineHandle, Request};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::toy::ToyModel;
use foretoken::model::{
    Batch, ForwardOutput, Head, MaskedBlock, Model, ModelInfo, PathOutput, PathRows, Span,
};
use foretoken::sampling::{Acceptance, mix};
use foretoken::spec::{BlockDrafter, BudgetMode, Drafter};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A parallel head for toys. It keeps the toy's hidden states in its pool. They are hashes of all tokens so
/// far, so that at a block it can tell all tokens of the context from them, if each is in its place. It then
/// guesses what a toy would generate.
struct ToyHead {
    toy: ToyModel,
    block: MaskedBlock,
    seen: Arc<Seen>,
    /// Whether its guesses depend on the tokens before them in the block. Its hidden states and the states of
    /// paths are then numbers of texts.
    follows: bool,
    texts: Mutex<Vec<Vec<u32>>>,
}

#[derive(Default)]
pub struct Seen {
    pub blocks: AtomicUsize,
    /// Blocks whose context could not be told.
    pub unknown: AtomicUsize,
    /// The most blocks of one forward.
    together: AtomicUsize,
}

fn toy_head(toy: ToyModel, size: usize) -> (ToyHead, Arc<Seen>) {
    let seen = Arc::<Seen>::default();
    let mask = toy.info().vocab_size as u32 - 1;
    let head = ToyHead {
        toy,
        block: MaskedBlock {
            size,
            mask,
            from_anchor: false,
        },
        seen: seen.clone(),
        follows: false,
        texts: Mutex::default(),
    };
    (head, seen)
}

/// The layers whose hidden states it reads; it keeps them as K and V.
const LAYERS: [usize; 2] = [0, 1];

/// The toy's hidden state at tap `layer` after a context that hashes to `hash`.
fn hidden(hash: u64, layer: usize) -> f32 {
    (mix(hash ^ mix(layer as u64)) >> 40) as f32 / (1u64 << 24) as f32
}

impl ToyHead {
    /// The context of a block, told from what the pool has.
    fn context(&self, span: &Span, kv: &KvStore) -> Option<Vec<u32>> {
        let (keys, values) = &kv.layers[0];
        let read = |pool: &Tensor| pool.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (keys, values) = (read(keys), read(values));
        let (mut tokens, mut hash) = (Vec::new(), 0);
        for at in 0..span.context {
            let block = span.blocks[at / kv.block_size] as usize;
            let slot = block * kv.block_size + at % kv.block_size;
            let stored = [keys[slot], values[slot]];
            let mut ids = 0..self.info().vocab_size as u32;
            let after = |id: u32| {
                let token = u64::from((id as f32).to_bits());
                mix(hash ^ mix(token << 32 | u64::from((at as f32).to_bits())))
            };
            let id = ids.find(|&id| LAYERS.map(|layer| hidden(after(id), layer)) == stored)?;
            hash = after(id);
            tokens.push(id);
        }
        Some(tokens)
    }

    /// The number of a text.
    fn note(&self, text: &[u32]) -> usize {
        let mut texts = self.texts.lock().unwrap();
        texts.push(text.to_vec());
        texts.len() - 1
    }

    /// The logits of the masks of a block: the toy's, if each token is the most probable one.
    fn logits(&self, span: &Span, batch: &Batch, kv: &KvStore) -> Vec<f32> {
        let (rows, vocab) = (&batch.tokens[span.rows.clone()], self.info().vocab_size);
        assert!(rows.len() <= self.block.size);
        assert!(rows[1..].iter().all(|&token| token == self.block.mask));
        let masks = vec![(1u64 << rows.len()) - 1; rows.len()];
        assert_eq!(span.tree.as_ref(), Some(&masks), "the rows see one another");
        let positions = span.context as u32..;
        assert!(
            (batch.positions[span.rows.clone()].iter().copied()).eq(positions.take(rows.len()))
        );
        self.seen.blocks.fetch_add(1, Ordering::Relaxed);
        let Some(mut tokens) = self.context(span, kv) else {
            self.seen.unknown.fetch_add(1, Ordering::Relaxed);
            return vec![0.0; (rows.len() - 1) * vocab];
        };
        self.note(&tokens);
        tokens.push(rows[0]);
        let mut all = Vec::new();
        for _ in 1..rows.len() {
            let logits = last_logits(&mut self.toy.clone(), &tokens);
            tokens.push(rig::argmax(&logits));
            all.extend(logits);
        }
        all
    }
}

impl Model for ToyHead {
    fn info(&self) -> &ModelInfo {
        self.toy.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.toy.kv_shape()
    }

    fn device(&self) -> &Device {
        self.toy.device()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let features = batch
            .context_features
            .as_ref()
            .map(|f| f.to_vec2::<f32>().unwrap());
        let features = features.unwrap_or_default();
        for (pool, layer) in [(&kv.layers[0].0, 0), (&kv.layers[0].1, 1)] {
            for (row, &slot) in batch.slots.iter().enumerate() {
                // What a block leaves in the pool is not to be read.
                let value = features.get(row).map_or(f32::NAN, |row| row[layer]);
                let value = Tensor::full(value, (1, 1, 1), &Device::Cpu)?;
                pool.slice_set(&value, 0, slot as usize)?;
            }
        }
        let after = |span: &&Span| span.rows.start >= features.len();
        let blocks: Vec<&Span> = batch.spans.iter().filter(after).collect();
        let mut logits = Vec::new();
        let mut asked = Vec::new();
        let mut numbers = Vec::new();
        for span in &blocks {
            logits.extend(self.logits(span, batch, kv));
            let number = self.texts.lock().unwrap().len() as f32 - 1.0;
            numbers.extend(vec![number; span.rows.len() - 1]);
            asked.extend(span.rows.start as u32 + 1..span.rows.end as u32);
        }
        assert_eq!(batch.logits, asked);
        self.seen
            .together
            .fetch_max(blocks.len(), Ordering::Relaxed);
        let shape = (asked.len(), self.info().vocab_size);
        let logits = Tensor::from_vec(logits, shape, &Device::Cpu)?;
        Ok(ForwardOutput {
            path_hidden: Some(Tensor::from_vec(numbers, (asked.len(), 1), &Device::Cpu)?),
            ..ForwardOutput::of(logits.to_dtype(DType::F32)?)
        })
    }
}

impl Head for ToyHead {
    fn reads(&self) -> &[usize] {
        &LAYERS
    }

    fn masked_block(&self) -> Option<MaskedBlock> {
        Some(self.block)
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(hidden.clone())
    }

    fn follows_paths(&self) -> bool {
        self.follows
    }

    fn follow(&self, rows: &PathRows<'_>) -> Result<PathOutput> {
        let before = rows.states.unwrap_or(rows.hidden).flatten_all()?;
        let before = before.to_vec1::<f32>()?;
        let (mut logits, mut numbers) = (Vec::new(), Vec::new());
        for (&number, &token) in before.iter().zip(rows.tokens) {
            let mut text = self.texts.lock().unwrap()[number as usize].clone();
            text.push(token);
            logits.extend(last_logits(&mut self.toy.clone(), &text));
            numbers.push(self.note(&text) as f32);
        }
        let shape = (numbers.len(), self.info().vocab_size);
        let states = Tensor::from_vec(numbers, (shape.0, 1), &Device::Cpu)?;
        Ok(PathOutput {
            logits: Tensor::from_vec(logits, shape, &Device::Cpu)?,
            states: Some(states),
            confidence: None,
        })
    }
}

/// A drafter whose head is a toy with this `noise`, guesses blocks of `size`, and has a pool of `num_blocks`
/// blocks.
pub fn drafter(
    noise: f32,
    size: usize,
    num_blocks: usize,
    block_size: usize,
) -> (BlockDrafter, Arc<Seen>) {
    let (head, seen) = toy_head(toy_model(noise), size);
    let drafter = BlockDrafter::new(Box::new(head), num_blocks, block_size, 7);
    (drafter.unwrap(), seen)
}

/// An engine with such a drafter.
pub fn start(toy: &Toy, noise: f32, size: usize, num_blocks: usize) -> (EngineHandle, Arc<Seen>) {
    let (drafter, seen) = drafter(noise, size, num_blocks, toy.block_size);
    let target = Box::new(toy_model(0.0).with_eos(&toy.eos));
    let drafter: Box<dyn Drafter> = Box::new(drafter);
    let (blocks, options) = (toy.num_blocks, toy.options.clone());
    let engine = engine::spawn(target, Some(drafter), blocks, toy.block_size, options).unwrap();
    (engine, seen)
}

/// Promises 1 and 6 over random schedules: whatever is admitted, chunked, drafted, rejected, preempted and
/// cancelled, a text is that of the reference, and both pools are empty in the end. A head with as many
/// blocks as the target always knows its whole context, unless it may skip what does not pay.
#[test]
fn random_schedules_are_lossless_and_leak_nothing() {
    let (mut preemptions, mut accepted, mut blocks, mut together) = (0, 0, 0, 0);
    for case in 0..120 {
        let mut dice = Dice(5_000_000 + case);
        let toy = dice.toy();
        let noise = dice.of(&[0.0, 0.3, 1.0]);
        let size = 2 + dice.roll(6);
        let is_small = dice.roll(4) == 0;
        let num_blocks = if is_small { toy.num_blocks / 3 } else { 512 };
        let (engine, seen) = start(&toy, noise, size, num_blocks);
        let requests: Vec<Request> = (0..12)
            .map(|_| dice.request(toy.options.spec.length))
            .collect();
        let receivers: Vec<_> = requests
            .iter()
            .map(|request| {
                let receiver = engine.submit(request.clone()).unwrap();
                (dice.roll(5) > 0).then_some(receiver)
            })
            .collect();
        for (request, receiver) in requests.into_iter().zip(receivers) {
            let Some(receiver) = receiver else { continue };
            let answer = collect(receiver);
            if is_lossless(&request) {
                let mut model = toy_model(0.0).with_eos(&toy.eos);
                let want = reference(&mut model, &request);
                assert_eq!(answer.ids(), want, "case {case}: {request:?} on {toy:?}");
            }
        }
        assert_idle(&engine);
        let unknown = seen.unknown.load(Ordering::Relaxed);
        let reads_all = !is_small && toy.options.spec_budget == BudgetMode::Fixed;
        assert!(
            !reads_all || unknown == 0,
            "case {case}: {unknown} contexts"
        );
        let stats = engine.stats();
        preemptions += stats.preemptions.get();
        accepted += stats.spec_accepted_tokens.get();
        blocks += seen.blocks.load(Ordering::Relaxed);
        together = together.max(seen.together.load(Ordering::Relaxed));
    }
    let found = format!("{preemptions}, {accepted}, {blocks}, {together}");
    assert!(preemptions > 20 && accepted > 500, "{found}");
    assert!(blocks > 1000 && together > 2, "{found}");
}

/// A head that knows the text saves target steps, and every draft is one forward.
#[test]
fn a_perfect_block_saves_target_steps() {
    let (engine, seen) = start(&Toy::default(), 0.0, 5, 256);
    let answer = run(&engine, greedy(&[1, 2, 3], 41));
    // One token from the prompt, then rounds of five.
    assert_eq!((answer.spec.rounds, answer.spec.accepted), (8, 32));
    assert_eq!(answer.spec.drafted, 32);
    assert_eq!(seen.blocks.load(Ordering::Relaxed), 8);
    assert_eq!(engine.stats().draft_steps.get(), 8);
    assert_idle(&engine);
}

/// A block is never larger than the head's, and a long prompt is read before the first one.
#[test]
fn small_blocks_and_long_prompts() {
    let (engine, seen) = start(&Toy::default(), 0.0, 3, 256);
    let prompt: Vec<u32> = (0..200).map(|i| i * 7 % 32).collect();
    let answer = run(&engine, greedy(&prompt, 31));
    assert_eq!((answer.spec.rounds, answer.spec.accepted), (10, 20));
    assert_eq!(seen.unknown.load(Ordering::Relaxed), 0);
    assert_idle(&engine);
}

/// The first guess of a perfect head is what the target draws, at every temperature and with penalties.
#[test]
fn the_first_guess_goes_through_the_sampler() {
    let mut toy = Toy::default();
    toy.options.spec = chains(1);
    let (engine, _) = start(&toy, 0.0, 4, 256);
    assert_always_accepted(&engine);
}

/// An engine whose head is a perfect toy, which follows paths or guesses each depth for itself.
fn start_with_paths(toy: &Toy, follows: bool) -> (EngineHandle, Arc<Seen>) {
    let (mut head, seen) = toy_head(toy_model(0.0), 5);
    head.follows = follows;
    let drafter = BlockDrafter::new(Box::new(head), 256, toy.block_size, 7).unwrap();
    let (target, options) = (Box::new(toy_model(0.0)), toy.options.clone());
    let drafter = Some(Box::new(drafter) as Box<dyn Drafter>);
    let engine = engine::spawn(target, drafter, toy.num_blocks, toy.block_size, options);
    (engine.unwrap(), seen)
}

/// At a temperature, guesses that do not know each other's draws do not form a text; along a path a perfect
/// head is always right, at every temperature, with penalties, in chains and in trees.
#[test]
fn along_a_path_a_perfect_head_is_always_right() {
    for topk in [1, 2] {
        let mut toy = Toy::default();
        toy.options.spec = tree_limits(4, 4 * topk, topk);
        let accepted = [false, true].map(|follows| {
            let (engine, seen) = start_with_paths(&toy, follows);
            let rates: Vec<u64> = (0..20)
                .map(|seed| {
                    let mut request = sampled(&[1, 2, 3], 41, seed);
                    request.params.frequency_penalty = 0.5;
                    let answer = run(&engine, request);
                    answer.spec.rounds as u64
                })
                .collect();
            assert_eq!(seen.unknown.load(Ordering::Relaxed), 0);
            assert_idle(&engine);
            rates.iter().sum::<u64>()
        });
        // 41 tokens: one from the prompt, then five a round.
        let [apart, along] = accepted;
        // A tree may spend its nodes beside the path.
        let beside = if topk == 1 { 0 } else { 3 };
        assert!(
            (160..=160 + beside).contains(&along),
            "topk {topk}: {along}"
        );
        println!("topk {topk}: {apart} rounds apart, {along} along a path");
        assert!(apart > 3 * along / 2, "topk {topk}: {apart}");
    }
}

/// Under the rejection rule along paths, too.
#[test]
fn tokens_along_paths_are_distributed_as_the_target() {
    for acceptance in [Acceptance::Rejection, Acceptance::Coupled] {
        let mut head = toy_head(few_ids(0.6), 5).0;
        head.follows = true;
        let drafter = BlockDrafter::new(Box::new(head), 256, 4, 64).unwrap();
        assert_distributed_as_the_target(Box::new(drafter), 4, acceptance);
    }
}

/// Under the rejection rule, too, sampled tokens have the target's distribution: a guess stands with a
/// probability that depends on the q it was drawn from, and a wrong q would show.
#[test]
fn sampled_tokens_are_distributed_as_the_target() {
    let head = toy_head(few_ids(0.6), 5).0;
    let drafter = BlockDrafter::new(Box::new(head), 256, 4, 64).unwrap();
    assert_distributed_as_the_target(Box::new(drafter), 4, Acceptance::Rejection);
}

/// A model of its own that guesses a block at masks (PARD): no text changes, whatever the masks make it guess.
#[test]
fn a_model_with_a_mask_token_changes_no_text() {
    let toy = Toy::default();
    let model = toy_model(0.2).with_mask_token(VOCAB as u32 - 1);
    let drafter = BlockDrafter::of_model(Box::new(model), toy.num_blocks, 4, 64).unwrap();
    let target = Box::new(toy_model(0.0));
    let drafter = Some(Box::new(drafter) as Box<dyn Drafter>);
    let engine = engine::spawn(target, drafter, toy.num_blocks, 4, toy.options.clone()).unwrap();
    let mut accepted = 0;
    for case in 0..40 {
        let mut dice = Dice(case);
        let prompt = dice.prompt(150);
        for request in [greedy(&prompt, 30), sampled(&prompt, 30, case)] {
            let answer = run(&engine, request.clone());
            let want = reference(&mut toy_model(0.0), &request);
            assert_eq!(answer.ids(), want, "case {case}");
            accepted += answer.spec.accepted;
        }
    }
    assert!(accepted > 300, "{accepted}");
    assert_idle(&engine);
    for acceptance in [Acceptance::Coupled, Acceptance::Rejection] {
        let model = Box::new(few_ids(0.6).with_mask_token(5));
        let drafter = BlockDrafter::of_model(model, 256, 4, 64).unwrap();
        assert_distributed_as_the_target(Box::new(drafter), 4, acceptance);
    }
}
