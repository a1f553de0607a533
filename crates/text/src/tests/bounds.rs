//! Tests of what is known of a text, or refused, before the text is encoded.

use super::*;

/// A Unigram tokenizer like those of SentencePiece, with or without a token for each byte.
fn unigram(bytes: bool, normalizer: Value, splitter: Value) -> Value {
    let mut vocab = vec![json!(["<unk>", 0.0])];
    if bytes {
        vocab.extend((0..=255u8).map(|byte| json!([format!("<0x{byte:02X}>"), -9.0])));
    }
    // No `z`, which is unknown.
    let letters = "abcdefghijklmnopqrstuvwxy0123456789,.▁é中".chars();
    vocab.extend(letters.map(|c| json!([c.to_string(), -3.0])));
    for name in ["▁a", "ab", "▁the", "quick", "12", "▁▁▁▁", "aaaaaaaa", "a b"] {
        vocab.push(json!([name, -4.0]));
    }
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": splitter,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": bytes},
    })
}

/// A table of SentencePiece that changes a tab, joins `A` to `a`, and drops `B`.
fn precompiled() -> Value {
    // Of a character, the unit 256 ^ c of a double array, and its value at `leaf`, which begins a string.
    let mut units = vec![0u32; 1024];
    units[0] = 256 << 10;
    for (i, (byte, value)) in [(b'\t', 0), (b'A', 2), (b'B', 4)].into_iter().enumerate() {
        let (unit, leaf) = (256 ^ usize::from(byte), 600 + i);
        units[unit] = ((unit ^ leaf) as u32) << 10 | 1 << 8 | u32::from(byte);
        units[leaf] = value;
    }
    let mut table = (4 * units.len() as u32).to_le_bytes().to_vec();
    table.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    table.extend(b" \0a\0\0");
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let base64 = |three: &[u8]| {
        let bits = (0..3).fold(0, |bits, i| {
            bits << 8 | usize::from(three.get(i).copied().unwrap_or(0))
        });
        let digit = |i: usize| {
            if i <= three.len() {
                char::from(alphabet[bits >> (18 - 6 * i) & 63])
            } else {
                '='
            }
        };
        (0..4).map(digit).collect::<String>()
    };
    let table: String = table.chunks(3).map(base64).collect();
    json!({"type": "Precompiled", "precompiled_charsmap": table})
}

/// Tokenizers of all kinds for which there is a bound: with and without NFC, byte-level, SentencePiece,
/// with a special token that takes the white space around it, and Unigram.
fn bounded() -> &'static [Text] {
    static TEXTS: LazyLock<Vec<Text>> = LazyLock::new(|| {
        let smollm2: Value = serde_json::from_str(&smollm2().tokenizer_json().unwrap()).unwrap();
        let with = |normalizer: Value, strips: bool| {
            let mut json = smollm2.clone();
            json["normalizer"] = normalizer;
            json["added_tokens"][1]["lstrip"] = strips.into();
            json["added_tokens"][1]["rstrip"] = strips.into();
            tokenizer(&json)
        };
        let without_bytes = {
            let mut json = sentencepiece();
            json["model"]["byte_fallback"] = false.into();
            tokenizer(&json)
        };
        let metaspace = json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true,
        });
        let words = json!({
            "type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        });
        let joins = json!({"type": "Sequence", "normalizers": [
            {"type": "Strip", "strip_left": true, "strip_right": true},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]});
        [
            with(Value::Null, false),
            with(json!({"type": "NFC"}), false),
            with(Value::Null, true),
            tokenizer(&sentencepiece()),
            without_bytes,
            tokenizer(&unigram(false, Value::Null, metaspace.clone())),
            tokenizer(&unigram(true, json!({"type": "NFC"}), metaspace.clone())),
            tokenizer(&unigram(false, precompiled(), metaspace.clone())),
            tokenizer(&unigram(false, joins, Value::Null)),
            tokenizer(&unigram(true, precompiled(), words)),
        ]
        .map(|tokenizer| Text::new(tokenizer, SpecialIds::default(), None).unwrap())
        .into()
    });
    &TEXTS
}

