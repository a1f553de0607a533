//! How the hidden states of a text become its embedding.

use crate::error::clipped;
use std::fmt;

/// Which hidden states make the embedding of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Pooling {
    /// The hidden state of the last token.
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

/// How texts become embeddings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingSpec {
    /// The hidden states that make the embedding.
    pub pooling: Pooling,
    /// Whether embeddings are divided by their Euclidean length.
    pub normalize: bool,
    /// The longest input in tokens, if it is shorter than the context.
    pub max_tokens: Option<usize>,
    /// The prompt that comes before each text.
    pub prompt: Option<String>,
}

impl fmt::Display for EmbeddingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.pooling {
            Pooling::Last => "the last hidden state",
            Pooling::Mean => "the mean of the hidden states",
        })?;
        f.write_str(if self.normalize { ", normalized" } else { "" })?;
        if let Some(max) = self.max_tokens {
            write!(f, ", of up to {max} tokens")?;
        }
        match &self.prompt {
            Some(prompt) => write!(f, ", after the prompt {:?}", clipped(prompt)),
            None => Ok(()),
        }
    }
}

impl EmbeddingSpec {
    /// A spec without a prompt and a limit.
    pub fn new(pooling: Pooling, normalize: bool) -> Self {
        Self {
            pooling,
            normalize,
            max_tokens: None,
            prompt: None,
        }
    }
}
