//! Two tokenizers, and the vocabulary that contains the tokens of both.

use std::collections::HashMap;

/// A tokenizer, as far as a translation needs one.
pub trait Tokenizer: Send + Sync {
    /// Number of ids: the largest plus one.
    fn vocab_size(&self) -> usize;

    /// The bytes that `id` adds to a text; for a special token, its name; empty if it adds nothing or
    /// does not exist.
    fn bytes(&self, id: u32) -> &[u8];

    /// Whether `id` marks structure and is no part of a text.
    fn is_special(&self, id: u32) -> bool;

    /// The id that begins a text, if there is one.
    fn bos(&self) -> Option<u32>;

    /// The id that ends a text, if there is one.
    fn eos(&self) -> Option<u32>;

    /// The tokens of `text`; those that begin every text only if `text` is a `whole` one.
    fn encode(&self, text: &str, whole: bool) -> Vec<u32>;
}

/// Maximum length in bytes of a token that is found by its bytes.
const MAX_PIECE: usize = 32;
/// An id that stands for no token.
const NONE: u32 = u32::MAX;

/// A tokenizer with its tokens by their bytes.
pub struct TokenizerSide {
    tokenizer: Box<dyn Tokenizer>,
    /// Ids by the bytes of their tokens, without special tokens.
    ids: HashMap<Box<[u8]>, u32>,
}

impl TokenizerSide {
    /// `tokenizer`, of which a model uses the ids below `vocab_size`.
    fn new(tokenizer: Box<dyn Tokenizer>, vocab_size: usize) -> Self {
        let len = tokenizer.vocab_size().min(vocab_size) as u32;
        // Of tokens with the same bytes the last one counts: the earlier ones are those with which a
        // SentencePiece tokenizer spells what it has no token for, byte by byte.
        let normal = (0..len).filter(|&id| !tokenizer.is_special(id));
        let bytes = normal.map(|id| (tokenizer.bytes(id), id));
        let found = bytes.filter(|(bytes, _)| !bytes.is_empty());
        let ids = found.map(|(bytes, id)| (bytes.into(), id)).collect();
        Self { tokenizer, ids }
    }

    /// The tokens of `text`, each with the offset in `text` at which it ends. `begins` = a tokenizer
    /// that puts a space in front of a text may do so.
    ///
    /// The bytes of the tokens are those of `text`: where the tokenizer changes them, or they are not
    /// UTF-8, tokens are chosen by their bytes, the longest first. Bytes without a token are left out.
    pub fn encode(&self, text: &[u8], begins: bool) -> Vec<(u32, usize)> {
        let (mut tokens, mut at) = (Vec::new(), 0);
        for chunk in text.utf8_chunks() {
            let parts = [
                self.of_text(chunk.valid(), begins && at == 0),
                self.by_bytes(chunk.invalid()),
            ];
            for (part, len) in parts
                .iter()
                .zip([chunk.valid().len(), chunk.invalid().len()])
            {
                tokens.extend(part.iter().map(|&(id, end)| (id, at + end)));
                at += len;
            }
        }
        tokens
    }

    fn of_text(&self, text: &str, begins: bool) -> Vec<(u32, usize)> {
        if text.is_empty() {
            return Vec::new();
        }
        let encode = |part: &str| {
            let mut end = 0;
            let ends = self.tokenizer.encode(part, false).into_iter().map(|id| {
                end += self.bytes(id).len();
                (id, end)
            });
            ends.collect::<Vec<_>>()
        };
        let spells = |tokens: &[(u32, usize)], text: &[u8]| {
            let bytes = tokens.iter().flat_map(|&(id, _)| self.bytes(id));
            bytes.eq(text)
        };
        let mut tokens = encode(text);
        if spells(&tokens, text.as_bytes()) {
            return tokens;
        }
        // A tokenizer that always puts a space in front may replace the one that is there.
        if let Some(rest) = text.strip_prefix(' ') {
            let rest = encode(rest);
            if spells(&rest, text.as_bytes()) {
                return rest;
            }
        }
        if begins && spells(&tokens, format!(" {text}").as_bytes()) {
            tokens.iter_mut().for_each(|(_, end)| *end -= 1);
            return tokens;
        }
        self.by_bytes(text.as_bytes())
    }

    fn by_bytes(&self, bytes: &[u8]) -> Vec<(u32, usize)> {
        let (mut tokens, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let rest = &bytes[at..];
            let lengths = (1..=rest.len().min(MAX_PIECE)).rev();
            let found = lengths.filter_map(|len| Some((*self.ids.get(&rest[..len])?, len)));
            match found.into_iter().next() {
                Some((id, len)) => {
                    at += len;
                    tokens.push((id, at));
                }
                None => at += 1,
            }
        }
        tokens
    }

    /// See [`Tokenizer::bytes`].
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.bytes(id)
    }

    /// See [`Tokenizer::is_special`].
    pub fn is_special(&self, id: u32) -> bool {
        self.tokenizer.is_special(id)
    }
}