#[test]
fn texts_with_too_many_tokens_are_known_without_them() {
    let started = std::time::Instant::now();
    for (i, text) in bounded().iter().enumerate() {
        let digits = "1234567890".repeat(200_000);
        let prefix = text.prefix_within(&digits, 2048);
        // Without byte fallback, unknown characters are one token.
        let max = match i {
            4 => digits.len(),
            // Two digits can be one token.
            5.. => 4200,
            _ => 2100,
        };
        assert!(prefix.len() <= max, "{i}: {}", prefix.len());
        let spaces = " ".repeat(2_000_000);
        let kept = text.prefix_within(&spaces, 2048).len();
        // What drops or joins white space has no bound for it.
        assert!(
            kept < spaces.len() || [2, 4, 7, 8, 9].contains(&i),
            "{i}: {kept}"
        );
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(60));
    // What is not known to stay as it is has no bound.
    let mut lowercase = sentencepiece();
    lowercase["normalizer"] = json!({"type": "Lowercase"});
    let text = Text::new(tokenizer(&lowercase), SpecialIds::default(), None).unwrap();
    let long = "a b".repeat(1000);
    assert_eq!(text.prefix_within(&long, 1), long);
}

/// A tokenizer whose words are `regex`.
fn splitting(regex: &str) -> Value {
    let mut json = sentencepiece();
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = json!({
        "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false,
    });
    json
}

#[test]
fn expressions_that_backtrack_are_refused() {
    let load = |regex: &str| Text::new(tokenizer(&splitting(regex)), SpecialIds::default(), None);
    for regex in [
        "(a+)+$",
        "(a|a)*$",
        r"(\s+)+$",
        r"(\d*)*$",
        "(a|aa)+$",
        r"(\w+\s?)*$",
    ] {
        let started = std::time::Instant::now();
        let error = load(regex).expect_err(regex).to_string();
        assert!(
            error.contains("expressions take too long"),
            "{regex}: {error}"
        );
        let took = started.elapsed();
        println!("{regex}: {took:?} {error}");
        assert!(
            took < std::time::Duration::from_secs(60),
            "{regex}: {took:?}"
        );
    }
    for regex in [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ] {
        load(regex).expect(regex);
    }
    // A word of the stranger's makes it search: that text is refused, soon, and others are not.
    let text = load("SECRET(a+)+$|.").expect("loads");
    let started = std::time::Instant::now();
    let error = text.encode(&format!("SECRET{}!", "a".repeat(99)), false);
    match error {
        Err(Error::Request { param, message, .. }) => {
            assert!(param.is_some_and(|param| param.is("prompt")));
            assert!(message.contains("limit"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(60));
    assert!(!text.encode("ab", false).expect("encodes").is_empty());
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_the_bound(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<|im_start|>".to_owned()), Just("  ".to_owned()), Just("é".to_owned()),
                Just("e\u{301}".to_owned()), Just("\u{338}".to_owned()), Just("中文".to_owned()),
                Just("the quick".to_owned()), Just("\u{212B}".to_owned()), Just("▁▁".to_owned()),
                Just("\u{600}1".to_owned()), Just("A\u{301}".to_owned()), Just("a\tb\r\n".to_owned()),
                "[abzAB]{0,20}",
                "[ab]{0,20}", "[ \t\n]{0,40}", "[0-9]{0,30}", "[a-zA-Z ,.=-]{0,40}", "\\PC{0,8}",
            ],
            0..12,
        ),
    ) {
        let whole = parts.concat();
        for (i, text) in bounded().iter().enumerate() {
            let tokens = text.encode(&whole, false).unwrap().len();
            let prefix = text.prefix_within(&whole, tokens);
            prop_assert_eq!(prefix, &whole, "{} tokens of {}", tokens, i);
        }
    }
}
