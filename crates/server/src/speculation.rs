//! The rounds of a choice, which `stream_options.include_speculation` adds to the chunks of a stream.

use foretoken_engine::{Fate, VerifiedDraft, VerifiedNode};
use foretoken_text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;

/// A round of a choice.
#[derive(Debug, PartialEq)]
pub(super) struct Round {
    round: VerifiedDraft,
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
    pub fn new(round: VerifiedDraft) -> Self {
        // One more than stand, and no more room than that: a round waits for its client.
        let tokens = Vec::with_capacity(round.path().count() + 1);
        Self { round, tokens }
    }

    /// Adds the next token and the text that is complete with it.
    pub fn push(&mut self, id: u32, new: &str) {
        self.tokens.push((id, new.to_owned()));
    }

    pub fn shown<'a>(&'a self, text: &'a Text) -> RoundText<'a> {
        let path: Vec<(usize, &VerifiedNode)> = self.round.path().take(self.tokens.len()).collect();
        let node = |(at, node): (usize, &VerifiedNode)| DraftToken {
            token: text.token_text(node.token),
            parent: node.parent,
            source: node.source.name(),
            accepted: path.iter().any(|(accepted, _)| *accepted == at),
        };
        let own = if self.round.is_corrected() {
            "correction"
        } else {
            "target"
        };
        let token = |(i, (id, new)): (usize, &'a (u32, String))| {
            let node = path.get(i).map(|(_, node)| node);
            RoundToken {
                token: text.token_text(*id),
                text: new,
                source: node.map_or(own, |node| node.source.name()),
                lossy: node
                    .is_some_and(|node| node.fate == Fate::AcceptedLossily)
                    .then_some(true),
            }
        };
        RoundText {
            draft: self.round.nodes().iter().enumerate().map(node).collect(),
            tokens: self.tokens.iter().enumerate().map(token).collect(),
        }
    }
}
