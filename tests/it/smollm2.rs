//! The engine on a real model: SmolLM2-135M, drafted by itself, by n-grams and by nonsense.

use crate::common::rig::{prompt as noise, smollm2, smollm2_path};
use crate::common::{
    PROMPT_WAIT, assert_idle, chains, collect, fixed_budget, greedy, run, sampled, tree_limits,
};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request};
use foretoken::model::toy::ToyModel;
use foretoken::model::{Head, HeadKind, LoadOptions, ModelSource, load_head};
use foretoken::spec::{BudgetMode, Cascade, DraftModel, Drafter, NgramDrafter, Tables};
use foretoken::text::Text;

const BLOCKS: usize = 512;
const BLOCK_SIZE: usize = 16;

/// The EAGLE-3 head that is shipped for it.
fn head() -> Box<dyn Head> {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/heads/smollm2-135m-eagle3.Q4_1.gguf"
    );
    let source = ModelSource::Gguf(file.into());
    assert_eq!(HeadKind::of(&source).unwrap(), Some(HeadKind::Eagle3));
    load_head(
        &source,
        HeadKind::Eagle3,
        &LoadOptions::default(),
        &*smollm2(),
    )
    .unwrap()
}

/// Drafters by name: right always, right sometimes, right never.
fn drafter(name: &str) -> Option<Box<dyn Drafter>> {
    let draft_model = |model| DraftModel::new(model, BLOCKS, BLOCK_SIZE, 256).unwrap();
    match name {
        "itself" => Some(Box::new(draft_model(smollm2()))),
        "ngram" => Some(Box::new(NgramDrafter::new(1, 3))),
        "tables" => Some(Box::new(Tables::new(1 << 20))),
        "own layers" => {
            let layers: Vec<usize> = (0..10).chain(24..30).collect();
            let own = draft_model(smollm2().subset(&layers).unwrap());
            Some(Box::new(Cascade::new(Box::new(own), Tables::new(1 << 20))))
        }
        "head" => {
            let head = DraftModel::of_head(head(), BLOCKS, BLOCK_SIZE, 256).unwrap();
            Some(Box::new(Cascade::new(Box::new(head), Tables::new(1 << 20))))
        }
        "nonsense" => Some(Box::new(draft_model(Box::new(ToyModel::new(
            49_152, 8192, 1, 0.0,
        ))))),
        _ => None,
    }
}

fn start(name: &str, spec_length: usize) -> EngineHandle {
    let options = EngineOptions {
        max_num_seqs: 16,
        max_num_batched_tokens: 256,
        ..fixed_budget(chains(spec_length))
    };
    engine::spawn(smollm2(), drafter(name), BLOCKS, BLOCK_SIZE, options).unwrap()
}

/// Eight short tasks, in the model's own template.
fn prompts() -> Vec<Vec<u32>> {
    let text = Text::from_gguf(smollm2_path()).unwrap();
    let tasks = [
        "What is the capital of France?",
        "Count from one to ten.",
        "Repeat after me: red green blue red green blue red green blue",
        "Write a haiku about the sea.",
        "Translate to French: the cat sits on the table, the dog sits on the chair.",
        "def fibonacci(n):",
        "List three fruits and say why each is healthy.",
        "Summarize: The quick brown fox jumps over the lazy dog. The lazy dog sleeps.",
    ];
    let ids = |task: &str| {
        let message = serde_json::json!({"role": "user", "content": task});
        let rendered = text
            .render_chat(&[message], true, &Default::default())
            .unwrap();
        text.encode(&rendered, false).unwrap()
    };
    tasks.map(ids).to_vec()
}

fn texts(engine: &EngineHandle, requests: Vec<Request>) -> Vec<Vec<u32>> {
    let receivers = engine.submit_all(requests).unwrap();
    receivers.into_iter().map(|r| collect(r).ids()).collect()
}

/// Promise 1 on real logits: the greedy text is the same with every drafter, alone and among 16.
#[test]
fn greedy_parity_alone_and_sixteen_at_once() {
    const TOKENS: usize = 24;
    let prompts = prompts();
    let plain = start("nothing", 0);
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| run(&plain, greedy(prompt, TOKENS)).ids())
        .collect();
    assert_idle(&plain);
    let mut by_head = 0;
    for name in ["itself", "ngram", "head", "nonsense"] {
        let engine = start(name, 4);
        for (prompt, want) in prompts.iter().zip(&alone) {
            let answer = run(&engine, greedy(prompt, TOKENS));
            assert_eq!(&answer.ids(), want, "{name}");
            match name {
                "itself" => assert_eq!(answer.spec.alpha(), 1.0, "it agrees with itself"),
                "nonsense" => assert_eq!(answer.spec.accepted, 0),
                "head" => by_head += answer.spec.accepted,
                _ => {}
            }
        }
        let twice = prompts.iter().chain(&prompts);
        let at_once = texts(&engine, twice.map(|p| greedy(p, TOKENS)).collect());
        for (i, text) in at_once.iter().enumerate() {
            assert_eq!(
                text,
                &alone[i % prompts.len()],
                "{name}, 16 at once, prompt {i}"
            );
        }
        assert_idle(&engine);
    }
    // A quarter of the texts' tokens, and more.
    assert!(by_head > TOKENS * prompts.len() / 4, "{by_head}");
}

