//! A compiled grammar, which many texts share.

use foretoken_core::error::caught_here;
use llguidance::{Matcher, TokenParser};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A compiled grammar.
pub(super) struct CompiledGrammar {
    /// The parser with a lexer that no text has used.
    unused: Mutex<TokenParser>,
    /// The parser with the lexer that texts share, so that what it learns from one text serves the next ones.
    shared: Mutex<StartParser>,
    /// Bytes of the unused lexer and of the shared one, approximately. The size of the shared lexer is noted when a text
    /// uses it, because asking for it would wait for that text.
    unused_bytes: usize,
    shared_bytes: AtomicUsize,
    /// Number of ids that the grammar knows.
    pub(super) vocab_size: usize,
    /// The ids that end a text where the grammar can end.
    pub(super) eos: Box<[u32]>,
}

/// A parser at the start of a text. Clones share its lexer.
///
/// The number of states that a lexer may learn is limited, and the states that all texts taught it count together. A
/// lexer that fails, fails for good, so texts then go on with another one: see [`CompiledGrammar::newer_than`] and
/// [`CompiledGrammar::unused`].
#[derive(Clone)]
pub(super) struct StartParser {
    parser: TokenParser,
    /// Number of lexers that texts shared before this one.
    generation: u64,
}

impl StartParser {
    /// A matcher that has read nothing yet.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(Ok(self.parser.clone()))
    }

    /// Whether the lexer has reached a limit, so that what it says is wrong.
    pub fn has_failed(&self) -> bool {
        // A panic in another text may have left it locked for ever.
        let error = caught_here(|| self.parser.parser.get_error());
        !matches!(error, Ok(None))
    }

    /// Bytes of the lexer, approximately.
    fn bytes(&self) -> usize {
        caught_here(|| self.parser.parser.lexer_stats().num_bytes).unwrap_or_default()
    }
}

impl CompiledGrammar {
    /// The grammar of `parser`, which has read nothing yet.
    pub(super) fn new(parser: TokenParser) -> Self {
        let trie = parser.token_env.tok_trie();
        let bytes = parser.parser.lexer_stats().num_bytes;
        Self {
            vocab_size: trie.vocab_size(),
            eos: trie.eos_tokens().into(),
            unused_bytes: bytes,
            shared_bytes: bytes.into(),
            shared: Mutex::new(StartParser {
                parser: parser.deep_clone(),
                generation: 0,
            }),
            unused: Mutex::new(parser),
        }
    }

    /// A parser at the start of a text, with the lexer that texts share.
    pub(super) fn start_parser(&self) -> StartParser {
        lock(&self.shared).clone()
    }

    /// A parser at the start of a text, with the lexer that texts share; `None` if that lexer is not newer than the one
    /// of `known`.
    pub(super) fn newer_than(&self, known: &StartParser) -> Option<StartParser> {
        let start = self.start_parser();
        (start.generation > known.generation).then_some(start)
    }

    /// A parser at the start of a text, with a lexer that no text has used.
    pub(super) fn unused(&self) -> StartParser {
        let generation = lock(&self.shared).generation + 1;
        StartParser {
            parser: lock(&self.unused).deep_clone(),
            generation,
        }
    }

    /// Texts share the lexer of `start` from now on, unless they share a newer one.
    pub(super) fn share(&self, start: &StartParser) {
        let mut shared = lock(&self.shared);
        if start.generation > shared.generation {
            *shared = start.clone();
        }
    }

    /// Bytes, approximately.
    pub(super) fn bytes(&self) -> usize {
        self.unused_bytes + self.shared_bytes.load(Ordering::Relaxed)
    }

    /// Notes how large the lexer of `start` is, which may be shared.
    pub(super) fn note_size(&self, start: &StartParser) {
        self.shared_bytes.store(start.bytes(), Ordering::Relaxed);
    }
}

/// A panic while a lock was held leaves what it protects usable here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
