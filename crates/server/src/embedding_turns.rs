//! Limits of what embeddings and scores may take of the memory and of the engine's queue. A request with many inputs
//! waits here instead, so that it neither fills the queue nor fails half-way.

use super::limits::HttpLimits;
use axum::body::{Body, Bytes};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_engine::{CollectedEvents, Request, RequestLimits, Series};
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of requests that are being answered or wait; each may have megabytes of token ids.
pub(super) const MAX_JOBS: usize = 64;
/// Maximum number of inputs of a request that are in the engine at once.
const WAVE: usize = 128;
/// The unit of the memory, in bytes.
const UNIT: usize = 1024;
/// Bytes of an answer that are sent at once.
const CHUNK: usize = 64 * 1024;

/// The turns of requests, in the order of their arrival.
pub(super) struct Turns {
    jobs: Arc<Semaphore>,
    /// The memory of answers, in units.
    memory: Arc<Semaphore>,
    units: usize,
    /// Places in the engine: at most half of its queue.
    places: Arc<Semaphore>,
    num_places: usize,
}

/// The right to answer, and the memory of the answer.
pub(super) struct Room {
    _job: OwnedSemaphorePermit,
    _memory: OwnedSemaphorePermit,
}

impl Turns {
    pub fn new(engine: &RequestLimits, limits: &HttpLimits) -> Self {
        let units =
            (limits.body_memory() / UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        let num_places = engine.max_waiting.div_ceil(2);
        Self {
            jobs: Arc::new(Semaphore::new(MAX_JOBS)),
            memory: Arc::new(Semaphore::new(units)),
            units,
            places: Arc::new(Semaphore::new(num_places)),
            num_places,
        }
    }

    /// Waits for the memory for an answer of `len` bytes, or for all of it if that is less.
    ///
    /// # Errors
    /// `QueueFull`, if too many wait.
    pub async fn room(&self, len: usize) -> Result<Room> {
        let job = self.jobs.clone().try_acquire_owned().map_err(|_| {
            let message = format!(
                "{MAX_JOBS} requests for embeddings or scores are being answered or wait, more may not; try again later"
            );
            Error::request(RequestErrorKind::QueueFull, None, message)
        })?;
        let units = len.div_ceil(UNIT).min(self.units) as u32;
        let memory = self.memory.clone().acquire_many_owned(units).await;
        Ok(Room {
            _job: job,
            _memory: memory.map_err(ended)?,
        })
    }

    /// Runs `requests`, which bear `name` and are of `series`, and gives what became of each to `note`, in their order.
    /// Whoever drops this cancels them.
    ///
    /// # Errors
    /// The errors of the engine, or that of `note`.
    pub async fn run(
        &self,
        series: &mut Series,
        mut requests: Vec<Request>,
        name: &Arc<str>,
        mut note: impl FnMut(CollectedEvents) -> Result<()>,
    ) -> Result<()> {
        for request in &mut requests {
            request.name = Some(name.clone());
        }
        while !requests.is_empty() {
            let (count, _turn) = self.next(&requests, series.engine().limits()).await?;
            let others = requests.split_off(count);
            let first = std::mem::replace(&mut requests, others);
            for events in series.submit_all(first).await? {
                note(events.collect().await?)?;
            }
        }
        Ok(())
    }

    /// Waits until the first of `requests` may be queued; returns how many, at least one.
    async fn next(
        &self,
        requests: &[Request],
        limits: &RequestLimits,
    ) -> Result<(usize, OwnedSemaphorePermit)> {
        let mut tokens = 0;
        let fits = |request: &&Request| {
            tokens += request.prompt.len();
            tokens <= limits.max_prompt_tokens
        };
        let first = requests.iter().take(WAVE.min(self.num_places));
        let count = first.take_while(fits).count().max(1);
        let places = self.places.clone().acquire_many_owned(count as u32).await;
        Ok((count, places.map_err(ended)?))
    }
}

/// Cannot happen: nobody closes these semaphores.
fn ended<E>(_: E) -> Error {
    Error::internal("the turns of embeddings have ended")
}

impl Room {
    /// A body that keeps the room until all of it was taken.
    pub fn body(self, bytes: Vec<u8>) -> Body {
        let rest = Bytes::from(bytes);
        if rest.len() <= CHUNK {
            return rest.into();
        }
        let chunks = stream::unfold((rest, self), |(mut rest, room)| async {
            let chunk = rest.split_to(rest.len().min(CHUNK));
            (!chunk.is_empty()).then_some((Ok::<_, Infallible>(chunk), (rest, room)))
        });
        Body::from_stream(chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretoken_core::model::Pooling;
    use std::time::Duration;
    use tokio::time::timeout;

    fn turns(max_waiting: usize) -> (Turns, RequestLimits) {
        let limits = RequestLimits {
            max_model_len: 100,
            vocab_size: 10,
            max_logprobs: 0,
            max_waiting,
            max_prompt_tokens: 1000,
            spec_length: 0,
            generates: false,
            embedding_size: 4,
            takes_adapters: false,
        };
        let http = HttpLimits {
            max_body_memory: Some(100 * UNIT),
            ..HttpLimits::default()
        };
        (Turns::new(&limits, &http), limits)
    }

    async fn at_once<T>(work: impl Future<Output = Result<T>>) -> Option<T> {
        let done = timeout(Duration::from_millis(20), work).await;
        done.ok().map(|done| done.unwrap())
    }

    #[tokio::test]
    async fn answers_wait_for_memory_and_keep_it_until_they_are_taken() {
        let (turns, _) = turns(8);
        let first = at_once(turns.room(60 * UNIT)).await.unwrap();
        assert!(at_once(turns.room(60 * UNIT)).await.is_none());
        let small = at_once(turns.room(UNIT)).await.unwrap();
        let body = first.body(vec![b'a'; 2 * CHUNK + 1]);
        assert!(at_once(turns.room(60 * UNIT)).await.is_none());
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        assert_eq!(bytes.len(), 2 * CHUNK + 1);
        drop(small);
        // More than there is takes all of it.
        let all = at_once(turns.room(usize::MAX)).await.unwrap();
        assert!(at_once(turns.room(1)).await.is_none());
        drop(all);
        let mut rooms = Vec::new();
        while let Ok(room) = turns.room(1).await {
            rooms.push(room);
        }
        assert_eq!(rooms.len(), MAX_JOBS);
    }

    #[tokio::test]
    async fn half_of_the_queue_is_shared_by_waves() {
        let (turns, limits) = turns(8);
        let texts = |count, len| vec![Request::embedding(vec![1; len], Pooling::Last); count];
        let (count, first) = at_once(turns.next(&texts(100, 5), &limits)).await.unwrap();
        assert_eq!(count, 4);
        assert!(at_once(turns.next(&texts(1, 5), &limits)).await.is_none());
        drop(first);
        let one = at_once(turns.next(&texts(1, 5), &limits)).await.unwrap();
        assert_eq!(one.0, 1);
        // No more tokens together than one request may have, but always one text.
        assert_eq!(
            at_once(turns.next(&texts(3, 400), &limits))
                .await
                .unwrap()
                .0,
            2
        );
        assert_eq!(
            at_once(turns.next(&texts(3, 4000), &limits))
                .await
                .unwrap()
                .0,
            1
        );
    }
}
