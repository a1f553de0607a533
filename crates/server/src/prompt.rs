//! Converts all forms of prompts to token ids.

use super::choice::Echo;
use super::context::Context;
use super::conversation::{self, ChatMessage, PromptEnd, checked};
use super::wire::{PromptInput, wrong};
use foretoken_core::error::{Error, RequestErrorKind, Result};
use foretoken_text::{Chat, InfillText, LiteralText, RenderedChat};
use serde_json::{Map, Value, to_value};
use std::borrow::Cow;
use std::sync::Arc;

/// The field of chats.
const MESSAGES: &str = conversation::FIELD;

/// The tokens that a text may have which is only counted, if the context does not allow more: clients count what they may
/// have to shorten.
const MAX_COUNTED: usize = 1 << 18;

/// One prompt of a request.
pub(super) struct PromptTokens {
    pub ids: Vec<u32>,
    /// The prompt to repeat in the reply, if requested.
    pub echo: Option<Arc<Echo>>,
}

/// The options with which a completion's prompts are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptOptions<'a> {
    pub add_special_tokens: bool,
    /// Whether the prompt is repeated in the reply.
    pub echo: bool,
    /// Number of the prompt's last tokens that are kept; `None` = all.
    pub keep: Option<usize>,
    /// The text after the one that is asked for.
    pub suffix: Option<&'a str>,
}

/// The tokens of a text that are wanted.
#[derive(Debug, Clone, Copy)]
pub(super) enum WantedTokens {
    /// All, because the text must fit the context.
    Fitting,
    /// So many of the last ones.
    Last(usize),
    /// All, of a text that is counted, and not answered. It may be longer than the context.
    Counted,
}

impl From<Option<usize>> for WantedTokens {
    fn from(keep: Option<usize>) -> Self {
        keep.map_or(Self::Fitting, Self::Last)
    }
}

