//! Beam search, pure: no engine, no model. The same steps as `generate(num_beams=...)` of transformers 5.

use foretoken_engine::{FinishReason, TokenLogprobs, TokenOutput};

/// When a search ends before `max_tokens`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// When the best running beam, with the length that it has, is no better than the worst of the finished ones.
    #[default]
    No,
    /// When the search has as many finished beams as were asked for.
    Yes,
    /// When no running beam can become better, as long as it may get.
    Never,
}

/// The options of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamOptions {
    /// Beams that run at a time, at least 1.
    pub width: usize,
    /// A finished text's score is its log-probability by the power of its length to this.
    pub length_penalty: f64,
    pub early_stopping: EarlyStopping,
}

/// A text that runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Beam {
    pub tokens: Vec<TokenOutput>,
    /// Sum of its tokens' log-probabilities.
    pub logprob: f64,
}

/// A text that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// The one that ended it included.
    pub tokens: Vec<TokenOutput>,
    pub finish: FinishReason,
    pub score: f64,
}

/// A search among the texts of at most `max_tokens` tokens.
#[derive(Debug)]
pub struct BeamSearch {
    options: BeamOptions,
    eos: Vec<u32>,
    max_tokens: usize,
    running: Vec<Beam>,
    /// The best first, at most as many as beams.
    finished: Vec<Hypothesis>,
}

/// A token after a running beam.
struct Continuation {
    logprob: f64,
    beam: usize,
    token: (u32, f32),
}

impl BeamSearch {
    /// A search that begins with the empty text; the ids of `eos` end texts.
    pub fn new(options: BeamOptions, eos: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            options,
            eos,
            max_tokens,
            running: vec![Beam::default()],
            finished: Vec::new(),
        }
    }

    /// The beams whose next tokens the next [`BeamSearch::step`] needs; never none before it has ended.
    pub fn running(&self) -> &[Beam] {
        &self.running
    }

    /// Returns how many of the most probable next tokens of each beam the search needs: enough for `width` beams to
    /// go on even if those before them end.
    pub fn candidates(&self) -> usize {
        (1 + self.eos.len()).max(2) * self.options.width
    }

    /// Goes on by a token. `next` has those of each running beam with their log-probabilities, the most probable
    /// first, and `alternatives` of them are kept. Returns whether the search goes on.
    pub fn step(&mut self, next: &[Vec<(u32, f32)>], alternatives: usize) -> bool {
        let len = self.running[0].tokens.len() + 1;
        let is_last = len >= self.max_tokens;
        let before = std::mem::take(&mut self.running);
        for (rank, continuation) in self.ranked(&before, next).into_iter().enumerate() {
            let ends = self.eos.contains(&continuation.token.0);
            if ends || is_last {
                // Those beyond are there to have enough beams that go on.
                if rank < self.options.width {
                    let beam = grown(&before, &continuation, next, alternatives);
                    self.finish(beam, ends, len);
                }
            } else if self.running.len() < self.options.width {
                (self.running).push(grown(&before, &continuation, next, alternatives));
            }
        }
        // Stable: of equal ones the earlier stays.
        (self.finished).sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.options.width);
        !is_last && self.goes_on(len)
    }

    /// The most probable continuations of all beams, best first.
    fn ranked(&self, before: &[Beam], next: &[Vec<(u32, f32)>]) -> Vec<Continuation> {
        let beams = before.iter().zip(next).enumerate();
        let mut all: Vec<Continuation> = beams
            .flat_map(|(beam, (before, next))| {
                next.iter().map(move |&token| Continuation {
                    logprob: before.logprob + f64::from(token.1),
                    beam,
                    token,
                })
            })
            .collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        all.truncate(self.candidates());
        all
    }

    fn finish(&mut self, beam: Beam, ends: bool, len: usize) {
        let token = beam.tokens[len - 1].id;
        self.finished.push(Hypothesis {
            score: self.score(beam.logprob, len),
            tokens: beam.tokens,
            finish: if ends {
                FinishReason::Stop { token }
            } else {
                FinishReason::Length
            },
        });
    }

    fn score(&self, logprob: f64, len: usize) -> f64 {
        logprob / (len as f64).powf(self.options.length_penalty)
    }

    /// Whether a running beam, each of `len` tokens, may yet be among the best.
    fn goes_on(&self, len: usize) -> bool {
        let BeamOptions {
            width,
            length_penalty,
            early_stopping,
        } = self.options;
        let Some(best) = self.running.first() else {
            return false;
        };
        let Some(worst) = self.finished.get(width - 1) else {
            return true;
        };
        let longest = if early_stopping == EarlyStopping::Never && length_penalty > 0.0 {
            self.max_tokens
        } else {
            len
        };
        early_stopping != EarlyStopping::Yes && self.score(best.logprob, longest) > worst.score
    }

    /// The texts found, the best first.
    pub fn into_finished(self) -> Vec<Hypothesis> {
        self.finished
    }
}

/// The beam of a continuation.
fn grown(
    before: &[Beam],
    continuation: &Continuation,
    next: &[Vec<(u32, f32)>],
    alternatives: usize,
) -> Beam {
    let (id, logprob) = continuation.token;
    let top = &next[continuation.beam];
    let mut beam = before[continuation.beam].clone();
    beam.logprob = continuation.logprob;
    beam.tokens.push(TokenOutput {
        id,
        logprobs: Some(TokenLogprobs {
            logprob,
            top: top[..alternatives.min(top.len())].to_vec(),
        }),
    });
    beam
}

#[cfg(test)]
mod tests;
