//! Converts text to token ids and back, chat messages to text, and a model's text to a message.
//!
//! Decoding works on the bytes of each token, so that streamed text, text that is returned at once and
//! the result of [`Text::decode`] are the same by construction.

#![forbid(unsafe_code)]

mod backtrack;
mod bound;
mod canonical;
mod chats;
mod continued;
mod detokenizer;
mod folder;
mod frequent;
mod gguf;
pub mod grammar;
mod growth;
mod harmony;
mod infill;
mod json;
mod literal;
mod message;
mod named_formats;
mod part;
mod pieces;
mod pre_tokenizer;
pub mod prompts;
mod reasoning;
mod sentencepiece;
mod template;
mod thought;
mod thought_marks;
mod tools;
mod unigram;

pub use continued::{Continued, RenderedChat};
pub use detokenizer::Detokenizer;
pub use frequent::most_frequent;
pub use harmony::HarmonyParser;
pub use infill::{InfillPrompt, InfillText};
pub use literal::LiteralText;
pub use message::MessageParser;
pub use part::Part;
pub use reasoning::{ReasoningFormat, ReasoningParser};
pub use template::{Chat, ChatTemplate};
pub use thought::ThoughtParser;
pub use thought_marks::thought_marks;
pub use tools::{
    Answer, Calls, FREEFORM_PARAMETER, FreeformInput, InputGrammar, Signature, ToolFormat,
    ToolParser, answer_grammar, close_object,
};

use bound::TokenBound;
use foretoken_core::error::{Error, Result, caught, caught_here, clipped};
use foretoken_core::gguf::{GgufSource, Header};
use pieces::Pieces;
use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;
use tokenizers::{ModelWrapper, Tokenizer};

/// A model's tokenizer, its special ids and its chat template.
pub struct Text {
    tokenizer: Tokenizer,
    pieces: Pieces,
    /// `None` = there is no bound for this tokenizer.
    bound: Option<TokenBound>,
    special: SpecialIds,
    /// The first of the EOS ids.
    eos: Option<u32>,
    /// The id of the padding token. It is kept for [`Text::save`] and for callers.
    pad: Option<u32>,
    template: Option<ChatTemplate>,
    /// The template for chats with tools, where it is another one.
    tool_template: Option<ChatTemplate>,
    /// The prompt of a reranker, with `{query}` and `{document}` in the places of these.
    rerank_template: Option<String>,
    /// Whether it is that of Mellum, which fills gaps in a form of its own.
    is_mellum: bool,
    /// For parts of texts; made when it is first needed.
    part_tokenizer: OnceLock<Tokenizer>,
}

/// The ids that begin and end a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// The id that begins a text.
    pub bos: Option<u32>,
    /// The ids that end a text. In a [`Text`]: ascending, without duplicates.
    pub eos: Vec<u32>,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} ids)", self.vocab_size())
    }
}

impl Text {
    /// Combines the parts. `chat_template` is Jinja source; its `eos_token` is the first of the EOS ids in
    /// the given order.
    ///
    /// # Errors
    /// `Setup`, if we cannot stream with this kind of decoder, or the template does not parse.
    pub fn new(
        mut tokenizer: Tokenizer,
        mut special: SpecialIds,
        chat_template: Option<&str>,
    ) -> Result<Self> {
        // Files made for training may truncate or pad; a server must do neither.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|e| Error::setup(format!("tokenizer: {e}")))?;
        let eos = special.eos.first().copied();
        special.eos.sort_unstable();
        special.eos.dedup();
        let pieces = Pieces::of(&tokenizer)?;
        unigram::check(&tokenizer)?;
        backtrack::check(&tokenizer)?;
        let bound = TokenBound::new(&tokenizer, pieces.iter());
        let text = Self {
            tokenizer,
            pieces,
            bound,
            special,
            eos,
            pad: None,
            template: None,
            tool_template: None,
            rerank_template: None,
            is_mellum: false,
            part_tokenizer: OnceLock::new(),
        };
        let template = text.compile_template(chat_template)?;
        Ok(Self { template, ..text })
    }

    /// Reads the tokenizer and the chat template from the metadata of a GGUF file.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be read or we do not support its kind of tokenizer.
    pub fn from_gguf(file: impl Into<GgufSource>) -> Result<Self> {
        let source = file.into();
        caught("the tokenizer", || {
            let (header, _) = source.open()?;
            gguf::of_header(header, &source.path().display().to_string())
        })
    }

    /// Reads the tokenizer and the chat template of a GGUF file's header.
    pub fn from_gguf_header(header: Header) -> Result<Self> {
        caught("the tokenizer", || gguf::of_header(header, "the file"))
    }

    /// Reads the text of a `tokenizer.json`.
    pub fn from_json(json: &str) -> Result<Self> {
        caught("the tokenizer", || {
            Self::new(read_tokenizer(json)?, SpecialIds::default(), None)
        })
    }

