//! A model that writes code and calls tools: Qwen2.5-Coder 0.5B, against llama.cpp on the same file.

use crate::common::llama::{self, Agreement};
use foretoken::model::{LoadOptions, ModelSource, load};
use std::io::{Write, stderr};
use std::path::Path;

/// Both compute with eight bits, but round at different places. So the texts part where two tokens are about as
/// likely; after llama.cpp's own text, ours is the same token nearly always.
#[test]
fn greedy_texts_are_llama_cpps_for_most_of_their_length() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("models/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf");
    if !file.exists() {
        // It has 491 MB, which no other test needs. Not by a macro, whose output a passing test does not show.
        let name = file.display();
        let note = "not run here: tests/it/qwen.rs, as there is no";
        writeln!(stderr(), "{note} {name}; scripts/fetch-qwen.sh").unwrap();
        return;
    }
    let mut model = load(&ModelSource::Gguf(file.into()), &LoadOptions::default()).unwrap();
    let texts = llama::theirs(include_str!("../data/qwen-greedy.jsonl"));
    let Agreement {
        mean,
        same,
        tokens,
        widest,
    } = Agreement::of(&mut *model, &texts);
    assert!(mean > 0.4, "{mean}");
    assert!(same as f64 > 0.96 * tokens as f64, "{same} of {tokens}");
    assert!(widest < 0.6, "{widest}");
}
