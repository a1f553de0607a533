//! Calls in XML, as Qwen3-Coder and Qwen 3.5 write them:
//! `<function=NAME>`, for each argument `<parameter=NAME>`, its value on lines of its own, `</parameter>`, and
//! `</function>`.

use super::WrittenCall;
use super::python;
use super::signature::{Signature, ValueKind};
use crate::part::until_marker;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// The markers at the beginning and the end of a call and of a parameter.
pub const FUNCTION: &str = "<function=";
pub const END_FUNCTION: &str = "</function>";
pub const PARAMETER: &str = "<parameter=";
pub const END_PARAMETER: &str = "</parameter>";
const END_CALL: &str = "</tool_call>";
/// The markers that end a value. Models leave out ends; what follows then is on a line of its own.
const END_VALUE: [&str; 4] = [
    END_PARAMETER,
    "\n<parameter=",
    "\n</function>",
    "\n</tool_call>",
];

/// The kind of values that are passed on as they arrive.
const STREAMED: ValueKind = ValueKind::Text { or_null: false };
/// The longest name of a function or a parameter, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// A call that is being read, and becomes JSON.
#[derive(Debug, Default)]
pub struct XmlCall {
    at: At,
    signature: Option<Signature>,
    /// The parameters so far. A second value of a parameter is dropped.
    keys: Vec<String>,
    /// A value that is not written before it is complete.
    value: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum At {
    /// In the name of the function.
    #[default]
    Name,
    /// Before, between and after parameters.
    Body,
    /// In the name of a parameter.
    Key,
    /// In a value, of which nothing was read or something.
    Value { kind: ValueKind, begun: bool },
    /// In a value that is dropped.
    Dropped,
}

/// The result of reading a piece of a call.
#[derive(Debug, PartialEq)]
pub enum XmlEffect {
    /// A call of this function has begun.
    Begin(String),
    /// The text is no call.
    Reject,
    /// JSON text of the arguments.
    Arguments(String),
    /// The call is complete.
    End,
}

impl XmlCall {
    /// Whether the text is a call for certain.
    pub fn has_begun(&self) -> bool {
        self.at != At::Name
    }

    /// Reads from the beginning of `rest`, what follows [`FUNCTION`]. Returns the number of bytes that were read, and
    /// their effect; `None` = more text must come first. After [`XmlEffect::Reject`] and [`XmlEffect::End`] it must not
    /// be called.
    pub fn read(&mut self, rest: &str, known: &[Signature]) -> Option<(usize, XmlEffect)> {
        let (bytes, json) = match self.at {
            At::Name => {
                let signature = |(name, bytes)| {
                    let found = known.iter().find(|known| known.name == name)?;
                    Some((found, bytes))
                };
                let Some((signature, bytes)) = name(rest)?.and_then(signature) else {
                    return Some((0, XmlEffect::Reject));
                };
                self.signature = Some(signature.clone());
                self.at = At::Body;
                return Some((bytes, XmlEffect::Begin(signature.name.clone())));
            }
            At::Body => {
                let markers = [PARAMETER, END_PARAMETER, END_FUNCTION, END_CALL];
                if rest.starts_with(PARAMETER) {
                    self.at = At::Key;
                    (PARAMETER.len(), String::new())
                } else if rest.starts_with(END_FUNCTION) {
                    return Some((END_FUNCTION.len(), XmlEffect::End));
                } else if rest.starts_with(END_CALL) {
                    return Some((0, XmlEffect::End));
                } else if markers.iter().any(|marker| marker.starts_with(rest)) {
                    return None;
                } else {
                    (rest.chars().next()?.len_utf8(), String::new())
                }
            }
            At::Key => match name(rest)? {
                Some((key, bytes)) => (bytes, self.begin_value(key)),
                None => {
                    self.at = At::Body;
                    (0, String::new())
                }
            },
            // The value is on lines of its own.
            At::Value { kind, begun: false } => {
                self.at = At::Value { kind, begun: true };
                let quote = if kind == STREAMED { "\"" } else { "" };
                (usize::from(rest.starts_with('\n')), quote.into())
            }
            At::Value { .. } | At::Dropped => {
                let (text, next) = value_text(rest)?;
                let json = self.in_value(text, next.is_some());
                (next.unwrap_or(text.len()), json)
            }
        };
        Some((bytes, XmlEffect::Arguments(json)))
    }

