//! Suffix matches within one text.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

/// Longest context that is looked up.
pub const MAX_CONTEXT: usize = 8;

/// A match is counted back to this length.
pub const MAX_MATCH: usize = 31;

/// Candidates of a lookup.
const MAX_MATCHES: usize = 2;

/// Where each context of 1 to [`MAX_CONTEXT`] tokens occurs in a text that grows at its end. The
/// text itself is not kept: pass the same one to every call.
///
/// A token of the text takes 150 to 300 bytes, much less than its keys and values in a model.
#[derive(Debug)]
pub struct SuffixIndex {
    /// By the hash of a context: the position after its latest occurrence, and that after the latest
    /// one that is followed by another token.
    after: HashMap<u64, [u32; 2], BuildHasherDefault<Hashed>>,
    /// Tokens of the text that are indexed.
    len: usize,
    /// Where hashes begin: random, so that no text can be made for which they collide.
    seed: u64,
}

/// A token that followed the context earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub token: u32,
    /// Tokens before it that are those of the context, 1 to [`MAX_MATCH`].
    pub length: usize,
}

const NOWHERE: u32 = u32::MAX;

impl Default for SuffixIndex {
    fn default() -> Self {
        Self {
            after: HashMap::default(),
            len: 0,
            seed: RandomState::new().hash_one(0),
        }
    }
}

impl SuffixIndex {
    /// Indexes `text[..len]` from where the last call ended.
    pub fn extend(&mut self, text: &[u32], len: usize) {
        for position in self.len..len.min(text.len()).min(NOWHERE as usize) {
            let before = &text[position.saturating_sub(MAX_CONTEXT)..position];
            for hash in hashes(self.seed, before.iter().rev()) {
                let [latest, other] = self.after.entry(hash).or_insert([NOWHERE; 2]);
                let follows_latest = text.get(*latest as usize) == Some(&text[position]);
                if *latest != NOWHERE && !follows_latest {
                    *other = *latest;
                }
                *latest = position as u32;
            }
            self.len = position + 1;
        }
    }

    /// At most [`MAX_MATCHES`] different tokens that followed the end of a context earlier in the
    /// text: by the longest context of up to [`MAX_CONTEXT`] tokens, then by the latest position.
    /// `context` has its last token first; it may go on where the text ends.
    pub fn matches(&self, text: &[u32], context: &[u32]) -> Vec<Match> {
        // No longer context occurs where a shorter one does not.
        let found = hashes(self.seed, context.iter()).map_while(|hash| self.after.get(&hash));
        let mut positions = [[NOWHERE; 2]; MAX_CONTEXT];
        let slots = positions.iter_mut();
        let longest = slots.zip(found).map(|(slot, found)| *slot = *found).count();
        let mut matches: Vec<Match> = Vec::new();
        for &position in positions[..longest].iter().rev().flatten() {
            let Some(&token) = text.get(position as usize) else {
                continue;
            };
            let earlier = text[..position as usize].iter().rev().zip(context);
            let equal = earlier.take(MAX_MATCH).take_while(|(a, b)| a == b);
            let length = equal.count();
            // Length 0: only the hashes are equal.
            if length > 0 && matches.iter().all(|found| found.token != token) {
                matches.push(Match { token, length });
            }
            if matches.len() == MAX_MATCHES {
                break;
            }
        }
        matches
    }
}

/// The hashes of the contexts of 1 to [`MAX_CONTEXT`] tokens; the last token comes first.
fn hashes<'a>(seed: u64, tokens: impl Iterator<Item = &'a u32>) -> impl Iterator<Item = u64> {
    tokens.take(MAX_CONTEXT).scan(seed, |hash, &token| {
        // The halves of a product of 64-bit numbers, combined: as in wyhash.
        let mixed = *hash ^ (u64::from(token) + 0x2d35_8dcc_aa6c_78a5);
        let product = u128::from(mixed) * 0x9e37_79b9_7f4a_7c15;
        *hash = (product >> 64) as u64 ^ product as u64;
        Some(*hash)
    })
}

/// Takes a key that is a hash as it is.
#[derive(Debug, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(text: &[u32], path: &[u32]) -> Vec<(u32, usize)> {
        let mut index = SuffixIndex::default();
        index.extend(text, text.len());
        let context: Vec<u32> = path
            .iter()
            .rev()
            .chain(text.iter().rev())
            .copied()
            .collect();
        let found = index.matches(text, &context[..context.len().min(MAX_MATCH)]);
        found
            .iter()
            .map(|found| (found.token, found.length))
            .collect()
    }

    #[test]
    fn finds_what_followed_the_longest_latest_context() {
        assert_eq!(
            matches(&[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], &[]),
            [(9, 3), (8, 2)]
        );
        assert_eq!(matches(&[2, 3, 9, 2, 3, 8, 2, 3], &[]), [(8, 2), (9, 2)]);
        assert_eq!(matches(&[1, 2, 3], &[]), []);
        let repeated: Vec<u32> = (0..40).chain(0..40).collect();
        assert_eq!(
            matches(&repeated, &[]),
            [(0, MAX_MATCH)],
            "counted on to a limit"
        );
    }

    #[test]
    fn matches_go_on_through_what_was_drafted() {
        assert_eq!(matches(&[5, 6, 7, 4, 5], &[6]), [(7, 2)]);
        assert_eq!(
            matches(&[1, 2, 1], &[2, 1, 2]),
            [(1, 2)],
            "a cycle that the draft goes on"
        );
        assert_eq!(matches(&[7, 7], &[7, 7]), [(7, 1)]);
    }

    /// The definition, without an index.
    fn naive(text: &[u32], context: &[u32]) -> Vec<(u32, usize)> {
        let length = |position: usize| {
            let earlier = text[..position].iter().rev().zip(context);
            earlier.take(MAX_MATCH).take_while(|(a, b)| a == b).count()
        };
        let mut matches: Vec<(u32, usize)> = Vec::new();
        for n in (1..=MAX_CONTEXT.min(context.len())).rev() {
            for position in (0..text.len())
                .rev()
                .filter(|&position| length(position) >= n)
            {
                if matches.iter().all(|found| found.0 != text[position]) {
                    matches.push((text[position], length(position)));
                }
            }
        }
        matches.truncate(MAX_MATCHES);
        matches
    }

    #[test]
    fn an_index_that_grows_agrees_with_a_search() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for round in 0..300 {
            let vocab = 2 + round % 5;
            let (mut index, mut text) = (SuffixIndex::default(), Vec::new());
            for _ in 0..12 {
                for _ in 0..=random(15) {
                    let copied = (random(3) > 0 && text.len() > 9).then(|| text[text.len() - 9]);
                    text.push(copied.unwrap_or(random(vocab) as u32));
                }
                let indexed = text.len() - random(2) as usize * random(text.len() as u64) as usize;
                index.extend(&text, indexed);
                let text = &text[..index.len];
                let path: Vec<u32> = (0..random(5)).map(|_| random(vocab) as u32).collect();
                let context = path.iter().chain(text.iter().rev()).copied();
                let context: Vec<u32> = context.take(MAX_MATCH).collect();
                let found = index.matches(text, &context);
                let found: Vec<_> = found
                    .iter()
                    .map(|found| (found.token, found.length))
                    .collect();
                assert_eq!(found, naive(text, &context));
            }
        }
    }
}
