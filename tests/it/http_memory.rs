//! Requests of which many, or a large one, would take all memory or time: on a real server, because what
//! the system gives a process is what counts, and Linux says how much that is.
#![cfg(all(feature = "embedded-model", target_os = "linux"))]

use crate::common::process::Server;
use std::time::Instant;

const MIB: usize = 1024 * 1024;

/// A body of almost two MiB, the default limit.
const LARGE: usize = 2 * MIB - 1000;

/// The statuses of `count` requests at once.
fn at_once(server: &Server, count: usize, path: &str, body: &str) -> Vec<String> {
    std::thread::scope(|scope| {
        let ask = || server.post(path, body)[..12].to_owned();
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn all(statuses: &[String], allowed: &[&str]) {
    let is = |status: &String| allowed.iter().any(|a| status.ends_with(a));
    assert!(statuses.iter().all(is), "{statuses:?}");
}

#[test]
fn memory_is_bounded_whatever_is_sent() {
    let server = Server::start("--max-num-seqs 8");
    let warm = r#"{"prompt": "Once", "max_tokens": 4, "n": 2, "logprobs": 5}"#;
    all(&at_once(&server, 4, "/v1/completions", warm), &["200"]);
    let before = server.peak_memory();
    let grown = |what: &str, max: usize| {
        let grown = server.peak_memory() - before;
        println!("{what}: {} MiB more", grown / MIB);
        assert!(grown < max * MIB, "{what}: {} MiB more", grown / MIB);
    };
    let started = Instant::now();

    // Texts that cannot fit the context.
    for text in ["1", " ", "a", "é"] {
        let body = format!(r#"{{"prompt": "{}"}}"#, text.repeat(LARGE / text.len()));
        all(&at_once(&server, 20, "/tokenize", &body), &["400", "503"]);
    }
    grown("long texts", 300);
    // Lists of what may be ids, and trees that nobody reads or a template could.
    let nested = format!(
        "{}{}",
        "[0,".repeat(60),
        "]".repeat(60).replacen(']', "1]", 1)
    );
    for body in [
        format!(r#"{{"prompt": [{}0]}}"#, "0,".repeat(LARGE / 2)),
        format!(r#"{{"prompt": "a", "x": [{}0]}}"#, "0,".repeat(LARGE / 2)),
        format!(
            r#"{{"prompt": "a", "x": [{}0]}}"#,
            (nested + ",").repeat(LARGE / 250)
        ),
        format!(
            r#"{{"prompt": "a", "max_tokens": 1, {}"n": 1}}"#,
            r#""a":0,"#.repeat(LARGE / 6)
        ),
        format!(r#"{{"messages": [{}{{}}]}}"#, "{},".repeat(LARGE / 3)),
        format!(
            r#"{{"messages": [{{"role": "user", "content": "a", "x": [{}0]}}]}}"#,
            "0,".repeat(LARGE / 2)
        ),
    ] {
        all(
            &at_once(&server, 20, "/v1/completions", &body),
            &["200", "400", "503"],
        );
        all(
            &at_once(&server, 20, "/v1/chat/completions", &body),
            &["200", "400", "503"],
        );
    }
    grown("large bodies", 400);
    let body = r#"{"prompt": "Once", "n": 64, "max_tokens": 64, "logprobs": 20, "ignore_eos": true, "temperature": 1}"#;
    all(&at_once(&server, 1, "/v1/completions", body), &["200"]);
    grown("log-probabilities", 450);
    println!("all of it took {:?}", started.elapsed());
}
