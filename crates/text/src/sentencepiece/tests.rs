use super::*;
use crate::{Detokenizer, Text};
use std::path::{Path, PathBuf};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Texts and the ids that the package `sentencepiece` has for them, as scripts/check-tokenizer.py wrote them.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let file = path("../../tests/data").join(name);
    let lines = std::fs::read_to_string(&file).expect("is there");
    let case = |line: &str| {
        let case: Value = serde_json::from_str(line).expect("JSON");
        let text = case["text"].as_str().expect("a text").to_owned();
        (
            text,
            serde_json::from_value(case["ids"].clone()).expect("ids"),
        )
    };
    lines.split_terminator('\n').map(case).collect()
}

/// Compares ids, with and without what is put around a text, and texts that are decoded at once and by token.
fn check(text: &Text, cases: &[(String, Vec<u32>)], first: &[u32], last: &[u32]) {
    assert!(cases.len() > 250, "{}", cases.len());
    for (sample, want) in cases {
        let ids = text.encode(sample, false).expect("encodes");
        assert_eq!(&ids, want, "{sample:?}");
        let around = text.encode(sample, true).expect("encodes");
        assert_eq!(around, [first, want, last].concat(), "{sample:?}");
        // The mark for a space is one in a text, too.
        let spaces = sample.replace('▁', " ");
        assert_eq!(text.decode(&around, true), spaces);
        let mut detokenizer = Detokenizer::new();
        let mut streamed: String = ids.iter().map(|&id| detokenizer.push(text, id)).collect();
        streamed += &detokenizer.finish();
        let prefix = if text.pieces.leading_space() { " " } else { "" };
        assert_eq!(streamed, format!("{prefix}{spaces}"));
        assert_eq!(text.prefix_within(sample, ids.len()), sample);
    }
}

fn own(name: &str) -> Text {
    Text::from_gguf(path("../../tests/data").join(name)).expect("loads")
}

#[test]
fn ids_are_those_of_sentencepiece() {
    let text = own("sentencepiece.gguf");
    check(&text, &cases("sentencepiece.jsonl"), &[1], &[]);
    assert_eq!((text.special_ids().bos, text.eos()), (Some(1), Some(2)));
    let turn = text.special_id("<turn>").expect("a control token");
    let ids = text.encode("a<turn>b<tool>", false).expect("encodes");
    assert_eq!(ids[1], turn);
    assert_eq!(text.decode(&ids, true), "ab<tool>");
    assert_eq!(text.decode(&ids, false), "a<turn>b<tool>");
}

#[test]
fn ids_are_those_of_sentencepiece_with_a_space_in_front() {
    let text = own("sentencepiece-prefix.gguf");
    check(&text, &cases("sentencepiece-prefix.jsonl"), &[1], &[2]);
    // A part of a text has none.
    let part = crate::grammar::GrammarTokens::encode_part(&text, "the");
    assert_eq!(text.decode(&part, true), "the");
    assert_eq!(text.token_bytes(part[0])[0], b't');
    // After a special token, one begins again.
    let ids = text.encode("a<turn>a", false).expect("encodes");
    assert_eq!(ids[0], ids[2], "{ids:?}");
}

#[test]
fn ids_of_gemma_are_those_of_sentencepiece() {
    let file = path("../../models/gemma-3-270m.Q4_K_M.gguf");
    assert!(
        file.exists(),
        "{} is missing: run scripts/fetch-gemma3.sh",
        file.display()
    );
    let text = Text::from_gguf(&file).expect("loads");
    assert_eq!(text.vocab_size(), 262_144);
    check(&text, &cases("gemma3.jsonl"), &[2], &[]);
    let turn = text.encode("<start_of_turn>user\n\nHi  you<end_of_turn>\n", false);
    let turn = turn.expect("encodes");
    assert_eq!((turn[0], turn[2], turn[turn.len() - 2]), (105, 108, 106));
    assert_eq!(text.decode(&turn, true), "user\n\nHi  you\n");
}

#[test]
fn a_character_of_bytes_is_streamed_whole() {
    let text = own("sentencepiece.gguf");
    let ids = text.encode("🦀", false).expect("encodes");
    assert_eq!(ids.len(), 4, "this vocabulary has no crab");
    let mut detokenizer = Detokenizer::new();
    let parts: Vec<String> = ids.iter().map(|&id| detokenizer.push(&text, id)).collect();
    assert_eq!(parts, ["", "", "", "🦀"]);
    assert_eq!(text.decode(&ids[..3], true), "\u{FFFD}");
}

