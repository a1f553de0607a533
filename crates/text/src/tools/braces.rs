//! Arguments between braces, as Gemma 4 writes them: like JSON, with keys without quotes, and texts between marks of
//! their own.

use super::WrittenCall;
use crate::json::escaped;
use crate::part::until_marker;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// Arguments that are being read after the first brace, and become JSON.
#[derive(Debug)]
pub struct BracesArguments {
    /// The mark around a text.
    quote: &'static str,
    /// The text after the call.
    end: &'static str,
    at: At,
    /// A key, or a value that is no text, so far.
    word: String,
    /// The characters that close the objects and lists that are open.
    open: Vec<char>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    Key,
    Value,
    /// In a text between marks, or in one of JSON after a backslash or not; and whether it is a key.
    Text {
        is_key: bool,
    },
    Json {
        is_key: bool,
        escaped: bool,
    },
}

impl BracesArguments {
    /// Reads arguments whose texts are between `quote`, in a format in which `end` comes after calls.
    pub fn new(quote: &'static str, end: &'static str) -> Self {
        Self {
            quote,
            end,
            at: At::Key,
            word: String::new(),
            open: vec!['}'],
        }
    }

    /// Whether all is read.
    pub fn is_complete(&self) -> bool {
        self.open.is_empty()
    }

    /// Reads from the beginning of `rest`. Returns the number of bytes that were read, and their JSON; `None` = more text
    /// must come first.
    pub fn read(&mut self, rest: &str) -> Option<(usize, String)> {
        let c = rest.chars().next()?;
        let is_key = match self.at {
            At::Text { is_key } => return self.text(rest, is_key),
            At::Json { is_key, escaped } => {
                self.at = match c {
                    '"' if !escaped => self.after(is_key),
                    _ => At::Json {
                        is_key,
                        escaped: c == '\\' && !escaped,
                    },
                };
                return Some((c.len_utf8(), c.into()));
            }
            at => at == At::Key,
        };
        for mark in [self.quote, self.end] {
            if rest.len() < mark.len() && mark.starts_with(rest) {
                return None;
            }
        }
        if rest.starts_with(self.end) {
            let closing: String = self.open.drain(..).rev().collect();
            return Some((0, self.take_word(is_key) + &closing));
        }
        if rest.starts_with(self.quote) && self.word.trim().is_empty() {
            self.at = At::Text { is_key };
            return Some((self.quote.len(), "\"".into()));
        }
        let json = match c {
            '"' if self.word.trim().is_empty() => {
                let escaped = false;
                self.at = At::Json { is_key, escaped };
                c.into()
            }
            '{' | '[' => {
                self.word.clear();
                self.open.push(if c == '{' { '}' } else { ']' });
                self.at = self.first();
                c.into()
            }
            '}' | ']' => {
                let word = self.take_word(is_key);
                let closing = self.open.pop().map(String::from);
                self.at = At::Value;
                word + &closing.unwrap_or_default()
            }
            ',' => {
                let word = self.take_word(is_key);
                self.at = self.first();
                word + ", "
            }
            ':' if is_key => {
                let word = self.take_word(true);
                self.at = At::Value;
                word + ": "
            }
            c => {
                self.word.push(c);
                String::new()
            }
        };
        Some((c.len_utf8(), json))
    }

    fn text(&mut self, rest: &str, is_key: bool) -> Option<(usize, String)> {
        let (end, found) = until_marker(rest, &[self.quote]);
        let json = escaped(&rest[..end]);
        match found {
            Some(quote) => {
                self.at = self.after(is_key);
                Some((end + quote.len(), json + "\""))
            }
            None => (end > 0).then_some((end, json)),
        }
    }

    /// The place after a text: its colon comes next, or a comma.
    fn after(&self, is_key: bool) -> At {
        if is_key { At::Key } else { At::Value }
    }

    /// The place at the beginning of what is open.
    fn first(&self) -> At {
        self.after(self.open.last() == Some(&'}'))
    }

    /// The JSON of the word that has ended; empty if there is none.
    fn take_word(&mut self, is_key: bool) -> String {
        let word = std::mem::take(&mut self.word);
        match word.trim() {
            "" => String::new(),
            text if is_key => Value::from(text).to_string(),
            "None" => "null".into(),
            "True" => "true".into(),
            "False" => "false".into(),
            json if serde_json::from_str::<IgnoredAny>(json).is_ok() => json.to_owned(),
            text => Value::from(text).to_string(),
        }
    }
}

/// Returns the text that a model writes to make `call`, with `quote` around texts.
pub fn write(quote: &str, call: &WrittenCall<'_>) -> String {
    let arguments: Map<String, Value> = serde_json::from_str(call.arguments).unwrap_or_default();
    format!("call:{}{}", call.name, written(quote, &arguments.into()))
}

fn written(quote: &str, value: &Value) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(|value| written(quote, value)).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| format!("{key}:{}", written(quote, value));
            format!("{{{}}}", map.iter().map(pair).collect::<Vec<_>>().join(","))
        }
        value => value.to_string(),
    }
}
