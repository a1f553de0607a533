//! What ends a text: stop strings, stop ids, and names of special tokens, which texts are without: their ids end it.

use crate::common::scripted::{CHAT, saying};
use crate::common::server::{EOS, Server, greedy, joined, slow};
use crate::common::{Guess, Toy};
use foretoken::engine::EngineOptions;
use serde_json::{Value, json};

const SAYS: &str = "one two one two one[TOOL_CALLS]two one two one two";
const STOP: &str = "[TOOL_CALLS]";
const BEFORE: &str = "one two one two one";

fn chat(extra: &[(&str, Value)]) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stop": [STOP],
        "max_tokens": 40});
    extra
        .iter()
        .for_each(|(key, value)| body[key] = value.clone());
    body
}

#[tokio::test]
async fn a_special_token_ends_a_text_as_its_name_does() {
    for (extra, text) in [
        (vec![], BEFORE.to_owned()),
        (vec![("stop", json!(STOP))], BEFORE.to_owned()),
        (vec![("stop", json!(["x!", STOP]))], BEFORE.to_owned()),
        (
            vec![("skip_special_tokens", json!(false))],
            BEFORE.to_owned(),
        ),
        (
            vec![("include_stop_str_in_output", json!(true))],
            format!("{BEFORE}{STOP}"),
        ),
        // The beginning of another one is held back until then.
        (vec![("stop", json!([STOP, "one!"]))], BEFORE.to_owned()),
    ] {
        let server = saying(SAYS).await;
        for drafts in [4, 0] {
            let mut body = chat(&extra);
            body["spec_length"] = drafts.into();
            let reply = server.json(CHAT, &body).await;
            let choice = &reply["choices"][0];
            assert_eq!(choice["message"]["content"], text, "{extra:?}");
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["stop_reason"], STOP);
            // Tokens are bytes here, and one that is special.
            assert_eq!(reply["usage"]["completion_tokens"], BEFORE.len() + 1);
            let chunks = server.stream(CHAT, body).await;
            let streamed: String = (chunks.iter())
                .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
                .collect();
            assert_eq!(streamed, text, "{extra:?}");
        }
        server.done().await;
    }
}

/// The name of EOS changes nothing, unless EOS itself is ignored.
#[tokio::test]
async fn the_end_of_a_text_is_no_stop_string() {
    let says = "one[TOOL_CALLS]<|im_end|>two<|im_end|>";
    let server = saying(says).await;
    let stop = json!(["<|im_end|>"]);
    let reply = server.json(CHAT, &chat(&[("stop", stop.clone())])).await;
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], "one");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["stop_reason"], Value::Null);
    let ignored = chat(&[("stop", stop), ("ignore_eos", json!(true))]);
    let choice = &server.json(CHAT, &ignored).await["choices"][0];
    assert_eq!(choice["message"]["content"], "one");
    assert_eq!(choice["stop_reason"], "<|im_end|>");
    // A stop id is reported as an id.
    let by_id = chat(&[("stop_token_ids", json!([258]))]);
    let choice = &server.json(CHAT, &by_id).await["choices"][0];
    assert_eq!(choice["message"]["content"], "one");
    assert_eq!(choice["stop_reason"], 258);
    server.done().await;
}

#[tokio::test]
async fn every_api_ends_there() {
    let server = saying(SAYS).await;
    let body = json!({"prompt": "Hi", "temperature": 0, "stop": STOP, "max_tokens": 40});
    let choice = &server.json("/v1/completions", &body).await["choices"][0];
    assert_eq!(choice["text"], json!(BEFORE));
    assert_eq!(choice["stop_reason"], json!(STOP));
    server.done().await;

    let server = saying(SAYS).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 40,
        "stop_sequences": [STOP]});
    let message = server.json("/v1/messages", &body).await;
    let expected = json!([{"type": "text", "text": BEFORE}]);
    assert_eq!(message["content"], expected);
    assert_eq!(message["stop_reason"], "stop_sequence");
    assert_eq!(message["stop_sequence"], json!(STOP));
    server.done().await;

    let server = saying(SAYS).await;
    let body = json!({"input": "Hi", "temperature": 0, "max_output_tokens": 40, "stop": [STOP]});
    let response = server.json("/v1/responses", &body).await;
    assert_eq!(response["status"], "completed");
    assert_eq!(response["output"][0]["content"][0]["text"], BEFORE);
    server.done().await;
}

fn chars(text: &Value) -> Vec<char> {
    text.as_str().expect("a text").chars().collect()
}

