use super::*;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// A vocabulary of the 256 bytes, `12`, `ab`, a control, a user-defined and an unused token.
fn content(pre: Option<&str>, model: &str) -> Content {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut names: Vec<String> = alphabet.into_iter().map(String::from).collect();
    names.extend(["12", "ab", "<|end|>", "<tool>", "[PAD0]"].map(String::from));
    let types = (0..names.len()).map(|id| match id {
        258 => 3,
        259 => 4,
        260 => 5,
        _ => 1,
    });
    let strings = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let types = Value::Array(types.map(Value::I32).collect());
    let mut metadata = std::collections::HashMap::from([
        (
            "tokenizer.ggml.model".to_owned(),
            Value::String(model.into()),
        ),
        ("tokenizer.ggml.tokens".to_owned(), strings(names)),
        (
            "tokenizer.ggml.merges".to_owned(),
            strings(vec!["1 2".into(), "a b".into()]),
        ),
        (TYPES.to_owned(), types),
        ("tokenizer.ggml.bos_token_id".to_owned(), Value::U32(258)),
    ]);
    if let Some(pre) = pre {
        metadata.insert(PRE.into(), Value::String(pre.into()));
    }
    Content {
        magic: VersionedMagic::GgufV3,
        metadata,
        tensor_infos: Default::default(),
        tensor_data_offset: 0,
    }
}

fn names(mut content: Content, text: &str) -> Vec<String> {
    let tokenizer = tokenizer(&mut content).expect("a known tokenizer");
    let encoding = tokenizer.encode_fast(text, true).expect("encodes");
    let name = |&id| tokenizer.id_to_token(id).expect("in the vocabulary");
    encoding.get_ids().iter().map(name).collect()
}

#[test]
fn no_space_is_put_in_front_and_digits_are_split_by_kind() {
    for (pre, expected) in [
        (Some("gpt-2"), &["12", "Ġ", "ab"][..]),
        (Some("default"), &["12", "Ġ", "ab"]),
        (Some("smollm"), &["1", "2", "Ġ", "ab"]),
        (Some("qwen2"), &["1", "2", "Ġ", "ab"]),
        (Some("llama-bpe"), &["<|end|>", "12", "Ġ", "ab"]),
        (Some("llama3"), &["<|end|>", "12", "Ġ", "ab"]),
    ] {
        assert_eq!(names(content(pre, "gpt2"), "12 ab"), expected, "{pre:?}");
    }
}

/// llama.cpp warns and splits as no model does. Here the architecture tells, or nothing does.
#[test]
fn a_file_without_a_pre_tokenizer_is_split_as_its_architecture_is_or_refused() {
    let of = |architecture: Option<&str>| {
        let mut content = content(None, "gpt2");
        let named = architecture.map(|name| Value::String(name.into()));
        (content.metadata).extend(named.map(|name| (ARCHITECTURE.to_owned(), name)));
        content
    };
    for (architecture, expected) in [
        ("qwen2", &["1", "2", "Ġ", "ab"][..]),
        ("starcoder2", &["1", "2", "Ġ", "ab"]),
        ("gpt-oss", &["12", "Ġ", "ab"]),
    ] {
        assert_eq!(names(of(Some(architecture)), "12 ab"), expected);
    }
    for mut unknown in [of(Some("llama")), of(Some("stablelm")), of(None)] {
        let error = tokenizer(&mut unknown).unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml.pre is missing"), "{error}");
    }
}

#[test]
fn mellum_is_known_by_its_pre_tokenizer() {
    for (pre, is_mellum) in [("mellum", true), ("mellum2", false), ("starcoder", false)] {
        let header = Header {
            metadata: content(Some(pre), "gpt2").metadata,
            ..Header::default()
        };
        let text = of_header(header, "the file").expect("a known tokenizer");
        assert_eq!(text.is_mellum, is_mellum, "{pre}");
    }
}

#[test]
fn bos_is_added_when_the_file_says_so() {
    let mut with_bos = content(Some("gpt-2"), "gpt2");
    with_bos
        .metadata
        .insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(true));
    assert_eq!(names(with_bos, "ab"), ["<|end|>", "ab"]);
    let mut without = content(Some("llama-bpe"), "gpt2");
    without
        .metadata
        .insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    assert_eq!(names(without, "ab"), ["ab"]);
}

#[test]
fn control_tokens_are_hidden_and_user_defined_ones_shown_and_neither_is_split() {
    let mut content = content(Some("gpt-2"), "gpt2");
    let tokenizer = tokenizer(&mut content).expect("a known tokenizer");
    let text = Text::new(tokenizer, SpecialIds::default(), None).expect("byte-level");
    let ids = text.encode("a<tool>b<|end|>", true).expect("encodes");
    assert_eq!(&ids[1..], [259, ids[2], 258]);
    assert_eq!(text.decode(&ids, true), "a<tool>b");
    assert_eq!(text.decode(&ids, false), "a<tool>b<|end|>");
    assert!(!text.is_special(260));
}

#[test]
fn other_tokenizers_are_refused() {
    for (pre, model, named) in [
        (None, "t5", "`t5`"),
        (None, "llama", "tokenizer.ggml.scores"),
        (None, "gemma4", "tokenizer.ggml.scores"),
        (Some("superbpe"), "gpt2", "`superbpe`"),
    ] {
        let error = tokenizer(&mut content(pre, model))
            .expect_err("not supported")
            .to_string();
        assert!(error.contains(named) && !error.contains('\n'), "{error}");
    }
}
