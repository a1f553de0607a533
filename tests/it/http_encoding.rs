//! Request bodies that are sent compressed: read as the others, and bounded by what they become.

use crate::common::Toy;
use crate::common::server::{Server, error, greedy};
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use foretoken::http::HttpLimits;
use reqwest::Response;
use serde_json::{Value, json};
use std::io::Write;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

async fn send(server: &Server, path: &str, encoding: &str, body: Vec<u8>) -> Response {
    let request = server.client.post(server.url.clone() + path);
    let request = request.header("content-encoding", encoding);
    request.body(body).send().await.unwrap()
}

#[tokio::test]
async fn a_compressed_body_is_read_as_any_other() {
    let server = Server::start().await;
    let body = greedy("abc", 6);
    let plain = body.to_string().into_bytes();
    let expected = server.json("/v1/completions", &body).await["choices"].clone();
    let (one, two) = plain.split_at(9);
    for (encoding, bytes) in [
        ("gzip", gzip(&plain)),
        ("X-Gzip", gzip(&plain)),
        ("gzip", [gzip(one), gzip(two)].concat()),
        ("deflate", zlib(&plain)),
        ("identity", plain.clone()),
    ] {
        let response = send(&server, "/v1/completions", encoding, bytes).await;
        assert_eq!(response.status(), 200, "{encoding}");
        let reply: Value = response.json().await.unwrap();
        assert_eq!(reply["choices"], expected, "{encoding}");
    }
    let prompt = gzip(json!({"prompt": "ab"}).to_string().as_bytes());
    let tokens: Value = send(&server, "/tokenize", "gzip", prompt)
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(tokens["tokens"], json!([0, 1]));
    server.done().await;
}

#[tokio::test]
async fn other_encodings_and_broken_ones_are_refused() {
    let server = Server::start().await;
    let plain = greedy("abc", 6).to_string().into_bytes();
    for encoding in ["br", "zstd", "gzip, gzip", "\u{fc}"] {
        let response = send(&server, "/v1/completions", encoding, gzip(&plain)).await;
        assert_eq!(response.headers()["accept-encoding"], "gzip, deflate");
        let told = error(response, 415, "unsupported_encoding").await;
        assert!(
            told["message"].as_str().unwrap().contains("gzip, deflate"),
            "{told}"
        );
    }
    let whole = gzip(&plain);
    let mut raw = DeflateEncoder::new(Vec::new(), Compression::fast());
    raw.write_all(&plain).unwrap();
    for (encoding, bytes) in [
        ("gzip", plain.clone()),
        ("gzip", whole[..whole.len() - 4].to_vec()),
        ("gzip", whole[..20].to_vec()),
        ("gzip", [whole.as_slice(), b"more"].concat()),
        ("deflate", raw.finish().unwrap()),
        ("deflate", [zlib(&plain).as_slice(), b"more"].concat()),
    ] {
        let response = send(&server, "/v1/completions", encoding, bytes).await;
        let told = error(response, 400, "invalid_value").await;
        assert!(
            told["message"]
                .as_str()
                .unwrap()
                .contains("Content-Encoding"),
            "{told}"
        );
    }
    server.done().await;
}

#[tokio::test]
async fn a_bomb_is_refused_while_it_is_unpacked() {
    const MAX: usize = 64 * 1024;
    let limits = HttpLimits {
        max_body_bytes: MAX,
        ..HttpLimits::default()
    };
    let server = Server::over(Toy::default().start(), |s| s.with_limits(limits)).await;
    // Spaces are JSON's to skip.
    let padded = |len: usize| {
        let mut body = greedy("abc", 2).to_string().into_bytes();
        body.resize(len, b' ');
        body
    };
    let response = send(&server, "/v1/completions", "gzip", gzip(&padded(MAX))).await;
    assert_eq!(response.status(), 200);
    let bomb = gzip(&padded(40 << 20));
    assert!(bomb.len() < MAX, "{}", bomb.len());
    for (encoding, bytes) in [
        ("gzip", gzip(&padded(MAX + 1))),
        ("deflate", zlib(&padded(MAX + 1))),
        ("gzip", bomb),
        // Nothing comes of empty members, but they are received.
        ("gzip", gzip(b"").repeat(MAX / gzip(b"").len() + 1)),
    ] {
        let response = send(&server, "/v1/completions", encoding, bytes).await;
        error(response, 413, "request_too_large").await;
    }
    server.done().await;
}
