//! `--learn`: online learning of a head.

use crate::common::distill_workshop::{Workshop, load_f32};
use crate::common::process::{self, Server, foretoken};
use crate::common::tiny::noise;
use crate::common::{
    assert_has, assert_idle, chains, collect, fixed_budget, greedy, read_json, sample, wait_until,
};
use candle_core::{DType, Device};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request};
use foretoken::error::Error;
use foretoken::model::{Head, HeadKind, LoadOptions, ModelSource, load_head};
use foretoken::spec::{CacheScope, DraftContext, DraftModel, LearningDrafter};
use foretoken::train::learn::{LearnOptions, LearnSetup, Learning};
use foretoken::train::{DistillOptions, Method, run};
use prometheus::TextEncoder;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const WEIGHTS: &str = "model.safetensors";

/// A target, and a head that has learned nothing yet.
struct School {
    shop: Workshop,
    options: LearnOptions,
}

impl School {
    fn new() -> Self {
        let shop = Workshop::new();
        let options = DistillOptions {
            method: Method::Eagle3,
            draft_config: None,
            draft_vocab_size: 28,
            taps: vec![0, 1, 2],
            steps: 1,
            learning_rate: 1e-6,
            ..shop.options("head")
        };
        run(&options).unwrap();
        let options = LearnOptions {
            share: 1.0,
            rate: 1e-2,
            ..LearnOptions::new(shop.at("learned"))
        };
        Self { shop, options }
    }

    fn file(&self) -> PathBuf {
        self.options.folder.join(WEIGHTS)
    }

    fn source(&self) -> ModelSource {
        ModelSource::Folder(self.shop.at("head"))
    }

    fn load() -> LoadOptions {
        LoadOptions::of(DType::F32)
    }

    fn open(&self, api_key: Option<&str>) -> Result<Learning, Error> {
        let target = load_f32(&self.shop.at("target"));
        let setup = LearnSetup {
            options: &self.options,
            source: &self.source(),
            load: Self::load(),
            target: &*target,
            api_key,
        };
        setup.open()
    }

    /// A server whose head learns.
    fn start(&self) -> EngineHandle {
        let target = load_f32(&self.shop.at("target"));
        let mut learning = self.open(None).unwrap();
        let head = learning.head.take().unwrap_or_else(|| self.given());
        let (link, learner) = learning.split();
        let drafter = DraftModel::of_head(head, 256, 4, 64).unwrap();
        let drafter = LearningDrafter::new(Box::new(drafter), link);
        let options = fixed_budget(chains(3));
        let engine = engine::spawn(target, Some(Box::new(drafter)), 256, 4, options).unwrap();
        let stats = engine.stats();
        let (running, waiting) = (
            stats.requests_running.clone(),
            stats.requests_waiting.clone(),
        );
        let is_busy = move || running.get() + waiting.get() > 0;
        learner.start(&engine.stats().registry, is_busy).unwrap();
        engine
    }

    /// The head that was given.
    fn given(&self) -> Box<dyn Head> {
        let target = load_f32(&self.shop.at("target"));
        load_head(&self.source(), HeadKind::Eagle3, &Self::load(), &*target).unwrap()
    }

    fn plain(&self) -> EngineHandle {
        let target = load_f32(&self.shop.at("target"));
        engine::spawn(target, None, 256, 4, EngineOptions::default()).unwrap()
    }
}

/// A request of the kind that the tests are about.
fn example(number: u32) -> Request {
    Request {
        draft_context: DraftContext {
            scope: CacheScope(1),
            may_persist: true,
            ..DraftContext::default()
        },
        ..greedy(&[number % 26, number / 26 % 26, 3, 7 * number % 26], 50)
    }
}

/// A metric of the learner.
fn metric(engine: &EngineHandle, name: &str) -> f64 {
    let families = engine.stats().registry.gather();
    let text = TextEncoder::new().encode_to_string(&families).unwrap();
    sample(&text, &format!("foretoken:learn_{name}{{"))
}

/// Waits until the learner has learned what it can from what came: it computes nothing for two seconds.
fn wait_for_learner(engine: &EngineHandle) {
    let (mut seconds, mut same) = (-1.0, 0);
    let started = Instant::now();
    while same < 40 {
        std::thread::sleep(Duration::from_millis(50));
        let now = metric(engine, "seconds_total");
        same = if now > seconds { 0 } else { same + 1 };
        seconds = now;
        assert!(started.elapsed() < Duration::from_secs(120));
    }
}

/// Serves the requests `numbers`; returns their texts and the accepted tokens a round.
fn serve(engine: &EngineHandle, numbers: std::ops::Range<u32>) -> (Vec<Vec<u32>>, f64) {
    let requests = numbers.map(example).collect();
    let answers = engine.submit_all(requests).unwrap().into_iter();
    let (mut texts, mut accepted, mut rounds) = (Vec::new(), 0, 0);
    for answer in answers.map(collect) {
        texts.push(answer.ids());
        accepted += answer.spec.accepted;
        rounds += answer.spec.rounds;
    }
    (texts, accepted as f64 / rounds as f64)
}

