//! The parts that the grammars of tool calls share.

use super::text_schema::ANY;
use super::{ToolFormat, function};
use crate::grammar::{GrammarSource, MAX_SOURCE_BYTES, regex_literal, standalone};
use serde_json::{Map, Value, json};

/// Calls of tools.
#[derive(Debug, Clone, Copy)]
pub struct Calls<'a> {
    /// The format in which the model writes calls.
    pub format: ToolFormat,
    /// The functions of which each call calls one; at least one.
    pub tools: &'a [Value],
    /// Whether there may be several calls.
    pub parallel: bool,
    /// The grammars of those whose input is a text. They are followed where the model writes texts as they are and a
    /// token ends them: anywhere else the end of a text, or an escape in it, could be read as a part of the next.
    pub inputs: &'a [InputGrammar],
}

/// The grammar that the input of a custom tool follows, in llguidance's dialect of Lark.
#[derive(Debug, Clone)]
pub struct InputGrammar {
    /// The name of the function that stands for the tool.
    pub tool: String,
    /// A grammar that compiles.
    pub definition: String,
}

impl InputGrammar {
    /// The symbol for the input as it is.
    pub fn rule(&self) -> String {
        format!("%lark {{\n{}\n}}", self.definition)
    }
}

impl<'a> Calls<'a> {
    /// The grammar of the input of `tool`, if that is a text with one.
    pub fn input(&self, tool: &Value) -> Option<&'a InputGrammar> {
        let name = &function(tool)["name"];
        self.inputs.iter().find(|input| *name == *input.tool)
    }
}

/// Calls in an answer at most, so that a model which does not know when to stop stops.
pub const MAX_PARALLEL: usize = 16;

/// Between the alternatives of a rule.
pub const OR: &str = "\n    | ";

/// A string literal of Lark.
pub fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Texts in a grammar, in which markers may be special tokens: no text can stand for such a token.
#[derive(Clone, Copy)]
pub struct Spelling<'a> {
    /// The texts that may be special tokens.
    pub markers: &'a [&'a str],
    /// Returns the id of a marker that is one.
    pub special: &'a dyn Fn(&str) -> Option<u32>,
}

impl Spelling<'_> {
    /// The symbol for `marker`: a token, or a literal.
    pub fn marker(self, marker: &str) -> String {
        match (self.special)(marker) {
            Some(id) => format!("<[{id}]>"),
            None => literal(marker),
        }
    }

    /// The symbols for `text`; empty if that is.
    pub fn text(self, text: &str) -> String {
        let (mut symbols, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let places = self.markers.iter().filter_map(|marker| {
                let is_token = (self.special)(marker).is_some();
                Some((rest.find(marker).filter(|_| is_token)?, *marker))
            });
            let (at, marker) = places.min().unwrap_or((rest.len(), ""));
            if at > 0 {
                symbols.push(literal(&rest[..at]));
            }
            if !marker.is_empty() {
                symbols.push(self.marker(marker));
            }
            rest = &rest[at + marker.len()..];
        }
        symbols.join(" ")
    }

    /// A rule of any text, between `before` and `end`, which must not be read as a part of it, and then `after`.
    pub fn until(self, name: &str, before: &str, end: &str, after: &str) -> String {
        self.texts_until(name, &[ANY.into()], before, end, after)
    }

    /// The same for a text that matches all `expressions`, of which there is at least one.
    pub fn texts_until(
        self,
        name: &str,
        expressions: &[String],
        before: &str,
        end: &str,
        after: &str,
    ) -> String {
        let all = |tail: &str| {
            let ended = expressions.iter().map(|expression| match tail {
                "" => regex_literal(expression),
                tail => regex_literal(&format!("(?:{expression}){tail}")),
            });
            ended.collect::<Vec<_>>().join(" & ")
        };
        let Some((at, marker, id)) = self.token_in(end) else {
            let (end, texts) = (literal(end), all(""));
            return format!(
                "{name}: {before} {name}_text {after}\n{name}_text[suffix={end}]: {texts}\n"
            );
        };
        // No text has the token. What comes before the token in `end` is the end of the text.
        let texts = all(&regex_syntax::escape(&end[..at]));
        let rest = self.text(&end[at + marker.len()..]);
        let name_of_texts = name.to_uppercase();
        format!(
            "{name}: {before} {name_of_texts} <[{id}]> {rest} {after}\n{name_of_texts}: {texts}\n"
        )
    }

    /// The first marker in `text` that is a token, after how many bytes it comes, and its id.
    fn token_in(self, text: &str) -> Option<(usize, &str, u32)> {
        let tokens = self.markers.iter().chain([&text]).filter_map(|marker| {
            let at = text.find(marker)?;
            Some((at, &text[at..at + marker.len()], (self.special)(marker)?))
        });
        tokens.min()
    }
}

/// `parts` between `separator`s; `None` as soon as they are longer than a grammar may be.
pub fn joined(parts: impl IntoIterator<Item = Option<String>>, separator: &str) -> Option<String> {
    let mut all = String::new();
    for part in parts {
        if !all.is_empty() {
            all += separator;
        }
        all += &part?;
        if all.len() > MAX_SOURCE_BYTES {
            return None;
        }
    }
    Some(all)
}

/// The right side of the rule of the arguments of `tool`, in JSON.
pub fn arguments(tool: &Value) -> String {
    let schema = schema(&function(tool)["parameters"]);
    let schema = standalone(&schema, &schema).unwrap_or(schema);
    let rule = GrammarSource::JsonSchema(schema).rule();
    rule.unwrap_or_default()
}

/// The schema of a function's arguments; a function without one has no arguments. Where it lists its properties and does
/// not say whether there may be others, there are none: a small model would go on making them up.
pub fn schema(parameters: &Value) -> Value {
    let mut schema = match parameters {
        Value::Object(schema) => schema.clone(),
        _ => Map::from_iter([("properties".into(), json!({}))]),
    };
    schema.entry("type").or_insert("object".into());
    close_object(&mut schema);
    schema.into()
}

/// Forbids properties that `schema` does not list, if it lists some and does not say whether there may be others.
pub fn close_object(schema: &mut Map<String, Value>) {
    const OTHERS: [&str; 8] = [
        "additionalProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
        "patternProperties",
    ];
    let is_list = schema.contains_key("properties");
    if is_list && !OTHERS.iter().any(|key| schema.contains_key(*key)) {
        schema.insert("additionalProperties".into(), false.into());
    }
}
