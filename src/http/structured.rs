//! The fields that ask for structured output: OpenAI's `response_format`, and vLLM's `structured_outputs` and
//! `guided_*`.

use super::context::Context;
use super::wire::wrong;
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Maximum characters of a schema's name.
const MAX_NAME: usize = 64;

/// The fields, of which one may ask for something.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Structured {
    response_format: Option<Value>,
    structured_outputs: Option<Value>,
    guided_json: Option<Value>,
    guided_json_object: Option<bool>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    guided_whitespace_pattern: Option<String>,
}

/// A grammar's source, and the field that has it.
pub(super) type Asked = (String, GrammarSource);

/// vLLM's object `structured_outputs`; its other spelling has the same fields with the prefix `guided_`.
#[derive(Debug, Default)]
struct Options<'a> {
    json: Option<&'a Value>,
    json_object: bool,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    whitespace_pattern: Option<String>,
}

impl Context<'_> {
    /// The grammar that a request asks for.
    ///
    /// # Errors
    /// `Invalid`, naming the field, and the place in a schema, if fields contradict each other or the grammar
    /// is not possible.
    pub fn grammar(&self, fields: &Structured) -> Result<Option<Grammar>> {
        let Some((field, source)) = fields.asked()? else {
            return Ok(None);
        };
        self.grammars.compile(&field, &source).map(Some)
    }
}

impl Structured {
    /// Adds what another API asks for, as chats do in `response_format`.
    ///
    /// # Errors
    /// `Invalid`, if `response_format` is set: the API has the field `instead`.
    pub fn with_format(mut self, format: Option<Value>, instead: &str) -> Result<Self> {
        if self.response_format.is_some() {
            const FIELD: &str = "response_format";
            return wrong(FIELD, format!("is not supported here: use {instead}"));
        }
        self.response_format = format;
        Ok(self)
    }

    /// The field that asks for a grammar, and what it asks for.
    ///
    /// # Errors
    /// `Invalid`, naming the field, if fields contradict each other.
    pub fn asked(&self) -> Result<Option<Asked>> {
        let guided = Options {
            json: self.guided_json.as_ref().filter(|json| !is_nothing(json)),
            json_object: self.guided_json_object.unwrap_or(false),
            regex: self.guided_regex.clone().filter(|text| !text.is_empty()),
            choice: self.guided_choice.clone().filter(|list| !list.is_empty()),
            grammar: self.guided_grammar.clone().filter(|text| !text.is_empty()),
            whitespace_pattern: self.guided_whitespace_pattern.clone(),
        };
        let mut asked = guided.asked("guided_")?;
        asked.extend(match &self.structured_outputs {
            Some(value) if !is_nothing(value) => {
                Options::of(value)?.asked("structured_outputs.")?
            }
            _ => Vec::new(),
        });
        asked.extend(response_format(self.response_format.as_ref())?);
        match &asked[..] {
            [_, (second, _), ..] => {
                let first = &asked[0].0;
                wrong(
                    second,
                    format!("and {first} exclude each other: leave one out"),
                )
            }
            _ => Ok(asked.pop()),
        }
    }
}

impl<'a> Options<'a> {
    /// Reads the object, all of whose fields must be known.
    fn of(value: &'a Value) -> Result<Self> {
        const FIELD: &str = "structured_outputs";
        let object = object(FIELD, value)?;
        let mut options = Self::default();
        for (name, value) in object {
            let field = format!("{FIELD}.{name}");
            match name.as_str() {
                _ if value.is_null() => (),
                "json" => options.json = Some(value),
                "json_object" => options.json_object = flag(&field, value)?,
                "regex" => options.regex = Some(string(&field, value)?),
                "choice" => options.choice = Some(strings(&field, value)?),
                "grammar" => options.grammar = Some(string(&field, value)?),
                "whitespace_pattern" => options.whitespace_pattern = Some(string(&field, value)?),
                // JSON is on one line anyway, and there is nothing to fall back to.
                "disable_any_whitespace" | "disable_fallback" => drop(flag(&field, value)?),
                "disable_additional_properties" if !flag(&field, value)? => (),
                _ => return Err(not_supported(&field)),
            }
        }
        Ok(options)
    }