/// More tokens are accepted after some requests than before, no text changes, and the next start goes on there.
#[test]
fn a_head_learns_from_what_it_serves_and_keeps_it() {
    let school = School::new();
    let (texts, _) = serve(&school.plain(), 0..64);
    let engine = school.start();
    let (first, before) = serve(&engine, 0..64);
    assert_eq!(first, texts);
    serve(&engine, 64..200);
    wait_until("a switch", || metric(&engine, "switches_total") >= 1.0);
    wait_for_learner(&engine);
    let (again, after) = serve(&engine, 0..64);
    assert_eq!(again, texts);
    println!("{before:.3} accepted tokens a round, then {after:.3}");
    assert!(after > before + 0.15, "{before} {after}");
    assert!(metric(&engine, "steps_total") >= 8.0 && metric(&engine, "examples_total") >= 200.0);
    assert_eq!(metric(&engine, "dropped_examples_total"), 0.0);
    assert_idle(&engine);
    let saved = fs::read(school.file()).unwrap();
    school.end(engine);

    // Nobody asks for more than the file has: an ordinary server drafts with it, too.
    let source = ModelSource::Folder(school.options.folder.clone());
    assert_eq!(HeadKind::of(&source).unwrap(), Some(HeadKind::Eagle3));
    assert!(school.open(None).unwrap().head.is_some());
    let engine = school.start();
    let (texts_then, then) = serve(&engine, 0..64);
    assert_eq!(texts_then, texts);
    assert!(then > before + 0.15, "{before} {then}");
    assert_eq!(fs::read(school.file()).unwrap().len(), saved.len());
}

impl School {
    /// Lets a first server learn, and ends it.
    fn learn_first(&self) {
        let engine = self.start();
        serve(&engine, 0..200);
        wait_until("a switch", || metric(&engine, "switches_total") >= 1.0);
        wait_for_learner(&engine);
        self.end(engine);
    }

    fn end(&self, engine: EngineHandle) {
        engine.abort();
        drop(engine);
        // The learner ends with the drafter.
        wait_until("the folder is free", || self.open(None).is_ok());
    }
}

/// With a learning rate at which nothing can be learnt, the head in use stays.
#[test]
fn a_worse_head_is_never_used() {
    let mut school = School::new();
    school.learn_first();
    let saved = fs::read(school.file()).unwrap();
    school.options.rate = 10.0;
    let (texts, _) = serve(&school.plain(), 0..40);
    let engine = school.start();
    let (first, before) = serve(&engine, 0..40);
    serve(&engine, 40..160);
    wait_until("a comparison", || {
        metric(&engine, "used_accepted_tokens") > 0.0
    });
    wait_for_learner(&engine);
    assert!(metric(&engine, "steps_total") >= 8.0);
    let judged = ["candidate", "used"];
    let judged = judged.map(|head| metric(&engine, &format!("{head}_accepted_tokens")));
    assert!(judged[1] > judged[0] + 0.05, "{judged:?}");
    assert_eq!(metric(&engine, "switches_total"), 0.0);
    assert!(saved == fs::read(school.file()).unwrap());
    let (again, after) = serve(&engine, 0..40);
    assert_eq!((&first, &again), (&texts, &texts));
    assert!((before - after).abs() < 0.05, "{before} {after}");
    assert_eq!(metric(&engine, "ended"), 0.0);
}

/// A head in the folder that proves worse than the one that was given makes way for it.
#[test]
fn the_head_before_comes_back_if_the_one_in_use_proves_worse() {
    let mut school = School::new();
    school.learn_first();
    let mut tensors = candle_core::safetensors::load(school.file(), &Device::Cpu).unwrap();
    let dims = tensors["lm_head.weight"].dims().to_vec();
    tensors.insert("lm_head.weight".into(), noise("ruined", &dims));
    candle_core::safetensors::save(&tensors, school.file()).unwrap();
    // So that nothing else can help.
    school.options.rate = 1e-9;
    let engine = school.start();
    let (texts, ruined) = serve(&engine, 0..120);
    wait_until("a switch", || metric(&engine, "switches_back_total") >= 1.0);
    let (again, after) = serve(&engine, 0..120);
    assert_eq!(texts, again);
    assert!(after > ruined, "{ruined} {after}");
    assert!(!school.file().exists());
}

