//! Replies of the HTTP API through real sockets, over toy engines: shapes and streams.

use crate::common::server::{Server, error, greedy, joined};
use crate::common::{Guess, MAX_LEN, Toy};
use serde_json::{Value, json};

#[tokio::test]
async fn the_small_routes_answer() {
    let server = Server::start().await;
    assert_eq!(server.get("/health").await.status(), 200);
    let version = server.read("/version").await;
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));

    let models = server.read("/v1/models").await;
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "toy");
    assert_eq!(models["data"][0]["max_model_len"], MAX_LEN);
    for name in ["toy", "org/alias"] {
        let model = server.read(&format!("/v1/models/{name}")).await;
        assert_eq!(model["id"], json!(name));
        assert_eq!(model["object"], "model");
    }
    error(server.get("/v1/models/other").await, 404, "model_not_found").await;

    server.json("/v1/completions", &greedy("abc", 5)).await;
    // The reply may arrive before the engine is idle.
    server.idle().await;
    let metrics = server.get("/metrics").await;
    let expected = "text/plain; version=0.0.4";
    assert_eq!(metrics.headers()["content-type"], expected);
    let metrics = metrics.text().await.unwrap();
    assert!(
        metrics.contains("\nforetoken:generation_tokens_total{model_name=\"model\"} 5\n"),
        "{metrics}"
    );
    let sample = |name: &str| crate::common::sample(&metrics, name);
    for (name, want) in [
        ("prompt_tokens_sum", 3.0),
        ("generation_tokens_sum", 5.0),
        ("params_n_sum", 1.0),
        ("params_max_tokens_sum", 5.0),
        ("queue_time_seconds_count", 1.0),
        ("prefill_time_seconds_count", 1.0),
        ("time_per_output_token_seconds_count", 1.0),
    ] {
        assert_eq!(sample(&format!("foretoken:request_{name}")), want, "{name}");
    }
    let seconds = |part: &str| sample(&format!("foretoken:request_{part}_time_seconds_sum"));
    let whole = sample("foretoken:e2e_request_latency_seconds_sum");
    let parts = seconds("queue") + seconds("prefill") + seconds("decode");
    assert!(parts > 0.0 && parts <= whole, "{parts} of {whole}");
    assert!(seconds("prefill") + seconds("decode") - seconds("inference") < 1e-6);
    assert_eq!(sample("foretoken:cache_config_info{"), 1.0);
    assert!(metrics.contains("block_size=\"4\",enable_prefix_caching=\"true\""));
    if cfg!(target_os = "linux") {
        assert!(sample("process_resident_memory_bytes") > 1e6);
    }
    server.done().await;
}

#[tokio::test]
async fn text_and_tokens_convert_both_ways() {
    let server = Server::start().await;
    let tokens = server.json("/tokenize", &json!({"prompt": "ab é"})).await;
    let expected = json!({"count": 5, "max_model_len": MAX_LEN, "tokens": [0, 1, 26, 28, 29]});
    assert_eq!(tokens, expected);
    let text = server
        .json("/detokenize", &json!({"tokens": tokens["tokens"]}))
        .await;
    assert_eq!(text, json!({"prompt": "ab é"}));

    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = server
        .json("/tokenize", &json!({"messages": messages}))
        .await;
    let text = server
        .json("/detokenize", &json!({"tokens": chat["tokens"]}))
        .await;
    assert_eq!(text["prompt"], "<|start|>user hi\n<|start|>assistant\n");

    server.refused("/tokenize", &json!({})).await;
    let wrong = server.post("/detokenize", &json!({"tokens": [32]})).await;
    assert_eq!(error(wrong, 400, "invalid_value").await["param"], "tokens");
    server.done().await;
}

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let server = Server::start().await;
    let reply = server.json("/v1/completions", &greedy("abc", 20)).await;
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["model"], "toy");
    assert!(reply["created"].as_u64().unwrap() > 1_700_000_000);
    let choice = &reply["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["finish_reason"], "length");
    assert!(
        choice["text"].is_string()
            && choice["logprobs"].is_null()
            && choice["stop_reason"].is_null()
    );

    let usage = &reply["usage"];
    assert_eq!(usage["prompt_tokens"], json!(3));
    assert_eq!(usage["completion_tokens"], json!(20));
    assert_eq!(usage["total_tokens"], json!(23));
    let spec = &usage["speculative_decoding"];
    let number = |key: &str| {
        spec[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} in {spec}"))
    };
    let (rounds, drafted, accepted) = (
        number("num_drafts"),
        number("num_draft_tokens"),
        number("num_accepted_tokens"),
    );
    assert!(rounds > 0.0 && drafted >= accepted);
    assert_eq!(number("acceptance_rate"), accepted / drafted);
    assert_eq!(number("mean_acceptance_length"), 1.0 + accepted / rounds);
    let read = json!({"cached_tokens": 0, "audio_tokens": 0});
    assert_eq!(usage["prompt_tokens_details"], read);
    // The request predicted nothing.
    let expected = json!({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0});
    assert_eq!(usage["completion_tokens_details"], expected);
    server.done().await;
}

