//! Grammars that a text must follow, as sampling sees them.

use super::mask::Mask;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A compiled grammar, which many texts share.
#[derive(Clone)]
pub struct Grammar(Arc<dyn GrammarRules>);

/// The rules of a grammar, as its compiler returns them.
pub trait GrammarRules: Send + Sync {
    /// The ids that end a text.
    fn eos(&self) -> &[u32];

    /// The state of an empty text.
    fn start(self: Arc<Self>) -> Box<dyn GrammarState>;
}

/// Where one text is in its grammar. A text is what was committed, and what was pushed since.
pub trait GrammarState: Debug + Send + Sync {
    /// The ids that end the text.
    fn eos(&self) -> &[u32];

    /// Adds a token, which the grammar need not allow.
    fn push(&mut self, token: u32);

    /// Removes the last `count` tokens, at most those pushed since the last commit.
    fn pop(&mut self, count: usize);

    /// Commits the pushed tokens, which then stay for good.
    fn commit(&mut self);

    /// The ids that may come next: none after a token that the grammar does not allow; after the end, those
    /// that end a text, which no longer matter. `None` = the text has made the grammar too complex to go on.
    fn mask(&self) -> Option<&Mask>;

    /// Computes the masks after the text and after each node of a draft, parents first (`None` = the text), until
    /// `stop` is set.
    fn prepare(&mut self, tokens: &[u32], parents: &[Option<u16>], stop: &AtomicBool);

    /// Whether the grammar can read each node of such a draft and those above it, and the text has not ended before it.
    /// Cheaper than masks, which may forbid more: other tokens for bytes that are forced.
    fn accepts(&mut self, tokens: &[u32], parents: &[Option<u16>]) -> Vec<bool>;

    /// The next tokens, at most `max`, where the grammar allows only one each; without those that end the text.
    fn forced(&mut self, max: usize) -> Vec<u32>;

    /// A state of its own at the same place.
    fn cloned(&self) -> Box<dyn GrammarState>;
}

impl Grammar {
    /// A grammar with these rules.
    pub fn new(rules: Arc<impl GrammarRules + 'static>) -> Self {
        Self(rules)
    }

    /// The ids that end a text.
    pub fn eos(&self) -> &[u32] {
        self.0.eos()
    }

    /// The state of an empty text.
    pub fn start(&self) -> Box<dyn GrammarState> {
        self.0.clone().start()
    }
}

impl Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// Whether they are the same grammar, compiled once.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Clone for Box<dyn GrammarState> {
    fn clone(&self) -> Self {
        self.cloned()
    }
}
