//! Adapters over HTTP: models of their own, loaded and unloaded while the server runs.

use crate::architectures::fixture;
use crate::common::server::{LONG, Server, error};
use crate::common::tiny_folder::{byte_level, tiny_adapter, tiny_folder};
use crate::common::{assert_has, process};
use crate::common::{greedy, reference};
use crate::lora::{adapter, adapter_folder};
use foretoken::engine::{self, EngineOptions};
use foretoken::http::{AdapterLimits, Adapters, AppState};
use foretoken::model::{EmbeddingSpec, Pooling};
use serde_json::{Value, json};
use std::sync::Arc;

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

/// A server over the fixture, with the adapter `one`, at most two, and a key if one is given.
async fn server(may_update: bool, key: Option<&str>) -> Server {
    let model = fixture("llama").open();
    let limits = AdapterLimits {
        max_loras: 2,
        max_rank: 4,
        may_update,
    };
    let adapters = Adapters::new(
        Arc::new(model.lora_target().expect("takes adapters").clone()),
        limits,
    );
    let folder = adapter_folder("llama-all");
    adapters.load("one", &folder, false, &[]).expect("loads");
    let options = EngineOptions {
        max_loras: 2,
        ..EngineOptions::default()
    };
    let engine = engine::spawn(model, None, 64, 4, options).expect("starts");
    let keys = key.map(String::from).into_iter().collect();
    let configure = |state: AppState| {
        let spec = EmbeddingSpec::new(Pooling::Last, true);
        let state = state.with_adapters(Some(Arc::new(adapters)));
        state.with_embeddings(Some(spec)).with_api_keys(keys)
    };
    Server::over(engine, configure).await
}

const PROMPT: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 5];

fn body(model: &str) -> Value {
    json!({
        "model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_token_ids": true
    })
}

/// The ids that the server generates.
async fn ids(server: &Server, model: &str) -> Vec<u32> {
    let reply = server.json("/v1/completions", &body(model)).await;
    assert_eq!(
        reply["model"],
        if model == "org/alias" { "toy" } else { model }
    );
    let ids = reply["choices"][0]["token_ids"].clone();
    serde_json::from_value(ids).expect("ids")
}

/// What is generated with the adapter, from scratch.
fn wanted(name: Option<&str>) -> Vec<u32> {
    let mut model = fixture("llama").open();
    let mut request = greedy(&PROMPT, 8);
    request.params.ignore_eos = true;
    request.adapter = name.map(|name| adapter(&*model, name));
    reference(&mut *model, &request)
}

fn path(name: &str) -> String {
    adapter_folder(name).to_string_lossy().into_owned()
}

#[tokio::test]
async fn the_field_model_chooses_the_adapter() {
    let server = server(false, None).await;
    let [base, one] = [None, Some("llama-all")].map(wanted);
    assert_ne!(base, one);
    let (as_base, as_one) = tokio::join!(ids(&server, "toy"), ids(&server, "one"));
    assert_eq!((as_base, as_one), (base.clone(), one));
    assert_eq!(ids(&server, "org/alias").await, base);
    let missing = server.post("/v1/completions", &body("two")).await;
    let missing = error(missing, 404, "model_not_found").await;
    let message = missing["message"].as_str().expect("a text");
    assert!(
        message.ends_with("served: toy, org/alias, one"),
        "{message}"
    );

    // All other APIs.
    let ask =
        json!({"model": "one", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3});
    for (api, body) in [
        ("/v1/chat/completions", ask.clone()),
        ("/v1/messages", ask),
        (
            "/v1/responses",
            json!({"model": "one", "input": "a", "max_output_tokens": 3}),
        ),
    ] {
        assert_eq!(server.json(api, &body).await["model"], "one", "{api}");
    }
    // A search with one beam is greedy.
    for (model, adapter) in [("toy", None), ("one", Some("llama-all"))] {
        let mut asked = body(model);
        asked["use_beam_search"] = true.into();
        let reply = server.json("/v1/completions", &asked).await;
        assert_eq!(reply["choices"][0]["token_ids"], json!(wanted(adapter)));
    }
    let chunks = server.stream("/v1/completions", body("one")).await;
    assert!(chunks.iter().all(|chunk| chunk["model"] == "one"));
    let embedding = async |model: &str| {
        let body = json!({"model": model, "input": PROMPT});
        let reply = server.json("/v1/embeddings", &body).await;
        assert_eq!(reply["model"], model);
        reply["data"][0]["embedding"].clone()
    };
    assert_ne!(embedding("toy").await, embedding("one").await);
    server
        .json("/tokenize", &json!({"model": "one", "prompt": "a"}))
        .await;
    server.done().await;
}

