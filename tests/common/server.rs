//! A server over a toy engine, and a client.

#![allow(dead_code, reason = "each test file uses its part")]

use crate::common::hooked::watched;
use crate::common::tiny_folder::tokenizer_of;
use crate::common::{Guess, MAX_LEN, SEED, Toy, VOCAB, assert_idle, toy_model, tree_limits};
use foretoken::engine::{self, EngineHandle, EngineOptions};
use foretoken::error::{Error, Result};
use foretoken::http::{AppState, serve};
use foretoken::model::toy::ToyModel;
use foretoken::spec::{Draft, DraftRequest, Drafter};
use foretoken::text::{SpecialIds, Text};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub const EOS: u32 = 30;
/// The maximum time that a test waits, on a machine that does much else, too.
pub const LONG: Duration = Duration::from_secs(60);

/// A tokenizer with 32 tokens: letters, space, line break, the two bytes of `é`, and two special tokens.
fn text() -> Text {
    text_with(Some(
        "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    ))
}

/// The same with another chat template, or none.
pub fn text_with(template: Option<&str>) -> Text {
    let mut names: Vec<String> = ('a'..='z').map(String::from).collect();
    names.extend(["Ġ", "Ċ", "Ã", "©", "<|end|>", "<|start|>"].map(String::from));
    assert_eq!(names.len(), VOCAB);
    text_over(&names, &["<|end|>", "<|start|>"], EOS, template)
}

/// The text of a byte-level tokenizer with the tokens `names`, some of them `special`, of which `eos` is one.
pub fn text_over(names: &[String], special: &[&str], eos: u32, template: Option<&str>) -> Text {
    let file = tokenizer_of(names, special).to_string();
    let tokenizer = file.parse().expect("a valid tokenizer.json");
    let special = SpecialIds {
        bos: None,
        eos: vec![eos],
    };
    Text::new(tokenizer, special, template).expect("byte-level")
}

/// A server whose drafts are trees, if its drafter makes any.
pub async fn drafting(guess: Guess) -> Server {
    let mut toy = Toy {
        guess,
        eos: vec![EOS],
        ..Toy::default()
    };
    toy.options.spec = tree_limits(6, 15, 4);
    Server::of(toy.start()).await
}

/// A fault in a forward.
pub enum Fault {
    Error,
    Panic,
}

/// The minimum duration of a forward of the slow toy.
pub const STEP: Duration = Duration::from_millis(10);
/// So many tokens take the slow toy longer than [`LONG`].
pub const ENDLESS: usize = 10_000;
/// The number of the forward that fails, from 1.
const FAULT_AT: usize = 4;

/// A slow toy model that may fail once.
pub fn slow(options: EngineOptions, fault: Option<Fault>) -> EngineHandle {
    let mut forwards = 0;
    let toy = ToyModel::new(VOCAB, ENDLESS + MAX_LEN, SEED, 0.0);
    let model = watched(toy, move |_| {
        std::thread::sleep(STEP);
        forwards += 1;
        match &fault {
            Some(Fault::Error) if forwards == FAULT_AT => {
                Err(Error::internal("the device has failed"))
            }
            Some(Fault::Panic) if forwards == FAULT_AT => panic!("as the test wants"),
            _ => Ok(()),
        }
    });
    engine::spawn(model, None, 4096, 4, options).expect("starts")
}

/// A toy model whose forwards wait while the flag is set, as it is at first.
pub fn held() -> (EngineHandle, Arc<AtomicBool>) {
    let is_held = Arc::new(AtomicBool::new(true));
    let waits = is_held.clone();
    let model = watched(toy_model(0.0), move |_| {
        while waits.load(Ordering::SeqCst) {
            std::thread::sleep(STEP);
        }
        Ok(())
    });
    let engine = engine::spawn(model, None, 256, 4, EngineOptions::default()).expect("starts");
    (engine, is_held)
}

/// A drafter that drafts nothing, and whose pool is in disorder.
struct Disordered;

impl Drafter for Disordered {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        Ok(requests.iter().map(|_| Draft::default()).collect())
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        Err("block 0 is lost".into())
    }
}

/// An engine that dies in its first step: it fails, and then the pools are checked.
pub fn doomed() -> EngineHandle {
    let fails = |_: &_| Err(Error::internal("the device has failed"));
    let (model, options) = (watched(toy_model(0.0), fails), EngineOptions::default());
    engine::spawn(model, Some(Box::new(Disordered)), 256, 4, options).expect("starts")
}

pub struct Server {
    pub url: String,
    pub client: Client,
    pub engine: EngineHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<()>>,
}

impl Server {
    pub async fn start() -> Self {
        Self::of(Toy::default().start()).await
    }

    pub async fn of(engine: EngineHandle) -> Self {
        Self::over(engine, |state| state).await
    }

    pub async fn over(engine: EngineHandle, configure: impl FnOnce(AppState) -> AppState) -> Self {
        Self::ending_within(LONG, engine, configure).await
    }

    /// One that waits at most so long for running requests when it is stopped.
    pub async fn ending_within(
        timeout: Duration,
        engine: EngineHandle,
        configure: impl FnOnce(AppState) -> AppState,
    ) -> Self {
        let names = vec!["toy".to_owned(), "org/alias".to_owned()];
        let state = configure(AppState::new(engine.clone(), Arc::new(text()), names));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            stopped.await.expect("the test stops the server");
        };
        Self {
            url,
            client: Client::builder().no_proxy().build().expect("a client"),
            engine,
            stop,
            task: tokio::spawn(serve(listener, state, shutdown, timeout)),
        }
    }

    pub async fn get(&self, path: &str) -> Response {
        let request = self.client.get(self.url.clone() + path);
        request.send().await.expect("an answer")
    }

    /// What a route tells in JSON.
    pub async fn read(&self, path: &str) -> Value {
        self.get(path).await.json().await.expect("JSON")
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        let request = self.client.post(self.url.clone() + path).json(body);
        request.send().await.expect("an answer")
    }

    pub async fn json(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let status = response.status();
        let reply = response.text().await.expect("a whole reply");
        assert_eq!(status, StatusCode::OK, "{body}: {reply}");
        serde_json::from_str(&reply).expect("JSON")
    }

    /// The error of a request with a value that is invalid.
    pub async fn refused(&self, path: &str, body: &Value) -> Value {
        error(self.post(path, body).await, 400, "invalid_value").await
    }

    /// The chunks of a stream that ends with `[DONE]`.
    pub async fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), StatusCode::OK, "{body}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut events = events(&response.text().await.expect("a whole stream"));
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events
            .iter()
            .map(|event| serde_json::from_str(event).expect("JSON"))
            .collect()
    }

    /// The events of a stream that has names for them, which are the types of their data.
    pub async fn named_events(&self, path: &str, mut body: Value) -> Vec<(String, Value)> {
        body["stream"] = true.into();
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), StatusCode::OK, "{body}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        named(&response.text().await.expect("a whole stream"))
    }

    /// Waits until the server ends by itself.
    pub async fn wait(self) -> Result<()> {
        tokio::time::timeout(LONG, self.task)
            .await
            .expect("in time")
            .expect("no panic")
    }

    /// Stops the server as a signal would.
    pub async fn stop(self) -> Result<()> {
        self.stop.send(()).expect("still serving");
        tokio::time::timeout(LONG, self.task)
            .await
            .expect("in time")
            .expect("no panic")
    }

    /// Waits until the engine is idle, and checks its invariants.
    pub async fn idle(&self) {
        let engine = self.engine.clone();
        let check = tokio::task::spawn_blocking(move || assert_idle(&engine));
        check.await.expect("idle");
    }

    /// Checks that nothing is left behind, and stops.
    pub async fn done(self) {
        self.idle().await;
        self.stop().await.expect("an orderly end");
    }
}

