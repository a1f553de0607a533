//! How the hidden states of a text become its embedding.

use crate::error::clipped;
use std::collections::BTreeMap;
use std::fmt;

/// The kinds of a text that is searched for, and of one that is searched, by which clients and models call them.
const QUERY: &[&str] = &["query", "search_query"];
const DOCUMENT: &[&str] = &["document", "passage", "search_document", "corpus"];

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
    /// The prompt that comes before each text, unless a request chooses one of `prompts`.
    pub prompt: Option<String>,
    /// The model's prompts by their names.
    pub prompts: BTreeMap<String, String>,
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
            prompts: BTreeMap::new(),
        }
    }

    /// The prompt before texts of `kind`, which is the name of a prompt or another name of a query or a document. It is empty
    /// for documents that have none, and for all kinds if the model has no prompts. `None` = no prompt has such a name.
    pub fn prompt_of(&self, kind: &str) -> Option<&str> {
        let spelled = |name: &str| {
            let mut prompts = self.prompts.iter();
            prompts.find_map(|(known, prompt)| known.eq_ignore_ascii_case(name).then_some(prompt))
        };
        let alike = [QUERY, DOCUMENT].into_iter();
        let mut alike = alike.filter(|names| names.contains(&kind)).flatten();
        let found = self.prompts.get(kind).or_else(|| spelled(kind));
        let found = found.or_else(|| alike.find_map(|name| spelled(name)));
        let needs_none = self.prompts.is_empty() || DOCUMENT.contains(&kind);
        found.map(String::as_str).or(needs_none.then_some(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kind` of the embedding models' servers, and the prompt that it has with those of a model.
    #[test]
    fn kinds_and_names_choose_prompts() {
        let spec = |prompts: &[(&str, &str)]| EmbeddingSpec {
            prompts: (prompts.iter())
                .map(|(name, prompt)| (name.to_string(), prompt.to_string()))
                .collect(),
            ..EmbeddingSpec::new(Pooling::Last, true)
        };
        let e5 = spec(&[("query", "query: "), ("passage", "passage: ")]);
        let gemma = spec(&[("query", "Q: "), ("document", "D: "), ("Clustering", "C: ")]);
        let qwen = spec(&[("query", "Q: ")]);
        let tasks = spec(&[("web_search_query", "W: ")]);
        let none = spec(&[]);
        for (spec, kind, prompt) in [
            (&e5, "query", Some("query: ")),
            (&e5, "search_query", Some("query: ")),
            (&e5, "document", Some("passage: ")),
            (&e5, "search_document", Some("passage: ")),
            (&e5, "clustering", None),
            (&gemma, "passage", Some("D: ")),
            (&gemma, "clustering", Some("C: ")),
            (&qwen, "passage", Some("")),
            (&tasks, "query", None),
            (&tasks, "web_search_query", Some("W: ")),
            (&tasks, "document", Some("")),
            (&none, "query", Some("")),
            (&none, "classification", Some("")),
        ] {
            assert_eq!(spec.prompt_of(kind), prompt, "{kind} of {:?}", spec.prompts);
        }
    }
}
