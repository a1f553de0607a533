//! Answers to requests that wait until their model is loaded.

use super::fleet::{Fleet, Lease};
use super::policy::Phase;
use super::proxy::{self, Forwarded};
use crate::bodies::Received;
use crate::error;
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, Method, Response, StatusCode, header};
use axum::response::IntoResponse;
use foretoken_core::error::{Error, RequestErrorKind, Result};
use futures_util::stream::{self, StreamExt};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Time between two comments of a stream whose model is not loaded yet. A stream that waits for less has none, and the
/// status and headers of the process.
pub(super) const BETWEEN_COMMENTS: Duration = Duration::from_secs(5);

/// Maximum bytes of an error of a process that becomes an event.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// A request that waits for its process.
pub(super) struct Waiting {
    pub fleet: Arc<Fleet>,
    pub model: usize,
    pub forwarded: Forwarded,
    pub body: Bytes,
    /// The memory of the body.
    pub _memory: Received,
}

type Acquiring = Pin<Box<dyn Future<Output = Result<Lease>> + Send>>;

impl Waiting {
    /// Answers when the process does.
    ///
    /// # Errors
    /// `ModelUnavailable` or `ShuttingDown`.
    pub async fn whole(self) -> Result<Response<Body>> {
        let lease = self.fleet.acquire(self.model).await?;
        proxy::forward(lease, self.forwarded, self.body).await
    }

    /// Answers if the model is loaded, and starts no process otherwise. It is for requests that any web page can make a
    /// browser send, and for those that are about what a process has.
    ///
    /// # Errors
    /// `ModelUnavailable` or `ShuttingDown`.
    pub async fn loaded(self) -> Result<Response<Body>> {
        let Some(lease) = self.fleet.acquire_loaded(self.model).await? else {
            let (name, method) = (self.fleet.name(self.model), self.forwarded.method());
            let article = if *method == Method::OPTIONS {
                "an"
            } else {
                "a"
            };
            let message = format!(
                "the model `{name}` is not loaded, and {article} {method} starts none: load it with POST /models/load or a request"
            );
            let kind = RequestErrorKind::ModelUnavailable;
            return Err(Error::request(kind, Some("model"), message));
        };
        proxy::forward(lease, self.forwarded, self.body).await
    }

