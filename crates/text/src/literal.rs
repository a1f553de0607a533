//! Prompts in which what clients write is text alone, also where it has the name of a special token.
//!
//! A chat template makes one text of what clients write and of its own markers, and a tokenizer takes every name of a
//! special token in it for that token. So names in the clients' texts are marked before the template is applied: a
//! character that stands for nothing splits them, and a tokenizer drops it after it has looked for special tokens.

use super::Text;
use foretoken_core::error::{Error, Result};
use serde_json::{Map, Value};
use std::sync::Arc;
use tokenizers::normalizers::{Replace, Sequence};
use tokenizers::{NormalizerWrapper, OffsetReferential, OffsetType, Tokenizer};

/// A character that Unicode reserves for use within a program.
pub(super) const MARK: char = '\u{FDD0}';

/// Marks the names of special tokens in texts of clients, and encodes prompts with marks.
pub struct LiteralText {
    text: Arc<Text>,
    /// Drops marks.
    tokenizer: Tokenizer,
}

impl LiteralText {
    /// Prepares the tokenizer of `text`.
    ///
    /// # Errors
    /// `Setup`, naming a special token, if the tokenizer knows one in any text.
    pub fn new(text: Arc<Text>) -> Result<Self> {
        let mut tokenizer = text.tokenizer.clone();
        let failed = |e: tokenizers::Error| Error::setup(format!("the tokenizer: {e}"));
        let drop_marks = Replace::new(MARK.to_string(), "").map_err(failed)?;
        let first = [NormalizerWrapper::Replace(drop_marks)].into_iter();
        let all = first.chain(tokenizer.get_normalizer().cloned()).collect();
        let all = NormalizerWrapper::Sequence(Sequence::new(all));
        tokenizer.with_normalizer(Some(all)).map_err(failed)?;
        let literal = Self { text, tokenizer };
        literal.check()?;
        Ok(literal)
    }

    /// Checks that each special token can be written as a text.
    fn check(&self) -> Result<()> {
        let added = self.text.tokenizer.get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special);
        for name in special.map(|token| &token.content) {
            let ids = self.encode(&self.marked(name), false)?;
            if ids.iter().any(|&id| self.text.is_special(id)) {
                return Err(Error::setup(format!(
                    "--no-parse-special is not possible with this model: its tokenizer has no other tokens for the text {name:?}"
                )));
            }
        }
        Ok(())
    }

    /// Marks the names of special tokens in all texts of `value`, the keys of objects included.
    ///
    /// # Errors
    /// `Invalid`, naming the field that `value` is of, if a text has marks already.
    pub fn mark(&self, field: &str, value: &mut Value) -> Result<()> {
        match value {
            Value::String(text) => *text = self.mark_text(field, text)?,
            Value::Array(list) => {
                for value in list {
                    self.mark(field, value)?;
                }
            }
            Value::Object(map) => *map = self.mark_map(field, std::mem::take(map))?,
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    /// Marks the names of special tokens in the keys and values of an object, and returns the marked object.
    ///
    /// # Errors
    /// The errors of [`LiteralText::mark`].
    pub fn mark_map(&self, field: &str, map: Map<String, Value>) -> Result<Map<String, Value>> {
        let marked = map.into_iter().map(|(key, mut value)| {
            self.mark(field, &mut value)?;
            Ok((self.mark_text(field, &key)?, value))
        });
        marked.collect()
    }

    fn mark_text(&self, field: &str, text: &str) -> Result<String> {
        if is_marked(text) {
            let what = " must not contain the character U+FDD0, which is reserved";
            return Err(Error::field(field, what));
        }
        Ok(self.marked(text))
    }

    /// `text` with a mark after the first character of each name of a special token. Names may overlap: what is left
    /// of them is marked in a further turn, and each turn splits all that it finds.
    fn marked(&self, text: &str) -> String {
        let mut text = text.to_owned();
        loop {
            let starts = self.special_in(&text);
            if starts.is_empty() {
                return text;
            }
            let mut marked = String::with_capacity(text.len() + starts.len() * MARK.len_utf8());
            let mut from = 0;
            for start in starts {
                let first = text[start..].chars().next().map_or(0, char::len_utf8);
                marked.push_str(&text[from..start + first]);
                marked.push(MARK);
                from = start + first;
            }
            marked.push_str(&text[from..]);
            text = marked;
        }
    }

    /// The places at which the tokenizer finds names of special tokens of more than one character. None is within another.
    fn special_in(&self, text: &str) -> Vec<usize> {
        let added = self.text.tokenizer.get_added_vocabulary();
        let found = added.extract_and_normalize(None::<&NormalizerWrapper>, text);
        let splits = found.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let special = splits.into_iter().filter_map(|(part, (start, _), tokens)| {
            let token = tokens.as_ref()?.first()?;
            // A token may take the space around it.
            let name = part.trim();
            let space = part.len() - part.trim_start().len();
            let splits = self.text.is_special(token.id) && name.chars().nth(1).is_some();
            splits.then_some(start + space)
        });
        special.collect()
    }

    /// The token ids of a prompt that a template made of marked texts; see [`Text::encode`].
    ///
    /// # Errors
    /// The errors of [`Text::encode`].
    pub fn encode(&self, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        if is_marked(prompt) {
            super::encode(&self.tokenizer, prompt, add_special_tokens)
        } else {
            self.text.encode(prompt, add_special_tokens)
        }
    }
}

fn is_marked(text: &str) -> bool {
    text.contains(MARK)
}

#[cfg(test)]
mod tests;
