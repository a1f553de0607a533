//! Calls in XML, as Qwen3-Coder and Qwen 3.5 write them:
//! `<function=NAME>`, for each argument `<parameter=NAME>`, its value on lines of its own, `</parameter>`, and
//! `</function>`.

use super::WrittenCall;
use super::python;
use super::signature::{Signature, ValueKind};
use crate::part::partial_marker;
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

/// The longest name of a function or a parameter, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// A call that is being read, and becomes JSON.
#[derive(Debug, Default)]
pub struct XmlCall {
    at: At,
    signature: Option<Signature>,
    /// The parameters so far. A second value of one is dropped.
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
pub struct XmlRead {
    pub bytes: usize,
    pub effect: XmlEffect,
}

#[derive(Debug, PartialEq)]
pub enum XmlEffect {
    /// It is a call of this function.
    Begin(String),
    /// It is no call.
    Reject,
    /// JSON text of the arguments.
    Arguments(String),
    /// The last of it: the call is complete.
    End(String),
}

impl XmlCall {
    /// Whether it is a call for certain.
    pub fn has_begun(&self) -> bool {
        self.at != At::Name
    }

    /// Reads from the beginning of `rest`, what follows [`FUNCTION`]; `None` = more must come first. After
    /// [`XmlEffect::Reject`] and [`XmlEffect::End`] it must not be called.
    pub fn read(&mut self, rest: &str, known: &[Signature]) -> Option<XmlRead> {
        let read = |bytes: usize, json: String| {
            let effect = XmlEffect::Arguments(json);
            Some(XmlRead { bytes, effect })
        };
        match self.at {
            At::Name => {
                let effect = match name(rest)? {
                    Ok((name, bytes)) => match known.iter().find(|known| known.name == name) {
                        Some(signature) => {
                            self.signature = Some(signature.clone());
                            self.at = At::Body;
                            let effect = XmlEffect::Begin(name.to_owned());
                            return Some(XmlRead { bytes, effect });
                        }
                        None => XmlEffect::Reject,
                    },
                    Err(()) => XmlEffect::Reject,
                };
                Some(XmlRead { bytes: 0, effect })
            }
            At::Body => {
                let marker = |marker: &str| rest.starts_with(marker).then_some(marker.len());
                if let Some(bytes) = marker(PARAMETER) {
                    self.at = At::Key;
                    return read(bytes, String::new());
                }
                // The end of the function, or what follows it.
                let end = marker(END_FUNCTION).or_else(|| rest.starts_with(END_CALL).then_some(0));
                if let Some(bytes) = end {
                    let effect = XmlEffect::End("}".into());
                    return Some(XmlRead { bytes, effect });
                }
                let markers = [PARAMETER, END_PARAMETER, END_FUNCTION, END_CALL];
                if markers.iter().any(|marker| marker.starts_with(rest)) {
                    return None;
                }
                let c = rest.chars().next()?;
                read(c.len_utf8(), String::new())
            }
            At::Key => match name(rest)? {
                Ok((key, bytes)) => {
                    if self.keys.iter().any(|known| known == key) {
                        self.at = At::Dropped;
                        return read(bytes, String::new());
                    }
                    let comma = if self.keys.is_empty() { "" } else { ", " };
                    let json = format!("{comma}{}: ", Value::from(key));
                    let text = ValueKind::Text { or_null: false };
                    let signature = self.signature.as_ref();
                    let kind = signature.map_or(text, |signature| signature.kind(key));
                    self.keys.push(key.to_owned());
                    self.at = At::Value { kind, begun: false };
                    read(bytes, json)
                }
                Err(()) => {
                    self.at = At::Body;
                    read(0, String::new())
                }
            },
            At::Value { kind, begun } => {
                // The value is on lines of its own.
                if !begun {
                    let bytes = usize::from(rest.starts_with('\n'));
                    self.at = At::Value { kind, begun: true };
                    let streams = kind == ValueKind::Text { or_null: false };
                    return read(bytes, if streams { "\"".into() } else { String::new() });
                }
                let (text, next) = value_text(rest)?;
                let mut json = String::new();
                if kind == (ValueKind::Text { or_null: false }) {
                    json += &escaped(text);
                    if next.is_some() {
                        json.push('"');
                    }
                } else {
                    self.value += text;
                    if next.is_some() {
                        json = complete(&std::mem::take(&mut self.value), kind);
                    }
                }
                let bytes = next.unwrap_or(text.len());
                if next.is_some() {
                    self.at = At::Body;
                }
                read(bytes, json)
            }
            At::Dropped => {
                let (text, next) = value_text(rest)?;
                if next.is_some() {
                    self.at = At::Body;
                }
                read(next.unwrap_or(text.len()), String::new())
            }
        }
    }
}

/// A name up to `>` and the bytes up to there with it; an error if it is none, `None` if more must come.
fn name(rest: &str) -> Option<Result<(&str, usize), ()>> {
    match rest.find(['>', '\n']) {
        Some(at) if rest[at..].starts_with('>') && at <= MAX_NAME_BYTES => {
            Some(Ok((rest[..at].trim(), at + 1)))
        }
        None if rest.len() <= MAX_NAME_BYTES => None,
        _ => Some(Err(())),
    }
}

/// Returns the text that is certain to belong to a value, and, if the value ends there, the bytes up to the end of
/// it. `None` if nothing is certain.
fn value_text(rest: &str) -> Option<(&str, Option<usize>)> {
    let ends = END_VALUE
        .iter()
        .filter_map(|marker| Some((rest.find(marker)?, *marker)));
    if let Some((at, marker)) = ends.min_by_key(|end| end.0) {
        let text = &rest[..at];
        return Some(if marker == END_PARAMETER {
            let text = text.strip_suffix('\n').unwrap_or(text);
            (text, Some(at + marker.len()))
        } else {
            (text, Some(at))
        });
    }
    let partial = END_VALUE.iter().map(|marker| partial_marker(rest, marker));
    let certain = &rest[..rest.len() - partial.max().unwrap_or(0)];
    // The last line break may be that before the end.
    let certain = certain.strip_suffix('\n').unwrap_or(certain);
    (!certain.is_empty()).then_some((certain, None))
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
        // Qwen writes Python's, too.
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
