//! The reply of an infilling: one object, or chunks and then that object without the text.

use super::settings::GenerationSettings;
use crate::choice::Choice;
use crate::error;
use crate::openai::Job;
use crate::piece::{FinishKind, Piece, StopReason};
use crate::reply::event;
use crate::stream::{Shape, blank_lines, sse};
use axum::Json;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use foretoken_core::error::Error;
use foretoken_text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;
use tokio_stream::Stream;

/// What a reply has.
#[derive(Serialize, JsonSchema)]
pub(crate) struct InfillReply<'a> {
    index: usize,
    content: &'a str,
    /// The ids of the text's tokens, if they were asked for.
    tokens: &'a [u32],
    /// Whether the text is complete.
    stop: bool,
    model: &'a str,
    /// Tokens of the text.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    generation_settings: &'a GenerationSettings,
    /// Whether a part of the prompt was left out.
    truncated: bool,
    stop_type: StopType,
    /// The stop string that ended the text.
    stopping_word: &'a str,
    /// Tokens of the prompt that were in the cache.
    tokens_cached: usize,
    timings: Timings,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum StopType {
    None,
    Eos,
    Limit,
    Word,
}

/// How long a reply took, in milliseconds.
#[derive(Serialize, JsonSchema)]
struct Timings {
    /// Tokens of the prompt that were in the cache.
    cache_n: usize,
    /// Tokens of the prompt that were computed.
    prompt_n: usize,
    /// Until the first token.
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    /// Tokens of the text.
    predicted_n: usize,
    /// From the first token to the last one.
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Draft tokens.
    draft_n: usize,
    /// Accepted ones.
    draft_n_accepted: usize,
}

/// A part of a streamed text.
#[derive(Serialize)]
struct InfillChunk<'a> {
    index: usize,
    content: &'a str,
    tokens: &'a [u32],
    stop: bool,
    tokens_predicted: usize,
    tokens_evaluated: usize,
}

/// The state of a reply.
pub(crate) struct InfillShape {
    id: String,
    model: String,
    prompt_tokens: usize,
    truncated: bool,
    settings: GenerationSettings,
    /// The fields that the reply has; `None` = all.
    fields: Option<Vec<String>>,
    started: Instant,
    /// How the text ended, if it did.
    finish: Option<(StopType, String)>,
}

impl InfillShape {
    pub fn new(
        job: &Job,
        prompt_tokens: usize,
        truncated: bool,
        settings: GenerationSettings,
        fields: Option<Vec<String>>,
    ) -> Self {
        Self {
            id: job.header.id.clone(),
            model: job.header.model.clone(),
            prompt_tokens,
            truncated,
            settings,
            fields,
            started: Instant::now(),
            finish: None,
        }
    }

    /// Keeps how the text ended.
    fn note(&mut self, piece: &Piece, choice: &Choice) {
        let Some(finish) = &piece.finish else { return };
        self.finish = Some(match &finish.stop {
            _ if choice.ended_at_line() => (StopType::Limit, String::new()),
            Some(StopReason::Text(word)) => (StopType::Word, word.clone()),
            None if finish.reason == FinishKind::Length => (StopType::Limit, String::new()),
            _ => (StopType::Eos, String::new()),
        });
    }

    /// The last object of a reply, with the fields that were asked for.
    fn last(&self, content: &str, tokens: &[u32], choice: &Choice) -> Value {
        let none = (StopType::None, String::new());
        let (stop_type, word) = self.finish.as_ref().unwrap_or(&none);
        let reply = json!(InfillReply {
            index: 0,
            content,
            tokens,
            stop: true,
            model: &self.model,
            tokens_predicted: choice.completion_tokens(),
            tokens_evaluated: self.prompt_tokens,
            generation_settings: &self.settings,
            truncated: self.truncated,
            stop_type: *stop_type,
            stopping_word: word,
            tokens_cached: choice.cached_tokens(),
            timings: Timings::new(self.started, self.prompt_tokens, choice),
        });
        match &self.fields {
            Some(fields) => chosen(&reply, fields),
            None => reply,
        }
    }
}

/// An object with the values of `reply` that `fields` name, under these names.
fn chosen(reply: &Value, fields: &[String]) -> Value {
    let found = fields.iter().filter_map(|field| {
        let value = field
            .split('/')
            .try_fold(reply, |value, key| value.get(key))?;
        Some((field.clone(), value.clone()))
    });
    Value::Object(found.collect::<Map<_, _>>())
}

impl Timings {
    /// The times of a text that ends now.
    fn new(started: Instant, prompt_tokens: usize, choice: &Choice) -> Self {
        let now = Instant::now();
        let first = choice.first_at().unwrap_or(now);
        let millis = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        let (prompt_ms, predicted_ms) = (millis(started, first), millis(first, now));
        let (cached, predicted) = (choice.cached_tokens(), choice.completion_tokens());
        let computed = prompt_tokens.saturating_sub(cached);
        let each = |ms: f64, count: usize| ms / count.max(1) as f64;
        let per_second = |ms: f64, count: usize| count as f64 * 1e3 / ms.max(1e-3);
        let spec = choice.spec();
        Self {
            cache_n: cached,
            prompt_n: computed,
            prompt_ms,
            prompt_per_token_ms: each(prompt_ms, computed),
            prompt_per_second: per_second(prompt_ms, computed),
            predicted_n: predicted,
            predicted_ms,
            predicted_per_token_ms: each(predicted_ms, predicted),
            predicted_per_second: per_second(predicted_ms, predicted),
            draft_n: spec.drafted,
            draft_n_accepted: spec.accepted,
        }
    }
}

impl Shape for InfillShape {
    type Event = Event;

    fn id(&self) -> &str {
        &self.id
    }

    fn whole(mut self, _: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        let (piece, choice) = (&pieces[0], &choices[0]);
        self.note(piece, choice);
        Json(self.last(&piece.text(), &piece.token_ids, choice)).into_response()
    }

    fn piece(&mut self, _: &Text, _: usize, piece: Piece, choices: &[Choice]) -> Vec<Event> {
        self.note(&piece, &choices[0]);
        let content = piece.text();
        if content.is_empty() && piece.token_ids.is_empty() {
            return Vec::new();
        }
        vec![event(&InfillChunk {
            index: 0,
            content: &content,
            tokens: &piece.token_ids,
            stop: false,
            tokens_predicted: choices[0].completion_tokens(),
            tokens_evaluated: self.prompt_tokens,
        })]
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<Event> {
        vec![event(&self.last("", &[], &choices[0]))]
    }

    fn failed(&mut self, error: &Error) -> Vec<Event> {
        vec![event(&error::body(error))]
    }

    fn sent(events: impl Stream<Item = Event> + Send + 'static) -> Response {
        sse(events, blank_lines())
    }
}
