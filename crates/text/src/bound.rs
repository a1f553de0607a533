//! A lower bound on the number of tokens of a text, which is found much faster than the tokens.
//!
//! A token that begins with two given bytes has at most the length of the longest one that does. So one
//! token covers at most the bytes up to the furthest end that any token can have that begins at or before its
//! first byte, and a walk over the text that needs the next token only there counts no more tokens than the
//! tokenizer makes. Bytes that a tokenizer may drop or join without a limit are free. There is a bound for
//! BPE and Unigram whose tokens are bytes of the text.

use super::pieces::{has_step, steps};
use serde_json::Value;
use std::cmp::max;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, Tokenizer};

/// The longest tokens of a vocabulary.
pub(super) struct TokenBound {
    /// For the first two bytes of a token, the bytes of the longest one; 0 = there is none.
    longest: Vec<u32>,
    /// The bytes of the longest token of all.
    longest_of_all: usize,
    /// Bytes that may take no token of their own.
    free: [bool; 256],
    /// The bytes that are certain to stay as they are, between others that are; `None` = all.
    certain: Option<[bool; 256]>,
}

impl TokenBound {
    /// The bound for `tokenizer`, whose tokens are `pieces`; `None` if it may change texts in ways for
    /// which no bound is known.
    pub fn new<'a>(tokenizer: &Tokenizer, pieces: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        // Parts have private fields, so this reads their JSON.
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let byte_level = has_step(&splitter, &["ByteLevel"]);
        let by_bytes = match tokenizer.get_model() {
            ModelWrapper::BPE(bpe) => {
                let empty = |affix: &Option<String>| affix.as_deref().is_none_or(str::is_empty);
                empty(&bpe.continuing_subword_prefix)
                    && empty(&bpe.end_of_word_suffix)
                    && (bpe.byte_fallback || byte_level)
            }
            // A character without a token may be a part of a longer unknown one, or of bytes.
            ModelWrapper::Unigram(_) => true,
            _ => false,
        };
        if !(by_bytes && keeps_bytes(&normalizer) && splits_only(&splitter)) {
            return None;
        }
        let mut bound = Self {
            longest: vec![0; 1 << 16],
            longest_of_all: 1,
            free: [true; 256],
            certain: None,
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
        if let ModelWrapper::Unigram(model) = tokenizer.get_model() {
            bound.free_unknown(tokenizer, model.byte_fallback(), marks_spaces);
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
            (0..=255).for_each(|byte| bound.free[usize::from(byte)] |= space(byte));
        }
        let certain = certain(tokenizer, &normalizer, &splitter);
        let all = bound.free.iter_mut().zip(certain.into_iter().flatten());
        all.for_each(|(free, certain)| *free |= !certain);
        Some(Self { certain, ..bound })
    }

    /// Frees the bytes that are not tokens of their own in a Unigram model. A run of unknown characters
    /// becomes bytes only if all of them have tokens.
    fn free_unknown(&mut self, tokenizer: &Tokenizer, to_bytes: bool, marks_spaces: bool) {
        let has = |name: String| tokenizer.token_to_id(&name).is_some();
        if to_bytes && (0..=255).all(|byte: u8| has(format!("<0x{byte:02X}>"))) {
            return;
        }
        for byte in 0..=255_u8 {
            let marked = byte == b' ' && marks_spaces;
            let name = if marked { '▁' } else { char::from(byte) };
            self.free[usize::from(byte)] |= !byte.is_ascii() || !has(name.into());
        }
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
        let longest = piece.replace(' ', "▁").len();
        // The table is by the first two bytes.
        for marked in 0..4 {
            let mut form = String::new();
            for (i, c) in piece.chars().enumerate() {
                let is_plain = i < 2 && marked & (1 << i) == 0;
                form.push(match c {
                    ' ' | '▁' if is_plain => ' ',
                    ' ' | '▁' => '▁',
                    c => c,
                });
            }
            self.add(form.as_bytes(), longest);
        }
    }

