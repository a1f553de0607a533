//! The flags of `foretoken tokenizer`.

use crate::error::{Error, Result};
use crate::train::tokenizer;
use clap::Args;
use std::path::PathBuf;

/// The flags of `foretoken tokenizer`.
#[derive(Debug, Clone, Args)]
pub struct TokenizerFlags {
    /// What to learn from; may be given several times. JSON lines (.jsonl) as `foretoken generate`
    /// writes them, else plain text.
    #[arg(long, value_name = "FILE", required = true)]
    pub corpus: Vec<PathBuf>,
    /// Token ids, those of the 256 bytes and of the special tokens included.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub vocab_size: usize,
    /// Jinja file with the chat template [default: ChatML].
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Folder for tokenizer.json and tokenizer_config.json.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

impl TokenizerFlags {
    pub(super) fn validate(self) -> Result<tokenizer::Options> {
        let least = tokenizer::MIN_IDS;
        if self.vocab_size < least {
            return Err(Error::setup(format!(
                "--vocab-size must be at least {least}: the bytes and the special tokens have an id each"
            )));
        }
        Ok(tokenizer::Options {
            corpus: self.corpus,
            vocab_size: self.vocab_size,
            chat_template: self.chat_template,
            out: self.out,
        })
    }
}
