//! `foretoken router`: several models at one address, each in a process of its own.

use crate::common::process::Server;
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::common::{assert_has, sample, wait_until};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tempfile::TempDir;

/// The maximum time that a test waits for a process.
const LONG: Duration = Duration::from_secs(60);

/// The two models of the program, as `demo` and `small`.
pub const MODELS: &str = r#"
args = ["--num-blocks", "128"]
[[model]]
name = "demo"
model = "foretoken-demo"
args = ["--max-num-seqs", "8"]
[[model]]
name = "small"
model = "foretoken-demo-draft"
"#;

/// A router, and the folder of its file.
pub struct Router {
    pub server: Server,
    _folder: TempDir,
}

impl Router {
    /// A router of [`MODELS`] with these `keys` in its file, too.
    fn start(keys: &str, flags: &str) -> Self {
        Self::of(&format!("{keys}\n{MODELS}"), flags)
    }

    /// A router with this file.
    pub fn of(text: &str, flags: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("router.toml");
        std::fs::write(&file, text).unwrap();
        let flags = format!("router --config {} {flags}", file.display());
        Self {
            server: Server::start(&flags),
            _folder: folder,
        }
    }

    /// The status and the JSON of an answer.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        read(&self.server.post(path, &body.to_string()))
    }

    fn complete(&self, model: &str) -> (u16, Value) {
        let body = json!({"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0});
        self.post("/v1/completions", &body)
    }

    /// The state of each model, in their order.
    pub fn states(&self) -> Vec<(String, String)> {
        let (status, list) = read(&self.server.get("/v1/models"));
        assert_eq!((status, &list["object"]), (200, &json!("list")));
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let models = list["data"].as_array().unwrap().iter();
        models
            .map(|model| (text(&model["id"]), text(&model["status"]["value"])))
            .collect()
    }

    fn wait_for(&self, states: [(&str, &str); 2]) {
        let wanted = states.map(|(name, state)| (name.to_owned(), state.to_owned()));
        wait_until(&format!("{wanted:?}"), || self.states() == wanted);
    }

    fn metric(&self, line: &str) -> bool {
        self.server
            .get("/metrics")
            .lines()
            .any(|found| found == line)
    }

    /// How many texts the process of `demo` writes, or has in its queue.
    fn texts(&self) -> u64 {
        let metrics = self.server.get("/metrics?model=demo");
        let number = |name: &str| sample(&metrics, name) as u64;
        number("foretoken:num_requests_running") + number("foretoken:num_requests_waiting")
    }

    /// A stream of `demo` that has begun, of texts that take it longer than a test.
    fn stream(&self) -> TcpStream {
        let mut stream = self.send(&long(true));
        let mut begin = [0; 16];
        stream.read_exact(&mut begin).unwrap();
        assert!(begin.starts_with(b"HTTP/1.1 200"), "{begin:?}");
        stream
    }

    fn send(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (body, host) = (body.to_string(), self.server.address());
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        stream
    }
}

/// The texts of a long request.
const MANY: u64 = 64;

fn long(stream: bool) -> Value {
    json!({
        "model": "demo", "prompt": "Once", "n": MANY, "max_tokens": 900, "ignore_eos": true, "stream": stream
    })
}

/// The status and the JSON of a whole answer.
pub fn read(answer: &str) -> (u16, Value) {
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"));
    (status, body)
}

/// The processes that have not ended, each with its parent.
fn processes() -> Vec<(u32, u32)> {
    let mut ps = std::process::Command::new("ps");
    let output = ps.args(["-A", "-o", "pid=,ppid=,stat="]).output().unwrap();
    assert!(output.status.success());
    let process = |line: &str| {
        let mut fields = line.split_whitespace();
        let (pid, parent) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        // What has ended, but nobody has waited for.
        (!fields.next()?.starts_with('Z')).then_some((pid, parent))
    };
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(process).collect()
}

/// The processes that `parent` has started.
pub fn children(parent: u32) -> Vec<u32> {
    let is_child = |&(pid, of): &(u32, u32)| (of == parent).then_some(pid);
    processes().iter().filter_map(is_child).collect()
}

fn kill(pid: u32) {
    let mut kill = std::process::Command::new("kill");
    assert!(
        kill.args(["-9", &pid.to_string()])
            .status()
            .unwrap()
            .success()
    );
}

fn error_of(answer: &Value) -> (&str, &str) {
    let error = &answer["error"];
    (
        error["code"].as_str().unwrap(),
        error["message"].as_str().unwrap(),
    )
}

#[test]
fn models_answer_by_name_and_take_each_others_place() {
    let router = Router::start("", "");
    router.wait_for([("demo", "unloaded"), ("small", "unloaded")]);
    let (status, answer) = router.complete("demo");
    assert_eq!(
        (status, &answer["model"]),
        (200, &json!("demo")),
        "{answer}"
    );
    let (_, model) = read(&router.server.get("/v1/models/demo"));
    assert_eq!(model["status"], json!({"value": "loaded"}), "{model}");
    assert!(model["max_model_len"].is_u64(), "{model}");
    let (status, answer) = router.complete("small");
    assert_eq!((status, &answer["model"]), (200, &json!("small")));
    router.wait_for([("demo", "unloaded"), ("small", "loaded")]);
    assert!(router.metric("foretoken:router_processes 1"));
    let evicted = r#"foretoken:router_stops_total{model="demo",reason="evicted"} 1"#;
    assert!(router.metric(evicted), "{}", router.server.get("/metrics"));
    let metrics = router.server.get("/metrics?model=small");
    assert_has(&metrics, &["foretoken:num_requests_running"]);
    let (status, answer) = read(&router.server.get("/metrics?model=demo"));
    assert_eq!((status, error_of(&answer).0), (503, "model_unavailable"));
    // A chat of Anthropic's API, and a stream, byte for byte.
    let body =
        json!({"model": "small", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]});
    let (status, answer) = router.post("/v1/messages", &body);
    assert_eq!((status, &answer["model"]), (200, &json!("small")));
    let body = json!({"model": "small", "prompt": "Once", "max_tokens": 3, "stream": true});
    let answer = router.server.post("/v1/completions", &body.to_string());
    let head = answer.to_lowercase();
    assert!(head.contains("content-type: text/event-stream"), "{answer}");
    assert!(head.contains("x-accel-buffering: no"), "{answer}");
    assert_eq!(head.matches("x-request-id: ").count(), 1, "{answer}");
    assert_has(&answer, &["data: {", "data: [DONE]"]);
    assert!(!answer.contains(": loading"), "{answer}");
}

