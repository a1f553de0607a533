//! The state of one request: tokens, lengths, finish.

use super::embedding::PooledStates;
use super::handle::Submission;
use super::options::SpecLimits;
use super::request::{
    EndObserver, Event, FinishReason, SpecUsage, TokenOutput, VerifiedDraft, queue_cost,
};
use super::stats::RequestTimes;
use crate::spec::{SeqId, SequenceState, Source, StepInput, StepOutput};
use foretoken_core::model::Adapter;
use foretoken_core::sampling::{Acceptance, TokenLogprobs};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

/// The key that orders the queue, lower first: the start tag in tokens, then the order of arrival.
pub type QueueKey = (u64, SeqId);

/// A request from arrival to end. Its pending tokens are always `tokens[kv_len..]`: a prompt, what
/// a preemption discarded, or the one token of plain decoding.
#[derive(Debug)]
pub struct Sequence {
    /// The part of the state that steps need to know.
    pub state: SequenceState,
    /// The name of its request in log lines.
    pub name: Option<Arc<str>>,
    /// See [`Request::single_round`](super::Request::single_round).
    pub single_round: bool,
    /// The observer that is told of its end.
    pub watch: Option<Arc<dyn EndObserver>>,
    /// Maximum number of output tokens; fits the context.
    pub max_tokens: usize,
    /// The request that it belongs to; a request may make several sequences.
    pub group: u64,
    /// Cost of what its request has before this sequence in the queue, in tokens.
    pub tokens_before: u64,
    /// Its start tag in the queue, in tokens.
    pub start: u64,
    /// Cost to this sequence, in tokens, of the sequences that were admitted before it or made it give way.
    pub overtaken: usize,
    /// The head of the queue that it passed as a backfill, and for which it makes way.
    pub passed: Option<QueueKey>,
    /// Whether its beginning was looked for on disk since it came into the queue.
    pub has_looked: bool,
    /// Limits of its drafts.
    pub spec: SpecLimits,
    /// Scores of the prompt so far.
    prompt_scores: Vec<Option<TokenLogprobs>>,
    /// The embedding so far, if it asks for one.
    pool: Option<PooledStates>,
    /// Whether its events carry their rounds.
    include_rounds: bool,
    /// Speculation counts of the sequence so far.
    pub usage: SpecUsage,
    /// Number of prompt tokens that were in the prefix cache when the sequence was first admitted.
    pub cached_tokens: usize,
    /// When it arrived, was admitted and sent tokens.
    pub times: RequestTimes,
    /// The right to wait in the queue; released when the request is first admitted to the batch.
    pub permit: Option<OwnedSemaphorePermit>,
    /// Why it ends, as log lines call it; `None` while it goes on.
    pub ended: Option<&'static str>,
    /// The events that the next [`Sequence::flush`] sends.
    outbox: Vec<Event>,
    events: UnboundedSender<Event>,
    /// The tokens of a text that its receiver has ended.
    pub text_tokens: Arc<OnceLock<usize>>,
}

impl Sequence {
    /// A sequence for a request that was checked against the limits. If the request has no
    /// `max_tokens`, it is what the context leaves; EOS ids join the stop ids.
    pub(super) fn new(
        id: SeqId,
        submission: Submission,
        max_model_len: usize,
        spec: SpecLimits,
        acceptance: Acceptance,
        eos: &[u32],
    ) -> Self {
        let request = submission.request;
        let mut params = request.params;
        if !params.ignore_eos {
            params.stop_token_ids.extend(eos);
        }
        let prompt_len = request.prompt.len();
        let adapter = request.adapter;
        let draft_context = match &adapter {
            Some(adapter) => request.draft_context.of_adapter(adapter.id()),
            None => request.draft_context,
        };
        Self {
            name: request.name,
            single_round: request.single_round,
            watch: request.watch,
            max_tokens: request.max_tokens.unwrap_or(max_model_len - prompt_len),
            group: submission.group,
            tokens_before: submission.tokens_before,
            start: 0,
            overtaken: 0,
            passed: None,
            has_looked: false,
            spec: SpecLimits {
                length: request.spec_length.unwrap_or(spec.length).min(spec.length),
                nodes: request.spec_nodes.unwrap_or(spec.nodes).min(spec.nodes),
                topk: request.spec_topk.unwrap_or(spec.topk).min(spec.topk),
            },
            prompt_scores: Vec::from_iter(request.prompt_logprobs.map(|_| None)),
            pool: request.pooling.map(PooledStates::new),
            include_rounds: request.include_rounds,
            state: SequenceState {
                logprobs: request.logprobs,
                prompt_logprobs: request.prompt_logprobs,
                acceptance: request.acceptance.unwrap_or(acceptance),
                lossy: request.lossy,
                draft_context,
                adapter,
                synthetic_acceptance: request.synthetic_acceptance,
                ..SequenceState::new(id, request.prompt, params)
            },
            usage: SpecUsage::default(),
            cached_tokens: 0,
            times: RequestTimes::new(submission.arrived),
            permit: submission.permit,
            ended: None,
            outbox: Vec::new(),
            events: submission.events,
            text_tokens: submission.text_tokens,
        }
    }