/// The metrics count it as stopped as well, although the engine itself would have continued.
#[tokio::test]
async fn a_text_that_ends_at_a_stop_string_counts_as_stopped() {
    let fast = Server::start().await;
    let slow = Server::of(slow(EngineOptions::default(), None)).await;
    for server in [fast, slow] {
        let full = server.json("/v1/completions", &greedy("abc", 20)).await;
        let full = chars(&full["choices"][0]["text"]);
        let mut body = greedy("abc", 20);
        body["stop"] = String::from_iter(&full[2..5]).into();
        server.json("/v1/completions", &body).await;
        server.stream("/v1/completions", body.clone()).await;
        // The stop string is complete with the engine's last token.
        body["stop"] = String::from_iter(&full[full.len() - 4..]).into();
        let last = server.json("/v1/completions", &body).await;
        assert_eq!(last["choices"][0]["finish_reason"], "stop");

        let metrics = server.get("/metrics").await.text().await.unwrap();
        let counted = |reason: &str| {
            let name = format!("request_success_total{{finished_reason=\"{reason}\",");
            let line = metrics.lines().find(|line| line.contains(&name))?;
            line.rsplit(' ').next()?.parse::<u32>().ok()
        };
        assert_eq!(counted("stop"), Some(3), "{metrics}");
        assert_eq!(counted("length"), Some(1), "{metrics}");
        for none in ["abort", "error"] {
            assert_eq!(counted(none), Some(0), "{metrics}");
        }
        server.done().await;
    }
}

/// The draft is the target itself: of the five tokens of a step, four were drafted.
#[tokio::test]
async fn usage_counts_accepted_tokens_of_the_text_only() {
    let perfect = Toy::guessing(Guess::Toy(0.0));
    let server = Server::of(perfect.start()).await;
    let full = server.json("/v1/completions", &greedy("abc", 60)).await;
    let full = chars(&full["choices"][0]["text"]);
    let mut ended_inside_a_round = 0;
    for at in [7, 8, 9, 20, 21, 23] {
        let mut body = greedy("abc", 60);
        body["stop"] = String::from_iter(&full[at - 3..at]).into();
        let usage = &server.json("/v1/completions", &body).await["usage"];
        // The first token comes from the prompt's step.
        let later = usage["completion_tokens"].as_u64().unwrap() - 1;
        ended_inside_a_round += u64::from(later % 5 > 0);
        assert_eq!(
            usage["speculative_decoding"]["num_accepted_tokens"],
            later - later / 5,
            "{usage}"
        );
    }
    assert!(ended_inside_a_round > 0);
    server.done().await;
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it() {
    let server = Server::start().await;
    let mut body = greedy("abc", 60);
    let full = server.json("/v1/completions", &body).await;
    let full = full["choices"][0]["text"].as_str().unwrap();
    let middle: String = full.chars().skip(10).take(3).collect();
    let expected = &full[..full.find(&middle).unwrap()];

    body["stop"] = json!([middle, "<never>"]);
    body["stream_options"] = json!({"include_usage": true});
    let mut chunks = server.stream("/v1/completions", body.clone()).await;
    let usage = chunks.pop().unwrap()["usage"].clone();
    assert_eq!(joined(&chunks, 0), (expected.into(), json!("stop")));
    assert_eq!(chunks.last().unwrap()["choices"][0]["stop_reason"], middle);

    body.as_object_mut().unwrap().remove("stream_options");
    let reply = server.json("/v1/completions", &body).await;
    assert_eq!(reply["choices"][0]["text"], expected);
    assert_eq!(reply["choices"][0]["stop_reason"], middle);
    assert_eq!(
        reply["usage"]["completion_tokens"],
        usage["completion_tokens"]
    );
    assert!(usage["completion_tokens"].as_u64() < Some(60));
    server.done().await;
}

#[tokio::test]
async fn eos_and_stop_ids_end_the_text_and_count() {
    let eos = Toy {
        eos: vec![EOS],
        ..Toy::default()
    };
    let server = Server::of(eos.start()).await;
    let mut body = greedy("abc", 100);
    body["logit_bias"] = json!({"30": 100});
    let reply = server.json("/v1/completions", &body).await;
    assert_eq!(
        reply["choices"][0],
        json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "stop", "stop_reason": null})
    );
    assert_eq!(reply["usage"]["completion_tokens"], 1);

    body["ignore_eos"] = true.into();
    body["max_tokens"] = 5.into();
    let reply = server.json("/v1/completions", &body).await;
    assert_eq!(reply["choices"][0]["text"], "");
    assert_eq!(reply["usage"]["completion_tokens"], 5);
    // A stream tells of the first token when it comes, though it shows no text.
    body["spec_length"] = 0.into();
    let chunks = server.stream("/v1/completions", body.clone()).await;
    let first = &chunks[0]["choices"][0];
    assert!(chunks.len() > 1, "{chunks:?}");
    assert_eq!(first["text"], "");
    assert_eq!(first["finish_reason"], Value::Null);
    assert_eq!(joined(&chunks, 0), (String::new(), json!("length")));

    let stop =
        json!({"prompt": "abc", "logit_bias": {"3": 100}, "stop_token_ids": [3], "min_tokens": 2});
    let reply = server.json("/v1/completions", &stop).await;
    assert_eq!(reply["choices"][0]["stop_reason"], 3);
    assert_eq!(reply["usage"]["completion_tokens"], 3);
    server.done().await;
}
