//! `foretoken generate`: a corpus that is continued.

use crate::common::server::{EOS, text_with};
use crate::common::{Toy, assert_has, assert_idle};
use foretoken::generate::{self, GenerateOptions};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The lines of a corpus, in an order of their own.
fn lines(out: &Path) -> Vec<Value> {
    let text = fs::read_to_string(out).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    lines.sort_by_key(Value::to_string);
    lines
}

#[test]
fn prompts_with_one_id_have_texts_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let toy = Toy {
        eos: vec![EOS],
        ..Toy::default()
    };
    let (engine, text, out) = (toy.start(), text_with(None), at("out.jsonl"));
    let run = |prompts: &str| {
        fs::write(at("prompts.jsonl"), prompts).unwrap();
        let options = GenerateOptions {
            prompts: Some(at("prompts.jsonl")),
            input_file: None,
            out: out.clone(),
            samples: 2,
            limit_per_category: None,
            max_tokens: 12,
            temperature: 1.0,
            top_p: 1.0,
            seed: 3,
            concurrency: 4,
        };
        generate::run(&engine, &text, &options)
    };
    let prompts = "{\"id\": 1, \"prompt\": \"abc\"}\n{\"id\": 1, \"prompt\": \"xyz\"}\n";
    run(prompts).unwrap();
    let whole = lines(&out);
    assert_eq!(whole.len(), 4);
    // It was interrupted after a line.
    let written = fs::read_to_string(&out).unwrap();
    let (first, _) = written.split_once('\n').unwrap();
    fs::write(&out, format!("{first}\n")).unwrap();
    run(prompts).unwrap();
    assert_eq!(lines(&out), whole);
    run(prompts).unwrap();
    assert_eq!(lines(&out), whole);

    // Another prompt has come in place of the second one.
    run(&prompts.replace("xyz", "xy")).unwrap();
    let all = lines(&out);
    let new = all.iter().filter(|line| line["prompt"] == "xy").count();
    assert_eq!((all.len(), new), (6, 2));

    let error = run(&prompts.replace("xyz", "abc")).unwrap_err().to_string();
    assert_has(&error, &["two lines have the id \"1\" and the same prompt"]);
    assert_eq!(lines(&out), all);
    assert_idle(&engine);
}
