//! The state of one sequence's sampler.

use super::grammar::{Grammar, GrammarState};
use super::mask::Mask;
use super::thought::Thought;
use super::{NoToken, SamplingParams};
use std::collections::HashMap;
use std::sync::Arc;

/// The sampling parameters of one sequence, and the state that they need of its tokens. It is kept over
/// the sequence's life, so that a token costs the same at every length of the text. Draft tokens are
/// pushed and truncated again.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    /// The output tokens.
    output: Vec<u32>,
    /// Number of tokens after them whose values are not known yet.
    unknown: usize,
    /// `None` without penalties.
    counts: Option<Counts>,
    rules: TextRules,
}

/// The state of what a text must follow.
#[derive(Debug, Clone, Default)]
pub struct TextRules {
    /// `None` without a grammar.
    grammar: Option<Box<dyn GrammarState>>,
    /// `None` without a limit on thoughts.
    thought: Option<Thought>,
}

/// Counts of tokens.
#[derive(Debug, Clone)]
struct Counts {
    /// Each id of prompt and output once, in order of first appearance, with its count in the output.
    seen: Vec<(u32, u32)>,
    /// The index in `seen` of each id.
    places: HashMap<u32, usize>,
    /// Number of distinct ids in the prompt, which come first in `seen`.
    prompt: usize,
}

/// A change of one logit `x`: `x / repetition` if `x` is above 0, otherwise `x * repetition`; then minus
/// `subtract` and plus `bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitAdjustment {
    /// The token id of the logit.
    pub id: u32,
    /// Repetition penalty; 1 = no change.
    pub repetition: f32,
    /// Amount to subtract: presence and frequency penalties; 0 = no change.
    pub subtract: f32,
    /// Logit bias to add; 0 = no change, negative infinity = the token is forbidden.
    pub bias: f32,
}

/// The bias of the only token that may come next: it leaves all others without weight, at any temperature, and is finite,
/// as logits have to be.
const FORCED: f32 = 1e30;

impl LogitAdjustment {
    const NONE: Self = Self {
        id: 0,
        repetition: 1.0,
        subtract: 0.0,
        bias: 0.0,
    };

    /// Applies the change to `logit`, the logit of `id`.
    pub fn apply(&self, logit: &mut f32) {
        if *logit > 0.0 {
            *logit /= self.repetition;
        } else {
            *logit *= self.repetition;
        }
        *logit = *logit - self.subtract + self.bias;
    }
}

impl Sampler {
    /// The sampler of a sequence with `prompt` and no output yet.
    pub fn new(mut params: SamplingParams, prompt: &[u32]) -> Self {
        params.stop_token_ids.sort_unstable();
        params.stop_token_ids.dedup();
        if let (Some(allowed), Some(grammar)) = (&mut params.allowed, &params.grammar) {
            *allowed = Arc::new(allowed.with(grammar.eos()));
        }
        Self {
            counts: params.has_penalties().then(|| Counts::new(prompt)),
            output: Vec::new(),
            unknown: 0,
            rules: TextRules {
                grammar: params.grammar.as_ref().map(Grammar::start),
                thought: params.thought.clone().map(Thought::new),
            },
            params,
        }
    }

    /// The request's parameters, with `stop_token_ids` in ascending order.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Number of output tokens so far, including draft tokens.
    pub fn output_len(&self) -> usize {
        self.output.len() + self.unknown
    }

    /// Adds one output token.
    pub fn push(&mut self, token: u32) {
        self.output.push(token);
        if let Some(counts) = &mut self.counts {
            counts.add(token);
        }
        if let Some(grammar) = &mut self.rules.grammar {
            grammar.push(token);
        }
        if let Some(thought) = &mut self.rules.thought {
            thought.push(&self.output);
        }
    }

    /// The output tokens stay: none of them will be truncated.
    pub fn commit(&mut self) {
        if let Some(grammar) = &mut self.rules.grammar {
            grammar.commit();
        }
    }

