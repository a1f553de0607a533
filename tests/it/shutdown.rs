//! SIGTERM while requests are read: the process ends in time, whatever a template or a tokenizer does. And however a
//! command ends, its engine's thread ends before: on a GPU, the process crashed otherwise.

use crate::common::process::{Server, foretoken};
use foretoken::gguf::GgufSource;
use foretoken::text::Text;
use std::io::{Read, Seek, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// `--shutdown-timeout` of the tests, and a second; six more for a busy machine. What the requests of a test ask for takes
/// longer.
const TIMEOUT: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(8);

/// Sends `count` requests, and SIGTERM while they are read.
fn ends_in_time(mut server: Server, count: usize, path: &str, body: &str) {
    let len = body.len();
    let waiting: Vec<TcpStream> = (0..count)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            write!(
                stream,
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n{body}"
            )
            .unwrap();
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let is_open = |stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.peek(&mut [0]).is_err()
    };
    assert!(waiting.iter().any(is_open), "too fast for this test");
    let started = Instant::now();
    assert_eq!(server.stop("TERM", PATIENCE), Some(0));
    println!("{:?} of {TIMEOUT:?} and a second", started.elapsed());
}

/// Texts that all fit the context, and together take long.
#[test]
fn sigterm_does_not_wait_for_texts() {
    let server = Server::start("--max-num-seqs 2 --shutdown-timeout 1");
    // As many as the queue has places, of less than twice the context.
    let text = format!("\"{}\",", "the cat sat on the mat 1 ".repeat(160));
    let texts = text.repeat(512);
    let body = format!(
        r#"{{"max_tokens": 1, "prompt": [{}]}}"#,
        texts.trim_end_matches(',')
    );
    ends_in_time(server, 30, "/v1/completions", &body);
}

/// Chats that take as long as a template may, one after the other.
#[test]
fn sigterm_does_not_wait_for_templates() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Text::from_gguf(GgufSource::embedded("foretoken-demo").unwrap()).unwrap();
    demo.save(folder.path()).unwrap();
    let template = "{% for m in messages %}{% if m.content == 'slow' %}\
        {% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}\
        {% endif %}{{ m.content }}{% endfor %}";
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": demo.vocab_size(), "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
        "tie_word_embeddings": true,
    });
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let model = folder.path().display();
    let server = Server::start(&format!(
        "--model {model} --load-format dummy --num-blocks 64 --shutdown-timeout 1"
    ));
    let fast = r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}"#;
    let answer = server.post("/v1/chat/completions", fast);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let slow = fast.replace("\"a\"", "\"slow\"");
    ends_in_time(server, 200, "/v1/chat/completions", &slow);
}

const ENDED: &str = "the engine thread has ended";

/// What a command with an engine says in its log, up to its end with this code.
fn log_of(command: &str, code: i32) -> String {
    let output = foretoken()
        .args(command.split_whitespace())
        .env("RUST_LOG", "foretoken=debug")
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{command}: {log}");
    log
}

#[test]
fn every_command_waits_for_its_engine() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("prompts.jsonl"), "{\"prompt\": \"Hi\"}\n").unwrap();
    let bench = "bench --num-blocks 64 --random-prompts 1 --prompt-tokens 4 --max-tokens 4 --temperatures 0";
    let generate = "generate --num-blocks 64 --max-tokens 4 --prompts";
    for (command, code) in [
        (bench.to_owned(), 0),
        (format!("{bench} --json {}", at("no/report.json")), 2),
        (
            format!("{bench} --streams 2 --json {}", at("no/report.json")),
            2,
        ),
        (
            format!(
                "{generate} {} --out {}",
                at("prompts.jsonl"),
                at("out.jsonl")
            ),
            0,
        ),
        ("chat foretoken-demo --num-blocks 64".to_owned(), 0),
    ] {
        let log = log_of(&command, code);
        let ended = log
            .find(ENDED)
            .unwrap_or_else(|| panic!("{command}: {log}"));
        let error = log.find("error: ");
        assert_eq!(error.is_some(), code != 0, "{command}: {log}");
        assert!(error.is_none_or(|error| ended < error), "{command}: {log}");
    }
}

#[test]
fn a_server_waits_for_its_engine() {
    let mut log = tempfile::tempfile().unwrap();
    let mut server = Server::start_logging(
        "--num-blocks 64 --shutdown-timeout 1",
        "foretoken=debug",
        log.try_clone().unwrap(),
    );
    // Its text is longer than the time for it.
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let body = r#"{"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}"#;
    let (len, head) = (
        body.len(),
        "POST /v1/completions HTTP/1.1\r\nHost: localhost",
    );
    write!(stream, "{head}\r\nContent-Length: {len}\r\n\r\n{body}").unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    assert_eq!(server.stop("TERM", PATIENCE), Some(0));
    let mut said = String::new();
    log.rewind().unwrap();
    log.read_to_string(&mut said).unwrap();
    assert!(said.contains(ENDED), "{said}");
    assert!(
        said.contains("press Ctrl-C again to stop at once"),
        "{said}"
    );
}
