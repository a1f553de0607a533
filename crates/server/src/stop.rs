//! Finds stop strings in text that arrives in pieces.

/// The stop strings of a request, prepared for a byte-by-byte search.
#[derive(Debug, Default)]
pub(super) struct Stops {
    patterns: Vec<Pattern>,
    /// The stop strings that are names of special tokens, with the tokens' ids.
    tokens: Vec<(u32, String)>,
    shown: bool,
}

#[derive(Debug)]
struct Pattern {
    text: String,
    /// For each `i`, the length in bytes of the longest proper prefix of `text[..=i]` that is also its
    /// suffix (Knuth, Morris and Pratt 1977).
    borders: Vec<usize>,
}

impl Stops {
    /// Prepares `texts`, none of which may be empty.
    pub fn new(texts: impl IntoIterator<Item = String>) -> Self {
        Self {
            patterns: texts.into_iter().map(Pattern::new).collect(),
            ..Self::default()
        }
    }

    /// Declares which of the stop strings are names of special tokens; `tokens` has their ids and names.
    pub fn with_tokens(mut self, tokens: impl IntoIterator<Item = (u32, String)>) -> Self {
        self.tokens = tokens.into_iter().collect();
        self
    }

    /// The ids of special tokens that end a text.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().map(|(id, _)| *id)
    }

    /// The stop string that is the name of the token `id`.
    pub fn named(&self, id: u32) -> Option<&str> {
        let token = self.tokens.iter().find(|(token, _)| *token == id);
        token.map(|(_, name)| name.as_str())
    }

    /// Sets whether the stop string that ends a text is a part of the text.
    pub fn shown(self, shown: bool) -> Self {
        Self { shown, ..self }
    }

    /// Whether the stop string that ends a text is a part of the text.
    pub fn are_shown(&self) -> bool {
        self.shown
    }
}

impl Pattern {
    fn new(text: String) -> Self {
        let mut pattern = Self {
            text,
            borders: vec![0],
        };
        for i in 1..pattern.text.len() {
            let border = pattern.advance(pattern.borders[i - 1], pattern.text.as_bytes()[i]);
            pattern.borders.push(border);
        }
        pattern
    }

    /// The number of bytes of the pattern that a text ends with after `byte`, if it ended with `matched` of
    /// them (fewer than all) before. Takes constant time, amortized over a text.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        while matched > 0 && bytes[matched] != byte {
            matched = self.borders[matched - 1];
        }
        matched + usize::from(bytes[matched] == byte)
    }
}

/// Finds stop strings, and holds back text that may be the beginning of one. The match is the one that
/// is complete first, or the longest of several, so it does not depend on the pieces.
#[derive(Debug, Default)]
pub(super) struct StopMatcher {
    /// Text that is held back, because it may be the beginning of a stop string.
    held: String,
    /// For each pattern, how many of its bytes the text ends with; fewer than all.
    matched: Vec<usize>,
}

impl StopMatcher {
    /// Adds text. Returns the text that can be shown, and the stop string that ended it, if any. While
    /// `may_stop` is false, complete matches are ordinary text.
    pub fn push<'a>(
        &mut self,
        stops: &'a Stops,
        new: String,
        may_stop: bool,
    ) -> (String, Option<&'a str>) {
        let patterns = &stops.patterns;
        if patterns.is_empty() {
            return (new, None);
        }
        self.matched.resize(patterns.len(), 0);
        for (at, byte) in new.bytes().enumerate() {
            let mut found: Option<&str> = None;
            for (pattern, matched) in patterns.iter().zip(&mut self.matched) {
                *matched = pattern.advance(*matched, byte);
                if *matched == pattern.text.len() {
                    *matched = pattern.borders[*matched - 1];
                    if found.is_none_or(|found| pattern.text.len() > found.len()) {
                        found = Some(&pattern.text);
                    }
                }
            }
            if let Some(stop) = found.filter(|_| may_stop) {
                let mut text = self.finish() + &new[..=at];
                if !stops.shown {
                    text.truncate(text.len() - stop.len());
                }
                return (text, Some(stop));
            }
        }
        self.held.push_str(&new);
        // This does not split a character, because a stop string begins with the first byte of one.
        let hold = self.matched.iter().max().copied().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - hold);
        (std::mem::replace(&mut self.held, held), None)
    }

    /// Ends the text, and returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests;
