//! Contents that are a text or a list of parts with text.

use schemars::JsonSchema;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// A text, or a list.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub(super) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

/// Not as an untagged enum, whose errors do not say where in the list they are.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<TextOr<T>, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(TextOr::List)
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}

impl TextOr<String> {
    /// The texts.
    pub fn list(&self) -> &[String] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::List(list) => list,
        }
    }
}

/// A part of a content.
#[derive(Debug, serde::Deserialize, JsonSchema)]
pub(super) struct Part {
    #[serde(rename = "type")]
    pub _kind: PartKind,
    #[serde(alias = "refusal")]
    pub text: String,
}

/// The kinds of parts that models can read, of all APIs.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum PartKind {
    Text,
    InputText,
    OutputText,
    ReasoningText,
    Refusal,
}

impl TextOr<Part> {
    /// The texts of the parts, each on lines of its own.
    pub fn lines(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::List(parts) => {
                let texts: Vec<String> = parts.into_iter().map(|part| part.text).collect();
                texts.join("\n")
            }
        }
    }
}

/// Reads a content as its text; null is none.
pub(super) fn some_lines<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<String>, D::Error> {
    let content = Option::<TextOr<Part>>::deserialize(deserializer)?;
    Ok(content.map(TextOr::lines))
}

/// Reads a content as its text; null is an empty one.
pub(super) fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    some_lines(deserializer).map(Option::unwrap_or_default)
}