/// Waits until `holds`.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LONG, "still not: {what}");
        tokio::time::sleep(STEP / 5).await;
    }
}

pub fn events(body: &str) -> Vec<String> {
    let events = body
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    events.map(str::to_owned).collect()
}

/// The events of a stream that has names for them, which are the types of their data.
pub fn named(stream: &str) -> Vec<(String, Value)> {
    let read = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("a name");
        let data = data.strip_prefix("data: ").expect("data");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    stream.split_terminator("\n\n").map(read).collect()
}

pub async fn error(response: Response, status: u16, code: &str) -> Value {
    assert_eq!(response.status().as_u16(), status);
    let body: Value = response.json().await.expect("JSON");
    let error = &body["error"];
    assert_eq!(error["code"], code, "{body}");
    assert!(
        error["message"].is_string() && error["type"].is_string(),
        "{body}"
    );
    assert_eq!(error.as_object().map(Map::len), Some(4), "{body}");
    error.clone()
}

/// The text and the finish reason of choice `index`, collected from chunks.
pub fn joined(chunks: &[Value], index: usize) -> (String, Value) {
    let mut text = String::new();
    let mut finish = Value::Null;
    for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
        if choice["index"] == index {
            assert_eq!(finish, Value::Null, "nothing comes after the end");
            let part = choice["text"]
                .as_str()
                .or(choice["delta"]["content"].as_str());
            text.push_str(part.unwrap_or_default());
            finish = choice["finish_reason"].clone();
        }
    }
    (text, finish)
}

pub fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}
