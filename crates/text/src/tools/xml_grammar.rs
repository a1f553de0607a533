//! The grammar of calls in XML.

use super::function;
use super::grammar_parts::{joined, literal, schema};
use super::signature::{Kinds, ValueKind};
use super::xml::{END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER};
use crate::grammar::{GrammarSource, MAX_SOURCE_BYTES, resolve, standalone, without_annotations};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The rule `function` of a call of one of `tools`, and the rules that it needs; `None` if they are longer than a grammar
/// may be.
pub fn functions(tools: &[Value]) -> Option<String> {
    let mut values = String::new();
    let functions = tools.iter().map(|tool| call_of(tool, &mut values));
    let functions = joined(functions, "\n    | ")?;
    Some(format!(
        "function: {functions}\n{values}text[suffix={}]: /(?s:.*)/\n",
        literal(END_PARAMETER)
    ))
}

/// The text after the value of a parameter.
fn end_of_value() -> String {
    format!("\n{END_PARAMETER}\n")
}

/// A call of `tool`: its parameters in the order of its schema, those that are required and perhaps others. Adds the
/// rules of their values to `rules`.
fn call_of(tool: &Value, rules: &mut String) -> Option<String> {
    let function = function(tool);
    let name = function["name"].as_str().unwrap_or_default();
    let schema = schema(&function["parameters"]);
    let required = schema["required"].as_array().into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = schema["properties"].as_object();
    let mut values = Values {
        root: &schema,
        kinds: Kinds::new(&schema),
        known: HashMap::new(),
        rules,
    };
    let parameters = properties.into_iter().flatten().map(|(key, of_key)| {
        let head = literal(&format!("{PARAMETER}{key}>\n"));
        let optional = if required.contains(&key.as_str()) {
            ""
        } else {
            "?"
        };
        Some(format!("({head} {}){optional}", values.value(of_key)?))
    });
    let parameters = joined(parameters, " ")?;
    Some(format!(
        "({} {parameters} {})",
        literal(&format!("{FUNCTION}{name}>\n")),
        literal(END_FUNCTION)
    ))
}

/// The values of the parameters of a function.
struct Values<'a> {
    /// The schema of all arguments, which may define parts of others.
    root: &'a Value,
    kinds: Kinds<'a>,
    /// The names of the rules of values in JSON, by their schemas.
    known: HashMap<String, String>,
    /// The text of the rules of values in JSON, including those of other functions.
    rules: &'a mut String,
}

impl Values<'_> {
    /// A value and what follows it.
    fn value(&mut self, of_key: &Value) -> Option<String> {
        let end = literal(&end_of_value());
        Some(match self.kinds.of(of_key) {
            ValueKind::Text { .. } => match choices(of_key, self.root) {
                Some(texts) => format!("({}) {end}", texts.join(" | ")),
                // The rule `text` contains the end of the parameter.
                None => "text \"\\n\"".into(),
            },
            ValueKind::Json => format!("{} {end}", self.json(of_key)?),
        })
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

/// The only texts that a value may be, as literals.
fn choices(of_key: &Value, root: &Value) -> Option<Vec<String>> {
    let mut of_key = of_key;
    for _ in 0..MAX_REFERENCES {
        let Some(Value::String(reference)) = of_key.get("$ref") else {
            break;
        };
        of_key = resolve(root, reference)?;
    }
    let texts = of_key["enum"].as_array()?.iter().map(Value::as_str);
    texts.map(|text| text.map(literal)).collect()
}

/// References that are followed from one to the next.
const MAX_REFERENCES: usize = 8;
