use super::*;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::LazyLock;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

mod bounds;

fn smollm2() -> &'static Text {
    static TEXT: LazyLock<Text> = LazyLock::new(|| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf");
        assert!(
            file.exists(),
            "{} is missing: run scripts/fetch-smollm2.sh",
            file.display()
        );
        Text::from_gguf(&file).expect("SmolLM2's tokenizer loads")
    });
    &TEXT
}

/// A SentencePiece tokenizer like Llama 2's: with byte fallback, and a space in front.
fn sentencepiece() -> Value {
    let mut vocab = Map::new();
    for name in ["<unk>", "<s>", "</s>"] {
        vocab.insert(name.into(), vocab.len().into());
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    for name in ["▁", "a", "b", "▁a", "ab"] {
        vocab.insert(name.into(), vocab.len().into());
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    };
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true,
            "vocab": vocab, "merges": [["▁", "a"], ["a", "b"]]}
    })
}

/// A byte-level tokenizer of the 256 bytes and of tokens with these names, whose ids follow. Of an added token, `added` says
/// whether it is special, and whether it takes the space after it.
pub(super) fn byte_level<'n>(
    names: impl IntoIterator<Item = &'n str>,
    added: impl Fn(&str) -> Option<[bool; 2]>,
) -> Value {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let names: Vec<&str> = names.into_iter().collect();
    let all = alphabet.iter().map(char::to_string);
    let all = all.chain(names.iter().map(|&name| name.to_owned()));
    let vocab: Map<String, Value> = all.zip((0..).map(Value::from)).collect();
    let token = |name: &&str| {
        let [special, rstrip] = added(name)?;
        Some(
            json!({"id": vocab[*name], "content": name, "special": special, "single_word": false,
            "lstrip": false, "rstrip": rstrip, "normalized": false}),
        )
    };
    let added: Vec<Value> = names.iter().filter_map(token).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "added_tokens": added, "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    })
}

pub(super) fn tokenizer(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string()).expect("a valid tokenizer.json")
}

pub(super) fn special(bos: Option<u32>, eos: &[u32]) -> SpecialIds {
    let eos = eos.to_vec();
    SpecialIds { bos, eos }
}

fn stream(text: &Text, ids: &[u32]) -> (String, Vec<String>) {
    let mut detokenizer = Detokenizer::new();
    let mut parts: Vec<String> = ids.iter().map(|&id| detokenizer.push(text, id)).collect();
    parts.push(detokenizer.finish());
    (parts.concat(), parts)
}

#[test]
fn smollm2_splits_as_its_training_did() {
    let text = smollm2();
    assert_eq!(text.vocab_size(), 49152);
    assert_eq!(text.special_ids(), &special(Some(1), &[2]));
    // Reference ids from the model's own tokenizer.json: digits are separate, no space in front.
    assert_eq!(text.encode("Hello world", true).unwrap(), [19556, 905]);
    let digits = text.encode("2024", true).unwrap();
    assert_eq!(digits.len(), 4);
    assert_eq!(digits[0], digits[2]);
    let chat = text
        .encode("<|im_start|>user\nHi<|im_end|>\n", true)
        .unwrap();
    assert_eq!((chat[0], chat[chat.len() - 2]), (1, 2));
    assert_eq!(text.decode(&chat, true), "user\nHi\n");
    assert_eq!(
        text.decode(&chat, false),
        "<|im_start|>user\nHi<|im_end|>\n"
    );
}

#[test]
fn smollm2s_template_adds_its_system_prompt() {
    let messages = [json!({"role": "user", "content": "Hi", "name": "ignored"})];
    let prompt = smollm2().render_chat(&messages, true, &Map::new()).unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let without = smollm2()
        .render_chat(&messages, false, &Map::new())
        .unwrap();
    assert!(prompt.starts_with(&without) && without.ends_with("Hi<|im_end|>\n"));
}

#[test]
fn characters_are_never_split() {
    let text = smollm2();
    for sample in [
        "🦀 and 👩‍👩‍👧‍👦",
        "日本語のテキスト",
        "naïve — “quoted”",
        "\u{FFFD}!",
    ] {
        let ids = text.encode(sample, false).unwrap();
        let (streamed, parts) = stream(text, &ids);
        assert_eq!(streamed, sample);
        if !sample.contains(char::REPLACEMENT_CHARACTER) {
            assert!(
                parts
                    .iter()
                    .all(|part| !part.contains(char::REPLACEMENT_CHARACTER))
            );
        }
    }
}

