//! A target's sequence as its draft reads it.

use super::vocabulary::JointVocabulary;

/// The end of a sequence, whose last words may be encoded in another way if the text goes on.
#[derive(Clone, Copy)]
pub struct Ending<'a> {
    /// The target's tokens of these words, none of them special.
    pub words: &'a [u32],
    /// Whether a text begins with them, so that a tokenizer may put a space in front.
    pub begins: bool,
}

/// Maximum target tokens that are read at once, of all requests together, so that long prompts do not hold up
/// a step.
pub const MAX_READ: usize = 1024;
/// Tokens before the end of which no later token changes the encoding, even within a word.
const SETTLED: usize = 16;
/// Maximum tokens that are encoded again when a token is added.
const MAX_AGAIN: usize = 256;

/// The text of a sequence, encoded by the draft's tokenizer as it grows: each time from the last word
/// on, because a text's last tokens may change when it goes on.
#[derive(Debug, Default)]
pub struct DraftEncoding {
    /// Joint ids.
    tokens: Vec<u32>,
    /// Number of target tokens that are in `tokens`.
    read: usize,
    /// Number of target tokens and of `tokens` before the text that is encoded again.
    settled: (usize, usize),
}

impl DraftEncoding {
    /// The joint ids of all that was read.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Draft tokens for one target token, on average; 1 if nothing was read.
    pub fn tokens_each(&self) -> f64 {
        match self.read {
            0 => 1.0,
            read => (self.tokens.len() as f64 / read as f64).clamp(0.5, 2.0),
        }
    }