/// The joint vocabulary of a target and a draft: the target's ids, then one id for each token that only
/// the draft has. Two tokens are the same if they have the same bytes. Special tokens are the same if
/// both begin, or both end, a text, or else if they have the same name.
///
/// A draft over the joint vocabulary draws with the random numbers of the target's ids, and the
/// request's biases and penalties apply to it (the intersection of Timor et al. 2025, arXiv 2502.05202,
/// section 4, but nothing is lost of the draft's distribution outside of it).
pub struct JointVocabulary {
    /// The tokenizer of the target.
    pub target: TokenizerSide,
    /// The tokenizer of the draft.
    pub draft: TokenizerSide,
    target_size: usize,
    /// The joint id for each of the draft's ids; [`NONE`] = the id has no token.
    joint: Vec<u32>,
    /// The draft's id for each joint id; [`NONE`] = only the target has the token.
    drafts: Vec<u32>,
    shared: usize,
}

impl JointVocabulary {
    /// The joint vocabulary of models with `target_size` and `draft_size` ids.
    pub fn new(
        target: Box<dyn Tokenizer>,
        draft: Box<dyn Tokenizer>,
        target_size: usize,
        draft_size: usize,
    ) -> Self {
        let target = TokenizerSide::new(target, target_size);
        let draft = TokenizerSide::new(draft, draft_size);
        let mut joint = vec![NONE; draft_size];
        let mut drafts = vec![NONE; target_size];
        let mut same = |ours: Option<u32>, theirs: Option<u32>| {
            if let (Some(ours), Some(theirs)) = (ours, theirs)
                && let Some(&NONE) = drafts.get(ours as usize)
                && let Some(&NONE) = joint.get(theirs as usize)
            {
                drafts[ours as usize] = theirs;
                joint[theirs as usize] = ours;
            }
        };
        for (bytes, &theirs) in &draft.ids {
            same(target.ids.get(bytes).copied(), Some(theirs));
        }
        same(target.tokenizer.eos(), draft.tokenizer.eos());
        same(target.tokenizer.bos(), draft.tokenizer.bos());
        let names = target.special().map(|id| (target.bytes(id), id));
        let names: HashMap<&[u8], u32> = names.collect();
        for theirs in draft.special() {
            same(names.get(draft.bytes(theirs)).copied(), Some(theirs));
        }
        let shared = joint.iter().filter(|&&id| id != NONE).count();
        for theirs in 0..draft_size as u32 {
            if joint[theirs as usize] == NONE && !draft.bytes(theirs).is_empty() {
                joint[theirs as usize] = drafts.len() as u32;
                drafts.push(theirs);
            }
        }
        Self {
            target,
            draft,
            target_size,
            joint,
            drafts,
            shared,
        }
    }

    /// Number of joint ids.
    pub fn size(&self) -> usize {
        self.drafts.len()
    }

    /// Number of tokens that the draft has, and of those that the target has, too.
    pub fn overlap(&self) -> (usize, usize) {
        (self.shared + self.size() - self.target_size, self.shared)
    }

    /// The joint id of the draft's `id`, if it has a token.
    pub fn joint(&self, id: u32) -> Option<u32> {
        let joint = self.joint.get(id as usize).copied();
        joint.filter(|&joint| joint != NONE)
    }

    /// The draft's id of the token `joint`, if it has one.
    pub fn of_draft(&self, joint: u32) -> Option<u32> {
        let id = self.drafts.get(joint as usize).copied();
        id.filter(|&id| id != NONE)
    }

    /// The target's id of the token `joint`, if it has one.
    pub fn of_target(&self, joint: u32) -> Option<u32> {
        ((joint as usize) < self.target_size).then_some(joint)
    }

    /// The joint ids with which the draft begins every text.
    pub fn beginning(&self) -> Vec<u32> {
        let ids = self.draft.tokenizer.encode("", true);
        ids.into_iter().filter_map(|id| self.joint(id)).collect()
    }
}

impl TokenizerSide {
    /// The special tokens.
    fn special(&self) -> impl Iterator<Item = u32> + '_ {
        let ids = 0..self.tokenizer.vocab_size() as u32;
        ids.filter(|&id| self.is_special(id) && !self.bytes(id).is_empty())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A tokenizer that takes the longest token, as greedy as [`TokenizerSide::by_bytes`]. Special tokens are
    /// written `<name>`; a token `?xx` is the byte with that hexadecimal value.
    pub struct WordTokenizer {
        pieces: Vec<Vec<u8>>,
        special: Vec<bool>,
        /// Whether it puts a space in front of a text, unless it begins with one.
        space: bool,
    }

    impl WordTokenizer {
        pub fn new(tokens: &[&str], space: bool) -> Self {
            let byte = |token: &str| u8::from_str_radix(token.strip_prefix('?')?, 16).ok();
            let pieces = tokens.iter().map(|token| match byte(token) {
                Some(byte) => vec![byte],
                None => token.as_bytes().to_vec(),
            });
            Self {
                pieces: pieces.collect(),
                special: tokens.iter().map(|token| token.starts_with('<')).collect(),
                space,
            }
        }

