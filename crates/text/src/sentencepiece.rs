//! Tokenizers of SentencePiece's BPE kind from what a GGUF file has of them: names, scores and types.
//!
//! SentencePiece joins the two neighbours whose joined name has the highest score, the leftmost first, until
//! no two can be joined (Sennrich et al. 2016; Kudo and Richardson 2018). So every way to cut a token in two
//! others is a merge, in the order of the scores. User-defined tokens are cut out before that.

use foretoken_core::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashMap;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, Result as Built, Tokenizer,
};

/// Bytes of a token that is made of others; its halves are looked up at each of its characters. The longest
/// of known models are below 100.
const MAX_BYTES: usize = 256;
/// Merges for each token, on average. Known models have 2.
const MAX_MERGES_PER_TOKEN: usize = 16;

/// The kind of a token. The numbers are those of SentencePiece and of GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    /// The token that stands for a character without tokens.
    Unknown,
    /// Structure, which is left out of texts.
    Control,
    /// Text that is never split.
    UserDefined,
    /// No text becomes it.
    Unused,
    Byte,
}

impl Kind {
    /// The kind with the number `number`, from 1 to 6.
    pub fn of(number: u32) -> Option<Self> {
        let kinds = [
            Self::Normal,
            Self::Unknown,
            Self::Control,
            Self::UserDefined,
            Self::Unused,
            Self::Byte,
        ];
        kinds.get(number.checked_sub(1)? as usize).copied()
    }
}

/// A token, by id.
pub(super) struct Token {
    pub name: String,
    pub score: f32,
    pub kind: Kind,
}

/// The settings of a file besides its tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Options {
    /// The token for characters without tokens.
    pub unknown: Option<u32>,
    /// The token that is put in front of a text.
    pub first: Option<u32>,
    /// The token that is put behind a text.
    pub last: Option<u32>,
    /// Whether a space is put in front of a text, and of what follows a special token.
    pub space_prefix: bool,
}

/// The tokenizer with these tokens and the merges `given`. Without `given`, the scores give the merges.
///
/// # Errors
/// `Setup`, if two tokens have the same name, no token has an id of `options`, a token is too long, there are too many
/// merges, or text could get lost.
pub(super) fn tokenizer(
    tokens: &[Token],
    given: Option<Vec<(String, String)>>,
    options: Options,
) -> Result<Tokenizer> {
    let ids = by_name(tokens)?;
    let merges = match given {
        Some(given) => given,
        None => merges(tokens, &ids)?,
    };
    let name = |what: &str, id: Option<u32>| -> Result<Option<&str>> {
        let Some(id) = id else { return Ok(None) };
        match tokens.get(id as usize) {
            Some(token) => Ok(Some(&token.name)),
            None => {
                let count = tokens.len();
                Err(Error::setup(format!("{what} is {id}, of {count} tokens")))
            }
        }
    };
    let unknown = name("unknown_token_id", options.unknown)?;
    let byte_fallback = tokens.iter().any(|token| token.kind == Kind::Byte);
    if unknown.is_none() && !byte_fallback {
        return Err(Error::setup(
            "there is neither an unknown token nor one for each byte: some texts would get lost",
        ));
    }
    let names = tokens.iter().map(|token| token.name.clone());
    let vocabulary: Vocab = names.zip(0..).collect();
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .byte_fallback(byte_fallback)
        .fuse_unk(true);
    if let Some(unknown) = unknown {
        model = model.unk_token(unknown.to_owned());
    }
    let mut tokenizer = Tokenizer::new(library(model.build())?);

    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", "▁")];
    let mut decoders = vec![
        replace("▁", " "),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if options.space_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let normalizer: NormalizerWrapper =
        part(json!({"type": "Sequence", "normalizers": normalizers}))?;
    library(tokenizer.with_normalizer(Some(normalizer)))?;
    let decoder: DecoderWrapper = part(json!({"type": "Sequence", "decoders": decoders}))?;
    tokenizer.with_decoder(Some(decoder));

    let first = options.first.zip(name("bos_token_id", options.first)?);
    let last = options.last.zip(name("eos_token_id", options.last)?);
    if first.or(last).is_some() {
        tokenizer.with_post_processor(Some(around(first, last)?));
    }

    let of_kind = |wanted: fn(Kind) -> bool| {
        let tokens = tokens.iter().filter(move |token| wanted(token.kind));
        tokens.map(|token| token.name.clone())
    };
    // If a space is put in front of texts, such a token was added to SentencePiece's tokens: it stands between texts, and
    // each text begins with a space. Otherwise it is a part of one text, as in SentencePiece.
    let user_defined = of_kind(|kind| kind == Kind::UserDefined)
        .map(|name| AddedToken::from(name, false).normalized(!options.space_prefix));
    library(tokenizer.add_tokens(user_defined))?;
    let special = of_kind(|kind| matches!(kind, Kind::Control | Kind::Unknown))
        .map(|name| AddedToken::from(name, true).normalized(false));
    library(tokenizer.add_special_tokens(special))?;
    Ok(tokenizer)
}

/// The ids by name.
fn by_name(tokens: &[Token]) -> Result<HashMap<&str, u32>> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (token, id) in tokens.iter().zip(0..) {
        if let Some(other) = ids.insert(&*token.name, id) {
            return Err(Error::setup(format!(
                "the tokens {other} and {id} have one name, {:?}",
                token.name
            )));
        }
    }
    Ok(ids)
}

