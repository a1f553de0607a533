//! Reads the JSON object of one call, a character at a time.

/// The effect of a character on the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing is certain yet.
    Held,
    /// The name is known, and the object of the arguments begins with this character.
    Begin,
    /// The character is part of the arguments that have begun.
    Argument,
    /// The object is complete.
    End,
    /// This is not the object of a call.
    Reject,
}

/// Finds where a JSON value ends. It counts brackets and does not check what is between them: arguments
/// are passed on as the model writes them.
#[derive(Debug, Clone, Default)]
pub(super) struct Extent {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Extent {
    /// The extent of a value that begins with `c`.
    pub fn begin(c: char) -> Self {
        let mut extent = Self::default();
        extent.push(c);
        extent
    }

    /// Adds a character of an object, a list or a string. Returns whether it is the last one.
    pub fn push(&mut self, c: char) -> bool {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
        } else {
            match c {
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.depth == 0 && !self.in_string
    }
}

/// The part of the object that comes next.
#[derive(Debug, Default)]
enum At {
    #[default]
    Start,
    Key,
    InKey(Extent),
    Colon,
    Value,
    /// In a value that is an object, a list or a string.
    InValue(Extent),
    /// In a value that is a number or a word.
    InScalar,
    Comma,
    End,
}

/// The keys of a call, in quotes.
const NAMES: [&str; 2] = ["\"name\"", "\"tool_name\""];
const ARGUMENTS: [&str; 2] = ["\"arguments\"", "\"parameters\""];

/// The object of a call: `name` or `tool_name`, and its arguments under `arguments` or `parameters`. Other keys
/// are skipped.
#[derive(Debug, Default)]
pub(super) struct CallObject {
    at: At,
    /// The current key, and then the value that is kept, as JSON text.
    key: String,
    value: String,
    name: Option<String>,
    arguments: Option<String>,
    /// Whether the arguments have begun with [`Effect::Begin`].
    begun: bool,
}

/// A call has no key that is longer.
const MAX_KEY_BYTES: usize = 64;

impl CallObject {
    /// Whether the arguments have begun.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// The function's name, once it is known.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// After [`Effect::End`], the arguments, if they have not begun before: the name came after them, or
    /// they are not an object. `None` if they cannot be those of a call.
    pub fn arguments(&self) -> Option<String> {
        let Some(text) = self.arguments.as_deref() else {
            return Some("{}".into());
        };
        // Some models write the object as a string.
        let unquoted = serde_json::from_str::<String>(text).ok();
        match unquoted.as_deref().unwrap_or(text).trim() {
            "null" | "" => Some("{}".into()),
            object if object.starts_with('{') => Some(object.to_owned()),
            _ => None,
        }
    }

    /// Whether the key that was read last is none that calls have.
    pub fn has_other_key(&self) -> bool {
        const OTHERS: [&str; 3] = ["\"id\"", "\"type\"", "\"tool_call_id\""];
        let key = self.key.as_str();
        let is_known = NAMES.contains(&key) || ARGUMENTS.contains(&key) || OTHERS.contains(&key);
        matches!(self.at, At::Colon) && !is_known
    }

    fn is_name(&self) -> bool {
        NAMES.contains(&self.key.as_str()) && self.name.is_none()
    }

    fn is_arguments(&self) -> bool {
        ARGUMENTS.contains(&self.key.as_str()) && self.arguments.is_none() && !self.begun
    }

    /// Adds a character.
    pub fn push(&mut self, c: char) -> Effect {
        let space = c.is_ascii_whitespace();
        match &mut self.at {
            At::Start if c == '{' => self.at = At::Key,
            At::Key | At::Colon | At::Value | At::Comma if space => {}
            At::Key | At::Comma if c == '}' => {
                self.at = At::End;
                return Effect::End;
            }
            At::Comma if c == ',' => self.at = At::Key,
            At::Key if c == '"' => {
                self.key = c.into();
                self.at = At::InKey(Extent::begin(c));
            }
            At::InKey(extent) => {
                self.key.push(c);
                if extent.push(c) {
                    self.at = At::Colon;
                } else if self.key.len() > MAX_KEY_BYTES {
                    return Effect::Reject;
                }
            }
            At::Colon if c == ':' => self.at = At::Value,
            At::Value => return self.begin_value(c),
            At::InValue(extent) => {
                let last = extent.push(c);
                return self.in_value(c, last);
            }
            At::InScalar if space => return self.end_scalar(At::Comma, Effect::Held),
            At::InScalar if c == ',' => return self.end_scalar(At::Key, Effect::Held),
            At::InScalar if c == '}' => return self.end_scalar(At::End, Effect::End),
            At::InScalar if c.is_ascii_alphanumeric() || "+-.".contains(c) => self.value.push(c),
            _ => return Effect::Reject,
        }
        Effect::Held
    }

    fn begin_value(&mut self, c: char) -> Effect {
        self.value.clear();
        let is_text = c == '"';
        if self.is_name() && !is_text {
            return Effect::Reject;
        }
        if is_text || c == '{' || c == '[' {
            if c == '{' && self.is_arguments() && self.name.is_some() {
                self.begun = true;
            }
            self.at = At::InValue(Extent::begin(c));
            if self.begun && self.arguments.is_none() {
                return Effect::Begin;
            }
            self.keep(c);
        } else if c.is_ascii_alphanumeric() || c == '-' {
            self.at = At::InScalar;
            self.value.push(c);
        } else {
            return Effect::Reject;
        }
        Effect::Held
    }

    fn keep(&mut self, c: char) {
        if self.is_name() || self.is_arguments() {
            self.value.push(c);
        }
    }

    fn in_value(&mut self, c: char, last: bool) -> Effect {
        let streams = self.begun && self.arguments.is_none();
        if !streams {
            self.keep(c);
        }
        if last {
            self.at = At::Comma;
            if streams {
                // The values of further keys do not matter.
                self.arguments = Some(String::new());
            } else if self.is_name() {
                match serde_json::from_str(&self.value) {
                    Ok(name) => self.name = Some(name),
                    Err(_) => return Effect::Reject,
                }
            } else if self.is_arguments() {
                self.arguments = Some(std::mem::take(&mut self.value));
            }
        }
        if streams {
            Effect::Argument
        } else {
            Effect::Held
        }
    }

    fn end_scalar(&mut self, next: At, effect: Effect) -> Effect {
        if self.is_arguments() {
            self.arguments = Some(std::mem::take(&mut self.value));
        }
        self.at = next;
        effect
    }
}
