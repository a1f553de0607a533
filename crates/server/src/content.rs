//! Contents that are a text or a list of parts with text.

use super::others::NoOthers;
use schemars::JsonSchema;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// A text, or a list.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub(super) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

/// Not as an untagged enum, whose errors do not say where in the list they are. An entry that is an object
/// needs a flattened field, because serde would read the fields of others from a list, too.
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
#[derive(Debug, JsonSchema)]
pub(super) struct ContentPart {
    #[schemars(rename = "type")]
    _kind: PartKind,
    pub text: String,
}

/// A refusal may have its text under either name; clients send the other one as null or empty.
impl<'de> Deserialize<'de> for ContentPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Fields {
            #[serde(rename = "type")]
            kind: PartKind,
            text: Option<String>,
            refusal: Option<String>,
            #[serde(flatten)]
            _harmless: HarmlessKeys,
        }

        let Fields {
            kind,
            text,
            refusal,
            ..
        } = Fields::deserialize(deserializer)?;
        let text = match (text, refusal) {
            (Some(text), Some(refusal)) if text.is_empty() || refusal.is_empty() => {
                Some(text + &refusal)
            }
            (Some(_), Some(_)) => return Err(D::Error::unknown_field("refusal", &[])),
            (text, refusal) => text.or(refusal),
        };
        Ok(Self {
            _kind: kind,
            text: text.ok_or_else(|| D::Error::missing_field("text"))?,
        })
    }
}

/// Keys of parts and blocks that change nothing of a text: what an API told of a text that a client now sends back, and
/// what tells how it is cached.
#[derive(Debug, Default, serde::Deserialize)]
pub(super) struct HarmlessKeys {
    #[serde(rename = "annotations")]
    _annotations: Option<IgnoredAny>,
    #[serde(rename = "citations")]
    _citations: Option<IgnoredAny>,
    #[serde(rename = "logprobs")]
    _logprobs: Option<IgnoredAny>,
    #[serde(rename = "parsed")]
    _parsed: Option<IgnoredAny>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_breakpoint")]
    _prompt_cache_breakpoint: Option<IgnoredAny>,
    #[serde(rename = "id")]
    _id: Option<IgnoredAny>,
    #[serde(rename = "index")]
    _index: Option<IgnoredAny>,
    #[serde(flatten)]
    _others: NoOthers,
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

impl TextOr<ContentPart> {
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

/// Reads a content as its text; null is an empty one.
pub(super) fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let content = Option::<TextOr<ContentPart>>::deserialize(deserializer)?;
    Ok(content.map(TextOr::lines).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(content: Value) -> Result<String, serde_json::Error> {
        serde_json::from_value::<TextOr<ContentPart>>(content).map(TextOr::lines)
    }

    #[test]
    fn a_part_has_its_text_under_one_of_two_names() {
        for part in [
            json!({"type": "text", "text": "a", "refusal": null}),
            json!({"type": "text", "text": "a", "refusal": ""}),
            json!({"type": "refusal", "text": null, "refusal": "a"}),
            json!({"type": "refusal", "refusal": "a"}),
        ] {
            assert_eq!(read(json!([part])).unwrap(), "a", "{part}");
        }
        for part in [
            json!({"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {"a": 1}}),
            json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": null}),
            json!({"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}),
            json!({"type": "text", "text": "a", "id": "1", "index": 0, "image_url": null}),
        ] {
            assert_eq!(read(json!([part])).unwrap(), "a", "{part}");
        }
        for (part, key) in [
            (
                json!({"type": "text", "text": "a", "image_url": {"url": "x"}}),
                "image_url",
            ),
            (
                json!({"type": "text", "text": "a", "refusal": "b"}),
                "refusal",
            ),
        ] {
            let error = read(json!([part])).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("unknown field `{key}`")),
                "{error}"
            );
        }
        let error = read(json!([{"type": "text", "refusal": null}])).unwrap_err();
        assert_eq!(error.to_string(), "missing field `text`");
    }

    #[test]
    fn an_entry_is_no_list() {
        for content in [json!([["text", "hi"]]), json!([7]), json!([null])] {
            assert!(read(content.clone()).is_err(), "{content}");
        }
        let texts = |json: Value| serde_json::from_value::<TextOr<String>>(json);
        assert_eq!(texts(json!(["a", "b"])).unwrap().list(), ["a", "b"]);
        assert!(texts(json!([["a"]])).is_err());
    }
}
