//! Public advisories against vLLM, llama.cpp, Ollama and their libraries that could concern a server like this one:
//! what they describe, sent to this one. docs/advisories.md has the list, with those that cannot apply.

use crate::common::process::{foretoken, refusal};
use crate::common::refusals::merge;
use crate::common::scripted::saying_as;
use crate::common::server::{Server, drafting, greedy};
use crate::common::{Guess, MAX_LEN};
use crate::http_connections::{connect, rest};
use serde_json::{Value, json};
use std::fs;
use tokio::io::AsyncWriteExt;

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHATS: &str = "/v1/chat/completions";

/// `fields` in a completion and in a chat are refused with a status of 400, and the engine is none the worse for it.
pub async fn refused(fields: &[Value]) {
    let server = Server::start().await;
    for fields in fields {
        for path in [COMPLETIONS, CHATS] {
            let mut body = json!({"max_tokens": 8});
            match path {
                COMPLETIONS => body["prompt"] = "ab".into(),
                _ => body["messages"] = json!([{"role": "user", "content": "ab"}]),
            }
            merge(&mut body, fields);
            let response = server.post(path, &body).await;
            assert_eq!(response.status(), 400, "{path}: {body}");
            server.json(COMPLETIONS, &greedy("ab", 4)).await;
        }
    }
    server.done().await;
}

#[tokio::test]
async fn cve_2025_48942_a_wrong_json_schema_does_not_end_the_engine() {
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    refused(&[
        json!({"guided_json": {"properties": {"a": {"type": "stsring"}}}}),
        schema(json!({"type": "array", "items": {"type": 5}})),
        schema(json!({"$ref": "#/nowhere"})),
    ])
    .await;
}

#[tokio::test]
async fn cve_2025_48943_a_wrong_regular_expression_does_not_end_the_engine() {
    refused(&[
        json!({"guided_regex": "[a-"}),
        json!({"structured_outputs": {"regex": "(?P<a"}}),
        json!({"guided_regex": "(((a{1000}){1000}){1000}){1000}"}),
    ])
    .await;
}

