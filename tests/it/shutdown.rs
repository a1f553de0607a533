//! SIGTERM while requests are read: the process ends in time, whatever a template or a tokenizer does.

use crate::common::process::Server;
use foretoken::gguf::GgufSource;
use foretoken::text::Text;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// `--shutdown-timeout` of the tests, and a second; one more for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(3);

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
    ends_in_time(server, 8, "/v1/completions", &body);
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
    ends_in_time(server, 40, "/v1/chat/completions", &slow);
}
