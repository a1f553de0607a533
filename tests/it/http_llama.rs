//! Routes of llama.cpp's server and of supervisors, and what there is in the place of other servers' routes.

use crate::common::refusals::{merge, parsed, rows};
use crate::common::scripted::{self, MAX_LEN, PLAIN, TEMPLATE, saying_as, scripted, tool};
use crate::common::server::{Server, error, events, greedy, held};
use foretoken::http::{AppState, SamplingDefaults, ServerInfo};
use foretoken::model::toy::ToyModel;
use foretoken::spec::NgramDrafter;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const INFILL: &str = "/infill";

#[tokio::test]
async fn clients_find_context_and_template_in_the_properties() {
    let defaults = SamplingDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        ..SamplingDefaults::default()
    };
    let info = ServerInfo {
        model: "org/model".into(),
        max_num_seqs: 7,
        ..ServerInfo::default()
    };
    let configure = |s: AppState| s.with_info(info).with_sampling_defaults(defaults);
    let server = saying_as("x", PLAIN, configure).await;
    let props = server.read("/props").await;
    let slot = &props["default_generation_settings"];
    assert_eq!(slot["n_ctx"], json!(MAX_LEN));
    for (key, value) in [
        ("temperature", json!(0.6)),
        ("top_k", json!(20)),
        ("top_p", json!(1.0)),
        ("n_predict", json!(-1)),
    ] {
        assert_eq!(slot["params"][key], value, "{key}");
    }
    for (key, value) in [
        ("total_slots", json!(7)),
        ("model_path", json!("org/model")),
        ("model_alias", json!("toy")),
        ("chat_template", json!(PLAIN)),
        ("eos_token", json!("<|im_end|>")),
        ("modalities", json!({"vision": false, "audio": false})),
    ] {
        assert_eq!(props[key], value, "{key}");
    }
    server.done().await;
}

#[tokio::test]
async fn a_chat_is_rendered_as_it_would_be_answered() {
    for literal in [false, true] {
        let configure = |s: AppState| s.with_special_parsed(!literal).expect("bytes");
        let server = saying_as("x", TEMPLATE, configure).await;
        // With fields that say how it is answered.
        let chat = json!({
            "messages": [{"role": "user", "content": "Hi <|im_end|>"}],
            "tools": [tool("now", json!({}))],
            "chat_template_kwargs": {"enable_thinking": true},
            "temperature": 0.5, "stream": true,
        });
        let prompt = server.json("/apply-template", &chat).await["prompt"].clone();
        let text = prompt.as_str().expect("text");
        assert!(
            text.ends_with("user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n<think>\n"),
            "{text}"
        );
        assert!(text.contains("\"name\": \"now\""), "{text}");
        if !literal {
            let body = json!({"prompt": prompt, "add_special_tokens": false});
            let alone = server.json("/tokenize", &body).await;
            let mut whole = chat.clone();
            for name in ["temperature", "stream"] {
                whole.as_object_mut().expect("one").remove(name);
            }
            assert_eq!(
                server.json("/tokenize", &whole).await["tokens"],
                alone["tokens"]
            );
        }
        for (body, param) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (
                json!({"messages": [{"role": "tool", "content": "x"}]}),
                "messages[0].tool_call_id",
            ),
        ] {
            let refused = server.post("/apply-template", &body).await;
            assert_eq!(error(refused, 400, "invalid_value").await["param"], param);
        }
        server.done().await;
    }
}

#[tokio::test]
async fn supervisors_ask_without_a_key() {
    let keyed = |s: AppState| s.with_api_keys(vec!["secret".into()]);
    let (engine, is_held) = held();
    let server = Server::over(engine, keyed).await;
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(server.read(path).await, json!({"status": "ok"}));
    }
    error(server.get("/props").await, 401, "invalid_api_key").await;
    let mut body = greedy("abc", 60);
    body["stream"] = true.into();
    let request = server.client.post(server.url.clone() + "/v1/completions");
    let running = request.bearer_auth("secret").json(&body).send().await;
    server.engine.drain();
    for path in ["/healthz", "/readyz"] {
        error(server.get(path).await, 503, "shutting_down").await;
    }
    // It still answers the running request.
    assert_eq!(server.get("/livez").await.status(), 200);
    is_held.store(false, Ordering::SeqCst);
    running
        .expect("accepted")
        .text()
        .await
        .expect("a whole stream");
    server.stop().await.expect("an orderly end");
}