#[test]
fn an_incomplete_character_is_replaced_at_the_end_only() {
    let text = smollm2();
    let ids = text.encode("🦀", false).unwrap();
    let (_, parts) = stream(text, &ids[..ids.len() - 1]);
    let (last, before) = parts.split_last().unwrap();
    assert_eq!(last, "\u{FFFD}");
    assert!(before.iter().all(String::is_empty));
    assert!(text.token_text(ids[0]).starts_with("bytes:\\xf0"));
}

#[test]
fn sentencepiece_removes_the_space_it_puts_in_front() {
    let special = special(Some(1), &[2]);
    let text = Text::new(tokenizer(&sentencepiece()), special, None).unwrap();
    let ids = text.encode("ab é", true).unwrap();
    assert_eq!(ids[0], 1);
    assert_eq!(text.decode(&ids, true), "ab é");
    // A continuation keeps its space.
    assert_eq!(stream(&text, &[262]).0, " a");
}

#[test]
fn a_decoder_that_cannot_be_streamed_is_refused() {
    let mut json = sentencepiece();
    json["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    assert!(Text::new(tokenizer(&json), SpecialIds::default(), None).is_err());
}

#[test]
fn a_folder_is_read_in_all_its_forms() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap()
    };
    let missing = Text::from_folder(folder.path())
        .expect_err("no tokenizer")
        .to_string();
    assert!(missing.contains("no tokenizer.json"), "{missing}");
    assert!(missing.contains("tekken.json and"), "{missing}");

    write("tokenizer.json", sentencepiece());
    let text = Text::from_folder(folder.path()).unwrap();
    assert_eq!(text.special_ids(), &SpecialIds::default());
    let refused = text
        .render_chat(&[], true, &Map::new())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("/v1/completions"), "{refused}");

    write(
        "tokenizer_config.json",
        json!({
            "bos_token": {"content": "<s>"}, "eos_token": "</s>",
            "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default{{ eos_token }}"}],
        }),
    );
    write("generation_config.json", json!({"eos_token_id": [2, 1]}));
    write("config.json", json!({"eos_token_id": 2}));
    let text = Text::from_folder(folder.path()).unwrap();
    assert_eq!(text.special_ids(), &special(Some(1), &[1, 2]));
    let shown = text.render_chat(&[], true, &Map::new()).unwrap();
    assert_eq!(shown, "<s>default</s>");

    // Of a processor for images and texts: only if there is none with the tokenizer.
    let other = json!({"chat_template": "of a processor"}).to_string();
    std::fs::write(folder.path().join("chat_template.json"), other).unwrap();
    let text = Text::from_folder(folder.path()).unwrap();
    let shown = text.render_chat(&[], true, &Map::new()).unwrap();
    assert_eq!(shown, "<s>default</s>");
    std::fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    let text = Text::from_folder(folder.path()).unwrap();
    let shown = text.render_chat(&[], true, &Map::new()).unwrap();
    assert_eq!(shown, "of a processor");

    std::fs::write(folder.path().join("chat_template.jinja"), "from the file").unwrap();
    let text = Text::from_folder(folder.path()).unwrap();
    let shown = text.render_chat(&[], true, &Map::new()).unwrap();
    assert_eq!(shown, "from the file");
    assert_eq!(text.tool_template(), None);
    let more = folder.path().join("additional_chat_templates");
    std::fs::create_dir(&more).unwrap();
    std::fs::write(more.join("tool_use.jinja"), "{{ tools }}").unwrap();
    let text = Text::from_folder(folder.path()).unwrap();
    assert_eq!(text.tool_template(), Some("{{ tools }}"));
    assert_eq!(text.chat_template(), Some("from the file"));
}

