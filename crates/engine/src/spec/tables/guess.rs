//! The sources' guesses at the token after one context, merged.

use super::context_table::ContextTable;
use super::own::{MAX_MATCH, Match, SuffixIndex, TextKey};
use crate::spec::draft::Source;
use std::cmp::Reverse;

/// Features of a guess, for the estimate of its probability; see [`TableGuess::features`].
pub type GuessFeatures = [u8; 3];

/// A token that may come next, with all that is known for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TableGuess {
    pub token: u32,
    pub source: Source,
    /// Buckets of: the length of the match in the own text or the prediction; the order of the
    /// pool's context and the token's share there; its ranks and its count.
    pub features: GuessFeatures,
}

/// What guesses are made from for one sequence.
pub struct Sources<'a> {
    pub index: &'a mut SuffixIndex,
    pub tokens: &'a [u32],
    /// The keys under which `tokens` are indexed, that of their end first.
    pub of_tokens: [TextKey; 2],
    pub prediction: &'a [u32],
    pub of_prediction: [TextKey; 1],
    pub pool: &'a mut ContextTable,
    pub scope: u64,
}

impl Sources<'_> {
    /// The guesses at the token after the sequence's tokens and then those of `drafted`, whose last
    /// token comes first; each token once.
    pub fn guesses(&mut self, drafted: impl Iterator<Item = u32>) -> Vec<TableGuess> {
        let context = drafted.chain(self.tokens.iter().rev().copied());
        let context: Vec<u32> = context.take(MAX_MATCH).collect();
        let mut found: Vec<Evidence> = Vec::new();
        for (rank, (source, matched)) in self.matches(&context).into_iter().enumerate() {
            let evidence = Evidence::of(&mut found, matched.token, source);
            evidence.matched = matched.length;
            evidence.own_rank = rank + 1;
        }
        for guess in self.pool.guesses(self.scope, &context) {
            let evidence = Evidence::of(&mut found, guess.token, Source::Pool);
            evidence.order = guess.order;
            evidence.share = guess.share;
            evidence.count = guess.count;
        }
        let recycled = context
            .first()
            .map(|&last| self.pool.recycled(self.scope, last));
        for (rank, token) in recycled.into_iter().flatten().enumerate() {
            Evidence::of(&mut found, token, Source::Recycled).recycled_rank = rank + 1;
        }
        found.iter().map(Evidence::guess).collect()
    }

    /// The matches in the own text and the prediction, the longest first, each token once.
    fn matches(&mut self, context: &[u32]) -> Vec<(Source, Match)> {
        let index = &mut *self.index;
        let predicted = index.matches(self.of_prediction, self.prediction, context);
        let own = index.matches(self.of_tokens, self.tokens, context);
        let of = |source| move |found| (source, found);
        let predicted = predicted.into_iter().map(of(Source::Prediction));
        let mut all: Vec<_> = predicted
            .chain(own.into_iter().map(of(Source::Own)))
            .collect();
        all.sort_by_key(|(_, found)| Reverse(found.length));
        let mut matches: Vec<(Source, Match)> = Vec::with_capacity(all.len());
        for (source, found) in all {
            if matches.iter().all(|(_, kept)| kept.token != found.token) {
                matches.push((source, found));
            }
        }
        matches
    }
}

/// The evidence for a token; 0 where a source does not have it.
#[derive(Debug, Clone, Copy)]
struct Evidence {
    token: u32,
    /// The first source that has it, in the order of their trust.
    source: Source,
    matched: usize,
    own_rank: usize,
    order: usize,
    share: f32,
    count: u32,
    recycled_rank: usize,
}

impl Evidence {
    /// The evidence for `token`, added to `found` if there is none yet.
    fn of(found: &mut Vec<Self>, token: u32, source: Source) -> &mut Self {
        let at = found.iter().position(|evidence| evidence.token == token);
        let at = at.unwrap_or_else(|| {
            found.push(Self {
                token,
                source,
                matched: 0,
                own_rank: 0,
                order: 0,
                share: 0.0,
                count: 0,
                recycled_rank: 0,
            });
            found.len() - 1
        });
        &mut found[at]
    }

    fn guess(&self) -> TableGuess {
        let matched = match self.matched {
            length @ 0..=4 => length as u8,
            5..=6 => 5,
            7..=9 => 6,
            10..=15 => 7,
            _ => 8,
        };
        let is_predicted = u8::from(self.source == Source::Prediction);
        let share = match self.share {
            ..0.2 => 0,
            ..0.5 => 1,
            ..0.8 => 2,
            _ => 3,
        };
        let pooled = match self.order {
            0 => 0,
            order => 4 * order as u8 + share,
        };
        let ranks = self.own_rank.min(3) * 25 + (self.count.min(4) * 5) as usize;
        TableGuess {
            token: self.token,
            source: self.source,
            features: [
                16 * is_predicted + matched,
                pooled,
                (ranks + self.recycled_rank) as u8,
            ],
        }
    }
}
