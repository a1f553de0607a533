//! Fetching from the Hub, against a server of our own. One test: the environment is the process's.

use foretoken::model::{LoadFormat, ModelSource};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The parts of the Hub that a download touches: HEAD and GET of `/{id}/resolve/{revision}/{file}`.
struct Hub {
    files: HashMap<String, &'static str>,
    asked: AtomicUsize,
    /// What a gated repository was asked with.
    tokens: Mutex<Vec<Option<String>>>,
    gone: AtomicBool,
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Hub {
    fn start(files: &[(&str, &'static str)]) -> (Arc<Self>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), *text));
        let hub = Arc::new(Self {
            files: files.collect(),
            asked: AtomicUsize::new(0),
            tokens: Mutex::default(),
            gone: AtomicBool::new(false),
        });
        let served = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let served = served.clone();
                std::thread::spawn(move || served.serve(stream.unwrap()));
            }
        });
        (hub, address)
    }

    /// One request a connection.
    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let Some(Ok(request)) = lines.next() else {
            return;
        };
        let headers = lines
            .map_while(Result::ok)
            .take_while(|line| !line.is_empty());
        let token = headers
            .filter_map(|line| {
                Some(line.split_once(": ")?.1.to_owned())
                    .filter(|_| line.to_lowercase().starts_with("authorization"))
            })
            .last();
        if self.gone.load(Ordering::SeqCst) {
            return; // Closed without an answer.
        }
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let (status, body) = self.answer(path, token);
        let length = body.len();
        let mut answer = format!(
            "HTTP/1.1 {status}\r\nx-repo-commit: {COMMIT}\r\netag: \"{length}-{}\"\r\n\
             content-length: {length}\r\nconnection: close\r\n\r\n",
            path.rsplit('/').next().unwrap()
        );
        if method == "GET" {
            answer += body;
        }
        stream.write_all(answer.as_bytes()).unwrap();
    }

    fn answer(&self, path: &str, token: Option<String>) -> (&'static str, &'static str) {
        if path.starts_with("/org/gated/") {
            self.tokens.lock().unwrap().push(token);
            return ("401 Unauthorized", "Access to this model is restricted");
        }
        let file = path.strip_prefix("/org/model/resolve/");
        let file = file.and_then(|file| file.split_once('/'));
        let file = file.filter(|(revision, _)| ["main", COMMIT].contains(revision));
        match file.and_then(|(_, file)| self.files.get(file)) {
            Some(text) => ("200 OK", text),
            None => ("404 Not Found", ""),
        }
    }
}

fn resolve(id: &str, revision: Option<&str>) -> Result<PathBuf, String> {
    match ModelSource::resolve(id, revision, LoadFormat::Auto) {
        Ok(ModelSource::Folder(folder)) => Ok(folder),
        Ok(other) => panic!("{id} became {other:?}"),
        Err(error) => {
            assert!(
                matches!(error, foretoken::error::Error::Setup(_)),
                "{error}"
            );
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            Err(error.to_string())
        }
    }
}

fn set(name: &str, value: &str) {
    // SAFETY: this file has one test, and no thread of it reads the environment meanwhile.
    unsafe { std::env::set_var(name, value) };
}

#[test]
fn models_come_from_the_hub_once() {
    let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
    let files = [
        ("config.json", "{}"),
        ("tokenizer.json", "{ }"),
        ("model.safetensors.index.json", index),
        ("one.safetensors", "first"),
        ("two.safetensors", "second"),
    ];
    let (hub, address) = Hub::start(&files);
    let home = tempfile::tempdir().unwrap();
    set("HF_HOME", home.path().to_str().unwrap());
    set("HF_ENDPOINT", &address);
    set("HF_TOKEN", "hf_test");
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
        // SAFETY: as above.
        unsafe { std::env::remove_var(name) };
    }

    // Refused and unknown ones: what to do is said.
    let error = resolve("org/gated", None).unwrap_err();
    assert!(
        error.contains("org/gated") && error.contains("HF_TOKEN"),
        "{error}"
    );
    let tokens = hub.tokens.lock().unwrap().clone();
    assert_eq!(tokens.first(), Some(&Some("Bearer hf_test".to_owned())));
    let error = resolve("org/unknown", None).unwrap_err();
    assert!(error.contains("Hub has no such model"), "{error}");
    let error = resolve("org/model", Some("v2")).unwrap_err();
    assert!(error.contains("at revision 'v2'"), "{error}");

    // Offline, nothing is asked.
    set("HF_HUB_OFFLINE", "1");
    let asked = hub.asked.load(Ordering::SeqCst);
    let error = resolve("org/model", None).unwrap_err();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(hub.asked.load(Ordering::SeqCst), asked);
    set("HF_HUB_OFFLINE", "0");

    // All files land in the usual place.
    let folder = resolve("org/model", None).unwrap();
    let cache = home
        .path()
        .join("hub/models--org--model/snapshots")
        .join(COMMIT);
    assert_eq!(folder, cache);
    for (name, text) in files {
        assert_eq!(
            std::fs::read_to_string(folder.join(name)).unwrap(),
            text,
            "{name}"
        );
    }
    assert!(!folder.join("chat_template.jinja").exists());

    // From then on the network is not needed, nor asked.
    let asked = hub.asked.load(Ordering::SeqCst);
    assert!(asked > files.len());
    hub.gone.store(true, Ordering::SeqCst);
    assert_eq!(resolve("org/model", None).unwrap(), folder);
    set("HF_HUB_OFFLINE", "1");
    assert_eq!(resolve("org/model", None).unwrap(), folder);
    assert_eq!(hub.asked.load(Ordering::SeqCst), asked);
    set("HF_HUB_OFFLINE", "0");

    // A cache that lacks a shard is not taken for whole, and says so without a network.
    std::fs::remove_file(folder.join("two.safetensors")).unwrap();
    set("HF_ENDPOINT", "http://127.0.0.1:9");
    let error = resolve("org/model", None).unwrap_err();
    assert!(error.contains("cannot be reached"), "{error}");
}
