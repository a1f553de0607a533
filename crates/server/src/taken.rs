//! The replies on a connection, as the client takes them. In HTTP/2 a client can stop one reply without stopping the
//! connection, so the silence of the connection does not tell whether a reply is read.

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The replies of a connection that wait for the client: since when, by their numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiting(Arc<Mutex<Replies>>);

#[derive(Debug, Default)]
struct Replies {
    next: u64,
    since: BTreeMap<u64, Instant>,
}

impl Waiting {
    /// The longest time for which the client has taken nothing of a reply.
    pub fn longest(&self) -> Duration {
        let since = self.with(|replies| replies.since.values().min().copied());
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn with<T>(&self, use_it: impl FnOnce(&mut Replies) -> T) -> T {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The body of a reply. Its request is being answered until it is dropped.
pub(super) struct ReplyBody {
    body: Body,
    _request: watch::Receiver<()>,
    waiting: Waiting,
    number: u64,
}

impl ReplyBody {
    pub fn new(body: Body, request: watch::Receiver<()>, waiting: Waiting) -> Self {
        let number = waiting.with(|replies| {
            replies.next += 1;
            replies.next
        });
        Self {
            body,
            _request: request,
            waiting,
            number,
        }
    }
}

impl Drop for ReplyBody {
    fn drop(&mut self) {
        let number = self.number;
        self.waiting.with(|replies| replies.since.remove(&number));
    }
}

impl HttpBody for ReplyBody {
    type Data = Bytes;
    type Error = axum::Error;

    /// hyper asks for the next frame when there is room for it: what it got before was taken.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let number = self.number;
        self.waiting.with(|replies| replies.since.remove(&number));
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if matches!(frame, Some(Ok(_))) {
            self.waiting
                .with(|replies| replies.since.insert(number, Instant::now()));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn a_reply_waits_from_a_frame_to_the_next_question() {
        let (waiting, requests) = (Waiting::default(), watch::Sender::new(()));
        let parts = ["a", "b"].map(Ok::<_, std::convert::Infallible>);
        let body = Body::from_stream(futures_util::stream::iter(parts));
        let mut reply = ReplyBody::new(body, requests.subscribe(), waiting.clone());
        let other = ReplyBody::new(Body::empty(), requests.subscribe(), waiting.clone());
        assert_eq!(waiting.longest(), Duration::ZERO);
        assert_eq!(requests.receiver_count(), 2);
        assert!(reply.frame().await.is_some());
        std::thread::sleep(Duration::from_millis(2));
        let longest = waiting.longest();
        assert!(longest >= Duration::from_millis(2), "{longest:?}");
        // The next frame has been waiting since it came.
        let asked = Instant::now();
        assert!(reply.frame().await.is_some());
        let longest = waiting.longest();
        assert!(longest <= asked.elapsed(), "{longest:?}");
        assert!(reply.frame().await.is_none());
        assert_eq!(waiting.longest(), Duration::ZERO);
        drop((reply, other));
        assert_eq!(requests.receiver_count(), 0);
    }

    #[tokio::test]
    async fn a_reply_that_is_dropped_waits_no_longer() {
        let (waiting, requests) = (Waiting::default(), watch::Sender::new(()));
        let mut reply = ReplyBody::new(Body::from("a"), requests.subscribe(), waiting.clone());
        assert!(reply.frame().await.is_some());
        std::thread::sleep(Duration::from_millis(2));
        assert!(waiting.longest() > Duration::ZERO);
        drop(reply);
        assert_eq!(waiting.longest(), Duration::ZERO);
    }
}
