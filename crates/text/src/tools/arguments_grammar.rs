//! The grammars of calls whose arguments are written one by one, between tags or in a list.

use super::function;
use super::grammar_parts::{Calls, OR, Spelling, joined, literal, schema};
use super::python_call::is_key;
use super::signature::{Kinds, ValueKind};
use super::syntax::Tags;
use super::text_schema::{choices, expressions};
use crate::grammar::{GrammarSource, MAX_SOURCE_BYTES, standalone, without_annotations};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The rule `rule` of one of `calls` with tags, and the rules that it needs; `None` if they are longer than a
/// grammar may be.
pub fn tagged(rule: &str, tags: &Tags, calls: Calls<'_>, spelling: Spelling<'_>) -> Option<String> {
    let mut values = String::new();
    let call = |tool| tagged_call(tags, calls, tool, spelling, &mut values);
    let calls = joined(calls.tools.iter().map(call), OR)?;
    let text = spelling.until("text", "", tags.end_parameter, "");
    Some(format!("{rule}: {calls}\n{values}{text}"))
}

/// A call of `tool`: its parameters in the order of its schema, those that are required and perhaps others. Adds the
/// rules of their values to `rules`.
fn tagged_call(
    tags: &Tags,
    calls: Calls<'_>,
    tool: &Value,
    spelling: Spelling<'_>,
    rules: &mut String,
) -> Option<String> {
    let schema = schema(&function(tool)["parameters"]);
    let mut values = Values::new(&schema, rules);
    let end = spelling.text(&format!("{}{}\n", tags.line(), tags.end_parameter));
    // Where no token ends a value, the end could be read as a part of it.
    let is_clear = tags.line().is_empty() && (spelling.special)(tags.end_parameter).is_some();
    let input = calls.input(tool).filter(|_| is_clear);
    let parameters = parameters(&schema).map(|(key, of_key, is_required)| {
        let kind = values.kinds.of(of_key);
        let is_text = matches!(kind, ValueKind::Text { .. });
        let head = spelling.text(&tags.before_value(key, is_text));
        let optional = if is_required { "" } else { "?" };
        let value = match kind {
            ValueKind::Text { or_null } => match (choices(of_key, &schema), input) {
                (Some(texts), _) => format!("({}) {end}", literals(&texts)),
                (None, Some(input)) => format!("{} {end}", input.rule()),
                // The rule contains the end of the parameter.
                (None, None) if or_null => "text \"\\n\"".into(),
                (None, None) => {
                    let rule = values.text(of_key, spelling, tags.line(), tags.end_parameter)?;
                    format!("{rule} \"\\n\"")
                }
            },
            ValueKind::Json => format!("{} {end}", values.json(of_key)?),
        };
        Some(format!("({head} {value}){optional}"))
    });
    let parameters = joined(parameters, " ")?;
    let name = function(tool)["name"].as_str().unwrap_or_default();
    let head = format!("{}{name}{}", tags.function, tags.before_parameters());
    let end = spelling.text(tags.end_function);
    Some(format!("({} {parameters} {end})", spelling.text(&head)))
}

