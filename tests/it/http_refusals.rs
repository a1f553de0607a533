//! Refusals and the end of the HTTP API: statuses, a full queue, clients that disconnect, shutdown.

use crate::common::server::{
    ENDLESS, Fault, LONG, Server, doomed, error, events, greedy, held, slow, text_with, until,
};
use crate::common::{Toy, assert_has};
use foretoken::engine::EngineOptions;
use foretoken::error::Error;
use foretoken::http::{AppState, HttpLimits};
use reqwest::{Method, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test]
async fn refusals_have_openais_shape() {
    let server = Server::over(Toy::default().start(), |s| {
        s.with_limits(HttpLimits {
            max_body_bytes: 10_000,
            ..HttpLimits::default()
        })
    })
    .await;
    error(server.get("/nothing").await, 404, "not_found").await;
    error(server.get("/v1/nothing").await, 404, "not_found").await;
    error(
        server.get("/v1/completions").await,
        405,
        "method_not_allowed",
    )
    .await;
    error(
        server.post("/health", &json!({})).await,
        405,
        "method_not_allowed",
    )
    .await;
    let long = json!({"prompt": "a".repeat(20_000)});
    error(
        server.post("/v1/completions", &long).await,
        413,
        "request_too_large",
    )
    .await;
    let unknown = json!({"model": "other", "prompt": "a"});
    assert_eq!(
        error(
            server.post("/v1/completions", &unknown).await,
            404,
            "model_not_found"
        )
        .await["param"],
        "model"
    );

    let broken = server
        .client
        .post(server.url.clone() + "/v1/completions")
        .body("{\"prompt\": ");
    let broken = error(broken.send().await.unwrap(), 400, "invalid_value").await;
    assert_eq!(broken["param"], Value::Null);
    for (body, param) in [
        (json!({"prompt": "a", "temperature": 3}), "temperature"),
        (json!({"prompt": "a", "n": "two"}), "n"),
        (
            json!({"prompt": "a", "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
        ),
        (json!({}), "prompt"),
    ] {
        let told = server.refused("/v1/completions", &body).await;
        assert_eq!(told["param"], param);
    }
    let long = json!({"prompt": "a".repeat(1000), "max_tokens": 1, "stream": true});
    let long = server.post("/v1/completions", &long).await;
    let told = error(long, 400, "context_length_exceeded").await;
    assert_eq!(told["param"], "prompt");
    let wrong = json!({"messages": [{"role": "user", "content": "hi"}, {"content": "no role"}]});
    let told = server.refused("/v1/chat/completions", &wrong).await;
    assert_eq!(told["param"], "messages[1].role");
    server.done().await;
}

/// Agents send one number for all models.
#[tokio::test]
async fn max_tokens_beyond_the_context_are_cut_unless_that_is_refused() {
    const CUT: &str = "x-foretoken-max-tokens";
    let asked =
        json!({"prompt": "ab", "max_tokens": 100_000, "ignore_eos": true, "temperature": 0});
    let engine = Toy::default().start();
    let max = engine.limits().max_model_len;
    let server = Server::of(engine).await;
    let reply = server.post("/v1/completions", &asked).await;
    let told = reply
        .headers()
        .get(CUT)
        .expect("a header")
        .to_str()
        .expect("text")
        .to_owned();
    let reply: Value = reply.json().await.expect("JSON");
    let prompt = reply["usage"]["prompt_tokens"].as_u64().expect("a count") as usize;
    assert_eq!(told, (max - prompt).to_string());
    assert_eq!(reply["usage"]["completion_tokens"], max - prompt);
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    let reply = server.post("/v1/completions", &streamed).await;
    assert_eq!(reply.headers()[CUT], told.as_str());
    drop(reply);
    let fits = json!({"prompt": "ab", "max_tokens": 3});
    let reply = server.post("/v1/completions", &fits).await;
    assert!(reply.status() == 200 && !reply.headers().contains_key(CUT));
    let mut wrong = asked.clone();
    wrong["min_tokens"] = 50_000.into();
    server.refused("/v1/completions", &wrong).await;
    server.done().await;

    let engine = Toy::default().start();
    let strict = |state: AppState| state.with_strict_max_tokens(true);
    let server = Server::over(engine, strict).await;
    let refused = server.post("/v1/completions", &asked).await;
    let told = error(refused, 400, "context_length_exceeded").await;
    assert_eq!(told["param"], "max_tokens");
    server.done().await;
}

#[tokio::test]
async fn a_model_without_a_chat_template_refuses_chats_and_says_so() {
    let engine = Toy::default().start();
    let bare = AppState::new(
        engine.clone(),
        Arc::new(text_with(None)),
        vec!["toy".into()],
    );
    let server = Server::over(engine, |_| bare).await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    let reply = server.post("/v1/chat/completions", &chat).await;
    let told = error(reply, 400, "invalid_value").await;
    let message = told["message"].as_str().unwrap();
    assert_has(message, &["no chat template", "/v1/completions"]);
    let completion = json!({"prompt": "hi", "max_tokens": 2});
    assert_eq!(
        server.post("/v1/completions", &completion).await.status(),
        200
    );
    server.done().await;
}

#[tokio::test]
async fn the_key_is_required_on_all_routes_but_the_open_ones() {
    let engine = Toy::default().start();
    let server = Server::over(engine, |s| s.with_api_keys(vec!["secret".into()])).await;
    let request = |method: Method, path: &str| {
        let request = server.client.request(method, server.url.clone() + path);
        request.json(&json!({"prompt": "a", "tokens": [0], "max_tokens": 1}))
    };
    let models = || request(Method::GET, "/v1/models");
    for wrong in ["secre", "secret2", ""] {
        let reply = models().bearer_auth(wrong).send().await.unwrap();
        error(reply, 401, "invalid_api_key").await;
    }
    let basic = models().basic_auth("secret", Some("secret"));
    error(basic.send().await.unwrap(), 401, "invalid_api_key").await;

    for (method, path, with_key) in [
        (Method::GET, "/v1/models", 200),
        (Method::GET, "/v1/models/toy", 200),
        (Method::POST, "/v1/completions", 200),
        (Method::POST, "/tokenize", 200),
        (Method::POST, "/detokenize", 200),
        // Without the key, no one learns which routes exist.
        (Method::GET, "/nothing", 404),
        (Method::GET, "/v1/nothing", 404),
        (Method::GET, "/v1/completions", 405),
        (Method::GET, "/tokenize", 405),
        (Method::GET, "//health", 404),
    ] {
        let without = request(method.clone(), path).send().await.unwrap();
        assert_eq!(without.headers()["www-authenticate"], "Bearer");
        error(without, 401, "invalid_api_key").await;
        let with = request(method.clone(), path).bearer_auth("secret");
        assert_eq!(
            with.send().await.unwrap().status(),
            with_key,
            "{method} {path}"
        );
    }
    for path in [
        "/health", "/health/", "/ping", "/load", "/version", "/metrics",
    ] {
        assert_eq!(server.get(path).await.status(), 200);
    }
    server.done().await;
}

/// Any of several keys is accepted, and none shares what another one's requests have cached.
#[tokio::test]
async fn each_of_several_keys_is_a_scope_of_its_own() {
    let keys = vec!["first".into(), "second".into()];
    let server = Server::over(Toy::default().start(), |s| s.with_api_keys(keys)).await;
    let body = json!({"prompt": "a".repeat(60), "max_tokens": 1});
    let cached = async |key: &str| {
        let request = server.client.post(format!("{}/v1/completions", server.url));
        let reply = request.json(&body).bearer_auth(key).send().await.unwrap();
        assert_eq!(reply.status(), 200, "{key}");
        let answer: Value = reply.json().await.unwrap();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert_eq!(cached("first").await, Some(0));
    assert_eq!(cached("second").await, Some(0));
    assert_eq!(cached("first").await, Some(56));
    assert_eq!(cached("second").await, Some(56));
    let request = server.client.get(format!("{}/v1/models", server.url));
    let reply = request.bearer_auth("firstsecond").send().await.unwrap();
    error(reply, 401, "invalid_api_key").await;
    server.done().await;
}

/// A client without the key cannot make the server wait for a body or store it.
#[tokio::test]
async fn the_key_is_checked_before_the_body_is_read() {
    let engine = Toy::default().start();
    let server = Server::over(engine, |s| s.with_api_keys(vec!["secret".into()])).await;
    let address = server.url.strip_prefix("http://").unwrap();
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/x",
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        let read = stream.read_exact(&mut answer);
        tokio::time::timeout(LONG, read)
            .await
            .expect("an answer without a body")
            .unwrap();
        assert_eq!(&answer, b"HTTP/1.1 401", "{path}");
    }
    server.done().await;
}

#[tokio::test]
async fn unsupported_fields_are_refused_by_name() {
    let server = Server::start().await;
    for (field, asks, harmless) in [
        ("functions", json!([{"name": "f"}]), json!([])),
        ("structural_tag", json!({"a": 1}), json!(null)),
        ("prompt_logprobs", json!(1), json!(null)),
        ("store", json!(true), json!(false)),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let mut body = json!({"max_tokens": 1, "unknown": [1]});
            match path {
                "/v1/completions" => body["prompt"] = "a".into(),
                _ => body["messages"] = json!([{"role": "user", "content": "hi"}]),
            }
            body[field] = asks.clone();
            let told = server.refused(path, &body).await;
            assert_eq!(told["param"], field);
            body[field] = harmless.clone();
            server.json(path, &body).await;
        }
    }
    server.done().await;
}

#[tokio::test]
async fn long_lists_are_refused_by_name() {
    let server = Server::start().await;
    let biases: Map<String, Value> = (1..1026).map(|i| ("0".repeat(i), json!(1))).collect();
    for (field, list) in [
        ("stop_token_ids", json!(vec![0; 900_000])),
        ("stop", json!(vec!["x".repeat(450_000); 4])),
        ("stop", json!(vec!["x"; 65])),
        ("logit_bias", biases.into()),
    ] {
        let mut body = greedy("abc", 5);
        body[field] = list;
        let told = server.post("/v1/completions", &body).await;
        assert_eq!(error(told, 400, "invalid_value").await["param"], field);
    }
    server.done().await;
}

fn one_at_a_time() -> EngineOptions {
    EngineOptions {
        max_num_seqs: 1,
        max_waiting: 1,
        ..EngineOptions::default()
    }
}

/// Starts a stream that runs for longer than a test waits.
async fn begun(server: &Server) -> Response {
    let mut body = greedy("abc", ENDLESS);
    body["stream"] = true.into();
    let mut response = server.post("/v1/completions", &body).await;
    response.chunk().await.expect("no error").expect("a chunk");
    response
}

#[tokio::test]
async fn a_full_queue_says_when_to_retry() {
    let server = Server::of(slow(one_at_a_time(), None)).await;
    let first = begun(&server).await;
    let mut body = greedy("abc", ENDLESS);
    body["stream"] = true.into();
    let second = server.post("/v1/completions", &body).await;
    assert_eq!(second.status(), 200);
    let third = server.post("/v1/completions", &greedy("abc", 5)).await;
    assert_eq!(third.headers()["retry-after"], "1");
    error(third, 429, "queue_full").await;
    drop((first, second));
    server.done().await;
}

#[tokio::test]
async fn a_client_that_disconnects_frees_the_engine() {
    let server = Server::of(slow(one_at_a_time(), None)).await;
    drop(begun(&server).await);
    let stats = server.engine.stats().clone();
    until("it is gone", || stats.requests_running.get() == 0).await;

    // The same without streaming: the client gives up while it waits.
    let request = server.client.post(server.url.clone() + "/v1/completions");
    let request = request.json(&greedy("abc", ENDLESS));
    let waiting = tokio::spawn(request.send());
    until("it runs", || stats.requests_running.get() == 1).await;
    waiting.abort();
    until("it is gone", || stats.requests_running.get() == 0).await;
    server.done().await;
}

#[tokio::test]
async fn shutting_down_finishes_running_requests_and_refuses_new_ones() {
    let (engine, is_held) = held();
    let server = Server::of(engine.clone()).await;
    let mut body = greedy("abc", 200);
    body["stream"] = true.into();
    let running = server.post("/v1/completions", &body).await;
    let (url, client) = (server.url.clone(), server.client.clone());
    let stopping = tokio::spawn(server.stop());
    until("it drains", || engine.is_draining()).await;
    let refused = client
        .post(url.clone() + "/v1/completions")
        .json(&greedy("a", 1));
    error(
        refused.send().await.expect("still listening"),
        503,
        "shutting_down",
    )
    .await;
    error(
        client.get(url.clone() + "/health").send().await.unwrap(),
        503,
        "shutting_down",
    )
    .await;
    is_held.store(false, Ordering::SeqCst);
    assert!(running.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    stopping.await.unwrap().expect("an orderly end");
    assert!(engine.has_ended());
    assert!(
        client.get(url + "/health").send().await.is_err(),
        "nobody listens any more"
    );
}

#[tokio::test]
async fn shutting_down_waits_no_longer_than_the_timeout() {
    let engine = slow(EngineOptions::default(), None);
    let server = Server::ending_within(Duration::from_millis(100), engine, |state| state).await;
    let running = begun(&server).await;
    let started = Instant::now();
    let stopping = tokio::spawn(server.stop());
    let events = events(&running.text().await.unwrap());
    let last: Value = serde_json::from_str(events.last().unwrap()).expect("an error, not [DONE]");
    assert_eq!(last["error"]["code"], "shutting_down");
    stopping.await.unwrap().expect("an orderly end");
    assert!(started.elapsed() < LONG, "it did not run to its end");
}

#[tokio::test]
async fn a_step_that_fails_fails_its_requests() {
    let engine = slow(EngineOptions::default(), Some(Fault::Error));
    let server = Server::of(engine).await;
    let stream = begun(&server).await.text().await.unwrap();
    let last = events(&stream).pop().unwrap();
    let last: Value = serde_json::from_str(&last).expect("an error, not [DONE]");
    assert_eq!(last["error"]["type"], "server_error");
    assert_eq!(last["error"]["message"], "the device has failed");
    server.json("/v1/completions", &greedy("a", 1)).await;
    server.done().await;
}

#[tokio::test]
async fn a_step_that_panics_fails_its_requests() {
    let engine = slow(EngineOptions::default(), Some(Fault::Panic));
    let server = Server::of(engine).await;
    let whole = server.post("/v1/completions", &greedy("abc", 200)).await;
    let error = error(whole, 500, "internal_error").await;
    assert_eq!(error["message"], "the step panicked: as the test wants");
    server.json("/v1/completions", &greedy("a", 1)).await;
    server.done().await;
}

/// A supervisor restarts a process that ends, but not one that answers 503 for ever.
#[tokio::test]
async fn the_server_ends_with_its_engine() {
    let server = Server::of(doomed()).await;
    let response = server.post("/v1/completions", &greedy("abc", 5)).await;
    error(response, 500, "internal_error").await;
    let (url, client) = (server.url.clone(), server.client.clone());
    let ended = server.wait().await.expect_err("nobody asked it to end");
    assert!(
        matches!(&ended, Error::Internal(_)),
        "exit code 1: {ended:?}"
    );
    assert_eq!(ended.to_string(), "draft pool: block 0 is lost");
    let gone = client.get(url + "/health").send().await;
    assert!(gone.is_err(), "nobody listens any more");
}
