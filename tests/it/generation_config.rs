//! Sampling defaults: where they come from, what they change, and how they are left out.

use crate::common::process::{Server, foretoken, refusal};
use crate::common::refusals::merge;
use crate::common::tiny::{llama_config, tensors, write_config};
use crate::common::tiny_gguf::write_gguf_with;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use foretoken::gguf::GgufSource;
use serde_json::{Value as Json, json};
use std::path::Path;
use std::process::Stdio;

/// A folder with a tiny model's config, a tokenizer and a `generation_config.json`.
fn model(generation: &Json) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = crate::common::server::text_with(None);
    text.save(folder.path()).unwrap();
    write_config(folder.path(), &llama_config(16));
    let file = folder.path().join("generation_config.json");
    std::fs::write(file, generation.to_string()).unwrap();
    folder
}

fn flags(folder: &Path, more: &str) -> String {
    let model = folder.display();
    format!(
        "--model {model} --load-format dummy --num-blocks 32 --speculative-decoding=false {more}"
    )
}

/// The line of the start-up that names the defaults.
fn notice(server: &Server) -> Option<&str> {
    let line = server
        .said
        .iter()
        .find(|line| line.contains("requests that do not"));
    line.map(String::as_str)
}

/// The text of a completion without sampling parameters.
fn text(server: &Server, more: &Json) -> String {
    let mut body = json!({"prompt": "abc", "max_tokens": 12});
    merge(&mut body, more);
    let reply = server.json("/v1/completions", &body);
    reply["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn a_models_defaults_hold_until_they_are_left_out() {
    let folder = model(&json!({
        "eos_token_id": [30], "do_sample": true, "temperature": 0.0, "top_k": 20, "max_new_tokens": 7,
    }));
    let server = Server::start(&flags(folder.path(), ""));
    assert_eq!(
        notice(&server),
        Some(
            "requests that do not say otherwise have temperature 0, top_p 1, top_k 20, max_new_tokens 7 (from the \
             model's generation_config.json; --generation-config vllm leaves them out)"
        )
    );
    // Greedy: the same under every seed, unless a request says otherwise.
    let greedy = text(&server, &json!({"seed": 1}));
    assert_eq!(text(&server, &json!({"seed": 2})), greedy);
    let hot = json!({"seed": 2, "temperature": 2, "top_k": 0});
    assert_ne!(text(&server, &hot), greedy);
    drop(server);

    let server = Server::start(&flags(folder.path(), "--generation-config vllm"));
    assert_eq!(
        notice(&server),
        Some(
            "requests that do not say otherwise have temperature 1, top_p 1 (OpenAI's defaults; \
             --override-generation-config sets others)"
        )
    );
    assert_ne!(
        text(&server, &json!({"seed": 1})),
        text(&server, &json!({"seed": 2}))
    );
    drop(server);

    let other = model(&json!({"temperature": 1.5}));
    let more = format!(
        "--generation-config {} --override-generation-config {{\"top_k\":1}}",
        other.path().display()
    );
    let server = Server::start(&flags(folder.path(), &more));
    let line = notice(&server).unwrap();
    assert!(
        line.contains("have temperature 1.5, top_p 1, top_k 1 (from"),
        "{line}"
    );
    assert!(line.contains("and --override-generation-config"), "{line}");
    assert_eq!(text(&server, &json!({"seed": 1})), greedy);
}

fn refused(flags: &str) -> String {
    let mut command = foretoken();
    let flags = flags.split_whitespace();
    let child = command
        .args(flags)
        .args(["--port", "0"])
        .stderr(Stdio::piped());
    refusal(&child.output().unwrap())
}

#[test]
fn wrong_defaults_are_refused_by_name() {
    let folder = model(&json!({"top_p": 1.5}));
    let message = refused(&flags(folder.path(), ""));
    assert!(
        message.contains("generation_config.json: top_p must be between 0 and 1, not 1.5; --generation-config vllm"),
        "{message}"
    );
    let message = refused(&flags(folder.path(), "--generation-config nowhere.json"));
    assert!(message.contains("nowhere.json"), "{message}");
}

#[test]
fn a_gguf_file_may_recommend_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let recommended = [
        ("general.sampling.temp", Value::F32(0.6)),
        ("general.sampling.top_k", Value::I32(20)),
        ("general.sampling.penalty_repeat", Value::F32(1.05)),
        ("general.sampling.mirostat", Value::I32(2)),
    ];
    write_gguf_with(
        &file,
        &tensors(16, DType::F32),
        GgmlDType::F32,
        &[1.0; 8],
        &recommended,
    );
    let read = GgufSource::from(&file).recommended_sampling().unwrap();
    let expected =
        json!({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "mirostat": 2});
    assert_eq!(Json::Object(read), expected);
}
