//! A lower bound on the number of tokens of a text, which is found much faster than the tokens.
//!
//! A token that begins with two given bytes has at most the length of the longest one that does. So one
//! token covers at most the bytes up to the furthest end that any token can have that begins at or before its
//! first byte, and a walk over the text that needs the next token only there counts no more tokens than the
//! tokenizer makes. Bytes that a tokenizer may drop or join without a limit are free. There is a bound only
//! for BPE whose tokens are bytes of the text.

use serde_json::Value;
use std::cmp::max;
use tokenizers::{ModelWrapper, Tokenizer};

/// The longest tokens of a vocabulary.
pub(super) struct TokenBound {
    /// For the first two bytes of a token, the bytes of the longest one; 0 = there is none.
    longest: Vec<u32>,
    /// The bytes of the longest token of all.
    longest_of_all: usize,
    /// Bytes that may take no token of their own.
    free: [bool; 256],
    /// Whether the tokenizer composes characters, so that only ASCII is certain to stay as it is.
    composes: bool,
}

impl TokenBound {
    /// The bound for `tokenizer`, whose tokens are `pieces`; `None` if it may change texts in ways for
    /// which no bound is known.
    pub fn new<'a>(tokenizer: &Tokenizer, pieces: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        // Parts have private fields, so this reads their JSON.
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let byte_level = steps(&splitter).iter().any(|s| s["type"] == "ByteLevel");
        let by_bytes = match tokenizer.get_model() {
            ModelWrapper::BPE(bpe) => {
                let empty = |affix: &Option<String>| affix.as_deref().is_none_or(str::is_empty);
                empty(&bpe.continuing_subword_prefix)
                    && empty(&bpe.end_of_word_suffix)
                    && (bpe.byte_fallback || byte_level)
            }
            _ => false,
        };
        if !(by_bytes && keeps_bytes(&normalizer) && splits_only(&splitter)) {
            return None;
        }
        let mut bound = Self {
            longest: vec![0; 1 << 16],
            longest_of_all: 1,
            free: [true; 256],
            composes: composes(&normalizer),
        };
        let marks_spaces = marks_spaces(&normalizer) || marks_spaces(&splitter);
        for piece in pieces {
            bound.add(piece, piece.len());
            // A space in front may be one that the tokenizer adds.
            if let [b' ', rest @ ..] = piece {
                bound.add(rest, rest.len());
            }
            if marks_spaces && let Ok(piece) = std::str::from_utf8(piece) {
                bound.add_marked(piece);
                piece
                    .strip_prefix([' ', '▁'])
                    .inspect(|rest| bound.add_marked(rest));
            }
        }
        // Without byte-level characters, one of several bytes takes tokens for certain only if each byte can
        // be one.
        if !byte_level && bound.free[0x80..].contains(&true) {
            bound.free[0x80..].fill(true);
        }
        // Special tokens may take the white space around them.
        let mut added = tokenizer.get_added_tokens_decoder().into_values();
        if added.any(|token| token.lstrip || token.rstrip) {
            let space = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0B || byte >= 0x80;
            (0..=255)
                .filter(|&b| space(b))
                .for_each(|b| bound.free[usize::from(b)] = true);
        }
        Some(bound)
    }

    /// Adds a token that has at most `len` bytes and begins as `piece` does.
    fn add(&mut self, piece: &[u8], len: usize) {
        self.longest_of_all = max(self.longest_of_all, len);
        match *piece {
            [] => {}
            [byte] => {
                self.free[usize::from(byte)] = false;
                for entry in &mut self.longest[pair(byte, 0)..=pair(byte, 0xFF)] {
                    *entry = max(*entry, len as u32);
                }
            }
            [first, second, ..] => {
                let entry = &mut self.longest[pair(first, second)];
                *entry = max(*entry, len as u32);
            }
        }
    }

    /// Adds a token whose spaces may be `▁` in a text, too.
    fn add_marked(&mut self, piece: &str) {
        let is_space = |c: char| c == ' ' || c == '▁';
        let longest = piece.replace(' ', "▁").len();
        // The table is by the first two bytes.
        for marked in 0..4 {
            let mut form = String::new();
            for (i, c) in piece.chars().enumerate() {
                form.push(match is_space(c) {
                    true if i < 2 && marked & (1 << i) == 0 => ' ',
                    true => '▁',
                    false => c,
                });
            }
            self.add(form.as_bytes(), longest);
        }
    }

    /// The longest prefix of `text` that may have no more than `max_tokens` tokens. If that is not all of
    /// it, the text has more.
    pub fn prefix<'t>(&self, text: &'t str, max_tokens: usize) -> &'t str {
        let bytes = text.as_bytes();
        let mut end = match self.composes && !text.is_ascii() {
            false => {
                let mut walk = Walk::default();
                walk.over(self, bytes, 0, max_tokens).unwrap_or(bytes.len())
            }
            true => self.ascii_prefix(bytes, max_tokens),
        };
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        &text[..end]
    }

    /// The same, if only what is between other ASCII characters is certain to stay as it is.
    fn ascii_prefix(&self, bytes: &[u8], max_tokens: usize) -> usize {
        let (mut walk, mut at) = (Walk::default(), 0);
        while at < bytes.len() {
            let len = bytes[at..]
                .iter()
                .take_while(|byte| byte.is_ascii())
                .count();
            // A token that begins before may reach into this part, and its last character may be composed.
            let part = &bytes[at..at + len.saturating_sub(1)];
            (walk.end, walk.furthest) = (self.longest_of_all, self.longest_of_all);
            if let Some(end) = walk.over(self, part, at, max_tokens) {
                return end;
            }
            let other = bytes[at + len..]
                .iter()
                .take_while(|byte| !byte.is_ascii())
                .count();
            at += len + other;
        }
        bytes.len()
    }

    /// The most bytes that a token has that begins where `bytes` do.
    fn reach(&self, bytes: &[u8]) -> usize {
        let next = bytes.get(1).copied().unwrap_or(0);
        max(1, self.longest[pair(bytes[0], next)] as usize)
    }
}

