//! A Hub of our own.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

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
    /// Number of bodies that are still to be cut off after two bytes.
    pub cuts: AtomicUsize,
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
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Hub {
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
        let (mut status, mut body): (_, &[u8]) = match self.files.get(&format!("{id}/{name}")) {
            _ if id == "org/gated" => ("401 Unauthorized", b"Access to this model is restricted"),
            // An evil repository has every file that is requested.
            None if id == "org/evil" => ("200 OK", b"stolen"),
            Some(text) if ["main", COMMIT].contains(&rest.split_once('/').unwrap().0) => {
                ("200 OK", text)
            }
            _ => ("404 Not Found", b""),
        };
        let evil = self.names.get(id).copied();
        let etag = format!("{}-{}", body.len(), name.replace('/', "-"));
        let mut head = format!(
            "x-repo-commit: {}\r\netag: \"{}\"\r\nconnection: close\r\n",
            evil.filter(|_| id.ends_with("commit")).unwrap_or(COMMIT),
            evil.filter(|_| id.ends_with("etag")).unwrap_or(&etag),
        );
        if let Some(store) = self.store.as_ref().filter(|_| id == "org/stored")
            && name.ends_with(".safetensors")
        {
            status = "302 Found";
            head += &format!(
                "x-linked-size: {}\r\nlocation: {store}{path}\r\n",
                body.len()
            );
            body = b"";
        }
        if let Some(range) = range.filter(|_| !self.whole_only && status == "200 OK") {
            self.ranges.lock().unwrap().push(range.clone());
            let (from, to) = range["bytes=".len()..].split_once('-').unwrap();
            let from: usize = from.parse().unwrap();
            let end = to.parse().map_or(body.len(), |to: usize| to + 1);
            let part = body.get(from..end.min(body.len()));
            let said = format!("bytes {from}-{}/{}", end.saturating_sub(1), body.len());
            let said = self.content_range.unwrap_or(&said);
            head += &format!("content-range: {said}\r\n");
            (status, body) = match part {
                Some(rest) if !rest.is_empty() => ("206 Partial Content", rest),
                _ => ("416 Range Not Satisfiable", b"".as_slice()),
            };
        }
        let mut answer = format!(
            "HTTP/1.1 {status}\r\n{head}content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        if method == "GET" {
            let cut = self.cuts.load(Ordering::SeqCst) > 0 && body.len() > 2;
            if cut {
                self.cuts.fetch_sub(1, Ordering::SeqCst);
            }
            let body = if cut { &body[..2] } else { body };
            self.sent.fetch_add(body.len(), Ordering::SeqCst);
            answer.extend(body);
        }
        answer
    }
}
