//! TLS: both versions of HTTP over it, and clients that do not speak it, or do not go on.

use crate::common::Toy;
use crate::common::process::{foretoken, refusal_line};
use crate::common::project::root;
use crate::common::server::{LONG, Server, slow};
use foretoken::engine::EngineOptions;
use foretoken::http::{AppState, HttpLimits, Tls};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, Version, client};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const SHORT: Duration = Duration::from_millis(200);
/// More than a limit of [`SHORT`] takes, and less than any default.
const SOON: Duration = Duration::from_secs(8);

/// A certificate of `localhost` that signs itself, and its key.
struct Identity {
    roots: RootCertStore,
}

impl Identity {
    fn new() -> Self {
        Self::of("cert.pem")
    }

    fn of(name: &str) -> Self {
        let mut roots = RootCertStore::empty();
        let certificate = CertificateDer::from_pem_file(stored(name)).unwrap();
        roots.add(certificate).unwrap();
        Self { roots }
    }

    fn tls(&self) -> Tls {
        Tls::from_files(&stored("cert.pem"), &stored("key.pem")).unwrap()
    }

    /// A connection to `server` on which `protocol` is to be spoken; none if it is empty.
    async fn connect(&self, server: &Server, protocol: &str) -> TlsStream<TcpStream> {
        self.connect_to(address(server), protocol).await
    }

    async fn connect_to(&self, address: &str, protocol: &str) -> TlsStream<TcpStream> {
        self.try_to(address, protocol).await.unwrap()
    }

    /// The same, or why the server is not trusted.
    async fn try_to(&self, address: &str, protocol: &str) -> io::Result<TlsStream<TcpStream>> {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(self.roots.clone());
        let mut config = config.with_no_client_auth();
        let protocols = [protocol].into_iter().filter(|name| !name.is_empty());
        config.alpn_protocols = protocols.map(|name| name.as_bytes().to_vec()).collect();
        let name = ServerName::try_from("localhost").unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = TcpStream::connect(address).await.unwrap();
        connector.connect(name, stream).await
    }
}

fn stored(name: &str) -> PathBuf {
    root().join("tests/data/tls").join(name)
}

fn address(server: &Server) -> &str {
    server.url.strip_prefix("http://").unwrap()
}

async fn tcp(server: &Server) -> TcpStream {
    TcpStream::connect(address(server)).await.unwrap()
}

async fn limited(identity: &Identity, limits: HttpLimits) -> Server {
    let tls = Some(identity.tls());
    let with = |state: AppState| state.with_limits(limits).with_tls(tls);
    Server::over(Toy::default().start(), with).await
}

fn question(stream: bool) -> Request<Full<Bytes>> {
    let body = json!({"model": "toy", "prompt": "ab", "max_tokens": 12, "temperature": 0, "stream": stream});
    Request::post("https://localhost/v1/completions")
        .header("content-type", "application/json")
        .header("host", "localhost")
        .body(body.to_string().into())
        .unwrap()
}