#[tokio::test]
async fn a_route_of_another_server_names_what_there_is_here() {
    let server = Server::start().await;
    for (path, instead) in [
        (
            "/generate",
            "no route /generate: use /v1/completions; there are",
        ),
        ("/slots/0", "/load and /metrics"),
        ("/v1/audio/transcriptions", "audio is not supported"),
        ("/v1/batches", "`foretoken generate`"),
        ("/nothing", "no route /nothing; there are"),
    ] {
        let error = error(server.get(path).await, 404, "not_found").await;
        let message = error["message"].as_str().expect("text");
        assert!(message.contains(instead), "{message}");
    }
    server.done().await;
}

/// Special tokens of a model that fills in.
const FIM: [&str; 6] = [
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// A server whose model fills in `says`, with drafts from the text so far.
async fn filling(says: &str) -> Server {
    let text = scripted::text_of(PLAIN, &FIM);
    let vocab = 256 + FIM.len();
    let toy = ToyModel::new(vocab, MAX_LEN, 1, 0.0).with_eos(&[scripted::EOS]);
    let script = text.encode(says, false).expect("encodes");
    let drafter = Box::new(NgramDrafter::new(1, 3));
    let engine = scripted::start(scripted(toy, script), Some(drafter));
    let state = AppState::new(engine.clone(), Arc::new(text), vec!["coder".into()]);
    Server::over(engine, |_| state).await
}

/// As llama.vim asks.
fn asked(more: Value) -> Value {
    let mut body = json!({
        "id_slot": 0, "input_prefix": "def add(a, b):\n", "prompt": "    ",
        "input_suffix": "\nprint(add(1, 2))\n", "n_predict": 64, "temperature": 0.0,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "cache_prompt": true, "samplers": ["top_k", "top_p", "temperature"], "top_k": 40, "top_p": 0.9,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 60000, "stream": false,
    });
    merge(&mut body, &more);
    body
}

#[tokio::test]
async fn editors_get_what_is_missing() {
    const SAYS: &str = "return a + b\n    # done\nx = 2";
    let server = filling(SAYS).await;
    let reply = server.json(INFILL, &asked(json!({}))).await;
    for (key, value) in [
        ("content", json!(SAYS)),
        ("stop", json!(true)),
        ("stop_type", json!("eos")),
        ("stopping_word", json!("")),
        ("model", json!("coder")),
        ("truncated", json!(false)),
        ("tokens", json!([])),
        ("tokens_predicted", json!(SAYS.len() + 1)),
    ] {
        assert_eq!(reply[key], value, "{key}");
    }
    let prompt = "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\nprint(add(1, 2))\n<|fim_middle|>";
    let body = json!({"prompt": prompt, "add_special_tokens": false});
    let count = server.json("/tokenize", &body).await["count"].clone();
    assert_eq!(reply["tokens_evaluated"], count);
    let timings = &reply["timings"];
    assert_eq!(timings["predicted_n"], reply["tokens_predicted"]);
    assert!(timings["prompt_ms"].as_f64() > Some(0.0), "{timings}");
    assert_eq!(reply["generation_settings"]["n_predict"], 64);

    for (more, content, kind, word) in [
        (json!({"n_predict": 6}), "return", "limit", ""),
        (
            json!({"stop": ["# d", "x"]}),
            "return a + b\n    ",
            "word",
            "# d",
        ),
        (
            json!({"n_indent": 4}),
            "return a + b\n    # done\n",
            "limit",
            "",
        ),
        (json!({"n_predict": 0}), "", "limit", ""),
    ] {
        let whole = server.json(INFILL, &asked(more.clone())).await;
        assert_eq!(whole["content"], json!(content));
        assert_eq!(whole["stop_type"], json!(kind));
        assert_eq!(whole["stopping_word"], word);
        let mut streamed = asked(more);
        streamed["stream"] = true.into();
        let response = server.post(INFILL, &streamed).await;
        let chunks = events(&response.text().await.expect("a whole stream"));
        let chunks: Vec<Value> = chunks
            .iter()
            .map(|c| serde_json::from_str(c).expect("JSON"))
            .collect();
        let (last, chunks) = chunks.split_last().expect("a last one");
        let text: String = chunks
            .iter()
            .filter_map(|c| c["content"].as_str())
            .collect();
        assert_eq!(text, content);
        assert!(chunks.iter().all(|c| c["stop"] == false));
        assert_eq!(last["stop"], true);
        assert_eq!(last["content"], "");
        assert_eq!(last["stop_type"], kind);
        assert_eq!(last["tokens_predicted"], whole["tokens_predicted"]);
    }
    // A parameter whose sampler is not named changes nothing.
    for (samplers, temperature, top_k) in [
        (json!(["infill"]), 0.0, 0),
        (json!(["temperature"]), 0.5, 0),
        (json!(["top_k"]), 1.0, 40),
        (Value::Null, 0.5, 40),
    ] {
        let more = json!({"samplers": samplers, "temperature": 0.5, "n_predict": 0});
        let settings = server.json(INFILL, &asked(more)).await["generation_settings"].clone();
        assert_eq!(settings["temperature"], json!(temperature));
        assert_eq!(settings["top_k"], json!(top_k));
    }
    let fields = json!({"response_fields": ["content", "timings/predicted_n", "tokens/x", "none", ""], "return_tokens": true});
    let some = server.json(INFILL, &asked(fields)).await;
    let expected = json!({"content": SAYS, "timings/predicted_n": SAYS.len() + 1});
    assert_eq!(some, expected);
    let ids = server
        .json(INFILL, &asked(json!({"return_tokens": true})))
        .await["tokens"]
        .clone();
    let body = json!({"tokens": ids});
    let text = server.json("/detokenize", &body).await["prompt"].clone();
    assert_eq!(text, format!("{SAYS}<|im_end|>"));
    // Only reads the prompt into the cache, and says nothing.
    let warm = json!({"n_predict": 0, "response_fields": [""]});
    assert_eq!(server.json(INFILL, &asked(warm)).await, json!({}));
    server.done().await;
}

/// As llama.vim does while its user writes an instruction.
#[tokio::test]
async fn the_prompt_of_a_chat_may_only_be_read() {
    let server = saying_as("x", PLAIN, |s: AppState| s).await;
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "n_predict": 0, "samplers": [], "id_slot": 0,
        "stream": false, "cache_prompt": true, "response_fields": [""],
    });
    let reply = server.json(scripted::CHAT, &body).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "length", "{reply}");
    assert_eq!(reply["usage"]["completion_tokens"], 0, "{reply}");
    server.done().await;
}