#[tokio::test]
async fn streaming_and_speculation_change_no_text() {
    let server = Server::start().await;
    let plain = Server::of(Toy::guessing(Guess::Nothing).start()).await;
    for (prompt, stop) in [
        ("abc", json!(null)),
        ("hello", json!(["a", "qu"])),
        ("x y", json!("e")),
    ] {
        let mut body = greedy(prompt, 60);
        body["stop"] = stop;
        let reply = server.json("/v1/completions", &body).await;
        let (text, finish) = joined(&server.stream("/v1/completions", body.clone()).await, 0);
        assert_eq!(
            (json!(text), &finish),
            (
                reply["choices"][0]["text"].clone(),
                &reply["choices"][0]["finish_reason"]
            )
        );

        let without = plain.json("/v1/completions", &body).await;
        assert_eq!(without["choices"], reply["choices"]);
        assert_eq!(
            without["usage"]["completion_tokens"],
            reply["usage"]["completion_tokens"]
        );
        assert!(without["usage"]["speculative_decoding"].is_null());
        // More than the server drafts is as much as it drafts.
        body["spec_length"] = 1_000_000.into();
        let long = server.json("/v1/completions", &body).await;
        assert_eq!(long["choices"], reply["choices"]);
        body["spec_length"] = 0.into();
        let off = server.json("/v1/completions", &body).await;
        assert_eq!(off["choices"], reply["choices"]);
        assert!(off["usage"].get("speculative_decoding").is_none());
    }
    plain.done().await;
    server.done().await;
}

#[tokio::test]
async fn a_chat_streams_its_role_first_and_its_usage_last() {
    let server = Server::start().await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0,
        "logprobs": true, "top_logprobs": 2,
    });
    let reply = server.json("/v1/chat/completions", &body).await;
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(reply["object"], "chat.completion");
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), 12);
    for entry in entries {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(
            (&top[0]["token"], &top[0]["logprob"]),
            (&entry["token"], &entry["logprob"]),
            "greedy takes the best"
        );
        assert!(entry["bytes"].is_array());
    }

    let mut streamed = body.clone();
    streamed["stream_options"] = json!({"include_usage": true});
    let mut chunks = server.stream("/v1/chat/completions", streamed).await;
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 12);
    let mut each = chunks.iter();
    assert!(each.all(|c| c["object"] == "chat.completion.chunk" && c["id"] == last["id"]));
    assert!(chunks.iter().all(|c| c.get("usage") == Some(&Value::Null)));
    let expected = json!({"role": "assistant", "content": ""});
    assert_eq!(chunks[0]["choices"][0]["delta"], expected);
    let mut each = chunks[1..].iter();
    assert!(each.all(|c| c["choices"][0]["delta"].get("role").is_none()));
    assert_eq!(
        joined(&chunks, 0),
        (
            choice["message"]["content"].as_str().unwrap().into(),
            json!("length")
        )
    );
    let logprobs = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(&logprobs.flatten().cloned().collect::<Vec<_>>(), entries);

    let without = server.stream("/v1/chat/completions", body).await;
    let mut each = without.iter();
    assert!(each.all(|c| c.get("usage").is_none() && c["choices"] != json!([])));
    server.done().await;
}