    /// The end of the target's `tokens`, all of which were read.
    pub fn ending<'a>(&self, vocabulary: &JointVocabulary, tokens: &'a [u32]) -> Ending<'a> {
        Ending {
            words: &tokens[self.settled.0..],
            begins: self.settled_begins(vocabulary, tokens),
        }
    }

    /// Whether a text begins after the settled part of `tokens`.
    fn settled_begins(&self, vocabulary: &JointVocabulary, tokens: &[u32]) -> bool {
        let before = self.settled.0.checked_sub(1).map(|last| tokens[last]);
        before.is_none_or(|id| vocabulary.target.is_special(id))
    }

    /// Whether all of the target's `tokens` have been read.
    pub fn has_read(&self, tokens: &[u32]) -> bool {
        self.read == tokens.len()
    }

    /// Number of the target's tokens that have been read.
    #[cfg(test)]
    pub fn num_read(&self) -> usize {
        self.read
    }

    /// Reads more of the target's `tokens`, which begin with those that were read before, but no more than
    /// there is `room` for, which is lessened by their number. Returns whether all have been read.
    pub fn read(&mut self, vocabulary: &JointVocabulary, tokens: &[u32], room: &mut usize) -> bool {
        let end = tokens.len().min(self.read + *room);
        if end > self.read {
            *room -= end - self.read;
            self.tokens.truncate(self.settled.1);
            self.encode(vocabulary, &tokens[..end]);
            self.read = end;
        }
        self.has_read(tokens)
    }

    /// Adds the target's tokens after the settled ones.
    fn encode(&mut self, vocabulary: &JointVocabulary, tokens: &[u32]) {
        let target = &vocabulary.target;
        let mut begins = self.settled_begins(vocabulary, tokens);
        if self.settled.0 == 0 {
            let beginning = vocabulary.beginning();
            // The target's text may begin with the same token.
            let has = tokens
                .first()
                .is_some_and(|first| beginning.first() == Some(first));
            self.tokens.extend(beginning.into_iter().filter(|_| !has));
        }
        let mut rest = &tokens[self.settled.0..];
        while let Some(&first) = rest.first() {
            let len = rest
                .iter()
                .take_while(|&&id| !target.is_special(id))
                .count();
            if len == 0 {
                // One that the draft does not have is left out, as it is from a text.
                self.tokens
                    .extend(vocabulary.of_draft(first).map(|_| first));
                rest = &rest[1..];
                self.settled = (self.settled.0 + 1, self.tokens.len());
                begins = true;
                continue;
            }
            self.run(vocabulary, &rest[..len], begins, len == rest.len());
            rest = &rest[len..];
        }
    }

    /// Adds a run of tokens that are not special, and settles what it can; all, unless the sequence ends
    /// with it.
    fn run(&mut self, vocabulary: &JointVocabulary, run: &[u32], begins: bool, ends: bool) {
        let bytes_of = |&id: &u32| vocabulary.target.bytes(id);
        let text: Vec<u8> = run.iter().flat_map(bytes_of).copied().collect();
        let before = self.settled.0;
        let encoded = vocabulary.draft.encode(&text, begins);
        let known = |&(id, end): &(u32, usize)| Some((vocabulary.joint(id)?, end));
        let encoded: Vec<(u32, usize)> = encoded.iter().filter_map(known).collect();
        let first = self.tokens.len();
        self.tokens.extend(encoded.iter().map(|&(id, _)| id));
        if !ends {
            self.settled = (before + run.len(), self.tokens.len());
            return;
        }
        // Both have a boundary where the same number of bytes ends.
        let (mut ours, mut theirs) = (0, 0);
        for (i, id) in run.iter().enumerate() {
            ours += bytes_of(id).len();
            while encoded.get(theirs).is_some_and(|&(_, end)| end < ours) {
                theirs += 1;
            }
            let both = encoded.get(theirs).is_some_and(|&(_, end)| end == ours);
            let last = text[..ours].last();
            let word =
                text.get(ours) == Some(&b' ') && last.is_some_and(|b| !b.is_ascii_whitespace());
            if both && (word || i + 1 + SETTLED <= run.len()) {
                self.settled = (before + i + 1, first + theirs + 1);
            }
        }
        if before + run.len() - self.settled.0 > MAX_AGAIN {
            self.settled = (before + run.len(), self.tokens.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::tests::WordTokenizer;
    use super::*;

    const TARGET: [&str; 13] = [
        "<s>", "</s>", "<user>", "a", "b", " a", " ab", "aa", " ", "?c3", "?a9", "é", "\n",
    ];
    const DRAFT: [&str; 12] = [
        " a", "<s>", "b", "ab", "a", " ", " b", "\n", "?c3", "?a9", " é", "<end>",
    ];

    fn vocabulary(space: bool) -> JointVocabulary {
        let target = Box::new(WordTokenizer::new(&TARGET, false));
        let draft = Box::new(WordTokenizer::new(&DRAFT, space));
        JointVocabulary::new(target, draft, TARGET.len(), DRAFT.len())
    }

    fn ids(names: &[&str]) -> Vec<u32> {
        let id = |name: &&str| TARGET.iter().position(|token| token == name).unwrap() as u32;
        names.iter().map(id).collect()
    }

    fn names(vocabulary: &JointVocabulary, encoding: &DraftEncoding) -> Vec<&'static str> {
        let name = |&joint: &u32| DRAFT[vocabulary.of_draft(joint).unwrap() as usize];
        encoding.tokens().iter().map(name).collect()
    }

    #[test]
    fn the_draft_reads_its_own_tokens() {
        let vocabulary = vocabulary(false);
        let mut encoding = DraftEncoding::default();
        let tokens = [
            "<s>", "<user>", "a", "b", " ab", "b", "</s>", " ", "é", "?c3",
        ];
        let tokens = ids(&tokens);
        assert!(encoding.read(&vocabulary, &tokens, &mut MAX_READ.clone()));
        // It has no `<user>`, `ab` is one token, and ` é` another; there is half a character at the end.
        let all = ["<s>", "ab", " a", "b", "b", "<end>", " é", "?c3"];
        assert_eq!(names(&vocabulary, &encoding), all);
        let ending = encoding.ending(&vocabulary, &tokens);
        assert_eq!((ending.words, ending.begins), (&tokens[7..], true));
    }

    /// A round reads only so much of a long prompt.
    #[test]
    fn a_long_prompt_is_read_in_parts() {
        let vocabulary = vocabulary(false);
        let tokens = ids(&[" a"; MAX_READ + 1]);
        let mut encoding = DraftEncoding::default();
        assert!(
            !encoding.read(&vocabulary, &tokens, &mut MAX_READ.clone())
                && !encoding.has_read(&tokens)
        );
        assert!(
            encoding.read(&vocabulary, &tokens, &mut MAX_READ.clone())
                && encoding.has_read(&tokens)
        );
        assert_eq!(encoding.tokens().len(), tokens.len() + 1);
        assert_eq!(encoding.ending(&vocabulary, &tokens).words.len(), 1);
    }

    /// A text that grows by any number of tokens ends up as one that is read at once, and what was
    /// settled before stays.
    #[test]
    fn a_text_is_encoded_as_it_grows() {
        for space in [false, true] {
            let vocabulary = vocabulary(space);
            let pieces = [
                "a", " a", " ab", "b", " ", "aa", "\n", " a", "?c3", "?a9", "</s>",
            ];
            let mut random = 7u64;
            let mut roll = |below: usize| {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (random >> 33) as usize % below
            };
            for _ in 0..200 {
                let length = 1 + roll(60);
                let words: Vec<_> = (0..length).map(|_| pieces[roll(pieces.len())]).collect();
                let tokens = ids(&words);
                let (mut grown, mut at) = (DraftEncoding::default(), 0);
                while at < length {
                    at = (at + 1 + roll(4)).min(length);
                    let settled = grown.tokens()[..grown.settled.1].to_vec();
                    let goal = &tokens[..at];
                    assert!(grown.read(&vocabulary, goal, &mut 4));
                    assert_eq!(grown.tokens()[..settled.len()], settled);
                }
                let mut once = DraftEncoding::default();
                assert!(once.read(&vocabulary, &tokens, &mut 60));
                assert_eq!(
                    names(&vocabulary, &grown),
                    names(&vocabulary, &once),
                    "{words:?}"
                );
            }
        }
    }
}
