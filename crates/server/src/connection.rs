//! One connection: HTTP/1.1, or with TLS also HTTP/2, with limits on the time that a client may take for each part of it.
//!
//! hyper knows the protocol, and drops what it runs for a client that has closed its side. What it does not
//! do is here: its own limit for headers counts the silence between two requests, too, and closes without
//! 408; it waits for ever for a client that takes nothing; and closing while a client still sends would show
//! it a reset instead of the reply.

use super::context::Peer;
use super::error;
use super::limits::HttpLimits;
use super::reply::json_text;
use super::request_id::RequestId;
use super::taken::{ReplyBody, Waiting};
use super::tls::{Accepted, Tls};
use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use foretoken_core::error::{Error, RequestErrorKind};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Sleep, interval, sleep, timeout};

/// Maximum size of the headers of a request. A reply that is being written takes as much.
const MAX_HEADER_BYTES: usize = 64 * 1024;

/// Maximum time, maximum silence of the client, and maximum number of bytes of the reading after the last reply of a
/// connection.
const LINGER: Duration = Duration::from_secs(5);
const LINGER_SILENCE: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024 * 1024;

/// An answer in HTTP/2: empty settings, and GOAWAY with HTTP_1_1_REQUIRED (RFC 9113, 7).
const HTTP_1_1_REQUIRED: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0d";

/// Maximum number of requests at a time on a connection of HTTP/2.
const MAX_STREAMS: u32 = 64;

/// Bytes of all requests of a connection of HTTP/2 that may come before they are read.
const WINDOW: u32 = 128 * 1024;

/// Time between two looks at whether a client of HTTP/2 takes its replies.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// The answer to a client that does not speak TLS.
const TLS_REQUIRED: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 41\r\nConnection: close\r\n\r\nthis server speaks TLS: its URL is https\n";

/// Serves the requests of a connection until either side ends it, with `tls` if there is any. Once `closing` is true or
/// its sender is gone, it ends after the reply that is being written.
pub(super) async fn serve(
    stream: TcpStream,
    tls: Option<Tls>,
    router: Router,
    limits: &HttpLimits,
    mut closing: watch::Receiver<bool>,
) {
    let peer = stream.peer_addr().map(|address| Peer::new(address.ip()));
    let replies = Replies {
        router: TowerToHyperService::new(router),
        peer: peer.ok(),
        requests: watch::Sender::new(()),
        waiting: Waiting::default(),
    };
    let Some(tls) = tls else {
        return http1(stream, replies, limits, closing).await;
    };
    let accepted = tokio::select! {
        accepted = timeout(limits.timeout_headers, tls.accept(stream)) => accepted,
        _ = closing.wait_for(|&closing| closing) => return,
    };
    match accepted.unwrap_or(Err(io::ErrorKind::TimedOut.into())) {
        Ok(Accepted::Http1(stream)) => http1(stream, replies, limits, closing).await,
        Ok(Accepted::Http2(stream)) => http2(stream, replies, limits, closing).await,
        Ok(Accepted::Plain(stream)) => end_with(stream, TLS_REQUIRED).await,
        Err(e) => tracing::debug!("TLS: {e}"),
    }
}

/// What answers the requests of a connection.
#[derive(Clone)]
struct Replies {
    router: TowerToHyperService<Router>,
    peer: Option<Peer>,
    /// Has a receiver while a request is being read or answered.
    requests: watch::Sender<()>,
    waiting: Waiting,
}

impl Service<Request<Incoming>> for Replies {
    type Response = Response<ReplyBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let guard = self.requests.subscribe();
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(peer);
        }
        let reply = self.router.call(request.map(Body::new));
        let waiting = self.waiting.clone();
        Box::pin(async move {
            let reply = reply.await?;
            // The reply keeps the guard until all of it is written.
            Ok(reply.map(|body| ReplyBody::new(body, guard, waiting)))
        })
    }
}

async fn http1<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    replies: Replies,
    limits: &HttpLimits,
    mut closing: watch::Receiver<bool>,
) {
    let io = Io::new(stream, replies.requests.clone(), limits);
    let mut connection = http1::Builder::new()
        // Lets hyper read while the client is idle, which starts the limits of `Io`: they end sooner.
        .timer(TokioTimer::new())
        .header_read_timeout(limits.timeout_keep_alive + limits.timeout_headers)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(io), replies);
    let end = tokio::select! {
        end = &mut connection => Some(end),
        _ = closing.wait_for(|&closing| closing) => None,
    };
    let end = match end {
        Some(end) => end,
        None => {
            Pin::new(&mut connection).graceful_shutdown();
            (&mut connection).await
        }
    };
    let io = connection.into_parts().io.into_inner();
    let last_words = match end {
        Err(e) if e.is_parse_version_h2() => HTTP_1_1_REQUIRED.to_vec(),
        Err(_) if io.stalled_in_headers => timed_out(),
        Err(e) => {
            tracing::debug!("connection: {e}");
            Vec::new()
        }
        Ok(()) => Vec::new(),
    };
    end_with(io.stream, &last_words).await;
}

