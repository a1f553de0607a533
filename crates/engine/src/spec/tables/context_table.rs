//! What followed short contexts in other answers, and the target's own candidates after each token.

use super::lru::Lru;
use std::ops::Range;

/// Successors kept of a context.
const MAX_SUCCESSORS: usize = 8;

/// Counts are halved here, so that old ones are forgotten.
const MAX_COUNT: u16 = 1000;

/// Tokens drafted after a context.
const MAX_POOLED: usize = 3;

/// The target's candidates that are drafted after a token.
const MAX_RECYCLED: usize = 4;

/// Whose answers: a caller's, or the corpus that all of them share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    Scope(u64),
    Corpus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ContextKey {
    Pair(u32, u32),
    Single(u32),
    /// The token that was fed to the target.
    Fed(u32),
}

/// A guess by the pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pooled {
    pub token: u32,
    /// Tokens of the context, 1 or 2.
    pub order: usize,
    /// Times it followed the context.
    pub count: u32,
    /// `count` as a part of the counts of all kept successors, in (0, 1].
    pub share: f32,
}

/// The tables of all callers, in bounded memory: the contexts that were not used for the longest
/// time make room for others, whoever they belong to. What one caller's tokens left is found by that
/// caller alone.
#[derive(Debug)]
pub struct ContextTable {
    contexts: Lru<(Owner, ContextKey), Successors>,
}

impl ContextTable {
    /// Tables of at most `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self {
            contexts: Lru::new(bytes),
        }
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        self.contexts.bytes()
    }

    /// Adds a text: which token followed each one, and each two.
    pub fn add(&mut self, owner: Owner, text: &[u32]) {
        self.extend(owner, text, 0..text.len());
    }

    /// Adds the tokens at `new` positions of a text.
    pub fn extend(&mut self, owner: Owner, text: &[u32], new: Range<usize>) {
        for at in new {
            if let [.., last] = text[..at] {
                let context = ContextKey::Single(last);
                self.contexts
                    .update((owner, context), |kept| kept.count(text[at]));
            }
            if let [.., first, second] = text[..at] {
                let context = ContextKey::Pair(first, second);
                self.contexts
                    .update((owner, context), |kept| kept.count(text[at]));
            }
        }
    }

    /// At most [`MAX_POOLED`] different tokens that followed the context, whose last token comes
    /// first: those of two tokens before those of one, the more frequent and then the later first.
    pub fn guesses(&mut self, scope: u64, context: &[u32]) -> Vec<Pooled> {
        let mut guesses: Vec<Pooled> = Vec::new();
        let pair = (context.len() > 1).then(|| (2, ContextKey::Pair(context[1], context[0])));
        let single = context.first().map(|&last| (1, ContextKey::Single(last)));
        for (order, context) in pair.into_iter().chain(single) {
            let counts = self.counts(scope, context);
            let total: u32 = counts.iter().map(|entry| entry.1).sum();
            for (token, count) in counts {
                if guesses.len() < MAX_POOLED && guesses.iter().all(|guess| guess.token != token) {
                    let share = count as f32 / total as f32;
                    guesses.push(Pooled {
                        token,
                        order,
                        count,
                        share,
                    });
                }
            }
        }
        guesses
    }

    /// Successors of a context, the most frequent first, of the caller and the corpus together.
    fn counts(&mut self, scope: u64, context: ContextKey) -> Vec<(u32, u32)> {
        let mut counts: Vec<(u32, u32)> = Vec::new();
        for owner in [Owner::Scope(scope), Owner::Corpus] {
            let Some(kept) = self.contexts.get(&(owner, context)) else {
                continue;
            };
            for (token, count) in kept.iter() {
                match counts.iter_mut().find(|entry| entry.0 == token) {
                    Some(entry) => entry.1 += u32::from(count),
                    None => counts.push((token, u32::from(count))),
                }
            }
        }
        counts.sort_by_key(|entry| std::cmp::Reverse(entry.1));
        counts
    }

    /// Notes the target's best candidates, the best first, after a token that was fed to it.
    pub fn recycle(&mut self, scope: u64, fed: u32, best: &[u32]) {
        let key = (Owner::Scope(scope), ContextKey::Fed(fed));
        self.contexts.update(key, |kept| kept.replace(best));
    }

    /// The target's candidates when it was last fed this token, the best first (token recycling, Luo
    /// et al. 2024, arXiv 2408.08696, section 3).
    pub fn recycled(&mut self, scope: u64, fed: u32) -> Vec<u32> {
        let kept = self
            .contexts
            .get(&(Owner::Scope(scope), ContextKey::Fed(fed)));
        let tokens = kept.into_iter().flat_map(Successors::iter);
        tokens.take(MAX_RECYCLED).map(|entry| entry.0).collect()
    }
}

/// Tokens that may follow a context, at most [`MAX_SUCCESSORS`].
#[derive(Debug, Clone, Copy, Default)]
struct Successors {
    /// The latest seen first; of candidates, the best.
    tokens: [u32; MAX_SUCCESSORS],
    counts: [u16; MAX_SUCCESSORS],
    len: u8,
}

