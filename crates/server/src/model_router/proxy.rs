//! Requests on their way to a process, and its answers on their way back.

use super::fleet::Lease;
use crate::anthropic;
use crate::error;
use crate::ollama::{self, OllamaError};
use crate::reply::json_text;
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::responses::{self, FailedEvent};
use axum::body::{Body, Bytes};
use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header};
use foretoken_core::error::{Error, Result};
use futures_util::stream;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// The type of a stream of events.
pub(super) const EVENTS: &str = "text/event-stream";

/// Headers that concern one connection (RFC 9110, 7.6.1).
static OF_A_CONNECTION: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers of a request that the router has obeyed, or that its connection to a process has anew.
static OF_THE_ROUTER: [HeaderName; 6] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::EXPECT,
    header::ORIGIN,
    HeaderName::from_static("sec-fetch-site"),
];

/// A request for a process: its method, its path with query, and its headers.
#[derive(Clone)]
pub(super) struct Forwarded {
    method: Method,
    target: Uri,
    headers: HeaderMap,
}

impl Forwarded {
    /// What `parts` ask a process for, whose answer has the same id.
    pub fn new(parts: &Parts) -> Self {
        let target = parts.uri.path_and_query().cloned();
        let mut headers = without_connection(&parts.headers);
        for name in &OF_THE_ROUTER {
            headers.remove(name);
        }
        if let Some(id) = parts.extensions.get::<RequestId>() {
            id.mark(&mut headers, X_REQUEST_ID);
        }
        Self {
            method: parts.method.clone(),
            target: target.unwrap_or(PathAndQuery::from_static("/")).into(),
            headers,
        }
    }

    /// A question of the router itself, with the key of the client who asks `parts`.
    pub fn get(path: &'static str, parts: &Parts) -> Self {
        let mut forwarded = Self::new(parts);
        forwarded.method = Method::GET;
        forwarded.target = Uri::from_static(path);
        forwarded
    }

    /// The method.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The path, without the query.
    pub fn path(&self) -> &str {
        self.target.path()
    }

    /// Whether the client asks for a stream of events by its type.
    pub fn accepts_events(&self) -> bool {
        let mut accepted = self.headers.get_all(header::ACCEPT).iter();
        accepted.any(|types| types.to_str().is_ok_and(|types| types.contains(EVENTS)))
    }

    fn request(self, address: SocketAddr, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = self.method;
        *request.uri_mut() = self.target;
        *request.headers_mut() = self.headers;
        let host = HeaderValue::from_str(&address.to_string())
            .map_err(|e| Error::internal(format!("the address of a process: {e}")))?;
        request.headers_mut().insert(header::HOST, host);
        Ok(request)
    }
}

fn without_connection(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    for named in headers.get_all(header::CONNECTION) {
        let names = named.to_str().unwrap_or_default().split(',');
        for name in names.filter_map(|name| name.trim().parse::<HeaderName>().ok()) {
            kept.remove(name);
        }
    }
    for name in &OF_A_CONNECTION {
        kept.remove(name);
    }
    kept
}

/// A connection to a process, for one request. Dropping it closes it, which cancels the request.
struct Connection {
    _sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Sends a request to the process at `address`.
///
/// # Errors
/// It is not there, or breaks off before the answer.
async fn send(
    address: SocketAddr,
    request: Request<Full<Bytes>>,
) -> io::Result<(Response<Incoming>, Connection)> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(io::Error::other)?;
    let driver = tokio::spawn(async move {
        if let Err(e) = connection.await {
            tracing::debug!("connection to a process: {e}");
        }
    });
    let response = sender.send_request(request);
    let connection = Connection {
        driver,
        _sender: sender,
    };
    let response = response.await.map_err(io::Error::other)?;
    Ok((response, connection))
}

/// Asks a process that the caller has no lease of, and reads the whole answer.
///
/// # Errors
/// It does not answer.
pub(super) async fn ask(address: SocketAddr, forwarded: Forwarded) -> Result<Response<Bytes>> {
    let failed = |e: String| Error::internal(format!("a process does not answer: {e}"));
    let request = forwarded.request(address, Bytes::new())?;
    let sent = send(address, request).await;
    let (response, _connection) = sent.map_err(|e| failed(e.to_string()))?;
    let (mut parts, body) = response.into_parts();
    parts.headers = without_connection(&parts.headers);
    let body = body.collect().await.map_err(|e| failed(e.to_string()))?;
    Ok(Response::from_parts(parts, body.to_bytes()))
}

/// Sends a request to the process of `lease`, and passes the answer on as it arrives. Dropping the answer cancels the
/// request.
///
/// # Errors
/// `ModelUnavailable`: the process failed before it answered.
pub(super) async fn forward(
    lease: Lease,
    forwarded: Forwarded,
    body: Bytes,
) -> Result<Response<Body>> {
    let path = forwarded.path().to_owned();
    let request = forwarded.request(lease.address(), body)?;
    let (response, connection) = match send(lease.address(), request).await {
        Ok(sent) => sent,
        Err(e) => {
            tracing::debug!("request to a process: {e}");
            return Err(lease.failure().await);
        }
    };
    let (mut parts, body) = response.into_parts();
    parts.headers = without_connection(&parts.headers);
    let passing = Passing {
        body,
        lease,
        _connection: connection,
        end: End::of(&parts.headers, path),
        in_line: false,
    };
    let body = stream::unfold(
        Some(passing),
        |passing| async move { passing?.next().await },
    );
    Ok(Response::from_parts(parts, Body::from_stream(body)))
}

