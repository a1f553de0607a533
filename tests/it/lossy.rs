//! Lossy acceptance, through the HTTP API: only requests that name it get it, and it is labelled.

use crate::common::server::{Server, joined};
use crate::common::{Guess, Toy};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

async fn server() -> Server {
    let toy = Toy::guessing(Guess::Toy(0.6));
    Server::of(toy.start()).await
}

fn body(temperature: f64) -> Value {
    json!({"prompt": "abc", "max_tokens": 200, "temperature": temperature, "seed": 5, "ignore_eos": true})
}

fn with(mut body: Value, fields: &[(&str, Value)]) -> Value {
    for (name, value) in fields {
        body[name] = value.clone();
    }
    body
}

async fn counted(server: &Server, rule: &str) -> u64 {
    server.idle().await;
    let metrics = server.get("/metrics").await.text().await.unwrap();
    let name = "foretoken:spec_decode_num_lossy_tokens_total";
    let label = format!("rule=\"{rule}\"");
    let line = (metrics.lines()).find(|line| line.starts_with(name) && line.contains(&label));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

/// More draft tokens stand, usage, rounds and metrics say how many, and the next ordinary request is exact again.
#[tokio::test]
async fn lossy_rules_accept_more_and_are_labelled() {
    let server = server().await;
    for (rule, parameter, extreme, temperature) in [
        ("lenient", "lenience", 1e-6, 0.0),
        ("lenient", "lenience", 1e-6, 1.0),
        ("typical", "posterior_threshold", 0.0, 1.0),
    ] {
        let exact = server.json(PATH, &body(temperature)).await;
        let label = &exact["usage"]["speculative_decoding"]["lossy_acceptance"];
        assert!(label.is_null());
        let before = counted(&server, rule).await;
        let lossy = with(
            body(temperature),
            &[("acceptance", json!(rule)), (parameter, json!(extreme))],
        );
        let reply = server.json(PATH, &lossy).await;
        let usage = &reply["usage"]["speculative_decoding"];
        assert_eq!(usage["lossy_acceptance"], rule);
        let lossy_tokens = usage["num_lossy_tokens"].as_u64().unwrap();
        assert!(lossy_tokens > 10, "{rule}: {usage}");
        assert!(Some(lossy_tokens) <= usage["num_accepted_tokens"].as_u64());
        // Every draft is accepted as a whole.
        assert!(usage["acceptance_rate"].as_f64() > Some(0.95), "{usage}");
        assert_ne!(reply["choices"], exact["choices"]);
        // What came after the end of the text counts there, too.
        let after = counted(&server, rule).await;
        assert!(after - before >= lossy_tokens, "{before}, {after}");
        let again = server.json(PATH, &body(temperature)).await;
        assert_eq!(again["choices"], exact["choices"], "{rule}");
    }
    server.done().await;
}

/// With parameters that let nothing more stand, the text is the exact one: typical acceptance at temperature 0, and
/// a lenience of 1.
#[tokio::test]
async fn rules_that_let_nothing_stand_change_nothing() {
    let server = server().await;
    for (rule, temperature) in [("typical", 0.0), ("lenient", 0.0), ("lenient", 1.0)] {
        let exact = server.json(PATH, &body(temperature)).await;
        let mut asked = with(body(temperature), &[("acceptance", json!(rule))]);
        if rule == "lenient" {
            asked["lenience"] = 1.into();
        }
        let reply = server.json(PATH, &asked).await;
        assert_eq!(reply["choices"], exact["choices"], "{rule}, {temperature}");
        let usage = &reply["usage"]["speculative_decoding"];
        assert_eq!(usage["num_lossy_tokens"], 0);
    }
    server.done().await;
}

/// Rounds say which of their tokens are not the model's own; log-probabilities are those of the tokens that came.
#[tokio::test]
async fn rounds_say_which_tokens_are_not_the_models_own() {
    let server = server().await;
    let fields = [
        ("acceptance", json!("lenient")),
        ("lenience", json!(0.1)),
        ("logprobs", json!(0)),
        (
            "stream_options",
            json!({"include_speculation": true, "include_usage": true}),
        ),
    ];
    let chunks = server.stream(PATH, with(body(1.0), &fields)).await;
    let rounds = chunks.iter().filter_map(|chunk| {
        let rounds = chunk["choices"].get(0)?.get("speculation")?;
        rounds.as_array()
    });
    let tokens: Vec<&Value> = (rounds.flatten())
        .flat_map(|round| round["tokens"].as_array().unwrap())
        .collect();
    let lossy = tokens.iter().filter(|token| token["lossy"] == true);
    let lossy: Vec<_> = lossy.collect();
    assert!(lossy.iter().all(|token| token["source"] == "model"));
    let usage = &chunks.last().unwrap()["usage"]["speculative_decoding"];
    assert_eq!(usage["num_lossy_tokens"], lossy.len(), "{usage}");
    assert!(!lossy.is_empty() && lossy.len() < tokens.len());
    server.done().await;
}

/// A grammar holds under the laxest rule.
#[tokio::test]
async fn lossy_texts_follow_their_grammar() {
    let server = server().await;
    let mut lossy_tokens = 0;
    for (rule, parameter) in [("lenient", "lenience"), ("typical", "posterior_alpha")] {
        for seed in 0..20 {
            let fields = [
                ("acceptance", json!(rule)),
                (parameter, json!(if rule == "lenient" { 1e-6 } else { 0.0 })),
                ("guided_regex", json!("(a[b-d]{2}|[e-g]x){4,12}")),
                ("ignore_eos", json!(false)),
                ("seed", json!(seed)),
            ];
            let reply = server.json(PATH, &with(body(1.0), &fields)).await;
            assert_eq!(reply["choices"][0]["finish_reason"], "stop");
            let text = reply["choices"][0]["text"].as_str().unwrap();
            let mut rest = text;
            while !rest.is_empty() {
                let bytes = rest.as_bytes();
                let len = if bytes[0] == b'a' { 3 } else { 2 };
                let fits = match (len, &bytes[1..len]) {
                    (3, [b'b'..=b'd', b'b'..=b'd']) => true,
                    (2, [b'x']) => (b'e'..=b'g').contains(&bytes[0]),
                    _ => false,
                };
                assert!(fits, "{text}");
                rest = &rest[len..];
            }
            let usage = &reply["usage"]["speculative_decoding"];
            lossy_tokens += usage["num_lossy_tokens"].as_u64().unwrap();
            let streamed = server.stream(PATH, with(body(1.0), &fields)).await;
            assert!(!joined(&streamed, 0).0.is_empty());
        }
    }
    assert!(lossy_tokens > 20, "{lossy_tokens}");
    server.done().await;
}
