//! A Hub of our own.
#![allow(dead_code, reason = "each test file uses its part")]

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The parts of the Hub that a download touches: HEAD and GET of `/{id}/resolve/{revision}/{file}`, and lists of
/// files.
#[derive(Default)]
pub struct Hub {
    /// The files, by id and name: `org/model/config.json`.
    pub files: HashMap<String, Vec<u8>>,
    /// What is sent instead of the commit and of every etag, by id.
    pub names: HashMap<&'static str, &'static str>,
    /// The other server that has the safetensors of `org/stored`.
    pub store: Option<String>,
    pub asked: AtomicUsize,
    /// Number of bodies that are still to be cut off after [`Hub::cut_after`] bytes.
    pub cuts: AtomicUsize,
    /// Two, if it is 0.
    pub cut_after: AtomicUsize,
    /// What files are after the next body that is cut off, by id and name.
    pub later: Mutex<HashMap<String, Vec<u8>>>,
    /// Leaves the connections of bodies that are cut off open.
    pub stalled: AtomicBool,
    /// Sends bodies in chunks of a thousand bytes, and no lengths.
    pub chunked: bool,
    /// Sends no lengths: bodies end with their connections.
    pub endless: bool,
    /// Sends etags that are hashes, as the Hub does.
    pub hashes: bool,
    /// The token of each request.
    pub tokens: Mutex<Vec<Option<String>>>,
    /// The ranges of requests that had one.
    pub ranges: Mutex<Vec<String>>,
    pub gone: AtomicBool,
    /// Bytes of the bodies that were sent.
    pub sent: AtomicUsize,
    /// Sends whole files even if a range is asked for.
    pub whole_only: bool,
    /// What ranges are said to be, if not what they are.
    pub content_range: Option<&'static str>,
    /// What files are since then.
    pub replaced: Mutex<HashMap<String, Vec<u8>>>,
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Hub {
    pub fn of(files: HashMap<String, Vec<u8>>) -> Self {
        Self {
            files,
            ..Self::default()
        }
    }

    pub fn start(self) -> (Arc<Self>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let hub = Arc::new(self);
        let served = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let served = served.clone();
                std::thread::spawn(move || served.serve(stream.unwrap()));
            }
        });
        (hub, address)
    }

    /// Serves one request per connection.
    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let Some(Ok(request)) = lines.next() else {
            return;
        };
        let headers: HashMap<String, String> = lines
            .map_while(Result::ok)
            .take_while(|line| !line.is_empty())
            .filter_map(|line| {
                let (name, value) = line.split_once(": ")?;
                Some((name.to_lowercase(), value.to_owned()))
            })
            .collect();
        if self.gone.load(Ordering::SeqCst) {
            return; // Closed without an answer.
        }
        self.asked.fetch_add(1, Ordering::SeqCst);
        let token = headers.get("authorization").cloned();
        self.tokens.lock().unwrap().push(token);
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let answer = self.answer(method, path, headers.get("range"));
        // A client may close the connection early.
        let _ = stream.write_all(&answer);
        while self.stalled.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The file `name` of the repository `id`, as it is now.
    fn file(&self, id: &str, name: &str) -> Option<Vec<u8>> {
        let name = format!("{id}/{name}");
        let replaced = self.replaced.lock().unwrap().get(&name).cloned();
        replaced.or_else(|| self.files.get(&name).cloned())
    }

    /// The header with the etag of a file.
    fn etag(&self, name: &str, body: &[u8]) -> String {
        if !self.hashes {
            return format!("etag: \"{}-{}\"\r\n", body.len(), name.replace('/', "-"));
        }
        if name.ends_with(".gguf") || name.ends_with(".safetensors") {
            // Where the bytes are, they have an etag of another kind.
            let hash = hex(digest(&SHA256, body).as_ref());
            return format!(
                "etag: \"{}\"\r\nx-linked-etag: \"{hash}\"\r\n",
                "0f".repeat(32)
            );
        }
        let mut object = format!("blob {}\0", body.len()).into_bytes();
        object.extend(body);
        let hash = hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &object).as_ref());
        format!("etag: W/\"{hash}\"\r\n")
    }

    /// The answer to `/api/models/{id}/revision/{revision}`.
    fn list(&self, id: &str, revision: &str) -> Vec<u8> {
        let prefix = format!("{id}/");
        let names = self
            .files
            .keys()
            .filter_map(|name| name.strip_prefix(&prefix));
        let names: Vec<_> = names
            .map(|name| serde_json::json!({ "rfilename": name }))
            .collect();
        if names.is_empty() || !["main", COMMIT].contains(&revision) {
            let head = "HTTP/1.1 404 Not Found\r\nconnection: close";
            return format!("{head}\r\ncontent-length: 0\r\n\r\n").into();
        }
        let body = serde_json::json!({ "sha": COMMIT, "siblings": names }).to_string();
        let head = "HTTP/1.1 200 OK\r\nconnection: close";
        format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
    }

    fn answer(&self, method: &str, path: &str, range: Option<&String>) -> Vec<u8> {
        if let Some(list) = path.strip_prefix("/api/models/") {
            let (id, revision) = list.split_once("/revision/").unwrap();
            return self.list(id, revision);
        }
        let (id, rest) = path[1..].split_once("/resolve/").unwrap();
        let name = rest.split_once('/').unwrap().1.replace("%2F", "/");
        let (mut status, mut body) = match self.file(id, &name) {
            _ if id == "org/gated" => (
                "401 Unauthorized",
                b"Access to this model is restricted".to_vec(),
            ),
            // An evil repository has every file that is requested.
            None if id == "org/evil" => ("200 OK", b"stolen".to_vec()),
            Some(text) if ["main", COMMIT].contains(&rest.split_once('/').unwrap().0) => {
                ("200 OK", text)
            }
            _ => ("404 Not Found", Vec::new()),
        };
        let evil = self.names.get(id).copied();
        let etag = match evil.filter(|_| id.ends_with("etag")) {
            Some(evil) => format!("etag: \"{evil}\"\r\n"),
            None => self.etag(&name, &body),
        };
        let commit = evil.filter(|_| id.ends_with("commit")).unwrap_or(COMMIT);
        let mut head = format!("x-repo-commit: {commit}\r\n{etag}connection: close\r\n");
        if let Some(store) = self.store.as_ref().filter(|_| id == "org/stored")
            && name.ends_with(".safetensors")
        {
            status = "302 Found";
            head += &format!(
                "x-linked-size: {}\r\nlocation: {store}{path}\r\n",
                body.len()
            );
            body.clear();
        }
        if let Some(range) = range.filter(|_| !self.whole_only && status == "200 OK") {
            self.ranges.lock().unwrap().push(range.clone());
            let (from, to) = range["bytes=".len()..].split_once('-').unwrap();
            let from: usize = from.parse().unwrap();
            let end = to.parse().map_or(body.len(), |to: usize| to + 1);
            let said = format!("bytes {from}-{}/{}", end.saturating_sub(1), body.len());
            let said = self.content_range.unwrap_or(&said);
            head += &format!("content-range: {said}\r\n");
            let part = body.get(from..end.min(body.len())).map(<[u8]>::to_vec);
            (status, body) = match part {
                Some(rest) if !rest.is_empty() => ("206 Partial Content", rest),
                _ => ("416 Range Not Satisfiable", Vec::new()),
            };
        }
        if self.chunked {
            head += "transfer-encoding: chunked\r\n";
            body = in_chunks(&body);
        } else if !self.endless {
            head += &format!("content-length: {}\r\n", body.len());
        }
        if method == "GET" {
            self.cut(&mut body);
            self.sent.fetch_add(body.len(), Ordering::SeqCst);
        } else {
            body.clear();
        }
        let mut answer = format!("HTTP/1.1 {status}\r\n{head}\r\n").into_bytes();
        answer.extend(body);
        answer
    }

    /// Cuts `body` off, if it is to be.
    fn cut(&self, body: &mut Vec<u8>) {
        let after = self.cut_after.load(Ordering::SeqCst).max(2);
        if self.cuts.load(Ordering::SeqCst) > 0 && body.len() > after {
            self.cuts.fetch_sub(1, Ordering::SeqCst);
            body.truncate(after);
            let later = std::mem::take(&mut *self.later.lock().unwrap());
            self.replaced.lock().unwrap().extend(later);
        }
    }
}

fn in_chunks(body: &[u8]) -> Vec<u8> {
    let mut sent = Vec::new();
    for chunk in body.chunks(1000) {
        sent.extend(format!("{:x}\r\n", chunk.len()).bytes());
        sent.extend(chunk);
        sent.extend(b"\r\n");
    }
    sent.extend(b"0\r\n\r\n");
    sent
}

/// The digits of a hash.
pub fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