#[tokio::test]
async fn cve_2025_48944_a_wrong_type_or_pattern_of_a_tool_does_not_end_the_engine() {
    let server = Server::start().await;
    for parameters in [
        json!({"type": "object", "properties": {"a": {"type": "something"}}}),
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}),
    ] {
        let body = json!({
            "messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        });
        let response = server.post(CHATS, &body).await;
        assert_eq!(response.status(), 400, "{body}");
        server.json(COMPLETIONS, &greedy("ab", 4)).await;
    }
    server.done().await;
}

/// xgrammar's, which vLLM has.
#[tokio::test]
async fn cve_2025_57809_a_grammar_without_end_is_refused() {
    refused(&[
        json!({"guided_grammar": "start: start"}),
        json!({"guided_grammar": "start: x\nx: y\ny: x"}),
    ])
    .await;
}

#[tokio::test]
async fn cve_2025_61620_a_request_brings_no_template() {
    refused(&[json!({"chat_template": "{% for i in range(1000000000) %}{{ i }}{% endfor %}"})])
        .await;
}

/// Variables with the names of the function's own arguments took their place: another template, which does not end, and
/// other messages. This template shows what it gets.
#[tokio::test]
async fn cve_2025_62426_arguments_of_a_template_are_variables_and_no_more() {
    let template = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
        {{ 'tools' if tools }}{{ 'documents' if documents }}{{ 'go' if add_generation_prompt }} {{ enable_thinking }}";
    let server = saying_as("Hello", template, |state| state).await;
    let mut body = json!({"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "return_token_ids": true});
    body["chat_template_kwargs"] = json!({"enable_thinking": "yes"});
    let wanted = server.json(CHATS, &body).await["prompt_token_ids"].clone();
    let shown = server.json("/detokenize", &json!({"tokens": wanted})).await;
    assert_eq!(shown["prompt"], "ab\ngo yes");
    let endless =
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    for (name, value) in [
        ("chat_template", json!(endless)),
        ("tokenize", json!(true)),
        ("messages", json!([{"role": "user", "content": "cd"}])),
        ("conversation", json!([{"role": "user", "content": "cd"}])),
        (
            "tools",
            json!([{"type": "function", "function": {"name": "f"}}]),
        ),
        ("documents", json!([{"title": "a", "text": "b"}])),
        ("add_generation_prompt", json!(false)),
        ("continue_final_message", json!(true)),
    ] {
        body["chat_template_kwargs"][name] = value;
        let got = server.json(CHATS, &body).await["prompt_token_ids"].clone();
        assert_eq!(got, wanted, "{name}");
    }
    server.done().await;
}

/// Headers were kept however large and many they were. These are whole: the server must answer before it has them.
#[tokio::test]
async fn cve_2025_48956_huge_headers_are_refused() {
    let server = Server::start().await;
    let large = |bytes: usize| format!("X-Large: {}\r\n", "a".repeat(bytes));
    let many = |count: usize| {
        (0..count)
            .map(|i| format!("X-{i}: a\r\n"))
            .collect::<String>()
    };
    for (headers, status) in [
        (large(32 << 10), "200"),
        (large(128 << 10), "431"),
        (large(4 << 20), "431"),
        (many(50), "200"),
        (many(5_000), "431"),
    ] {
        let mut stream = connect(&server).await;
        let request = format!(
            "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let said = rest(&mut stream).await;
        assert!(
            said.starts_with(&format!("HTTP/1.1 {status} ")),
            "{} bytes: {said}",
            headers.len()
        );
    }
    server.json(COMPLETIONS, &greedy("ab", 4)).await;
    server.done().await;
}

/// And CVE-2025-25183: a prefix is found by its tokens, whose hash depends on a secret of the process and on the salt.
#[tokio::test]
async fn cve_2025_46570_a_salt_parts_what_the_prefix_cache_tells() {
    let server = Server::start().await;
    let mut cached = Vec::new();
    for salt in ["one", "one", "two"] {
        let mut body = greedy("the same words before all other words", 2);
        body["cache_salt"] = salt.into();
        let answer = server.json(COMPLETIONS, &body).await;
        cached.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64());
    }
    assert_eq!((cached[0], cached[2]), (Some(0), Some(0)));
    assert!(cached[1] > Some(0), "{cached:?}");
    server.done().await;
}

/// Drafts are none of a request's with other words, and penalties count what was accepted. CVE-2026-3108 is about drafts
/// from the cache of others.
#[tokio::test]
async fn cve_2026_44223_penalties_and_drafts_go_together() {
    for guess in [Guess::Tables, Guess::Toy(0.3)] {
        let server = drafting(guess).await;
        for penalty in [
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ] {
            let mut body = greedy("abcabcabcabc", 40);
            let free = server.json(COMPLETIONS, &body).await;
            body[penalty] = 1.3.into();
            let drafted = server.json(COMPLETIONS, &body).await;
            body["spec_length"] = 0.into();
            let plain = server.json(COMPLETIONS, &body).await;
            assert_eq!(
                drafted["choices"][0]["text"], plain["choices"][0]["text"],
                "{penalty}"
            );
            assert_ne!(
                drafted["choices"][0]["text"], free["choices"][0]["text"],
                "{penalty} has no effect"
            );
        }
        server.done().await;
    }
}

#[tokio::test]
async fn cve_2026_34756_many_answers_are_refused_by_name() {
    let server = Server::start().await;
    for name in ["n", "best_of"] {
        let mut body = greedy("ab", 4);
        body[name] = 1_000_000_000.into();
        let told = server.refused(COMPLETIONS, &body).await;
        assert_eq!(told["param"], name);
    }
    server.done().await;
}

/// Fields that this server does not have; a text ends with its context.
#[tokio::test]
async fn cve_2026_21869_a_context_is_not_shifted_by_a_request() {
    let server = Server::start().await;
    let mut body = greedy("ab", 254);
    body["ignore_eos"] = true.into();
    let plain = server.json(COMPLETIONS, &body).await;
    assert_eq!(plain["usage"]["total_tokens"], MAX_LEN);
    assert_eq!(plain["choices"][0]["finish_reason"], "length");
    for name in ["n_discard", "n_keep", "context_shift"] {
        let mut shifted = body.clone();
        shifted[name] = json!(-1_000_000);
        let got = server.json(COMPLETIONS, &shifted).await;
        assert_eq!(got["choices"], plain["choices"], "{name}");
        // Nor is there room for one token more.
        shifted["max_tokens"] = 255.into();
        let cut = server.post(COMPLETIONS, &shifted).await;
        assert_eq!(cut.headers()["x-foretoken-max-tokens"], "254", "{name}");
        let got: Value = cut.json().await.expect("JSON");
        assert_eq!(got["choices"], plain["choices"], "{name}");
    }
    server.done().await;
}

/// A model file that is no model: one line, and an exit code of 2.
fn is_no_model(what: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let mut bytes = fs::read("models/default/foretoken-demo.Q5_1.gguf").unwrap();
    change(&mut bytes);
    fs::write(&file, bytes).unwrap();
    let output = foretoken()
        .args(["check", "--model"])
        .arg(&file)
        .output()
        .unwrap();
    let told = refusal(&output);
    println!("{what}: {told}");
    assert_eq!(told.trim_end().lines().count(), 1, "{what}: {told}");
    assert!(told.contains("model.gguf"), "{what}: {told}");
}

/// The place after `name`, which has its length before it.
fn after(bytes: &[u8], name: &str) -> usize {
    let mut key = (name.len() as u64).to_le_bytes().to_vec();
    key.extend(name.as_bytes());
    let at = bytes.windows(key.len()).position(|window| window == key);
    at.unwrap_or_else(|| panic!("{name} is not in the file")) + key.len()
}

fn put(bytes: &mut [u8], at: usize, number: u64) {
    bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
}

/// CVE-2026-27940 is the same once more.
#[test]
fn cve_2025_53630_sizes_of_tensors_do_not_overflow() {
    for size in [u64::MAX, 1 << 63, 1 << 62, (1 << 58) + 32] {
        is_no_model("a dimension", |bytes| {
            let at = after(bytes, "token_embd.weight");
            put(bytes, at + 4, size);
        });
    }
}

#[test]
fn cve_2026_7482_tensors_end_where_the_file_does() {
    for offset in [u64::MAX - 31, 1 << 40] {
        is_no_model("an offset", |bytes| {
            let at = after(bytes, "token_embd.weight");
            put(bytes, at + 4 + 16 + 4, offset);
        });
    }
}

/// Ollama's, of counts and lengths that nobody can have: no memory is taken for them.
#[test]
fn cve_2025_0315_counts_are_not_believed() {
    is_no_model("tensors", |bytes| put(bytes, 8, u64::MAX));
    is_no_model("keys", |bytes| put(bytes, 16, u64::MAX / 2));
    is_no_model("the length of a name", |bytes| put(bytes, 24, 1 << 61));
    is_no_model("the tokens of the vocabulary", |bytes| {
        let at = after(bytes, "tokenizer.ggml.tokens");
        put(bytes, at + 8, 1 << 60);
    });
}

/// Ollama's division by zero.
#[test]
fn cve_2025_0317_a_model_has_layers_and_heads() {
    for key in [
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
    ] {
        is_no_model(key, |bytes| {
            let at = after(bytes, &format!("llama.{key}"));
            bytes[at + 4..at + 8].fill(0);
        });
    }
}

/// llama.cpp's, of tokens longer than the buffer that they were copied to.
#[test]
fn cve_2025_49847_a_token_is_as_long_as_the_file_at_most() {
    is_no_model("the length of a token", |bytes| {
        let at = after(bytes, "tokenizer.ggml.tokens");
        put(bytes, at + 16, (1 << 31) + 1);
    });
}
