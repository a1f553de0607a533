//! Reads the bodies of `/tokenize` and `/detokenize`.

use super::context::Context;
use super::object::JsonObject;
use super::prompt::with_effort;
use super::tools::Tools;
use super::wire::{self, Detokenize, Tokenize, required};
use foretoken_core::error::{Error, Result};

impl Context<'_> {
    /// The token ids of the text or the chat in `body`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn tokenize(&self, body: &[u8]) -> Result<Vec<u32>> {
        let read = [wire::names::<Tokenize>()];
        let body = JsonObject::parse(body, &read)?;
        body.check_others(&read)?;
        let body: Tokenize = body.fields()?;
        self.model(body.model.as_deref())?;
        match (body.prompt, body.messages) {
            (Some(prompt), None) => {
                self.encode("prompt", &prompt, body.add_special_tokens.unwrap_or(true))
            }
            (None, Some(messages)) => {
                let prompt = self.chat_prompt(
                    messages,
                    &Tools::only(body.tools)?,
                    body.add_generation_prompt,
                    with_effort(body.chat_template_kwargs, body.reasoning_effort),
                )?;
                let special = body.add_special_tokens.unwrap_or(false);
                self.encode_chat(&prompt, special, None)
            }
            _ => Err(Error::invalid(
                "prompt",
                "exactly one of prompt and messages is required",
            )),
        }
    }

    /// The text of the token ids in `body`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub(super) fn detokenize(&self, body: &[u8]) -> Result<String> {
        let read = [wire::names::<Detokenize>()];
        let body: Detokenize = JsonObject::parse(body, &read)?.fields()?;
        self.model(body.model.as_deref())?;
        let tokens = required("tokens", body.tokens)?;
        let size = self.text.vocab_size();
        match tokens.iter().find(|&&id| id as usize >= size) {
            Some(&id) => Err(Error::unknown_token("tokens", id, size)),
            None => Ok(self.text.decode(&tokens, false)),
        }
    }
}
