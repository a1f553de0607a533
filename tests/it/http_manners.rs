//! What every response has, whatever was asked: its id, and a route for each form of a path.

use crate::common::Toy;
use crate::common::process;
use crate::common::refusals::{parsed, rows};
use crate::common::server::{LONG, Server, error, events, greedy};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use std::fs::File;
use std::time::{Duration, Instant};

fn id(response: &Response) -> String {
    let id = response.headers()["x-request-id"].to_str().unwrap();
    id.to_owned()
}

#[tokio::test]
async fn every_response_has_the_id_of_its_request() {
    let keyed = |s: foretoken::http::AppState| s.with_api_keys(vec!["secret".into()]);
    let server = Server::over(Toy::default().start(), keyed).await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3});
    let streamed = json!({"prompt": "ab", "max_tokens": 3, "stream": true});
    for (method, path, body, status) in [
        (Method::GET, "/health", None, 200),
        (Method::GET, "/v1/models", None, 200),
        (Method::GET, "/nothing", None, 404),
        (Method::GET, "/v1/completions", None, 405),
        (Method::POST, "/v1/completions", Some(json!({})), 400),
        (Method::POST, "/v1/completions", Some(streamed), 200),
        (Method::POST, "/v1/chat/completions", Some(chat), 200),
        (Method::POST, "/v1/messages", Some(json!({})), 400),
    ] {
        let send = async |name: Option<&str>, key| {
            let request = server
                .client
                .request(method.clone(), server.url.clone() + path);
            let mut request = request.bearer_auth(key);
            if let Some(name) = name {
                request = request.header("x-request-id", name);
            }
            if let Some(body) = &body {
                request = request.json(body);
            }
            request.send().await.unwrap()
        };
        let mine = send(Some("my-id/1"), "secret").await;
        assert_eq!(
            (mine.status().as_u16(), id(&mine)),
            (status, "my-id/1".into())
        );
        let (one, two) = (send(None, "secret").await, send(None, "secret").await);
        assert!(
            id(&one).starts_with("req_") && id(&one) != id(&two),
            "{path}"
        );
        // One that would be no single word in a log line is not repeated.
        let replaced = send(Some("two words"), "secret").await;
        assert!(id(&replaced).starts_with("req_"), "{path}");
        let of_messages = path.starts_with("/v1/messages");
        let other = mine
            .headers()
            .get("request-id")
            .map(|id| id.to_str().unwrap());
        assert_eq!(other, of_messages.then_some("my-id/1"));
        let stranger = send(Some("stranger"), "wrong").await;
        assert_eq!(id(&stranger), "stranger");
        if path != "/health" {
            assert_eq!(stranger.status(), 401);
        }
    }
    server.done().await;
}