    /// Removes all but the first `len` output tokens.
    pub fn truncate(&mut self, len: usize) {
        if let Some(grammar) = &mut self.rules.grammar {
            grammar.pop((self.output.len() + self.unknown).saturating_sub(len));
        }
        if let Some(thought) = &mut self.rules.thought {
            thought.truncate(len);
        }
        self.unknown = self.unknown.min(len.saturating_sub(self.output.len()));
        let removed = self.output.drain(len.min(self.output.len())..);
        if let Some(counts) = &mut self.counts {
            removed.rev().for_each(|id| counts.remove(id));
        }
    }

    /// Calls `work` while `tokens` follow the output tokens.
    pub fn after<R>(&mut self, tokens: &[u32], work: impl FnOnce(&mut Self) -> R) -> R {
        let output_len = self.output_len();
        tokens.iter().for_each(|&token| self.push(token));
        let result = work(self);
        self.truncate(output_len);
        result
    }

    /// Whether the next distribution depends on the output tokens, and not only on their number.
    pub fn depends_on_tokens(&self) -> bool {
        let thought = self.rules.thought.as_ref();
        self.counts.is_some()
            || !self.params.bad_words.is_empty()
            || self.rules.grammar.is_some()
            || thought.is_some_and(Thought::is_open)
    }

    /// The grammar that the text must follow, where it is now.
    pub fn grammar(&mut self) -> Option<&mut (dyn GrammarState + 'static)> {
        self.rules.grammar.as_deref_mut()
    }

    /// Takes away what the text must follow, for drafts in other tokens than the text's.
    pub fn take_rules(&mut self) -> TextRules {
        std::mem::take(&mut self.rules)
    }

    /// Gives the rules back; they must have been taken at the same number of tokens.
    pub fn put_rules(&mut self, rules: TextRules) {
        self.rules = rules;
    }

    /// The only token that may come next, because it closes a thought that has had its tokens. A grammar may have it
    /// wait.
    pub fn forced_token(&self) -> Option<u32> {
        let token = self.rules.thought.as_ref()?.forced(&self.output)?;
        match &self.rules.grammar {
            None => Some(token),
            Some(grammar) => grammar.mask()?.allows(token).then_some(token),
        }
    }

    /// The next tokens, at most `max`, where only one each may come: those that close a thought, or else those that the
    /// grammar forces. Without those that end the text.
    pub fn forced(&mut self, max: usize) -> Vec<u32> {
        let len = self.output_len();
        let mut forced = Vec::new();
        while forced.len() < max
            && let Some(token) = self.forced_token()
            && !self.ends_text(token, self.output_len())
        {
            self.push(token);
            forced.push(token);
        }
        self.truncate(len);
        match self.grammar() {
            Some(grammar) if forced.is_empty() => grammar.forced(max),
            _ => forced,
        }
    }

    /// Whether the text must follow a grammar.
    pub fn has_grammar(&self) -> bool {
        self.rules.grammar.is_some()
    }

    /// Whether the next token must be chosen on the host, because the kernels of a GPU do not have all that the
    /// request asks for, such as [`Sampler::masks`].
    pub fn needs_host(&self) -> bool {
        self.has_grammar() || self.params.needs_host()
    }

    /// The ids that the request allows, and those that its grammar allows next; `None` = all. None of them matter where
    /// there is a [`Sampler::forced_token`].
    ///
    /// # Errors
    /// `GrammarFailed`.
    pub fn masks(&self) -> Result<[Option<&Mask>; 2], NoToken> {
        if self.forced_token().is_some() {
            return Ok([None, None]);
        }
        let of_grammar = self.rules.grammar.as_deref().map(|grammar| grammar.mask());
        let of_grammar = of_grammar.map(|mask| mask.ok_or(NoToken::GrammarFailed));
        Ok([self.params.allowed.as_deref(), of_grammar.transpose()?])
    }