impl Successors {
    fn iter(&self) -> impl Iterator<Item = (u32, u16)> {
        let entries = self.tokens.into_iter().zip(self.counts);
        entries.take(self.len.into())
    }

    /// Counts a token, which becomes the latest. If there is no room, that with the lowest count goes,
    /// the earliest among equals.
    fn count(&mut self, token: u32) {
        let len = usize::from(self.len);
        let known = self.tokens[..len].iter().position(|kept| *kept == token);
        let at = known.unwrap_or_else(|| {
            if len < MAX_SUCCESSORS {
                self.len += 1;
                return len;
            }
            let order = |at: &usize| (self.counts[*at], std::cmp::Reverse(*at));
            (0..len).min_by_key(order).unwrap_or_default()
        });
        let count = if known.is_some() {
            self.counts[at] + 1
        } else {
            1
        };
        self.tokens[..=at].rotate_right(1);
        self.counts[..=at].rotate_right(1);
        (self.tokens[0], self.counts[0]) = (token, count);
        if count >= MAX_COUNT {
            self.counts
                .iter_mut()
                .for_each(|count| *count = count.div_ceil(2));
        }
    }

    fn replace(&mut self, tokens: &[u32]) {
        let len = tokens.len().min(MAX_SUCCESSORS);
        self.tokens[..len].copy_from_slice(&tokens[..len]);
        self.len = len as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(guesses: &[Pooled]) -> Vec<(u32, usize, u32)> {
        guesses
            .iter()
            .map(|guess| (guess.token, guess.order, guess.count))
            .collect()
    }

    #[test]
    fn longer_contexts_come_before_shorter_and_frequent_before_rare() {
        let mut pool = ContextTable::new(1 << 20);
        pool.add(
            Owner::Scope(1),
            &[1, 2, 3, 1, 2, 4, 1, 2, 4, 9, 2, 5, 9, 2, 5, 9, 2, 5],
        );
        let found = pool.guesses(1, &[2, 1]);
        assert_eq!(tokens(&found), [(4, 2, 2), (3, 2, 1), (5, 1, 3)]);
        assert_eq!(found[0].share, 2.0 / 3.0);
        for context in [&[2, 8][..], &[2]] {
            let found = pool.guesses(1, context);
            assert_eq!(tokens(&found), [(5, 1, 3), (4, 1, 2), (3, 1, 1)]);
        }
        assert!(pool.guesses(1, &[]).is_empty());
    }

    #[test]
    fn the_successor_with_the_lowest_count_goes_and_the_earliest_among_equals() {
        let mut kept = Successors::default();
        for token in [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 3, 4, 5, 6] {
            kept.count(token);
        }
        kept.count(8);
        let now = |kept: &Successors| kept.iter().map(|entry| entry.0).collect::<Vec<_>>();
        // 2 was the earlier one of count 1.
        assert_eq!(now(&kept), [8, 6, 5, 4, 3, 1, 0, 7]);
        kept.count(9);
        assert_eq!(now(&kept), [9, 8, 6, 5, 4, 3, 1, 0]);
        for _ in 0..5000 {
            kept.count(8);
        }
        let counts: Vec<u16> = kept.iter().map(|entry| entry.1).collect();
        assert!((1..MAX_COUNT).contains(&counts[0]), "bounded: {counts:?}");
        assert!(counts[1..].iter().all(|count| *count == 1), "{counts:?}");
    }

    #[test]
    fn a_later_row_replaces_the_candidates_of_its_token() {
        let mut pool = ContextTable::new(1 << 20);
        pool.recycle(1, 7, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(pool.recycled(1, 7), [1, 2, 3, 4]);
        pool.recycle(1, 7, &[6, 5]);
        assert_eq!(pool.recycled(1, 7), [6, 5]);
        assert!(pool.recycled(1, 6).is_empty());
    }

    #[test]
    fn all_scopes_share_the_corpus_and_nothing_else() {
        let mut pool = ContextTable::new(1 << 20);
        pool.add(Owner::Corpus, &[1, 2, 3]);
        pool.add(Owner::Scope(1), &[1, 2, 4, 1, 2, 4]);
        pool.recycle(1, 2, &[6]);
        assert_eq!(tokens(&pool.guesses(1, &[2, 1])), [(4, 2, 2), (3, 2, 1)]);
        assert_eq!(tokens(&pool.guesses(2, &[2, 1])), [(3, 2, 1)]);
        assert!(pool.recycled(2, 2).is_empty());
    }

    #[test]
    fn a_flood_of_scopes_and_contexts_stays_within_the_memory() {
        let bytes = 100_000;
        let mut pool = ContextTable::new(bytes);
        for i in 0..20_000u32 {
            pool.add(Owner::Scope(u64::from(i % 777)), &[i, i + 1, i + 2, 5]);
            pool.recycle(u64::from(i), i, &[1, 2]);
            assert!(pool.bytes() <= bytes);
        }
        assert!(pool.bytes() > bytes / 2, "and the memory is used");
        let found = pool.guesses(19_999 % 777, &[20_000, 19_999]);
        assert_eq!(tokens(&found)[0], (20_001, 2, 1));
        assert!(pool.guesses(1, &[2, 1]).is_empty(), "the oldest are gone");
    }
}