async fn text(reply: Response<Incoming>) -> String {
    assert_eq!(reply.status(), 200);
    let body = reply.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

/// The text of an answer.
fn answer(json: &str) -> String {
    let json: Value = serde_json::from_str(json).unwrap();
    json["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The text of a stream.
fn streamed(events: &str) -> String {
    let data = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(answer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_versions_of_http_have_the_same_texts() {
    let identity = Identity::new();
    let server = limited(&identity, HttpLimits::default()).await;
    let stream = identity.connect(&server, "h2").await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let io = TokioIo::new(stream);
    let handshake = client::conn::http2::handshake(TokioExecutor::new(), io);
    let (mut sender, connection) = handshake.await.unwrap();
    let connection = tokio::spawn(connection);
    let reply = sender.send_request(question(false)).await.unwrap();
    assert_eq!(reply.version(), Version::HTTP_2);
    let wanted = answer(&text(reply).await);
    assert!(!wanted.is_empty());
    // Many at once on one connection, each with the same text.
    let mut replies = Vec::new();
    for _ in 0..8 {
        replies.push(tokio::spawn(sender.send_request(question(true))));
    }
    for reply in replies {
        let events = text(reply.await.unwrap().unwrap()).await;
        assert_eq!(streamed(&events), wanted, "{events}");
        assert!(events.ends_with("data: [DONE]\n\n"), "{events}");
    }
    drop(sender);
    connection.await.unwrap().unwrap();

    for protocol in ["http/1.1", ""] {
        let io = TokioIo::new(identity.connect(&server, protocol).await);
        let (mut sender, connection) = client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        for stream in [false, true] {
            sender.ready().await.unwrap();
            let reply = sender.send_request(question(stream)).await.unwrap();
            assert_eq!(reply.version(), Version::HTTP_11);
            let text = text(reply).await;
            let found = if stream {
                streamed(&text)
            } else {
                answer(&text)
            };
            assert_eq!(found, wanted, "{protocol}");
        }
    }
}

/// A page of another site is refused in HTTP/2, too, where the host is no header.
#[tokio::test(flavor = "multi_thread")]
async fn the_host_of_http_2_is_checked() {
    let identity = Identity::new();
    let server = limited(&identity, HttpLimits::default()).await;
    let io = TokioIo::new(identity.connect(&server, "h2").await);
    let handshake = client::conn::http2::handshake(TokioExecutor::new(), io);
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("https://evil.example/v1/models").body(Full::<Bytes>::default());
    let reply = sender.send_request(request.unwrap()).await.unwrap();
    assert_eq!(reply.status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_tls_is_told() {
    let identity = Identity::new();
    let server = limited(&identity, HttpLimits::default()).await;
    let mut stream = tcp(&server).await;
    stream
        .write_all(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 400 "), "{said}");
    let (head, body) = said.split_once("\r\n\r\n").unwrap();
    assert!(body.contains("https"), "{said}");
    assert!(
        head.contains(&format!("Content-Length: {}", body.len())),
        "{said}"
    );
    // Something else than a handshake that begins as one.
    let mut stream = tcp(&server).await;
    stream.write_all(&[22; 100]).await.unwrap();
    let mut said = Vec::new();
    let closed = tokio::time::timeout(SOON, stream.read_to_end(&mut said)).await;
    assert!(closed.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_does_not_come_ends() {
    let identity = Identity::new();
    let limits = HttpLimits {
        timeout_headers: SHORT,
        max_connections: 1,
        ..HttpLimits::default()
    };
    let server = limited(&identity, limits).await;
    for begin in [&b""[..], &[22, 3, 1]] {
        let mut stream = tcp(&server).await;
        stream.write_all(begin).await.unwrap();
        let closed = tokio::time::timeout(SOON, stream.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{begin:?}");
    }
    // The place is free again, for a client that comes to speak in time.
    let begun = Instant::now();
    while !is_answered(&identity, &server).await {
        assert!(begun.elapsed() < LONG, "its place is not free again");
        tokio::time::sleep(SHORT / 10).await;
    }
}

/// Whether a new connection gets an answer.
async fn is_answered(identity: &Identity, server: &Server) -> bool {
    let Ok(stream) = identity.try_to(address(server), "http/1.1").await else {
        return false;
    };
    let handshake = client::conn::http1::handshake(TokioIo::new(stream));
    let Ok((mut sender, connection)) = handshake.await else {
        return false;
    };
    tokio::spawn(connection);
    let Ok(reply) = sender.send_request(question(false)).await else {
        return false;
    };
    reply.status() == 200 && !answer(&text(reply).await).is_empty()
}

/// A client of HTTP/2 that takes nothing of a reply, although it answers on the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_nobody_takes_ends_the_connection() {
    let identity = Identity::new();
    let limits = HttpLimits {
        timeout_write: SHORT,
        ..HttpLimits::default()
    };
    let tls = Some(identity.tls());
    let with = |state: AppState| state.with_limits(limits).with_tls(tls);
    let engine = slow(EngineOptions::default(), None);
    let server = Server::over(engine.clone(), with).await;
    let io = TokioIo::new(identity.connect(&server, "h2").await);
    let handshake = client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(64)
        .handshake(io);
    let (mut sender, connection) = handshake.await.unwrap();
    let connection = tokio::spawn(connection);
    let reply = sender.send_request(question(true)).await.unwrap();
    assert_eq!(reply.status(), 200);
    // Half of the limit's default.
    let ended = tokio::time::timeout(LONG / 2, connection).await;
    assert!(ended.is_ok());
    drop(reply);
}

/// What is wrong with the files is told in one line, before a model is loaded.
#[test]
fn wrong_files_are_told() {
    let at = |name: &str| stored(name).display().to_string();
    let (cert, key) = (at("cert.pem"), at("key.pem"));
    for (flags, needle) in [
        (
            vec!["--tls-cert", &cert],
            "--tls-cert and --tls-key belong together",
        ),
        (
            vec!["--tls-key", &key],
            "--tls-cert and --tls-key belong together",
        ),
        (
            vec!["--tls-cert", &key, "--tls-key", &key],
            "there is no certificate",
        ),
        (vec!["--tls-cert", &cert, "--tls-key", "no.pem"], "no.pem"),
    ] {
        for command in [&["serve", "o/m"][..], &["router", "--models-dir", "models"]] {
            let output = foretoken().args(command).args(&flags).output().unwrap();
            let said = refusal_line(&output);
            assert!(said.contains(needle), "{said}");
        }
    }
}

/// From the flags to an answer.
#[cfg(feature = "embedded-model")]
#[tokio::test(flavor = "multi_thread")]
async fn the_program_serves_with_a_certificate() {
    use std::io::{BufRead, BufReader};
    let identity = Identity::new();
    let folder = tempfile::tempdir().unwrap();
    for name in ["cert.pem", "key.pem"] {
        std::fs::copy(stored(name), folder.path().join(name)).unwrap();
    }
    let file = folder.path().join("f.toml");
    // Paths in a file are relative to its folder.
    let config = "tls-cert = \"cert.pem\"\ntls-key = \"key.pem\"\nnum-blocks = 64\nport = 0\n";
    std::fs::write(&file, config).unwrap();
    let mut child = foretoken()
        .args(["serve", "--config"])
        .arg(&file)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let line = lines.find(|line| line.contains("serves https://")).unwrap();
    assert!(line.contains("curl https://127.0.0.1:"), "{line}");
    let address = line.split_once("https://").unwrap().1;
    let address = address.split(' ').next().unwrap();
    let io = TokioIo::new(identity.connect_to(address, "h2").await);
    let handshake = client::conn::http2::handshake(TokioExecutor::new(), io);
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("https://localhost/v1/models").body(Full::<Bytes>::default());
    let reply = sender.send_request(request.unwrap()).await.unwrap();
    let said = text(reply).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.contains("foretoken-demo"), "{said}");
}

/// The program over TLS, and what it logs.
#[cfg(all(unix, feature = "embedded-model"))]
struct Program {
    child: std::process::Child,
    address: String,
    log: tempfile::NamedTempFile,
}

#[cfg(all(unix, feature = "embedded-model"))]
impl Program {
    fn start(folder: &std::path::Path) -> Self {
        use std::io::{BufRead, BufReader};
        let log = tempfile::NamedTempFile::new().unwrap();
        let at = |name: &str| folder.join(name).display().to_string();
        let mut child = foretoken()
            .args(["--num-blocks", "64", "--port", "0", "--tls-cert"])
            .args([&at("cert.pem"), "--tls-key", &at("key.pem")])
            .env("RUST_LOG", "info")
            .stdout(std::process::Stdio::piped())
            .stderr(log.reopen().unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let line = lines.find(|line| line.contains("serves https://")).unwrap();
        let address = line.split_once("https://").unwrap().1;
        let address = address.split(' ').next().unwrap().to_owned();
        Self {
            child,
            address,
            log,
        }
    }

    /// Asks it to read the files again.
    fn hang_up(&self) {
        let pid = self.child.id().to_string();
        let kill = std::process::Command::new("kill")
            .args(["-HUP", &pid])
            .status();
        assert!(kill.unwrap().success());
    }

    /// The lines of the log about the certificate.
    fn said(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.log.path()).unwrap();
        let lines = log.lines().filter(|line| line.contains("certificate"));
        lines.map(str::to_owned).collect()
    }

    /// Waits until the log has `count` lines about the certificate.
    async fn says(&self, count: usize) -> Vec<String> {
        let begun = Instant::now();
        while self.said().len() < count {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{:?}",
                self.said()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.said()
    }
}

#[cfg(all(unix, feature = "embedded-model"))]
impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Renews as certbot does: links lead to other files.
#[cfg(all(unix, feature = "embedded-model"))]
fn renew(folder: &std::path::Path, cert: &std::path::Path, key: &std::path::Path) {
    for (name, file) in [("cert.pem", cert), ("key.pem", key)] {
        let link = folder.join(name);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(file, link).unwrap();
    }
}

/// New connections have a renewed certificate; those that are open go on, and files that are broken change nothing.
#[cfg(all(unix, feature = "embedded-model"))]
#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_taken() {
    let (old, new) = (Identity::new(), Identity::of("other-cert.pem"));
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = (stored("cert.pem"), stored("key.pem"));
    renew(folder.path(), &cert, &key);
    let program = Program::start(folder.path());
    let address = program.address.as_str();
    let io = TokioIo::new(old.connect_to(address, "http/1.1").await);
    let (mut sender, connection) = client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection);
    assert!(new.try_to(address, "h2").await.is_err());
    // A text that is being written meanwhile.
    let body = json!({"model": "foretoken-demo", "prompt": "Once", "max_tokens": 200, "stream": true, "ignore_eos": true});
    let request = Request::post("https://localhost/v1/completions")
        .header("content-type", "application/json")
        .header("host", "localhost");
    let request = request.body(Full::<Bytes>::from(body.to_string())).unwrap();
    let reply = sender.send_request(request).await.unwrap();

    renew(
        folder.path(),
        &stored("other-cert.pem"),
        &stored("other-key.pem"),
    );
    program.hang_up();
    let said = program.says(1).await;
    assert!(
        said[0].contains("new connections have the new certificate"),
        "{said:?}"
    );
    let stream = new.connect_to(address, "h2").await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    assert!(old.try_to(address, "h2").await.is_err());
    assert!(text(reply).await.ends_with("data: [DONE]\n\n"));
    sender.ready().await.unwrap();
    let request = Request::get("https://localhost/v1/models").header("host", "localhost");
    let reply = sender
        .send_request(request.body(Full::<Bytes>::default()).unwrap())
        .await;
    assert!(text(reply.unwrap()).await.contains("foretoken-demo"));

    // No certificate, another one's key, no file.
    let broken = [
        (stored("key.pem"), stored("key.pem")),
        (stored("cert.pem"), stored("other-key.pem")),
        (folder.path().join("none"), stored("key.pem")),
    ];
    for (count, (cert, key)) in (2..).zip(broken) {
        renew(folder.path(), &cert, &key);
        program.hang_up();
        let said = program.says(count).await;
        assert!(said[count - 1].contains("WARN"), "{said:?}");
        assert!(
            said[count - 1].contains("the certificate stays as it was: "),
            "{said:?}"
        );
        new.connect_to(address, "http/1.1").await;
    }
    renew(folder.path(), &cert, &key);
    program.hang_up();
    assert_eq!(program.says(5).await.len(), 5);
    old.connect_to(address, "h2").await;
}
