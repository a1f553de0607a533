//! The rounds of a choice, which `stream_options.include_speculation` adds to the chunks of a stream.

use crate::engine;
use crate::text::Text;
use serde_json::{Value, json};

/// A round of a choice.
#[derive(Debug, PartialEq)]
pub(super) struct Round {
    round: Box<engine::Round>,
    /// The tokens that count, each with what it adds to the text.
    tokens: Vec<(u32, String)>,
}

impl Round {
    pub fn new(round: Box<engine::Round>) -> Self {
        let tokens = Vec::new();
        Self { round, tokens }
    }

    /// Adds the next token and the text that is complete with it.
    pub fn push(&mut self, id: u32, new: &str) {
        self.tokens.push((id, new.to_owned()));
    }

    /// `{"draft": [{"token", "parent", "source", "accepted"}], "tokens": [{"token", "text", "source"}]}`.
    pub fn json(&self, text: &Text) -> Value {
        let draft = &self.round.draft;
        let accepted = &self.round.path[..self.round.path.len().min(self.tokens.len())];
        let node = |node: usize| {
            json!({
                "token": text.token_text(draft.tokens[node]),
                "parent": draft.parents[node],
                "source": draft.sources[node].name(),
                "accepted": accepted.contains(&node),
            })
        };
        let token = |(i, (id, new)): (usize, &(u32, String))| {
            let own = || match self.round.is_corrected() {
                true => "correction",
                false => "target",
            };
            let source = (self.round.source(i)).map_or_else(own, |source| source.name());
            json!({"token": text.token_text(*id), "text": new, "source": source})
        };
        json!({
            "draft": (0..draft.len()).map(node).collect::<Vec<_>>(),
            "tokens": self.tokens.iter().enumerate().map(token).collect::<Vec<_>>(),
        })
    }
}
