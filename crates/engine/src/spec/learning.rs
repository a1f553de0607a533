//! Online learning of a head: examples of served texts go to a learner, and the learner returns better heads.

use super::draft::{CacheScope, Committed, Draft, DraftRequest, Forecast, SeqId};
use super::drafter::Drafter;
use super::pool::DraftPool;
use candle_core::{DType, Tensor};
use foretoken_core::error::Result;
use foretoken_core::model::Head;
use half::f16;
use prometheus::IntCounter;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender};

/// Maximum number of positions of an example.
pub const EXAMPLE_ROWS: usize = 128;
/// Positions of a prompt before its answer that an example may begin with: what a head reads first predicts
/// badly for want of context.
const PROMPT_ROWS: usize = 32;
/// With fewer drawn tokens an example is not worth a forward.
const MIN_DRAWN: usize = 4;
/// Maximum bytes of the states of examples that are not complete.
const MAX_OPEN_BYTES: usize = 64 << 20;

/// A part of a served text, and the target's hidden states there.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingExample {
    /// The sequence; examples of one text have the same.
    pub request: SeqId,
    /// Consecutive tokens. All but the last two have states.
    pub tokens: Vec<u32>,
    /// Index of the first token that the target drew.
    pub drawn: usize,
    /// `[tokens.len() - 2, taps * hidden_size]`.
    pub states: Vec<f16>,
    /// Whether tokens were drawn at random.
    pub is_sampled: bool,
}

/// The connection of a drafter with the learner of its head.
pub struct LearnerLink {
    /// Takes examples. What it has no room for is dropped: the engine does not wait.
    pub examples: SyncSender<TrainingExample>,
    /// Heads that shall draft in place of the one before, all of the same shape.
    pub heads: Receiver<Box<dyn Head>>,
    /// Counts examples that were dropped.
    pub dropped: IntCounter,
}

/// The drafter of a head that learns. Examples come only from requests that
/// [may persist](super::DraftContext::may_persist), and all from one scope: that of the first.
pub struct LearningDrafter {
    inner: Box<dyn Drafter>,
    link: LearnerLink,
    scope: Option<CacheScope>,
    open: HashMap<SeqId, OpenExample>,
}

/// The example that a sequence is at.
#[derive(Default)]
struct OpenExample {
    /// Position of the first token.
    start: usize,
    tokens: Vec<u32>,
    prompt_len: usize,
    states: Vec<f16>,
    rows: usize,
    is_sampled: bool,
}

impl OpenExample {
    /// Begins again at `start`, without what came so far.
    fn restart(&mut self, start: usize) {
        (self.start, self.rows) = (start, 0);
        self.tokens.clear();
        self.states.clear();
    }

    /// The example that came so far; `None` if nothing can be learned from it.
    fn close(&mut self, request: SeqId) -> Option<TrainingExample> {
        // The states of a position predict the token after the next one.
        let len = self.tokens.len().min(self.rows + 2);
        let drawn = self.prompt_len.saturating_sub(self.start);
        if len < drawn.max(2) + MIN_DRAWN {
            return None;
        }
        let width = self.states.len() / self.rows;
        let mut states = std::mem::take(&mut self.states);
        states.truncate((len - 2) * width);
        Some(TrainingExample {
            request,
            tokens: self.tokens[..len].to_vec(),
            drawn,
            states,
            is_sampled: self.is_sampled,
        })
    }
}

impl LearningDrafter {
    /// `inner` drafts with a head, which `link` may replace.
    pub fn new(inner: Box<dyn Drafter>, link: LearnerLink) -> Self {
        Self {
            inner,
            link,
            scope: None,
            open: HashMap::new(),
        }
    }

    /// Lets the newest head draft that has come.
    fn take_head(&mut self) {
        if let Some(head) = self.link.heads.try_iter().last()
            && let Some(pool) = self.inner.pool()
        {
            pool.replace_head(head);
        }
    }

