//! `/v1/embeddings`: forms of input and output, refusals, and limits.

use crate::common::refusals::{merge, parsed, rows};
use crate::common::server::{LONG, Server, error, slow, until};
use crate::common::tiny::open;
use crate::embeddings::folder;
use foretoken::engine::{self, EngineOptions};
use foretoken::model::{EmbeddingSpec, Pooling};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/embeddings";
/// Values of an embedding.
const SIZE: usize = 48;

/// A server over the model of the fixture, with the tokenizer of the tests' servers: letters from `a` are ids
/// from 0.
async fn server(options: EngineOptions, spec: Option<EmbeddingSpec>) -> Server {
    let engine = engine::spawn(open(&folder()).expect("opens"), None, 64, 4, options);
    Server::over(engine.expect("starts"), |s| s.with_embeddings(spec)).await
}

async fn normalized() -> Server {
    let spec = EmbeddingSpec::new(Pooling::Last, true);
    server(EngineOptions::default(), Some(spec)).await
}

fn values(one: &Value) -> Vec<f32> {
    serde_json::from_value(one["embedding"].clone()).expect("numbers")
}

fn length(values: &[f32]) -> f32 {
    values.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[tokio::test]
async fn all_forms_of_input_are_embedded_alike() {
    let server = normalized().await;
    let ask = async |input: Value| {
        server
            .json(PATH, &json!({"input": input, "model": "toy"}))
            .await
    };
    let reply = ask(json!(["abc", "b"])).await;
    assert_eq!(reply["object"], "list");
    assert_eq!(reply["model"], "toy");
    let expected = json!({"prompt_tokens": 4, "total_tokens": 4});
    assert_eq!(reply["usage"], expected);
    let data = reply["data"].as_array().expect("a list");
    for (index, one) in data.iter().enumerate() {
        assert_eq!(one["object"], "embedding");
        assert_eq!(one["index"], json!(index));
        let values = values(one);
        assert_eq!(values.len(), SIZE);
        assert!((length(&values) - 1.0).abs() < 1e-5);
    }
    assert_ne!(data[0]["embedding"], data[1]["embedding"]);
    assert_eq!(ask(json!([[0, 1, 2], [1]])).await["data"], reply["data"]);
    for (one, input) in [
        (0, json!("abc")),
        (0, json!([0, 1.0, 2])),
        (1, json!("b")),
        (1, json!([1])),
    ] {
        let single = ask(input).await;
        assert_eq!(single["data"][0]["embedding"], data[one]["embedding"]);
    }
    // Without the prefix, and beside others.
    let short = server.json("/embeddings/", &json!({"input": "b"})).await;
    assert_eq!(short["data"][0]["embedding"], data[1]["embedding"]);
    server.idle().await;
}

#[tokio::test]
async fn base64_has_the_bits_and_dimensions_are_cut_and_normalized() {
    use base64::prelude::{BASE64_STANDARD, Engine as _};
    let server = normalized().await;
    let ask = async |more: Value| {
        let mut body = json!({"input": "hello"});
        merge(&mut body, &more);
        server.json(PATH, &body).await["data"][0].clone()
    };
    let whole = values(&ask(json!({"encoding_format": "float", "user": "me"})).await);
    let coded = ask(json!({"encoding_format": "base64"})).await;
    let bytes = BASE64_STANDARD
        .decode(coded["embedding"].as_str().expect("text"))
        .expect("base64");
    let coded: Vec<f32> = bytes
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().expect("4")))
        .collect();
    assert_eq!(coded, whole);
    let cut = values(&ask(json!({"dimensions": 7})).await);
    assert_eq!(cut.len(), 7);
    let scale = length(&whole[..7]);
    assert!(
        cut.iter()
            .zip(&whole)
            .all(|(cut, x)| (cut - x / scale).abs() < 1e-6)
    );
    for all in [0, SIZE] {
        assert_eq!(values(&ask(json!({"dimensions": all})).await), whole);
    }

    let raw = values(&ask(json!({"normalize": false})).await);
    let scale = length(&raw);
    assert!((scale - 1.0).abs() > 0.1, "{scale}");
    let near = |(raw, x): (&f32, &f32)| (raw / scale - x).abs() < 1e-6;
    assert!(raw.iter().zip(&whole).all(near));

    let raw = EmbeddingSpec::new(Pooling::Mean, false);
    let raw = self::server(EngineOptions::default(), Some(raw)).await;
    let reply = raw.json(PATH, &json!({"input": "hello"})).await;
    assert!((length(&values(&reply["data"][0])) - 1.0).abs() > 0.1);
    let body = json!({"input": "hello", "normalize": true});
    let reply = raw.json(PATH, &body).await;
    assert!((length(&values(&reply["data"][0])) - 1.0).abs() < 1e-5);
}

