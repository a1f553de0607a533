//! Converts token ids to text, one token at a time.

use super::Text;
use std::sync::Arc;

/// Turns the tokens of one sequence into text as they arrive. It never returns part of a character:
/// bytes that may still become one wait for the next token. All returned texts together, with that of
/// [`Detokenizer::finish`] at the end, equal the text of decoding all ids at once. Each byte is examined
/// a constant number of times.
#[derive(Debug, Default, Clone)]
pub struct Detokenizer {
    /// The first bytes of an incomplete character; at most three between two calls.
    pending: Vec<u8>,
    /// Which special tokens appear by name.
    shown: Shown,
}

#[derive(Debug, Default, Clone)]
enum Shown {
    #[default]
    None,
    These(Arc<[u32]>),
    All,
}

impl Detokenizer {
    /// A detokenizer that leaves out special tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// A detokenizer that shows special tokens by name.
    pub fn with_special() -> Self {
        Self {
            shown: Shown::All,
            ..Self::default()
        }
    }

    /// A detokenizer that shows the special tokens `ids` by name, and leaves out the others.
    pub fn showing(ids: Arc<[u32]>) -> Self {
        Self {
            shown: Shown::These(ids),
            ..Self::default()
        }
    }

    /// Adds one token; returns the text that is complete now.
    pub fn push(&mut self, text: &Text, id: u32) -> String {
        let shown = match &self.shown {
            Shown::All => true,
            Shown::These(ids) if ids.contains(&id) => true,
            Shown::These(_) | Shown::None => !text.is_special(id),
        };
        if shown {
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
        // Each chunk ends with bytes that are not UTF-8; only those of the last chunk may still be completed.
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
