//! The limit on what a model thinks before it answers.

use std::fmt::{self, Debug};
use std::sync::Arc;

/// The vocabulary, as far as a thought's marks need it.
pub trait TokenBytes: Send + Sync {
    /// The bytes that `id` adds to a text; none if its text is not shown.
    fn bytes(&self, id: u32) -> &[u8];
}

/// How a model marks the thought before its answer. Marks are texts, because a model may write one in other tokens than
/// its tokenizer would, for example with the line break after it in its last token.
pub struct ThoughtMarks {
    /// The texts that open a thought.
    begin: Vec<String>,
    /// The texts that close it.
    end: Vec<String>,
    /// The tokens that write the first of `end`.
    closing: Vec<u32>,
    tokens: Arc<dyn TokenBytes>,
}

impl ThoughtMarks {
    /// Marks of which any of `begin` opens and any of `end` closes a thought. The tokens of `closing` write the first of
    /// `end`; `None` if they do not.
    pub fn new(
        begin: &[&str],
        end: &[&str],
        closing: Vec<u32>,
        tokens: Arc<dyn TokenBytes>,
    ) -> Option<Self> {
        let owned = |marks: &[&str]| marks.iter().map(|&mark| mark.to_owned()).collect();
        let marks = Self {
            begin: owned(begin),
            end: owned(end),
            closing,
            tokens,
        };
        let written = marks.text(&marks.closing);
        let is_mark = |mark: &&str| !mark.is_empty();
        let is_whole = end.iter().all(is_mark)
            && end
                .first()
                .is_some_and(|end| contains(&written, end.as_bytes()));
        is_whole.then_some(marks)
    }

    /// The tokens that close a thought.
    pub fn closing(&self) -> &[u32] {
        &self.closing
    }

    fn text(&self, tokens: &[u32]) -> Vec<u8> {
        let bytes = tokens.iter().map(|&id| self.tokens.bytes(id));
        bytes.flatten().copied().collect()
    }

    /// The bytes of the last of `tokens`, and `before` more, if there are as many.
    fn tail(&self, tokens: &[u32], before: usize) -> Vec<u8> {
        let Some((last, earlier)) = tokens.split_last() else {
            return Vec::new();
        };
        let (mut first, mut len) = (earlier.len(), 0);
        while first > 0 && len < before {
            first -= 1;
            len += self.tokens.bytes(earlier[first]).len();
        }
        let mut text = self.text(&earlier[first..]);
        text.drain(..len.saturating_sub(before));
        text.extend(self.tokens.bytes(*last));
        text
    }
}

impl Debug for ThoughtMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThoughtMarks({:?}, {:?})", self.begin, self.closing)
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// A limit on the tokens of the thought with which a text begins. After so many the tokens that close a thought are the
/// only ones that may come next, whatever else the request forbids.
#[derive(Debug, Clone)]
pub struct ThoughtLimit {
    /// How the model marks a thought.
    pub marks: Arc<ThoughtMarks>,
    /// Maximum number of tokens between the marks.
    pub max_tokens: usize,
    /// Whether the prompt has opened the thought. Otherwise the text may open it with its first words.
    pub is_open: bool,
}

impl PartialEq for ThoughtLimit {
    /// Whether they are the same limit with the same marks, made once.
    fn eq(&self, other: &Self) -> bool {
        (self.max_tokens, self.is_open) == (other.max_tokens, other.is_open)
            && Arc::ptr_eq(&self.marks, &other.marks)
    }
}

/// Maximum number of tokens for which a thought is closed later, so that no character is cut in two.
const MAX_CHAR_TOKENS: usize = 3;

/// Where a text is in its thought. What is to be forced follows from the output tokens and these two places, so going
/// back means forgetting places that are not reached any more.
#[derive(Debug, Clone)]
pub(super) struct Thought {
    limit: ThoughtLimit,
    /// Number of output tokens before the first that counts; `None` = the thought has not begun.
    start: Option<usize>,
    /// Number of output tokens after which the thought is over, or it is certain that there is none.
    end: Option<usize>,
}

impl Thought {
    pub fn new(limit: ThoughtLimit) -> Self {
        Self {
            start: limit.is_open.then_some(0),
            end: None,
            limit,
        }
    }

    /// Whether the thought may still begin or go on.
    pub fn is_open(&self) -> bool {
        self.end.is_none()
    }

    /// Takes note of the last token of `output`.
    pub fn push(&mut self, output: &[u32]) {
        let marks = &self.limit.marks;
        match (self.start, self.end) {
            (_, Some(_)) => {}
            (Some(start), None) => {
                let is_closed = |end: &String| {
                    contains(&marks.tail(&output[start..], end.len() - 1), end.as_bytes())
                };
                if marks.end.iter().any(is_closed) {
                    self.end = Some(output.len());
                }
            }
            (None, None) => {
                // Nothing but space and a part of a mark, until this is decided: what comes before the longest is space.
                let longest = marks.begin.iter().map(String::len).max().unwrap_or(0);
                let longest = longest.max(MAX_CHAR_TOKENS);
                let text = marks.tail(output, longest);
                if is_within_char(&text) {
                    return;
                }
                let last = output.last().map_or(0, |&id| marks.tokens.bytes(id).len());
                let is_cut = text.len() - last == longest;
                let within_char = text.iter().take_while(|&&byte| byte & 0xC0 == 0x80);
                let rest = if is_cut { within_char.count() } else { 0 };
                let text = String::from_utf8_lossy(&text[rest..]);
                let text = text.trim_start();
                let mut begins = marks.begin.iter();
                if begins.clone().any(|begin| text.starts_with(begin.as_str())) {
                    self.start = Some(output.len());
                } else if !begins.any(|begin| begin.starts_with(text)) {
                    self.end = Some(output.len());
                }
            }
        }
    }

    /// Only `len` output tokens are left.
    pub fn truncate(&mut self, len: usize) {
        self.end = self.end.filter(|&end| end <= len);
        let is_reached = |start: &usize| *start <= len;
        self.start = self.start.filter(is_reached);
    }

    /// The token that must follow `output`, if the thought has had its tokens.
    pub fn forced(&self, output: &[u32]) -> Option<u32> {
        let start = self.start.filter(|_| self.is_open())?;
        let ThoughtLimit {
            marks, max_tokens, ..
        } = &self.limit;
        let thought = &output[start..];
        let over = thought.len().checked_sub(*max_tokens)?;
        let closing = &marks.closing;
        // The model, too, may have begun to close its thought.
        let written = (0..closing.len())
            .rev()
            .find(|&len| thought.ends_with(&closing[..len]))?;
        let may_wait = written == 0 && over < MAX_CHAR_TOKENS;
        if may_wait && is_within_char(&marks.tail(thought, MAX_CHAR_TOKENS)) {
            return None;
        }
        Some(closing[written])
    }
}

/// Whether `text` ends within a character of UTF-8.
fn is_within_char(text: &[u8]) -> bool {
    let is_lead = |byte: &u8| byte & 0xC0 != 0x80;
    let last = text.iter().rev().take(3).position(is_lead);
    last.is_some_and(|after| {
        let width = match text[text.len() - 1 - after].leading_ones() {
            ones @ 2..=4 => ones as usize,
            _ => 1,
        };
        width > after + 1
    })
}

#[cfg(test)]
mod tests;