/// A walk over a text from token to token.
#[derive(Default)]
struct Walk {
    count: usize,
    /// The end of the last token that was counted, and the furthest end of all that begin before.
    end: usize,
    furthest: usize,
}

impl Walk {
    /// Goes on over `bytes`, which begin at `offset`; returns where a token more than `max` begins.
    fn over(
        &mut self,
        bound: &TokenBound,
        bytes: &[u8],
        offset: usize,
        max_tokens: usize,
    ) -> Option<usize> {
        for at in 0..bytes.len() {
            self.furthest = max(self.furthest, at + bound.reach(&bytes[at..]));
            if at >= self.end && !bound.free[usize::from(bytes[at])] {
                if self.count == max_tokens {
                    return Some(offset + at);
                }
                self.count += 1;
                self.end = self.furthest;
            }
        }
        None
    }
}

fn pair(first: u8, second: u8) -> usize {
    usize::from(first) << 8 | usize::from(second)
}

/// The steps of a normalizer or pre-tokenizer, with sequences flattened.
fn steps(part: &Value) -> Vec<&Value> {
    let lists = ["normalizers", "pretokenizers"];
    match lists.iter().find_map(|list| part[list].as_array()) {
        Some(list) => list.iter().flat_map(steps).collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}

/// Whether a normalizer only adds characters, composes them, or writes a space as `▁`.
fn keeps_bytes(normalizer: &Value) -> bool {
    steps(normalizer)
        .iter()
        .all(|step| match step["type"].as_str() {
            Some("Prepend" | "NFC") => true,
            Some("Replace") => step["pattern"]["String"] == " " && step["content"] == "▁",
            _ => false,
        })
}

/// Whether a space becomes `▁`.
fn marks_spaces(part: &Value) -> bool {
    let kinds = ["Replace", "Metaspace", "Prepend"];
    steps(part)
        .iter()
        .any(|step| kinds.iter().any(|kind| step["type"] == *kind))
}

fn composes(normalizer: &Value) -> bool {
    steps(normalizer).iter().any(|step| step["type"] == "NFC")
}

/// Whether a pre-tokenizer drops nothing.
fn splits_only(splitter: &Value) -> bool {
    steps(splitter)
        .iter()
        .all(|step| match step["type"].as_str() {
            Some("ByteLevel" | "Metaspace" | "Digits") => true,
            Some("Split" | "Punctuation") => {
                step["behavior"].is_string() && step["behavior"] != "Removed"
            }
            _ => false,
        })
}
