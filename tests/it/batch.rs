//! `foretoken generate --input-file`: OpenAI's batch files, answered as over HTTP.

use crate::common::server::{EOS, Server, text_with};
use crate::common::{Toy, assert_idle};
use foretoken::engine::EngineHandle;
use foretoken::error::Result;
use foretoken::generate::batch::{self, BatchFiles};
use foretoken::http::{self, AppState, HttpLimits, InProcess};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";
const TEMPLATE: &str = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

fn line(id: &str, url: &str, body: &Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string()
}

fn completion(prompt: &str) -> Value {
    json!({"model": "toy", "prompt": prompt, "max_tokens": 12, "temperature": 0})
}

fn chat(content: &str) -> Value {
    let messages = [json!({"role": "user", "content": content})];
    json!({"model": "toy", "messages": messages, "max_tokens": 12, "seed": 3})
}

/// An engine with a queue of four sequences.
fn engine() -> EngineHandle {
    let mut toy = Toy {
        eos: vec![EOS],
        ..Toy::default()
    };
    toy.options.max_waiting = 4;
    toy.start()
}

const MAX_BODY: usize = 4096;

fn limited(state: AppState) -> AppState {
    state.with_limits(HttpLimits {
        max_body_bytes: MAX_BODY,
        ..HttpLimits::default()
    })
}

fn run(engine: &EngineHandle, input: &Path, out: &Path) -> Result<()> {
    let names = vec!["toy".to_owned(), "org/alias".to_owned()];
    let text = Arc::new(text_with(Some(TEMPLATE)));
    let state = limited(AppState::new(engine.clone(), text, names));
    let files = BatchFiles {
        input,
        out,
        max_body_bytes: MAX_BODY,
        concurrency: 64,
    };
    batch::run(engine, &InProcess::new(http::router(state)), files)
}

fn answers(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    lines.sort_by_key(|line| line["custom_id"].to_string());
    lines
}

/// The answers to the lines are those that a server gives, errors included. A line for which the queue has no place
/// waits: nothing is answered 429.
#[tokio::test(flavor = "multi_thread")]
async fn lines_are_answered_as_requests() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (
        folder.path().join("in.jsonl"),
        folder.path().join("out.jsonl"),
    );
    let mut asked: Vec<(String, &str, Value)> = (0..20)
        .map(|i| {
            let name = char::from(b'a' + i);
            let body = match i % 3 {
                0 => chat(&format!("say {name}")),
                1 => completion(&format!("abc{name}")),
                _ => json!({"model": "toy", "input": format!("say {name}"), "max_output_tokens": 12, "temperature": 0}),
            };
            let url = [CHAT, COMPLETION, "/v1/responses"][usize::from(i % 3)];
            (format!("fine {i:02}"), url, body)
        })
        .collect();
    // Three of the queue's four places.
    for body in asked
        .iter_mut()
        .filter(|(_, url, _)| *url != "/v1/responses")
        .map(|a| &mut a.2)
    {
        body["n"] = 3.into();
    }
    let mut other = chat("say x");
    other["model"] = "another".into();
    asked.push(("other model".into(), CHAT, other));
    asked.push((
        "too many".into(),
        COMPLETION,
        json!({"prompt": "a", "n": 5}),
    ));
    asked.push((
        "no number".into(),
        CHAT,
        json!({"messages": [], "max_tokens": "x"}),
    ));
    asked.push(("no object".into(), CHAT, json!([1])));
    asked.push(("no vectors".into(), "/v1/embeddings", json!({"input": "a"})));
    let pair = json!({"query": "a", "documents": ["b"], "text_1": "a"});
    asked.push(("no ranking".into(), "/v1/rerank", pair.clone()));
    asked.push(("no scores".into(), "/v1/score", pair));
    asked.push((
        "large".into(),
        COMPLETION,
        json!({"prompt": "a".repeat(5000)}),
    ));
    let lines: Vec<String> = (asked.iter())
        .map(|(id, url, body)| line(id, url, body))
        .collect();
    std::fs::write(&input, lines.join("\n\n")).unwrap();

    let engine = engine();
    let server = Server::over(engine.clone(), limited).await;
    let ran = {
        let (input, out) = (input.clone(), out.clone());
        tokio::task::spawn_blocking(move || run(&engine, &input, &out))
    };
    ran.await.unwrap().unwrap();

    let answers = answers(&out);
    assert_eq!(answers.len(), asked.len());
    asked.sort_by_key(|(id, ..)| json!(id).to_string());
    for (answer, (id, url, body)) in answers.iter().zip(&asked) {
        let response = &answer["response"];
        assert_eq!(answer["custom_id"], id.as_str());
        assert_eq!(answer["error"], Value::Null);
        let own = answer["id"].as_str().expect("an id");
        assert!(own.starts_with("batch_req_"), "{own}");
        let own = response["request_id"].as_str().expect("an id");
        assert!(own.starts_with("req_"), "{own}");
        let wanted = server.post(url, body).await;
        assert_eq!(
            response["status_code"],
            wanted.status().as_u16(),
            "{answer}"
        );
        assert_eq!(
            id.starts_with("fine"),
            response["status_code"] == 200,
            "{answer}"
        );
        let wanted: Value = wanted.json().await.unwrap();
        for part in ["choices", "error"] {
            assert_eq!(response["body"][part], wanted[part], "{answer}");
        }
        let text = "/output/0/content/0/text";
        assert_eq!(response["body"].pointer(text), wanted.pointer(text));
    }
    server.done().await;
}

