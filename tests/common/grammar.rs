//! Grammars over the ids of the toy models.

use super::VOCAB;
use foretoken::grammar::{Compiler, Grammar, GrammarSource, Tokens};
use std::sync::{Arc, LazyLock};

/// Ids are letters, but those below 32 that are not are longer tokens; 5 ends a text.
struct Letters(Vec<Vec<u8>>);

const EOS: [u32; 1] = [5];
const LONG: [&str; 6] = ["ab", "abc", "ba", "cd", "kk", "xy"];

impl Letters {
    fn new() -> Self {
        let letters = (b'a'..=b'z').map(|letter| vec![letter]);
        let long = LONG.iter().map(|text| text.as_bytes().to_vec());
        let all: Vec<Vec<u8>> = letters.chain(long).collect();
        assert_eq!(all.len(), VOCAB);
        Self(all)
    }
}

impl Tokens for Letters {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        &self.0[id as usize]
    }

    fn is_special(&self, id: u32) -> bool {
        EOS.contains(&id)
    }

    fn eos(&self) -> &[u32] {
        &EOS
    }

    fn encode_part(&self, text: &str) -> Vec<u32> {
        let (mut rest, mut ids) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let fits = |id: &usize| rest.starts_with(&self.0[*id]) && *id as u32 != EOS[0];
            let best = (0..self.0.len())
                .filter(fits)
                .max_by_key(|&id| self.0[id].len());
            let id = best.expect("a letter");
            ids.push(id as u32);
            rest = &rest[self.0[id].len()..];
        }
        ids
    }
}

/// Patterns of texts: with long forced parts, with choices, without an end, and short ones.
const PATTERNS: [&str; 6] = [
    "(a[bc]|kkkkkkkk(x|y)|[g-p]{1,3}zzzzzzzzzzzz)*",
    "mnopqrstuv(abab|cdcd)*wxyzmnop[a-e&&[^f]]",
    "([a-e]{2,5}q)+",
    "(kk)*(ab|abc|ba){3}",
    "abc",
    "[a-eg-z]*",
];

/// The compiled patterns.
pub fn grammars() -> &'static [Grammar] {
    static GRAMMARS: LazyLock<Vec<Grammar>> = LazyLock::new(|| {
        let compiler = Compiler::new(Arc::new(Letters::new()));
        let compile = |pattern: &&str| {
            let source = GrammarSource::Regex((*pattern).into());
            compiler.compile("pattern", &source).expect(pattern)
        };
        PATTERNS.iter().map(compile).collect()
    });
    &GRAMMARS
}