impl Context<'_> {
    /// The prompt of a chat. The template writes BOS itself.
    ///
    /// # Errors
    /// `Invalid`, naming the message.
    pub(super) fn chat_prompt(
        &self,
        messages: Vec<ChatMessage>,
        tools: &[Value],
        end: PromptEnd,
        extra: Option<Map<String, Value>>,
    ) -> Result<RenderedChat> {
        let messages = checked(messages)?;
        let is_open = end.is_open(&messages)?;
        let messages: serde_json::Result<Vec<Value>> = messages.iter().map(to_value).collect();
        let mut messages = messages.map_err(|e| Error::internal(format!("messages: {e}")))?;
        let (mut tools, mut extra) = (Cow::from(tools), extra.unwrap_or_default());
        if let Some(literal) = self.literal {
            let fields = [(MESSAGES, &mut messages), ("tools", tools.to_mut())];
            for (field, values) in fields {
                for value in values {
                    literal.mark(field, value)?;
                }
            }
            extra = literal.mark_map("chat_template_kwargs", extra)?;
        }
        let chat = Chat {
            messages: &messages,
            tools: &tools,
            add_generation_prompt: end.add_generation_prompt.unwrap_or(true),
            extra: &extra,
        };
        if is_open {
            return self.text.render_open(chat, self.tool_format);
        }
        Ok(RenderedChat {
            prompt: self.text.render(chat, self.tool_format)?,
            continued: None,
        })
    }

    /// The token ids of a chat's prompt that are wanted.
    ///
    /// # Errors
    /// The errors of [`Context::encode`].
    pub(super) fn encode_chat(
        &self,
        prompt: &str,
        add_special_tokens: bool,
        wanted: WantedTokens,
    ) -> Result<Vec<u32>> {
        self.encode_with(self.literal, MESSAGES, (prompt, add_special_tokens), wanted)
    }

    /// The token ids of a completion's prompts; texts get BOS with `add_special_tokens`. The number of
    /// prompts times `n` is limited to what the queue can hold.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn prompts(
        &self,
        prompt: PromptInput,
        options: &PromptOptions<'_>,
        n: usize,
    ) -> Result<Vec<PromptTokens>> {
        let count = match &prompt {
            PromptInput::Text(_) | PromptInput::Ids(_) => 1,
            PromptInput::Texts(list) => list.len(),
            PromptInput::IdLists(list) => list.len(),
        };
        if count == 0 {
            return wrong("prompt", "must not be empty");
        }
        // Checked before any prompt is tokenized or copied n times.
        let max = self.limits.max_waiting;
        if count.saturating_mul(n) > max {
            return Err(Error::too_many_sequences(count, n, max));
        }
        let from_text = |text: String| match options.suffix {
            None => self.text_prompt(&text, options),
            Some(suffix) => self.infill_prompt(&text, suffix, options),
        };
        let from_ids = |ids| match options.suffix {
            None => Ok(self.ids_prompt(ids, options)),
            Some(_) => wrong("suffix", "is possible only if prompt is text: leave it out"),
        };
        match prompt {
            PromptInput::Text(text) => Ok(vec![from_text(text)?]),
            PromptInput::Texts(texts) => texts.into_iter().map(from_text).collect(),
            PromptInput::Ids(ids) => Ok(vec![from_ids(ids)?]),
            PromptInput::IdLists(lists) => lists.into_iter().map(from_ids).collect(),
        }
    }

    /// Returns the number of a prompt's last tokens that are kept, if the request sets it. -1 = as many as the
    /// context leaves beside `max_tokens`, and at least one.
    ///
    /// # Errors
    /// `Invalid`.
    pub(super) fn kept(
        &self,
        asked: Option<i64>,
        max_tokens: Option<usize>,
    ) -> Result<Option<usize>> {
        const FIELD: &str = "truncate_prompt_tokens";
        let max = self.limits.max_model_len;
        match asked {
            None => Ok(None),
            Some(-1) => Ok(Some(max.saturating_sub(max_tokens.unwrap_or(1)).max(1))),
            Some(count) => match usize::try_from(count) {
                Ok(count) if (1..=max).contains(&count) => Ok(Some(count)),
                _ => wrong(
                    FIELD,
                    format!("must be between 1 and {max}, or -1 for what fits, not {count}"),
                ),
            },
        }
    }

    /// The token ids of a text that are wanted; the text came in `field`. If only the last ones are, and the tokenizer adds
    /// a BOS, the first of them is replaced by it.
    ///
    /// A text that must have more tokens than twice the context is refused in a fraction of the time that they would take;
    /// of others, the error can tell how many they are.
    ///
    /// # Errors
    /// `ContextLengthExceeded`, unless only the last ones are wanted. Of a text that is counted: if it has more than
    /// [`MAX_COUNTED`] tokens, and more than twice the context.
    pub(super) fn encode(
        &self,
        field: &str,
        text: &str,
        add_special_tokens: bool,
        wanted: WantedTokens,
    ) -> Result<Vec<u32>> {
        self.encode_with(None, field, (text, add_special_tokens), wanted)
    }

    /// The first `keep` token ids of a text. Those that the tokenizer adds before and after a text are kept, too, and
    /// count.
    ///
    /// # Errors
    /// `Internal`, if the tokenizer fails.
    pub(super) fn encode_first(
        &self,
        text: &str,
        add_special_tokens: bool,
        keep: usize,
    ) -> Result<Vec<u32>> {
        // Which has at least as many tokens, if the text has.
        let start = self.text.prefix_within(text, keep);
        let mut ids = self.text.encode(start, add_special_tokens)?;
        if ids.len() > keep {
            let own = self.text.encode(start, false)?;
            let added = ids.len().saturating_sub(own.len());
            let before = (0..=added).find(|&at| ids[at..].starts_with(&own));
            let before = before.unwrap_or(0);
            let end = before + own.len();
            ids.drain((before + keep.saturating_sub(added)).min(end)..end);
        }
        Ok(ids)
    }

    /// [`Context::encode`]; with `literal`, what clients write are no special tokens.
    fn encode_with(
        &self,
        literal: Option<&LiteralText>,
        field: &str,
        (prompt, add_special_tokens): (&str, bool),
        wanted: WantedTokens,
    ) -> Result<Vec<u32>> {
        let max = self.limits.max_model_len;
        let most = match wanted {
            WantedTokens::Fitting => max.saturating_mul(2),
            WantedTokens::Last(_) => usize::MAX,
            WantedTokens::Counted => max.saturating_mul(2).max(MAX_COUNTED),
        };
        if self.text.prefix_within(prompt, most).len() < prompt.len() {
            // OpenAI's wording, as the engine has it.
            let message = format!(
                "This model's maximum context length is {max} tokens. However, the {field} has more than {most}. Please reduce the length of the {field}."
            );
            let kind = RequestErrorKind::ContextLengthExceeded;
            return Err(Error::request(kind, Some(field), message));
        }
        let ids = match literal {
            Some(literal) => literal.encode(prompt, add_special_tokens),
            None => self.text.encode(prompt, add_special_tokens),
        };
        let mut ids = ids.map_err(|e| e.renamed(&[("prompt", field)]))?;
        let WantedTokens::Last(keep) = wanted else {
            return Ok(ids);
        };
        let bos = ids.first().copied().filter(|_| self.adds_bos(prompt, &ids));
        keep_last(&mut ids, keep);
        if let (Some(first), Some(bos)) = (ids.first_mut(), bos) {
            *first = bos;
        }
        Ok(ids)
    }

    /// Whether the first of a text's `ids` is a BOS that the tokenizer has added.
    fn adds_bos(&self, text: &str, ids: &[u32]) -> bool {
        let bos = self.text.special_ids().bos;
        let bos = ids.first().filter(|&&id| Some(id) == bos);
        bos.is_some_and(|&id| !text.as_bytes().starts_with(self.text.token_bytes(id)))
    }

    fn text_prompt(&self, text: &str, options: &PromptOptions<'_>) -> Result<PromptTokens> {
        let special = options.add_special_tokens;
        let mut ids = self.encode("prompt", text, special, options.keep.into())?;
        if ids.is_empty() {
            // A text that begins.
            let bos = self.text.special_ids().bos.filter(|_| special);
            let bos = bos.ok_or_else(|| {
                let why = if special {
                    "the model has no BOS token with which it could begin a text"
                } else {
                    "add_special_tokens is false"
                };
                Error::invalid(
                    "prompt",
                    format!("prompt must have at least one token: {why}"),
                )
            })?;
            ids.push(bos);
        }
        let echo = options.echo.then(|| {
            let is_cut = options.keep.is_some_and(|keep| keep == ids.len());
            let added_bos = self.adds_bos(text, &ids);
            let text = if is_cut {
                self.text.decode(&ids[usize::from(added_bos)..], false)
            } else {
                text.to_owned()
            };
            Arc::new(Echo {
                text,
                ids: ids.clone(),
                added_bos,
            })
        });
        Ok(PromptTokens { ids, echo })
    }

    /// A prompt that asks for what is between `before` and `after`.
    fn infill_prompt(
        &self,
        before: &str,
        after: &str,
        options: &PromptOptions<'_>,
    ) -> Result<PromptTokens> {
        for (field, is_set) in [
            ("echo", options.echo),
            ("truncate_prompt_tokens", options.keep.is_some()),
        ] {
            if is_set {
                return wrong(field, "is not possible together with suffix: leave one out");
            }
        }
        // Whatever is too long is refused before it is encoded.
        for text in [before, after] {
            let most = self.limits.max_model_len.saturating_mul(2);
            if self.text.prefix_within(text, most).len() < text.len() {
                self.encode("prompt", text, false, WantedTokens::Fitting)?;
            }
        }
        let between = InfillText {
            before,
            after,
            files: &[],
        };
        let special = options.add_special_tokens;
        let prompt = self.text.infill(between, special, None)?;
        let prompt = prompt.ok_or_else(|| {
            Error::invalid(
                "suffix",
                "suffix is not supported by this model: its tokenizer has no fill-in-the-middle tokens; leave it out",
            )
        })?;
        Ok(PromptTokens {
            ids: prompt.ids,
            echo: None,
        })
    }

    fn ids_prompt(&self, mut ids: Vec<u32>, options: &PromptOptions<'_>) -> PromptTokens {
        keep_last(&mut ids, options.keep.unwrap_or(usize::MAX));
        let echo = options.echo.then(|| {
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

pub(super) fn keep_last(ids: &mut Vec<u32>, keep: usize) {
    ids.drain(..ids.len().saturating_sub(keep));
}
