//! Calls whose arguments stand between tags, as Qwen3-Coder writes them (`<function=NAME>`, for each argument
//! `<parameter=NAME>`, its value on lines of its own, `</parameter>`, and `</function>`), MiniMax M2, Seed-OSS, GLM and DeepSeek
//! V3.2.

use super::WrittenCall;
use super::python;
use super::signature::{Signature, ValueKind};
use super::syntax::Tags;
use crate::json::{escaped, python_json};
use crate::part::until_marker;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// The kind of values that are passed on as they arrive.
const STREAMED: ValueKind = ValueKind::Text { or_null: false };
/// The longest name of a function or a parameter, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// A call that is being read, and becomes JSON.
#[derive(Debug)]
pub struct XmlCall {
    tags: &'static Tags,
    /// The text after the format's calls.
    end: &'static str,
    at: At,
    signature: Option<Signature>,
    /// The parameters so far. A second value of a parameter is dropped.
    keys: Vec<String>,
    /// The name of a parameter whose value has not begun; then a value that is not written before it is complete.
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
    /// After the name of a parameter, before the tag of its value.
    BeforeValue,
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
    /// Reads a call with these tags in a format in which `end` comes after calls.
    pub fn new(tags: &'static Tags, end: &'static str) -> Self {
        Self {
            tags,
            end,
            at: At::default(),
            signature: None,
            keys: Vec::new(),
            value: String::new(),
        }
    }

    /// Whether the text is a call for certain.
    pub fn has_begun(&self) -> bool {
        self.at != At::Name
    }

    /// Reads from the beginning of `rest`, what follows the text before the function's name. Returns the number of bytes
    /// that were read, and their effect; `None` = more text must come first. After [`XmlEffect::Reject`] and
    /// [`XmlEffect::End`] it must not be called.
    pub fn read(&mut self, rest: &str, known: &[Signature]) -> Option<(usize, XmlEffect)> {
        let tags = self.tags;
        let (bytes, json) = match self.at {
            At::Name => {
                let signature = |name: Name<'_>| {
                    let found = known.iter().find(|known| known.name == name.text)?;
                    Some((found, name.bytes))
                };
                let Some((signature, bytes)) = name(rest, &[tags.after_name])?.and_then(signature)
                else {
                    return Some((0, XmlEffect::Reject));
                };
                self.signature = Some(signature.clone());
                self.at = At::Body;
                return Some((bytes, XmlEffect::Begin(signature.name.clone())));
            }
            At::Body => return self.in_body(rest),
            At::Key => match name(rest, &ends_of_names(tags))? {
                Some(key) if tags.value.is_empty() => {
                    (key.bytes, self.begin_value(key.text, key.end))
                }
                Some(key) => {
                    key.text.clone_into(&mut self.value);
                    self.at = At::BeforeValue;
                    (key.bytes, String::new())
                }
                None => {
                    self.at = At::Body;
                    (0, String::new())
                }
            },
            At::BeforeValue => {
                let space = rest.len() - rest.trim_ascii_start().len();
                if space > 0 {
                    (space, String::new())
                } else if rest.starts_with(tags.value) {
                    let key = std::mem::take(&mut self.value);
                    (tags.value.len(), self.begin_value(&key, ""))
                } else if tags.value.starts_with(rest) {
                    return None;
                } else {
                    self.at = At::Body;
                    (0, String::new())
                }
            }
            At::Value { kind, begun: false } => {
                // The line break before a value may be that before the end of one that is empty.
                let ends = tags.ends_of_values;
                let is_empty = ends.iter().any(|end| rest.starts_with(*end));
                if !is_empty && ends.iter().any(|end| end.starts_with(rest)) {
                    return None;
                }
                self.at = At::Value { kind, begun: true };
                let quote = if kind == STREAMED { "\"" } else { "" };
                let has_line = tags.lines && !is_empty && rest.starts_with('\n');
                (usize::from(has_line), quote.into())
            }
            At::Value { .. } | At::Dropped => {
                let (text, next) = value_text(rest, tags)?;
                let json = self.in_value(text, next.is_some());
                (next.unwrap_or(text.len()), json)
            }
        };
        Some((bytes, XmlEffect::Arguments(json)))
    }

    /// Reads what stands before, between and after parameters.
    fn in_body(&mut self, rest: &str) -> Option<(usize, XmlEffect)> {
        let (parameter, end_parameter) = (self.tags.parameter[0], self.tags.end_parameter);
        let end_function = self.tags.end_function;
        let markers = [parameter, end_parameter, end_function, self.end];
        let bytes = if rest.starts_with(parameter) {
            self.at = At::Key;
            parameter.len()
        } else if !end_function.is_empty() && rest.starts_with(end_function) {
            return Some((end_function.len(), XmlEffect::End));
        } else if rest.starts_with(self.end) {
            return Some((0, XmlEffect::End));
        } else if markers.iter().any(|marker| marker.starts_with(rest)) {
            return None;
        } else {
            rest.chars().next()?.len_utf8()
        };
        Some((bytes, XmlEffect::Arguments(String::new())))
    }

    /// Begins the value of the parameter `key`, whose name ended with `end`. Returns the JSON before the value.
    fn begin_value(&mut self, key: &str, end: &str) -> String {
        if self.keys.iter().any(|known| known == key) {
            self.at = At::Dropped;
            return String::new();
        }
        let comma = if self.keys.is_empty() { "" } else { ", " };
        let signature = self.signature.as_ref();
        let kind = signature.map_or(STREAMED, |signature| signature.kind(key));
        // A text where only JSON fits is read as JSON, if it is some.
        let kind = match self.tags.typed {
            Some([text, _]) if end == text && kind != ValueKind::Json => STREAMED,
            Some([_, json]) if end == json => ValueKind::Json,
            _ => kind,
        };
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

/// The texts of which any ends the name of a parameter.
fn ends_of_names(tags: &Tags) -> Vec<&'static str> {
    let typed = tags.typed.into_iter().flatten();
    typed.chain([tags.parameter[1]]).collect()
}