#[test]
fn wrong_lines_are_answered_with_an_error_and_runs_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (
        folder.path().join("in.jsonl"),
        folder.path().join("out.jsonl"),
    );
    let mut streamed = chat("say c");
    streamed["stream"] = true.into();
    let lines = [
        line("a", COMPLETION, &completion("abc")),
        "no JSON".to_owned(),
        line("a", COMPLETION, &completion("abd")),
        line("b", "/v1/files", &json!({})),
        line("c", CHAT, &streamed),
        line("d", CHAT, &chat("say d")),
    ];
    std::fs::write(&input, lines.join("\n")).unwrap();
    let engine = engine();
    run(&engine, &input, &out).unwrap();
    let first = answers(&out);
    let codes = first.iter().map(|line| {
        let error = &line["error"];
        assert_eq!(
            error.is_null(),
            line["response"]["status_code"] == 200,
            "{line}"
        );
        (line["custom_id"].clone(), error["code"].clone())
    });
    let mut codes: Vec<(Value, Value)> = codes.collect();
    codes.sort_by_key(|code| json!(code).to_string());
    let mut wanted = [
        (json!("a"), Value::Null),
        (Value::Null, json!("invalid_json_line")),
        (json!("a"), json!("duplicate_custom_id")),
        (json!("b"), json!("invalid_url")),
        (json!("c"), json!("stream_not_supported")),
        (json!("d"), Value::Null),
    ];
    wanted.sort_by_key(|code| json!(code).to_string());
    assert_eq!(codes, wanted);

    // Interrupted within a line, and continued: what was answered is not asked again.
    let kept = "{\"id\": \"1\", \"custom_id\": \"a\", \"response\": null, \"error\": null}\n";
    std::fs::write(&out, format!("{kept}{{\"id\": \"batch_req_2\", \"cust")).unwrap();
    run(&engine, &input, &out).unwrap();
    assert!(std::fs::read_to_string(&out).unwrap().starts_with(kept));
    let again = answers(&out);
    let of_d = |lines: &[Value]| {
        let line = lines.iter().find(|line| line["custom_id"] == "d").unwrap();
        line["response"]["body"]["choices"].clone()
    };
    assert_eq!((again.len(), of_d(&again)), (6, of_d(&first)));
    // A file of something else is not overwritten.
    let error = run(&engine, &input, &input).unwrap_err().to_string();
    assert!(error.contains("is no answer of a batch"), "{error}");
    let none = folder.path().join("none.jsonl");
    std::fs::write(&none, "\n").unwrap();
    assert!(run(&engine, &none, &out).is_err());
    assert_idle(&engine);
}

/// As vLLM's users know it.
#[cfg(feature = "embedded-model")]
#[test]
fn run_batch_reads_and_writes_files() {
    use crate::common::process::{foretoken, stdout_of};

    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (
        folder.path().join("in.jsonl"),
        folder.path().join("out.jsonl"),
    );
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": true});
    let response = json!({"input": "Hi", "max_output_tokens": 5});
    let stored = json!({"input": "Hi", "store": true});
    let lines = [
        line("1", CHAT, &body),
        line("2", CHAT, &json!({})),
        line("3", "/v1/responses", &response),
        line("4", "/v1/responses", &stored),
    ];
    std::fs::write(&input, lines.join("\n")).unwrap();
    let files = ["-i", input.to_str().unwrap(), "-o", out.to_str().unwrap()];
    // The server's key is not that of files.
    let mut command = foretoken();
    let output = command
        .arg("run-batch")
        .args(files)
        .args(["--api-key", "secret"]);
    stdout_of(&output.output().unwrap());
    let answers = answers(&out);
    let status = |i: usize| answers[i]["response"]["status_code"].as_u64();
    assert_eq!(answers.len(), 4);
    assert_eq!(status(0), Some(200));
    assert_eq!(status(1), Some(400));
    // Nobody can ask for it after the end.
    let response = &answers[2]["response"]["body"];
    assert_eq!(response["store"], false, "{response}");
    let refused = &answers[3]["response"]["body"]["error"];
    assert_eq!(refused["param"], "store", "{refused}");
    let message = refused["message"].as_str().unwrap();
    assert!(message.contains("in a batch"), "{message}");
    let usage = &answers[0]["response"]["body"]["usage"];
    assert_eq!(usage["completion_tokens"], 5, "{usage}");
}
