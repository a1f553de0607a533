//! The sources that a text can be asked to follow, and the checks that bound them.

use foretoken_core::error::{Error, FieldPath, Result};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

/// Maximum bytes of a grammar's source.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Maximum depth of brackets in a grammar in text form. JSON values are bounded when they are parsed.
const MAX_DEPTH: usize = 100;

/// The source of a grammar.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid under this schema. Its `x-guidance` may set llguidance's options for JSON.
    JsonSchema(Value),
    /// A text that matches this regular expression (Rust's syntax) as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's variant of Lark, which may contain `%json {...}`.
    Lark(String),
}

/// The style in which JSON is written unless a schema's `x-guidance` says otherwise: on one line, as Python's
/// `json.dumps` writes it. So everything but the values is forced, and no model can go on with blanks for ever.
pub(super) fn json_style() -> Map<String, Value> {
    let style = json!({
        "whitespace_flexible": false,
        "item_separator": ", ",
        "key_separator": ": ",
    });
    style.as_object().cloned().unwrap_or_default()
}

/// `schema` with the options of [`json_style`] that it does not set itself.
pub(super) fn styled(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        // "schema is false" is then the parser's own error.
        Value::Bool(false) => json!({"anyOf": [false]}),
        other => other,
    };
    if let Some(object) = schema.as_object_mut() {
        let mut options = json_style();
        if let Some(Value::Object(own)) = object.remove("x-guidance") {
            options.extend(own);
        }
        object.insert("x-guidance".into(), options.into());
    }
    schema
}

fn object_schema() -> Value {
    styled(json!({"type": "object"}))
}

/// The right side of a rule for one of `texts`.
fn alternatives(texts: &[String]) -> String {
    let literals: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
    literals.join(" | ")
}

impl GrammarSource {
    /// The right side of a rule of a Lark grammar; `None` for a grammar, which has rules of its own.
    pub fn rule(&self) -> Option<String> {
        match self {
            Self::JsonObject => Some(format!("%json {}", object_schema())),
            Self::JsonSchema(schema) => Some(format!("%json {}", styled(schema.clone()))),
            Self::Regex(regex) => Some(regex_literal(regex)),
            Self::Choice(texts) => Some(alternatives(texts)),
            Self::Lark(_) => None,
        }
    }

    /// Checks sizes and depth, and returns llguidance's form of it.
    ///
    /// # Errors
    /// `Invalid`, naming `field`.
    pub(super) fn top_level(&self, field: &FieldPath) -> Result<TopLevelGrammar> {
        let refuse = |what: String| Err(Error::field(field, format!(" {what}")));
        let size = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        };
        if size > MAX_SOURCE_BYTES {
            return refuse(format!(
                "may have at most {MAX_SOURCE_BYTES} bytes, not {size}"
            ));
        }
        if let Self::Regex(text) | Self::Lark(text) = self
            && depth(text) > MAX_DEPTH
        {
            return refuse(format!("may nest brackets at most {MAX_DEPTH} deep"));
        }
        let grammar = match self {
            Self::JsonObject => GrammarWithLexer::from_json_schema(object_schema()),
            Self::JsonSchema(schema @ (Value::Object(_) | Value::Bool(_))) => {
                GrammarWithLexer::from_json_schema(styled(schema.clone()))
            }
            Self::JsonSchema(other) => {
                return refuse(format!("must be an object or a boolean, not {other}"));
            }
            Self::Regex(text) => GrammarWithLexer::from_regex(text),
            Self::Choice(texts) if texts.is_empty() => {
                return refuse("must have at least one entry".into());
            }
            Self::Choice(texts) => {
                GrammarWithLexer::from_lark(format!("start: {}", alternatives(texts)))
            }
            Self::Lark(text) if text.contains("::=") => {
                return refuse(
                    "must be in Lark's syntax (`start: \"yes\" | \"no\"`); `::=` is GBNF's".into(),
                );
            }
            Self::Lark(text) => GrammarWithLexer::from_lark(text.clone()),
        };
        Ok(TopLevelGrammar::from_grammar(grammar))
    }
}

/// The literal of a regular expression, which has its slashes as escapes: a bare one ends a literal.
pub fn regex_literal(regex: &str) -> String {
    let (mut out, mut chars) = (String::from("/"), regex.chars());
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            ('/', _) => out += "\\x2F",
            (_, true) => match chars.next() {
                Some('/') => out += "\\x2F",
                escaped => out.extend(std::iter::once(c).chain(escaped)),
            },
            _ => out.push(c),
        }
    }
    out.push('/');
    out
}

/// The largest number of brackets that are open at once. Brackets in strings count, too, as far as they are
/// not closed: no real grammar comes near the limit.
fn depth(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => open += 1,
            ')' | ']' | '}' => open = open.saturating_sub(1),
            _ => (),
        }
        most = most.max(open);
    }
    most
}
