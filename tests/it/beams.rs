//! Beam search through the HTTP API: the beams of transformers.

use crate::architectures::folder_of_fixtures;
use crate::common::server::{ENDLESS, Server, slow, until};
use crate::common::tiny::open;
use crate::common::{Toy, chains, fixed_budget, read_json};
use foretoken::engine::{self, EngineHandle, EngineOptions};
use foretoken::spec::{Drafter, Tables};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

const PATH: &str = "/v1/completions";

/// An engine of a fixture whose texts end with `eos`; tables draft if it `drafts`.
fn engine_of(name: &str, eos: &Value, drafts: bool) -> EngineHandle {
    let folder = tempfile::tempdir().unwrap();
    let from = folder_of_fixtures().join(name);
    let weights = "model.safetensors";
    fs::copy(from.join(weights), folder.path().join(weights)).unwrap();
    let mut config = read_json(from.join("config.json"));
    config["eos_token_id"] = eos.clone();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let model = open(folder.path()).unwrap();
    let options = fixed_budget(chains(if drafts { 5 } else { 0 }));
    let tables = || Box::new(Tables::new(1 << 20)) as Box<dyn Drafter>;
    engine::spawn(model, drafts.then(tables), 256, 4, options).unwrap()
}

fn ids(choices: &Value) -> Vec<Value> {
    let choices = choices.as_array().unwrap().iter();
    choices.map(|choice| choice["token_ids"].clone()).collect()
}

/// The same texts in the same order as `generate(num_beams=...)`, with their scores: random checkpoints in float32, widths,
/// length penalties, kinds of early stopping, and ids that end a text. scripts/beam-search.py has written them.
#[tokio::test]
async fn beams_are_those_of_transformers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/beams.json");
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let mut ended = 0;
    for (at, case) in cases.iter().enumerate() {
        // Drafts change nothing.
        let engine = engine_of(case["model"].as_str().unwrap(), &case["eos"], at % 2 == 1);
        let server = Server::of(engine).await;
        let body = json!({
            "prompt": case["prompt"], "max_tokens": case["max_tokens"], "use_beam_search": true, "n": case["width"],
            "length_penalty": case["length_penalty"], "early_stopping": case["early_stopping"],
            "return_token_ids": true, "logprobs": 1, "temperature": 0
        });
        let reply = server.json(PATH, &body).await;
        let beams = case["beams"].as_array().unwrap();
        let want: Vec<Value> = beams.iter().map(|beam| beam["ids"].clone()).collect();
        assert_eq!(ids(&reply["choices"]), want, "{body}");
        let penalty = case["length_penalty"].as_f64().unwrap();
        let eos = case["eos"].as_array().unwrap();
        let mut tokens = 0;
        for (choice, beam) in reply["choices"].as_array().unwrap().iter().zip(beams) {
            let scores = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            let sum: f64 = scores.iter().map(|score| score.as_f64().unwrap()).sum();
            let score = sum / (scores.len() as f64).powf(penalty);
            let far = (score - beam["score"].as_f64().unwrap()).abs();
            assert!(far < 1e-3 * score.abs().max(1.0), "{score}: {beam}");
            let text = choice["token_ids"].as_array().unwrap();
            let ends = eos.contains(text.last().unwrap());
            let reason = if ends { "stop" } else { "length" };
            assert_eq!(choice["finish_reason"], reason);
            (ended, tokens) = (ended + usize::from(ends), tokens + text.len());
        }
        assert_eq!(reply["usage"]["completion_tokens"], tokens);
        server.done().await;
    }
    assert!(ended > 10, "{ended}");
}

