//! One connection: HTTP/1.1 with limits on the time that a client may take for each part of it.
//!
//! hyper knows the protocol. What it does not do is here: a client that stalls is answered 408 and
//! disconnected, one that takes nothing of its reply is disconnected, and one that only ended its own side
//! still gets its reply, unlike one that is gone.

use super::limits::HttpLimits;
use super::request_id::RequestId;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response, Version};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

/// Maximum size of the headers of a request. A reply that is being written takes as much.
const MAX_HEADER_BYTES: usize = 64 * 1024;

/// How long, and how much, is read after the last reply of a connection, while the client is never silent
/// for long. One that still sends would otherwise see a reset instead of the reply.
const LINGER: Duration = Duration::from_secs(5);
const LINGER_SILENCE: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024 * 1024;

/// How often a connection with unread bytes is asked whether its client is still there.
const PEEK: Duration = Duration::from_millis(100);

const TIMED_OUT: &str = r#"{"error":{"message":"the headers of the request did not arrive in time","type":"invalid_request_error","param":null,"code":"request_timeout"}}"#;

/// An interim response, which clients skip: only a client that is still there takes it.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// An answer in HTTP/2: empty settings, and GOAWAY with HTTP_1_1_REQUIRED (RFC 9113, 7).
const HTTP_1_1_REQUIRED: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0d";

