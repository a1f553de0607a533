//! Reads the tokenizer of a GGUF file.

use super::sentencepiece::{self, Kind, Options, Token};
use super::{SpecialIds, Text, pre_tokenizer};
use candle_core::quantized::gguf_file::{Content, Value, VersionedMagic};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::gguf::Header;
use std::collections::HashMap;
use tokenizers::{AddedToken, Tokenizer};

const ARCHITECTURE: &str = "general.architecture";
const PRE: &str = "tokenizer.ggml.pre";
const TYPES: &str = "tokenizer.ggml.token_type";
/// The pre-tokenizer of Mellum.
const MELLUM: &str = "mellum";

/// The llama.cpp token types that are used here.
const NORMAL: i32 = 1;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Reads the tokenizer and the chat template of the header of `file`; errors contain the name `file`.
pub(super) fn of_header(header: Header, file: &str) -> Result<Text> {
    // candle reads some tokenizers of what it reads itself.
    let content = &mut Content {
        magic: VersionedMagic::GgufV3,
        metadata: header.metadata,
        tensor_infos: HashMap::new(),
        tensor_data_offset: 0,
    };
    let is_mellum = string(content, PRE) == Some(MELLUM);
    let tokenizer = tokenizer(content).map_err(|e| {
        let what = clipped(&e.to_string());
        Error::setup(format!("cannot read the tokenizer of {file}: {what}"))
    })?;
    let id = |key: &str| {
        let key = format!("tokenizer.ggml.{key}_token_id");
        number(content.metadata.get(&key)?)
    };
    let pad = id("padding");
    let special = SpecialIds {
        bos: id("bos"),
        eos: ["eos", "eot", "eom"].into_iter().filter_map(id).collect(),
    };
    let template = string(content, "tokenizer.chat_template");
    let text = Text::new(tokenizer, special, template)?;
    let tool_template = string(content, "tokenizer.chat_template.tool_use");
    let rerank_template = string(content, "tokenizer.chat_template.rerank");
    Ok(Text {
        pad,
        is_mellum,
        rerank_template: rerank_template.map(str::to_owned),
        tool_template: text.compile_template(tool_template)?,
        ..text
    })
}

fn tokenizer(content: &mut Content) -> Result<Tokenizer> {
    match string(content, "tokenizer.ggml.model").unwrap_or("none") {
        "gpt2" => byte_level_bpe(content),
        "llama" => sentencepiece_bpe(content, None),
        "gemma4" => sentencepiece_bpe(content, Some(merges(content)?)),
        other => Err(Error::setup(format!(
            "tokenizer model `{other}` is not supported in a GGUF file: only byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`, `gemma4`) are; use the model's folder with tokenizer.json"
        ))),
    }
}

/// The merges of a file, in their order. A space separates the two tokens of a merge; none of these tokens has one.
fn merges(content: &Content) -> Result<Vec<(String, String)>> {
    let key = "tokenizer.ggml.merges";
    let Some(Value::Array(list)) = content.metadata.get(key) else {
        return Err(Error::setup(format!("{key} is no list")));
    };
    let pair = |merge: &Value| {
        let (left, right) = merge.to_string().ok()?.split_once(' ')?;
        Some((left.to_owned(), right.to_owned()))
    };
    let pairs: Option<Vec<_>> = list.iter().map(pair).collect();
    pairs.ok_or_else(|| Error::setup(format!("{key} has an entry that is not two tokens")))
}

