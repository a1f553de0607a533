//! Fields of the HTTP API for drafts: predicted answers, and salts.

use crate::common::server::{Server, greedy};
use crate::common::{Guess, Toy};
use foretoken::engine::SpecLimits;
use serde_json::{Value, json};

/// A server whose drafts come from tables, with trees.
async fn with_tables() -> Server {
    let mut toy = Toy::guessing(Guess::Tables);
    toy.options.spec = SpecLimits {
        length: 8,
        ..SpecLimits::default()
    };
    Server::of(toy.start()).await
}

/// A prediction is a hint: right or wrong, it changes no text, and its draft tokens are counted apart.
#[tokio::test]
async fn a_predicted_answer_is_drafted_and_counted() {
    let server = with_tables().await;
    let mut body = greedy("abc", 60);
    // What this answer teaches is not known under other salts.
    body["cache_salt"] = "first".into();
    let reply = server.json("/v1/completions", &body).await;
    let text = reply["choices"][0]["text"].as_str().unwrap();
    let backwards: String = text.chars().rev().collect();
    let none = json!({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0});
    assert_eq!(reply["usage"]["completion_tokens_details"], none);

    let mut accepted = Vec::new();
    for (salt, prediction) in [
        ("right", json!(text)),
        ("parts", json!([{"type": "text", "text": text}])),
        ("wrong", json!(backwards)),
    ] {
        body["cache_salt"] = salt.into();
        body["prediction"] = json!({"type": "content", "content": prediction});
        let predicted = server.json("/v1/completions", &body).await;
        assert_eq!(predicted["choices"], reply["choices"], "{salt}");
        let usage = &predicted["usage"];
        let count = |key: &str| usage["completion_tokens_details"][key].as_u64().unwrap();
        let counts =
            ["accepted", "rejected"].map(|kind| count(&format!("{kind}_prediction_tokens")));
        assert!(counts[0] + counts[1] > 0, "{salt}: {usage}");
        let all = &usage["speculative_decoding"];
        assert!(Some(counts[0]) <= all["num_accepted_tokens"].as_u64());
        assert!(Some(counts[0] + counts[1]) <= all["num_draft_tokens"].as_u64());
        accepted.push(counts[0]);
    }
    // What requests teach about how likely guesses are is shared, so the two right ones may differ.
    let right = accepted[0].min(accepted[1]);
    assert!(right > 20 && right > accepted[2], "{accepted:?}");

    server.idle().await;
    let metrics = server.get("/metrics").await.text().await.unwrap();
    let name = "spec_decode_num_accepted_tokens_by_source_total{source=\"prediction\",";
    let line = metrics.lines().find(|line| line.contains(name));
    let total: u64 = line.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert_eq!(total, accepted.iter().sum::<u64>(), "{metrics}");
    server.done().await;
}

/// What one answer teaches makes the next ones faster only for requests with the same salt.
#[tokio::test]
async fn a_salt_keeps_answers_apart() {
    let server = with_tables().await;
    let accepted = async |salt: Value| {
        let mut body = greedy("abc", 60);
        body["cache_salt"] = salt;
        let usage = &server.json("/v1/completions", &body).await["usage"];
        // The next request comes after the tables have learned from this one.
        server.idle().await;
        let count = &usage["speculative_decoding"]["num_accepted_tokens"];
        count.as_u64().unwrap()
    };
    let (alone, again) = (accepted(json!("a")).await, accepted(json!("a")).await);
    assert!(again > alone + 10, "{alone}, then {again}");
    let others = [accepted(json!("b")).await, accepted(json!(null)).await];
    assert!(
        others.iter().all(|&n| n < again - 10),
        "{again}, {others:?}"
    );
    assert!(accepted(json!(null)).await > others[1] + 10);
    server.done().await;
}
