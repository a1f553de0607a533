//! What goes into a step of the models, and what comes of it, for each sequence.

use super::request::FinishReason;
use super::scheduler::ScheduledSequence;
use super::sequence::Sequence;
use super::stats::Stats;
use crate::spec::{Committed, StepInput, StepOutput};
use candle_core::Tensor;
use foretoken_core::error::{Error, RequestErrorKind};
use foretoken_core::sampling::NoToken;
use std::time::Instant;

/// Converts the plan to the runner's inputs.
pub fn step_inputs<'a>(
    running: &'a mut [Sequence],
    plan: &[ScheduledSequence],
) -> Vec<StepInput<'a>> {
    let mut running: Vec<_> = running.iter_mut().map(Some).collect();
    plan.iter()
        .filter_map(|planned| {
            let sequence = running[planned.index].take()?;
            Some(sequence.step_input(planned.rows, planned.nodes))
        })
        .collect()
}

/// Appends a step's tokens to `sequence` and queues them; returns the reason if the text ends.
pub fn emit(
    stats: &Stats,
    sequence: &mut Sequence,
    rows: usize,
    output: StepOutput,
    now: Instant,
) -> Option<&'static str> {
    stats.note_round(&output.draft.sources, &output.path);
    if let Some(rule) = sequence.state.lossy {
        stats.note_lossy(rule, output.lossy.len());
    }
    let (new, finish) = sequence.advance(rows, output);
    stats.note_tokens(&sequence.times, now, new);
    let is_embedded = sequence.is_embedding() && finish.is_some();
    // The time of an embedding's prompt counts like that of a text.
    if new > 0 || is_embedded {
        sequence.times.note_tokens(now);
    }
    if is_embedded {
        return Some("stop");
    }
    finish.map(FinishReason::name)
}

/// What a step leaves for the drafter to observe of one sequence.
pub struct Stepped {
    /// Index into the running sequences.
    pub index: usize,
    /// Number of tokens in the pool before the step.
    pub kv_len: usize,
    /// The hidden states of the tokens that the step added to the pool.
    pub hidden: Option<Tensor>,
    pub candidates: Vec<(u32, Vec<u32>)>,
    /// `parents` of the draft whose tokens are among `candidates`.
    pub parents: Vec<Option<u16>>,
}

/// The committed tokens of the sequences that the drafter may draft for.
pub fn committed<'a>(running: &'a [Sequence], stepped: &'a [Stepped]) -> Vec<Committed<'a>> {
    let observed = stepped.iter().filter(|one| running[one.index].may_draft());
    observed
        .map(|one| {
            let state = &running[one.index].state;
            let new = one.kv_len..state.kv_len;
            Committed {
                // Tokens accepted after the end of the text do not count.
                hidden: (one.hidden.as_ref()).and_then(|rows| rows.narrow(0, 0, new.len()).ok()),
                candidates: &one.candidates,
                parents: &one.parents,
                ..state.committed(new)
            }
        })
        .collect()
}

/// The error of a request without a next token: the fault of the request or of the model.
pub fn no_token(reason: NoToken) -> Error {
    match reason {
        NoToken::NotFinite => Error::internal(reason.to_string()),
        NoToken::AllForbidden => Error::invalid("logit_bias", reason.to_string()),
        NoToken::GrammarFailed => {
            Error::request(RequestErrorKind::Invalid, None, reason.to_string())
        }
    }
}