#[tokio::test]
async fn choices_are_distinguished_by_index() {
    let server = Server::start().await;
    let body = json!({"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 10, "seed": 7});
    let reply = server.json("/v1/completions", &body).await;
    let texts: Vec<&str> = (0..6)
        .map(|i| reply["choices"][i]["text"].as_str().unwrap())
        .collect();
    assert_eq!(reply["choices"].as_array().unwrap().len(), 6);
    assert_ne!(texts[0], texts[1], "choices have seeds of their own");
    assert_eq!(reply["usage"]["prompt_tokens"], 6);
    assert_eq!(reply["usage"]["completion_tokens"], 60);

    let chunks = server.stream("/v1/completions", body.clone()).await;
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(joined(&chunks, index), ((*text).into(), json!("length")));
    }
    // The first choice is that of a request with the same seed and one choice.
    let alone = server
        .json(
            "/v1/completions",
            &json!({"prompt": "abc", "max_tokens": 10, "seed": 7}),
        )
        .await;
    assert_eq!(alone["choices"][0]["text"], texts[0]);
    server.done().await;
}

#[tokio::test]
async fn equal_prompts_get_different_samples() {
    let server = Server::start().await;
    for seed in [json!(null), json!(7)] {
        let body = json!({"prompt": ["abc", "abc", "abc"], "n": 2, "max_tokens": 40, "seed": seed});
        let reply = server.json("/v1/completions", &body).await;
        let again = server.json("/v1/completions", &body).await;
        assert_eq!(reply["choices"] == again["choices"], seed == 7);
        let text = |i: usize| reply["choices"][i]["text"].as_str().unwrap();
        for (a, b) in (0..6).flat_map(|a| (0..a).map(move |b| (a, b))) {
            assert_ne!(text(a), text(b), "choices {a} and {b}, seed {seed}");
        }
    }
    server.done().await;
}

/// Clients of newer models say `developer`; replies that only call tools have no content.
#[tokio::test]
async fn messages_are_accepted_in_the_forms_that_clients_send() {
    let server = Server::start().await;
    let ids = async |message: Value| {
        let reply = server
            .json("/tokenize", &json!({"messages": [message]}))
            .await;
        reply["tokens"].clone()
    };
    assert_eq!(
        ids(json!({"role": "developer", "content": "be brief"})).await,
        ids(json!({"role": "system", "content": "be brief"})).await
    );
    let empty = ids(json!({"role": "assistant", "content": ""})).await;
    assert_eq!(
        ids(json!({"role": "assistant", "content": null})).await,
        empty
    );
    assert_eq!(ids(json!({"role": "assistant"})).await, empty);
    server.done().await;
}

/// The request of lm-eval's `loglikelihood`, and the fields that it reads.
#[tokio::test]
async fn an_echo_scores_the_prompt() {
    let server = Server::start().await;
    let ids = [0, 1, 2, 28, 29, 5];
    let body =
        json!({"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": true, "temperature": 0});
    let reply = server.json("/v1/completions", &body).await;
    let choice = &reply["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("abcéf"));
    let logprobs = &choice["logprobs"];
    let list = |key: &str| {
        logprobs[key]
            .as_array()
            .unwrap_or_else(|| panic!("{key}"))
            .clone()
    };
    let expected = ["a", "b", "c", "bytes:\\xc3", "bytes:\\xa9", "f"];
    assert_eq!(list("tokens")[..6], expected);
    assert_eq!(list("text_offset"), [0, 1, 2, 3, 3, 4, 5]);
    let (scores, top) = (list("token_logprobs"), list("top_logprobs"));
    assert_eq!(
        (&scores[0], &top[0], scores.len(), top.len()),
        (&Value::Null, &Value::Null, 7, 7)
    );
    for i in 1..7 {
        let token = list("tokens")[i].as_str().unwrap().to_owned();
        assert_eq!(
            top[i][&token], scores[i],
            "a token is among its alternatives"
        );
    }
    assert_eq!(
        top[6].as_object().unwrap().len(),
        1,
        "greedy takes the best"
    );

    // The same with a text prompt and without new tokens, streamed.
    let body = json!({"prompt": "abcéf", "max_tokens": 0, "logprobs": 1, "echo": true});
    let reply = server.json("/v1/completions", &body).await;
    assert_eq!(reply["choices"][0]["text"], "abcéf");
    let wanted = json!(scores[..6]);
    assert_eq!(reply["choices"][0]["logprobs"]["token_logprobs"], wanted);
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    let chunks = server.stream("/v1/completions", body).await;
    assert_eq!(joined(&chunks, 0), ("abcéf".into(), json!("length")));
    let want = json!(scores[..6]);
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["token_logprobs"], want);
    server.done().await;
}
