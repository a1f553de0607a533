//! The embedded pair: what `foretoken` without arguments serves.

use crate::common::process::{Server, json_of};
use crate::common::{assert_idle, chains, fixed_budget, greedy, run, sampled};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request};
use foretoken::gguf::EMBEDDED;
use foretoken::model::LoadedModel;
use foretoken::model::{LoadOptions, ModelSource, load};
use foretoken::spec::{DraftModel, Drafter};
use foretoken::text::{self, Text};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const BLOCKS: usize = 256;
const BLOCK_SIZE: usize = 16;

/// None of them is among the prompts that the pair was trained on.
const PROMPTS: [&str; 6] = [
    "Explain why the sky is blue to a child.",
    "Write a short story about a curious rabbit in the garden who loses a toy.",
    "What is the best way to say sorry?",
    "How can I grow tomatoes?",
    "Write a short story about a lonely owl in the snow who waits for the rain.",
    "What does a bear eat?",
];

fn source(name: &str) -> ModelSource {
    ModelSource::resolve(name, None, Default::default()).unwrap()
}

fn model(name: &str) -> Box<dyn LoadedModel> {
    load(&source(name), &LoadOptions::default()).unwrap()
}

fn text(name: &str) -> Text {
    let ModelSource::Gguf(gguf) = source(name) else {
        panic!("{name} is a GGUF file");
    };
    Text::from_gguf(gguf).unwrap()
}

fn start(spec_length: usize) -> EngineHandle {
    let [target, draft] = EMBEDDED else {
        panic!("there are two");
    };
    let drafter = (spec_length > 0).then(|| {
        let model = DraftModel::new(model(draft.name), BLOCKS, BLOCK_SIZE, 256).unwrap();
        Box::new(model) as Box<dyn Drafter>
    });
    let options = EngineOptions {
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        ..fixed_budget(chains(spec_length))
    };
    engine::spawn(model(target.name), drafter, BLOCKS, BLOCK_SIZE, options).unwrap()
}

#[test]
fn the_draft_is_good_and_changes_no_greedy_text() {
    let text = text(EMBEDDED[0].name);
    text::check_same_tokens(&text, &self::text(EMBEDDED[1].name)).unwrap();
    let (plain, fast) = (start(0), start(2));
    let mut counts = [[0; 2]; 2];
    let mut count = |at: usize, request: Request| {
        let answer = run(&fast, request);
        counts[at][0] += answer.spec.accepted;
        counts[at][1] += answer.spec.tested;
        answer.ids()
    };
    for (i, prompt) in PROMPTS.iter().enumerate() {
        let ids = foretoken::prompts::encode(&text, prompt).unwrap();
        let said = count(0, greedy(&ids, 80));
        assert_eq!(said, run(&plain, greedy(&ids, 80)).ids(), "{prompt}");
        println!("{prompt}\n  {}", text.decode(&said, true));
        count(1, sampled(&ids, 80, i as u64));
    }
    let alpha =
        counts.map(|[accepted, tested]| f64::from(accepted as u32) / f64::from(tested as u32));
    println!("alpha {alpha:?}");
    // Measured over many more prompts they are higher (models/default/README.md).
    assert!(alpha[0] > 0.5 && alpha[1] > 0.4, "{alpha:?}");
    assert_idle(&plain);
    assert_idle(&fast);
}

#[test]
fn it_is_served_without_arguments() {
    let server = Server::start("");
    let name = EMBEDDED[0].name;
    assert!(
        server.said[0].contains(name) && server.said[0].contains("demonstration"),
        "{:?}",
        server.said
    );
    let models = json_of(&server.get("/v1/models"));
    assert_eq!(models["data"][0]["id"], name);

    let ask = |spec_length: Option<usize>| {
        let mut body = json!({
            "model": name, "max_tokens": 100, "temperature": 0,
            "messages": [{"role": "user", "content": PROMPTS[0]}],
        });
        if let Some(k) = spec_length {
            body["spec_length"] = k.into();
        }
        let answer = server.json("/v1/chat/completions", &body);
        answer["choices"][0].clone()
    };
    let (fast, plain) = (ask(None), ask(Some(0)));
    assert_eq!(fast, plain);
    let said = fast["message"]["content"].as_str().unwrap();
    assert!(said.split_whitespace().count() > 10, "{said}");
    // The draft was at work; on a busy machine it may not pay for a while.
    let accepted = || -> f64 {
        let metrics = server.get("/metrics");
        (metrics.lines())
            .find_map(|line| line.strip_prefix("foretoken:spec_decode_num_accepted_tokens_total"))
            .and_then(|rest| rest.split_whitespace().last()?.parse().ok())
            .expect("a counter of accepted tokens")
    };
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if accepted() > 0.0 {
            return;
        }
        assert_eq!(ask(None), plain);
    }
    panic!("no draft token was accepted");
}

/// The pair was taught no tools; where it must call one, it calls it as its schema says.
#[test]
fn it_calls_a_tool_where_it_must() {
    let server = Server::start("");
    let parameters = json!({
        "type": "object",
        "properties": {
            "animal": {"enum": ["owl", "rabbit", "bear"]},
            "words": {"type": "integer", "minimum": 10, "maximum": 99},
            "title": {"type": "string", "maxLength": 20},
        },
        "required": ["animal", "words", "title"],
    });
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": "story"}}),
    ] {
        let ask = |spec_length: usize| -> Value {
            let body = json!({
                "max_tokens": 200, "temperature": 0, "spec_length": spec_length, "tool_choice": choice,
                "messages": [{"role": "user", "content": PROMPTS[1]}],
                "tools": [{"type": "function", "function": {"name": "story", "parameters": parameters}}],
            });
            let reply = server.json("/v1/chat/completions", &body);
            reply["choices"][0]["message"]["tool_calls"].clone()
        };
        let (fast, plain) = (ask(8), ask(0));
        assert_eq!(fast.as_array().map(Vec::len), Some(1), "{fast}");
        assert_eq!(fast[0]["function"], plain[0]["function"]);
        assert_eq!(fast[0]["function"]["name"], "story");
        let arguments = fast[0]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!(["owl", "rabbit", "bear"].contains(&arguments["animal"].as_str().unwrap()));
        assert!(
            (10..=99).contains(&arguments["words"].as_u64().unwrap()),
            "{arguments}"
        );
        assert!(arguments["title"].as_str().unwrap().chars().count() <= 20);
        assert_eq!(arguments.as_object().unwrap().len(), 3);
    }
}
