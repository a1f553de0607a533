//! The grammar of calls in XML.

use super::function;
use super::grammar_parts::{Calls, MAX_PARALLEL, literal, schema};
use super::signature::{ValueKind, referred};
use super::xml::{END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER};
use crate::grammar::GrammarSource;
use serde_json::{Map, Value};

/// The rule `calls`, and those that it needs.
pub fn rules(calls: Calls<'_>, marker: impl Fn(&str) -> String) -> String {
    let markers = calls.format.markers();
    let (start, end) = (marker(markers[0]), marker(markers[1]));
    let more = if calls.parallel {
        format!(" (\"\\n\" call){{0,{}}}", MAX_PARALLEL - 1)
    } else {
        String::new()
    };
    let functions: Vec<String> = calls.tools.iter().map(call_of).collect();
    format!(
        "calls: call{more}\ncall: {start} \"\\n\" function \"\\n\" {end}\nfunction: {}\n\
         text[suffix={}]: /(?s:.*)/\n",
        functions.join("\n    | "),
        literal(END_PARAMETER)
    )
}

/// What follows the value of a parameter.
fn end_of_value() -> String {
    format!("\n{END_PARAMETER}\n")
}

/// A call of `tool`: its parameters in the order of its schema, those that are required and perhaps others.
fn call_of(tool: &Value) -> String {
    let function = function(tool);
    let name = function["name"].as_str().unwrap_or_default();
    let schema = schema(&function["parameters"]);
    let required = schema["required"].as_array().into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = schema["properties"].as_object();
    let parameters = properties.into_iter().flatten().map(|(key, of_key)| {
        let head = literal(&format!("{PARAMETER}{key}>\n"));
        let optional = if required.contains(&key.as_str()) {
            ""
        } else {
            "?"
        };
        format!("({head} {}){optional}", value(of_key, &schema))
    });
    let parameters: Vec<String> = parameters.collect();
    format!(
        "({} {} {})",
        literal(&format!("{FUNCTION}{name}>\n")),
        parameters.join(" "),
        literal(END_FUNCTION)
    )
}

/// A value and what follows it. `root` is the schema of all arguments, which may define parts of others.
fn value(of_key: &Value, root: &Value) -> String {
    let end = literal(&end_of_value());
    let texts = |values: &[Value]| {
        let texts = values.iter().map(Value::as_str);
        let texts: Option<Vec<String>> = texts.map(|text| text.map(literal)).collect();
        texts.map(|texts| format!("({}) {end}", texts.join(" | ")))
    };
    // Definitions are often of choices.
    let choices = referred(of_key, root).unwrap_or(of_key)["enum"].as_array();
    if let Some(choices) = choices.and_then(|values| texts(values)) {
        return choices;
    }
    if let ValueKind::Text { .. } = ValueKind::of(of_key, root) {
        // It ends where the parser says that it ends.
        return "text \"\\n\"".into();
    }
    let mut of_key = of_key.clone();
    if let Some(keys) = of_key.as_object_mut() {
        for definitions in ["$defs", "definitions"] {
            if let Some(all) = root.get(definitions) {
                keys.entry(definitions).or_insert_with(|| all.clone());
            }
        }
    } else {
        of_key = Map::new().into();
    }
    let json = GrammarSource::JsonSchema(of_key).rule().unwrap_or_default();
    format!("{json} {end}")
}