#[test]
fn wrong_requests_start_nothing() {
    let router = Router::start("api-key = ['one', 'two']", "");
    let body = json!({"model": "demo", "prompt": "Once", "max_tokens": 1});
    let (status, answer) = router.post("/v1/completions", &body);
    assert_eq!((status, error_of(&answer).0), (401, "invalid_api_key"));
    let ask = |body: &Value| {
        let client = reqwest::Client::new();
        let url = format!("http://{}/v1/completions", router.server.address());
        let request = client.post(url).bearer_auth("two").json(body);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let answer = request.send().await.unwrap();
            (
                answer.status().as_u16(),
                answer.json::<Value>().await.unwrap(),
            )
        })
    };
    let (status, answer) = ask(&json!({"model": "none", "prompt": "a"}));
    let expected = (
        "model_not_found",
        "the model `none` does not exist; served: demo, small",
    );
    assert_eq!((status, error_of(&answer)), (404, expected));
    let (status, answer) = ask(&json!({"prompt": "a"}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")));
    let (status, _) = ask(&json!({"model": 1}));
    assert_eq!(status, 400);
    assert!(router.metric("foretoken:router_processes 0"));
    assert!(children(router.server.id()).is_empty());
    // The key reaches the process.
    let (status, answer) = ask(&body);
    assert_eq!(
        (status, &answer["model"]),
        (200, &json!("demo")),
        "{answer}"
    );
}

#[test]
fn a_crash_costs_only_the_requests_of_its_model() {
    let router = Router::start("max-loaded = 2", "");
    assert_eq!(router.complete("demo").0, 200);
    let demo = children(router.server.id());
    assert_eq!(demo.len(), 1);
    assert_eq!(router.complete("small").0, 200);
    let mut stream = router.stream();
    let mut whole = router.send(&long(false));
    wait_until("both are there", || router.texts() > MANY);
    kill(demo[0]);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let (_, last) = rest.rsplit_once("data: ").unwrap();
    let error: Value = serde_json::from_str(last.lines().next().unwrap()).unwrap();
    let (code, message) = error_of(&error);
    assert_eq!(code, "model_unavailable", "{error}");
    assert!(message.contains("`demo` failed: signal 9"), "{message}");
    let mut answer = String::new();
    whole.read_to_string(&mut answer).unwrap();
    let (status, error) = read(&answer);
    assert_eq!((status, error_of(&error).0), (503, "model_unavailable"));
    let (_, list) = read(&router.server.get("/v1/models"));
    assert_eq!(list["data"][0]["status"]["failed"], true, "{list}");
    assert_eq!(list["data"][1]["status"], json!({"value": "loaded"}));
    assert_eq!(router.complete("small").0, 200);
    assert_eq!(router.complete("demo").0, 200);
    router.wait_for([("demo", "loaded"), ("small", "loaded")]);
    assert!(router.metric(r#"foretoken:router_failures_total{model="demo"} 1"#));
}

#[test]
fn a_client_that_leaves_cancels_its_request() {
    let router = Router::start("", "");
    let stream = router.stream();
    drop(stream);
    wait_until("it is cancelled", || router.texts() == 0);
    // So that nothing keeps the other model out.
    assert_eq!(router.complete("small").0, 200);
}

#[test]
fn unused_models_are_unloaded_and_others_on_demand() {
    let router = Router::start("", "--idle 1 --max-loaded 2");
    assert_eq!(router.complete("demo").0, 200);
    router.wait_for([("demo", "unloaded"), ("small", "unloaded")]);
    assert!(router.metric(r#"foretoken:router_stops_total{model="demo",reason="idle"} 1"#));
    drop(router);
    let router = Router::start("", "--idle 0");
    let success = (200, json!({"success": true}));
    let small = json!({"model": "small"});
    assert_eq!(router.post("/models/load", &small), success);
    router.wait_for([("demo", "unloaded"), ("small", "loaded")]);
    assert_eq!(router.post("/models/unload", &small), success);
    router.wait_for([("demo", "unloaded"), ("small", "unloaded")]);
    let (status, answer) = router.post("/models/load", &json!({"model": "x"}));
    assert_eq!((status, error_of(&answer).0), (404, "model_not_found"));
}

#[test]
fn ollamas_clients_find_all_models_and_gets_start_none() {
    let router = Router::start("max-loaded = 2", "");
    let list = |path: &str| {
        let (status, mut list) = read(&router.server.get(path));
        assert_eq!(status, 200, "{list}");
        list["models"].take()
    };
    let names = |list: &Value| -> Vec<String> {
        let models = list.as_array().unwrap().iter();
        let names = models.map(|model| model["name"].as_str().unwrap().to_owned());
        names.collect()
    };
    assert!(names(&list("/api/ps")).is_empty());
    for path in ["/props", "/tokenizer_info"] {
        let (status, answer) = read(&router.server.get(&format!("{path}?model=demo")));
        assert_eq!((status, error_of(&answer).0), (503, "model_unavailable"));
    }
    assert!(router.metric("foretoken:router_processes 0"));
    let body = json!({
        "model": "demo:latest", "prompt": "Once", "raw": true, "stream": false, "options": {"num_predict": 4}
    });
    let (status, answer) = router.post("/api/generate", &body);
    assert_eq!(
        (status, &answer["model"]),
        (200, &json!("demo:latest")),
        "{answer}"
    );
    let body = json!({"model": "demo:latest", "prompt": "Once", "max_tokens": 4});
    let (status, answer) = router.post("/v1/completions", &body);
    assert_eq!(
        (status, &answer["model"]),
        (200, &json!("demo")),
        "{answer}"
    );
    let (status, model) = read(&router.server.get("/v1/models/demo:latest"));
    assert_eq!((status, &model["id"]), (200, &json!("demo")), "{model}");
    let (status, answer) = router.post("/api/show", &json!({"name": "demo"}));
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = router.post("/api/show", &json!({"name": "none:latest"}));
    assert_eq!(status, 404, "{answer}");
    let tags = list("/api/tags");
    assert_eq!(names(&tags), ["demo:latest", "small:latest"]);
    // A loaded one describes itself.
    assert_eq!(tags[0]["digest"].as_str().map(str::len), Some(64), "{tags}");
    assert_eq!(tags[1]["digest"], "", "{tags}");
    assert_eq!(names(&list("/api/ps")), ["demo:latest"]);
    let (status, answer) = read(&router.server.get("/tokenizer_info?model=demo"));
    assert_eq!(status, 200, "{answer}");
    router.wait_for([("demo", "loaded"), ("small", "unloaded")]);
}

#[test]
fn a_model_that_cannot_be_loaded_says_why() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("broken.gguf"), "no GGUF").unwrap();
    let router = Router::start("", &format!("--models-dir {}", folder.path().display()));
    let ask = || {
        let (status, answer) = router.complete("broken");
        let (code, message) = error_of(&answer);
        assert_eq!((status, code), (503, "model_unavailable"), "{answer}");
        assert!(message.contains("exit code 2: error: "), "{message}");
        assert!(message.contains("broken.gguf"), "{message}");
    };
    let has_failed = |times: usize| {
        router.metric(&format!(
            r#"foretoken:router_failures_total{{model="broken"}} {times}"#
        ))
    };
    (0..2).for_each(|_| ask());
    assert!(has_failed(2));
    // Another one finds that it has failed again and again. After a while, which grows, it is started once more.
    let mut times = 2;
    let is_left = || {
        ask();
        let is_left = has_failed(times);
        times += 1;
        is_left
    };
    wait_until("it is not started again", is_left);
    let (_, model) = read(&router.server.get("/v1/models/broken"));
    assert_eq!(model["status"]["failed"], true, "{model}");
    assert_eq!(router.complete("small").0, 200);
}

#[test]
fn models_come_and_go_with_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--max-loaded 2 --models-dir {}", folder.path().display());
    let router = Router::start("", &flags);
    router.wait_for([("demo", "unloaded"), ("small", "unloaded")]);
    let hello = |model: &str| {
        let body = json!({"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0});
        router.post("/v1/completions", &body)
    };
    assert_eq!(error_of(&hello("tiny").1).0, "model_not_found");
    let place = folder.path().join("tiny");
    std::fs::rename(tiny_folder(byte_level()).keep(), &place).unwrap();
    wait_until("the new model answers", || hello("tiny").0 == 200);
    let is_listed = || router.states().iter().any(|(name, _)| name == "tiny");
    wait_until("it is listed", is_listed);
    assert!(router.metric("foretoken:router_processes 1"));
    std::fs::remove_dir_all(&place).unwrap();
    wait_until("it is listed no more", || !is_listed());
    assert_eq!(error_of(&hello("tiny").1).0, "model_not_found");
    let has_ended = || router.metric("foretoken:router_processes 0");
    wait_until("its process has ended", has_ended);
    assert_eq!(router.complete("small").0, 200);
}

#[test]
fn processes_end_with_the_router() {
    for signal in ["TERM", "KILL"] {
        let mut router = Router::start("max-loaded = 2", "--shutdown-timeout 1");
        assert_eq!(router.complete("small").0, 200);
        let stream = router.stream();
        let pids = children(router.server.id());
        assert_eq!(pids.len(), 2, "{pids:?}");
        let code = router.server.stop(signal, LONG);
        assert_eq!(code, (signal == "TERM").then_some(0));
        let have_ended = || !processes().iter().any(|(pid, _)| pids.contains(pid));
        wait_until("the processes have ended", have_ended);
        drop(stream);
    }
}