    /// Begins the value of the parameter `key`. Returns the JSON before the value.
    fn begin_value(&mut self, key: &str) -> String {
        if self.keys.iter().any(|known| known == key) {
            self.at = At::Dropped;
            return String::new();
        }
        let comma = if self.keys.is_empty() { "" } else { ", " };
        let signature = self.signature.as_ref();
        let kind = signature.map_or(STREAMED, |signature| signature.kind(key));
        self.keys.push(key.to_owned());
        self.at = At::Value { kind, begun: false };
        format!("{comma}{}: ", Value::from(key))
    }

    /// Adds a piece of a value, which may be the last. Returns the JSON that is certain now.
    fn in_value(&mut self, text: &str, is_last: bool) -> String {
        let at = self.at;
        if is_last {
            self.at = At::Body;
        }
        match at {
            At::Value { kind, .. } if kind == STREAMED => {
                escaped(text) + if is_last { "\"" } else { "" }
            }
            At::Value { kind, .. } => {
                self.value += text;
                if is_last {
                    complete(&std::mem::take(&mut self.value), kind)
                } else {
                    String::new()
                }
            }
            _ => String::new(),
        }
    }
}

/// A name, which ends before `>`, and the number of bytes with `>`. `Some(None)` if it is no name, `None` if more text must
/// come first.
fn name(rest: &str) -> Option<Option<(&str, usize)>> {
    match rest.find(['>', '\n']) {
        Some(at) if rest[at..].starts_with('>') && at <= MAX_NAME_BYTES => {
            Some(Some((rest[..at].trim(), at + 1)))
        }
        None if rest.len() <= MAX_NAME_BYTES => None,
        _ => Some(None),
    }
}

/// Returns the text that is certain to belong to a value, and, if the value ends there, the bytes up to the end of
/// it. `None` if nothing is certain.
fn value_text(rest: &str) -> Option<(&str, Option<usize>)> {
    let (end, marker) = until_marker(rest, &END_VALUE);
    let text = &rest[..end];
    // The last line break may be that before the end.
    let line = text.strip_suffix('\n').unwrap_or(text);
    match marker {
        Some(END_PARAMETER) => Some((line, Some(end + END_PARAMETER.len()))),
        Some(_) => Some((text, Some(end))),
        None => (!line.is_empty()).then_some((line, None)),
    }
}

/// `text` as a part of a JSON text between its quotes.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// The JSON of a value that is complete. What should be JSON and is none is a text.
fn complete(value: &str, kind: ValueKind) -> String {
    let trimmed = value.trim();
    match kind {
        ValueKind::Text { .. } if trimmed == "null" => "null".into(),
        ValueKind::Text { .. } => Value::from(value).to_string(),
        ValueKind::Json if serde_json::from_str::<IgnoredAny>(trimmed).is_ok() => {
            trimmed.to_owned()
        }
        // Qwen also writes Python's literals.
        ValueKind::Json => {
            python::to_json(trimmed).unwrap_or_else(|| Value::from(value).to_string())
        }
    }
}

/// Returns the text that a model writes to make `call`.
pub fn write(call: &WrittenCall<'_>) -> String {
    let arguments: Map<String, Value> = serde_json::from_str(call.arguments).unwrap_or_default();
    let parameter = |(key, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        format!("{PARAMETER}{key}>\n{value}\n{END_PARAMETER}\n")
    };
    let parameters: String = arguments.iter().map(parameter).collect();
    format!("{FUNCTION}{}>\n{parameters}{END_FUNCTION}", call.name)
}
