//! What the server says of itself: its load, its model, its names, its tokenizer.

use crate::common::server::{EOS, LONG, Server, error, greedy, held};
use crate::common::{Guess, MAX_LEN, Toy, VOCAB};
use foretoken::http::{AppState, ModelFiles, ServerInfo};
use reqwest::Method;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn info() -> ServerInfo {
    ServerInfo {
        model: "org/toy".into(),
        device: "cpu".into(),
        fingerprint: Some("fp_1".into()),
        drafter: Some(("tables".into(), 4)),
        acceptance: "coupled".into(),
        block_size: 4,
        num_blocks: 256,
        prefix_caching: true,
        prefix_cache_disk_size: None,
        max_num_seqs: 64,
        max_num_batched_tokens: 2048,
        files: ModelFiles::default(),
    }
}

#[tokio::test]
async fn balancers_can_ask_without_a_key() {
    let keyed = |s: AppState| s.with_api_keys(vec!["secret".into()]);
    let server = Server::over(Toy::default().start(), keyed).await;
    for method in [Method::GET, Method::POST] {
        let request = server.client.request(method, server.url.clone() + "/ping");
        assert_eq!(request.send().await.unwrap().status(), 200);
    }
    assert_eq!(server.read("/load").await, json!({"server_load": 0}));
    for path in ["/server_info", "/tokenizer_info", "/v1/models"] {
        error(server.get(path).await, 401, "invalid_api_key").await;
    }
    server.engine.drain();
    error(server.get("/ping").await, 503, "shutting_down").await;
    server.stop().await.expect("an orderly end");
}

#[tokio::test]
async fn metrics_may_have_the_names_of_vllm() {
    let vllm = |state: AppState| state.with_metrics_prefix("vllm");
    let toy = Toy {
        guess: Guess::Toy(0.0),
        ..Toy::default()
    };
    let server = Server::over(toy.start(), vllm).await;
    server.json("/v1/completions", &greedy("abc", 20)).await;
    server.idle().await;
    let metrics = server.get("/metrics").await.text().await.unwrap();
    let has = |line: &str| metrics.lines().any(|found| found == line);
    for line in [
        "# TYPE vllm:time_to_first_token_seconds histogram",
        "vllm:num_requests_running{model_name=\"model\"} 0",
        "vllm:generation_tokens_total{model_name=\"model\"} 20",
        "foretoken:drafter_off{model_name=\"model\"} 0",
    ] {
        assert!(has(line), "{line}: {metrics}");
    }
    // As `vllm bench serve` looks for them.
    let drafts = metrics.lines().filter(|line| {
        let name = line.split('{').next().unwrap_or_default();
        name.starts_with("vllm:spec_decode") && name.contains("num_draft_tokens")
    });
    assert_eq!(drafts.count(), 1, "{metrics}");
    server.done().await;
}

