//! A real model with a window: Gemma 3 270M, against llama.cpp on the same file, and through the engine.

use crate::common::llama::{self, Agreement, Theirs};
use crate::common::{assert_idle, chains, collect, fixed_budget, greedy, run, sampled};
use foretoken::engine::{self, EngineOptions, Request};
use foretoken::model::LoadedModel;
use foretoken::model::{LoadOptions, ModelSource, load};
use foretoken::spec::Tables;
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

fn theirs() -> Vec<Theirs> {
    llama::theirs(include_str!("../data/gemma3-greedy.jsonl"))
}

/// Both compute with eight bits, but round at different places. So the texts part where two tokens are about as
/// likely; after llama.cpp's own text, ours is the same token nearly always.
#[test]
fn greedy_texts_are_llama_cpps_for_most_of_their_length() {
    let texts = theirs();
    let beyond_window = texts.iter().filter(|t| t.prompt.len() > WINDOW).count();
    assert!(beyond_window >= 2, "{beyond_window}");
    let Agreement {
        mean,
        same,
        tokens,
        widest,
    } = Agreement::of(&mut *gemma3(), &texts);
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
        ..fixed_budget(chains(4))
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
