//! The rounds of a choice, which `stream_options.include_speculation` adds to the chunks of a stream.

use crate::engine;
use crate::text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;

/// A round of a choice.
#[derive(Debug, PartialEq)]
pub(super) struct Round {
    round: Box<engine::VerifiedDraft>,
    /// The tokens that count, each with what it adds to the text.
    tokens: Vec<(u32, String)>,
}

/// What a round drafted, and the tokens that it added.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Round")]
pub(super) struct RoundText<'a> {
    draft: Vec<DraftToken<'a>>,
    tokens: Vec<RoundToken<'a>>,
}

#[derive(Serialize, JsonSchema)]
struct DraftToken<'a> {
    token: Cow<'a, str>,
    /// The place in the draft of the token before.
    parent: Option<u16>,
    source: &'static str,
    accepted: bool,
}

#[derive(Serialize, JsonSchema)]
struct RoundToken<'a> {
    token: Cow<'a, str>,
    text: &'a str,
    source: &'static str,
    /// True if a lossy rule accepted it in the place of the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    lossy: Option<bool>,
}

impl Round {
    pub fn new(round: Box<engine::VerifiedDraft>) -> Self {
        let tokens = Vec::new();
        Self { round, tokens }
    }

    /// Adds the next token and the text that is complete with it.
    pub fn push(&mut self, id: u32, new: &str) {
        self.tokens.push((id, new.to_owned()));
    }

    pub fn shown<'a>(&'a self, text: &'a Text) -> RoundText<'a> {
        let draft = &self.round.draft;
        let accepted = &self.round.path[..self.round.path.len().min(self.tokens.len())];
        let node = |node: usize| DraftToken {
            token: text.token_text(draft.tokens[node]),
            parent: draft.parents[node],
            source: draft.sources[node].name(),
            accepted: accepted.contains(&node),
        };
        let own = if self.round.is_corrected() {
            "correction"
        } else {
            "target"
        };
        let token = |(i, (id, new)): (usize, &'a (u32, String))| RoundToken {
            token: text.token_text(*id),
            text: new,
            source: (self.round.source(i)).map_or(own, |source| source.name()),
            lossy: (self.round.path.get(i))
                .is_some_and(|node| self.round.lossy.contains(node))
                .then_some(true),
        };
        RoundText {
            draft: (0..draft.len()).map(node).collect(),
            tokens: self.tokens.iter().enumerate().map(token).collect(),
        }
    }
}
