//! Beam search beside the engine: a beam is a request of one step, with the most probable next tokens as
//! log-probabilities. The prefix cache has the rest of the beam. Draft tokens that the step accepts go on with the beam's
//! most probable tokens: a beam that takes them, too, needs no request for them (Leviathan et al. 2023, A.4).

use super::beam::search::{Beam, BeamOptions, BeamSearch, Hypothesis};
use super::caller::Caller;
use super::choice::Choice;
use super::openai::Job;
use super::piece::Piece;
use super::state::AppState;
use super::stream::Shape;
use axum::response::Response;
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::SamplingParams;
use foretoken_engine::{Event, Request, RequestLimits, Series, SpecUsage};
use std::collections::HashMap;

/// Answers a job by beam search: its choices are the best texts of each prompt. Dropping the future cancels it.
///
/// # Errors
/// The engine's errors.
pub(super) async fn collect(
    state: &AppState,
    mut job: Job,
    beams: BeamOptions,
    shape: impl Shape,
    caller: &Caller,
) -> Result<Response> {
    let _in_flight = state.load.enter();
    let mut series = Series::begin(&state.engine)?;
    let mut pieces: Vec<Piece> = Vec::with_capacity(job.choices.len());
    let shown = job.header.shown_per_prompt;
    for (requests, choices) in (job.requests.chunks(shown)).zip(job.choices.chunks_mut(shown)) {
        let request = Request {
            name: Some(caller.id.0.clone()),
            ..requests[0].clone()
        };
        let (found, cached_tokens) = search(&mut series, &request, beams).await?;
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

/// Refuses a search whose beams could not be submitted together at its end.
fn check_room(
    limits: &RequestLimits,
    request: &Request,
    width: usize,
    max_tokens: usize,
) -> Result<()> {
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

/// The most probable next tokens of texts, with their log-probabilities.
type NextTokens = HashMap<Vec<u32>, Vec<(u32, f32)>>;

fn ids(beam: &Beam) -> Vec<u32> {
    beam.tokens.iter().map(|token| token.id).collect()
}

/// The texts after the prompt of `request`, the best first, and how many tokens of the prompt were cached.
async fn search(
    series: &mut Series,
    request: &Request,
    options: BeamOptions,
) -> Result<(Vec<Hypothesis>, usize)> {
    let engine = series.engine();
    let limits = engine.limits();
    let room = limits.max_model_len.saturating_sub(request.prompt.len());
    let max_tokens = request.max_tokens.unwrap_or(room);
    let eos = if request.params.ignore_eos {
        Vec::new()
    } else {
        engine.eos_token_ids().to_vec()
    };
    check_room(limits, request, options.width, max_tokens)?;
    let spec_length = request.spec_length.unwrap_or(limits.spec_length);
    let max_round = 1 + spec_length.min(limits.spec_length);
    let alternatives = request.logprobs.unwrap_or(0);
    let mut search = BeamSearch::new(options, eos, max_tokens);
    let mut known = NextTokens::new();
    let mut cached_tokens = None;
    loop {
        let unknown = search.running().iter().map(ids);
        let unknown: Vec<Vec<u32>> = unknown.filter(|text| !known.contains_key(text)).collect();
        if !unknown.is_empty() {
            let of_beam = |text: &Vec<u32>| Request {
                name: request.name.clone(),
                prompt: [&request.prompt[..], text].concat(),
                params: SamplingParams {
                    temperature: 0.0,
                    ignore_eos: true,
                    ..SamplingParams::default()
                },
                max_tokens: Some((max_tokens - text.len()).min(max_round)),
                logprobs: Some(search.candidates().max(alternatives)),
                spec_length: request.spec_length,
                single_round: true,
                draft_context: request.draft_context.clone(),
                adapter: request.adapter.clone(),
                ..Request::default()
            };
            let requests = unknown.iter().map(of_beam).collect();
            let submitted = series.submit_all(requests).await?;
            for (mut text, events) in unknown.into_iter().zip(submitted) {
                let answer = events.collect().await?;
                cached_tokens.get_or_insert(answer.cached_tokens);
                for token in answer.tokens {
                    let scored = token.logprobs.map(|scored| scored.top);
                    known.insert(text.clone(), scored.unwrap_or_default());
                    text.push(token.id);
                }
            }
        }
        let next = search.running().iter().map(ids);
        let next: Vec<_> = next
            .map(|text| known.remove(&text).unwrap_or_default())
            .collect();
        if !search.step(&next, alternatives) {
            return Ok((search.into_finished(), cached_tokens.unwrap_or(0)));
        }
        // What is shorter than the beams no beam becomes.
        let len = search.running()[0].tokens.len();
        known.retain(|text, _| text.len() >= len);
    }
}
