//! Masks of grammars, computed while a model computes the logits that they apply to.

use super::draft::Draft;
use super::step::StepInput;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `forward`, and on another thread `masks`, if there are any to compute. `masks` gets a flag that is
/// set when the forward is done; what it leaves is computed when it is needed.
pub fn beside<T>(masks: Option<impl FnOnce(&AtomicBool) + Send>, forward: impl FnOnce() -> T) -> T {
    let Some(masks) = masks else {
        return forward();
    };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| masks(&is_done));
        let output = forward();
        is_done.store(true, Ordering::Relaxed);
        output
    })
}

/// Computes the masks for the rows of a step; `None` if it needs none.
pub fn of_step<'a>(
    inputs: &'a mut [StepInput<'_>],
    drafts: &'a [Draft],
) -> Option<impl FnOnce(&AtomicBool) + Send + 'a> {
    let needs = |input: &StepInput<'_>| input.sample && input.state.sampler.has_grammar();
    inputs
        .iter()
        .any(needs)
        .then_some(move |stop: &AtomicBool| {
            for (input, draft) in inputs.iter_mut().zip(drafts) {
                if input.sample
                    && let Some(grammar) = input.state.sampler.grammar()
                {
                    grammar.prepare(&draft.tokens, &draft.parents, stop);
                }
            }
        })
}
