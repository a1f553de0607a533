//! Grammars over the ids of the toy models.

use super::VOCAB;
use foretoken::grammar::toy::ToyTokens;
use foretoken::grammar::{Compiler, GrammarSource, GrammarTokens};
use foretoken::sampling::Grammar;
use std::sync::{Arc, LazyLock};

const EOS: [u32; 1] = [5];
const LONG: [&str; 6] = ["ab", "abc", "ba", "cd", "kk", "xy"];

/// Ids are letters, but those below 32 that are not are longer tokens; 5 ends a text.
fn letters() -> ToyTokens {
    let letters = (b'a'..=b'z').map(|letter| vec![letter]);
    let tokens = ToyTokens::new(letters.chain(LONG.map(Vec::from)), &EOS);
    assert_eq!(tokens.count(), VOCAB);
    tokens
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
        let compiler = Compiler::new(Arc::new(letters()));
        let compile = |pattern: &&str| {
            let source = GrammarSource::Regex((*pattern).into());
            compiler.compile("pattern", &source).expect(pattern)
        };
        PATTERNS.iter().map(compile).collect()
    });
    &GRAMMARS
}
