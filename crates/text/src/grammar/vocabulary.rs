//! A model's vocabulary as llguidance reads it.

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use std::sync::Arc;

/// A tokenizer, as far as grammars need it.
pub trait GrammarTokens: Send + Sync {
    /// Number of ids: the largest plus one. A model may have more; no grammar allows those.
    fn count(&self) -> usize;

    /// The bytes that `id` adds to a text; for a special token, its name.
    fn bytes(&self, id: u32) -> &[u8];

    /// Whether `id` marks structure and is no text. Only a grammar that names it allows it.
    fn is_special(&self, id: u32) -> bool;

    /// The ids that end a text.
    fn eos(&self) -> &[u32];

    /// The ids of a part of a text: nothing is put in front, and names of special tokens are text.
    fn encode_part(&self, text: &str) -> Vec<u32>;
}

/// Tokens whose bytes fill a name longer than this are left out: the trie's nodes count their depth in 10 bits.
const MAX_TOKEN_BYTES: usize = 1000;

struct GrammarVocabulary {
    tokens: Arc<dyn GrammarTokens>,
    trie: TokTrie,
}

impl TokenizerEnv for GrammarVocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| self.tokens.encode_part(text);
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }
}

/// The vocabulary of `tokens`; `None` if no token ends a text.
pub(super) fn vocabulary(tokens: Arc<dyn GrammarTokens>) -> Option<TokEnv> {
    let count = tokens.count();
    let mut eos = tokens.eos().to_vec();
    eos.retain(|&id| (id as usize) < count);
    let words: Vec<Vec<u8>> = (0..count as u32)
        .map(|id| word(&*tokens, &eos, id))
        .collect();
    let info = TokRxInfo::new(count as u32, *eos.first()?);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
    Some(Arc::new(GrammarVocabulary { tokens, trie }))
}

/// The bytes of `id` in the trie; empty = never allowed. Special tokens begin with a byte that no text has.
fn word(tokens: &dyn GrammarTokens, eos: &[u32], id: u32) -> Vec<u8> {
    let bytes = tokens.bytes(id);
    if bytes.len() > MAX_TOKEN_BYTES {
        return Vec::new();
    }
    if tokens.is_special(id) || eos.contains(&id) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
    } else {
        bytes.to_vec()
    }
}
