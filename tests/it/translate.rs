//! A draft model with another tokenizer, as a user runs it.

use crate::common::process::Server;
use crate::common::rig::smollm2_path;
use serde_json::{Value, json};
use std::path::Path;

/// Prose, and characters that take several tokens.
const PROMPTS: [&str; 4] = [
    "Write a short story about a curious rabbit in the garden who loses a toy.",
    "Explain why the sky is blue to a child.",
    "Repeat: naïve café 🦊🐇 世界 Привет, then write `a  b\tc\n\n\td`.",
    "What does a bear eat?",
];

fn file(name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/default");
    file.join(name).display().to_string()
}

/// Serves with `flags`; the log of the start, and the share of draft tokens that were accepted at
/// temperature 0 and 1. Fails if a draft changed a text.
pub fn serve(flags: &str) -> (String, [f64; 2]) {
    let log = tempfile::NamedTempFile::new().unwrap();
    // Fixed drafts do not depend on how fast this machine is.
    let flags = format!(
        "{flags} --served-model-name pair --spec-length 4 --spec-topk 1 --spec-budget fixed --num-blocks 128"
    );
    let server = Server::start_logging(&flags, "foretoken=info", log.reopen().unwrap());
    let ask = |prompt: &str, temperature: usize, spec_length: Option<usize>, mut body: Value| {
        body["model"] = "pair".into();
        body["temperature"] = temperature.into();
        body["seed"] = 7.into();
        body["messages"] = json!([{"role": "user", "content": prompt}]);
        if let Some(length) = spec_length {
            body["spec_length"] = length.into();
        }
        server.json("/v1/chat/completions", &body)
    };
    // Of the model's own draft tokens: tables draft, too.
    let count = |what: &str| -> f64 {
        let name = format!("foretoken:spec_decode_num_{what}_tokens_by_source_total{{");
        let metrics = server.get("/metrics");
        let mut lines = metrics.lines();
        let line = lines.find(|line| line.starts_with(&name) && line.contains("source=\"model\""));
        let number = line.and_then(|line| line.split_whitespace().last()?.parse().ok());
        // A counter appears when it first counts.
        number.unwrap_or(0.0)
    };
    let rates = [0, 1].map(|temperature| {
        let before = ["accepted", "draft"].map(count);
        for prompt in PROMPTS {
            let free = || json!({"max_tokens": 60});
            let fast = ask(prompt, temperature, None, free());
            let plain = ask(prompt, temperature, Some(0), free());
            assert_eq!(fast["choices"], plain["choices"], "{prompt}");
        }
        let [accepted, drafted] = ["accepted", "draft"].map(count);
        (accepted - before[0]) / (drafted - before[1])
    });
    let schema = json!({
        "type": "object",
        "properties": {"hero": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["hero", "age"],
    });
    for temperature in [0, 1] {
        let [fast, plain] = [None, Some(0)].map(|spec_length| {
            let body = json!({"guided_json": schema, "max_tokens": 60});
            ask(PROMPTS[0], temperature, spec_length, body)
        });
        let text = fast["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(text.starts_with("{\"hero\": \""), "{text}");
        assert_eq!(fast["choices"], plain["choices"]);
    }
    let log = std::fs::read_to_string(log.path()).unwrap();
    println!("{log}\n{rates:?}");
    (log, rates)
}

#[test]
fn the_demonstration_draft_drafts_for_smollm2() {
    let (model, draft) = (smollm2_path(), file("foretoken-demo-draft.Q8_0.gguf"));
    let (log, rates) = serve(&format!(
        "--model {} --draft-model {draft}",
        model.display()
    ));
    let line = log.lines().find(|line| line.contains("another tokenizer"));
    assert!(
        line.is_some_and(|line| line.contains("3652 of its 4096 tokens (89%)")),
        "{log}"
    );
    assert!(rates[0] > 0.1 && rates[1] > 0.05, "{rates:?}");
}

/// A larger model as the draft of a smaller one is of no use, except that its vocabulary is the larger.
#[test]
fn smollm2_drafts_for_the_demonstration_target() {
    let (model, draft) = (file("foretoken-demo.Q5_1.gguf"), smollm2_path());
    let (log, rates) = serve(&format!(
        "--model {model} --draft-model {}",
        draft.display()
    ));
    assert!(log.contains("3652 of its 49152 tokens (7%)"), "{log}");
    assert!(rates[0] > 0.1 && rates[1] > 0.05, "{rates:?}");
}
