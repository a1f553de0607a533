//! Suffix matches within texts.

use super::positions::{NOWHERE, PositionTable};
use std::hash::{BuildHasher, RandomState};

/// Longest context that is looked up.
pub const MAX_CONTEXT: usize = 8;

/// A match is counted back to this length.
pub const MAX_MATCH: usize = 31;

/// Few contexts that occur are longer.
const USUAL_MATCH: usize = 3;

/// Maximum number of candidates of a lookup.
const MAX_MATCHES: usize = 2;

/// Where each context of 1 to [`MAX_CONTEXT`] tokens occurs in texts that grow at their ends, in bounded
/// memory: contexts that were not used for a long time make room for others, whichever text they are of. The
/// texts themselves are not kept: pass the same one to every call.
///
/// A token of a text takes up to 128 bytes, much less than its keys and values in a model.
#[derive(Debug)]
pub struct SuffixIndex {
    /// By the hash of a context combined with the key of its text: the position of the token after its
    /// latest occurrence, and that after the latest one that another token follows, each counted from 1.
    after: PositionTable,
    /// Where hashes begin: random, so that no text can be made for which they collide.
    seed: u64,
    /// Where the keys of texts begin.
    key_seed: u64,
}

/// The key that tells the contexts of one text from those of others. The same text has the same key, so its
/// contexts are kept once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TextKey(u64);

/// The part of a text that is indexed.
#[derive(Debug, Clone, Copy)]
pub struct Indexed {
    pub key: TextKey,
    /// The tokens before this one are not, or no longer, to be indexed.
    pub len: usize,
}

/// A token that followed the context earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub token: u32,
    /// Tokens before it that are those of the context, 1 to [`MAX_MATCH`].
    pub length: usize,
}

impl SuffixIndex {
    /// An empty index of at most `bytes`.
    pub fn new(bytes: usize) -> Self {
        let random = RandomState::new();
        Self {
            after: PositionTable::new(bytes),
            seed: random.hash_one(0),
            key_seed: random.hash_one(1),
        }
    }

    /// Memory of the index, in bytes.
    pub fn bytes(&self) -> usize {
        self.after.bytes()
    }

    /// The key of `text`, which differs from those of all other texts, and of all texts with another
    /// `first` number.
    pub fn key(&self, first: u64, text: &[u32]) -> TextKey {
        let tokens = text.iter().map(|&token| u64::from(token));
        TextKey(tokens.fold(mixed(self.key_seed, first), mixed))
    }

    /// Indexes `text` from where the last call ended, but no more tokens than there is `room` for, which
    /// is lessened by their number.
    pub fn extend(&mut self, indexed: &mut Indexed, text: &[u32], room: &mut usize) {
        let start = indexed.len;
        let end = text.len().min(u32::MAX as usize);
        let end = end.min(start.saturating_add(*room)).max(start);
        for position in start..end {
            let before = &text[position.saturating_sub(MAX_CONTEXT)..position];
            let (mut hashes, len) = hashes(self.seed, before.iter().rev());
            hashes.iter_mut().for_each(|hash| *hash ^= indexed.key.0);
            self.after.fetch(&hashes[..len]);
            for &hash in &hashes[..len] {
                self.after.update(hash, |[latest, other]| {
                    if token_at(text, *latest).is_some_and(|token| *token != text[position]) {
                        *other = *latest;
                    }
                    *latest = position as u32 + 1;
                });
            }
        }
        *room -= end - start;
        indexed.len = end;
    }