    /// Keeps the states of a step of a sequence that may train the head.
    fn record(&mut self, committed: &Committed<'_>) -> Result<()> {
        let Some(hidden) = (committed.hidden.as_ref()).filter(|_| committed.context.may_persist)
        else {
            return Ok(());
        };
        if *self.scope.get_or_insert(committed.context.scope) != committed.context.scope {
            return Ok(());
        }
        let wanted = committed.prompt_len.saturating_sub(PROMPT_ROWS);
        let new = committed.new.start.max(wanted)..committed.new.end;
        if new.is_empty() {
            return Ok(());
        }
        let example = self.open.entry(committed.id).or_default();
        example.prompt_len = committed.prompt_len;
        if new.start > example.start + example.rows {
            // Some positions were not read.
            example.restart(new.start);
        }
        let mut at = example.start + example.rows;
        while at < new.end {
            let rows = (EXAMPLE_ROWS - example.rows).min(new.end - at);
            let states = hidden.narrow(0, at - committed.new.start, rows)?;
            example.states.extend(halves(&states)?);
            (example.rows, at) = (example.rows + rows, at + rows);
            let known = example.start + example.tokens.len();
            let end = committed.tokens.len().min(at + 2);
            (example.tokens).extend(committed.tokens.get(known..end).unwrap_or_default());
            if example.rows == EXAMPLE_ROWS {
                let closed = example.close(committed.id);
                example.restart(at);
                send(&self.link, closed);
            }
        }
        Ok(())
    }

    /// Gives up examples that are not complete, if all together take too much memory.
    fn limit(&mut self) {
        let mut bytes = 0;
        for example in self.open.values_mut() {
            bytes += size_of_val(example.states.as_slice());
            if bytes > MAX_OPEN_BYTES {
                example.restart(example.start + example.rows);
                // What was reserved, too.
                example.states = Vec::new();
                self.link.dropped.inc();
            }
        }
    }
}

/// Hands over an example, if there is one.
fn send(link: &LearnerLink, example: Option<TrainingExample>) {
    if let Some(example) = example
        && link.examples.try_send(example).is_err()
    {
        link.dropped.inc();
    }
}

fn halves(states: &Tensor) -> Result<Vec<f16>> {
    // Beyond the largest f16 would be infinity.
    let max = f64::from(f16::MAX);
    let states = states.to_dtype(DType::F32)?.clamp(-max, max)?;
    Ok(states.to_dtype(DType::F16)?.flatten_all()?.to_vec1()?)
}

impl Drafter for LearningDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        for request in &*requests {
            if let Some(example) = self.open.get_mut(&request.id) {
                example.is_sampled = request.is_sampled();
            }
        }
        self.inner.propose(requests)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        self.inner.forecast(request)
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.inner.pool()
    }

    fn taps(&mut self) -> &[usize] {
        self.inner.taps()
    }

    fn candidates(&self) -> usize {
        self.inner.candidates()
    }

    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        // Between two requests the fewest texts run.
        self.take_head();
        self.inner.resume(id, tokens, scope, len)
    }

    fn learns(&self) -> bool {
        true
    }

    fn learn(&mut self, committed: &[Committed<'_>]) {
        for one in committed {
            if let Err(error) = self.record(one) {
                tracing::debug!("nothing is learned from a step: {error}");
            }
        }
        self.limit();
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        self.inner.observe(committed);
    }

    fn forget(&mut self, id: SeqId) {
        if let Some(example) = self.open.get_mut(&id) {
            // Nothing is learned from twice.
            example.restart(example.start + example.rows);
        }
        self.inner.forget(id);
    }

    fn end(&mut self, id: SeqId) {
        if let Some(mut example) = self.open.remove(&id) {
            send(&self.link, example.close(id));
        }
        self.inner.end(id);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        self.inner.check_invariants()
    }
}

#[cfg(test)]
mod tests;