/// Every way to make a normal token of two, those of the highest score first; of equal scores, those of the
/// lowest id. (SentencePiece takes the leftmost of equal scores; the models that it trains have none.)
fn merges(tokens: &[Token], ids: &HashMap<&str, u32>) -> Result<Vec<(String, String)>> {
    let is_normal = |name: &str| {
        let token = ids.get(name).and_then(|&id| tokens.get(id as usize));
        token.is_some_and(|token| token.kind == Kind::Normal)
    };
    let mut order: Vec<&Token> = tokens.iter().filter(|t| t.kind == Kind::Normal).collect();
    order.sort_by(|a, b| b.score.total_cmp(&a.score));
    let max = MAX_MERGES_PER_TOKEN * tokens.len();
    let mut merges = Vec::new();
    for token in order {
        let name = &token.name;
        if name.len() > MAX_BYTES {
            return Err(Error::setup(format!(
                "a token has {} bytes; at most {MAX_BYTES} are supported",
                name.len()
            )));
        }
        for (at, _) in name.char_indices().skip(1) {
            let (left, right) = name.split_at(at);
            if is_normal(left) && is_normal(right) {
                merges.push((left.to_owned(), right.to_owned()));
            }
        }
        if merges.len() > max {
            return Err(Error::setup(format!(
                "there are more than {max} ways to make a token of two others, {MAX_MERGES_PER_TOKEN} for each token"
            )));
        }
    }
    Ok(merges)
}

/// Returns the processor that puts these ids and names around a text.
///
/// # Errors
/// `Setup`, if the library does not take them.
pub(super) fn around(
    first: Option<(u32, &str)>,
    last: Option<(u32, &str)>,
) -> Result<PostProcessorWrapper> {
    let special = |of: Option<(u32, &str)>| {
        of.map(|(_, name)| json!({"SpecialToken": {"id": name, "type_id": 0}}))
    };
    let template = |texts: &[&str]| -> Vec<Value> {
        let sequence = |text: &&str| json!({"Sequence": {"id": text, "type_id": 0}});
        let texts = texts.iter().map(sequence);
        (special(first).into_iter().chain(texts).chain(special(last))).collect()
    };
    let mut ids = json!({});
    for (id, name) in [first, last].into_iter().flatten() {
        ids[name] = json!({"id": name, "ids": [id], "tokens": [name]});
    }
    part(json!({
        "type": "TemplateProcessing", "single": template(&["A"]), "pair": template(&["A", "B"]),
        "special_tokens": ids,
    }))
}

/// A part of a tokenizer from its form in a `tokenizer.json`.
fn part<T: DeserializeOwned>(json: Value) -> Result<T> {
    serde_json::from_value(json).map_err(|e| Error::setup(e.to_string()))
}

fn library<T>(result: Built<T>) -> Result<T> {
    result.map_err(|e| Error::setup(e.to_string()))
}

#[cfg(test)]
mod tests;