/// Bodies, the field that an error names, and what it says.
const REFUSED: &str = r#"
{} | input | input is required
{"input": null} | input | input is required
{"input": 5} | input | expected a string, a list of strings
{"input": [[1], "a"]} | input | expected a string, a list of strings
{"input": ""} | input | input 0 (from 0) must not be empty
{"input": ["a", ""]} | input | input 1 (from 0) must not be empty
{"input": []} | input | 1 to 2048
{"input": [[]]} | input | input 0 (from 0) must not be empty
{"input": [[1], [257]]} | input | input 1 (from 0): token id 257 is not in the vocabulary
{"input": [[100000]]} | input | check_embedding_ctx_length=False
{"input": "a", "dimensions": 49} | dimensions | between 1 and 48
{"input": "a", "dimensions": "x"} | dimensions | expected
{"input": "a", "encoding_format": "int8"} | encoding_format | expected
{"input": "a", "truncate": "MIDDLE"} | truncate | expected
{"input": "a", "truncate": "END", "truncate_prompt_tokens": 3} | truncate | beside truncate_prompt_tokens
{"input": "a", "prompt_name": "query"} | prompt_name | the model has none: leave it out
{"input": "a", "truncate_prompt_tokens": 300} | truncate_prompt_tokens | between 1 and 256, or -1
{"input": "a", "cache_salt": ""} | cache_salt | 1 to 1024 bytes
"#;

#[tokio::test]
async fn bad_input_is_refused_by_name() {
    let server = normalized().await;
    let long = "ab".repeat(200);
    let many = [
        (
            json!({"input": vec!["a"; 2049]}),
            "1 to 2048 texts or lists of token ids, not 2049",
        ),
        (
            json!({"input": vec![vec![1; 200]; 2000]}),
            "at most 300000 tokens in all",
        ),
    ];
    let many = many.map(|(body, why)| (body, "input", why));
    let all = rows::<3>(REFUSED).map(|[body, param, why]| (parsed(body), param, why));
    for (body, param, why) in all.chain(many) {
        let error = server.refused(PATH, &body).await;
        let message = error["message"].as_str().expect("text");
        assert!(
            error["param"] == param && message.contains(why),
            "{why}: {error}"
        );
        assert!(message.len() < 500, "{message}");
    }
    for input in [json!([["a"], [long]]), json!([long]), json!([0, 1])] {
        // The last one fits.
        let reply = server.post(PATH, &json!({"input": input})).await;
        assert_eq!(reply.status().is_success(), input == json!([0, 1]));
    }
    let reply = server.post(PATH, &json!({"input": ["a", long]})).await;
    let error = error(reply, 400, "context_length_exceeded").await;
    assert_eq!(error["param"], "input");
    let unknown = server
        .post(PATH, &json!({"input": "a", "model": "x"}))
        .await;
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
    // All positions may be used: nothing is generated.
    let whole = vec![3; 256];
    let reply = server.json(PATH, &json!({"input": whole})).await;
    assert_eq!(reply["usage"]["prompt_tokens"], 256);
    let text = server
        .post("/v1/completions", &json!({"prompt": "a"}))
        .await;
    assert_eq!(text.status(), StatusCode::BAD_REQUEST);
    server.idle().await;

    let plain = Server::start().await;
    let reply = plain.post(PATH, &json!({"input": "a"})).await;
    assert_eq!(reply.status(), StatusCode::BAD_REQUEST);
    assert!(reply.text().await.expect("text").contains("--pooling last"));
}