#[test]
fn long_texts_take_time_in_proportion() {
    let text = own("sentencepiece.gguf");
    for unit in ["a", " ", "the ", "\n", "-=", "\u{1}é"] {
        let long = unit.repeat((1 << 19) / unit.len());
        let started = std::time::Instant::now();
        assert!(!text.encode(&long, false).expect("encodes").is_empty());
        let took = started.elapsed();
        assert!(took.as_secs() < 60, "{unit:?}: {took:?}");
    }
}

/// The byte tokens, and more.
fn with(more: &[(&str, f32, Kind)]) -> Vec<Token> {
    let bytes = (0..=255u8).map(|byte| Token {
        name: format!("<0x{byte:02X}>"),
        score: 0.,
        kind: Kind::Byte,
    });
    let more = more.iter().map(|&(name, score, kind)| Token {
        name: name.to_owned(),
        score,
        kind,
    });
    bytes.chain(more).collect()
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let refused = |tokens: &[Token], options: Options, why: &str| {
        let error = tokenizer(tokens, None, options).expect_err(why).to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    };
    let none = Options::default();
    let normal = |name| (name, 0., Kind::Normal);
    refused(&with(&[normal("a"), normal("a")]), none, "have one name");
    let long = "a".repeat(MAX_BYTES + 1);
    refused(&with(&[normal(&long)]), none, "257 bytes");
    let nowhere = Options {
        first: Some(999),
        ..none
    };
    refused(&with(&[normal("a")]), nowhere, "bos_token_id is 999");
    let only = Token {
        name: "a".into(),
        score: 0.,
        kind: Kind::Normal,
    };
    refused(&[only], none, "would get lost");
    // All strings of two letters: each of up to 12 letters is made in up to 11 ways.
    let mut names = vec![String::new()];
    let mut at = 0;
    while names.len() < 1 << 12 {
        let name = names[at].clone();
        names.extend([format!("{name}a"), format!("{name}b")]);
        at += 1;
    }
    let many: Vec<_> = names[1..].iter().map(|name| normal(name)).collect();
    assert!(tokenizer(&with(&many), None, none).is_ok());
    let runs: Vec<String> = (1..=MAX_BYTES).map(|len| "a".repeat(len)).collect();
    let runs: Vec<_> = runs.iter().map(|name| normal(name)).collect();
    refused(&with(&runs), none, "16 for each token");
}

#[test]
fn unused_tokens_are_never_made_and_scores_decide() {
    let tokens = with(&[
        ("a", -9., Kind::Normal),
        ("b", -9., Kind::Normal),
        ("c", -9., Kind::Normal),
        ("ab", -2., Kind::Normal),
        ("bc", -1., Kind::Normal),
        ("aa", -3., Kind::Unused),
    ]);
    let tokenizer = tokenizer(&tokens, None, Options::default()).expect("is one");
    let names = |text: &str| {
        let encoding = tokenizer.encode(text, false).expect("encodes");
        encoding.get_tokens().to_vec()
    };
    assert_eq!(names("abc"), ["a", "bc"]);
    assert_eq!(names("abab"), ["ab", "ab"]);
    assert_eq!(names("aa"), ["a", "a"]);
}

/// GGUF files of Gemma 4 give merges, and their scores say nothing.
#[test]
fn merges_that_are_given_decide() {
    let names = ["▁", "a", "b", "▁a", "ab"];
    let tokens = with(&names.map(|name| (name, 0., Kind::Normal)));
    let merges = [("a", "b"), ("▁", "a")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    for (merges, want) in [
        (merges.to_vec(), ["▁", "ab"]),
        (merges.iter().rev().cloned().collect(), ["▁a", "b"]),
    ] {
        let tokenizer = tokenizer(&tokens, Some(merges), Options::default()).expect("is one");
        let encoding = tokenizer.encode(" ab", false).expect("encodes");
        assert_eq!(encoding.get_tokens(), want);
    }
    let foreign = vec![("a".to_owned(), "z".to_owned())];
    tokenizer(&tokens, Some(foreign), Options::default()).expect_err("z is no token");
}