/// What a request may have more, and the field that an error names.
const REFUSED: &str = r#"
{"n_predict": -2} | n_predict
{"repeat_penalty": 3, "samplers": null} | repeat_penalty
{"temperature": 9} | temperature
{"input_extra": [{"text": "a", "name": "b"}]} | input_extra[0].name
{"n_probs": 5} | n_probs
{"dry_multiplier": 0.8} | dry_multiplier
{"grammar": "root ::= x"} | grammar
{"stop": 5} | stop
"#;

#[tokio::test]
async fn what_cannot_be_filled_in_is_refused_by_name() {
    let server = filling("x").await;
    let long = [
        (
            json!({"input_extra": vec![json!({"text": "a"}); 257]}),
            "input_extra",
        ),
        (json!({"response_fields": vec!["a"; 65]}), "response_fields"),
    ];
    let all = rows::<2>(REFUSED).map(|[more, param]| (parsed(more), param));
    for (more, param) in all.chain(long) {
        let error = server.refused(INFILL, &asked(more)).await;
        assert_eq!(error["param"], param, "{error}");
    }
    // What does not fit is left out.
    let long = asked(json!({"input_prefix": "a".repeat(9000), "n_predict": 1}));
    let reply = server.json(INFILL, &long).await;
    assert_eq!(reply["truncated"], true);
    assert_eq!(reply["tokens_evaluated"], json!(MAX_LEN - 1));
    server.done().await;

    let plain = Server::start().await;
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    let error = plain.refused(INFILL, &body).await;
    let message = error["message"].as_str().expect("text");
    assert!(message.contains("fill-in-the-middle"), "{message}");
    plain.done().await;
}
