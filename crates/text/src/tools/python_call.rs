//! Calls in Python with named arguments, as Llama 4, LFM2 and OLMo 3 write them: `f(a=1, b='x')`.

use super::WrittenCall;
use super::python;
use super::signature::Signature;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// The longest name of a function or an argument, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// A call that is being read, a character at a time, and becomes JSON.
#[derive(Debug, Default)]
pub struct PythonCall {
    at: At,
    name: String,
    /// The name of the current argument, and its value so far.
    key: String,
    value: String,
    /// The place in the value.
    extent: PythonExtent,
    /// Whether the text is a call for certain.
    begun: bool,
    /// The arguments so far. A second value of an argument is dropped.
    keys: Vec<String>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum At {
    /// In the name of the function.
    #[default]
    Name,
    /// Before an argument, or in its name.
    Key,
    /// In the value of an argument.
    Value,
    /// In an argument without a name, which is dropped.
    Dropped,
}

/// The effect of a character on the call.
#[derive(Debug, PartialEq)]
pub enum PythonEffect {
    /// Nothing is certain yet, or nothing new.
    Held,
    /// The call has begun, with this JSON text of its arguments.
    Begin(&'static str),
    /// More JSON text of the arguments.
    Arguments(String),
    /// The call is complete. This is the rest of its arguments.
    End(String),
    /// The text is no call.
    Reject,
}

impl PythonCall {
    /// The function's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the text is a call for certain.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Adds a character. After [`PythonEffect::End`] it must not be called; after [`PythonEffect::Begin`] with `{` the
    /// character has to be added again.
    pub fn push(&mut self, c: char, known: &[Signature]) -> PythonEffect {
        match self.at {
            At::Name if c == '(' && known.iter().any(|tool| tool.name == self.name) => {
                self.at = At::Key;
            }
            At::Name if is_in_name(c) && self.name.len() < MAX_NAME_BYTES => self.name.push(c),
            At::Name => return PythonEffect::Reject,
            At::Key => return self.in_key(c),
            At::Value | At::Dropped => return self.in_value(c),
        }
        PythonEffect::Held
    }

    fn in_key(&mut self, c: char) -> PythonEffect {
        match c {
            ')' if self.key.trim().is_empty() => return self.end(String::new()),
            // Space and a comma after an argument.
            ',' if self.key.trim().is_empty() && self.begun => self.key.clear(),
            '=' if is_key(self.key.trim()) => {
                self.key = self.key.trim().to_owned();
                self.begin_argument(At::Value);
            }
            _ if is_in_key(c) && self.key.len() < MAX_NAME_BYTES => self.key.push(c),
            _ if self.begun => {
                let read = std::mem::take(&mut self.key);
                self.begin_argument(At::Dropped);
                return read
                    .chars()
                    .chain([c])
                    .map(|c| self.in_value(c))
                    .last()
                    .unwrap_or(PythonEffect::Held);
            }
            _ => return PythonEffect::Reject,
        }
        PythonEffect::Held
    }

    fn begin_argument(&mut self, at: At) {
        self.at = at;
        self.value.clear();
        self.extent = PythonExtent::default();
    }

    fn in_value(&mut self, c: char) -> PythonEffect {
        if self.at == At::Value && !self.begun {
            // A comparison is no argument.
            if c == '=' {
                return PythonEffect::Reject;
            }
            self.begun = true;
            return PythonEffect::Begin("{");
        }
        if !self.extent.push(c) {
            if self.at == At::Value {
                self.value.push(c);
            }
            return PythonEffect::Held;
        }
        let json = match self.at {
            At::Value => self.argument(),
            _ => String::new(),
        };
        self.at = At::Key;
        self.key.clear();
        if c == ')' {
            return self.end(json);
        }
        PythonEffect::Arguments(json)
    }