    /// The token ids of `text`. With `add_special_tokens`, BOS comes first if the model uses it.
    ///
    /// # Errors
    /// `Invalid`, if a regular expression of the tokenizer would search too long in this text, or
    /// `Internal`, if the tokenizer fails.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        encode(&self.tokenizer, text, add_special_tokens)
    }

    /// The longest prefix of `text` that may have no more than `max_tokens` tokens: all of it, or else the
    /// text has more. This is found in a fraction of the time that the tokens take.
    pub fn prefix_within<'t>(&self, text: &'t str, max_tokens: usize) -> &'t str {
        match &self.bound {
            // Every token has at least one byte.
            Some(bound) if text.len() > max_tokens => bound.prefix(text, max_tokens),
            _ => text,
        }
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary have no text.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special_tokens && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id));
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match text.strip_prefix(' ') {
            Some(rest) if self.pieces.leading_space() => rest.to_owned(),
            _ => text.into_owned(),
        }
    }

    /// The bytes that `id` adds to a text; for a special token, its name.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// `id` as a separate string: its text, or `bytes:\xe2\x80` if its bytes are not complete UTF-8, so
    /// that two different tokens never look the same.
    pub fn token_text(&self, id: u32) -> Cow<'_, str> {
        let bytes = self.token_bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => bytes
                .iter()
                .fold("bytes:".to_owned(), |text, b| format!("{text}\\x{b:02x}"))
                .into(),
        }
    }

    /// Whether `id` marks structure and is left out of texts: BOS, EOS, roles.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// Number of ids, including those of added tokens: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The ids that begin and end a text.
    pub fn special_ids(&self) -> &SpecialIds {
        &self.special
    }

    /// The EOS id that ends a text of this model: if there are several, the one that its tokenizer names.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The id that fills up shorter texts of a batch, if the model names one.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// The name of `id` in the vocabulary.
    pub fn token_name(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The tokenizer in the format of `tokenizer.json`.
    ///
    /// # Errors
    /// `Internal`, if it cannot be serialized.
    pub fn tokenizer_json(&self) -> Result<String> {
        self.tokenizer
            .to_string(false)
            .map_err(|e| Error::internal(format!("tokenizer: {e}")))
    }

    /// The kind of the tokenizer, for people.
    pub fn kind(&self) -> &'static str {
        match (self.tokenizer.get_model(), self.pieces.is_byte_level()) {
            (ModelWrapper::Unigram(_), _) => "SentencePiece, Unigram",
            (ModelWrapper::BPE(_), true) => "byte-level BPE",
            (ModelWrapper::BPE(_), false) => "SentencePiece, BPE",
            (_, true) => "byte-level",
            (_, false) => "SentencePiece",
        }
    }

    /// The id of `name`, if it is a special token.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(name)?;
        self.is_special(id).then_some(id)
    }
}

/// Checks that every id is the same token in target and draft. Otherwise drafts would be noise.
///
/// # Errors
/// `Setup`, naming the first difference.
pub fn check_same_tokens(target: &Text, draft: &Text) -> Result<()> {
    let differ = |what: String| {
        Err(Error::setup(format!(
            "target and draft do not share a tokenizer: {what}"
        )))
    };
    let (ours, theirs) = (target.vocab_size(), draft.vocab_size());
    let is_other = |&id: &u32| target.token_name(id) != draft.token_name(id);
    if let Some(id) = (0..ours.max(theirs) as u32).find(is_other) {
        let describe = |(place, text): (&str, &Text), (other_place, other): (&str, &Text)| {
            let name = text.token_name(id);
            let elsewhere = name.as_ref().and_then(|n| other.tokenizer.token_to_id(n));
            let elsewhere = elsewhere.map(|id| format!(", which is id {id} in the {other_place}"));
            let name = name.map_or("nothing".into(), |name| format!("{name:?}"));
            format!("{name} in the {place}{}", elsewhere.unwrap_or_default())
        };
        let both = [("target", target), ("draft", draft)];
        return differ(format!(
            "id {id} is {} and {} (vocabularies of {ours} and {theirs} tokens)",
            describe(both[0], both[1]),
            describe(both[1], both[0]),
        ));
    }
    if target.special.eos != draft.special.eos {
        return differ(format!(
            "the target ends a text with {:?}, the draft with {:?}",
            target.special.eos, draft.special.eos
        ));
    }
    Ok(())
}

fn encode(tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
    // The library of regular expressions has limits, and panics beyond them.
    let encoding = caught_here(|| tokenizer.encode_fast(text, add_special_tokens))
        .map_err(|why| {
            let message = format!("the model's tokenizer cannot read this text: {why}");
            Error::invalid("prompt", message)
        })?
        .map_err(|e| Error::internal(format!("tokenizer: {e}")))?;
    Ok(encoding.get_ids().to_vec())
}

/// Reads the text of a `tokenizer.json`.
fn read_tokenizer(json: &str) -> Result<Tokenizer> {
    growth::check(json)?;
    Tokenizer::from_bytes(json).map_err(|e| Error::setup(clipped(&e.to_string())))
}

#[cfg(test)]
mod tests;