/// Builds the tokenizer of a file with SentencePiece's BPE. Options that the file leaves out are those that llama.cpp
/// takes: BOS and a space come first. Without `merges`, the scores give the merges.
fn sentencepiece_bpe(
    content: &Content,
    merges: Option<Vec<(String, String)>>,
) -> Result<Tokenizer> {
    let get = |key: &str| content.metadata.get(&format!("tokenizer.ggml.{key}"));
    let list = |key: &str| match get(key) {
        Some(Value::Array(list)) => Ok(list.as_slice()),
        _ => Err(Error::setup(format!("tokenizer.ggml.{key} is no list"))),
    };
    let flag = |key: &str, default: bool| match get(key) {
        None => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(Error::setup(format!("tokenizer.ggml.{key} is no bool"))),
    };
    // No known model of this kind has them. If they were ignored, texts would be split wrongly.
    let table =
        matches!(get("precompiled_charsmap"), Some(Value::Array(table)) if !table.is_empty());
    if table || flag("remove_extra_whitespaces", false)? {
        return Err(Error::setup(
            "tokenizer.ggml.precompiled_charsmap and remove_extra_whitespaces are not supported; use the model's folder with tokenizer.json",
        ));
    }
    let (names, scores, types) = (list("tokens")?, list("scores")?, list("token_type")?);
    if names.len() != scores.len() || names.len() != types.len() {
        return Err(Error::setup(format!(
            "there are {} tokens, {} scores and {} types",
            names.len(),
            scores.len(),
            types.len()
        )));
    }
    let token = |(id, name): (usize, &Value)| {
        let kind = number(&types[id]).and_then(Kind::of);
        match (name.to_string(), scores[id].to_f32(), kind) {
            (Ok(name), Ok(score), Some(kind)) if !score.is_nan() => Ok(Token {
                name: name.clone(),
                score,
                kind,
            }),
            _ => Err(Error::setup(format!(
                "the token {id} has the name {name:?}, the score {:?} and the type {:?}; a string, a number and 1 to 6 are accepted",
                scores[id], types[id]
            ))),
        }
    };
    let tokens: Vec<Token> = (names.iter().enumerate().map(token)).collect::<Result<_>>()?;
    let id = |key: &str| get(key).and_then(number);
    let of_kind = |kind: Kind| {
        let position = tokens.iter().position(|token| token.kind == kind);
        position.map(|id| id as u32)
    };
    let (add_bos, add_eos) = (flag("add_bos_token", true)?, flag("add_eos_token", false)?);
    let options = Options {
        unknown: id("unknown_token_id").or_else(|| of_kind(Kind::Unknown)),
        first: id("bos_token_id").filter(|_| add_bos),
        last: id("eos_token_id").filter(|_| add_eos),
        space_prefix: flag("add_space_prefix", true)?,
    };
    sentencepiece::tokenizer(&tokens, merges, options)
}

/// candle builds vocabulary, merges and post-processor. It knows few names of pre-tokenizers, and falls back
/// to one that puts a space in front. So we set the pre-tokenizers ourselves and refuse unknown ones: text
/// that is split wrongly makes a model silently worse.
fn byte_level_bpe(content: &mut Content) -> Result<Tokenizer> {
    let of_architecture = || pre_tokenizer::of_architecture(string(content, ARCHITECTURE)?);
    let name = string(content, PRE).or_else(of_architecture);
    let named = pre_tokenizer::named(name.ok_or_else(|| {
        Error::setup(format!(
            "{PRE} is missing, so how the model's texts are split is not known: convert the model anew, or use its folder with tokenizer.json"
        ))
    })?)?;
    let mut set = |key: &str, value: bool| {
        let entry = content.metadata.entry(format!("tokenizer.ggml.{key}"));
        entry.or_insert(Value::Bool(value));
    };
    // Settings of a tokenizer.json that converters leave out.
    set("ignore_merges", named.ignore_merges);
    set("add_bos_token", named.add_bos);
    // candle treats all names that it does not know alike, so any of them is right.
    content
        .metadata
        .insert(PRE.into(), Value::String("default".into()));
    let user_defined = take_user_defined(content);
    let mut tokenizer = Tokenizer::from_gguf(content)?;
    tokenizer.with_pre_tokenizer(Some(named.splitter));
    tokenizer
        .with_normalizer(named.normalizer)
        .map_err(|e| Error::setup(e.to_string()))?;
    tokenizer
        .add_tokens(user_defined)
        .map_err(|e| Error::setup(e.to_string()))?;
    Ok(tokenizer)
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
    let text = content.metadata.get(key)?.to_string().ok()?;
    Some(text)
}

#[cfg(test)]
mod tests;
