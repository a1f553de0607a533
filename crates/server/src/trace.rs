//! The record of a request at its end, for an [`Observer`]. It is collected while the request is served, and given
//! away when the last of those who serve it lets go.

use super::error::Refusal;
use super::openai::Job;
use foretoken_engine::{EndObserver, SequenceEnd};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Is told of requests for text that have ended, refused ones included.
pub trait Observer: Send + Sync {
    /// Called once for a request, by a thread that serves others, too: it must not wait.
    fn ended(&self, request: &RequestRecord);
}

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    /// The client's `x-request-id`, or the one that it got.
    pub id: Arc<str>,
    /// OpenTelemetry's name of what was asked for: `chat` or `text_completion`.
    pub operation: &'static str,
    /// The HTTP method.
    pub method: String,
    /// The path of the route.
    pub route: &'static str,
    /// The header of W3C's trace context, if there is exactly one.
    pub traceparent: Option<String>,
    /// All headers of this name, as one.
    pub tracestate: Option<String>,
    /// When the request arrived.
    pub arrived: Instant,
    /// When the request ended.
    pub ended: Instant,
    /// The status of the response; `None` = the client left before there was one.
    pub status: Option<u16>,
    /// The code of the error with which the request was answered.
    pub error: Option<&'static str>,
    /// The record of the request's job, if the request was accepted.
    pub job: Option<JobRecord>,
    /// The records of the choices.
    pub choices: Vec<ChoiceRecord>,
}

/// The options of an accepted request.
#[derive(Debug, Clone, Default)]
pub struct JobRecord {
    /// The id of the reply.
    pub response_id: String,
    /// The name of the model that the request asked for.
    pub model: String,
    /// Maximum number of tokens to generate; `None` = up to the context limit.
    pub max_tokens: Option<usize>,
    /// Sampling temperature; 0 = greedy.
    pub temperature: f32,
    /// Total probability of the tokens that are kept (nucleus sampling); 1 = off.
    pub top_p: f32,
    /// Whether the reply is streamed.
    pub stream: bool,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Number of choices of each prompt, which come one after the other.
    pub choices_per_prompt: usize,
}

/// A choice of a request that has ended.
#[derive(Debug, Clone, Default)]
pub struct ChoiceRecord {
    /// The reason why the choice's text ended, and its number of tokens; `None` = the text was cut off.
    pub finish: Option<(&'static str, usize)>,
    /// `None` = it never got to the engine.
    pub sequence: Option<SequenceEnd>,
}

/// The routes of which an observer is told, and what they are for.
const ROUTES: [(&str, &str); 7] = [
    ("/v1/chat/completions", "chat"),
    ("/v1/completions", "text_completion"),
    ("/infill", "text_completion"),
    ("/v1/responses", "chat"),
    ("/v1/messages", "chat"),
    ("/api/chat", "chat"),
    ("/api/generate", "text_completion"),
];

impl RequestRecord {
    /// A request that arrives now; `None` if it is none for text.
    pub(super) fn new(id: &Arc<str>, method: &str, path: &str) -> Option<Self> {
        let now = Instant::now();
        let mut routes = ROUTES.into_iter();
        let (route, operation) = routes.find(|(route, _)| *route == path)?;
        Some(Self {
            id: id.clone(),
            operation,
            method: method.to_owned(),
            route,
            traceparent: None,
            tracestate: None,
            arrived: now,
            ended: now,
            status: None,
            error: None,
            job: None,
            choices: Vec::new(),
        })
    }
}

/// The record of a request that is served. Everyone who serves it has a clone.
#[derive(Clone)]
pub(super) struct Trace(Arc<Open>);

struct Open {
    observer: Arc<dyn Observer>,
    record: Mutex<RequestRecord>,
}

/// A choice that the engine generates.
#[derive(Debug)]
struct Watched {
    open: Arc<Open>,
    choice: usize,
}

impl Trace {
    pub fn new(observer: Arc<dyn Observer>, record: RequestRecord) -> Self {
        let record = Mutex::new(record);
        Self(Arc::new(Open { observer, record }))
    }

    /// The request was accepted.
    pub fn accepted(&self, job: &mut Job, response_id: &str) {
        let first = job.requests.first();
        let mut record = self.0.record();
        record.job = Some(JobRecord {
            response_id: response_id.to_owned(),
            model: job.header.model.clone(),
            max_tokens: first.and_then(|request| request.max_tokens),
            temperature: first.map_or(0.0, |request| request.params.temperature),
            top_p: first.map_or(1.0, |request| request.params.top_p),
            stream: job.stream,
            prompt_tokens: job.header.prompt_tokens,
            choices_per_prompt: job.header.choices_per_prompt,
        });
        record.choices = vec![ChoiceRecord::default(); job.requests.len()];
        drop(record);
        for (choice, request) in job.requests.iter_mut().enumerate() {
            let open = self.0.clone();
            request.watch = Some(Arc::new(Watched { open, choice }));
        }
    }

    /// The text of a choice is complete.
    pub fn finished(&self, choice: usize, reason: &'static str, tokens: usize) {
        if let Some(record) = self.0.record().choices.get_mut(choice) {
            record.finish = Some((reason, tokens));
        }
    }

    /// There is a response.
    pub fn answered(&self, status: u16, refusal: Option<&Refusal>) {
        let mut record = self.0.record();
        record.status = Some(status);
        record.error = refusal.map(|refusal| refusal.code);
    }

    /// A stream that had begun has failed.
    pub fn failed(&self, refusal: &Refusal) {
        self.0.record().error = Some(refusal.code);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // The last one to leave is right.
        self.0.record().ended = Instant::now();
    }
}

impl Open {
    fn record(&self) -> MutexGuard<'_, RequestRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let record = self.record.get_mut();
        let record = record.unwrap_or_else(PoisonError::into_inner);
        self.observer.ended(record);
    }
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open").finish_non_exhaustive()
    }
}

impl EndObserver for Watched {
    fn ended(&self, end: SequenceEnd) {
        if let Some(record) = self.open.record().choices.get_mut(self.choice) {
            record.sequence = Some(end);
        }
    }
}
