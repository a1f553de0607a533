//! One request's truth: tokens, lengths, finish.

use super::handle::Submission;
use super::request::{Event, FinishReason, SpecUsage, TokenOutput};
use crate::kv::BlockTable;
use crate::sampling::{SamplingParams, TokenLogprobs};
use crate::spec::{Round, SeqId};
use std::ops::Range;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A request from its arrival to its end. Pending is always `tokens[kv_len..]`, whether it is a
/// prompt, what a preemption threw away, or the one token of plain decoding.
#[derive(Debug)]
pub struct Sequence {
    /// Order of arrival.
    pub id: SeqId,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the target's pool.
    pub kv_len: usize,
    /// Where they are.
    pub table: BlockTable,
    pub params: SamplingParams,
    /// Output tokens at most; fits the context.
    pub max_tokens: usize,
    /// Draft tokens a round at most.
    pub spec_length: usize,
    /// See [`Request::synthetic_acceptance`](super::Request::synthetic_acceptance).
    pub synthetic_acceptance: Option<f64>,
    pub logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    /// Scores of the prompt so far.
    prompt_scores: Vec<Option<TokenLogprobs>>,
    pub usage: SpecUsage,
    pub arrived: Instant,
    /// When the last token was sent.
    pub last_token: Option<Instant>,
    /// Whether it was ever in the batch.
    pub admitted: bool,
    /// What the next [`Sequence::flush`] sends.
    outbox: Vec<Event>,
    events: UnboundedSender<Event>,
}

impl Sequence {
    /// A sequence from a request that was checked against the limits. `max_tokens` is what the
    /// context leaves where the request names none; EOS ids join the stop ids.
    pub(super) fn new(
        id: SeqId,
        submission: Submission,
        max_model_len: usize,
        spec_length: usize,
        eos: &[u32],
    ) -> Self {
        let request = submission.request;
        let mut params = request.params;
        if !params.ignore_eos {
            params.stop_token_ids.extend(eos);
        }
        // Looked up for every token.
        params.stop_token_ids.sort_unstable();
        params.stop_token_ids.dedup();
        let prompt_len = request.prompt.len();
        Self {
            id,
            prompt_len,
            max_tokens: request.max_tokens.unwrap_or(max_model_len - prompt_len),
            spec_length: request.spec_length.unwrap_or(spec_length),
            synthetic_acceptance: request.synthetic_acceptance,
            tokens: request.prompt,
            params,
            kv_len: 0,
            table: BlockTable::default(),
            logprobs: request.logprobs,
            prompt_scores: Vec::from_iter(request.prompt_logprobs.map(|_| None)),
            prompt_logprobs: request.prompt_logprobs,
            usage: SpecUsage::default(),
            arrived: submission.arrived,
            last_token: None,
            admitted: false,
            outbox: Vec::new(),
            events: submission.events,
        }
    }