async fn http2<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    replies: Replies,
    limits: &HttpLimits,
    mut closing: watch::Receiver<bool>,
) {
    // Between requests a client sends frames that nothing answers: they are not the beginning of headers.
    let for_frames = HttpLimits {
        timeout_headers: limits.timeout_keep_alive,
        ..limits.clone()
    };
    let io = Io::new(stream, replies.requests.clone(), &for_frames);
    let waiting = replies.waiting.clone();
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .serve_connection(TokioIo::new(io), replies);
    let mut connection = pin!(connection);
    let (mut looks, mut is_closing) = (interval(BETWEEN_LOOKS), false);
    loop {
        tokio::select! {
            end = &mut connection => {
                if let Err(e) = end {
                    tracing::debug!("connection: {e}");
                }
                return;
            }
            _ = closing.wait_for(|&closing| closing), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            _ = looks.tick() => {
                if waiting.longest() > limits.timeout_write {
                    tracing::debug!("connection: the client takes nothing of a reply");
                    return;
                }
            }
        }
    }
}

/// Writes `last_words`, and reads what the client still sends.
async fn end_with(mut stream: impl AsyncRead + AsyncWrite + Unpin, last_words: &[u8]) {
    // An error means that the client has closed already.
    let _ = timeout(LINGER, stream.write_all(last_words)).await;
    let _ = timeout(LINGER, linger(&mut stream)).await;
}

/// The response to a request whose headers did not arrive.
fn timed_out() -> Vec<u8> {
    let message = "the headers of the request did not arrive in time";
    let error = Error::request(RequestErrorKind::Timeout, None, message);
    let (body, id) = (json_text(&error::body(&error)), RequestId::random());
    let len = body.len();
    format!(
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len}\r\nX-Request-Id: {id}\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Ends the sending side and reads what the client still sends, within bounds.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let (mut left, mut scratch) = (LINGER_BYTES, [0; 4096]);
    while left > 0 {
        match timeout(LINGER_SILENCE, stream.read(&mut scratch)).await?? {
            0 => break,
            n => left = left.saturating_sub(n),
        }
    }
    Ok(())
}

/// The socket, or TLS on it, as hyper reads and writes it.
struct Io<S> {
    stream: S,
    timeout_headers: Duration,
    timeout_keep_alive: Duration,
    timeout_write: Duration,
    /// Has a receiver while a request is being read or answered.
    requests: watch::Sender<()>,
    /// Whether the headers of a request have begun to arrive.
    in_headers: bool,
    /// Whether the connection ends because they did not come in time.
    stalled_in_headers: bool,
    /// Runs while a request is awaited, or its headers.
    awaiting: Option<Pin<Box<Sleep>>>,
    /// Runs while the client takes nothing of what is written.
    writing: Option<Pin<Box<Sleep>>>,
}

impl<S> Io<S> {
    fn new(stream: S, requests: watch::Sender<()>, limits: &HttpLimits) -> Self {
        Self {
            stream,
            timeout_headers: limits.timeout_headers,
            timeout_keep_alive: limits.timeout_keep_alive,
            timeout_write: limits.timeout_write,
            requests,
            in_headers: false,
            stalled_in_headers: false,
            // A client connects because it has something to send.
            awaiting: Some(Box::pin(sleep(limits.timeout_headers))),
            writing: None,
        }
    }

    /// The result of a write, which fails where it is pending for too long: TLS writes what it has taken only when it is
    /// flushed.
    fn written<T>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // It may be the end of a reply that hyper has finished already: the client is not idle yet.
        (self.in_headers, self.awaiting) = (false, None);
        if result.is_ready() {
            self.writing = None;
            return result;
        }
        expired(&mut self.writing, self.timeout_write, cx)
    }
}

/// Fails once `timer`, which runs from the first call, has ended.
fn expired<T>(
    timer: &mut Option<Pin<Box<Sleep>>>,
    limit: Duration,
    cx: &mut Context<'_>,
) -> Poll<io::Result<T>> {
    let timer = timer.get_or_insert_with(|| Box::pin(sleep(limit)));
    (timer.as_mut().poll(cx)).map(|()| Err(io::ErrorKind::TimedOut.into()))
}

impl<S: AsyncRead + Unpin> AsyncRead for Io<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let io = &mut *self;
        let before = buffer.filled().len();
        let read = Pin::new(&mut io.stream).poll_read(cx, buffer);
        if io.requests.receiver_count() > 0 {
            (io.in_headers, io.awaiting) = (false, None);
        } else if read.is_pending() {
            let expired = expired(&mut io.awaiting, io.timeout_keep_alive, cx);
            io.stalled_in_headers = expired.is_ready() && io.in_headers;
            return expired;
        } else if !io.in_headers && buffer.filled().len() > before {
            io.in_headers = true;
            io.awaiting = Some(Box::pin(sleep(io.timeout_headers)));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Io<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        match result.is_ready() {
            // It says nothing of what the client takes if there was nothing to write.
            true => result,
            false => self.written(cx, result),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.written(cx, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes bytes as TLS does, and never gets rid of them.
    struct Stuck;

    impl AsyncWrite for Stuck {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn what_was_taken_and_is_not_sent_ends_the_connection() {
        let limits = HttpLimits {
            timeout_write: Duration::from_millis(20),
            ..HttpLimits::default()
        };
        let soon = Duration::from_secs(60);
        let mut io = Io::new(Stuck, watch::Sender::new(()), &limits);
        io.write_all(b"bytes").await.unwrap();
        let flushed = timeout(soon, io.flush()).await.expect("it ends");
        assert_eq!(flushed.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut io = Io::new(Stuck, watch::Sender::new(()), &limits);
        let ended = timeout(soon, io.shutdown()).await.expect("it ends");
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