/// A chat, several prompts, `best_of` beams of which `n` are shown, and the cache that makes a step cheap.
#[tokio::test]
async fn beams_of_chats_and_of_several_prompts() {
    let toy = Toy::default();
    let server = Server::of(toy.start()).await;
    let body = |n: usize, best_of: usize, prompt: Value| {
        json!({"prompt": prompt, "max_tokens": 9, "use_beam_search": true, "n": n, "best_of": best_of,
               "return_token_ids": true})
    };
    let wide = server.json(PATH, &body(4, 4, json!("abc"))).await;
    let best = server.json(PATH, &body(2, 4, json!("abc"))).await;
    assert_eq!(ids(&best["choices"]), ids(&wide["choices"])[..2]);
    let other = server.json(PATH, &body(2, 4, json!("hello"))).await;
    let both = server
        .json(PATH, &body(2, 4, json!(["abc", "hello"])))
        .await;
    let each = [ids(&best["choices"]), ids(&other["choices"])].concat();
    assert_eq!(ids(&both["choices"]), each);

    let cached = |usage: &Value| usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let long = "a long prompt that takes several blocks of the cache ".repeat(2);
    assert_eq!(
        cached(&server.json(PATH, &body(2, 2, json!(long))).await),
        Some(0)
    );
    let hits = || server.engine.stats().prefix_cache_hits.get();
    let before = hits();
    assert!(cached(&server.json(PATH, &body(2, 2, json!(long))).await) > Some(80));
    // Each of the 9 steps of two beams finds the prompt, too.
    assert!(hits() - before > 80 * 15, "{}", hits() - before);

    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "use_beam_search": true, "n": 3});
    let reply = server.json("/v1/chat/completions", &chat).await;
    assert_eq!(reply["choices"].as_array().unwrap().len(), 3);
    let texts: Vec<&Value> = reply["choices"].as_array().unwrap().iter().collect();
    let mut each = texts.iter();
    assert!(each.all(|choice| choice["message"]["content"].is_string()));
    server.done().await;
}

/// Draft tokens that a step accepts save the beams that take them a request.
#[tokio::test]
async fn drafts_are_verified_along_beams() {
    let prompt = [5, 9, 2, 7].repeat(6);
    for width in [1, 3] {
        let mut found = Vec::new();
        for drafts in [false, true] {
            let engine = engine_of("llama", &json!([]), drafts);
            let server = Server::of(engine).await;
            let body = json!({"prompt": prompt, "max_tokens": 60, "use_beam_search": true, "n": width,
                "return_token_ids": true, "logprobs": 1, "temperature": 0});
            let choices = server.json(PATH, &body).await["choices"].clone();
            let stats = server.engine.stats();
            let accepted = stats.spec_accepted_tokens.get();
            assert_eq!(accepted > 0, drafts, "{accepted}");
            found.push((choices, stats.requests.n.get_sample_sum()));
            server.done().await;
        }
        assert_eq!(found[0].0, found[1].0);
        let requests = [found[0].1, found[1].1];
        assert!(requests[1] < 0.9 * requests[0], "{requests:?}");
    }
}

/// A search has drafts of at most the depth that its request allows.
#[tokio::test]
async fn a_search_without_speculation_has_no_drafts() {
    let prompt = [5, 9, 2, 7].repeat(6);
    let body = json!({"prompt": prompt, "max_tokens": 60, "use_beam_search": true, "n": 1,
        "return_token_ids": true, "temperature": 0});
    let mut without = body.clone();
    without["spec_length"] = 0.into();
    let mut found = Vec::new();
    for (body, drafts) in [(body, true), (without, false)] {
        let server = Server::of(engine_of("llama", &json!([]), true)).await;
        found.push(ids(&server.json(PATH, &body).await["choices"]));
        let drafted = server.engine.stats().spec_draft_tokens.get();
        assert_eq!(drafted > 0, drafts, "{drafted}");
        server.done().await;
    }
    assert_eq!(found[0], found[1]);
}

/// One beam is greedy decoding.
#[tokio::test]
async fn one_beam_is_greedy() {
    let server = Server::start().await;
    let mut body =
        json!({"prompt": "abcabc", "max_tokens": 40, "temperature": 0, "return_token_ids": true});
    let greedy = server.json(PATH, &body).await;
    body["use_beam_search"] = true.into();
    let beam = server.json(PATH, &body).await;
    assert_eq!(ids(&beam["choices"]), ids(&greedy["choices"]));
    assert_eq!(beam["choices"][0]["text"], greedy["choices"][0]["text"]);
    server.done().await;
}

