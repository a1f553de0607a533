//! Documents and search results, of which the model reads the text.

use crate::content::{ContentPart, TextOr};
use crate::others::NoOthers;
use crate::wire::{required, wrong};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// The data of an image or a document, or the address of a search result.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "BlockSource")]
pub(super) enum Source {
    Address(String),
    Data(Data),
}

/// Not as an untagged enum, whose errors do not say where in the object they are.
impl<'de> Deserialize<'de> for Source {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sources;

        impl<'de> Visitor<'de> for Sources {
            type Value = Source;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an object")
            }

            fn visit_str<E: Error>(self, address: &str) -> Result<Source, E> {
                Ok(Source::Address(address.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Source, A::Error> {
                Data::deserialize(MapAccessDeserializer::new(map)).map(Source::Data)
            }
        }

        deserializer.deserialize_any(Sources)
    }
}

/// The data of an image or a document, of which texts are read.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[schemars(rename = "DocumentSource")]
pub(super) struct Data {
    #[serde(rename = "type")]
    kind: Option<String>,
    /// The text, where the type is `text`.
    data: Option<String>,
    /// The text or its parts, where the type is `content`.
    content: Option<TextOr<ContentPart>>,
    #[serde(rename = "media_type")]
    #[schemars(with = "Option<String>")]
    _media_type: Option<IgnoredAny>,
    #[serde(rename = "url")]
    #[schemars(with = "Option<String>")]
    _url: Option<IgnoredAny>,
    #[serde(rename = "file_id")]
    #[schemars(with = "Option<String>")]
    _file_id: Option<IgnoredAny>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// What a block or a part says of a document.
pub(super) struct Document {
    pub source: Option<Source>,
    pub title: Option<String>,
    pub context: Option<String>,
    pub citations: Option<Value>,
}

impl Document {
    /// Title, context and text, each on lines of its own; `None` if this is no text.
    pub fn text(self, at: &FieldPath) -> Result<Option<String>> {
        let at_source = at.key("source");
        let Source::Data(source) = required(at_source.clone(), self.source)? else {
            return wrong(at_source, "must be an object");
        };
        let text = match source.kind.as_deref() {
            Some("text") => required(at_source.key("data"), source.data)?,
            Some("content") => required(at_source.key("content"), source.content)?.lines(),
            _ => return Ok(None),
        };
        refuse_citations(at, self.citations.as_ref())?;
        let about = joined(
            self.title.unwrap_or_default(),
            self.context.unwrap_or_default(),
        );
        Ok(Some(joined(about, text)))
    }
}

/// What a block or a part says of a search result.
pub(super) struct SearchResult {
    pub source: Option<Source>,
    pub title: Option<String>,
    pub content: Option<String>,
    pub citations: Option<Value>,
}

impl SearchResult {
    /// Title, source and content, each on lines of its own.
    pub fn text(self, at: &FieldPath) -> Result<String> {
        let at_source = at.key("source");
        let Source::Address(source) = required(at_source.clone(), self.source)? else {
            return wrong(at_source, "must be a string");
        };
        let title = required(at.key("title"), self.title)?;
        let content = required(at.key("content"), self.content)?;
        refuse_citations(at, self.citations.as_ref())?;
        Ok(joined(joined(title, source), content))
    }
}

fn refuse_citations(at: &FieldPath, citations: Option<&Value>) -> Result<()> {
    let is_cited = citations.and_then(|cite| cite.get("enabled"));
    if is_cited == Some(&Value::Bool(true)) {
        return wrong(
            at.key("citations").key("enabled"),
            "is not supported: answers have no citations; leave it out",
        );
    }
    Ok(())
}

/// Both texts, each on lines of its own; one that is empty has none.
pub(super) fn joined(mut text: String, more: String) -> String {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text + &more
}
