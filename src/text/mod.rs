//! Converts text to token ids and back, chat messages to text, and a model's text to a message.
//!
//! Decoding works on the bytes of each token, so that streamed text, text that is returned at once and
//! the result of [`Text::decode`] are the same by construction.

mod backtrack;
mod bound;
mod canonical;
mod detokenizer;
mod gguf;
mod growth;
mod infill;
mod json;
mod message;
mod part;
mod pieces;
mod pre_tokenizer;
mod reasoning;
mod sentencepiece;
mod template;
mod tools;
mod unigram;

pub use detokenizer::Detokenizer;
pub use message::MessageParser;
pub use part::Part;
pub use reasoning::{ReasoningFormat, ReasoningParser};
pub use template::{Chat, ChatTemplate};
pub use tools::{Answer, Calls, ToolFormat, ToolParser, answer_grammar};

use crate::error::{Error, Result, caught, caught_here, clipped};
use crate::files;
use crate::gguf::{GgufSource, Header};
use bound::TokenBound;
use pieces::Pieces;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::path::Path;
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
    /// What stands for no token where texts are made equally long; nothing here needs it.
    pad: Option<u32>,
    template: Option<ChatTemplate>,
    /// The Jinja source of `template`.
    template_source: Option<String>,
    /// The template for chats with tools, where it is another one, and its source.
    tool_template: Option<(ChatTemplate, String)>,
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
        let name = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id));
        let first_eos = special.eos.first().copied();
        let (bos, eos) = (name(special.bos), name(first_eos));
        special.eos.sort_unstable();
        special.eos.dedup();
        let pieces = Pieces::of(&tokenizer)?;
        unigram::check(&tokenizer)?;
        backtrack::check(&tokenizer)?;
        let bound = TokenBound::new(&tokenizer, pieces.iter());
        let template = chat_template
            .map(|source| ChatTemplate::new(source, bos.as_deref(), eos.as_deref()))
            .transpose()?;
        Ok(Self {
            tokenizer,
            pieces,
            bound,
            special,
            eos: first_eos,
            pad: None,
            template,
            template_source: chat_template.map(str::to_owned),
            tool_template: None,
            part_tokenizer: OnceLock::new(),
        })
    }

    /// Sets the id of [`Text::pad`].
    fn with_pad(mut self, pad: Option<u32>) -> Self {
        self.pad = pad;
        self
    }

    /// Renders chats with tools with another template.
    ///
    /// # Errors
    /// `Setup`, if it does not parse.
    fn with_tool_template(mut self, source: &str) -> Result<Self> {
        let name = |id: Option<u32>| id.and_then(|id| self.tokenizer.id_to_token(id));
        let (bos, eos) = (name(self.special.bos), name(self.eos));
        let template = ChatTemplate::new(source, bos.as_deref(), eos.as_deref())?;
        self.tool_template = Some((template, source.to_owned()));
        Ok(self)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into `folder`, for [`Text::from_folder`]. They
    /// contain only the first EOS id; the others belong in the `config.json` beside them.
    ///
    /// # Errors
    /// `Setup`, naming the folder, if the files cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let name = |id: Option<u32>| id.and_then(|id| self.tokenizer.id_to_token(id));
        let template = match &self.tool_template {
            None => json!(self.template_source),
            Some((_, with_tools)) => json!([
                {"name": DEFAULT, "template": self.template_source},
                {"name": TOOL_USE, "template": with_tools},
            ]),
        };
        let config = json!({
            "bos_token": name(self.special.bos),
            "eos_token": name(self.eos),
            "pad_token": name(self.pad),
            "chat_template": template,
        });
        self.tokenizer
            .save(folder.join("tokenizer.json"), false)
            .and_then(|()| {
                let file = folder.join("tokenizer_config.json");
                Ok(std::fs::write(file, format!("{config:#}\n"))?)
            })
            .map_err(|e| {
                let folder = folder.display();
                Error::setup(format!("cannot write the tokenizer into {folder}: {e}"))
            })
    }

    /// Reads `tokenizer.json` and, if they exist, `tokenizer_config.json`,
    /// `generation_config.json`, `config.json`, `chat_template.jinja` and `chat_template.json` of a model folder.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        caught("the tokenizer", || Self::read_folder(folder))
    }

    fn read_folder(folder: &Path) -> Result<Self> {
        let file = folder.join("tokenizer.json");
        if !file.exists() {
            let has = ["tokenizer.model", "vocab.json", "spiece.model"];
            let other = has.iter().find(|name| folder.join(name).exists());
            let remedy = match other {
                Some(name) => format!(
                    "it has {name}, from which transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
                ),
                None => "copy it from the repository of the model".to_owned(),
            };
            return Err(Error::in_file(
                folder,
                format!("there is no tokenizer.json: {remedy}"),
            ));
        }
        let tokenizer =
            read_tokenizer(&files::read_text(&file)?).map_err(|e| Error::in_file(&file, e))?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let id = |key: &str| token_name(&config, key).and_then(|name| tokenizer.token_to_id(name));
        let mut eos: Vec<u32> = id("eos_token").into_iter().collect();
        for file in ["generation_config.json", "config.json"] {
            eos.extend(ids_under(&read_json(&folder.join(file))?, "eos_token_id"));
        }
        let (bos, pad) = (id("bos_token"), id("pad_token"));
        let special = SpecialIds { bos, eos };
        if let Some(source) = files::read_text_if_any(&folder.join("chat_template.jinja"))? {
            return Ok(Self::new(tokenizer, special, Some(&source))?.with_pad(pad));
        }
        // Of a model for images and texts.
        let other = read_json(&folder.join("chat_template.json"))?;
        let source = template_source(&config).or(template_source(&other));
        let text = Self::new(tokenizer, special, source)?.with_pad(pad);
        match named_template(&config, TOOL_USE) {
            Some(source) => text.with_tool_template(source),
            None => Ok(text),
        }
    }

    /// Reads the tokenizer and the chat template from the metadata of a GGUF file.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be read or we do not support its kind of tokenizer.
    pub fn from_gguf(file: impl Into<GgufSource>) -> Result<Self> {
        gguf::load(&file.into())
    }

    /// Reads the tokenizer and the chat template of a GGUF file's header.
    pub(crate) fn from_gguf_header(header: Header) -> Result<Self> {
        caught("the tokenizer", || gguf::of_header(header, "the file"))
    }

    /// Reads the text of a `tokenizer.json`.
    pub(crate) fn from_json(json: &str) -> Result<Self> {
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
        // The library of regular expressions has limits, and panics beyond them.
        let encoding = caught_here(|| self.tokenizer.encode_fast(text, add_special_tokens))
            .map_err(|why| {
                let message = format!("the model's tokenizer cannot read this text: {why}");
                Error::invalid("prompt", message)
            })?
            .map_err(|e| Error::internal(format!("tokenizer: {e}")))?;
        Ok(encoding.get_ids().to_vec())
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

    /// How the model marks what it thinks, as far as its chat template tells: `None` if that has no such
    /// marks.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        let source = self.template_source.as_deref()?;
        let marks = ReasoningFormat::MARKERS;
        if !marks.iter().any(|mark| source.contains(mark)) {
            return None;
        }
        let messages = [json!({"role": "user", "content": "Hello"})];
        let prompt = self.render_chat(&messages, true, &Map::new());
        let begun =
            prompt.is_ok_and(|prompt| ReasoningFormat::Qwen3.begins_with_reasoning(&prompt));
        Some(if begun {
            ReasoningFormat::DeepseekR1
        } else {
            ReasoningFormat::Qwen3
        })
    }

    /// The chat template's Jinja source.
    pub fn chat_template(&self) -> Option<&str> {
        self.template_source.as_deref()
    }

    /// The Jinja source of the template for chats with tools, if that is another one.
    pub fn tool_template(&self) -> Option<&str> {
        let (_, source) = self.tool_template.as_ref()?;
        Some(source)
    }

    /// Whether the model has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The template for chats with tools, and its source.
    fn template_with_tools(&self) -> Option<(&ChatTemplate, &str)> {
        match &self.tool_template {
            Some((template, source)) => Some((template, source)),
            None => Some((self.template.as_ref()?, self.template_source.as_ref()?)),
        }
    }

    /// Whether the model's chat template tells it of tools.
    pub fn knows_tools(&self) -> bool {
        let template = self.template_with_tools();
        template.is_some_and(|(template, _)| template.knows_tools())
    }

    /// How the model writes tool calls, as far as its chat template tells. A model whose template knows
    /// no tools is told to write Hermes' format.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        let (template, source) = self.template_with_tools()?;
        if template.knows_tools() {
            ToolFormat::of_template(source)
        } else {
            Some(ToolFormat::Hermes)
        }
    }

    /// The id of `name`, if it is a special token.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(name)?;
        self.is_special(id).then_some(id)
    }

    /// As [`Text::render`], for a chat without tools.
    ///
    /// # Errors
    /// As there.
    pub fn render_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let chat = Chat {
            messages,
            tools: &[],
            add_generation_prompt,
            extra,
        };
        self.render(chat, None)
    }

    /// Renders a chat with the model's template to a prompt. If the template knows no tools, they, their
    /// calls and their results are written into the messages, calls in `format` (by default Hermes').
    /// Encode the prompt without special tokens: the template writes them itself.
    ///
    /// # Errors
    /// `Invalid`, if the model has no template or the template refuses the messages.
    pub fn render(&self, chat: Chat<'_>, format: Option<ToolFormat>) -> Result<String> {
        let Some(template) = &self.template else {
            return Err(Error::invalid(
                "messages",
                "this model has no chat template; use /v1/completions",
            ));
        };
        let about_tools =
            |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
        if chat.tools.is_empty() && !chat.messages.iter().any(about_tools) {
            return template.render(&chat);
        }
        let template = (self.template_with_tools()).map_or(template, |(template, _)| template);
        if template.knows_tools() {
            return template.render(&chat);
        }
        let format = format.unwrap_or(ToolFormat::Hermes);
        let messages = tools::without_tools(chat.messages, chat.tools, format);
        template.render(&Chat {
            messages: &messages,
            tools: &[],
            ..chat
        })
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
    for id in 0..target.vocab_size().max(draft.vocab_size()) as u32 {
        let (ours, theirs) = (
            target.tokenizer.id_to_token(id),
            draft.tokenizer.id_to_token(id),
        );
        if ours == theirs {
            continue;
        }
        let describe = |token: &Option<String>| match token {
            Some(token) => format!("{token:?}"),
            None => "nothing".into(),
        };
        let elsewhere = |name: &str, other: &Text, token: &Option<String>| match token
            .as_ref()
            .and_then(|token| other.tokenizer.token_to_id(token))
        {
            Some(id) => format!(", which is id {id} in the {name}"),
            None => String::new(),
        };
        return differ(format!(
            "id {id} is {} in the target{} and {} in the draft{} (vocabularies of {} and {} tokens)",
            describe(&ours),
            elsewhere("draft", draft, &ours),
            describe(&theirs),
            elsewhere("target", target, &theirs),
            target.vocab_size(),
            draft.vocab_size(),
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

/// Reads the text of a `tokenizer.json`.
fn read_tokenizer(json: &str) -> Result<Tokenizer> {
    growth::check(json)?;
    Tokenizer::from_bytes(json).map_err(|e| Error::setup(clipped(&e.to_string())))
}

/// Reads a JSON file; `Null` if it does not exist.
fn read_json(file: &Path) -> Result<Value> {
    let Some(text) = files::read_text_if_any(file)? else {
        return Ok(Value::Null);
    };
    serde_json::from_str(&text).map_err(|e| Error::in_file(file, e))
}

/// `"eos_token": "</s>"` or `"eos_token": {"content": "</s>", ...}`.
fn token_name<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let value = &config[key];
    value.as_str().or_else(|| value["content"].as_str())
}

/// `"eos_token_id": 2` or `"eos_token_id": [2, 3]`.
fn ids_under(config: &Value, key: &str) -> Vec<u32> {
    let value = &config[key];
    let ids = value
        .as_array()
        .map_or(std::slice::from_ref(value), Vec::as_slice);
    ids.iter()
        .filter_map(|id| id.as_u64()?.try_into().ok())
        .collect()
}

/// The names of templates in a list: for all chats, and for those with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// `chat_template` is one template, or a list of named ones, of which `default` or the first is used.
fn template_source(config: &Value) -> Option<&str> {
    let value = &config["chat_template"];
    let first = || value.as_array()?.first()?["template"].as_str();
    let source = value.as_str().or_else(|| named_template(config, DEFAULT));
    source.or_else(first)
}

/// The template `name`, if `chat_template` is a list that has it.
fn named_template<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    let list = config["chat_template"].as_array()?;
    list.iter().find(|t| t["name"] == name)?["template"].as_str()
}

#[cfg(test)]
mod tests;