/// The lines of `log` that contain `id`, once there is one.
fn lines_with(log: &std::path::Path, id: &str) -> Vec<String> {
    let until = Instant::now() + LONG;
    loop {
        let text = std::fs::read_to_string(log).unwrap();
        let lines = text.lines().filter(|line| line.contains(id));
        let found: Vec<String> = lines.map(str::to_owned).collect();
        if !found.is_empty() || Instant::now() > until {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Ids, routes, keys and bodies of requests, how they are answered, and the words of their line.
const LOGGED: &str = r#"
id-fine | /v1/completions | secret | {"prompt": "The", "max_tokens": 2} | 200 | request done, reason="length"
id-wrong | /v1/completions | secret | {"prompt": "The", "n": 0} | 400 | code="invalid_value", param="n"
id-turn | /v1/messages | secret | {"messages": [{"role": "user", "content": "The"}], "max_tokens": 2, "n": 0} | 400 | code="invalid_value", param="n"
id-lost | /nothing | secret | {"prompt": "The", "max_tokens": 2} | 404 | code="not_found", path="/nothing"
id-stranger | /v1/completions | guess | {"prompt": "The", "max_tokens": 2} | 401 | code="invalid_api_key"
"#;

#[cfg(feature = "embedded-model")]
#[tokio::test]
async fn a_request_has_one_log_line_with_its_id_whether_it_is_answered_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let server = process::Server::start_logging(
        "--api-key secret --num-blocks 64",
        "foretoken=info",
        File::create(&log).unwrap(),
    );
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = async |id: &str, path: &str, key: &str, body: Value| {
        let request = client.post(format!("http://{}{path}", server.address()));
        let request = request.header("x-request-id", id).bearer_auth(key);
        let response = request.json(&body).send().await.unwrap();
        let status = response.status().as_u16();
        response.bytes().await.unwrap();
        status
    };
    for [id, path, key, body, status, words] in rows::<6>(LOGGED) {
        let answered = send(id, path, key, parsed(body)).await;
        assert_eq!(answered.to_string(), status, "{id}");
        let lines = lines_with(&log, id);
        let [line] = lines.as_slice() else {
            panic!("{id}: {lines:?}");
        };
        if status != "200" {
            assert!(line.contains("request refused"), "{line}");
            assert!(line.contains(&format!("status={status}")), "{line}");
        }
        let with_id = format!("request_id=\"{id}\"");
        for word in words.split(", ").chain([&*with_id]) {
            assert!(line.contains(word), "{word} in {line}");
        }
    }
}

#[tokio::test]
async fn paths_without_v1_and_with_a_slash_at_the_end_are_answered_as_the_usual_ones() {
    let server = Server::start().await;
    let mut body = greedy("abc", 6);
    let expected = server.json("/v1/completions", &body).await["choices"].clone();
    for path in ["/completions", "/completions/", "/v1/completions/"] {
        assert_eq!(
            server.json(path, &body).await["choices"],
            expected,
            "{path}"
        );
    }
    body["stream"] = true.into();
    for path in ["/completions", "/v1/completions/"] {
        let response = server.post(path, &body).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let mut events = events(&response.text().await.unwrap());
        assert_eq!(events.pop().unwrap(), "[DONE]");
        let texts = events.iter().map(|event| {
            let chunk: Value = serde_json::from_str(event).unwrap();
            chunk["choices"][0]["text"].as_str().unwrap().to_owned()
        });
        assert_eq!(texts.collect::<String>(), expected[0]["text"]);
    }
    let turn =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0});
    let chat = server.json("/v1/chat/completions", &turn).await;
    let short = server.json("/chat/completions", &turn).await;
    assert_eq!(short["choices"], chat["choices"]);
    for path in ["/messages", "/messages/count_tokens/"] {
        assert_eq!(server.post(path, &turn).await.status(), 200, "{path}");
    }
    let input = json!({"input": "hi", "max_output_tokens": 4});
    assert_eq!(server.post("/responses", &input).await.status(), 200);
    for path in [
        "/models",
        "/models/",
        "/models/org/alias",
        "/health/",
        "/version/",
    ] {
        assert_eq!(server.get(path).await.status(), 200, "{path}");
    }
    // Of the API that the short path means, too.
    let told: Value = server
        .post("/messages", &json!({}))
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(told["type"], "error");
    server.done().await;
}

#[tokio::test]
async fn wrong_methods_and_unknown_paths_are_told_what_there_is() {
    let server = Server::start().await;
    for (method, path, allowed) in [
        (Method::GET, "/v1/chat/completions", "POST"),
        (Method::GET, "/completions/", "POST"),
        (Method::PUT, "/v1/models", "GET,HEAD"),
        (Method::DELETE, "/v1/models/toy", "GET,HEAD"),
        (Method::POST, "/", "GET,HEAD"),
    ] {
        let request = server.client.request(method, server.url.clone() + path);
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["allow"], allowed, "{path}");
        let told = error(response, 405, "method_not_allowed").await;
        if allowed == "POST" {
            let message = told["message"].as_str().unwrap();
            assert!(
                message.ends_with("does not accept GET, but POST"),
                "{message}"
            );
        }
    }
    // It could be the route of a stored response.
    let compact = server.post("/v1/responses/compact", &json!({})).await;
    let told = error(compact, 405, "method_not_allowed").await;
    let message = told["message"].as_str().unwrap();
    assert!(message.contains("nothing is compacted here"), "{message}");
    for path in ["/nothing", "/v1", "/v1/", "/v1/chat", "//", "/v1/models"] {
        let response = server.get(path).await;
        if path == "/v1/models" {
            assert_eq!(response.status(), 200);
            continue;
        }
        let told = error(response, 404, "not_found").await;
        let message = told["message"].as_str().unwrap();
        for route in [
            "POST /v1/chat/completions",
            "GET /v1/models/{id}",
            "GET /health",
        ] {
            assert!(message.contains(route), "{message}");
        }
    }
    // No text is a part of a path that is no UTF-8.
    error(server.get("/v1/models/%ff").await, 404, "model_not_found").await;
    server.done().await;
}
