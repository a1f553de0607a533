//! The bytes that each token adds to a text.

use foretoken_core::error::{Error, Result};
use serde_json::Value;
use tokenizers::Tokenizer;

/// Ids of a model, and so of a tokenizer.
const MAX_VOCABULARY: usize = 1 << 24;

/// The bytes of every token, by id.
pub(super) struct Pieces {
    pieces: Vec<TokenBytes>,
    leading_space: bool,
    byte_level: bool,
}

#[derive(Default, Clone)]
struct TokenBytes {
    bytes: Box<[u8]>,
    special: bool,
}

/// The representation of bytes in token names.
enum Spelling {
    /// GPT-2's: one printable character per byte.
    ByteLevel,
    /// SentencePiece's: `▁` for the space and, with byte fallback, `<0xE2>` for a byte.
    Metaspace { byte_fallback: bool },
}

impl Pieces {
    /// The pieces of `tokenizer`.
    ///
    /// # Errors
    /// `Setup`, if its decoder is neither byte-level nor SentencePiece's.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self> {
        // The decoder's parts have private fields, so this reads its JSON.
        let decoder = serde_json::to_value(tokenizer.get_decoder())
            .map_err(|e| Error::setup(format!("tokenizer: {e}")))?;
        let steps = steps(&decoder);
        let has = |kind: &str| has_step(&decoder, &[kind]);
        let spelling = if has("ByteLevel") {
            Spelling::ByteLevel
        } else if has("Metaspace") || steps.iter().any(|s| s["pattern"]["String"] == "▁") {
            let byte_fallback = has("ByteFallback");
            Spelling::Metaspace { byte_fallback }
        } else {
            return Err(Error::setup(
                "this tokenizer's decoder is not supported: only byte-level BPE and SentencePiece are",
            ));
        };
        let leading_space = steps.iter().any(|step| {
            step["type"] == "Strip" && step["content"] == " " && step["start"] != 0
                || step["type"] == "Metaspace" && step["prepend_scheme"] != "never"
        });

        let added = tokenizer.get_added_tokens_decoder();
        let vocab = tokenizer.get_vocab(true);
        let len = vocab.values().max().map_or(0, |&id| id as usize + 1);
        if len > MAX_VOCABULARY {
            return Err(Error::setup(format!(
                "the tokenizer has the id {}; ids below {MAX_VOCABULARY} are supported",
                len - 1
            )));
        }
        let mut pieces = vec![TokenBytes::default(); len];
        for (name, id) in vocab {
            let added = added.get(&id);
            pieces[id as usize] = TokenBytes {
                bytes: match (&spelling, added) {
                    (Spelling::ByteLevel, _) => byte_level(&name),
                    // A role's name is shown as it is written.
                    (Spelling::Metaspace { .. }, Some(token)) if token.special => name.into_bytes(),
                    (Spelling::Metaspace { byte_fallback }, _) => metaspace(&name, *byte_fallback),
                }
                .into_boxed_slice(),
                special: added.is_some_and(|token| token.special),
            };
        }
        Ok(Self {
            byte_level: matches!(spelling, Spelling::ByteLevel),
            pieces,
            leading_space,
        })
    }

    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The bytes of every token.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| &*piece.bytes)
    }

    pub fn bytes(&self, id: u32) -> &[u8] {
        self.pieces
            .get(id as usize)
            .map_or(&[], |piece| &piece.bytes)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.pieces
            .get(id as usize)
            .is_some_and(|piece| piece.special)
    }

    /// Whether names of tokens have one character per byte, as GPT-2's.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// Whether encoding puts a space in front of a text, so that decoding must remove it.
    pub fn leading_space(&self) -> bool {
        self.leading_space
    }
}

/// The steps of a normalizer, a pre-tokenizer or a decoder in JSON, with sequences flattened; empty for `null`.
pub(super) fn steps(part: &Value) -> Vec<&Value> {
    let lists = ["normalizers", "pretokenizers", "decoders"];
    match lists.iter().find_map(|list| part[list].as_array()) {
        Some(list) => list.iter().flat_map(steps).collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}

/// Whether a step of `part` has one of these types.
pub(super) fn has_step(part: &Value, types: &[&str]) -> bool {
    let is = |step: &&Value| types.iter().any(|name| step["type"] == *name);
    steps(part).iter().any(is)
}

/// The bytes of a name in GPT-2's alphabet. Names with other characters (added tokens) are taken
/// literally.
fn byte_level(name: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = name.chars().map(byte_of).collect();
    bytes.unwrap_or_else(|| name.as_bytes().to_vec())
}

/// GPT-2 writes printable bytes as themselves and the 68 others, in order, as U+0100 and up.
fn byte_of(c: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(|&b| printable(b)),
        code => (0..=0xFF)
            .filter(|&b| !printable(b))
            .nth(code as usize - 0x100),
    }
}

fn metaspace(name: &str, byte_fallback: bool) -> Vec<u8> {
    let hex = || name.strip_prefix("<0x")?.strip_suffix('>');
    match hex().and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) if byte_fallback => vec![byte],
        _ => name.replace('▁', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn the_alphabet_of_gpt2_names_every_byte_once() {
        let mut bytes: Vec<u8> = ByteLevel::alphabet()
            .into_iter()
            .map(|c| byte_of(c).unwrap_or_else(|| panic!("{c:?} is no byte")))
            .collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('世'), None);
    }

    #[test]
    fn sentencepiece_names() {
        assert_eq!(metaspace("▁the", true), b" the");
        assert_eq!(metaspace("<0xE2>", true), [0xE2]);
        assert_eq!(metaspace("<0xE2>", false), b"<0xE2>");
        assert_eq!(metaspace("<0xZZ>", true), b"<0xZZ>");
    }
}
