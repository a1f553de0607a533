//! Request bodies: received within limits of size, time and memory, and read a few at a time.

use super::encoding::{BodyDecoder, Encoding, SentBody};
use super::limits::HttpLimits;
use axum::body::{Body, HttpBody};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use std::io::{self, Write};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_stream::StreamExt;

/// The size up to which a body is small: it needs no memory of the budget, because connections bound how
/// many there are, and it does not wait for large ones.
const SMALL: usize = 64 * 1024;

/// The unit of the budget, in bytes.
const UNIT: usize = 1024;

/// Maximum number of large bodies that are read at once, each of which may take many times its size.
const MAX_LARGE_TURNS: usize = 8;

/// Receives bodies, and lets few of them be read at a time.
pub(super) struct Bodies {
    max_bytes: usize,
    timeout: Duration,
    memory: Arc<Semaphore>,
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

/// A whole body, and its memory of the budget.
pub(super) struct Received {
    pub bytes: Vec<u8>,
    memory: Option<OwnedSemaphorePermit>,
}

/// Number of bodies that are read at a time, if they are small.
pub(super) fn readers() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

impl Bodies {
    pub fn new(limits: &HttpLimits) -> Self {
        let cores = readers();
        let units = (limits.body_memory() / UNIT).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            // What takes more than all of the memory would never be received.
            max_bytes: (limits.max_body_bytes).min(limits.body_memory().saturating_add(SMALL)),
            timeout: limits.timeout_body,
            memory: Arc::new(Semaphore::new(units)),
            small: Arc::new(Semaphore::new(cores)),
            large: Arc::new(Semaphore::new((cores / 2).clamp(1, MAX_LARGE_TURNS))),
        }
    }

    /// Receives a body, and decodes it: its limits hold for both forms. One that is announced as too large is
    /// refused before any of it is read.
    ///
    /// # Errors
    /// `TooLarge`, `Timeout`, `Overloaded`, `UnsupportedEncoding`, or `Invalid` for one that breaks off.
    pub async fn receive(&self, sent: impl Into<SentBody>) -> Result<Received> {
        let SentBody { body, encoding, .. } = sent.into();
        let encoding = encoding?;
        if body.size_hint().lower() > self.max_bytes as u64 {
            return Err(self.too_large());
        }
        let received = timeout(self.timeout, self.collect(body, encoding)).await;
        received.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {:?}", self.timeout);
            Err(Error::request(RequestErrorKind::Timeout, None, message))
        })
    }

    async fn collect(&self, body: Body, encoding: Encoding) -> Result<Received> {
        let received = Receiving {
            bodies: self,
            received: Received {
                bytes: Vec::new(),
                memory: None,
            },
        };
        let mut decoder = BodyDecoder::new(encoding, received);
        let undecodable = |e: io::Error| {
            e.downcast().unwrap_or_else(|e| {
                let message = format!("the body is not what its Content-Encoding says: {e}");
                Error::request(RequestErrorKind::Invalid, None, message)
            })
        };
        let mut sent = 0;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|e| {
                let message = format!("the body could not be received: {e}");
                Error::request(RequestErrorKind::Invalid, None, message)
            })?;
            sent += chunk.len();
            if sent > self.max_bytes {
                return Err(self.too_large());
            }
            decoder.write(&chunk).map_err(undecodable)?;
        }
        Ok(decoder.finish().map_err(undecodable)?.received)
    }

    /// Takes the memory for `len` bytes from the budget.
    fn reserve(&self, received: &mut Received, len: usize) -> Result<()> {
        let needed = len.saturating_sub(SMALL).div_ceil(UNIT);
        let held = received.memory.as_ref().map_or(0, |p| p.num_permits());
        let Ok(more @ 1..) = u32::try_from(needed.saturating_sub(held)) else {
            return Ok(());
        };
        let more = self.memory.clone().try_acquire_many_owned(more);
        let more = more.map_err(|_| {
            let message =
                "other requests' bodies take all the memory of --max-body-memory; try again later";
            Error::request(RequestErrorKind::Overloaded, None, message)
        })?;
        match &mut received.memory {
            Some(memory) => memory.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }

    /// Waits until a body of `len` bytes may be read; until the permit is dropped, it is.
    pub async fn turn(&self, len: usize) -> Result<OwnedSemaphorePermit> {
        let lane = if len <= SMALL {
            &self.small
        } else {
            &self.large
        };
        let turn = lane.clone().acquire_owned().await;
        turn.map_err(|_| Error::internal("the turns for reading bodies have ended"))
    }

    fn too_large(&self) -> Error {
        let message = format!("the body may have at most {} bytes", self.max_bytes);
        Error::request(RequestErrorKind::TooLarge, None, message)
    }
}

/// A body of which more is received.
struct Receiving<'a> {
    bodies: &'a Bodies,
    received: Received,
}

impl Write for Receiving<'_> {
    /// Fails with an [`enum@Error`] where there is no more room.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.received.bytes.len() + bytes.len();
        if len > self.bodies.max_bytes {
            return Err(io::Error::other(self.bodies.too_large()));
        }
        let reserved = self.bodies.reserve(&mut self.received, len);
        reserved.map_err(io::Error::other)?;
        // Copied, because a chunk of a few bytes may keep a whole buffer alive.
        self.received.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bodies(max_body_memory: usize) -> Bodies {
        Bodies::new(&HttpLimits {
            max_body_memory: Some(max_body_memory),
            timeout_body: Duration::from_millis(50),
            ..HttpLimits::default()
        })
    }

    #[tokio::test]
    async fn the_memory_of_large_bodies_is_bounded_and_given_back() {
        let bodies = bodies(1024 * 1024);
        let body = |len: usize| Body::from(vec![b'a'; len]);
        let kind = |result: Result<Received>| match result {
            Err(Error::Request { kind, .. }) => Some(kind),
            Err(other) => panic!("{other:?}"),
            Ok(_) => None,
        };
        let first = bodies
            .receive(body(SMALL + 1024 * 1024))
            .await
            .expect("fits");
        assert_eq!(first.bytes.len(), SMALL + 1024 * 1024);
        let second = bodies.receive(body(SMALL + 1)).await;
        assert_eq!(kind(second), Some(RequestErrorKind::Overloaded));
        assert_eq!(kind(bodies.receive(body(SMALL)).await), None);
        drop(first);
        assert_eq!(kind(bodies.receive(body(SMALL + 1)).await), None);
        let larger = bodies.receive(body(3 * 1024 * 1024)).await;
        assert_eq!(kind(larger), Some(RequestErrorKind::TooLarge));
        let stalled = Body::from_stream(futures_util::stream::pending::<std::io::Result<&str>>());
        let stalled = bodies.receive(stalled).await;
        assert_eq!(kind(stalled), Some(RequestErrorKind::Timeout));
    }

    #[tokio::test]
    async fn small_bodies_do_not_wait_for_large_ones() {
        let bodies = bodies(1024 * 1024);
        let mut large = Vec::new();
        while let Ok(turn) = timeout(Duration::from_millis(10), bodies.turn(SMALL + 1)).await {
            large.push(turn.expect("open"));
        }
        assert!(!large.is_empty() && large.len() <= MAX_LARGE_TURNS);
        let small = timeout(Duration::from_millis(10), bodies.turn(SMALL)).await;
        assert!(small.is_ok());
    }
}