    /// Output tokens so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens not yet in the pool.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.kv_len
    }

    /// Whether a token is wanted at all.
    pub fn wants_tokens(&self) -> bool {
        self.max_tokens > 0
    }

    /// Draft tokens for the next round: a function of this sequence alone, so that the rounds of a
    /// seeded request are the same whatever else is running. None before the first token, which
    /// nobody should wait longer for; never more than could be used.
    pub fn draft_len(&self) -> usize {
        match self.output_len() {
            0 => 0,
            output => self
                .spec_length
                .min((self.max_tokens - output).saturating_sub(1)),
        }
    }

    /// Whether a shorter draft gives the same text. It does for greedy requests; where tokens are
    /// sampled or accepted by chance, the draft is part of the random experiment.
    pub fn draft_is_elastic(&self) -> bool {
        self.params.is_greedy() && self.synthetic_acceptance.is_none()
    }

    /// Draft tokens that room has to be made for.
    pub fn firm_draft(&self) -> usize {
        if self.draft_is_elastic() {
            0
        } else {
            self.draft_len()
        }
    }

    /// Prompt positions that the next `rows` rows can score and that are not scored yet.
    pub fn unscored(&self, rows: usize) -> Range<usize> {
        if self.prompt_logprobs.is_none() {
            return 0..0;
        }
        let start = self.prompt_scores.len().max(self.kv_len + 1);
        start..(self.kv_len + rows + 1).min(self.prompt_len).max(start)
    }

    /// Alternatives wanted with the prompt's log-probabilities.
    pub fn prompt_alternatives(&self) -> usize {
        self.prompt_logprobs.unwrap_or(0)
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Puts an event where the next [`Sequence::flush`] finds it.
    pub fn tell(&mut self, event: Event) {
        self.outbox.push(event);
    }

    /// Sends what there is to tell, once the books are true: who hears of the end may look at them.
    pub fn flush(&mut self) {
        for event in self.outbox.drain(..) {
            // A receiver that is gone is noticed by `is_cancelled`.
            let _ = self.events.send(event);
        }
    }

    /// Takes in what a step of `rows` pending rows gave: the tokens that count (the rest of a round
    /// is dropped at a stop id or at `max_tokens`) are appended and told, and `kv_len` moves to what
    /// is certain. Returns the number of new tokens and the reason if that was the end.
    pub fn advance(&mut self, rows: usize, round: Round) -> (usize, Option<FinishReason>) {
        self.prompt_scores
            .extend(round.prompt_scores.into_iter().map(Some));
        let sampled = round.tokens.len();
        self.kv_len += rows + sampled.saturating_sub(1);
        self.tell_prompt_scores();
        if sampled == 0 {
            return (0, self.finish_without_tokens());
        }
        let (kept, finish) = self.until_stop(&round.tokens);
        self.count(kept, sampled - 1, round.drafted, round.tested);
        let mut logprobs = round.logprobs.into_iter();
        let outputs = round.tokens[..kept]
            .iter()
            .map(|&id| TokenOutput {
                id,
                logprobs: logprobs.next(),
            })
            .collect();
        self.tokens.extend_from_slice(&round.tokens[..kept]);
        self.kv_len = self.kv_len.min(self.tokens.len() - 1);
        self.tell(Event::Tokens {
            tokens: outputs,
            finish,
            spec: self.usage,
        });
        (kept, finish)
    }

    /// Throws away what is in the pool; the tokens stay.
    pub fn restart(&mut self) {
        self.kv_len = 0;
    }

    /// A round's draft. What was accepted after the end of the text is no part of it.
    fn count(&mut self, kept: usize, accepted: usize, drafted: usize, tested: usize) {
        self.usage.rounds += usize::from(drafted > 0);
        self.usage.drafted += drafted;
        self.usage.tested += tested.min(kept);
        self.usage.accepted += accepted.min(kept);
    }

    /// How many of `new` count, and why the text ends there, if it does.
    fn until_stop(&self, new: &[u32]) -> (usize, Option<FinishReason>) {
        let room = self.max_tokens - self.output_len();
        for (i, &token) in new.iter().take(room).enumerate() {
            let long_enough = self.output_len() + i >= self.params.min_tokens;
            if long_enough && self.params.stop_token_ids.binary_search(&token).is_ok() {
                return (i + 1, Some(FinishReason::Stop { token }));
            }
        }
        let finish = (new.len() >= room).then_some(FinishReason::Length);
        (new.len().min(room), finish)
    }

    fn tell_prompt_scores(&mut self) {
        // True once: the step that completes the prompt also samples the first token, or ends.
        let complete = self.kv_len >= self.prompt_len && self.output_len() == 0;
        if complete && self.prompt_logprobs.is_some() {
            self.tell(Event::Prompt(self.prompt_scores.clone()));
        }
    }

    fn finish_without_tokens(&mut self) -> Option<FinishReason> {
        if self.wants_tokens() || self.pending() > 0 {
            return None;
        }
        let finish = Some(FinishReason::Length);
        self.tell(Event::Tokens {
            tokens: Vec::new(),
            finish,
            spec: self.usage,
        });
        finish
    }
}