    /// As [`Waiting::whole`], but if the model is not loaded for a while, the answer begins with comments or blank lines,
    /// which keep the connection open; `pause` is the time before each of them. Then an error is an event.
    ///
    /// # Errors
    /// `ModelUnavailable` or `ShuttingDown`, before the first comment.
    pub async fn stream(self, pause: Duration) -> Result<Response<Body>> {
        let (since, mut lease) = (Instant::now(), self.acquire());
        tokio::select! {
            lease = &mut lease => {
                return proxy::forward(lease?, self.forwarded, self.body).await;
            }
            () = sleep(pause) => {}
        }
        let first = self.comment(since.elapsed());
        let state = Begun::Loading {
            waiting: self.into(),
            lease,
            since,
            pause,
        };
        let first = stream::once(async { Ok::<_, io::Error>(first) });
        let rest = stream::unfold(state, Begun::next);
        let headers = [
            (header::CONTENT_TYPE, proxy::EVENTS),
            (header::CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        let body = Body::from_stream(first.chain(rest));
        Ok((headers, body).into_response())
    }

    fn acquire(&self) -> Acquiring {
        let (fleet, model) = (self.fleet.clone(), self.model);
        Box::pin(async move { fleet.acquire(model).await })
    }

    /// A line that clients of streams of events ignore. It is blank for those who do not ask for events by their type: many
    /// of them read every line that is not blank as an event.
    fn comment(&self, waited: Duration) -> Bytes {
        if !self.forwarded.accepts_events() {
            return Bytes::from_static(b"\n\n");
        }
        let (name, seconds) = (self.fleet.name(self.model), waited.as_secs());
        let what = match self.fleet.state(self.model).phase {
            Phase::Loading | Phase::Loaded => "loading",
            Phase::Unloaded | Phase::Stopping => "waiting for another model to end before",
        };
        // A name of a file may have any character.
        let name = name.replace(char::is_control, " ");
        format!(": {what} {name} ({seconds} s)\n\n").into()
    }
}

/// A stream that has begun before its process answers.
enum Begun {
    Loading {
        waiting: Box<Waiting>,
        lease: Acquiring,
        since: Instant,
        pause: Duration,
    },
    Passing(axum::body::BodyDataStream),
    Ended,
}

impl Begun {
    async fn next(self) -> Option<(io::Result<Bytes>, Self)> {
        match self {
            Self::Loading {
                waiting,
                mut lease,
                since,
                pause,
            } => {
                tokio::select! {
                    lease = &mut lease => Some(Self::answer(*waiting, lease).await),
                    () = sleep(pause) => {
                        let comment = waiting.comment(since.elapsed());
                        let state = Self::Loading { waiting, lease, since, pause };
                        Some((Ok(comment), state))
                    }
                }
            }
            Self::Passing(mut body) => {
                let piece = body.next().await?;
                Some((piece.map_err(io::Error::other), Self::Passing(body)))
            }
            Self::Ended => None,
        }
    }

    /// The first piece of the answer.
    async fn answer(waiting: Waiting, lease: Result<Lease>) -> (io::Result<Bytes>, Self) {
        let path = waiting.forwarded.path().to_owned();
        let answer = async {
            let answer = proxy::forward(lease?, waiting.forwarded, waiting.body).await?;
            if answer.status() == StatusCode::OK && proxy::is_sse(answer.headers()) {
                Ok(answer.into_body())
            } else {
                Err(told(answer).await)
            }
        };
        match answer.await {
            // An empty piece: the next ones are the process's.
            Ok(body) => (Ok(Bytes::new()), Self::Passing(body.into_data_stream())),
            Err(error) => (Ok(proxy::failed_event(&path, &error)), Self::Ended),
        }
    }
}

/// The error that a process answers with, whose status can no longer be sent.
async fn told(answer: Response<Body>) -> Error {
    let status = answer.status();
    let body = axum::body::to_bytes(answer.into_body(), MAX_ERROR_BYTES).await;
    let value = body
        .ok()
        .and_then(|body| serde_json::from_slice(&body).ok());
    let value: serde_json::Value = value.unwrap_or_default();
    let told = &value["error"];
    // Anthropic's errors have a type alone.
    let code = told["code"].as_str().or(told["type"].as_str());
    let kind = code.and_then(error::kind_of).unwrap_or(match status {
        StatusCode::NOT_FOUND => RequestErrorKind::NotFound,
        StatusCode::TOO_MANY_REQUESTS => RequestErrorKind::QueueFull,
        status if status.is_client_error() => RequestErrorKind::Invalid,
        _ => RequestErrorKind::ModelUnavailable,
    });
    let message = match told["message"].as_str() {
        Some(message) => error::without_code(message).to_owned(),
        None => format!("the process answered {status}"),
    };
    Error::request(kind, told["param"].as_str(), message)
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
mod tests {
    use super::super::fleet::tests::fleet;
    use super::*;
    use crate::anthropic::Failure;
    use crate::bodies::Bodies;
    use crate::limits::HttpLimits;
    use axum::Json;
    use axum::http::Request;
    use foretoken_core::error::RequestErrorKind as Kind;
    use serde_json::json;

    async fn waiting(fleet: &Arc<Fleet>, model: usize, path: &str) -> Waiting {
        let request = Request::post(path).header(header::ACCEPT, proxy::EVENTS);
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let bodies = Bodies::new(&HttpLimits::default());
        Waiting {
            fleet: fleet.clone(),
            model,
            forwarded: Forwarded::new(&parts),
            body: Bytes::new(),
            _memory: bodies.receive(Body::empty()).await.unwrap(),
        }
    }

    #[tokio::test]
    async fn a_stream_that_waits_begins_with_comments_and_ends_with_its_error() {
        // The others fail after they were loaded, and the second one twice, so that it is not started a third time.
        let fleet = fleet(&["cat", "exit 3", "exit 3"], 1, None);
        for (model, path, event) in [
            (
                2,
                "/v1/responses",
                "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"id\":\"resp_",
            ),
            (1, "/v1/completions", "data: {\"error\":{\"message\":"),
            (
                1,
                "/v1/messages",
                "event: error\ndata: {\"type\":\"error\",",
            ),
        ] {
            let lease = fleet.acquire(0).await.unwrap();
            let stream = waiting(&fleet, model, path).await;
            let answer = stream.stream(Duration::from_millis(20)).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            assert!(proxy::is_sse(answer.headers()));
            let mut body = answer.into_body().into_data_stream();
            let begin = format!(": waiting for another model to end before m{model} (");
            for _ in 0..2 {
                let comment = body.next().await.unwrap().unwrap();
                let comment = std::str::from_utf8(&comment).unwrap();
                let seconds = comment.strip_prefix(begin.as_str());
                let seconds = seconds.and_then(|rest| rest.strip_suffix(" s)\n\n"));
                assert!(
                    seconds.is_some_and(|s| s.parse::<u64>().is_ok()),
                    "{comment}"
                );
            }
            drop(lease);
            let rest: Vec<_> = body.map(|piece| piece.unwrap().to_vec()).collect().await;
            let rest = String::from_utf8(rest.concat()).unwrap();
            let mut events = rest.split("\n\n").filter(|event| !event.starts_with(": "));
            let last = events.next().unwrap();
            assert!(last.starts_with(event), "{last}");
            let why = format!("the process of the model `m{model}` failed");
            assert!(last.contains(&why), "{last}");
            assert_eq!(events.collect::<Vec<_>>(), [""]);
        }
        // What is refused at once has a status.
        let stream = waiting(&fleet, 1, "/v1/completions").await;
        assert!(stream.stream(BETWEEN_COMMENTS).await.is_err());
    }

    #[tokio::test]
    async fn a_client_who_names_no_events_waits_with_blank_lines() {
        let fleet = fleet(&["cat", "exit 3"], 1, None);
        let _lease = fleet.acquire(0).await.unwrap();
        let mut stream = waiting(&fleet, 1, "/v1/completions").await;
        let request = Request::post("/v1/completions").header(header::ACCEPT, "*/*");
        let (parts, ()) = request.body(()).unwrap().into_parts();
        stream.forwarded = Forwarded::new(&parts);
        let answer = stream.stream(Duration::from_millis(20)).await.unwrap();
        let mut body = answer.into_body().into_data_stream();
        for _ in 0..2 {
            assert_eq!(body.next().await.unwrap().unwrap(), "\n\n");
        }
    }

    #[tokio::test]
    async fn errors_of_processes_keep_their_kinds() {
        let long = Error::request(Kind::ContextLengthExceeded, Some("input"), "too long");
        let full = Error::request(Kind::QueueFull, None, "full");
        let overloaded = Error::request(Kind::Overloaded, None, "no memory");
        for (error, code) in [
            (long, "context_length_exceeded"),
            (full, "queue_full"),
            (overloaded, "overloaded"),
            (Error::shutting_down(), "shutting_down"),
            (Error::invalid("input", "wrong"), "invalid_value"),
        ] {
            let body = json!(error::body(&error));
            assert_eq!(body["error"]["code"], code);
            let answer = error::response(&error, Json(error::body(&error)));
            let told = told(answer).await;
            assert_eq!(told.to_string(), error.to_string());
            assert_eq!(json!(error::body(&told)), body);
        }
        // What Codex looks for.
        let error = Error::request(Kind::ContextLengthExceeded, None, "too long");
        let event = proxy::failed_event("/v1/responses", &error);
        let event = std::str::from_utf8(&event).unwrap();
        let expected = r#""error":{"code":"context_length_exceeded","message":"too long"}"#;
        assert!(event.contains(expected), "{event}");
        // Anthropic's have no code.
        let error = Error::request(Kind::Overloaded, None, "no memory");
        let answer = Failure(error).into_response();
        let told = told(answer).await;
        assert!(matches!(
            told,
            Error::Request {
                kind: Kind::Overloaded,
                ..
            }
        ));
    }
}