    /// The JSON of the argument that is complete.
    fn argument(&mut self) -> String {
        let key = std::mem::take(&mut self.key);
        if self.keys.contains(&key) {
            return String::new();
        }
        let comma = if self.keys.is_empty() { "" } else { ", " };
        let json = format!(
            "{comma}{}: {}",
            Value::from(key.as_str()),
            json(self.value.trim())
        );
        self.keys.push(key);
        json
    }

    /// Ends the call, whose arguments end with `json`.
    fn end(&mut self, json: String) -> PythonEffect {
        let begin = if std::mem::replace(&mut self.begun, true) {
            ""
        } else {
            "{"
        };
        PythonEffect::End(format!("{begin}{json}}}"))
    }
}

/// Whether a function's name may have this character.
fn is_in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// Whether an argument's name may have this character. Schemas have names that Python does not.
fn is_in_key(c: char) -> bool {
    !c.is_control() && !"=,()[]{}'\"".contains(c) || matches!(c, '\n' | '\r' | '\t')
}

/// Whether an argument can be given by this name.
pub fn is_key(name: &str) -> bool {
    !name.is_empty()
        && name.trim() == name
        && name.len() < MAX_NAME_BYTES
        && name.chars().all(is_in_key)
}

/// The JSON of a value: JSON itself, or a literal of Python. What is neither is a text.
fn json(value: &str) -> String {
    if serde_json::from_str::<IgnoredAny>(value).is_ok() {
        return value.to_owned();
    }
    python::to_json(value).unwrap_or_else(|| Value::from(value).to_string())
}

/// Returns the text that a model writes to make `call`.
pub fn write(call: &WrittenCall<'_>) -> String {
    let arguments: Map<String, Value> = serde_json::from_str(call.arguments).unwrap_or_default();
    let argument = |(key, value): (&String, &Value)| format!("{key}={}", python::literal(value));
    let arguments: Vec<String> = arguments.iter().map(argument).collect();
    format!("{}({})", call.name, arguments.join(", "))
}

/// Finds where a value ends: before a comma or a parenthesis that is not within it.
#[derive(Debug, Default, Clone, Copy)]
struct PythonExtent {
    depth: usize,
    string: Quotes,
}

#[derive(Debug, Default, Clone, Copy)]
enum Quotes {
    /// Not in a string.
    #[default]
    None,
    /// After one or two quotes, which may be the first of three.
    Opening(char, usize),
    /// In a string; whether it has three quotes at each end.
    In(char, bool),
    /// After a backslash in such a string.
    Escaped(char, bool),
    /// After one or two of the three quotes that end a string.
    Closing(char, usize),
}

impl PythonExtent {
    /// Adds a character. Returns whether the value ended before it.
    fn push(&mut self, c: char) -> bool {
        let in_string = |quote: char, long: bool| match c {
            '\\' => Quotes::Escaped(quote, long),
            c if c == quote && long => Quotes::Closing(quote, 1),
            c if c == quote => Quotes::None,
            _ => Quotes::In(quote, long),
        };
        self.string = match self.string {
            Quotes::Opening(quote, 1) if c == quote => Quotes::Opening(quote, 2),
            Quotes::Opening(quote, 1) => in_string(quote, false),
            Quotes::Opening(quote, _) if c == quote => Quotes::In(quote, true),
            Quotes::In(quote, long) => in_string(quote, long),
            Quotes::Escaped(quote, long) => Quotes::In(quote, long),
            Quotes::Closing(quote, 2) if c == quote => Quotes::None,
            Quotes::Closing(quote, _) if c == quote => Quotes::Closing(quote, 2),
            Quotes::Closing(quote, _) => in_string(quote, true),
            // After an empty string, too.
            Quotes::None | Quotes::Opening(..) => return self.outside(c),
        };
        false
    }

    fn outside(&mut self, c: char) -> bool {
        self.string = match c {
            '\'' | '"' => Quotes::Opening(c, 1),
            _ => Quotes::None,
        };
        match c {
            ',' | ')' if self.depth == 0 => return true,
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}
