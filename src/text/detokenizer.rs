//! Token ids to text, one at a time.

use super::Text;

/// Turns the tokens of one sequence into text as they come. Never gives half a character: bytes
/// that may yet become one wait for the next token. All it gave, with [`Detokenizer::finish`] at
/// the end, is what decoding all ids at once gives. Each byte is looked at a constant number of
/// times.
#[derive(Debug, Default, Clone)]
pub struct Detokenizer {
    /// The beginning of a character; at most three bytes between two calls.
    pending: Vec<u8>,
    /// Special tokens spell their names.
    show_special: bool,
}

impl Detokenizer {
    /// Leaves out special tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows special tokens by name.
    pub fn with_special() -> Self {
        Self {
            show_special: true,
            ..Self::default()
        }
    }

    /// Feeds one token; returns the text that is complete now.
    pub fn push(&mut self, text: &Text, id: u32) -> String {
        if self.show_special || !text.is_special(id) {
            self.pending.extend_from_slice(text.token_bytes(id));
        }
        self.take_complete()
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_complete(&mut self) -> String {
        let mut out = String::new();
        let mut done = 0;
        // Chunks end where the bytes stop being UTF-8; what may still continue is only at the end.
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
