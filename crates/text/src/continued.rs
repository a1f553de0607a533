//! Prompts that end within the last message of their chat, so that the answer goes on with it.
//!
//! A template writes a chat as a whole, and ends each of its messages. So the end of the last message's text is marked
//! with a character that occurs nowhere else, and the prompt is cut there. What the text itself says cannot mislead.

use super::reasoning::ends_in_thought;
use super::tools::ToolFormat;
use super::{Chat, Text};
use foretoken_core::error::{Error, Result};
use serde_json::Value;
use std::ops::RangeInclusive;

/// The part of a message within which a prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continued {
    /// What the model thinks.
    Thought,
    /// What it answers.
    Content,
}

/// The prompt of a chat.
#[derive(Debug)]
pub struct RenderedChat {
    /// The prompt.
    pub prompt: String,
    /// The part of a message that the answer goes on with; `None` = the answer is a message of its own.
    pub continued: Option<Continued>,
}

/// Characters that Unicode reserves for use within a program. The first that does not occur in a chat marks a place
/// in it.
const MARKS: RangeInclusive<char> = '\u{FDD1}'..='\u{FDEF}';

const MESSAGES: &str = "messages";
const CONTENT: &str = "content";
const THOUGHT: &str = "reasoning_content";

impl Text {
    /// Renders a chat up to the end of the last message's content, or of its thought if there is no content. The prompt
    /// is all that the template writes before it closes the message, space included if the template keeps that.
    ///
    /// # Errors
    /// The errors of [`Text::render`], or `Invalid` if the template does not write that text, or changes it.
    pub fn render_open(&self, chat: Chat<'_>, format: Option<ToolFormat>) -> Result<RenderedChat> {
        let chat = Chat {
            add_generation_prompt: false,
            ..chat
        };
        let closed = self.render(chat, format)?;
        let (key, written) = last_text(chat.messages);
        let impossible = || {
            Error::invalid(
                MESSAGES,
                format!(
                    "the last of messages cannot be continued: the model's chat template does not write its {key} as it is"
                ),
            )
        };
        let mark = MARKS.into_iter().find(|&mark| !closed.contains(mark));
        let mark = mark.ok_or_else(impossible)?;
        // What comes before and after the mark in the last message with this text.
        let split = |text: String| {
            let mut messages = chat.messages.to_vec();
            if let Some(last) = messages.last_mut().and_then(Value::as_object_mut) {
                last.insert(key.to_owned(), text.into());
            }
            let messages = &messages[..];
            let marked = self.render(Chat { messages, ..chat }, format)?;
            let parts = marked.split_once(mark);
            let parts = parts.filter(|(_, after)| !after.contains(mark));
            let (before, after) = parts.ok_or_else(impossible)?;
            Ok::<_, Error>((before.to_owned(), after.to_owned()))
        };
        // Templates trim texts, and may write space after them.
        let (text, space) = written.split_at(written.trim_end().len());
        let (mut prompt, after) = split(format!("{text}{mark}{space}"))?;
        if !space.is_empty() {
            let (_, closing) = split(format!("{text}{mark}"))?;
            prompt += after.strip_suffix(&*closing).unwrap_or_default();
        }
        // A message without a text may be written in another form.
        if !text.is_empty() && !closed.starts_with(&*prompt) {
            return Err(impossible());
        }
        let is_thought = key == THOUGHT || ends_in_thought(text);
        let is_begun = !text.is_empty() || self.channels().is_some();
        Ok(RenderedChat {
            prompt,
            continued: if is_thought {
                Some(Continued::Thought)
            } else {
                is_begun.then_some(Continued::Content)
            },
        })
    }
}

/// The key and the text that the last message ends with.
fn last_text(messages: &[Value]) -> (&'static str, &str) {
    let text = |key| messages.last()?.get(key)?.as_str();
    let is_blank = |text: Option<&str>| text.is_none_or(|text| text.trim().is_empty());
    let (content, thought) = (text(CONTENT), text(THOUGHT));
    if is_blank(content) && !is_blank(thought) {
        (THOUGHT, thought.unwrap_or_default())
    } else {
        (CONTENT, content.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests;
