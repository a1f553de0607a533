//! Traces: what a collector gets of the program's requests, and what becomes of them without one.

#[path = "common/process.rs"]
#[allow(dead_code, reason = "each test file uses its part")]
mod process;
#[path = "common/project.rs"]
#[allow(dead_code, reason = "each test file uses its part")]
mod project;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use process::{Server, foretoken};
use prost::Message;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const PATIENCE: Duration = Duration::from_secs(30);

/// The first line and the body of a request.
type Exported = (String, Vec<u8>);

/// A collector, which keeps all requests.
#[derive(Clone, Default)]
struct Collector {
    got: Arc<Mutex<Vec<Exported>>>,
}

impl Collector {
    fn start() -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let collector = Self::default();
        let taken = collector.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                taken.take(stream.unwrap());
            }
        });
        (collector, url)
    }

    fn take(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream);
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let length = lines
            .iter()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.unwrap().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        assert!(
            lines.contains(&"content-type: application/x-protobuf".to_owned()),
            "{lines:?}"
        );
        self.got.lock().unwrap().push((lines[0].clone(), body));
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        reader.get_mut().write_all(answer.as_bytes()).unwrap();
    }

    /// All spans so far. Each must be the service's.
    fn spans(&self) -> Vec<Seen> {
        let mut all = Vec::new();
        for (line, body) in &*self.got.lock().unwrap() {
            assert_eq!(line, "post /v1/traces http/1.1");
            let batch = ExportTraceServiceRequest::decode(body.as_slice()).unwrap();
            for of_resource in batch.resource_spans {
                let resource = of_resource.resource.unwrap().attributes;
                let name = resource
                    .iter()
                    .find(|one| one.key == "service.name")
                    .unwrap();
                let name = name.value.clone().unwrap().value.unwrap();
                assert_eq!(name, Value::StringValue("foretoken".into()));
                let spans = of_resource
                    .scope_spans
                    .into_iter()
                    .flat_map(|scope| scope.spans);
                all.extend(spans.map(Seen::new));
            }
        }
        all
    }
}

/// A span with its attributes by name.
struct Seen {
    span: Span,
    attributes: BTreeMap<String, Value>,
}

impl Seen {
    fn new(mut span: Span) -> Self {
        let attributes = std::mem::take(&mut span.attributes).into_iter();
        let attributes = attributes
            .map(|one| (one.key, one.value.unwrap().value.unwrap()))
            .collect();
        Self { span, attributes }
    }

    #[track_caller]
    fn has(&self, name: &str, value: Value) {
        let got = self.attributes.get(name);
        assert_eq!(got, Some(&value), "{name} of {:?}", self.attributes);
    }

    #[track_caller]
    fn text(&self, name: &str, value: &str) {
        self.has(name, Value::StringValue(value.into()));
    }

    #[track_caller]
    fn int(&self, name: &str, value: i64) {
        self.has(name, Value::IntValue(value));
    }

    #[track_caller]
    fn number(&self, name: &str) -> f64 {
        match self.attributes.get(name) {
            Some(Value::DoubleValue(x)) => *x,
            Some(Value::IntValue(x)) => *x as f64,
            other => panic!("{name} is {other:?} in {:?}", self.attributes),
        }
    }

