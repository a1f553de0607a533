//! Reads the bodies of `/tokenize` and `/detokenize`.

use super::context::Context;
use super::headers::Warned;
use super::object::{JsonObject, read_body};
use super::openai::Body;
use super::prompt::WantedTokens;
use super::thinking::ThinkingFields;
use super::tools::Tools;
use super::wire::{self, Detokenize, Tokenize, required};
use foretoken_core::error::{Error, Result};
use schemars::JsonSchema;
use serde::Serialize;

#[derive(Serialize, JsonSchema)]
pub(super) struct Tokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct DetokenizedText {
    prompt: String,
}

impl Context<'_> {
    /// The token ids of the text or the chat in `body`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn tokenize(&self, body: &[u8]) -> Result<Warned<Tokens>> {
        let body: Tokenize = read_body(body)?;
        self.model(body.model.as_deref())?;
        let end = body.prompt_end();
        let mut warnings = Vec::new();
        let tokens = match (body.prompt, body.messages) {
            (Some(prompt), None) => {
                let special = body.add_special_tokens.unwrap_or(true);
                self.encode("prompt", &prompt, special, WantedTokens::Counted)?
            }
            (None, Some(messages)) => {
                let thinking = self.thinking(ThinkingFields {
                    variables: body.chat_template_kwargs,
                    effort: body.reasoning_effort,
                    enable_thinking: body.enable_thinking,
                    thinking: body.thinking,
                    ..ThinkingFields::default()
                })?;
                let tools = Tools::only(body.tools)?;
                let chat = self.chat_prompt(messages, &tools.list, end, thinking.variables)?;
                warnings = tools.warnings;
                let special = body.add_special_tokens.unwrap_or(false);
                self.encode_chat(&chat.prompt, special, WantedTokens::Counted)?
            }
            _ => {
                let message = "exactly one of prompt and messages is required";
                return Err(Error::invalid("prompt", message));
            }
        };
        let answer = Tokens {
            count: tokens.len(),
            max_model_len: self.limits.max_model_len,
            tokens,
        };
        Ok(Warned { answer, warnings })
    }

    /// The number of tokens of a chat's prompt, and what was left out of it.
    ///
    /// # Errors
    /// `Invalid` or `NotFound`, naming the field.
    pub(super) fn chat_tokens(&self, chat: Body<wire::ChatFields>) -> Result<(usize, Vec<String>)> {
        self.model(chat.common.model.as_deref())?;
        let mut fields = chat.fields;
        let end = fields.prompt_end();
        let thinking = ThinkingFields::of_chat(&mut fields);
        let tools = Tools::read(fields.tools, fields.tool_choice)?;
        let messages = fields.messages.unwrap_or_default();
        let thinking = self.thinking(thinking)?;
        let chat = self.chat_prompt(messages, &tools.list, end, thinking.variables)?;
        let special = fields.add_special_tokens.unwrap_or(false);
        let ids = self.encode_chat(&chat.prompt, special, WantedTokens::Counted)?;
        Ok((ids.len(), tools.warnings))
    }

    /// The text of the token ids in `body`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn detokenize(&self, body: &[u8]) -> Result<Warned<DetokenizedText>> {
        let read = [wire::names::<Detokenize>()];
        let body: Detokenize = JsonObject::parse(body, &read)?.fields()?;
        self.model(body.model.as_deref())?;
        let tokens = required("tokens", body.tokens)?;
        let size = self.text.vocab_size();
        match tokens.iter().find(|&&id| id as usize >= size) {
            Some(&id) => Err(Error::unknown_token("tokens", id, size)),
            None => Ok(Warned::from(DetokenizedText {
                prompt: self.text.decode(&tokens, false),
            })),
        }
    }
}