/// Promise 3 on real logits: a seed gives the same text alone and in company, with penalties and
/// truncation; and a draft that is the target itself is accepted always.
#[test]
fn seeded_text_is_the_same_in_company() {
    let engine = start("itself", 4);
    let prompts = prompts();
    let request = |i: usize| {
        let mut request = sampled(&prompts[i], 24, 7 + i as u64);
        request.params.top_p = 0.9;
        request.params.top_k = 50;
        request.params.repetition_penalty = 1.1;
        request
    };
    let alone: Vec<Vec<u32>> = (0..4)
        .map(|i| {
            let answer = run(&engine, request(i));
            assert_eq!(answer.spec.accepted, answer.spec.tested);
            answer.ids()
        })
        .collect();
    let mut requests: Vec<Request> = (0..4).map(request).collect();
    requests.extend((0..8).map(|i| greedy(&noise(20 + 9 * i, i as u32), 24)));
    let together = texts(&engine, requests);
    assert_eq!(together[..4], alone);
    assert_idle(&engine);
}

/// Under the coupled rule a seeded text is a function of the request: it is the same for every drafter,
/// with chains and trees, with a fixed draft size and with the budget's, alone and among 32 others.
#[test]
fn seeded_text_is_the_same_with_every_drafter() {
    const TOKENS: usize = 24;
    let prompts = prompts();
    let request = |i: usize| sampled(&prompts[i], TOKENS, 100 + i as u64);
    let plain = start("nothing", 0);
    let want: Vec<_> = (0..3).map(|i| run(&plain, request(i)).ids()).collect();
    let mut accepted = 0;
    for (name, nodes, topk, spec_budget) in [
        ("tables", 15, 4, BudgetMode::Fixed),
        ("tables", 15, 4, BudgetMode::Adaptive),
        ("own layers", 5, 1, BudgetMode::Fixed),
        ("own layers", 12, 3, BudgetMode::Fixed),
        ("head", 4, 1, BudgetMode::Adaptive),
        ("head", 12, 3, BudgetMode::Fixed),
        ("nonsense", 6, 2, BudgetMode::Fixed),
    ] {
        let options = EngineOptions {
            max_num_seqs: 33,
            spec: tree_limits(5, nodes, topk),
            spec_budget,
            ..EngineOptions::default()
        };
        let engine = engine::spawn(smollm2(), drafter(name), BLOCKS, BLOCK_SIZE, options).unwrap();
        for (i, want) in want.iter().enumerate() {
            for spec_length in [Some(0), Some(1), None] {
                let request = Request {
                    spec_length,
                    ..request(i)
                };
                let answer = run(&engine, request);
                let what = format!("{name}, {nodes}, {topk}, {spec_length:?}");
                assert_eq!(&answer.ids(), want, "{what}");
                accepted += answer.spec.accepted;
            }
        }
        let mut crowd: Vec<Request> = (0..3).map(request).collect();
        crowd.extend((0..32).map(|i| sampled(&noise(5 + i % 7, i as u32), 12, i as u64)));
        assert_eq!(texts(&engine, crowd)[..3], want, "{name}, {nodes}, {topk}");
        assert_idle(&engine);
    }
    assert!(accepted > 50, "only {accepted} draft tokens were accepted");
}

/// What the issue asks to be shown: 64 concurrent streams of mixed prompts finish, each text is
/// what it is alone, and both pools are empty at the end. The pool is too small for all of them.
#[test]
fn sixty_four_streams_say_what_each_says_alone() {
    let options = EngineOptions {
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        spec: chains(3),
        spec_budget: BudgetMode::Fixed,
        // Prompts are read at once on a slow machine, too, so that all texts grow together.
        max_prompt_wait: PROMPT_WAIT,
        ..EngineOptions::default()
    };
    // Small blocks, so that texts grow by many and the pool runs out in mid-text: the 16 different texts do
    // not fit, of which requests with the same prompt share all.
    let engine = engine::spawn(smollm2(), drafter("ngram"), 180, 4, options).unwrap();
    let mut prompts = prompts();
    prompts.extend((0..8).map(|i| noise(5 + 11 * i, i as u32)));
    let requests: Vec<Request> = (0..64)
        .map(|i| greedy(&prompts[i * 5 % 16], 30 + i % 20))
        .collect();
    let together = texts(&engine, requests);
    assert_idle(&engine);
    assert!(
        engine.stats().preemptions.get() > 0,
        "the pool was roomy: this tests nothing"
    );
    // A shorter greedy text is the start of a longer one.
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| Request {
            spec_length: Some(0),
            ..greedy(prompt, 50)
        })
        .map(|request| run(&engine, request).ids())
        .collect();
    for (i, text) in together.iter().enumerate() {
        let alone = &alone[i * 5 % 16];
        let len = alone.len().min(30 + i % 20);
        assert_eq!(text, &alone[..len], "request {i}");
    }
    assert_idle(&engine);
}