    fn trace(&self) -> String {
        hex(&self.span.trace_id)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sends a request with headers of its own, and returns the whole response.
fn post(server: &Server, path: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (host, len) = (server.address(), body.len());
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len}\r\nConnection: close\r\n{headers}\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Number of spans that the server has dropped.
#[track_caller]
fn dropped(server: &Server) -> u64 {
    let metrics = server.get("/metrics");
    let name = "foretoken:trace_spans_dropped_total{";
    let line = metrics.lines().find(|line| line.starts_with(name));
    line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}

/// The program, without the user's settings of traces.
fn quiet() -> Command {
    let mut command = foretoken();
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command.env("RUST_LOG", "warn");
    command
}

/// The spans of the request with this id: its own, and those below it by name.
#[track_caller]
fn of_request<'a>(spans: &'a [Seen], id: &str) -> (&'a Seen, Vec<&'a Seen>) {
    let id = Value::StringValue(id.into());
    let mut servers = spans
        .iter()
        .filter(|one| one.attributes.get("gen_ai.request.id") == Some(&id));
    let server = servers
        .next()
        .unwrap_or_else(|| panic!("no span of {id:?}"));
    assert!(servers.next().is_none(), "two spans of {id:?}");
    assert_eq!(server.span.kind(), SpanKind::Server);
    let below = spans
        .iter()
        .filter(|one| one.span.parent_span_id == server.span.span_id);
    (server, below.collect())
}

#[test]
fn a_collector_gets_the_spans_of_requests() {
    let (collector, url) = Collector::start();
    let flags = format!("--otlp-traces-endpoint {url} --spec-budget fixed");
    let mut program = quiet();
    // One that downloads need is not asked for a collector on this machine.
    program.env("ALL_PROXY", "http://127.0.0.1:1");
    program.env("OTEL_BSP_SCHEDULE_DELAY", "10");
    let mut server = Server::spawn(program, &flags);
    let parent =
        |flags| format!("traceparent: 00-{TRACE}-{PARENT}-{flags}\r\ntracestate: a=1,b=2\r\n");

    let body = r#"{"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 1, "ignore_eos": true}"#;
    let headers = parent("01") + "x-request-id: whole\r\n";
    let answer = post(&server, "/v1/completions", &headers, body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let reply = answer.split_once("\r\n\r\n").unwrap().1;
    let reply: serde_json::Value = serde_json::from_str(reply).unwrap();

    // Of two sequences, streamed, with a parent that is none, and ended by a string that the engine does not know.
    let body = r#"{"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 60, "n": 2, "temperature": 0, "stop": [" "], "stream": true}"#;
    let headers = "traceparent: 00-123-456-01\r\nx-request-id: stream\r\n";
    let answer = post(&server, "/v1/chat/completions", headers, body);
    assert!(answer.contains("data: [DONE]"), "{answer}");

    let body = r#"{"prompt": "Once", "temperature": 9}"#;
    let answer = post(
        &server,
        "/v1/completions",
        "x-request-id: refused\r\n",
        body,
    );
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");

    // A client that does not sample, and requests that are not for text.
    let headers = parent("00") + "x-request-id: unsampled\r\n";
    let prompts = ["Once", "Then"].map(|word| format!("{word} there was a cat. ").repeat(16));
    let body = serde_json::json!({"prompt": prompts, "max_tokens": 2}).to_string();
    let answer = post(&server, "/v1/completions", &headers, &body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(dropped(&server), 0);

    // Of two prompts that are cached now.
    let headers = "x-request-id: cached\r\n";
    let answer = post(&server, "/v1/completions", headers, &body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let again = answer.split_once("\r\n\r\n").unwrap().1;
    let again: serde_json::Value = serde_json::from_str(again).unwrap();

    let started = Instant::now();
    while collector.spans().len() < 4 + 7 + 1 + 7 && started.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.stop("TERM", PATIENCE), Some(0));
    let spans = collector.spans();
    let count = spans.len();
    assert_eq!(
        count,
        4 + 7 + 1 + 7,
        "{:?}",
        spans.iter().map(|one| &one.span.name).collect::<Vec<_>>()
    );

    let (whole, below) = of_request(&spans, "whole");
    assert_eq!(whole.trace(), TRACE);
    assert_eq!(hex(&whole.span.parent_span_id), PARENT);
    assert_eq!(whole.span.trace_state, "a=1,b=2");
    assert_eq!(whole.span.name, "text_completion foretoken-demo");
    whole.text("gen_ai.operation.name", "text_completion");
    whole.text("gen_ai.request.model", "foretoken-demo");
    whole.text("gen_ai.response.id", reply["id"].as_str().unwrap());
    whole.text("http.route", "/v1/completions");
    whole.int("http.response.status_code", 200);
    whole.int("gen_ai.request.max_tokens", 24);
    whole.has("gen_ai.request.temperature", Value::DoubleValue(0.7));
    whole.has("gen_ai.request.top_p", Value::DoubleValue(0.9));
    whole.int(
        "gen_ai.usage.input_tokens",
        reply["usage"]["prompt_tokens"].as_i64().unwrap(),
    );
    whole.int("gen_ai.usage.output_tokens", 24);
    let reasons = whole.attributes.get("gen_ai.response.finish_reasons");
    assert!(format!("{reasons:?}").contains("\"length\""), "{reasons:?}");
    let latency = |name: &str| whole.number(&format!("gen_ai.latency.{name}"));
    let (first, e2e) = (latency("time_to_first_token"), latency("e2e"));
    let parts = latency("time_in_queue") + latency("time_in_model_prefill");
    assert!((first - parts).abs() < 1e-6, "{first} is not {parts}");
    assert!(first + latency("time_in_model_decode") <= e2e, "{e2e}");

    // The phases follow each other within the request.
    let names: Vec<&str> = below.iter().map(|one| one.span.name.as_str()).collect();
    assert_eq!(names, ["queue", "prefill", "decode"]);
    let mut at = whole.span.start_time_unix_nano;
    for one in &below {
        assert_eq!(one.trace(), TRACE);
        assert!(one.span.start_time_unix_nano >= at, "{:?}", one.span);
        at = one.span.end_time_unix_nano;
        assert!(one.span.start_time_unix_nano <= at, "{:?}", one.span);
    }
    assert!(at <= whole.span.end_time_unix_nano);
    let usage = &reply["usage"]["speculative_decoding"];
    for (name, of_usage) in [
        ("rounds", "num_drafts"),
        ("drafted", "num_draft_tokens"),
        ("accepted", "num_accepted_tokens"),
        ("acceptance_rate", "acceptance_rate"),
    ] {
        let got = below[2].number(&format!("foretoken.speculation.{name}"));
        let wanted = usage[of_usage].as_f64().unwrap();
        assert!((got - wanted).abs() < 1e-9, "{name} is {got}: {usage}");
    }
    assert!(below[2].number("foretoken.speculation.rounds") > 0.0);

    let (stream, below) = of_request(&spans, "stream");
    assert_ne!(stream.trace(), TRACE);
    assert!(stream.span.parent_span_id.is_empty(), "{:?}", stream.span);
    assert_eq!(stream.span.name, "chat foretoken-demo");
    assert_eq!(below.len(), 6);
    stream.int("gen_ai.request.choice.count", 2);
    let reasons = stream.attributes.get("gen_ai.response.finish_reasons");
    assert_eq!(
        format!("{reasons:?}").matches("\"stop\"").count(),
        2,
        "{reasons:?}"
    );

    let (cached, below) = of_request(&spans, "cached");
    assert_eq!(below.len(), 6);
    let of_usage = &again["usage"]["prompt_tokens_details"]["cached_tokens"];
    let of_usage = of_usage.as_i64().unwrap();
    assert!(of_usage > 0, "{again}");
    cached.int("gen_ai.usage.cache_read.input_tokens", of_usage);

    let (refused, below) = of_request(&spans, "refused");
    assert!(below.is_empty());
    refused.int("http.response.status_code", 400);
    refused.text("error.type", "invalid_value");
    let status = refused.span.status.clone().unwrap_or_default();
    assert_eq!(
        status.code, 0,
        "a client's mistake is no error of the server's"
    );
}

/// The end sends the spans that wait. It takes a second at most, so on a busy machine some may be lost, and the test tries
/// again.
#[test]
fn the_end_sends_what_is_left() {
    let is_sent = |_| {
        let (collector, url) = Collector::start();
        let mut command = quiet();
        // Nothing else sends anything.
        command.env("OTEL_BSP_SCHEDULE_DELAY", "600000");
        let mut server = Server::spawn(command, &format!("--otlp-traces-endpoint {url}"));
        let answer = server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(collector.spans().len(), 0);
        assert_eq!(server.stop("TERM", PATIENCE), Some(0));
        collector.spans().len() == 4
    };
    assert!((0..10).any(is_sent));
}

/// A collector that takes connections and never answers. Requests are served as ever, spans are dropped and
/// counted, there is one warning, and the end does not wait.
#[test]
fn a_collector_that_hangs_costs_nothing_but_its_spans() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut log = tempfile::tempfile().unwrap();
    let mut command = quiet();
    command
        .env(
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            format!("http://{}", collector.local_addr().unwrap()),
        )
        .env("OTEL_EXPORTER_OTLP_TIMEOUT", "600000")
        .env("OTEL_BSP_SCHEDULE_DELAY", "10")
        .env("OTEL_BSP_MAX_QUEUE_SIZE", "10")
        .stderr(log.try_clone().unwrap());
    let mut server = Server::spawn(command, "--shutdown-timeout 1");
    for _ in 0..6 {
        let answer = server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let started = Instant::now();
    // The last request's spans are made when its connection has ended.
    while dropped(&server) < 14 && started.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Of 24 spans the queue takes 10.
    assert_eq!(dropped(&server), 14);
    // Less than the ten minutes that an export may take.
    assert_eq!(server.stop("TERM", PATIENCE), Some(0));
    let mut said = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut said).unwrap();
    assert_eq!(said.matches("too slowly").count(), 1, "{said}");
    assert_eq!(
        said.matches("the last traces may be lost").count(),
        1,
        "{said}"
    );
}

/// No collector at all: what cannot be sent is counted and said once.
#[test]
fn a_collector_that_is_gone_is_missed_once() {
    // Nothing listens there.
    let url = "http://127.0.0.1:9/v1/traces";
    let mut log = tempfile::tempfile().unwrap();
    let mut command = quiet();
    command
        .env("OTEL_BSP_SCHEDULE_DELAY", "10")
        .stderr(log.try_clone().unwrap());
    let mut server = Server::spawn(command, &format!("--otlp-traces-endpoint {url}"));
    let started = Instant::now();
    for count in [4, 8] {
        let answer = server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        while dropped(&server) != count {
            assert!(started.elapsed() < PATIENCE, "{}", dropped(&server));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(server.stop("TERM", PATIENCE), Some(0));
    let mut said = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut said).unwrap();
    assert_eq!(said.matches("traces cannot be sent").count(), 1, "{said}");
}

#[test]
fn what_is_not_spoken_is_refused() {
    let refused = |command: &mut Command, needle: &str| {
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(needle), "{said}");
    };
    refused(
        quiet().args(["--otlp-traces-endpoint", "localhost:4317"]),
        "--otlp-traces-endpoint",
    );
    refused(
        quiet()
            .args([
                "--otlp-traces-endpoint",
                "http://localhost:4317",
                "--port",
                "0",
            ])
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        "OTEL_EXPORTER_OTLP_PROTOCOL is grpc",
    );
}