/// How a list of arguments with their names is written.
#[derive(Clone, Copy)]
pub struct Listed {
    /// The text before the function's name.
    before: &'static str,
    /// The brackets around the arguments.
    brackets: [&'static str; 2],
    /// The text between a name and its value, and between arguments.
    separators: [&'static str; 2],
    /// The mark around values that are texts; `None` = they are JSON.
    quote: Option<&'static str>,
}

/// Calls in Python. Values are JSON, which is read as Python is.
pub const PYTHON: Listed = Listed {
    before: "",
    brackets: ["(", ")"],
    separators: ["=", ", "],
    quote: None,
};

impl Listed {
    /// Arguments between braces, with `quote` around texts. Other values are JSON.
    pub fn braces(quote: &'static str) -> Self {
        Self {
            before: "call:",
            brackets: ["{", "}"],
            separators: [":", ","],
            quote: Some(quote),
        }
    }
}

/// The rule `rule` of one of `calls`, and the rules that it needs; `None` if they are longer than a grammar may be.
pub fn listed(
    rule: &str,
    form: Listed,
    calls: Calls<'_>,
    spelling: Spelling<'_>,
) -> Option<String> {
    let mut rules = String::new();
    let call = |tool| listed_call(form, calls, tool, spelling, &mut rules);
    let calls = joined(calls.tools.iter().map(call), OR)?;
    let text = form
        .quote
        .map(|quote| spelling.until("text", "", quote, ""));
    let fits = calls.len() + rules.len() <= MAX_SOURCE_BYTES;
    fits.then(|| format!("{rule}: {calls}\n{rules}{}", text.unwrap_or_default()))
}

/// A call of `tool`: its arguments as [`tagged_call`] has them, with commas between them. An argument whose name cannot
/// be written so is left out.
fn listed_call(
    form: Listed,
    calls: Calls<'_>,
    tool: &Value,
    spelling: Spelling<'_>,
    rules: &mut String,
) -> Option<String> {
    let schema = schema(&function(tool)["parameters"]);
    let mut values = Values::new(&schema, rules);
    let [assign, comma] = form.separators;
    let named = parameters(&schema).filter(|(key, ..)| is_key(key) && !key.contains([':', '<']));
    let arguments = named.map(|(key, of_key, is_required)| {
        let head = literal(&format!("{key}{assign}"));
        let is_text = matches!(values.kinds.of(of_key), ValueKind::Text { .. });
        let value = match (form.quote.filter(|_| is_text), calls.input(tool)) {
            (Some(mark), input) => {
                let quote = spelling.marker(mark);
                // Where the mark is no token, it could be read as a part of the input.
                let input = input.filter(|_| (spelling.special)(mark).is_some());
                match (choices(of_key, &schema), input) {
                    (Some(texts), _) => format!("{quote} ({}) {quote}", literals(&texts)),
                    (None, Some(input)) => format!("{quote} {} {quote}", input.rule()),
                    // The rule `text` contains the mark at its end.
                    (None, None) => format!("{quote} text"),
                }
            }
            (None, _) => values.json(of_key)?,
        };
        Some((format!("{head} {value}"), is_required))
    });
    let arguments: Vec<(String, bool)> = arguments.collect::<Option<_>>()?;
    let comma = literal(comma);
    // The rule of each argument is what may follow once an argument was written.
    let (mut first, mut may_be_empty) = (Vec::new(), true);
    let mut following = Vec::with_capacity(arguments.len());
    for (i, (argument, is_required)) in arguments.iter().enumerate() {
        // Names differ as the texts before them do in length.
        let name = format!("more_{i}_{}", values.rules.len());
        let optional = if *is_required { "" } else { "?" };
        following.push((name, format!("({comma} {argument}){optional}")));
        if may_be_empty {
            first.push((i, argument));
            may_be_empty = !is_required;
        }
    }
    let next = |i: usize| following.get(i + 1).map_or("", |(name, _)| name.as_str());
    let starts: Vec<String> = first
        .iter()
        .map(|(i, argument)| format!("({argument} {})", next(*i)))
        .collect();
    let starts = match starts.join(" | ") {
        none if none.is_empty() => none,
        some if may_be_empty => format!("({some})?"),
        some => format!("({some})"),
    };
    let more: String = (following.iter().enumerate().skip(1))
        .map(|(i, (name, rule))| format!("{name}: {rule} {}\n", next(i)))
        .collect();
    *values.rules += &more;
    let name = function(tool)["name"].as_str().unwrap_or_default();
    let fits = values.rules.len() <= MAX_SOURCE_BYTES;
    let [open, close] = form.brackets;
    let head = literal(&format!("{}{name}{open}", form.before));
    fits.then(|| format!("({head} {starts} {})", literal(close)))
}

/// The properties of `schema` with their schemas, and whether each is required.
fn parameters(schema: &Value) -> impl Iterator<Item = (&String, &Value, bool)> {
    let required = schema["required"].as_array().into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = schema["properties"].as_object().into_iter().flatten();
    properties.map(move |(key, of_key)| (key, of_key, required.contains(&key.as_str())))
}

/// One of `texts`.
fn literals(texts: &[&str]) -> String {
    let texts = texts.iter().map(|text| literal(text));
    texts.collect::<Vec<_>>().join(" | ")
}

/// The values of the parameters of a function.
struct Values<'a> {
    /// The schema of all arguments, which may define parts of others.
    root: &'a Value,
    kinds: Kinds<'a>,
    /// The names of the rules of values, by their schemas in JSON or by their expressions.
    known: HashMap<String, String>,
    /// The text of the rules of values, including those of other functions.
    rules: &'a mut String,
}

impl<'a> Values<'a> {
    /// Values under the properties of `root`, whose rules are added to `rules`.
    fn new(root: &'a Value, rules: &'a mut String) -> Self {
        Self {
            root,
            kinds: Kinds::new(root),
            known: HashMap::new(),
            rules,
        }
    }

    /// The rule of a text that stands before `line` and `end`: `text`, or one of what the schema says of it if no token
    /// ends it.
    fn text(
        &mut self,
        of_key: &Value,
        spelling: Spelling<'_>,
        line: &str,
        end: &str,
    ) -> Option<String> {
        let mut expressions = expressions(of_key, self.root);
        if expressions.is_empty() || (spelling.special)(end).is_some() {
            return Some("text".into());
        }
        // What texts match takes no more than half of the grammar; there is room for the rest.
        let bytes: usize = expressions.iter().map(String::len).sum();
        if self.rules.len() + bytes > MAX_SOURCE_BYTES / 2 {
            tracing::debug!("a required call has a text that follows no schema: there are many");
            return Some("text".into());
        }
        for expression in &mut expressions {
            *expression = format!("(?:{expression}){line}");
        }
        let key = format!("{line}{end}{expressions:?}");
        if let Some(known) = self.known.get(&key) {
            return Some(known.clone());
        }
        // Names differ as the texts before them do in length.
        let name = format!("text_{}", self.rules.len());
        *self.rules += &spelling.texts_until(&name, &expressions, "", end, "");
        self.known.insert(key, name.clone());
        (self.rules.len() <= MAX_SOURCE_BYTES).then_some(name)
    }

    /// The rule of a value in JSON. Equal ones share it, since each comes with the definitions that it reaches.
    fn json(&mut self, of_key: &Value) -> Option<String> {
        let schema = if of_key.is_object() {
            without_annotations(of_key)
        } else {
            Map::new().into()
        };
        let key = schema.to_string();
        if let Some(known) = self.known.get(&key) {
            return Some(known.clone());
        }
        let alone = standalone(&schema, self.root).unwrap_or(schema);
        let json = GrammarSource::JsonSchema(alone).rule()?;
        // Names differ as the texts before them do in length.
        let name = format!("value_{}", self.rules.len());
        *self.rules += &format!("{name}: {json}\n");
        self.known.insert(key, name.clone());
        (self.rules.len() <= MAX_SOURCE_BYTES).then_some(name)
    }
}
