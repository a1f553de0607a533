//! What a step does for grammars: drafts of what they force, drafts cut where they end them, and masks that are
//! computed while the target computes the logits that they apply to.

use super::draft::{Draft, DraftRequest, Proposal};
use super::step::StepInput;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `forward`, and on another thread `masks`, if there are any to compute. `masks` gets a flag that is
/// set when the forward is done; what it leaves is computed when it is needed.
pub fn overlap_with_forward<T>(
    masks: Option<impl FnOnce(&AtomicBool) + Send>,
    forward: impl FnOnce() -> T,
) -> T {
    let Some((masks, worker)) = masks.zip(worker()) else {
        return forward();
    };
    let is_done = AtomicBool::new(false);
    worker.in_place_scope(|scope| {
        scope.spawn(|_| masks(&is_done));
        let output = forward();
        is_done.store(true, Ordering::Relaxed);
        output
    })
}

/// The thread that computes masks: one for all steps, because starting one takes as long as a mask. `None` if
/// the system gives no thread.
fn worker() -> Option<&'static ThreadPool> {
    static WORKER: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let start = || {
        let one = ThreadPoolBuilder::new().num_threads(1);
        one.thread_name(|_| "masks".into()).build().ok()
    };
    WORKER.get_or_init(start).as_ref()
}

/// Computes the masks for the rows of a step; `None` if it needs none.
pub fn of_step<'a>(
    inputs: &'a mut [StepInput<'_>],
    proposals: &'a [Proposal],
) -> Option<impl FnOnce(&AtomicBool) + Send + 'a> {
    let needs = |input: &StepInput<'_>| input.sample && input.state.sampler.has_grammar();
    inputs
        .iter()
        .any(needs)
        .then_some(move |stop: &AtomicBool| {
            for (input, Proposal { draft, .. }) in inputs.iter_mut().zip(proposals) {
                if input.sample
                    && let Some(grammar) = input.state.sampler.grammar()
                {
                    grammar.prepare(&draft.tokens, &draft.parents, stop);
                }
            }
        })
}

/// The tokens that a sequence's grammar, or the limit on its thought, forces next.
#[derive(Default)]
pub struct Forced {
    pub tokens: Vec<u32>,
    /// The sequence's tokens and the forced ones; empty without these.
    all: Vec<u32>,
}

impl Forced {
    /// The forced tokens of `input`, at most as many as its draft may have.
    pub fn of(input: &mut StepInput<'_>) -> Self {
        let max = input.nodes.min(input.length);
        let state = &mut *input.state;
        let tokens = state.sampler.forced(max);
        if tokens.is_empty() {
            Self::default()
        } else {
            Self {
                all: [&state.tokens[..], &tokens].concat(),
                tokens,
            }
        }
    }

    /// The request for what comes after them; `None` if no more may.
    pub fn request<'a>(
        &'a self,
        input: &'a mut StepInput<'_>,
        min_score: f32,
    ) -> Option<DraftRequest<'a>> {
        let count = self.tokens.len();
        let mut request = input.draft_request(min_score);
        if count > 0 {
            request.tokens = &self.all;
            request.position += count;
            request.length -= count;
            request.model_length -= count;
            request.nodes -= count;
            (self.tokens.iter()).for_each(|&token| request.sampler.push(token));
        }
        (request.length > 0 && request.nodes > 0).then_some(request)
    }
}

/// Ends a draft where the request's grammar cannot follow. Not a draft of fixed size: that must not depend
/// on its tokens.
pub fn follow_grammar(input: &mut StepInput<'_>, draft: &mut Draft) {
    if input.state.has_fixed_draft() {
        return;
    }
    if let Some(grammar) = input.state.sampler.grammar() {
        let accepted = grammar.accepts(&draft.tokens, &draft.parents);
        if accepted.contains(&false) {
            draft.retain(&accepted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    /// Many steps start no more than one thread, and it works while the forward runs.
    #[test]
    fn masks_of_all_steps_are_computed_on_one_other_thread() {
        let mut threads: HashSet<ThreadId> = HashSet::new();
        for step in 0..50 {
            let (started, has_started) = mpsc::channel();
            let masks = |is_done: &AtomicBool| {
                started.send(thread::current().id()).unwrap();
                while !is_done.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
            };
            let forward = || {
                threads.insert(has_started.recv().unwrap());
                step
            };
            assert_eq!(overlap_with_forward(Some(masks), forward), step);
        }
        assert_eq!(threads.len(), 1);
        assert!(!threads.contains(&thread::current().id()));
        assert_eq!(overlap_with_forward(None::<fn(&AtomicBool)>, || 7), 7);
    }
}