/// More inputs than the queue holds are queued in turn.
#[tokio::test]
async fn many_inputs_fit_a_short_queue_and_leave_with_their_client() {
    let options = EngineOptions {
        max_waiting: 8,
        ..EngineOptions::default()
    };
    let spec = EmbeddingSpec::new(Pooling::Mean, true);
    let server = server(options, Some(spec.clone())).await;
    let inputs: Vec<Vec<u32>> = (0..300).map(|i| vec![i % 250, i / 250]).collect();
    let reply = server.json(PATH, &json!({"input": inputs})).await;
    let data = reply["data"].as_array().expect("a list");
    assert_eq!(data.len(), 300);
    for i in [0, 7, 8, 299] {
        let alone = server.json(PATH, &json!({"input": inputs[i]})).await;
        assert_eq!(alone["data"][0]["embedding"], data[i]["embedding"]);
    }
    server.idle().await;

    // Whose client leaves is cancelled.
    let options = EngineOptions {
        max_waiting: 8,
        ..EngineOptions::default()
    };
    let server = Server::over(slow(options, None), |s| s.with_embeddings(Some(spec))).await;
    let body = json!({"input": vec![vec![5; 100]; 2000]});
    let request = server.client.post(server.url.clone() + PATH).json(&body);
    let stats = server.engine.stats();
    let ended = |reason| stats.requests_finished.with_label_values(&[reason]).get();
    let request = tokio::spawn(request.send());
    // It leaves in the middle of them, however slow this machine is.
    while ended("stop") == 0 {
        assert!(!request.is_finished(), "it has ended");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    request.abort();
    // Between two waves the engine is idle, too: only the load tells when the server has noticed.
    let left = Instant::now();
    loop {
        let reply = server.get("/load").await.json::<Value>().await;
        if reply.expect("JSON")["server_load"] == 0 {
            break;
        }
        assert!(left.elapsed() < LONG, "the client is gone");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.idle().await;
    let (done, aborted) = (ended("stop"), ended("abort"));
    assert!(
        (1..2000).contains(&done) && aborted <= 4,
        "{done}, {aborted}"
    );
}

/// Inputs that wait for their turn are embedded by a server that shuts down.
#[tokio::test]
async fn many_inputs_are_finished_while_the_server_shuts_down() {
    let options = EngineOptions {
        max_waiting: 2,
        ..EngineOptions::default()
    };
    let spec = EmbeddingSpec::new(Pooling::Mean, true);
    let server = Server::over(slow(options, None), |s| s.with_embeddings(Some(spec))).await;
    let stats = server.engine.stats().clone();
    let body = json!({"input": vec![vec![5; 10]; 40]});
    let request = server.client.post(server.url.clone() + PATH).json(&body);
    let request = tokio::spawn(request.send());
    let done = stats.requests_finished.with_label_values(&["stop"]);
    until("it has begun", || done.get() > 0).await;
    server.stop().await.expect("an orderly end");
    let reply = request.await.expect("no panic").expect("an answer");
    assert_eq!(reply.status(), StatusCode::OK);
    let reply: Value = reply.json().await.expect("JSON");
    assert_eq!(reply["data"].as_array().expect("a list").len(), 40);
}

/// As vLLM has it, the last tokens are kept; of a model with `max_seq_length` never more than those.
#[tokio::test]
async fn inputs_are_bounded_cut_off_and_prompted() {
    let long = "ab".repeat(200);
    let input = json!([long, "abc"]);
    let first = async |server: &Server, body: Value| {
        let reply = server.json(PATH, &body).await;
        let used = reply["usage"]["prompt_tokens"].as_u64().expect("a number");
        (values(&reply["data"][0]), used)
    };
    let server = normalized().await;
    let tail = first(&server, json!({"input": "bab"})).await.0;
    let cut = json!({"input": input, "truncate_prompt_tokens": 3});
    assert_eq!(first(&server, cut).await, (tail.clone(), 6));
    let all = json!({"input": input, "truncate_prompt_tokens": -1});
    assert_eq!(first(&server, all).await.1, 256 + 3);
    let ids = json!({"input": [5, 1, 0, 1], "truncate_prompt_tokens": 3});
    assert_eq!(first(&server, ids).await, (tail.clone(), 3));

    let spec = EmbeddingSpec {
        max_tokens: Some(4),
        prompt: Some("b".into()),
        ..EmbeddingSpec::new(Pooling::Last, true)
    };
    let server = self::server(EngineOptions::default(), Some(spec)).await;
    // Texts get the prompt, and ids do not.
    assert_eq!(
        first(&server, json!({"input": "ab"})).await,
        (tail.clone(), 3)
    );
    let ids = json!({"input": [1, 0, 1]});
    assert_eq!(first(&server, ids).await, (tail.clone(), 3));
    let ends = json!({"input": [0, 1, 0, 1]});
    let starts = json!({"input": [1, 0, 0, 0]});
    for (field, value, kept) in [
        ("truncate_prompt_tokens", json!(-1), &ends),
        ("truncate_prompt_tokens", json!(9), &ends),
        ("truncate_prompt_tokens", json!(4), &ends),
        ("truncate", json!("START"), &ends),
        ("truncate", json!("END"), &starts),
    ] {
        let body = json!({"input": "aaabab", field: value});
        let found = first(&server, body).await;
        assert_eq!(found, first(&server, kept.clone()).await, "{field} {value}");
    }
    for truncate in [Value::Null, json!("NONE")] {
        let body = json!({"input": ["a", "abab"], "truncate": truncate});
        let reply = server.post(PATH, &body).await;
        assert_eq!(reply.status(), StatusCode::BAD_REQUEST);
        let error = reply.json::<Value>().await.expect("JSON")["error"].clone();
        let message = error["message"].as_str().expect("text");
        let why = "input 1 (from 0) has 5 tokens, but max_seq_length of this model is 4";
        assert!(
            error["param"] == "input" && message.contains(why),
            "{error}"
        );
    }
}

/// `input_type`, as clients of NIM and Cohere send it, or the name of a prompt, as sentence-transformers has it.
#[tokio::test]
async fn requests_choose_among_the_prompts_of_the_model() {
    let prompts = [("query", "b"), ("passage", "c")];
    let spec = EmbeddingSpec {
        prompt: Some("b".into()),
        prompts: (prompts.map(|(name, prompt)| (name.to_owned(), prompt.to_owned()))).into(),
        ..EmbeddingSpec::new(Pooling::Last, true)
    };
    let server = self::server(EngineOptions::default(), Some(spec)).await;
    let embed = async |body: Value| {
        let reply = server.json(PATH, &body).await;
        (values(&reply["data"][0]), reply["usage"].clone())
    };
    let query = embed(json!({"input": [1, 0]})).await;
    let passage = embed(json!({"input": [2, 0]})).await;
    assert_ne!(query, passage);
    for (field, name, wanted) in [
        ("input_type", "", &query),
        ("input_type", "query", &query),
        ("input_type", "search_query", &query),
        ("input_type", "passage", &passage),
        ("input_type", "search_document", &passage),
        ("prompt_name", "passage", &passage),
    ] {
        let found = embed(json!({"input": "a", field: name})).await;
        assert_eq!(&found, wanted, "{field} {name}");
    }
    let known = "those of the model are passage, query";
    for (body, param, why) in [
        (
            json!({"input": "a", "input_type": "clustering"}),
            "input_type",
            known,
        ),
        (
            json!({"input": "a", "prompt_name": "document"}),
            "prompt_name",
            known,
        ),
        (
            json!({"input": [0], "input_type": "query"}),
            "input_type",
            "not before token ids",
        ),
        (
            json!({"input": "a", "input_type": "query", "prompt_name": "query"}),
            "prompt_name",
            "beside input_type",
        ),
    ] {
        let error = server.refused(PATH, &body).await;
        let message = error["message"].as_str().expect("text");
        assert!(error["param"] == param && message.contains(why), "{error}");
    }
    // Without prompts, all kinds of texts are alike.
    let plain = normalized().await;
    let bodies =
        ["query", "passage", "clustering"].map(|kind| json!({"input": "ba", "input_type": kind}));
    for body in bodies {
        let reply = plain.json(PATH, &body).await;
        assert_eq!(values(&reply["data"][0]), query.0);
    }
}

/// `/embed` of Text Embeddings Inference has the vectors alone.
#[tokio::test]
async fn clients_of_text_embeddings_inference_get_lists_of_vectors() {
    let server = normalized().await;
    let long = "ab".repeat(200);
    let vector = async |input: Value| {
        let reply = server.json(PATH, &json!({"input": input})).await;
        reply["data"][0]["embedding"].clone()
    };
    let (short, other) = (vector(json!("abc")).await, vector(json!("b")).await);
    let body = json!({"inputs": ["abc", "b"], "truncate": true, "model": "toy"});
    assert_eq!(server.json("/embed", &body).await, json!([short, other]));
    let one = server.json("/embed", &json!({"inputs": "abc"})).await;
    assert_eq!(one, json!([short]));
    for (side, kept) in [("Right", &long[..256]), ("left", &long[long.len() - 256..])] {
        let body = json!({"inputs": long, "truncate": true, "truncation_direction": side});
        let found = server.json("/embed", &body).await;
        assert_eq!(found[0], vector(json!(kept)).await, "{side}");
    }
    for (body, code, param) in [
        (json!({"inputs": long}), "context_length_exceeded", "inputs"),
        (json!({"input": "a"}), "invalid_value", "input"),
        (json!({}), "invalid_value", "inputs"),
        (json!({"inputs": ""}), "invalid_value", "inputs"),
        (
            json!({"inputs": "a", "prompt_name": "x"}),
            "invalid_value",
            "prompt_name",
        ),
    ] {
        let error = error(server.post("/embed", &body).await, 400, code).await;
        assert_eq!(error["param"], param, "{error}");
    }
    let info = server.read("/info").await;
    for (key, value) in [
        ("model_id", json!("toy")),
        ("served_model_name", json!("toy")),
        ("model_sha", Value::Null),
        (
            "model_type",
            json!({"embedding": {"pooling": "last_token"}}),
        ),
        ("max_concurrent_requests", json!(64)),
        ("max_input_length", json!(256)),
        ("max_client_batch_size", json!(2048)),
        ("auto_truncate", json!(false)),
        ("version", json!(env!("CARGO_PKG_VERSION"))),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
}