/// What does not go along is refused by name.
#[tokio::test]
async fn fields_that_do_not_go_along_are_refused() {
    let server = Server::start().await;
    for (path, field, value) in [
        (PATH, "stream", json!(true)),
        (PATH, "temperature", json!(0.7)),
        (PATH, "top_p", json!(0.9)),
        (PATH, "top_k", json!(5)),
        (PATH, "min_p", json!(0.1)),
        (PATH, "repetition_penalty", json!(1.1)),
        (PATH, "presence_penalty", json!(1)),
        (PATH, "frequency_penalty", json!(1)),
        (PATH, "logit_bias", json!({"3": 1})),
        (PATH, "stop", json!("x")),
        (PATH, "stop_token_ids", json!([3])),
        (PATH, "min_tokens", json!(2)),
        (PATH, "allowed_token_ids", json!([3])),
        (PATH, "bad_words", json!(["x"])),
        (PATH, "acceptance", json!("typical")),
        (PATH, "echo", json!(true)),
        (PATH, "guided_regex", json!("a+")),
        (PATH, "suffix", json!("x")),
        (PATH, "length_penalty", json!(11)),
        (PATH, "early_stopping", json!("always")),
        (PATH, "n", json!(129)),
        (
            "/v1/chat/completions",
            "tools",
            json!([{"type": "function", "function": {"name": "f"}}]),
        ),
        ("/v1/responses", "use_beam_search", json!(true)),
    ] {
        let mut body = json!({"max_tokens": 4, "use_beam_search": true});
        match path {
            PATH => body["prompt"] = "abc".into(),
            "/v1/responses" => body = json!({"input": "abc"}),
            _ => body["messages"] = json!([{"role": "user", "content": "hi"}]),
        }
        body[field] = value;
        let error = server.refused(path, &body).await;
        assert_eq!(error["param"], field, "{error}");
    }
    // Without a search they would mean nothing.
    for (field, value) in [
        ("length_penalty", json!(2)),
        ("early_stopping", json!(true)),
    ] {
        let body = json!({"prompt": "abc", "max_tokens": 2, field: value});
        let error = server.refused(PATH, &body).await;
        assert_eq!(error["param"], field, "{error}");
    }
    let body =
        json!({"prompt": "abc", "max_tokens": 2, "length_penalty": 1, "early_stopping": false});
    server.json(PATH, &body).await;
    // The defaults of other servers' clients go along.
    let body = json!({"prompt": "abc", "max_tokens": 2, "use_beam_search": true, "n": 2, "temperature": 1.0, "top_p": 1,
        "top_k": -1, "stop": [], "seed": 3, "repetition_penalty": 1, "early_stopping": "never", "spec_length": 2});
    server.json(PATH, &body).await;
    server.done().await;
}

/// Who leaves cancels the search.
#[tokio::test]
async fn a_client_that_leaves_ends_the_search() {
    let server = Server::of(slow(EngineOptions::default(), None)).await;
    let stats = server.engine.stats().clone();
    let tokens = || stats.generation_tokens.get();
    let left = || stats.requests_finished.with_label_values(&["abort"]).get();
    let many = ENDLESS / 2;
    let body = json!({"prompt": "abc", "max_tokens": many, "use_beam_search": true, "n": 16});
    let request = server.client.post(server.url.clone() + PATH).json(&body);
    let request = tokio::spawn(request.send());
    until("it has begun", || tokens() > 0).await;
    request.abort();
    // Between two steps of a search the engine is idle.
    until("it is cancelled", || left() > 0).await;
    // No more requests come.
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.idle().await;
    let before = tokens();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(tokens(), before);
    assert!(before < 16 * many as u64, "{before}");
    server.done().await;
}

/// A search that has begun is finished by a server that shuts down.
#[tokio::test]
async fn a_search_is_finished_while_the_server_shuts_down() {
    let server = Server::of(slow(EngineOptions::default(), None)).await;
    let stats = server.engine.stats().clone();
    let body = json!({"prompt": "abc", "max_tokens": 30, "use_beam_search": true, "n": 2});
    let request = server.client.post(server.url.clone() + PATH).json(&body);
    let request = tokio::spawn(request.send());
    until("it has begun", || stats.generation_tokens.get() > 0).await;
    server.stop().await.unwrap();
    let reply = request.await.unwrap().unwrap();
    assert_eq!(reply.status(), 200);
    let reply: Value = reply.json().await.unwrap();
    assert_eq!(reply["choices"].as_array().unwrap().len(), 2);
}
