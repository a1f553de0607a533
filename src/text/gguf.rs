//! Reads the tokenizer of a GGUF file.

use super::{SpecialIds, Text};
use crate::error::{Error, Result, caught, clipped};
use crate::gguf::GgufSource;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::pre_tokenizers::{
    PreTokenizerWrapper, byte_level::ByteLevel, digits::Digits, sequence::Sequence,
};
use tokenizers::{AddedToken, Tokenizer};

const PRE: &str = "tokenizer.ggml.pre";
const TYPES: &str = "tokenizer.ggml.token_type";

/// The llama.cpp token types that are used here.
const NORMAL: i32 = 1;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

pub(super) fn load(source: &GgufSource) -> Result<Text> {
    caught("the tokenizer", || read(source))
}

fn read(source: &GgufSource) -> Result<Text> {
    let (mut content, _) = source.open()?;
    of_content(&mut content, &source.path().display().to_string())
}

/// Reads the tokenizer and the chat template of the header of `file`, which only names it in errors.
pub(super) fn of_content(content: &mut Content, file: &str) -> Result<Text> {
    let tokenizer = tokenizer(content).map_err(|e| {
        let what = clipped(&e.to_string());
        Error::setup(format!("cannot read the tokenizer of {file}: {what}"))
    })?;
    let id = |key: &str| {
        number(
            content
                .metadata
                .get(&format!("tokenizer.ggml.{key}_token_id"))?,
        )
    };
    let pad = id("padding");
    let special = SpecialIds {
        bos: id("bos"),
        eos: ["eos", "eot", "eom"].into_iter().filter_map(id).collect(),
    };
    let template = string(content, "tokenizer.chat_template");
    let text = Text::new(tokenizer, special, template)?.with_pad(pad);
    match string(content, "tokenizer.chat_template.tool_use") {
        Some(source) => text.with_tool_template(source),
        None => Ok(text),
    }
}

/// candle builds vocabulary, merges and post-processor. It does not know all names of pre-tokenizers,
/// and falls back to one that puts a space in front. So we translate names that it knows under another
/// name, set the other pre-tokenizers ourselves, and refuse unknown ones: text that is split wrongly makes
/// a model silently worse.
fn tokenizer(content: &mut Content) -> Result<Tokenizer> {
    let model = string(content, "tokenizer.ggml.model").unwrap_or("none");
    if model != "gpt2" {
        return Err(Error::setup(format!(
            "tokenizer model `{model}` is not supported in a GGUF file: only byte-level BPE (`gpt2`) is; use the model's folder with tokenizer.json"
        )));
    }
    let pre = string(content, PRE).unwrap_or("default").to_owned();
    let ours: Option<PreTokenizerWrapper> = match pre.as_str() {
        "qwen2" | "smaug-bpe" | "lfm2" => None,
        "llama-bpe" | "llama3" | "llama-v3" => {
            let set = |content: &mut Content, key: &str, value| {
                content
                    .metadata
                    .entry(format!("tokenizer.ggml.{key}"))
                    .or_insert(value);
            };
            content
                .metadata
                .insert(PRE.into(), Value::String("llama3".into()));
            // Settings of Llama 3's tokenizer.json that converters leave out.
            set(content, "ignore_merges", Value::Bool(true));
            set(content, "add_bos_token", Value::Bool(true));
            None
        }
        "smollm" => {
            let digits = Digits::new(true).into();
            Some(Sequence::new(vec![digits, byte_level().into()]).into())
        }
        "gpt-2" | "gpt2" | "default" => Some(byte_level().into()),
        other => {
            return Err(Error::setup(format!(
                "pre-tokenizer `{other}` is not supported; use the model's folder with tokenizer.json"
            )));
        }
    };
    let user_defined = take_user_defined(content);
    let mut tokenizer = Tokenizer::from_gguf(content)?;
    if let Some(ours) = ours {
        tokenizer.with_pre_tokenizer(Some(ours));
    }
    tokenizer
        .add_tokens(user_defined)
        .map_err(|e| Error::setup(e.to_string()))?;
    Ok(tokenizer)
}

fn byte_level() -> ByteLevel {
    let (add_prefix_space, trim_offsets, use_regex) = (false, true, true);
    ByteLevel::new(add_prefix_space, trim_offsets, use_regex)
}

/// Returns the user-defined tokens. candle would make them and unused tokens special, and so leave them
/// out of texts. So this marks them as normal; the caller adds them as visible tokens that are not
/// split.
fn take_user_defined(content: &mut Content) -> Vec<AddedToken> {
    let mut found = Vec::new();
    if let Some(Value::Array(types)) = content.metadata.get_mut(TYPES) {
        for (id, kind) in types.iter_mut().enumerate() {
            match number(kind).map(|n| n as i32) {
                Some(USER_DEFINED) => found.push(id),
                Some(UNUSED) => {}
                _ => continue,
            }
            *kind = Value::I32(NORMAL);
        }
    }
    let Some(Value::Array(names)) = content.metadata.get("tokenizer.ggml.tokens") else {
        return Vec::new();
    };
    found
        .into_iter()
        .filter_map(|id| names.get(id)?.to_string().ok())
        .map(|name| AddedToken::from(name.clone(), false).normalized(false))
        .collect()
}

fn number(value: &Value) -> Option<u32> {
    match value {
        Value::I32(n) => (*n).try_into().ok(),
        other => other.to_u64().ok()?.try_into().ok(),
    }
}

fn string<'a>(content: &'a Content, key: &str) -> Option<&'a str> {
    content
        .metadata
        .get(key)?
        .to_string()
        .ok()
        .map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::gguf_file::VersionedMagic;

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
        let strings =
            |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
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
            (None, &["12", "Ġ", "ab"][..]),
            (Some("gpt-2"), &["12", "Ġ", "ab"]),
            (Some("default"), &["12", "Ġ", "ab"]),
            (Some("smollm"), &["1", "2", "Ġ", "ab"]),
            (Some("qwen2"), &["1", "2", "Ġ", "ab"]),
            (Some("llama-bpe"), &["<|end|>", "12", "Ġ", "ab"]),
            (Some("llama3"), &["<|end|>", "12", "Ġ", "ab"]),
        ] {
            assert_eq!(names(content(pre, "gpt2"), "12 ab"), expected, "{pre:?}");
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
            (None, "llama", "`llama`"),
            (Some("tekken"), "gpt2", "`tekken`"),
        ] {
            let error = tokenizer(&mut content(pre, model))
                .expect_err("not supported")
                .to_string();
            assert!(error.contains(named) && !error.contains('\n'), "{error}");
        }
    }
}
