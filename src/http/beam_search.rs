//! Beam search beside the engine: each token of each beam is a request of one token, with the most probable ones as
//! its log-probabilities. The prefix cache has the rest of the beam.

use super::beam::search::{Beam, BeamOptions, BeamSearch, Hypothesis};
use super::caller::Caller;
use super::choice::{Choice, Piece};
use super::openai::Job;
use super::state::AppState;
use super::stream::Shape;
use crate::engine::{EngineHandle, Event, Request, SpecUsage};
use crate::error::{Error, Result};
use crate::sampling::SamplingParams;
use axum::response::Response;
use std::time::Duration;

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
        beams = beams.width,
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

/// Between two attempts to submit the next tokens of a search to a full queue.
const QUEUE_WAIT: Duration = Duration::from_millis(20);

/// Refuses a search whose beams could not be submitted together at its end.
fn check_room(
    engine: &EngineHandle,
    request: &Request,
    width: usize,
    max_tokens: usize,
) -> Result<()> {
    let limits = engine.limits();
    if width > limits.max_waiting {
        return Err(Error::too_many_sequences(width, 1, limits.max_waiting));
    }
    let tokens = width.saturating_mul(request.prompt.len() + max_tokens);
    if tokens > limits.max_prompt_tokens {
        let max = limits.max_prompt_tokens;
        let message = format!(
            "n beams of the prompt and max_tokens are {tokens} tokens together; at most {max} are possible"
        );
        return Err(Error::invalid("n", message));
    }
    Ok(())
}

/// The texts after the prompt of `request`, the best first, and how many tokens of the prompt were cached.
async fn search(
    engine: &EngineHandle,
    request: &Request,
    options: BeamOptions,
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
    check_room(engine, request, options.width, max_tokens)?;
    let alternatives = request.logprobs.unwrap_or(0);
    let mut search = BeamSearch::new(options, eos, max_tokens);
    let mut cached_tokens = None;
    loop {
        let of_beam = |beam: &Beam| Request {
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
            adapter: request.adapter.clone(),
            ..Request::default()
        };
        let requests = || search.running().iter().map(of_beam).collect();
        let submitted = loop {
            match engine.submit_all(requests()) {
                // A search that has begun waits for its turn.
                Err(e) if e.is_queue_full() && cached_tokens.is_some() => {
                    tokio::time::sleep(QUEUE_WAIT).await;
                }
                submitted => break submitted?,
            }
        };
        let mut next = Vec::with_capacity(search.running().len());
        for events in submitted {
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