        fn named(&self, name: &str) -> Option<u32> {
            let found = self.pieces.iter().position(|p| p == name.as_bytes());
            found.map(|id| id as u32)
        }
    }

    impl Tokenizer for WordTokenizer {
        fn vocab_size(&self) -> usize {
            self.pieces.len()
        }

        fn bytes(&self, id: u32) -> &[u8] {
            self.pieces.get(id as usize).map_or(&[], |piece| piece)
        }

        fn is_special(&self, id: u32) -> bool {
            self.special
                .get(id as usize)
                .is_some_and(|&special| special)
        }

        fn bos(&self) -> Option<u32> {
            self.named("<s>")
        }

        fn eos(&self) -> Option<u32> {
            self.named("</s>").or(self.named("<end>"))
        }

        fn encode(&self, text: &str, whole: bool) -> Vec<u32> {
            let mut ids: Vec<u32> = self.bos().filter(|_| whole).into_iter().collect();
            let spaced = format!(" {text}");
            let add = self.space && !text.starts_with(' ') && !text.is_empty();
            let mut rest = if add { &spaced } else { text }.as_bytes();
            while !rest.is_empty() {
                let all = (0..self.pieces.len()).rev();
                let fits =
                    all.filter(|&id| !self.special[id] && rest.starts_with(&self.pieces[id]));
                match fits.max_by_key(|&id| (self.pieces[id].len(), id)) {
                    Some(id) => {
                        ids.push(id as u32);
                        rest = &rest[self.pieces[id].len()..];
                    }
                    None => rest = &rest[1..],
                }
            }
            ids
        }
    }

    fn side(tokens: &[&str], space: bool) -> TokenizerSide {
        TokenizerSide::new(Box::new(WordTokenizer::new(tokens, space)), tokens.len())
    }

    fn spelled(side: &TokenizerSide, text: &[u8], begins: bool) -> Vec<(String, usize)> {
        let name = |id| String::from_utf8_lossy(side.bytes(id)).into_owned();
        let tokens = side.encode(text, begins).into_iter();
        tokens.map(|(id, end)| (name(id), end)).collect()
    }

    fn pairs(pairs: &[(&str, usize)]) -> Vec<(String, usize)> {
        pairs
            .iter()
            .map(|&(name, end)| (name.into(), end))
            .collect()
    }

    #[test]
    fn the_tokens_have_the_bytes_of_the_text() {
        let plain = side(&["a", "ab", " ", " b", "b", "?c3", "?a9", "é"], false);
        assert_eq!(
            spelled(&plain, "ab bé".as_bytes(), true),
            pairs(&[("ab", 2), (" b", 4), ("é", 6)])
        );
        // Half a character at both ends.
        let cut = &"éaé".as_bytes()[1..4];
        let tokens = plain.encode(cut, false);
        assert_eq!(tokens, [(6, 1), (0, 2), (5, 3)]);
        // Nothing is known for `x`.
        assert_eq!(plain.encode(b"axb", true), [(0, 1), (4, 3)]);
    }

    #[test]
    fn a_space_in_front_appears_only_where_a_text_begins() {
        let spaced = side(&["a", "b", " ", " a", " b"], true);
        assert_eq!(spelled(&spaced, b"ab", true), pairs(&[(" a", 1), ("b", 2)]));
        assert_eq!(spelled(&spaced, b"ab", false), pairs(&[("a", 1), ("b", 2)]));
        let own = pairs(&[(" a", 2), (" b", 4)]);
        assert_eq!(spelled(&spaced, b" a b", false), own);
        assert_eq!(spelled(&spaced, b" a b", true), own);
    }

    #[test]
    fn tokens_of_both_have_one_id() {
        let target = ["<s>", "</s>", "<user>", "a", "b", "?61"];
        let draft = ["b", "<end>", "", "a", "<tool>", "<user>", "c"];
        let new = |target_size, draft_size| {
            let words = |tokens: &[&str]| Box::new(WordTokenizer::new(tokens, false));
            JointVocabulary::new(words(&target), words(&draft), target_size, draft_size)
        };
        // Both models have padding after their last token.
        let both = new(8, 9);
        let joint: Vec<_> = (0..10).map(|id| both.joint(id)).collect();
        // `a` is the target's last token with that byte; id 2 has no bytes.
        let ids = [4, 1, 99, 5, 8, 2, 9, 99, 99, 99];
        assert_eq!(joint, ids.map(|id| Some(id).filter(|&id| id != 99)));
        assert_eq!((both.size(), both.overlap()), (10, (6, 4)));
        for id in 0..9 {
            if let Some(joint) = both.joint(id) {
                assert_eq!(both.of_draft(joint), Some(id));
                assert_eq!(both.of_target(joint), (joint < 8).then_some(joint));
            }
        }
        assert_eq!(
            both.of_draft(3),
            None,
            "the earlier token with the byte `a`"
        );
        assert!(both.of_draft(10).is_none() && both.beginning().is_empty());
        // Ids that a model does not have are not used.
        let small = new(4, 4);
        assert_eq!((small.joint(0), small.joint(3)), (Some(4), Some(3)));
        assert_eq!(small.joint(5), None);
    }
}
