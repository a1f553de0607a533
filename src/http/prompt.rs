//! Converts all forms of prompts to token ids.

use super::choice::Echo;
use super::context::Context;
use super::messages;
use super::wire::Prompt;
use crate::error::{Error, RequestErrorKind, Result};
use crate::text::Chat;
use serde_json::{Map, Value};
use std::sync::Arc;

/// One prompt of a request.
pub(super) struct PromptTokens {
    pub ids: Vec<u32>,
    /// The prompt to repeat in the reply, if requested.
    pub echo: Option<Arc<Echo>>,
}

impl Context<'_> {
    /// The text of a chat's prompt. The template writes BOS itself.
    ///
    /// # Errors
    /// `Invalid`, naming the message.
    pub(super) fn chat_prompt(
        &self,
        messages: Vec<Value>,
        tools: &[Value],
        add_generation_prompt: Option<bool>,
        extra: Option<Map<String, Value>>,
    ) -> Result<String> {
        let chat = Chat {
            messages: &messages::checked(messages)?,
            tools,
            add_generation_prompt: add_generation_prompt.unwrap_or(true),
            extra: &extra.unwrap_or_default(),
        };
        self.text.render(chat, self.tool_format)
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

    /// The token ids of a prompt. One that must have more tokens than twice the context is refused in a
    /// fraction of the time that they would take; of others, the error can tell how many they are.
    ///
    /// # Errors
    /// `ContextLengthExceeded`.
    pub(super) fn encode(&self, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let max = self.limits.max_model_len;
        let most = max.saturating_mul(2);
        if self.text.prefix_within(prompt, most).len() < prompt.len() {
            // OpenAI's wording, as the engine has it.
            let message = format!(
                "This model's maximum context length is {max} tokens. However, the prompt has more than {most}. Please reduce the length of the prompt."
            );
            let kind = RequestErrorKind::ContextLengthExceeded;
            return Err(Error::request(kind, Some("prompt"), message));
        }
        self.text.encode(prompt, add_special_tokens)
    }

    fn text_prompt(
        &self,
        text: &str,
        add_special_tokens: bool,
        echo: bool,
    ) -> Result<PromptTokens> {
        let ids = self.encode(text, add_special_tokens)?;
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