    /// Adds one output token whose value is not known yet; [`Sampler::resolve`] supplies it. If
    /// [`Sampler::depends_on_tokens`] is true, no distribution may be computed in between.
    pub fn push_unknown(&mut self) {
        self.unknown += 1;
    }

    /// Supplies the value of the first token that is not known yet.
    pub fn resolve(&mut self, token: u32) {
        self.unknown -= 1;
        self.push(token);
    }

    /// Whether `token` ends the text if it comes after `output_len` output tokens. Under a grammar, EOS
    /// always does: see [`Sampler::adjustments`].
    pub fn ends_text(&self, token: u32, output_len: usize) -> bool {
        let grammar = self.rules.grammar.as_deref();
        grammar.is_some_and(|grammar| grammar.eos().contains(&token))
            || output_len >= self.params.min_tokens
                && self.params.stop_token_ids.binary_search(&token).is_ok()
    }

    /// The changes of the next token's logits: penalties, biases and forbidden ids, to be applied in this
    /// order. Forbidden are stop ids before `min_tokens`, and under a grammar with `ignore_eos` also EOS;
    /// but not where the grammar allows nothing else, because it is at its end. So are the last ids of the
    /// words of which the output has the others. Of a [`Sampler::forced_token`] there is one change, which decides.
    pub fn adjustments(&self) -> impl Iterator<Item = LogitAdjustment> + '_ {
        let params = &self.params;
        let seen = self.counts.iter().flat_map(|counts| &counts.seen);
        let penalties = seen.map(|&(id, count)| {
            let subtract = params.presence_penalty + params.frequency_penalty * count as f32;
            LogitAdjustment {
                id,
                repetition: params.repetition_penalty,
                subtract: if count > 0 { subtract } else { 0.0 },
                bias: 0.0,
            }
        });
        let biases = params.logit_bias.iter();
        let biases = biases.map(|&(id, bias)| LogitAdjustment {
            id,
            bias,
            ..LogitAdjustment::NONE
        });
        let forced = self.forced_token();
        let forbidden = self.forbidden().into_iter().flatten().copied();
        let forbidden = forbidden.chain(self.last_of_bad_words());
        let forbidden = forbidden.map(|id| LogitAdjustment {
            id,
            bias: f32::NEG_INFINITY,
            ..LogitAdjustment::NONE
        });
        let others = penalties.chain(biases).chain(forbidden);
        let others = forced.is_none().then_some(others);
        let forced = forced.map(|id| LogitAdjustment {
            id,
            bias: FORCED,
            ..LogitAdjustment::NONE
        });
        forced.into_iter().chain(others.into_iter().flatten())
    }

    /// The stop ids and the EOS ids that must not come next.
    fn forbidden(&self) -> [&[u32]; 2] {
        let params = &self.params;
        let is_early = self.output_len() < params.min_tokens;
        let stops: &[u32] = if is_early {
            &params.stop_token_ids
        } else {
            &[]
        };
        let Some(grammar) = &self.rules.grammar else {
            return [stops, &[]];
        };
        let eos = if is_early || params.ignore_eos {
            grammar.eos()
        } else {
            &[]
        };
        let allows_more = || {
            let ends = [stops, eos].concat();
            grammar.mask().is_some_and(|mask| !mask.is_within(&ends))
        };
        match (stops, eos) {
            ([], []) => [&[], &[]],
            _ if allows_more() => [stops, eos],
            _ => [&[], &[]],
        }
    }

    /// The ids that would complete a forbidden word.
    fn last_of_bad_words(&self) -> impl Iterator<Item = u32> + '_ {
        self.params.bad_words.iter().filter_map(|word| {
            let (last, before) = word.split_last()?;
            self.output.ends_with(before).then_some(*last)
        })
    }
}

impl Counts {
    fn new(prompt: &[u32]) -> Self {
        let mut counts = Self {
            seen: Vec::new(),
            places: HashMap::new(),
            prompt: 0,
        };
        for &id in prompt {
            counts.place(id);
        }
        counts.prompt = counts.seen.len();
        counts
    }

