//! However a command ends, nothing uses the GPU any more when its process does. The emulated GPU ends a process that is
//! not so; on a GPU it crashes now and then.

use super::{gpu, shape};
use crate::common::process::{Server, foretoken};
use foretoken::model::ModelSource;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Costs of steps are not measured at start, which takes long on the emulated GPU.
const ENGINE: &str = "--device cuda --num-blocks 64 --spec-budget fixed --drafter ngram";
/// The emulated GPU is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `command` says on stderr, up to its end with this code.
#[track_caller]
fn ends_with(command: &str, code: i32) -> String {
    let output = foretoken().args(command.split_whitespace()).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{command}: {said}");
    said
}

/// Errors before anything was computed, and after all of it.
#[test]
fn commands_end_after_their_last_use_of_the_gpu() {
    let _gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let ModelSource::Folder(model) = shape(folder.path(), "llama", 64, &[]) else {
        panic!("a folder");
    };
    let engine = format!("{ENGINE} --model {} --load-format dummy", model.display());
    let bench = format!("bench {engine} --max-tokens 8 --temperatures 0");
    let random = format!("{bench} --random-prompts 2 --prompt-tokens 4");
    ends_with(&random, 0);
    let said = ends_with(&format!("{random} --json {}", at("no/report.json")), 2);
    assert!(said.contains("report.json"), "{said}");
    let streams = format!("{random} --streams 2 --json {}", at("no/report.json"));
    ends_with(&streams, 2);
    let empty = at("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    ends_with(&format!("{bench} --prompts {empty}"), 2);
    let generate = format!("generate {engine} --prompts {empty} --out {empty}");
    let said = ends_with(&generate, 2);
    assert!(said.contains("tokenizer.json"), "{said}");
    ends_with(&format!("check foretoken-demo {ENGINE}"), 0);
    ends_with(&format!("chat foretoken-demo {ENGINE}"), 0);
}

/// While it writes a text that is longer than the time for it, and at a second signal.
#[test]
fn a_server_ends_after_its_last_use_of_the_gpu() {
    let _gpu = gpu();
    for (timeout, signals) in [(1, 1), (60, 2)] {
        let flags = format!("{ENGINE} --shutdown-timeout {timeout}");
        let mut server = Server::start(&flags);
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let body = r#"{"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost";
        let len = body.len();
        write!(stream, "{head}\r\nContent-Length: {len}\r\n\r\n{body}").unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
        if signals > 1 {
            server.signal("TERM");
        }
        assert_eq!(server.stop("INT", PATIENCE), Some(0), "{signals} signals");
    }
}
