//! A real model with a window: Gemma 3 270M, against llama.cpp on the same file, and through the engine.

use crate::common::rig::argmax;
use crate::common::{assert_idle, chains, collect, greedy, run, sampled};
use foretoken::engine::{self, EngineOptions, Request};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::LoadedModel;
use foretoken::model::{Batch, LoadOptions, Model, ModelSource, load};
use foretoken::spec::{BudgetMode, Tables};
use serde::Deserialize;
use std::path::Path;

const BLOCK_SIZE: usize = 16;
/// Tokens that a row of its layers with a window sees.
const WINDOW: usize = 512;

fn gemma3() -> Box<dyn LoadedModel> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/gemma-3-270m.Q4_K_M.gguf");
    let name = file.display();
    assert!(
        file.exists(),
        "{name} is missing: run scripts/fetch-gemma3.sh first"
    );
    load(&ModelSource::Gguf(file.into()), &LoadOptions::default()).unwrap()
}

/// A greedy text of llama.cpp, written by `scripts/llama-greedy.py`.
#[derive(Deserialize)]
struct Theirs {
    prompt: Vec<u32>,
    text: Vec<u32>,
    /// By how much the logarithm of each token's probability exceeds that of the second.
    margins: Vec<f32>,
}

fn theirs() -> Vec<Theirs> {
    let lines = include_str!("../data/gemma3-greedy.jsonl").lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The greedy token after each token of `text`, but after its last one, and that after `prompt`.
fn choices(model: &mut dyn Model, prompt: &[u32], text: &[u32]) -> Vec<u32> {
    let tokens = [prompt, &text[..text.len() - 1]].concat();
    let count = tokens.len().div_ceil(BLOCK_SIZE);
    let mut kv = model.new_kv(count, BLOCK_SIZE).unwrap();
    let mut blocks = BlockAllocator::new(count, BLOCK_SIZE);
    let mut table = BlockTable::default();
    blocks.reserve(&mut table, tokens.len()).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&tokens, &[], 0, &table, BLOCK_SIZE);
    batch.logits = (prompt.len() as u32 - 1..tokens.len() as u32).collect();
    let output = model.forward(&batch, &mut kv).unwrap();
    let vocab = model.info().vocab_size;
    output
        .read(|logits| logits.chunks(vocab).map(argmax).collect())
        .unwrap()
}

/// Both compute with eight bits, but round at different places. So the texts part where two tokens are about as
/// likely; after llama.cpp's own text, ours is the same token nearly always.
#[test]
fn greedy_texts_are_llama_cpps_for_most_of_their_length() {
    let mut model = gemma3();
    let (mut tokens, mut same, mut shares, mut widest) = (0, 0, Vec::new(), 0f32);
    let mut beyond_window = 0;
    for Theirs {
        prompt,
        text,
        margins,
    } in theirs()
    {
        let ours = choices(&mut *model, &prompt, &text);
        let differ: Vec<usize> = (0..text.len()).filter(|&i| ours[i] != text[i]).collect();
        let begin = differ.first().copied().unwrap_or(text.len());
        println!(
            "{} tokens after {}: the same for {begin}; {} differ, of margins {:?}",
            text.len(),
            prompt.len(),
            differ.len(),
            differ.iter().map(|&i| margins[i]).collect::<Vec<_>>(),
        );
        shares.push(begin as f64 / text.len() as f64);
        widest = differ.iter().map(|&i| margins[i]).fold(widest, f32::max);
        tokens += text.len();
        same += text.len() - differ.len();
        beyond_window += usize::from(prompt.len() > WINDOW);
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    println!(
        "{} texts: the same for {:.1}% of their length (mean), {same} of {tokens} tokens after the same text; the widest margin of another is {widest}",
        shares.len(),
        mean * 100.
    );
    assert!(beyond_window >= 2, "{beyond_window}");
    assert!(mean > 0.4, "{mean}");
    assert!(same as f64 > 0.96 * tokens as f64, "{same} of {tokens}");
    assert!(widest < 0.6, "{widest}");
}

/// Drafts, chunks, preemption and the prefix cache change no text, with prompts around the length of the window.
#[test]
fn the_engine_changes_no_text_beyond_the_window() {
    const TOKENS: usize = 24;
    let long = theirs().pop().unwrap().prompt;
    let begin = |len: usize| long[..len].to_vec();
    let requests: Vec<Request> = vec![
        greedy(&begin(WINDOW + 90), TOKENS),
        sampled(&begin(WINDOW + 90), TOKENS, 5),
        greedy(&begin(WINDOW - 10), TOKENS),
        sampled(&begin(300), TOKENS, 6),
    ];
    let plain = EngineOptions {
        max_num_seqs: 1,
        max_num_batched_tokens: 1024,
        no_prefix_caching: true,
        ..EngineOptions::default()
    };
    let plain = engine::spawn(gemma3(), None, 64, BLOCK_SIZE, plain).unwrap();
    let wanted = requests.iter().map(|r| run(&plain, r.clone()).ids());
    let wanted: Vec<Vec<u32>> = wanted.collect();
    let options = EngineOptions {
        max_num_seqs: 4,
        max_num_batched_tokens: 200,
        spec: chains(4),
        spec_budget: BudgetMode::Fixed,
        ..EngineOptions::default()
    };
    let drafter = Box::new(Tables::new(1 << 20));
    // Room for one and a half of the longest.
    let blocks = (WINDOW + 90) * 3 / 2 / BLOCK_SIZE;
    let engine = engine::spawn(gemma3(), Some(drafter), blocks, BLOCK_SIZE, options).unwrap();
    let (mut accepted, mut tested) = (0, 0);
    for _ in 0..2 {
        let answers = engine.submit_all(requests.clone()).unwrap();
        for (answer, want) in answers.into_iter().zip(&wanted) {
            let answer = collect(answer);
            assert_eq!(&answer.ids(), want);
            accepted += answer.spec.accepted;
            tested += answer.spec.tested;
        }
    }
    assert_idle(&engine);
    let cached = engine.stats().prefix_cache_hits.get();
    assert!(accepted > 20 && tested > accepted && cached > 0);
}
