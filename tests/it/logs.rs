//! `--log-format json`: every line on stderr is an object.

use crate::common::process::{Server, foretoken};
use serde_json::Value;
use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

/// The lines of a log, each of which must be an object with what every line has.
#[track_caller]
fn objects(log: &str) -> Vec<Value> {
    let parse = |line: &str| -> Value {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        for name in ["timestamp", "level", "target", "message"] {
            assert!(object[name].is_string(), "no {name}: {line}");
        }
        let at = object["timestamp"].as_str().unwrap();
        let parsed = chrono::DateTime::parse_from_rfc3339(at);
        assert!(parsed.is_ok() && at.ends_with('Z'), "{at}");
        object
    };
    log.lines().map(parse).collect()
}

fn header<'a>(answer: &'a str, name: &str) -> &'a str {
    let mut lines = answer.lines();
    lines
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        .unwrap_or_else(|| panic!("no {name}: {answer}"))
}

#[test]
fn a_server_logs_requests_as_objects() {
    let mut file = tempfile::tempfile().unwrap();
    let log = file.try_clone().unwrap();
    // An empty variable is none: the log then has what it has by default.
    let mut server = Server::start_logging("--log-format json --host 0.0.0.0", "", log);
    // The line that scripts read stays as it is.
    assert!(
        server
            .startup_line()
            .starts_with("foretoken serves http://"),
        "{}",
        server.startup_line()
    );
    let path = "/v1/completions";
    let answered = server.post(path, r#"{"prompt": "Once", "max_tokens": 5}"#);
    assert!(answered.starts_with("HTTP/1.1 200"), "{answered}");
    let refused = server.post(path, r#"{"prompt": "Once", "temperature": 9}"#);
    assert!(refused.starts_with("HTTP/1.1 400"), "{refused}");
    assert_eq!(server.stop("TERM", Duration::from_secs(30)), Some(0));

    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut text).unwrap();
    let lines = objects(&text);
    let of = |answer: &str| {
        let id = header(answer, "x-request-id");
        let mut lines = lines.iter().filter(|line| line["request_id"] == id);
        lines.next().unwrap_or_else(|| panic!("no {id}: {text}"))
    };
    let done = of(&answered);
    assert_eq!(done["message"], "request done");
    assert_eq!(done["level"], "INFO");
    assert_eq!(done["output_tokens"], 5);
    for name in [
        "seconds",
        "ttft_seconds",
        "tokens_per_second",
        "acceptance_rate",
        "mean_accepted_length",
    ] {
        assert!(done[name].is_f64(), "{done}");
    }
    let refused = of(&refused);
    assert_eq!(refused["message"], "request refused");
    assert_eq!(refused["status"], 400);
    assert_eq!(refused["param"], "temperature");
    assert_eq!(refused["target"], "foretoken_server::caller");
    let warned = |line: &&Value| line["level"] == "WARN";
    let warning = lines.iter().find(warned).unwrap();
    assert!(warning["message"].as_str().unwrap().contains("--api-key"));
}

#[test]
fn the_last_words_of_a_process_are_an_object_too() {
    let output = foretoken()
        .args(["--log-format", "json", "--model", "no/such/model.gguf"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let lines = objects(std::str::from_utf8(&output.stderr).unwrap());
    let error = lines.last().unwrap();
    assert_eq!(error["level"], "ERROR");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("no/such/model.gguf"), "{message}");
    assert!(!message.starts_with("error"), "{message}");
}
