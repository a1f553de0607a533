//! Converts token ids to text, one token at a time.

use super::Text;

/// Turns the tokens of one sequence into text as they arrive. It never returns part of a character:
/// bytes that may still become one wait for the next token. All returned texts together, with that of
/// [`Detokenizer::finish`] at the end, equal the text of decoding all ids at once. Each byte is examined
/// a constant number of times.
#[derive(Debug, Default, Clone)]
pub struct Detokenizer {
    /// The first bytes of an incomplete character; at most three between two calls.
    pending: Vec<u8>,
    /// Whether special tokens appear by name.
    show_special: bool,
}

impl Detokenizer {
    /// A detokenizer that leaves out special tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// A detokenizer that shows special tokens by name.
    pub fn with_special() -> Self {
        Self {
            show_special: true,
            ..Self::default()
        }
    }

    /// Adds one token; returns the text that is complete now.
    pub fn push(&mut self, text: &Text, id: u32) -> String {
        if self.show_special || !text.is_special(id) {
            self.pending.extend_from_slice(text.token_bytes(id));
        }
        self.take_complete()
    }

    /// Ends the text: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_complete(&mut self) -> String {
        let mut out = String::new();
        let mut done = 0;
        // Each chunk ends with bytes that are not UTF-8; only the last ones may still be completed.
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let unfinished = done + invalid.len() == self.pending.len()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if invalid.is_empty() || unfinished {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.pending.drain(..done);
        out
    }
}
