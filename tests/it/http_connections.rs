//! Connections that stall, break off or send too much: each is answered or closed in time, and the server
//! goes on.

use crate::common::process;
use crate::common::server::{ENDLESS, LONG, Server, greedy, joined, slow, until};
use crate::common::{Toy, assert_has, wait_until};
use foretoken::engine::EngineOptions;
use foretoken::http::HttpLimits;
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SHORT: Duration = Duration::from_millis(200);
/// More than a limit of [`SHORT`] takes, and far less than any default.
const SOON: Duration = Duration::from_secs(8);

async fn limited(limits: HttpLimits) -> Server {
    Server::over(Toy::default().start(), |s| s.with_limits(limits)).await
}

pub async fn connect(server: &Server) -> TcpStream {
    let address = server.url.strip_prefix("http://").unwrap();
    TcpStream::connect(address).await.expect("listening")
}

/// What the server says until it closes the connection.
pub async fn rest(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    let read = tokio::time::timeout(SOON, stream.read_to_end(&mut said)).await;
    read.expect("closed in time").expect("no reset");
    String::from_utf8(said).unwrap()
}

fn request(head: &str, body: &Value) -> String {
    let body = body.to_string();
    let len = body.len();
    format!("{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n{body}")
}

#[tokio::test]
async fn stalled_headers_are_answered_408_and_silence_is_closed() {
    let server = limited(HttpLimits {
        timeout_headers: SHORT,
        ..HttpLimits::default()
    })
    .await;
    let mut stalled = connect(&server).await;
    stalled
        .write_all(b"GET /health HTTP/1.1\r\nHost: loc")
        .await
        .unwrap();
    // A byte now and then does not help.
    let started = Instant::now();
    while tokio::time::timeout(SHORT / 4, stalled.readable())
        .await
        .is_err()
    {
        assert!(started.elapsed() < SOON, "each byte gives it more time");
        let _ = stalled.write_all(b"a").await;
    }
    let said = rest(&mut stalled).await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(said.contains("request_timeout"), "{said}");
    assert_eq!(rest(&mut connect(&server).await).await, "");
    server.done().await;
}

#[tokio::test]
async fn stalled_bodies_are_answered_408() {
    let server = limited(HttpLimits {
        timeout_body: SHORT,
        ..HttpLimits::default()
    })
    .await;
    let mut stalled = connect(&server).await;
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"pro";
    stalled.write_all(head.as_bytes()).await.unwrap();
    let said = rest(&mut stalled).await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    server.done().await;
}

#[tokio::test]
async fn idle_connections_are_kept_for_a_while() {
    let server = limited(HttpLimits {
        timeout_headers: SOON,
        timeout_keep_alive: SHORT * 2,
        ..HttpLimits::default()
    })
    .await;
    // Again, where this client was silent for too long because its machine did something else.
    while !is_kept(&server, SHORT, SHORT * 2).await {}
    server.done().await;
}