    /// The adapter of its rows.
    pub fn adapter(&self) -> Option<&Arc<dyn Adapter>> {
        self.state.adapter.as_ref()
    }

    /// Output tokens so far.
    pub fn output_len(&self) -> usize {
        self.state.output_len()
    }

    /// Cost of the sequence in the queue, in tokens.
    pub fn queue_cost(&self) -> usize {
        queue_cost(self.state.prompt_len, self.max_tokens)
    }

    /// The key that orders the sequence in the queue.
    pub fn queue_key(&self) -> QueueKey {
        (self.start, self.state.id)
    }

    /// Whether others may cost this sequence `cost` tokens more. In all they may cost it as many as it costs itself.
    pub fn can_be_overtaken(&self, cost: usize) -> bool {
        self.overtaken + cost <= queue_cost(self.state.tokens.len(), self.max_tokens)
    }

    /// The input of a step with `rows` pending rows and a draft of at most `nodes` tokens.
    pub fn step_input(&mut self, rows: usize, nodes: usize) -> StepInput<'_> {
        StepInput {
            rows,
            sample: self.wants_tokens() && rows == self.pending(),
            nodes,
            length: self.draft_length(),
            width: self.spec.topk,
            may_draft: self.may_draft(),
            prompt_scores: self.unscored(rows),
            pooled: self.unpooled(rows),
            state: &mut self.state,
        }
    }

    /// Positions among the next `rows` rows whose hidden states its embedding needs.
    fn unpooled(&self, rows: usize) -> Range<usize> {
        let (start, len) = (self.state.kv_len, self.state.tokens.len());
        let computed = start..start + rows;
        let needed = |pool: &PooledStates| pool.needed(computed.clone(), len);
        self.pool.as_ref().map_or(start..start, needed)
    }

    /// Whether it asks for an embedding.
    pub fn is_embedding(&self) -> bool {
        self.pool.is_some()
    }

    /// Tokens not yet in the pool.
    pub fn pending(&self) -> usize {
        self.state.tokens.len() - self.state.kv_len
    }

    /// Whether the request wants any output tokens.
    pub fn wants_tokens(&self) -> bool {
        self.max_tokens > 0
    }

    /// Whether a step that reads its prompt computes nothing for long besides the layers, and needs no drafts. So the step
    /// can be interrupted at nearly any time, and run again.
    pub fn has_simple_prompt(&self) -> bool {
        !self.single_round && self.state.prompt_logprobs.is_none()
    }

    /// The channel to its receiver.
    pub fn events(&self) -> UnboundedSender<Event> {
        self.events.clone()
    }

    /// Maximum depth of the next draft: 0 before the first token, which a draft would delay, unless there is no
    /// other round; never more tokens than could be used.
    pub fn draft_length(&self) -> usize {
        match self.output_len() {
            0 if !self.single_round => 0,
            output => self
                .spec
                .length
                .min((self.max_tokens - output).saturating_sub(1)),
        }
    }

    /// Maximum number of nodes of the next draft.
    pub fn draft_nodes(&self) -> usize {
        match self.spec.topk {
            1 => self.spec.nodes.min(self.draft_length()),
            _ => self.spec.nodes,
        }
    }

    /// Whether a draft may ever be requested.
    pub fn may_draft(&self) -> bool {
        self.spec.length > 0 && self.max_tokens > 1
    }

    /// Prompt positions that the next `rows` rows can score and that have no score yet.
    pub fn unscored(&self, rows: usize) -> Range<usize> {
        let state = &self.state;
        if state.prompt_logprobs.is_none() {
            return 0..0;
        }
        let start = self.prompt_scores.len().max(state.kv_len + 1);
        start..(state.kv_len + rows + 1).min(state.prompt_len).max(start)
    }

    /// Number of the next `rows` rows that together score at most `scores` positions of the prompt. The last
    /// row of a prompt scores none. Rows whose positions have their scores score none, either.
    pub fn rows_within(&self, rows: usize, scores: usize) -> usize {
        let unscored = self.unscored(rows);
        if unscored.len() <= scores {
            return rows;
        }
        // Row i is at position kv_len + i and scores the next one.
        unscored.start + scores - 1 - self.state.kv_len
    }

    /// Whether the receiver is gone.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Queues an event for the next [`Sequence::flush`].
    pub fn queue_event(&mut self, event: Event) {
        self.outbox.push(event);
    }

    /// Sends the queued events. Call it once the pools are consistent: whoever receives the end may
    /// inspect them.
    pub fn flush(&mut self) {
        for event in self.outbox.drain(..) {
            // `is_cancelled` detects a dropped receiver.
            let _ = self.events.send(event);
        }
    }

    /// Applies the output of a step of `rows` pending rows: appends the tokens that count, queues
    /// them as an event, and moves `kv_len` to the committed length. The rest of a round is dropped
    /// at a stop id or at `max_tokens`. Returns the number of new tokens and the reason if the text
    /// ended.
    pub fn advance(
        &mut self,
        rows: usize,
        mut output: StepOutput,
    ) -> (usize, Option<FinishReason>) {
        self.prompt_scores
            .extend(output.prompt_scores.drain(..).map(Some));
        let unpooled = self.unpooled(rows);
        if let Some(pool) = &mut self.pool {
            pool.add(unpooled, &output.states);
        }
        let sampled = output.tokens.len();
        self.state.kv_len += rows + sampled.saturating_sub(1);
        self.queue_prompt_scores();
        if sampled == 0 {
            return (0, self.finish_without_tokens());
        }
        let (kept, finish) = self.until_stop(&output.tokens);
        self.count(kept, &output);
        let mut logprobs = output.logprobs.into_iter();
        let outputs = output.tokens[..kept]
            .iter()
            .map(|&id| TokenOutput {
                id,
                logprobs: logprobs.next(),
            })
            .collect();
        let state = &mut self.state;
        output.tokens[..kept].iter().for_each(|&id| state.push(id));
        state.kv_len = state.kv_len.min(state.tokens.len() - 1);
        let round = (self.include_rounds)
            .then(|| VerifiedDraft::new(&output.draft, &output.path, &output.lossy));
        self.queue_event(Event::Tokens {
            tokens: outputs,
            round,
            finish,
            spec: self.usage,
            cached_tokens: self.cached_tokens,
        });
        (kept, finish)
    }

    /// Number of tokens that need not be computed if they are in the prefix cache. The last token must be
    /// computed: it predicts the next. So must all tokens from where a row has yet to score a token of the
    /// prompt, or to be a part of an embedding.
    pub fn max_cached(&self) -> usize {
        let state = &self.state;
        let scored = self.prompt_scores.len();
        let scores = state.prompt_logprobs.is_some() && scored < state.prompt_len;
        let last = state.tokens.len() - 1;
        if let Some(pool) = &self.pool {
            return last.min(pool.max_cached());
        }
        if scores { last.min(scored - 1) } else { last }
    }

    /// Begins, or begins again, after the first `cached` tokens, which are in the pool.
    pub fn begin_after(&mut self, cached: usize) {
        self.state.kv_len = cached;
        if self.times.admitted.is_none() {
            self.times.admitted = Some(Instant::now());
            self.cached_tokens = cached;
        }
    }

    /// Discards what is in the pool; the tokens stay.
    pub fn restart(&mut self) {
        self.has_looked = false;
        self.state.kv_len = 0;
    }

    /// Counts a round's draft, without what was accepted after the end of the text.
    fn count(&mut self, kept: usize, output: &StepOutput) {
        let (usage, sources) = (&mut self.usage, &output.draft.sources);
        let accepted = &output.path[..output.path.len().min(kept)];
        usage.rounds += usize::from(!sources.is_empty());
        usage.drafted += sources.len();
        usage.tested += output.tested.min(kept);
        usage.accepted += accepted.len();
        for decision in 0..output.tested.min(kept) {
            let before = decision.checked_sub(1).map(|before| output.path[before]);
            let siblings = output.draft.children(before).zip(&mut usage.ranks);
            for (node, rank) in siblings {
                rank.tested += 1;
                rank.accepted += usize::from(accepted.get(decision) == Some(&node));
            }
        }
        let is_lossy = |node: &&usize| output.lossy.contains(node);
        usage.lossy += accepted.iter().filter(is_lossy).count();
        let predicted = |node: &&usize| sources.get(**node) == Some(&Source::Prediction);
        usage.predicted += (0..sources.len()).filter(|node| predicted(&node)).count();
        usage.predicted_accepted += accepted.iter().filter(predicted).count();
    }

    /// Number of tokens of `new` that count, and the reason if the text ends there.
    fn until_stop(&self, new: &[u32]) -> (usize, Option<FinishReason>) {
        let room = self.max_tokens - self.output_len();
        let new = &new[..new.len().min(room)];
        if let Some(end) = self.state.end_among(new) {
            return (end + 1, Some(FinishReason::Stop { token: new[end] }));
        }
        let is_over = self.single_round || new.len() == room;
        (new.len(), is_over.then_some(FinishReason::Length))
    }

    fn queue_prompt_scores(&mut self) {
        // True exactly once: the step that completes the prompt also samples the first token, or
        // ends.
        let state = &self.state;
        let complete = state.kv_len >= state.prompt_len && state.output_len() == 0;
        if complete && state.prompt_logprobs.is_some() {
            self.queue_event(Event::Prompt(self.prompt_scores.clone()));
        }
    }

    fn finish_without_tokens(&mut self) -> Option<FinishReason> {
        if self.wants_tokens() || self.pending() > 0 {
            return None;
        }
        let finish = Some(FinishReason::Length);
        let cached_tokens = self.cached_tokens;
        self.queue_event(match &self.pool {
            Some(pool) => Event::Embedding {
                values: pool.embedding(self.state.prompt_len),
                cached_tokens,
            },
            None => Event::Tokens {
                tokens: Vec::new(),
                round: None,
                finish,
                spec: self.usage,
                cached_tokens,
            },
        });
        finish
    }
}