#[tokio::test]
async fn the_load_is_the_number_of_requests_that_are_answered() {
    let (engine, is_held) = held();
    let server = Server::of(engine).await;
    let loads = async |wanted: u64| {
        let until = Instant::now() + LONG;
        loop {
            let load = server.read("/load").await["server_load"].clone();
            if load == wanted {
                break;
            }
            assert!(Instant::now() < until, "{load} is not {wanted}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let mut body = greedy("abc", 60);
    body["stream"] = true.into();
    let streams = [
        server.post("/v1/completions", &body).await,
        server.post("/v1/completions", &body).await,
    ];
    loads(2).await;
    let [first, second] = streams;
    drop(first);
    loads(1).await;
    is_held.store(false, Ordering::SeqCst);
    second.text().await.unwrap();
    loads(0).await;
    server.done().await;
}

#[tokio::test]
async fn the_server_says_what_it_serves_and_answers_bear_its_fingerprint() {
    let server = Server::over(Toy::default().start(), |s| s.with_info(info())).await;
    let told = server.read("/server_info").await;
    for (key, value) in [
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("model_path", json!("org/toy")),
        ("served_model_name", json!("toy")),
        ("tp_size", json!(1)),
        ("max_model_len", json!(MAX_LEN)),
        ("max_running_requests", json!(64)),
        ("max_total_num_tokens", json!(1024)),
    ] {
        assert_eq!(told[key], value, "{key}");
    }
    // vLLM's benchmark loads the tokenizer of this name.
    let models = server.read("/v1/models").await;
    for (i, name) in ["toy", "org/alias"].into_iter().enumerate() {
        let listed = &models["data"][i];
        assert_eq!(listed["id"], json!(name));
        assert_eq!(listed["root"], told["model_path"]);
    }
    let neither = server.get("/info").await;
    let neither = error(neither, 404, "not_found").await;
    let message = neither["message"].as_str().unwrap();
    assert!(message.contains("/server_info"), "{message}");
    let config = &told["vllm_config"];
    assert_eq!(config["cache_config"]["num_gpu_blocks"], 256);
    assert_eq!(config["speculative_config"]["num_speculative_tokens"], 4);

    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3});
    for (path, body) in [
        ("/v1/completions", greedy("abc", 3)),
        ("/v1/chat/completions", chat),
    ] {
        assert_eq!(server.json(path, &body).await["system_fingerprint"], "fp_1");
        let mut body = body;
        body["stream_options"] = json!({"include_usage": true});
        let chunks = server.stream(path, body).await;
        assert!(chunks.len() > 1);
        for chunk in chunks {
            assert_eq!(chunk["system_fingerprint"], "fp_1", "{chunk}");
        }
    }
    server.done().await;
}

/// As lm-eval's remote tokenizer asks.
#[tokio::test]
async fn a_client_can_render_chats_and_encode_them_itself() {
    let server = Server::start().await;
    let told = server.read("/tokenizer_info").await;
    assert_eq!(told["eos_token"], "<|end|>");
    assert_eq!(told["bos_token"], Value::Null);
    assert_eq!(told["pad_token"], Value::Null);
    assert!(
        told["chat_template"]
            .as_str()
            .unwrap()
            .contains("add_generation_prompt")
    );
    assert_eq!(told["vocab_size"], json!(VOCAB));
    assert_eq!(told["model_max_length"], json!(MAX_LEN));
    let body = json!({"prompt": told["eos_token"], "add_special_tokens": false});
    let tokens = server.json("/tokenize", &body).await["tokens"].clone();
    assert_eq!(tokens, json!([EOS]));
    let text = server.json("/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(text["prompt"], "<|end|>");
    server.done().await;
}

#[tokio::test]
async fn a_model_answers_to_all_its_names_and_calls_itself_by_the_first() {
    let server = Server::start().await;
    let models = server.read("/v1/models").await;
    let names: Vec<_> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(names, ["toy", "org/alias"]);
    for name in ["org/alias", "org/alias:latest"] {
        let path = format!("/v1/models/{name}");
        assert_eq!(server.read(&path).await["id"], "org/alias", "{name}");
    }
    let turn = json!([{"role": "user", "content": "hi"}]);
    // The tag is Ollama's, whose list has it.
    for name in [
        json!("toy"),
        json!("org/alias"),
        json!("toy:latest"),
        json!("org/alias:latest"),
        Value::Null,
    ] {
        for (path, body) in [
            ("/v1/completions", json!({"prompt": "a", "max_tokens": 2})),
            (
                "/v1/chat/completions",
                json!({"messages": turn, "max_tokens": 2}),
            ),
            (
                "/v1/responses",
                json!({"input": "hi", "max_output_tokens": 2}),
            ),
            ("/v1/messages", json!({"messages": turn, "max_tokens": 2})),
        ] {
            let mut body = body;
            body["model"] = name.clone();
            assert_eq!(
                server.json(path, &body).await["model"],
                "toy",
                "{path} {name}"
            );
        }
    }
    for name in ["toy:8b", "other:latest", ":latest"] {
        let body = json!({"model": name, "prompt": "a", "max_tokens": 2});
        let refused = server.post("/v1/completions", &body).await;
        let refused = error(refused, 404, "model_not_found").await;
        let message = refused["message"].as_str().unwrap();
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
    server.done().await;
}
