//! Grammars over the ids of the toy models, and marks of thoughts.

use super::VOCAB;
use foretoken::grammar::toy::ToyTokens;
use foretoken::grammar::{Compiler, GrammarSource, GrammarTokens};
use foretoken::sampling::{Grammar, ThoughtMarks, TokenBytes};
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

/// The same letters, for marks of thoughts.
struct Shown(ToyTokens);

impl TokenBytes for Shown {
    fn bytes(&self, id: u32) -> &[u8] {
        if (id as usize) < VOCAB {
            self.0.bytes(id)
        } else {
            &[]
        }
    }
}

/// The text of `tokens`.
pub fn spelled(tokens: &[u32]) -> String {
    let letters = Shown(letters());
    let bytes = tokens.iter().flat_map(|&id| letters.bytes(id)).copied();
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// Marks of thoughts: `c` opens one. One token closes it, or two do. A toy writes most of them now and then by itself, in
/// these tokens or in others.
pub fn thoughts() -> &'static [Arc<ThoughtMarks>] {
    static THOUGHTS: LazyLock<Vec<Arc<ThoughtMarks>>> = LazyLock::new(|| {
        let tokens = Arc::new(Shown(letters()));
        let marks = |(end, closing): (&str, &[u32])| {
            let marks = ThoughtMarks::new(&["c"], &[end], closing.to_vec(), tokens.clone());
            Arc::new(marks.expect("it writes the end"))
        };
        let all: [(&str, &[u32]); 4] = [
            ("xyab", &[31, 26]),
            ("q", &[16]),
            ("ab", &[26]),
            ("ba", &[1, 0]),
        ];
        all.map(marks).into()
    });
    &THOUGHTS
}