    /// The longest prefix of `text` that may have no more than `max_tokens` tokens. If that is not all of
    /// it, the text has more.
    pub fn prefix<'t>(&self, text: &'t str, max_tokens: usize) -> &'t str {
        let bytes = text.as_bytes();
        let mut end = match &self.certain {
            Some(certain) if bytes.iter().any(|&byte| !certain[usize::from(byte)]) => {
                self.certain_prefix(bytes, certain, max_tokens)
            }
            _ => {
                let mut walk = Walk::default();
                walk.over(self, bytes, 0, max_tokens).unwrap_or(bytes.len())
            }
        };
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        &text[..end]
    }

    /// The number of bytes of [`TokenBound::prefix`], for a text in which only bytes between `certain` bytes are certain
    /// to stay as they are.
    fn certain_prefix(&self, bytes: &[u8], certain: &[bool; 256], max_tokens: usize) -> usize {
        let (mut walk, mut at) = (Walk::default(), 0);
        let run = |bytes: &[u8], wanted: bool| {
            let is = |byte: &&u8| certain[usize::from(**byte)] == wanted;
            bytes.iter().take_while(is).count()
        };
        while at < bytes.len() {
            let len = run(&bytes[at..], true);
            // A token that begins before may reach into this part, and its last character may be composed.
            let part = &bytes[at..at + len.saturating_sub(1)];
            (walk.end, walk.furthest) = (self.longest_of_all, self.longest_of_all);
            if let Some(end) = walk.over(self, part, at, max_tokens) {
                return end;
            }
            at += len;
            at += run(&bytes[at..], false);
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
    /// Goes on over `bytes`, which begin at `offset`. Returns where the token after `max_tokens` tokens begins.
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

/// Whether a normalizer only adds characters, composes them, writes a space as `▁`, or changes what
/// [`certain`] finds.
fn keeps_bytes(normalizer: &Value) -> bool {
    steps(normalizer)
        .iter()
        .all(|step| match step["type"].as_str() {
            Some("Prepend" | "NFC" | "Precompiled" | "Strip") => true,
            Some("Replace") => {
                let is_space = [" ", "▁"].iter().any(|space| step["content"] == *space);
                step["pattern"]["String"] == " " && step["content"] == "▁"
                    || joins_spaces(step) && is_space
            }
            _ => false,
        })
}

/// Whether several spaces become one.
fn joins_spaces(step: &Value) -> bool {
    step["pattern"]["Regex"] == " {2,}"
}

/// The bytes that these parts leave as they are, between others of which that is true; `None` = all.
fn certain(tokenizer: &Tokenizer, normalizer: &Value, splitter: &Value) -> Option<[bool; 256]> {
    let precompiled = has_step(normalizer, &["Precompiled"]);
    let spaces = has_step(normalizer, &["Strip"])
        || has_step(splitter, &["WhitespaceSplit"])
        || steps(normalizer).into_iter().any(joins_spaces);
    if !(precompiled || spaces || has_step(normalizer, &["NFC"])) {
        return None;
    }
    let mut certain = [false; 256];
    for byte in 0..0x80_u8 {
        let is_space = byte.is_ascii_whitespace() || byte == 0x0B;
        // A table of SentencePiece says what becomes of each character; \r\n is one.
        let stays = !precompiled || byte != b'\r' && byte != b'\n' && is_kept(tokenizer, byte);
        certain[usize::from(byte)] = stays && !(is_space && spaces);
    }
    Some(certain)
}

/// Whether the normalizer leaves an ASCII character between others as it is.
fn is_kept(tokenizer: &Tokenizer, byte: u8) -> bool {
    let text = format!("x{}x", char::from(byte));
    let mut normalized = NormalizedString::from(text.as_str());
    let normalizer = tokenizer.get_normalizer();
    let is_normal = normalizer.is_none_or(|n| n.normalize(&mut normalized).is_ok());
    is_normal && normalized.get().ends_with(&text)
}

/// Whether a space becomes `▁`.
fn marks_spaces(part: &Value) -> bool {
    has_step(part, &["Replace", "Metaspace", "Prepend"])
}

/// Whether a pre-tokenizer drops nothing but white space.
fn splits_only(splitter: &Value) -> bool {
    steps(splitter)
        .iter()
        .all(|step| match step["type"].as_str() {
            Some("ByteLevel" | "Metaspace" | "Digits" | "WhitespaceSplit") => true,
            Some("Split" | "Punctuation") => {
                step["behavior"].is_string() && step["behavior"] != "Removed"
            }
            _ => false,
        })
}