/// Checks that a connection is kept between requests, each `pause` after the one before, and then closed. Returns false if
/// the time between two of them was as long as `limit`, so that it may have been closed.
async fn is_kept(server: &Server, pause: Duration, limit: Duration) -> bool {
    let mut stream = connect(server).await;
    let mut asked = Instant::now();
    for _ in 0..3 {
        tokio::time::sleep(pause).await;
        let before = std::mem::replace(&mut asked, Instant::now());
        let request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let sent = stream.write_all(request).await;
        let mut said = [0; 1000];
        let read = stream.read(&mut said).await;
        if before.elapsed() >= limit {
            return false;
        }
        sent.unwrap();
        let len = read.unwrap();
        assert!(said[..len].starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
    rest(&mut stream).await;
    true
}

/// A text that takes longer than all limits.
#[tokio::test]
async fn limits_do_not_cut_a_running_stream() {
    let limits = HttpLimits {
        timeout_headers: SHORT,
        timeout_body: SHORT,
        timeout_keep_alive: SHORT,
        timeout_write: SHORT,
        ..HttpLimits::default()
    };
    let engine = slow(EngineOptions::default(), None);
    let server = Server::over(engine, |s| s.with_limits(limits)).await;
    let started = Instant::now();
    let chunks = server.stream("/v1/completions", greedy("abc", 150)).await;
    assert_eq!(joined(&chunks, 0).1, "length");
    assert!(started.elapsed() > SHORT * 4);
    server.done().await;
}

#[tokio::test]
async fn connections_over_the_limit_are_told_so() {
    let server = limited(HttpLimits {
        max_connections: 2,
        ..HttpLimits::default()
    })
    .await;
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(&server).await;
        stream
            .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .await
            .unwrap();
        stream.read_u8().await.unwrap();
        open.push(stream);
    }
    let mut refused = connect(&server).await;
    refused
        .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .unwrap();
    let said = rest(&mut refused).await;
    assert!(said.starts_with("HTTP/1.1 503 "), "{said}");
    assert_has(&said, &["retry-after: 1", "--max-connections"]);
    drop(open);
    let started = Instant::now();
    while server.get("/health").await.status() != 200 {
        assert!(started.elapsed() < SOON);
        tokio::time::sleep(SHORT / 10).await;
    }
    server.done().await;
}

/// Clients that send all before they read see the answer, not a broken pipe.
#[tokio::test]
async fn a_body_over_the_limit_is_answered_413() {
    let server = limited(HttpLimits::default()).await;
    let body = "a".repeat(20 * 1024 * 1024);
    for head in [
        format!("Content-Length: {}\r\n\r\n{body}", body.len()),
        format!(
            "Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        ),
    ] {
        let mut stream = connect(&server).await;
        let request = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}");
        stream.write_all(request.as_bytes()).await.expect("taken");
        let said = rest(&mut stream).await;
        assert!(said.starts_with("HTTP/1.1 413 "), "{said}");
        assert!(said.contains("request_too_large"), "{said}");
    }
    server.done().await;
}

#[tokio::test]
async fn a_body_announced_as_too_large_is_not_asked_for() {
    let server = limited(HttpLimits::default()).await;
    let mut stream = connect(&server).await;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let said = rest(&mut stream).await;
    assert!(said.starts_with("HTTP/1.1 413 "), "{said}");

    let body = greedy("abc", 1).to_string();
    let mut stream = connect(&server).await;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    let said = rest(&mut stream).await;
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    server.done().await;
}

/// As hyper has it: whoever ends its side no longer waits for what it asked for.
#[tokio::test]
async fn a_client_that_ends_its_side_is_gone() {
    let server = Server::of(slow(EngineOptions::default(), None)).await;
    let stats = server.engine.stats().clone();
    let mut stream = connect(&server).await;
    let request = request("POST /v1/completions", &greedy("abc", ENDLESS));
    stream.write_all(request.as_bytes()).await.unwrap();
    until("it has begun", || stats.requests_running.get() > 0).await;
    stream.shutdown().await.unwrap();
    assert_eq!(rest(&mut stream).await, "");
    until("it is gone", || stats.requests_running.get() == 0).await;
    server.done().await;
}

/// Even while its stream has nothing to send yet.
#[tokio::test]
async fn a_client_that_is_gone_leaves_the_queue() {
    let options = EngineOptions {
        max_num_seqs: 1,
        ..EngineOptions::default()
    };
    let server = Server::of(slow(options, None)).await;
    let mut body = greedy("abc", ENDLESS);
    body["stream"] = true.into();
    let mut running = connect(&server).await;
    running
        .write_all(request("POST /v1/completions", &body).as_bytes())
        .await
        .unwrap();
    running.read_u8().await.unwrap();
    let stats = server.engine.stats().clone();
    for streams in [false, true] {
        body["stream"] = streams.into();
        let mut waiting = connect(&server).await;
        waiting
            .write_all(request("POST /v1/completions", &body).as_bytes())
            .await
            .unwrap();
        until("it is queued", || stats.requests_waiting.get() > 0).await;
        drop(waiting);
        until("it is gone", || stats.requests_waiting.get() == 0).await;
    }
    // The text that runs is none of theirs, and goes on.
    let mut further = [0; 4096];
    let read = tokio::time::timeout(LONG, running.read_exact(&mut further)).await;
    read.expect("in time").expect("the stream goes on");
    assert_eq!(stats.requests_running.get(), 1);
    drop(running);
    server.done().await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_disconnected() {
    let server = limited(HttpLimits {
        timeout_write: SHORT,
        max_connections: 1,
        ..HttpLimits::default()
    })
    .await;
    let mut stream = connect(&server).await;
    assert_eq!(
        server.get("/health").await.status(),
        503,
        "it has the only place"
    );
    // Far more replies than the buffers of two sockets hold.
    let many = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(20_000);
    let _ = tokio::time::timeout(SHORT, stream.write_all(many.as_bytes())).await;
    // The buffers fill before the time counts.
    let started = Instant::now();
    while server.get("/health").await.status() != 200 {
        assert!(started.elapsed() < 5 * SOON, "its place is free again");
        tokio::time::sleep(SHORT / 10).await;
    }
    server.done().await;
}

#[tokio::test]
async fn http_2_is_refused_in_its_own_words() {
    let server = limited(HttpLimits::default()).await;
    let mut stream = connect(&server).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stream.write_all(preface).await.unwrap();
    let said = rest(&mut stream).await;
    // SETTINGS, then GOAWAY with HTTP_1_1_REQUIRED.
    assert!(
        said.starts_with("\0\0\0\x04\0\0\0\0\0\0\0\x08\x07"),
        "{said:?}"
    );
    assert!(said.ends_with("\0\0\0\x0d"), "{said:?}");
    server.done().await;
}

#[cfg(all(feature = "embedded-model", target_os = "linux"))]
#[test]
fn the_end_of_file_descriptors_is_logged_once_and_survived() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    let server = process::Server::start_logging("--max-num-seqs 2", "warn", file);
    server.limit_files(40);
    let connect = |_| std::net::TcpStream::connect(server.address()).unwrap();
    let open: Vec<_> = (0..60).map(connect).collect();
    let said = || std::fs::read_to_string(&log).unwrap();
    let lines = || said().matches("cannot accept connections").count();
    wait_until("it is logged", || lines() > 0);
    // It tries again and again.
    std::thread::sleep(Duration::from_millis(500));
    drop(open);
    let reply = server.get("/health");
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    assert_eq!(lines(), 1, "{}", said());
}

#[cfg(feature = "embedded-model")]
#[test]
fn a_server_that_everyone_can_use_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for (flags, warns) in [
        ("--host 0.0.0.0", true),
        ("--host 0.0.0.0 --api-key k", false),
        ("", false),
    ] {
        let log = folder.path().join("log");
        let file = std::fs::File::create(&log).unwrap();
        let mut server = process::Server::start_logging(flags, "warn", file);
        assert!(server.get("/health").starts_with("HTTP/1.1 200 "));
        // All is written in the end.
        assert_eq!(server.stop("TERM", Duration::from_secs(20)), Some(0));
        let said = std::fs::read_to_string(&log).unwrap();
        assert_eq!(said.contains("set --api-key"), warns, "{flags}: {said}");
    }
}
