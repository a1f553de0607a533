//! A test of the process: when the engine crashes, the process ends too, in good order.
//!
//! The test runs itself again with [`CRASH`] set. That process is the server: flags, log, listener, signals
//! and exit code are those of the program, and only its engine is one that crashes. So the program itself
//! needs no way to make it fail.

use crate::finish;
use crate::hooked;
use crate::log::LineWriter;
use crate::serve::{self, Entrance};
use crate::start_log;
use crate::stdin::StdinEnd;
use foretoken::assembly::load::Loaded;
use foretoken::config::Command;
use foretoken::engine::{self, EngineOptions};
use foretoken::error::Result;
use foretoken::gguf::GgufSource;
use foretoken::http::ServerInfo;
use foretoken::model::ModelSource;
use foretoken::model::toy::ToyModel;
use foretoken::spec::{Draft, DraftRequest, Drafter, SeqId};
use foretoken::text::Text;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Set where the engine of the process crashes.
const CRASH: &str = "FORETOKEN_TEST_CRASH";
const PATIENCE: Duration = Duration::from_secs(30);

/// A drafter that drafts nothing. When a request ends, its pool is in disorder and the next step fails, after
/// which the engine looks at the pool.
struct CrashingDrafter {
    is_in_disorder: Arc<AtomicBool>,
}

impl Drafter for CrashingDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        Ok(requests.iter().map(|_| Draft::default()).collect())
    }

    fn forget(&mut self, _: SeqId) {
        self.is_in_disorder.store(true, Ordering::SeqCst);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        if self.is_in_disorder.load(Ordering::SeqCst) {
            Err("block 0 is lost".into())
        } else {
            Ok(())
        }
    }
}

/// The server, in its own process.
fn serve_until_crash() -> u8 {
    let log = LineWriter::new(std::io::stderr()).unwrap();
    log.take_panics();
    let Ok(command) = Command::from_args(["foretoken", "--port", "0"]) else {
        panic!("good flags");
    };
    start_log(&command, &log).unwrap();
    let Command::Serve(config) = command else {
        panic!("serve is the default");
    };
    let demo = GgufSource::embedded("foretoken-demo").unwrap();
    let text = Text::from_gguf(demo.clone()).unwrap();
    let is_in_disorder = Arc::<AtomicBool>::default();
    let fails = is_in_disorder.clone();
    let toy = ToyModel::new(text.vocab_size(), 8192, 1, 0.0);
    // Slow enough that no request ends by itself.
    let model = hooked::watched(toy, move |_| {
        assert!(!fails.load(Ordering::SeqCst), "in the middle of a step");
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    });
    let drafter = CrashingDrafter { is_in_disorder };
    let options = EngineOptions {
        max_num_seqs: 3,
        ..EngineOptions::default()
    };
    let engine = engine::spawn(model, Some(Box::new(drafter)), 2048, 16, options);
    let loaded = Loaded {
        draft_operations: Vec::new(),
        engine: engine.unwrap(),
        text: Some(Arc::new(text)),
        device: "cpu",
        info: ServerInfo::default(),
        source: ModelSource::Gguf(demo),
        embeddings: None,
        reranker: None,
        adapters: None,
    };
    let served = Entrance::open(&config.http.listen).and_then(|entrance| {
        let stdin = StdinEnd::watch(false)?;
        serve::serve(&config, entrance, loaded, &log, stdin)
    });
    finish(served, &log)
}

/// The process, killed if the test fails.
struct Server {
    child: Child,
    address: String,
    _stdout: BufReader<ChildStdout>,
}

impl Server {
    fn start() -> Self {
        let this = std::thread::current().name().unwrap().to_owned();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &this, "--nocapture"])
            .env(CRASH, "1")
            .env_remove("RUST_LOG")
            .env_remove("RUST_BACKTRACE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "it has not begun");
            if let Some((_, at)) = line.split_once("http://") {
                break at.split(' ').next().unwrap().to_owned();
            }
        };
        Self {
            child,
            address,
            _stdout: stdout,
        }
    }

    fn send(&self, request: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (host, len) = (&self.address, body.len());
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// A request that takes longer than the test.
    fn complete(&self, stream: bool) -> TcpStream {
        let body = format!(
            r#"{{"prompt": "Once", "max_tokens": 8000, "ignore_eos": true, "stream": {stream}}}"#
        );
        self.send("POST /v1/completions", &body)
    }

    /// Waits until so many requests run and wait.
    fn has(&self, running: usize, waiting: usize) {
        let started = Instant::now();
        loop {
            let metrics = rest(self.send("GET /metrics", ""));
            let is = |name: &str, count: usize| {
                let mut lines = metrics.lines().filter(|line| line.starts_with(name));
                lines.any(|line| line.ends_with(&format!(" {count}")))
            };
            if is("foretoken:num_requests_running", running)
                && is("foretoken:num_requests_waiting", waiting)
            {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{metrics}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process ends by itself.
    fn end(mut self) -> (Option<i32>, String) {
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut said = String::new();
                let stderr = self.child.stderr.as_mut().unwrap();
                stderr.read_to_string(&mut said).unwrap();
                return (status.code(), said);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still running {PATIENCE:?} after the engine's crash");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn rest(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Three requests run, one waits, one connection is idle. When the engine dies, each request is told, and the
/// process ends without a signal.
#[test]
fn the_process_ends_with_its_engine() {
    if std::env::var(CRASH).is_ok() {
        std::process::exit(serve_until_crash().into());
    }
    let server = Server::start();
    let idle = TcpStream::connect(&server.address).unwrap();
    let (stream, whole) = (server.complete(true), server.complete(false));
    let dropped = server.complete(true);
    server.has(3, 0);
    let next = server.complete(false);
    server.has(3, 1);
    let waiting = server.complete(false);
    server.has(3, 2);
    drop(dropped);
    let stream = rest(stream);
    assert!(stream.starts_with("HTTP/1.1 200"), "{stream}");
    let failed = "in the middle of a step";
    let last = stream
        .rsplit("data: ")
        .find(|event| event.contains("error"));
    assert!(last.is_some_and(|event| event.contains(failed)), "{stream}");
    let why = "draft pool: block 0 is lost";
    for (request, told) in [(whole, failed), (next, failed), (waiting, why)] {
        let answer = rest(request);
        assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
        assert!(answer.contains(told), "{answer}");
    }
    let (code, said) = server.end();
    drop(idle);
    assert_eq!(code, Some(1), "{said}");
    let last = said.lines().last().map(str::to_owned);
    assert_eq!(last, Some(format!("error: {why}")), "{said}");
    let errors = said.lines().filter(|line| line.starts_with("error: "));
    assert_eq!(errors.count(), 1, "{said}");
}