/// Whether an answer is a stream of events.
pub(super) fn is_sse(headers: &HeaderMap) -> bool {
    is_type(headers, EVENTS)
}

fn is_type(headers: &HeaderMap, name: &str) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(name.as_bytes()))
}

/// How an answer ends that its process broke off.
enum End {
    /// With an event of the API that this path belongs to.
    Event(String),
    /// With a line of Ollama's API.
    Line,
    /// Before its time.
    Abrupt,
}

impl End {
    /// The end of an answer with these headers to a request for `path`.
    fn of(headers: &HeaderMap, path: String) -> Self {
        if is_sse(headers) {
            Self::Event(path)
        } else if is_type(headers, ollama::LINES) {
            Self::Line
        } else {
            Self::Abrupt
        }
    }
}

/// An answer that is passed on.
struct Passing {
    body: Incoming,
    lease: Lease,
    _connection: Connection,
    end: End,
    /// Whether the last piece ended within a line.
    in_line: bool,
}

impl Passing {
    /// The next piece of the answer, and itself if there may be more.
    async fn next(mut self) -> Option<(io::Result<Bytes>, Option<Self>)> {
        loop {
            let piece = match self.body.frame().await? {
                // Trailers are left out.
                Ok(frame) => match frame.into_data() {
                    Ok(piece) => Ok(piece),
                    Err(_) => continue,
                },
                Err(e) => Err(e),
            };
            let e = match piece {
                Ok(piece) => {
                    if let Some(last) = piece.last() {
                        self.in_line = *last != b'\n';
                    }
                    return Some((Ok(piece), Some(self)));
                }
                Err(e) => e,
            };
            tracing::debug!("answer of a process: {e}");
            let failed = match &self.end {
                End::Event(path) => Ok(failed_event(path, &self.lease.failure().await)),
                End::Line => Ok(failed_line(&self.lease.failure().await, self.in_line)),
                End::Abrupt => Err(io::Error::other(e)),
            };
            return Some((failed, None));
        }
    }
}

/// The event that ends a stream of the API that `path` belongs to.
pub(super) fn failed_event(path: &str, error: &Error) -> Bytes {
    if anthropic::has_route(path) {
        let data = json_text(&anthropic::error_body(error));
        format!("event: error\ndata: {data}\n\n").into()
    } else if responses::has_route(path) {
        let event = FailedEvent::of(error);
        let (name, data) = (event.name, json_text(&event));
        format!("event: {name}\ndata: {data}\n\n").into()
    } else {
        let data = json_text(&error::body(error));
        format!("data: {data}\n\n").into()
    }
}

/// The line that ends a stream of Ollama's API, after what there is of another one if the stream is `in_line`.
fn failed_line(error: &Error, in_line: bool) -> Bytes {
    let begin = if in_line { "\n" } else { "" };
    let line = json_text(&OllamaError::of(error));
    format!("{begin}{line}\n").into()
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
mod tests {
    use super::super::fleet::tests::fleet_at;
    use super::*;
    use futures_util::StreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// What a client gets of an answer of this type that a process breaks off after `begin`: all but `begin`.
    async fn broken_off(kind: &str, begin: &str) -> Vec<io::Result<Bytes>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let fleet = fleet_at(port, &["cat"], 1, None);
        let lease = fleet.acquire(0).await.unwrap();
        let (parts, ()) = Request::post("/v1/messages").body(()).unwrap().into_parts();
        let answering = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).await.unwrap() > 0);
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{begin}\r\n",
                begin.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream
        };
        let forwarded = Forwarded::new(&parts);
        let (stream, answer) = tokio::join!(answering, forward(lease, forwarded, Bytes::new()));
        let mut body = answer.unwrap().into_body().into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), begin);
        // So that the process has ended when its answer breaks off.
        fleet.unload(0);
        drop(stream);
        let rest = body.map(|piece| piece.map_err(io::Error::other));
        rest.collect().await
    }

    #[tokio::test]
    async fn a_stream_whose_process_ends_says_so_in_its_own_form() {
        let why = "the process of the model `m0` failed: it broke off";
        let line = format!("{{\"error\":\"{why}\"}}\n");
        for (begin, end) in [("{}\n", line.clone()), ("{\"a\":", format!("\n{line}"))] {
            let rest = broken_off("application/x-ndjson", begin).await;
            let [Ok(last)] = &rest[..] else {
                panic!("{rest:?}");
            };
            assert_eq!(*last, end);
        }
        let rest = broken_off("text/event-stream; charset=utf-8", "data: {}\n\n").await;
        let [Ok(last)] = &rest[..] else {
            panic!("{rest:?}");
        };
        let last = std::str::from_utf8(last).unwrap();
        assert!(last.starts_with("event: error\ndata: {"), "{last}");
        assert!(last.contains(why) && last.ends_with("}\n\n"), "{last}");
        let rest = broken_off("application/json", "{").await;
        assert!(matches!(rest[..], [Err(_)]), "{rest:?}");
    }
}
