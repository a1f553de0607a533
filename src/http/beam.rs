//! Beam search beside the engine: each token of each beam is a request of one token, with the most probable ones as
//! its log-probabilities. The prefix cache has the rest of the beam.

mod search;

pub(super) use search::EarlyStoppingField;

use super::caller::Caller;
use super::choice::{Choice, Piece};
use super::numbers::within;
use super::openai::Job;
use super::state::AppState;
use super::stream::Shape;
use super::structured::Structured;
use super::wire::{Common, wrong};
use crate::engine::{EngineHandle, Event, Request, SpecUsage};
use crate::error::{Error, Result};
use crate::sampling::SamplingParams;
use axum::response::Response;
use search::{BeamOptions as SearchOptions, BeamSearch, Hypothesis};

/// Beyond, the power of a length is no number that one can compare.
const MAX_LENGTH_PENALTY: f64 = 10.0;

/// The beam search that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BeamOptions(SearchOptions);

/// The fields that ask for one.
#[derive(Debug, Clone, Copy)]
pub(super) struct BeamFields {
    pub use_beam_search: Option<bool>,
    pub length_penalty: Option<f64>,
    pub early_stopping: Option<EarlyStoppingField>,
}

impl BeamOptions {
    /// How many beams run at a time.
    pub fn set_width(&mut self, width: usize) {
        self.0.width = width;
    }
}

