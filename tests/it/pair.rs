//! A pair from nothing, through the commands of `scripts/make-default-model.sh`, in seconds: a
//! tokenizer, a target, its own texts, a draft, and both at work.

use crate::common::process::{foretoken, stdout_of};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

struct Work(tempfile::TempDir);

impl Work {
    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `foretoken LINE`, where `@name` is a file of this folder; what it said.
    #[track_caller]
    fn run(&self, line: &str) -> String {
        let folder = self.0.path().display().to_string();
        let line = line.replace('@', &format!("{folder}/"));
        let output = foretoken()
            .args(line.split_whitespace())
            .env("CANDLE_NUM_THREADS", "1")
            .output()
            .unwrap();
        stdout_of(&output)
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(self.at(name)).unwrap()).unwrap()
    }
}

fn shape(file: &Path, vocab: usize, said: Option<usize>, hidden: usize, layers: usize) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": vocab, "draft_vocab_size": said, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "intermediate_size": 2 * hidden, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true
    });
    fs::write(file, config.to_string()).unwrap();
}

/// Sentences in which much follows from what was before.
fn texts() -> Vec<(String, String)> {
    let animals = ["fox", "owl", "bear", "mouse", "frog", "goat"];
    let places = ["forest", "garden", "river", "village", "mountain"];
    let things = ["key", "book", "lamp", "letter"];
    let mut texts = Vec::new();
    for animal in animals {
        for place in places {
            for thing in things {
                texts.push((
                    format!("Tell me about the {animal} in the {place}."),
                    format!(
                        "Once upon a time a little {animal} lived in the {place}. One day the {animal} found a {thing} there. The {animal} took the {thing} home and was happy."
                    ),
                ));
            }
        }
    }
    texts
}

#[test]
fn a_pair_from_nothing() {
    let work = Work(tempfile::tempdir().unwrap());
    let texts = texts();
    let lines: Vec<String> = texts
        .iter()
        .map(|(prompt, text)| {
            json!({"prompt": prompt, "prompt_ids": [], "text": text, "ids": [], "finish_reason": "stop"})
                .to_string()
        })
        .collect();
    fs::write(work.at("corpus.jsonl"), lines.join("\n")).unwrap();
    let prompts: Vec<String> = texts
        .iter()
        .step_by(2)
        .map(|(prompt, _)| json!({"prompt": prompt}).to_string())
        .collect();
    fs::write(work.at("prompts.jsonl"), prompts.join("\n")).unwrap();

    let said = work.run("tokenizer --corpus @corpus.jsonl --vocab-size 320 --out @tokenizer");
    assert!(said.contains("320 ids"), "{said}");

    shape(&work.at("target.json"), 320, None, 64, 2);
    work.run(
        "distill --objective ce --model @tokenizer --draft-config @target.json \
         --corpus @corpus.jsonl --retokenize --seq-len 64 --batch-size 8 --steps 120 \
         --learning-rate 1e-2 --out @target",
    );
    let report = work.json("target/report.json");
    let loss = |report: &Value, of: &str| report[of]["loss"].as_f64().unwrap();
    assert!(
        loss(&report, "trained") < 0.3 * loss(&report, "untrained"),
        "{report}"
    );
    work.run("convert --model @target --type q8_0 --out @target.gguf");

    work.run(
        "generate --model @target.gguf --prompts @prompts.jsonl --out @own.jsonl --max-tokens 80",
    );
    shape(&work.at("draft.json"), 320, Some(192), 32, 1);
    work.run(
        "distill --model @target.gguf --draft-config @draft.json --corpus @own.jsonl \
         --seq-len 64 --batch-size 8 --steps 120 --learning-rate 1e-2 --out @draft",
    );
    let report = work.json("draft/report.json");
    assert!(
        loss(&report, "trained") < 0.5 * loss(&report, "untrained"),
        "{report}"
    );
    for (figure, gain) in [("/agreement", 0.3), ("/overlap/0", 0.3)] {
        let of = |which: &str| report.pointer(&format!("/{which}{figure}")).unwrap();
        let (before, after) = (of("untrained").as_f64(), of("trained").as_f64());
        assert!(after.unwrap() > before.unwrap() + gain, "{report}");
    }
    work.run("convert --model @draft --type q8_0 --out @draft.gguf");

    // Which fails where a greedy text is another with the draft.
    work.run(
        "bench --model @target.gguf --draft-model @draft.gguf \
         --spec-budget fixed --spec-length 3 --prompts @prompts.jsonl --limit-per-category 12 --max-tokens 60 \
         --json @bench.json",
    );
    let bench = work.json("bench.json");
    for at in 0..2 {
        let alpha = bench["temperatures"][at]["overall"]["alpha"].as_f64();
        assert!(alpha.is_some_and(|alpha| alpha > 0.3), "{bench}");
    }
}
