//! A vocabulary for tests, as small as they need it.

use super::GrammarTokens;

/// Tokens by their bytes. A part of a text is encoded by its longest tokens.
pub struct ToyTokens {
    bytes: Vec<Vec<u8>>,
    eos: Vec<u32>,
    special: Vec<u32>,
}

impl ToyTokens {
    /// The ids are the places in `tokens`; those in `eos` end a text and stand for nothing in it.
    pub fn new<T: Into<Vec<u8>>>(tokens: impl IntoIterator<Item = T>, eos: &[u32]) -> Self {
        Self {
            bytes: tokens.into_iter().map(Into::into).collect(),
            eos: eos.to_vec(),
            special: Vec::new(),
        }
    }

    /// Makes special tokens of these, too.
    pub fn with_special(mut self, ids: &[u32]) -> Self {
        self.special = ids.to_vec();
        self
    }
}

impl GrammarTokens for ToyTokens {
    fn count(&self) -> usize {
        self.bytes.len()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        &self.bytes[id as usize]
    }

    fn is_special(&self, id: u32) -> bool {
        self.eos.contains(&id) || self.special.contains(&id)
    }

    fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// # Panics
    /// If no token continues the text.
    fn encode_part(&self, text: &str) -> Vec<u32> {
        let (mut rest, mut ids) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let candidates = (0..self.count() as u32).filter(|&id| !self.is_special(id));
            let fits = candidates.filter(|&id| rest.starts_with(self.bytes(id)));
            let id = fits.max_by_key(|&id| self.bytes(id).len());
            let id = id.unwrap_or_else(|| panic!("no token continues {text:?}"));
            ids.push(id);
            rest = &rest[self.bytes(id).len()..];
        }
        ids
    }
}
