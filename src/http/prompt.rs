//! Converts all forms of prompts to token ids.

use super::choice::Echo;
use super::context::Context;
use super::wire::Prompt;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::sync::Arc;

/// One prompt of a request.
pub(super) struct PromptTokens {
    pub ids: Vec<u32>,
    /// The prompt to repeat in the reply, if requested.
    pub echo: Option<Arc<Echo>>,
}

impl Context<'_> {
    /// The token ids of a chat's prompt. The template writes BOS itself.
    ///
    /// # Errors
    /// `Invalid`, naming the message.
    pub(super) fn chat_ids(
        &self,
        messages: Vec<Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>> {
        let messages = checked_messages(messages)?;
        let prompt = self
            .text
            .render_chat(&messages, add_generation_prompt, extra)?;
        self.text.encode(&prompt, add_special_tokens)
    }

    /// The token ids of a completion's prompts; texts get BOS with `add_special_tokens`. The number of
    /// prompts times `n` is limited to what the queue can hold.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn prompts(
        &self,
        prompt: Prompt,
        add_special_tokens: bool,
        echo: bool,
        n: usize,
    ) -> Result<Vec<PromptTokens>> {
        let count = match &prompt {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::Texts(list) => list.len(),
            Prompt::IdLists(list) => list.len(),
        };
        if count == 0 {
            return Err(Error::invalid("prompt", "prompt must not be empty"));
        }
        // Checked before any prompt is tokenized or copied n times.
        let max = self.limits.max_waiting;
        if count.saturating_mul(n) > max {
            return Err(Error::too_many_sequences(count, n, max));
        }
        let from_text = |text: String| self.text_prompt(&text, add_special_tokens, echo);
        let from_ids = |ids| Ok(self.ids_prompt(ids, echo));
        match prompt {
            Prompt::Text(text) => Ok(vec![from_text(text)?]),
            Prompt::Texts(texts) => texts.into_iter().map(from_text).collect(),
            Prompt::Ids(ids) => Ok(vec![from_ids(ids)?]),
            Prompt::IdLists(lists) => lists.into_iter().map(from_ids).collect(),
        }
    }

    fn text_prompt(
        &self,
        text: &str,
        add_special_tokens: bool,
        echo: bool,
    ) -> Result<PromptTokens> {
        let ids = self.text.encode(text, add_special_tokens)?;
        let echo = echo.then(|| {
            let bos = ids
                .first()
                .filter(|&&id| Some(id) == self.text.special_ids().bos);
            let added_bos =
                bos.is_some_and(|&id| !text.as_bytes().starts_with(self.text.token_bytes(id)));
            Arc::new(Echo {
                text: text.to_owned(),
                ids: ids.clone(),
                added_bos,
            })
        });
        Ok(PromptTokens { ids, echo })
    }

    fn ids_prompt(&self, ids: Vec<u32>, echo: bool) -> PromptTokens {
        let echo = echo.then(|| {
            let text = self.text.decode(&ids, false);
            Arc::new(Echo {
                text,
                ids: ids.clone(),
                added_bos: false,
            })
        });
        PromptTokens { ids, echo }
    }
}

/// Checks that each message has a role, and converts its content to a string, as templates expect: a
/// list of text parts is joined, and missing content becomes an empty text.
fn checked_messages(mut messages: Vec<Value>) -> Result<Vec<Value>> {
    if messages.is_empty() {
        return Err(Error::invalid("messages", "messages must not be empty"));
    }
    for (i, message) in messages.iter_mut().enumerate() {
        let wrong = |key: &str, what: &str| {
            Err(Error::invalid(
                &format!("messages[{i}]{key}"),
                format!("messages[{i}]{key} {what}"),
            ))
        };
        let Some(message) = message.as_object_mut() else {
            return wrong("", "must be an object with role and content");
        };
        if !message.get("role").is_some_and(Value::is_string) {
            return wrong(".role", "must be a string");
        }
        let content = message.entry("content").or_insert(Value::Null);
        match content {
            Value::String(_) => {}
            // As in a reply that only calls tools; templates expect a text.
            Value::Null => *content = "".into(),
            Value::Array(parts) => {
                let texts = parts.iter().map(|part| match part["type"].as_str() {
                    Some("text") => part["text"].as_str(),
                    _ => None,
                });
                match texts.collect::<Option<Vec<_>>>() {
                    Some(texts) => *content = texts.join("\n").into(),
                    None => return wrong(".content", "may contain only parts of type text"),
                }
            }
            _ => return wrong(".content", "must be a string or a list of text parts"),
        }
    }
    Ok(messages)
}
