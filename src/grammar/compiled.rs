//! A compiled grammar, which many texts share.

use llguidance::{Matcher, TokenParser};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A compiled grammar. Clones share it.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    /// At the start of a text. What its lexer learns from one text serves the next ones.
    parser: Mutex<TokenParser>,
    vocab_size: usize,
    eos: Box<[u32]>,
    /// Whether it failed while it was used, so that it must not be used again.
    has_failed: AtomicBool,
}

impl Grammar {
    /// The grammar of `parser`, which has read nothing yet.
    pub(super) fn new(parser: TokenParser) -> Self {
        let trie = parser.token_env.tok_trie();
        Self(Arc::new(Compiled {
            vocab_size: trie.vocab_size(),
            eos: trie.eos_tokens().into(),
            parser: Mutex::new(parser),
            has_failed: AtomicBool::new(false),
        }))
    }

    /// The ids that end a text where the grammar can end.
    pub fn eos(&self) -> &[u32] {
        &self.0.eos
    }

    /// Number of ids that the grammar knows.
    pub(super) fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// A parser at the start of a text.
    pub(super) fn matcher(&self) -> Matcher {
        let parser = lock(&self.0.parser).clone();
        Matcher::new(Ok(parser))
    }

    /// Notes that a parser failed.
    pub(super) fn note_failure(&self, error: &str) {
        if !self.0.has_failed.swap(true, Ordering::Relaxed) {
            let line = error.lines().next().unwrap_or_default();
            tracing::warn!("a grammar failed: {line}");
        }
    }

    /// Whether a parser failed, so that it must not be used for other texts.
    pub(super) fn has_failed(&self) -> bool {
        self.0.has_failed.load(Ordering::Relaxed)
    }

    /// Bytes of its lexer, approximately.
    pub(super) fn bytes(&self) -> usize {
        if self.has_failed() {
            // A panic may have left the lexer locked for ever.
            0
        } else {
            lock(&self.0.parser).parser.lexer_stats().num_bytes
        }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// Whether both are the same compiled grammar.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A panic while a lock was held leaves what it protects usable here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