/// A name, the number of bytes up to what follows it, and the text that ended it.
struct Name<'t> {
    text: &'t str,
    bytes: usize,
    end: &'static str,
}

/// A name, which ends before any of `ends`; an empty one stands for the end of the line, or the beginning of a tag.
/// `Some(None)` if it is no name, `None` if more text must come first.
fn name<'t>(rest: &'t str, ends: &[&'static str]) -> Option<Option<Name<'t>>> {
    let ends_with_tag = ends.contains(&"");
    let markers = ends
        .iter()
        .map(|&end| if end.is_empty() { "<" } else { end });
    let markers: Vec<&'static str> = markers.chain(["\n"]).collect();
    let (at, found) = until_marker(rest, &markers);
    let end = match found {
        // The tag comes next.
        Some("<") if ends_with_tag => Some(("", 0)),
        Some("\n") => ends_with_tag.then_some(("", 1)),
        Some(end) => Some((end, end.len())),
        None if at <= MAX_NAME_BYTES => return None,
        None => None,
    };
    let fits = end.filter(|_| at <= MAX_NAME_BYTES);
    Some(fits.map(|(end, len)| Name {
        text: rest[..at].trim(),
        bytes: at + len,
        end,
    }))
}

/// Returns the text that is certain to belong to a value, and, if the value ends there, the bytes up to the end of
/// it. `None` if nothing is certain.
fn value_text<'t>(rest: &'t str, tags: &Tags) -> Option<(&'t str, Option<usize>)> {
    let ends: Vec<&str> = [tags.end_parameter]
        .into_iter()
        .chain(tags.ends_of_values.iter().copied())
        .collect();
    let (end, marker) = until_marker(rest, &ends);
    let text = &rest[..end];
    // The last line break may be that before the end.
    let line = text
        .strip_suffix('\n')
        .filter(|_| tags.lines)
        .unwrap_or(text);
    match marker {
        Some(found) if found == tags.end_parameter => Some((line, Some(end + found.len()))),
        Some(_) => Some((text, Some(end))),
        None => (!line.is_empty()).then_some((line, None)),
    }
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
pub fn write(tags: &Tags, call: &WrittenCall<'_>) -> String {
    let arguments: Map<String, Value> = serde_json::from_str(call.arguments).unwrap_or_default();
    let parameter = |(key, value): (&String, &Value)| {
        let is_text = value.is_string();
        let value = match value {
            Value::String(text) => text.clone(),
            value => python_json(value).unwrap_or_default(),
        };
        let before = tags.before_value(key, is_text);
        let line = tags.line();
        format!("{before}{value}{line}{}\n", tags.end_parameter)
    };
    let parameters: String = arguments.iter().map(parameter).collect();
    let (function, before) = (tags.function, tags.before_parameters());
    format!(
        "{function}{}{before}{parameters}{}",
        call.name, tags.end_function
    )
}
