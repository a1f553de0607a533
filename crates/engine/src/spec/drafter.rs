//! The interface of drafters.

use super::draft::{CacheScope, Committed, Draft, DraftRequest, Forecast, SeqId};
use super::learned::LearnedDrafts;
use super::pool::DraftPool;
use foretoken_core::error::Result;

/// Proposes continuations. A draft is advice: it may be shorter than requested or empty, and only
/// speed depends on it.
///
/// A drafter with a model has a [`DraftPool`], which keeps what the drafter needs of each sequence. A drafter
/// without one may keep what it likes. A panic ends drafting, and nothing else.
pub trait Drafter: Send {
    /// Returns one draft per request, in order, each at most `length` deep and of at most `nodes`
    /// nodes; ids are distinct.
    /// The caller cuts off what cannot be verified: see [`Draft::end_where_invalid`]. May keep
    /// state for the ids it sees until [`Drafter::forget`].
    ///
    /// # Errors
    /// Only if the device failed: return an empty draft when there is no guess, no room, or an
    /// unknown id. After an error the state for these ids is not specified; the caller forgets
    /// them.
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>>;

    /// The forecast of a draft's worth, by which the caller decides how deep to draft. `None` = a draft costs
    /// no forwards.
    fn forecast(&self, _request: &DraftRequest<'_>) -> Option<Forecast> {
        None
    }

    /// The pool of its model; `None` if it has no model.
    fn pool(&mut self) -> Option<&mut DraftPool> {
        None
    }

    /// Layers of the target whose hidden states [`Drafter::observe`] needs, as in
    /// [`Taps::layers`](foretoken_core::model::Taps); they never change.
    fn taps(&mut self) -> &[usize] {
        self.pool().map_or(&[][..], |pool| pool.taps())
    }

    /// Number of the target's best next tokens that [`Drafter::observe`] wants of each verified row;
    /// it never changes.
    fn candidates(&self) -> usize {
        0
    }

    /// A sequence that may ever request a draft is about to begin, or to begin again after it was
    /// forgotten, with `tokens`. The target has the first `len` of them in its prefix cache. Returns how
    /// many of those, at most `len`, need not come in [`Drafter::observe`]: the target computes the rest
    /// again, unless that takes longer than drafts are expected to save; then the first position to come is `len`. May be
    /// called more than once before the first position comes.
    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        if let Some(pool) = self.pool() {
            return pool.resume(id, tokens, scope, len);
        }
        if self.taps().is_empty() { len } else { 0 }
    }

    /// Called once per step, after verification, for every sequence of the step that may ever
    /// request a draft (but see [`Drafter::observes_late`]): first with its prompt, chunk by chunk, then with accepted tokens. Until an
    /// id is forgotten, each of its positions comes once and in order; the first one is at most what
    /// [`Drafter::resume`] returned, or any if the text is not read from its start: then hidden states come
    /// from some later position on. When a draft is requested, all tokens but the last have come, or
    /// fewer if the step computes the end of a preempted sequence again. Roll back what was computed for
    /// rejected tokens.
    fn observe(&mut self, committed: &[Committed<'_>]) {
        if let Some(pool) = self.pool() {
            pool.observe(committed);
        }
    }

    /// Whether [`Drafter::learn`] wants the hidden states of requests that
    /// [may persist](super::DraftContext::may_persist); it never changes.
    fn learns(&self) -> bool {
        false
    }

    /// Called before [`Drafter::observe`] if the drafter learns, with the hidden states of requests that may train the head,
    /// even where it does not pay to read them for drafts: then `observe` does not get them.
    fn learn(&mut self, _committed: &[Committed<'_>]) {}

    /// Whether [`Drafter::observe`] may come late for a sequence that is asked for no draft: beside the forward of a
    /// later step or before its next draft, with the positions of all steps in between and neither hidden states nor
    /// candidates. Then nothing is done for it while a GPU waits for the host. It never changes.
    fn observes_late(&self) -> bool {
        false
    }

    /// The sequence was preempted, does not begin yet after [`Drafter::resume`], or was part of a failed call of `propose`:
    /// free all state held for it. After a preemption it is observed from its start again; after a failure its earlier
    /// positions do not come again.
    fn forget(&mut self, id: SeqId) {
        if let Some(pool) = self.pool() {
            pool.forget(id);
        }
    }

    /// The request ended: free all state held for its sequence. The drafter may learn from it first.
    fn end(&mut self, id: SeqId) {
        self.forget(id);
    }

    /// Writes what it has seen of its guesses.
    fn learned(&mut self, to: &mut LearnedDrafts) {
        if let Some(pool) = self.pool() {
            pool.acceptance.learned(to);
        }
    }

    /// Begins with what was seen of such guesses at another time; called before the first draft.
    fn recall(&mut self, learned: &LearnedDrafts) {
        if let Some(pool) = self.pool() {
            pool.acceptance.recall(learned);
        }
    }

    /// Checks that it holds exactly what it may.
    ///
    /// # Errors
    /// The inconsistency found.
    fn check_invariants(&mut self) -> Result<(), String> {
        self.pool().map_or(Ok(()), |pool| pool.check_invariants())
    }
}