impl BeamFields {
    /// The beam search that a body asks for; `None` if it asks for none. `common` and `structured` have what the body
    /// names itself, and `others` has fields of its API that do not go along, with whether they ask for something.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn read(
        self,
        common: &Common,
        structured: &Structured,
        others: &[(&'static str, bool)],
    ) -> Result<Option<BeamOptions>> {
        const REFUSED: &str = "is not possible with use_beam_search: leave it out";
        if self.use_beam_search != Some(true) {
            return Ok(None);
        }
        if let Some((field, _)) = structured.asked()? {
            return wrong(field, REFUSED);
        }
        let is_not = |value: Option<f64>, nothing: &[f64]| {
            value.is_some_and(|value| !nothing.contains(&value))
        };
        let shared = [
            ("stream", common.stream == Some(true)),
            // Beams are compared by the model's own distribution, which is that at temperature 1.
            ("temperature", is_not(common.temperature, &[0.0, 1.0])),
            ("top_p", is_not(common.top_p, &[1.0])),
            ("top_k", common.top_k.is_some_and(|k| k > 0)),
            ("min_p", is_not(common.min_p, &[0.0])),
            (
                "repetition_penalty",
                is_not(common.repetition_penalty, &[1.0]),
            ),
            ("presence_penalty", is_not(common.presence_penalty, &[0.0])),
            (
                "frequency_penalty",
                is_not(common.frequency_penalty, &[0.0]),
            ),
            (
                "logit_bias",
                common
                    .logit_bias
                    .as_ref()
                    .is_some_and(|map| !map.is_empty()),
            ),
            (
                "stop",
                common
                    .stop
                    .as_ref()
                    .is_some_and(|stop| !stop.list().is_empty()),
            ),
            (
                "stop_token_ids",
                common
                    .stop_token_ids
                    .as_ref()
                    .is_some_and(|ids| !ids.is_empty()),
            ),
            ("min_tokens", common.min_tokens.is_some_and(|min| min > 0)),
            ("allowed_token_ids", common.allowed_token_ids.is_some()),
            (
                "bad_words",
                common
                    .bad_words
                    .as_ref()
                    .is_some_and(|words| !words.list().is_empty()),
            ),
            ("acceptance", common.acceptance.is_some()),
        ];
        if let Some((field, _)) = shared.iter().chain(others).find(|(_, asks)| *asks) {
            return wrong(*field, REFUSED);
        }
        let range = -MAX_LENGTH_PENALTY..=MAX_LENGTH_PENALTY;
        let penalty = within("length_penalty", self.length_penalty, range)?;
        Ok(Some(BeamOptions(SearchOptions {
            width: 1,
            length_penalty: penalty.unwrap_or(1.0),
            early_stopping: self.early_stopping.map(Into::into).unwrap_or_default(),
        })))
    }
}

/// Answers a job by beam search: its choices are the best texts of each prompt. Dropping the future cancels it.
///
/// # Errors
/// Those of the engine.
pub(super) async fn collect(
    state: &AppState,
    mut job: Job,
    beams: BeamOptions,
    shape: impl Shape,
    caller: &Caller,
) -> Result<Response> {
    let _in_flight = state.load.enter();
    let mut pieces: Vec<Piece> = Vec::with_capacity(job.choices.len());
    let shown = job.header.shown_per_prompt;
    for (requests, choices) in (job.requests.chunks(shown)).zip(job.choices.chunks_mut(shown)) {
        let request = Request {
            name: Some(caller.id.0.clone()),
            ..requests[0].clone()
        };
        let (found, cached_tokens) = search(&state.engine, &request, beams).await?;
        if found.len() < choices.len() {
            let (few, n) = (found.len(), choices.len());
            return Err(Error::invalid(
                "n",
                format!("n is {n}, but this model has only {few} texts of this length"),
            ));
        }
        for (choice, text) in choices.iter_mut().zip(found) {
            let event = Event::Tokens {
                tokens: text.tokens,
                round: None,
                finish: Some(text.finish),
                spec: SpecUsage::default(),
                cached_tokens,
            };
            let piece = choice.on_event(&state.text, event)?;
            if let (Some(trace), Some(finish)) = (&caller.trace, &piece.finish) {
                let tokens = choice.completion_tokens();
                trace.finished(pieces.len(), finish.reason.name(), tokens);
            }
            pieces.push(piece);
        }
    }
    tracing::info!(
        request_id = &*caller.id.0,
        beams = beams.0.width,
        prompt_tokens = job.header.prompt_tokens,
        output_tokens = job
            .choices
            .iter()
            .map(Choice::completion_tokens)
            .sum::<usize>(),
        "beam search done"
    );
    Ok(shape.whole(state.text.clone(), pieces, &job.choices))
}

/// The texts after the prompt of `request`, the best first, and how many tokens of the prompt were cached.
async fn search(
    engine: &EngineHandle,
    request: &Request,
    BeamOptions(options): BeamOptions,
) -> Result<(Vec<Hypothesis>, usize)> {
    let room = engine
        .limits()
        .max_model_len
        .saturating_sub(request.prompt.len());
    let max_tokens = request.max_tokens.unwrap_or(room);
    let eos = if request.params.ignore_eos {
        Vec::new()
    } else {
        engine.eos_token_ids().to_vec()
    };
    let alternatives = request.logprobs.unwrap_or(0);
    let mut search = BeamSearch::new(options, eos, max_tokens);
    let mut cached_tokens = None;
    loop {
        let of_beam = |beam: &search::Beam| Request {
            name: request.name.clone(),
            prompt: (request.prompt.iter().copied())
                .chain(beam.tokens.iter().map(|token| token.id))
                .collect(),
            params: SamplingParams {
                temperature: 0.0,
                ignore_eos: true,
                ..SamplingParams::default()
            },
            max_tokens: Some(1),
            logprobs: Some(search.candidates().max(alternatives)),
            is_beam: true,
            draft_context: request.draft_context.clone(),
            ..Request::default()
        };
        let requests = search.running().iter().map(of_beam).collect();
        let mut next = Vec::with_capacity(search.running().len());
        for events in engine.submit_all(requests)? {
            let answer = events.collect().await?;
            cached_tokens.get_or_insert(answer.cached_tokens);
            let token = answer.tokens.into_iter().next();
            let scored = token.and_then(|token| token.logprobs);
            next.push(scored.map(|scored| scored.top).unwrap_or_default());
        }
        if !search.step(&next, alternatives) {
            return Ok((search.into_finished(), cached_tokens.unwrap_or(0)));
        }
    }
}