/// The one line with which a server with these flags refuses to start.
#[track_caller]
fn refusal(flags: &[&str]) -> String {
    let output = foretoken()
        .args(flags)
        .args(["--port", "0"])
        .output()
        .unwrap();
    let said = process::refusal(&output);
    let line = said.lines().find(|line| line.starts_with("error: "));
    line.unwrap_or_else(|| panic!("{said}")).to_owned()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn what_cannot_learn_is_refused_in_one_line() {
    let school = School::new();
    let (target, head) = (school.shop.at("target"), school.shop.at("head"));
    let learned = school.options.folder.clone();
    let learn = [
        "--model",
        path(&target),
        "--device",
        "cpu",
        "--learn",
        path(&learned),
    ];
    let with = |flags: &[&str]| refusal(&[&learn, flags].concat());
    let line = with(&[]);
    assert_has(&line, &["--learn has no effect with --drafter tables"]);
    assert!(line.contains("--drafter eagle3"), "{line}");
    let line = with(&["--speculative-decoding=false"]);
    assert!(line.contains("leave out --learn"), "{line}");
    let line = with(&["--draft-model", path(&target)]);
    assert!(line.contains("--learn trains EAGLE-3 heads"), "{line}");
    let line = with(&[
        "--draft-model",
        path(&head),
        "--api-key",
        "a",
        "--api-key",
        "b",
    ]);
    assert!(line.contains("one --api-key or none, not 2"), "{line}");
    let line = with(&["--draft-model", path(&head), "--learn-share", "0"]);
    assert!(line.contains("--learn-share"), "{line}");
    let line = refusal(&["--model", path(&target), "--learn-share", "0.5"]);
    assert!(line.contains("--learn-share needs --learn"), "{line}");
    let of_bench = ["--draft-model", path(&head), "--random-prompts", "4"];
    let bench = [&["bench"][..], &learn, &of_bench].concat();
    let said = process::refusal(&foretoken().args(bench).output().unwrap());
    assert!(said.contains("--learn belongs to serve"), "{said}");
    assert!(!learned.exists(), "nothing was written");
    // The folder of a head that somebody has trained is not ours.
    let line = refusal(&[
        "--model",
        path(&target),
        "--draft-model",
        path(&head),
        "--learn",
        path(&head),
    ]);
    assert!(line.contains("no learn.json"), "{line}");
}

/// Whatever is in the folder: one line, or a head.
#[test]
fn a_corrupt_folder_is_refused_in_one_line() {
    let school = School::new();
    school.open(None).map(drop).unwrap();
    let folder = &school.options.folder;
    for name in ["config.json", WEIGHTS] {
        fs::copy(school.shop.at("head").join(name), folder.join(name)).unwrap();
    }
    assert!(school.open(None).unwrap().head.is_some());
    let whole = fs::read(school.file()).unwrap();
    let tensors = candle_core::safetensors::load(school.file(), &Device::Cpu).unwrap();
    let with = |change: &dyn Fn(&mut std::collections::HashMap<String, candle_core::Tensor>)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, school.file()).unwrap();
    };
    let refused = |needle: &str| match school.open(None) {
        Err(Error::Setup(line)) => {
            assert_eq!(line.lines().count(), 1, "{line}");
            assert!(line.contains(needle), "{needle}: {line}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("opened, wanted {needle}"),
    };
    fs::write(school.file(), &whole[..whole.len() / 2]).unwrap();
    refused("learned");
    fs::write(school.file(), b"").unwrap();
    refused("learned");
    with(&|t| drop(t.remove("fc.weight")));
    refused("learned");
    with(&|t| drop(t.insert("norm.weight".into(), noise("norm", &[31]))));
    refused("norm.weight");
    with(&|t| {
        let nan = (&t["norm.weight"] * f64::NAN).unwrap();
        t.insert("norm.weight".into(), nan);
    });
    refused("norm.weight");
    with(&|t| {
        let shifted = (&t["d2t"] + &t["d2t"].ones_like().unwrap()).unwrap();
        t.insert("d2t".into(), shifted);
    });
    refused("it predicts other ids");
    fs::write(school.file(), &whole).unwrap();
    let config = folder.join("config.json");
    let mut json = read_json(&config);
    json["eagle_aux_hidden_state_layer_ids"] = json!([0, 1]);
    fs::write(&config, json.to_string()).unwrap();
    refused("fc");
    json["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 2]);
    json["architectures"] = json!(["LlamaForCausalLM"]);
    json["hidden_size"] = json!(16);
    fs::write(&config, json.to_string()).unwrap();
    refused("hidden_size");
    fs::write(&config, "{").unwrap();
    refused("config.json");
}

/// Over HTTP: a salted text is not learned from, others are, and another key needs another folder.
#[test]
fn texts_of_other_keys_and_salts_are_not_learned_from() {
    let school = School::new();
    let (target, head) = (school.shop.at("target"), school.shop.at("head"));
    let flags = format!(
        "--model {} --draft-model {} --device cpu --spec-budget fixed --learn {} --learn-share 1",
        path(&target),
        path(&head),
        path(&school.options.folder)
    );
    let mut server = Server::start(&flags);
    let name = "foretoken:learn_examples_total{";
    let examples = |server: &Server| sample(&server.get("/metrics"), name);
    let ask = |server: &Server, salt: Value| {
        let body = json!({
            "model": path(&target), "prompt": "abcd", "max_tokens": 40, "temperature": 0,
            "ignore_eos": true, "cache_salt": salt
        });
        let answer = server.post("/v1/completions", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    };
    (0..4).for_each(|i| ask(&server, json!(format!("user {i}"))));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(examples(&server), 0.0);
    ask(&server, Value::Null);
    wait_until("an example", || examples(&server) == 1.0);
    assert_eq!(server.stop("TERM", Duration::from_secs(20)), Some(0));
    let words: Vec<&str> = flags.split(' ').collect();
    let line = refusal(&[&words[..], &["--api-key", "other"]].concat());
    assert!(line.contains("another API key"), "{line}");
}