    /// The index of `id` in `seen`, to which it is added if it is missing.
    fn place(&mut self, id: u32) -> usize {
        let next = self.seen.len();
        let place = *self.places.entry(id).or_insert(next);
        if place == next {
            self.seen.push((id, 0));
        }
        place
    }

    /// Counts a token at the end of the output.
    fn add(&mut self, id: u32) {
        let place = self.place(id);
        self.seen[place].1 += 1;
    }

    /// Undoes the last [`Counts::add`], which was of `id`.
    fn remove(&mut self, id: u32) {
        let place = self.places[&id];
        self.seen[place].1 -= 1;
        // Ids that first appeared in later tokens are already removed, so this one is the last.
        if self.seen[place].1 == 0 && place >= self.prompt {
            self.seen.pop();
            self.places.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::mix;

    /// After any pushes and truncations, the sampler equals one that got only the remaining tokens.
    #[test]
    fn truncation_undoes_pushes() {
        let params = SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.5,
            min_tokens: 4,
            stop_token_ids: vec![9, 2, 9],
            logit_bias: vec![(2, 1.0)],
            bad_words: Arc::new([vec![3], vec![1, 2], vec![4, 4, 5]]),
            ..Default::default()
        };
        let prompt = [1, 2, 1, 3];
        let mut sampler = Sampler::new(params.clone(), &prompt);
        let mut output: Vec<u32> = Vec::new();
        for step in 0..2000u64 {
            let roll = mix(step);
            if !roll.is_multiple_of(3) {
                let token = (roll >> 8) as u32 % 7;
                output.push(token);
                if roll.is_multiple_of(2) {
                    sampler.push(token);
                } else {
                    sampler.push_unknown();
                    sampler.resolve(token);
                }
            } else {
                let len = output.len() - output.len().min((roll >> 8) as usize % 4);
                output.truncate(len);
                sampler.truncate(len);
            }
            let mut fresh = Sampler::new(params.clone(), &prompt);
            output.iter().for_each(|&token| fresh.push(token));
            assert_eq!(sampler.output_len(), output.len());
            let adjustments = |sampler: &Sampler| sampler.adjustments().collect::<Vec<_>>();
            assert_eq!(
                adjustments(&sampler),
                adjustments(&fresh),
                "step {step}: {output:?}"
            );
        }
        assert!(output.len() > 100, "only {} tokens were left", output.len());
    }

    #[test]
    fn a_word_is_forbidden_where_the_output_has_its_beginning() {
        let params = SamplingParams {
            bad_words: Arc::new([vec![3], vec![1, 2], vec![1, 1, 6]]),
            ..Default::default()
        };
        let mut sampler = Sampler::new(params, &[1, 1]);
        assert!(sampler.depends_on_tokens() && !sampler.needs_host());
        let forbidden = |sampler: &Sampler| -> Vec<u32> {
            let all = sampler.adjustments().inspect(|a| assert!(a.bias < -1e30));
            all.map(|adjustment| adjustment.id).collect()
        };
        // What the prompt ends with is no part of a word.
        assert_eq!(forbidden(&sampler), [3]);
        sampler.push(1);
        assert_eq!(forbidden(&sampler), [3, 2]);
        sampler.push_unknown();
        sampler.resolve(1);
        assert_eq!(forbidden(&sampler), [3, 2, 6]);
        sampler.truncate(1);
        assert_eq!(forbidden(&sampler), [3, 2]);
        sampler.push(0);
        assert_eq!(forbidden(&sampler), [3]);
    }

    #[test]
    fn stop_ids_end_the_text_after_min_tokens() {
        let params = SamplingParams {
            min_tokens: 2,
            stop_token_ids: vec![9, 2],
            ..Default::default()
        };
        let sampler = Sampler::new(params, &[1]);
        for (token, output_len, ends) in [(9, 1, false), (9, 2, true), (2, 5, true), (3, 5, false)]
        {
            assert_eq!(sampler.ends_text(token, output_len), ends);
        }
    }
}
