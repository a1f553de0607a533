//! Texts of one grammar do not know each other.

use super::super::*;
use super::{compiled, compiler};
use foretoken_core::sampling::GrammarState;

/// One branch for each of `letters`, of thousands of states that no other branch has.
fn branches(letters: std::ops::RangeInclusive<char>) -> GrammarSource {
    let branch = |letter: char| format!("{letter}[a-z .,']{{3500,3900}}{letter}");
    let branches: Vec<String> = letters.map(branch).collect();
    GrammarSource::Regex(format!("({})", branches.join("|")))
}

/// The state after `text`, all of whose masks were computed; panics where one does not allow the next letter.
fn read(state: &mut dyn GrammarState, text: &str) {
    for letter in text.chars() {
        let mask = state.mask().expect("the text is not too complex alone");
        assert!(mask.allows(letter as u32), "{letter} is not allowed");
        state.push(letter as u32);
        state.commit();
    }
}

/// Texts that are possible alone are possible together, though their lexer is not large enough for all of them.
#[test]
fn texts_do_not_fail_because_of_others() {
    let grammar = compiled(&branches('A'..='P'));
    let text = |letter: char| format!("{letter}{}{letter}", "word. ".repeat(600));
    let mut texts: Vec<(Box<dyn GrammarState>, String)> = ('A'..='P')
        .map(|letter| (grammar.start(), text(letter)))
        .collect();
    for at in (0..text('A').len()).step_by(100) {
        for (state, text) in &mut texts {
            read(&mut **state, &text[at..text.len().min(at + 100)]);
        }
    }
    for (state, _) in &texts {
        assert!(state.mask().expect("an end").is_within(state.eos()));
    }
}

/// Drafts that are rejected teach the lexer, too, and decide as little.
#[test]
fn a_text_does_not_fail_because_of_its_drafts() {
    let mut state = compiled(&branches('A'..='P')).start();
    for letter in 'A'..='P' {
        let draft = format!("{letter}{}", "word. ".repeat(599));
        draft.bytes().for_each(|byte| state.push(byte.into()));
        assert!(state.mask().is_some_and(|mask| mask.allows('w'.into())));
        state.pop(draft.len());
    }
    read(&mut *state, &format!("C{}C", "word. ".repeat(600)));
}

/// A text that is too complex alone fails, and costs no other text of the grammar anything.
#[test]
fn a_text_that_is_too_complex_fails_alone() {
    let compiler = compiler();
    let source = GrammarSource::Regex("[a-z]{1,60000}|[A-Z]{1,60000}".into());
    let compile = || compiler.compile("field", &source).expect("a good grammar");
    let grammar = compile();
    let mut other = grammar.start();
    read(&mut *other, "LETTERS");
    let mut long = grammar.start();
    for _ in 0..51_000 {
        long.push('a'.into());
        long.commit();
    }
    assert!(long.mask().is_none());
    assert!(long.mask().is_none());
    read(&mut *other, "ANDMORE");
    read(&mut *compile().start(), "letters");
}