    /// At most [`MAX_MATCHES`] different tokens that followed the end of a context earlier in `text`: by the
    /// longest context of up to [`MAX_CONTEXT`] tokens, then by the latest position. `context` has its last
    /// token first; it may go on where the text ends. `text` was indexed under `keys`, its end under the first.
    pub fn matches<const N: usize>(
        &mut self,
        keys: [TextKey; N],
        text: &[u32],
        context: &[u32],
    ) -> Vec<Match> {
        let mut matches: Vec<Match> = Vec::new();
        if text.is_empty() {
            return matches;
        }
        let (hashes, len) = hashes(self.seed, context.iter());
        let mut positions = [[[NOWHERE; 2]; N]; MAX_CONTEXT];
        for key in keys {
            self.after
                .fetch(&hashes.map(|hash| hash ^ key.0)[..len.min(USUAL_MATCH)]);
        }
        for (part, key) in keys.iter().enumerate() {
            // No longer context occurs where a shorter one does not.
            for (hash, slot) in hashes[..len].iter().zip(&mut positions) {
                let Some(found) = self.after.get(hash ^ key.0) else {
                    break;
                };
                slot[part] = found;
            }
        }
        for &position in positions.iter().rev().flatten().flatten() {
            let Some(&token) = token_at(text, position) else {
                continue;
            };
            let earlier = text[..position as usize - 1].iter().rev().zip(context);
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

#[cfg(test)]
impl SuffixIndex {
    /// Number of contexts that are kept, and of those that were added or looked up so far.
    pub fn counts(&self) -> (usize, usize) {
        (self.after.len(), self.after.calls())
    }
}

/// The hashes of the contexts of 1 to [`MAX_CONTEXT`] tokens, and their number; the last token comes first.
fn hashes<'a>(seed: u64, tokens: impl Iterator<Item = &'a u32>) -> ([u64; MAX_CONTEXT], usize) {
    let (mut hashes, mut len, mut hash) = ([0; MAX_CONTEXT], 0, seed);
    for (slot, &token) in hashes.iter_mut().zip(tokens) {
        hash = mixed(hash, u64::from(token));
        *slot = hash;
        len += 1;
    }
    (hashes, len)
}

/// `hash`, continued by `value`.
fn mixed(hash: u64, value: u64) -> u64 {
    // The halves of a product of 64-bit numbers, combined: as in wyhash.
    let mixed = hash ^ value.wrapping_add(0x2d35_8dcc_aa6c_78a5);
    let product = u128::from(mixed) * 0x9e37_79b9_7f4a_7c15;
    (product >> 64) as u64 ^ product as u64
}

/// The token at a position that is counted from 1, if there is one.
fn token_at(text: &[u32], position: u32) -> Option<&u32> {
    text.get((position as usize).checked_sub(1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(text: &[u32], path: &[u32]) -> Vec<(u32, usize)> {
        let mut index = SuffixIndex::new(1 << 20);
        let key = index.key(0, text);
        index.extend(&mut Indexed { key, len: 0 }, text, &mut 1000);
        let context: Vec<u32> = path
            .iter()
            .rev()
            .chain(text.iter().rev())
            .copied()
            .collect();
        let context = &context[..context.len().min(MAX_MATCH)];
        let found = index.matches([key], text, context);
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

    /// Calls a function with each of many texts that grow: its number, the text, how much of it is indexed
    /// under which keys, and a context.
    fn grow(bytes: usize, mut check: impl FnMut(&mut SuffixIndex, [TextKey; 2], &[u32], &[u32])) {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let mut index = SuffixIndex::new(bytes);
        for round in 0..300 {
            let (vocab, mut text) = (2 + round % 5, Vec::new());
            let part = |first| index.key(first, &[round as u32]);
            let (keys, other) = ([part(1), part(2)], part(3));
            let [key, of_prompt] = keys;
            let prompt_len = random(40) as usize;
            let mut end = Indexed {
                key,
                len: prompt_len,
            };
            let [mut prompt, mut other] = [of_prompt, other].map(|key| Indexed { key, len: 0 });
            for _ in 0..12 {
                for _ in 0..=random(15) {
                    let copied = (random(3) > 0 && text.len() > 9).then(|| text[text.len() - 9]);
                    text.push(copied.unwrap_or(random(vocab) as u32));
                }
                index.extend(&mut prompt, &text[..prompt_len.min(text.len())], &mut 100);
                let mut room = random(20) as usize;
                let (before, had) = (end.len, room);
                index.extend(&mut end, &text, &mut room);
                assert_eq!(had - room, end.len - before);
                // Another text in the same index.
                let reversed: Vec<u32> = text.iter().rev().copied().collect();
                index.extend(&mut other, &reversed, &mut 100);
                let text = &text[..end.len.min(text.len())];
                let path: Vec<u32> = (0..random(5)).map(|_| random(vocab) as u32).collect();
                let context = path.iter().chain(text.iter().rev()).copied();
                let context: Vec<u32> = context.take(MAX_MATCH).collect();
                check(&mut index, keys, text, &context);
                assert!(index.bytes() <= bytes);
            }
        }
    }

    #[test]
    fn an_index_that_grows_agrees_with_a_search() {
        grow(1 << 25, |index, keys, text, context| {
            let found = index.matches(keys, text, context);
            let found: Vec<_> = found
                .iter()
                .map(|found| (found.token, found.length))
                .collect();
            assert_eq!(found, naive(text, context));
        });
    }

    /// Without room for all of its texts an index still finds what is there, and much of it.
    #[test]
    fn an_index_that_forgets_finds_what_is_there() {
        let (mut sum, mut all) = (0, 0);
        grow(1 << 12, |index, keys, text, context| {
            let found = index.matches(keys, text, context);
            for Match { token, length } in &found {
                let occurs = |at: &usize| {
                    let before = text[..*at].iter().rev().zip(context);
                    text[*at] == *token && before.take_while(|(a, b)| a == b).count() >= *length
                };
                assert!(*length > 0 && (0..text.len()).any(|at| occurs(&at)));
            }
            sum += found.len();
            all += naive(text, context).len();
        });
        assert!(sum < all && sum > all / 4, "{sum} of {all}");
        let mut nothing = SuffixIndex::new(7);
        let key = nothing.key(0, &[]);
        nothing.extend(&mut Indexed { key, len: 0 }, &[1, 2, 1, 2], &mut 9);
        assert_eq!(nothing.matches([key], &[1, 2, 1, 2], &[2, 1]), []);
    }

    #[test]
    fn only_the_same_text_has_the_same_key() {
        let index = SuffixIndex::new(1000);
        let keys = [
            index.key(1, &[1, 2, 3]),
            index.key(1, &[1, 2]),
            index.key(1, &[1, 2, 4]),
            index.key(2, &[1, 2, 3]),
            SuffixIndex::new(1000).key(1, &[1, 2, 3]),
        ];
        assert_eq!(index.key(1, &[1, 2, 3]), keys[0]);
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key));
        }
    }
}