#[tokio::test]
async fn adapters_are_listed_with_their_base() {
    let server = server(false, None).await;
    let list = server.read("/v1/models").await;
    let data = list["data"].as_array().expect("a list");
    let of = |key: &str| data.iter().map(|one| one[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("id"), ["toy", "org/alias", "one"]);
    assert_eq!(of("parent"), [Value::Null, Value::Null, "toy".into()]);
    assert_eq!(data[2]["root"], path("llama-all"));
    let one = server.read("/v1/models/one").await;
    assert_eq!(one, data[2]);
    error(server.get("/v1/models/two").await, 404, "model_not_found").await;
    let document = server.read("/openapi.json").await;
    let schema = &document["components"]["schemas"]["CompletionRequest"];
    let names = &schema["properties"]["model"]["enum"];
    let all = json!([
        "toy",
        "toy:latest",
        "org/alias",
        "org/alias:latest",
        "one",
        "one:latest",
        null
    ]);
    assert_eq!(*names, all);
    server.done().await;
}

#[tokio::test]
async fn adapters_come_and_go_while_the_server_runs() {
    let server = server(true, None).await;
    let load = json!({"lora_name": "org/two", "lora_path": path("llama-some")});
    let said = server.post(LOAD, &load).await;
    assert_eq!(said.status(), 200);
    let said = said.text().await.expect("a text");
    assert_eq!(said, "Success: LoRA adapter 'org/two' added successfully.");
    assert_eq!(ids(&server, "org/two").await, wanted(Some("llama-some")));

    let again = server.refused(LOAD, &load).await;
    let message = again["message"].as_str().expect("a text");
    assert_has(message, &["has already been loaded", "load_inplace"]);
    let mut third = load.clone();
    third["lora_name"] = "three".into();
    let full = server.refused(LOAD, &third).await;
    assert!(
        full["message"]
            .as_str()
            .is_some_and(|text| text.contains("--max-loras")),
        "{full}"
    );
    // The other one under the same name: no prefix of the first is found, which would be found for itself.
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    let again = server.json("/v1/completions", &body("org/two")).await;
    assert_eq!(cached(&again), 8, "{again}");
    let in_place =
        json!({"lora_name": "org/two", "lora_path": path("llama-all"), "load_inplace": true});
    assert_eq!(server.post(LOAD, &in_place).await.status(), 200);
    let reply = server.json("/v1/completions", &body("org/two")).await;
    let expected = json!(wanted(Some("llama-all")));
    assert_eq!(reply["choices"][0]["token_ids"], expected);
    assert_eq!(cached(&reply), 0, "{reply}");

    let unload = json!({"lora_name": "org/two"});
    let said = server
        .post(UNLOAD, &unload)
        .await
        .text()
        .await
        .expect("a text");
    let want = "Success: LoRA adapter 'org/two' removed successfully.";
    assert_eq!(said, want);
    let gone = error(server.post(UNLOAD, &unload).await, 404, "not_found").await;
    assert_eq!(
        gone["message"],
        "The lora adapter 'org/two' cannot be found."
    );
    error(
        server.post("/v1/completions", &body("org/two")).await,
        404,
        "model_not_found",
    )
    .await;
    assert_eq!(ids(&server, "one").await, wanted(Some("llama-all")));
    server.done().await;
}

#[tokio::test]
async fn a_request_outlives_its_adapter() {
    let server = server(true, None).await;
    let mut long = body("one");
    long["max_tokens"] = 60.into();
    let whole = server.json("/v1/completions", &long).await;
    long["stream"] = true.into();
    let streamed = server.post("/v1/completions", &long).await;
    let unload = json!({"lora_name": "one"});
    assert_eq!(server.post(UNLOAD, &unload).await.status(), 200);
    let text = streamed.text().await.expect("a whole stream");
    let mut ids = Vec::new();
    for event in crate::common::server::events(&text) {
        let Ok(chunk) = serde_json::from_str::<Value>(&event) else {
            continue;
        };
        ids.extend(
            chunk["choices"][0]["token_ids"]
                .as_array()
                .cloned()
                .unwrap_or_default(),
        );
    }
    assert_eq!(Value::from(ids), whole["choices"][0]["token_ids"]);
    server.done().await;
}

#[tokio::test]
async fn wrong_loads_are_refused_by_name() {
    let server = server(true, None).await;
    let some = path("llama-some");
    let long = "a".repeat(201);
    let names = ["../a", "/etc", "a,b", "", "a\nb", &*long]
        .map(|name| (json!(name), "must have 1 to 200 bytes"));
    let names = names.into_iter().chain([
        (json!("toy"), "the base model's"),
        (Value::Null, "required"),
        (json!(3), "string"),
    ]);
    let folders = [
        (json!("/nowhere"), "adapter_config.json"),
        (
            json!(path("qwen2-rslora/adapter_config.json")),
            "adapter_config.json",
        ),
        (json!(path("glm-fused")), "gate_up_proj"),
        (Value::Null, "required"),
    ];
    let names = names.map(|(name, needle)| (name, json!(some), "lora_name", needle));
    let folders = folders.map(|(folder, needle)| (json!("a"), folder, "lora_path", needle));
    for (name, folder, param, needle) in names.chain(folders) {
        let body = json!({"lora_name": name, "lora_path": folder});
        let wrong = server.refused(LOAD, &body).await;
        assert_eq!(wrong["param"], param, "{wrong}");
        let message = wrong["message"].as_str().expect("a text");
        assert!(message.contains(needle), "{needle}: {message}");
    }
    let list = server.read("/v1/models").await;
    assert_eq!(list["data"].as_array().map(Vec::len), Some(3));
    server.done().await;
}

#[tokio::test]
async fn only_who_may_changes_adapters() {
    let closed = server(false, None).await;
    for route in [LOAD, UNLOAD] {
        let body = json!({"lora_name": "one", "lora_path": path("llama-some")});
        let refused = error(closed.post(route, &body).await, 404, "not_found").await;
        let message = refused["message"].as_str().expect("a text");
        assert_has(message, &["--allow-runtime-lora-updating"]);
    }
    closed.done().await;
    let keyed = server(true, Some("secret")).await;
    let body = json!({"lora_name": "one"});
    error(keyed.post(UNLOAD, &body).await, 401, "invalid_api_key").await;
    error(keyed.post(LOAD, &body).await, 401, "invalid_api_key").await;
    let request = keyed.client.post(keyed.url.clone() + UNLOAD).json(&body);
    let sent = request
        .bearer_auth("secret")
        .send()
        .await
        .expect("an answer");
    assert_eq!(sent.status(), 200);
    keyed.done().await;
}

#[tokio::test]
async fn the_metric_names_the_adapters_in_use() {
    let server = server(false, None).await;
    let sample = async || {
        let text = server.get("/metrics").await.text().await.expect("a text");
        let mut lines = text
            .lines()
            .filter(|line| line.starts_with("foretoken:lora_requests_info{"));
        let line = lines.next().expect("a sample").to_owned();
        assert_eq!(lines.next(), None);
        line
    };
    let has = |line: &str, running: &str| {
        line.contains("max_lora=\"2\"")
            && line.contains(&format!("running_lora_adapters=\"{running}\""))
    };
    let idle = sample().await;
    assert!(
        has(&idle, "") && idle.contains("waiting_lora_adapters=\"\""),
        "{idle}"
    );
    let mut long = body("one");
    long["max_tokens"] = 110.into();
    long["stream"] = true.into();
    let until = std::time::Instant::now() + LONG;
    loop {
        // Another one, if nobody looked before it had ended.
        let stream = server.post("/v1/completions", &long).await;
        let line = sample().await;
        stream.text().await.expect("a whole stream");
        if has(&line, "one") {
            let seconds: f64 = line
                .rsplit(' ')
                .next()
                .and_then(|text| text.parse().ok())
                .expect("a number");
            assert!(seconds > 1.7e9, "{line}");
            break;
        }
        assert!(std::time::Instant::now() < until, "{line}");
    }
    server.idle().await;
    assert!(has(&sample().await, ""));
    server.done().await;
}

/// As an operator runs it.
#[test]
fn the_program_serves_adapters() {
    let (folder, adapter) = (tiny_folder(byte_level()), tiny_adapter());
    let (model, path) = (folder.path().display(), adapter.path().display());
    let flags = format!("--model {model} --served-model-name tiny --device cpu");
    let mut server = process::Server::start(&format!("{flags} --lora-modules a={path} b={path}"));
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0});
        let json = server.json("/v1/completions", &body);
        json["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let [base, a, b] = ["tiny", "a", "b"].map(ask);
    assert!(a == b && a != base, "{base:?} {a:?} {b:?}");
    assert!(server.get("/v1/models").contains("\"parent\":\"tiny\""));
    server.stop("TERM", LONG);

    let refused = |more: &str| {
        let output = process::foretoken()
            .args(format!("{flags} --port 0 {more}").split_whitespace())
            .output()
            .unwrap();
        let text = process::refusal(&output);
        assert_eq!(
            text.lines()
                .filter(|line| line.starts_with("error: "))
                .count(),
            1,
            "{text}"
        );
        text
    };
    let text = refused(&format!("--lora-modules a={path} --max-lora-rank 1"));
    assert_has(&text, &["--lora-modules a: ", "raise --max-lora-rank"]);
    let text = refused("--lora-modules a=org/adapter");
    assert!(text.contains("org/adapter is no folder"), "{text}");
    let text = refused(&format!("--lora-modules tiny={path}"));
    assert!(text.contains("the base model's"), "{text}");
    let text = refused(&format!("--lora-modules a={path} a={path}"));
    assert!(text.contains("already been loaded"), "{text}");
}