/// As with DeepSeek's files, which have only the class and a flag.
#[test]
fn bos_comes_first_where_the_class_of_the_tokenizer_puts_it() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap()
    };
    let mut file = sentencepiece();
    let template = file["post_processor"].take();
    let (llama, fast, other) = (
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "PreTrainedTokenizerFast",
    );
    for (processor, class, [add_bos, add_eos], before, after) in [
        (None, fast, [true, false], &[1][..], &[][..]),
        (None, llama, [true, true], &[1], &[2]),
        (None, fast, [false, false], &[], &[]),
        (None, other, [true, false], &[], &[]),
        (Some(template), fast, [true, false], &[1], &[]),
    ] {
        file["post_processor"] = processor.unwrap_or_default();
        write("tokenizer.json", file.clone());
        let config = json!({
            "tokenizer_class": class, "add_bos_token": add_bos, "add_eos_token": add_eos,
            "bos_token": {"content": "<s>"}, "eos_token": "</s>",
        });
        write("tokenizer_config.json", config);
        let text = Text::from_folder(folder.path()).unwrap();
        let body = text.encode("ab", false).unwrap();
        let all = text.encode("ab", true).unwrap();
        assert_eq!(all, [before, &body[..], after].concat(), "{class}");
    }
}

#[test]
fn target_and_draft_must_share_every_token() {
    let text =
        |json: &Value, eos: u32| Text::new(tokenizer(json), special(None, &[eos]), None).unwrap();
    let same = sentencepiece();
    let target = text(&same, 2);
    check_same_tokens(&target, &text(&same, 2)).expect("the same tokenizer");

    let error = check_same_tokens(&target, &text(&same, 1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("[2]") && error.contains("[1]"), "{error}");

    let mut swapped = same.clone();
    swapped["model"]["vocab"]["a"] = json!(261);
    swapped["model"]["vocab"]["b"] = json!(260);
    let error = check_same_tokens(&target, &text(&swapped, 2)).unwrap_err();
    assert!(matches!(error, Error::Setup(_)));
    let error = error.to_string();
    assert!(
        error.contains(r#"id 260 is "a" in the target, which is id 261 in the draft"#),
        "{error}"
    );

    let mut longer = same.clone();
    longer["model"]["vocab"]["ba"] = json!(264);
    let error = check_same_tokens(&target, &text(&longer, 2))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("264 and 265 tokens") && error.contains("\"ba\""),
        "{error}"
    );
}

proptest! {
    #[test]
    fn streaming_equals_decoding_at_once(ids in prop::collection::vec(0u32..49152, 0..60)) {
        let text = smollm2();
        let decoded = text.tokenizer.decode(&ids, true).unwrap();
        prop_assert_eq!(&text.decode(&ids, true), &decoded);
        prop_assert_eq!(stream(text, &ids).0, decoded);
    }

    #[test]
    fn streaming_equals_decoding_at_once_on_broken_bytes(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        // The byte tokens of SmolLM2 in random order are mostly not UTF-8.
        let text = smollm2();
        let by_byte: Vec<u32> = (0..49152u32).filter(|&id| text.token_bytes(id).len() == 1).collect();
        let ids: Vec<u32> = bytes.iter().map(|&b| by_byte[b as usize % by_byte.len()]).collect();
        let decoded = text.tokenizer.decode(&ids, true).unwrap();
        prop_assert_eq!(stream(text, &ids).0, decoded);
    }

    #[test]
    fn any_text_survives_the_round_trip(sample in any::<String>()) {
        let text = smollm2();
        let ids = text.encode(&sample, false).unwrap();
        prop_assert_eq!(text.decode(&ids, false), sample);
    }
}

#[test]
fn a_saved_tokenizer_is_read_back_the_same() {
    let special = special(Some(1), &[2]);
    let template =
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    let text =
        Text::new(tokenizer(&sentencepiece()), special, Some(template)).expect("a tokenizer");
    let folder = tempfile::tempdir().unwrap();
    text.save(folder.path()).expect("is written");
    let read = Text::from_folder(folder.path()).expect("is read");
    check_same_tokens(&text, &read).expect("the same");
    assert_eq!(
        (read.special_ids(), read.eos()),
        (text.special_ids(), Some(2))
    );
    let messages = [json!({"role": "user", "content": "a ab"})];
    let render = |text: &Text| text.render_chat(&messages, true, &Map::new()).unwrap();
    assert_eq!(render(&read), "<s>a ab</s>");
    assert_eq!(render(&read), render(&text));
    let ids = |text: &Text| text.encode("ab a\u{e9}b", true).unwrap();
    assert_eq!(ids(&read), ids(&text));

    let nowhere = folder.path().join("no/such/folder");
    let error = text.save(&nowhere).unwrap_err().to_string();
    assert!(
        error.contains("such") && error.lines().count() == 1,
        "{error}"
    );
}