    /// What is asked for, by the names of the fields with their `prefix`.
    fn asked(self, prefix: &str) -> Result<Vec<Asked>> {
        let field = |name: &str| format!("{prefix}{name}");
        let mut asked: Vec<Asked> = Vec::new();
        if let Some(value) = self.json {
            let schema = match value {
                Value::String(text) => serde_json::from_str(text).map_err(|e| {
                    let field = field("json");
                    Error::invalid(&field, format!("{field} is not valid JSON: {e}"))
                })?,
                value => value.clone(),
            };
            asked.push((field("json"), GrammarSource::JsonSchema(schema)));
        }
        if self.json_object {
            asked.push((field("json_object"), GrammarSource::JsonObject));
        }
        asked.extend(
            self.regex
                .map(|text| (field("regex"), GrammarSource::Regex(text))),
        );
        asked.extend(
            self.choice
                .map(|list| (field("choice"), GrammarSource::Choice(list))),
        );
        asked.extend(
            self.grammar
                .map(|text| (field("grammar"), GrammarSource::Lark(text))),
        );
        if let Some(pattern) = self.whitespace_pattern {
            let field = field("whitespace_pattern");
            match &mut asked[..] {
                [(_, source)] => spaced(&field, source, pattern)?,
                _ => {
                    return wrong(&field, "requires a JSON schema");
                }
            }
        }
        Ok(asked)
    }
}

/// Lets JSON have white space that matches `pattern` between its tokens.
fn spaced(field: &str, source: &mut GrammarSource, pattern: String) -> Result<()> {
    if matches!(source, GrammarSource::JsonObject) {
        *source = GrammarSource::JsonSchema(json!({"type": "object"}));
    }
    let options = json!({
        "whitespace_pattern": pattern,
        "item_separator": ",",
        "key_separator": ":",
    });
    match source {
        GrammarSource::JsonSchema(Value::Object(schema)) => {
            schema.insert("x-guidance".into(), options);
            Ok(())
        }
        _ => wrong(field, "requires a JSON schema"),
    }
}

fn response_format(value: Option<&Value>) -> Result<Option<Asked>> {
    const FIELD: &str = "response_format";
    let Some(value) = value.filter(|value| !is_nothing(value)) else {
        return Ok(None);
    };
    let object = object(FIELD, value)?;
    let schema = object.get("json_schema").filter(|value| !value.is_null());
    match object.get("type").and_then(Value::as_str) {
        Some("json_schema") => (),
        Some("text" | "json_object") if schema.is_some() => {
            let field = format!("{FIELD}.json_schema");
            return wrong(&field, format!("requires {FIELD}.type to be json_schema"));
        }
        Some("text") => return Ok(None),
        Some("json_object") => return Ok(Some((FIELD.into(), GrammarSource::JsonObject))),
        _ => {
            let field = format!("{FIELD}.type");
            return wrong(&field, "must be text, json_object or json_schema");
        }
    }
    let field = format!("{FIELD}.json_schema");
    let required = |field: &str| Error::invalid(field, format!("{field} is required"));
    let format = self::object(&field, schema.ok_or_else(|| required(&field))?)?;
    let mut found = None;
    for (name, value) in format {
        let field = format!("{field}.{name}");
        match name.as_str() {
            "name" => drop(checked_name(&field, value)?),
            // A schema is always enforced; `strict` may ask for it.
            "strict" if value.is_null() => (),
            "strict" => drop(flag(&field, value)?),
            "description" if value.is_null() => (),
            "description" => drop(string(&field, value)?),
            "schema" if !value.is_null() => {
                found = Some((field, GrammarSource::JsonSchema(value.clone())));
            }
            "schema" => (),
            _ => return Err(not_supported(&field)),
        }
    }
    if !format.contains_key("name") {
        return Err(required(&format!("{field}.name")));
    }
    let found = found.ok_or_else(|| required(&format!("{field}.schema")))?;
    Ok(Some(found))
}

fn checked_name(field: &str, value: &Value) -> Result<String> {
    let name = string(field, value)?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed) {
        Ok(name)
    } else {
        wrong(
            field,
            format!("must have 1 to {MAX_NAME} letters, digits, underscores or dashes"),
        )
    }
}

/// Whether a value asks for nothing.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn object<'a>(field: &str, value: &'a Value) -> Result<&'a Map<String, Value>> {
    let object = value.as_object();
    object.ok_or_else(|| Error::invalid(field, format!("{field} must be an object")))
}

fn string(field: &str, value: &Value) -> Result<String> {
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| Error::invalid(field, format!("{field} must be a string")))
}

fn strings(field: &str, value: &Value) -> Result<Vec<String>> {
    let list = value.as_array().into_iter().flatten().map(Value::as_str);
    let list: Option<Vec<String>> = list.map(|text| text.map(str::to_owned)).collect();
    let list = list.filter(|_| value.is_array());
    list.ok_or_else(|| Error::invalid(field, format!("{field} must be a list of strings")))
}

fn flag(field: &str, value: &Value) -> Result<bool> {
    let flag = value.as_bool();
    flag.ok_or_else(|| Error::invalid(field, format!("{field} must be true or false")))
}

fn not_supported(field: &str) -> Error {
    Error::invalid(field, format!("{field} is not supported: leave it out"))
}