/// Serves the requests of a connection until either side ends it. Once `closing` is true or its sender is
/// gone, it ends after the reply that is being written.
pub(super) async fn serve(
    stream: TcpStream,
    router: Router,
    limits: &HttpLimits,
    mut closing: watch::Receiver<bool>,
) {
    let peer = Arc::new(Peer::new(stream, limits));
    let service = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        let reply = answer(&service, peer.clone(), request);
        async { Ok::<_, Infallible>(reply.await) }
    });
    let io = Io {
        peer: peer.clone(),
        timeout: limits.timeout_write,
        stalled: None,
    };
    let mut connection = pin!(
        http1::Builder::new()
            .half_close(true)
            .header_read_timeout(None)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(io), service)
    );
    let mut closes = pin!(closing.wait_for(|&closing| closing));
    let mut is_closing = false;
    loop {
        tokio::select! {
            end = connection.as_mut() => {
                match end {
                    Err(e) if e.is_parse_version_h2() => peer.send(HTTP_1_1_REQUIRED),
                    Err(e) => tracing::debug!("connection: {e}"),
                    Ok(()) => {}
                }
                break;
            }
            end = peer.watch() => match end {
                End::Gone => return,
                End::Idle => break,
                End::Stalled => {
                    peer.send(&plain_response("408 Request Timeout", "", TIMED_OUT));
                    break;
                }
            },
            _ = closes.as_mut(), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
    linger(&peer.stream).await;
}

/// A whole response with a JSON body, after which the connection is closed. `headers` are lines.
pub(super) fn plain_response(status: &str, headers: &str, body: &str) -> Vec<u8> {
    let (len, id) = (body.len(), RequestId::random());
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len}\r\nX-Request-Id: {id}\r\n{headers}Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Ends the sending side and reads what the client still sends, within bounds.
pub(super) async fn linger(stream: &TcpStream) {
    // An error means that the client has closed already.
    let _ = socket2::SockRef::from(stream).shutdown(std::net::Shutdown::Write);
    let rest = async {
        let (mut left, mut scratch) = (LINGER_BYTES, [0; 4096]);
        while left > 0 && matches!(timeout(LINGER_SILENCE, stream.readable()).await, Ok(Ok(()))) {
            match stream.try_read(&mut scratch) {
                Ok(0) => return,
                Ok(n) => left = left.saturating_sub(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    let _ = timeout(LINGER, rest).await;
}

async fn answer(
    service: &TowerToHyperService<Router>,
    peer: Arc<Peer>,
    mut request: Request<Incoming>,
) -> Response<Reply> {
    let interim = request.version() >= Version::HTTP_11;
    peer.enter(Phase::Waiting { interim });
    let client = Client(peer.half_closed.subscribe());
    request.extensions_mut().insert(client);
    let Ok(response) = service.call(request.map(Body::new)).await;
    peer.enter(Phase::Replying);
    response.map(|body| Reply { body, peer })
}

/// The client of a request, as handlers see it.
#[derive(Clone)]
pub(super) struct Client(watch::Receiver<bool>);

impl Client {
    /// Completes once the client has ended its side. It may be gone, which only writing to it tells.
    pub async fn half_closed(&mut self) {
        // An error means that the connection has ended.
        let _ = self.0.wait_for(|&closed| closed).await;
    }
}

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// No byte of a request has arrived.
    Idle,
    /// Headers are being read.
    Headers,
    /// A request is being read or answered. `interim` = the client understands interim responses.
    Waiting { interim: bool },
    /// The response has begun.
    Replying,
}

/// Why a connection ends before hyper ends it.
enum End {
    /// No request came.
    Idle,
    /// The headers did not come.
    Stalled,
    /// The client has closed both sides.
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct State {
    phase: Phase,
    /// When the phase ends at the latest, where it is limited.
    until: Instant,
    /// Whether bytes wait because the client does not take them.
    blocked: bool,
}

/// The socket, and what the connection is doing.
struct Peer {
    stream: TcpStream,
    timeout_headers: Duration,
    timeout_keep_alive: Duration,
    state: Mutex<State>,
    changed: Notify,
    half_closed: watch::Sender<bool>,
}

impl Peer {
    fn new(stream: TcpStream, limits: &HttpLimits) -> Self {
        Self {
            stream,
            timeout_headers: limits.timeout_headers,
            timeout_keep_alive: limits.timeout_keep_alive,
            // A client connects because it has something to send.
            state: Mutex::new(State {
                phase: Phase::Idle,
                until: Instant::now() + limits.timeout_headers,
                blocked: false,
            }),
            changed: Notify::new(),
            half_closed: watch::Sender::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, phase: Phase) {
        let until = match phase {
            Phase::Headers => Instant::now() + self.timeout_headers,
            _ => Instant::now() + self.timeout_keep_alive,
        };
        let mut state = self.state();
        (state.phase, state.until) = (phase, until);
        drop(state);
        self.changed.notify_one();
    }

    /// Bytes have arrived.
    fn received(&self) {
        let phase = self.state().phase;
        if phase == Phase::Idle {
            self.enter(Phase::Headers);
        }
    }

    /// Bytes were written, or wait to be for at most so long. Some may be the end of a response whose body
    /// hyper has dropped already, so the client is not idle.
    fn writing(&self, blocked: Option<Duration>) {
        let mut state = self.state();
        state.blocked = blocked.is_some();
        if state.phase == Phase::Idle {
            state.until = Instant::now() + blocked.unwrap_or_default() + self.timeout_keep_alive;
        }
    }

    /// Sends a few bytes while nothing else is being sent; they fit the socket's buffer.
    fn send(&self, bytes: &[u8]) {
        if let Err(e) = self.stream.try_write(bytes) {
            tracing::debug!("connection: {e}");
        }
    }

    /// Completes when the connection has to end.
    async fn watch(&self) -> End {
        loop {
            let changed = self.changed.notified();
            let State { phase, until, .. } = *self.state();
            match phase {
                Phase::Idle if until <= Instant::now() => return End::Idle,
                Phase::Headers if until <= Instant::now() => return End::Stalled,
                Phase::Idle | Phase::Headers => tokio::select! {
                    () = changed => {}
                    () = sleep_until(until) => {}
                },
                Phase::Waiting { .. } | Phase::Replying => tokio::select! {
                    () = changed => {}
                    () = self.gone() => return End::Gone,
                },
            }
        }
    }

    /// Completes when the client is gone, which is known when it refuses what is sent to it: one that has
    /// ended its side may still read.
    async fn gone(&self) {
        loop {
            match self.stream.peek(&mut [0]).await {
                Ok(0) => break,
                Ok(_) => sleep(PEEK).await,
                Err(_) => return,
            }
        }
        let State { phase, blocked, .. } = *self.state();
        let interim = phase == Phase::Waiting { interim: true };
        if interim && !blocked && !*self.half_closed.borrow() {
            self.send(PROBE);
        }
        self.half_closed.send_replace(true);
        // An error of the call itself is no reason to wait either.
        let _ = self.stream.ready(Interest::ERROR).await;
    }
}

/// The socket as hyper reads and writes it.
struct Io {
    peer: Arc<Peer>,
    timeout: Duration,
    /// Runs while the client takes nothing of what is written.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Io {
    /// Writes with `write` as soon as the socket takes bytes.
    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        while let Poll::Ready(ready) = self.peer.stream.poll_write_ready(cx) {
            ready?;
            match write(&self.peer.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => {
                    self.stalled = None;
                    self.peer.writing(None);
                    return Poll::Ready(result);
                }
            }
        }
        let timeout = self.timeout;
        self.peer.writing(Some(timeout));
        let stalled = (self.stalled).get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.peer.stream.poll_read_ready(cx))?;
            match self.peer.stream.try_read_buf(buffer) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
                Ok(n) => {
                    if n > 0 {
                        self.peer.received();
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Left to [`linger`].
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A response body. When it is dropped, the connection waits for the next request.
struct Reply {
    body: Body,
    peer: Arc<Peer>,
}

impl HttpBody for Reply {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.peer.enter(Phase::Idle);
    }
}
