//! The fields that ask for structured output: OpenAI's `response_format`, and vLLM's `structured_outputs` and
//! `guided_*`.

use super::context::Context;
use super::wire::{required, wrong};
use foretoken_core::error::{Error, FieldPath, Result};
use foretoken_core::sampling::Grammar;
use foretoken_text::grammar::GrammarSource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Maximum characters of a schema's name.
const MAX_NAME: usize = 64;

const RESPONSE_FORMAT: &str = "response_format";

/// The fields, of which one may ask for something.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Structured {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOptions>,
    guided_json: Option<Value>,
    guided_json_object: Option<bool>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    guided_whitespace_pattern: Option<String>,
}

/// What the answer must be.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct ResponseFormat {
    #[serde(rename = "type")]
    kind: FormatKind,
    /// Required where the type is `json_schema`.
    json_schema: Option<NamedSchema>,
    /// Of `json_object`: which objects, as other servers have it.
    schema: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum FormatKind {
    #[default]
    Text,
    JsonObject,
    JsonSchema,
}

#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
pub(super) struct NamedSchema {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<Value>,
    /// A schema is always enforced.
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A format of the other APIs, whose schema is no object of its own.
#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "TextFormat")]
pub(super) struct FlatFormat {
    #[serde(rename = "type")]
    kind: FormatKind,
    #[serde(flatten)]
    pub schema: NamedSchema,
}

impl FlatFormat {
    /// A JSON object, whatever is in it.
    pub fn json_object() -> Self {
        let kind = FormatKind::JsonObject;
        Self {
            kind,
            ..Self::default()
        }
    }

    /// JSON that is valid under `schema`.
    pub fn json_schema(schema: Value) -> Self {
        Self {
            kind: FormatKind::JsonSchema,
            schema: NamedSchema {
                name: Some("answer".into()),
                schema: Some(schema),
                ..NamedSchema::default()
            },
        }
    }
}

impl From<FlatFormat> for ResponseFormat {
    fn from(format: FlatFormat) -> Self {
        let FlatFormat { kind, schema } = format;
        if kind == FormatKind::JsonSchema {
            return Self {
                kind,
                json_schema: Some(schema),
                ..Self::default()
            };
        }
        Self {
            kind,
            schema: schema.schema,
            others: schema.others,
            ..Self::default()
        }
    }
}

/// A grammar's source, and the field that has it.
pub(super) type Asked = (FieldPath, GrammarSource);

/// vLLM's object `structured_outputs`; its other spelling has the same fields with the prefix `guided_`.
#[derive(Debug, Default, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "StructuredOutputs")]
struct StructuredOptions {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    whitespace_pattern: Option<String>,
    #[serde(flatten)]
    others: Map<String, Value>,
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
        self.compile(field, &source).map(Some)
    }
}

impl Structured {
    /// Adds what another API asks for, as chats do in `response_format`.
    ///
    /// # Errors
    /// `Invalid`, if `response_format` is set: the API has the field `instead`.
    pub fn with_format(mut self, format: Option<FlatFormat>, instead: &str) -> Result<Self> {
        if self.response_format.is_some() {
            let what = format!("is not supported here: use {instead}");
            return wrong(RESPONSE_FORMAT, what);
        }
        self.response_format = format.map(ResponseFormat::from);
        Ok(self)
    }

    /// The field that asks for a grammar, and what it asks for.
    ///
    /// # Errors
    /// `Invalid`, naming the field, if fields contradict each other.
    pub fn asked(&self) -> Result<Option<Asked>> {
        let guided = StructuredOptions {
            json: self.guided_json.clone().filter(|json| json != ""),
            json_object: self.guided_json_object,
            regex: self.guided_regex.clone().filter(|text| !text.is_empty()),
            choice: self.guided_choice.clone().filter(|list| !list.is_empty()),
            grammar: self.guided_grammar.clone().filter(|text| !text.is_empty()),
            whitespace_pattern: self.guided_whitespace_pattern.clone(),
            ..StructuredOptions::default()
        };
        let mut asked = guided.asked(|name| FieldPath::from(&*format!("guided_{name}")))?;
        if let Some(options) = &self.structured_outputs {
            let at = FieldPath::from("structured_outputs");
            options.check(&at)?;
            asked.extend(options.clone().asked(|name| at.key(name))?);
        }
        if let Some(format) = &self.response_format {
            asked.extend(format.asked()?);
        }
        match &asked[..] {
            [(first, _), (second, _), ..] => wrong(
                second,
                format!("and {first} exclude each other: leave one out"),
            ),
            _ => Ok(asked.pop()),
        }
    }
}

impl StructuredOptions {
    fn check(&self, at: &FieldPath) -> Result<()> {
        let is_harmless = |(name, value): (&String, &Value)| match name.as_str() {
            _ if value.is_null() => true,
            // JSON is on one line anyway, and there is nothing to fall back to.
            "disable_any_whitespace" | "disable_fallback" => value.is_boolean(),
            "disable_additional_properties" => *value == false,
            _ => false,
        };
        refuse_others(at, self.others.iter().find(|&other| !is_harmless(other)))
    }

    /// Returns the outputs that the fields ask for, by the paths of the fields.
    fn asked(self, field: impl Fn(&str) -> FieldPath) -> Result<Vec<Asked>> {
        let json = match self.json {
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(&text);
                let invalid = |e| Error::field(field("json"), format!(" is not valid JSON: {e}"));
                Some(schema.map_err(invalid)?)
            }
            json => json,
        };
        let object = self.json_object.filter(|&wanted| wanted);
        let sources = [
            ("json", json.map(GrammarSource::JsonSchema)),
            ("json_object", object.map(|_| GrammarSource::JsonObject)),
            ("regex", self.regex.map(GrammarSource::Regex)),
            ("choice", self.choice.map(GrammarSource::Choice)),
            ("grammar", self.grammar.map(GrammarSource::Lark)),
        ];
        let sources = sources.into_iter();
        let mut asked: Vec<Asked> = sources
            .filter_map(|(name, source)| Some((field(name), source?)))
            .collect();
        if let Some(pattern) = self.whitespace_pattern {
            let field = field("whitespace_pattern");
            match &mut asked[..] {
                [(_, source)] => spaced(&field, source, pattern)?,
                _ => {
                    return wrong(field, "requires a JSON schema");
                }
            }
        }
        Ok(asked)
    }
}

/// The white space in JSON, in the form in which llguidance is told of it.
#[derive(Serialize)]
struct Spacing {
    whitespace_pattern: String,
    item_separator: &'static str,
    key_separator: &'static str,
}

/// Lets JSON have white space that matches `pattern` between its tokens.
fn spaced(field: &FieldPath, source: &mut GrammarSource, pattern: String) -> Result<()> {
    if matches!(source, GrammarSource::JsonObject) {
        let any_object = Map::from_iter([("type".to_owned(), "object".into())]);
        *source = GrammarSource::JsonSchema(any_object.into());
    }
    let GrammarSource::JsonSchema(Value::Object(schema)) = source else {
        return wrong(field, "requires a JSON schema");
    };
    let spacing = serde_json::to_value(Spacing {
        whitespace_pattern: pattern,
        item_separator: ",",
        key_separator: ":",
    });
    schema.insert("x-guidance".into(), spacing.unwrap_or_default());
    Ok(())
}

impl ResponseFormat {
    fn asked(&self) -> Result<Option<Asked>> {
        let field = FieldPath::from(RESPONSE_FORMAT);
        let at = field.key("json_schema");
        refuse_others(&field, given(&self.others))?;
        if self.schema.is_some() && self.kind != FormatKind::JsonObject {
            let what = format!("requires {field}.type to be json_object");
            return wrong(field.key("schema"), what);
        }
        match (self.kind, &self.json_schema) {
            (FormatKind::Text, None) => Ok(None),
            (FormatKind::JsonObject, None) => Ok(Some(match self.schema.clone() {
                Some(schema) => (field.key("schema"), GrammarSource::JsonSchema(schema)),
                None => (field, GrammarSource::JsonObject),
            })),
            (FormatKind::Text | FormatKind::JsonObject, Some(_)) => {
                wrong(at, format!("requires {field}.type to be json_schema"))
            }
            (FormatKind::JsonSchema, schema) => {
                let schema = required(&at, schema.as_ref())?;
                schema.check(&at)?;
                let at = at.key("schema");
                let schema = required(&at, schema.schema.clone())?;
                Ok(Some((at, GrammarSource::JsonSchema(schema))))
            }
        }
    }
}

impl NamedSchema {
    fn check(&self, at: &FieldPath) -> Result<()> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let field = at.key("name");
        let name = required(&field, self.name.as_ref())?;
        if !(1..=MAX_NAME).contains(&name.len()) || !name.chars().all(allowed) {
            let what = format!("must have 1 to {MAX_NAME} letters, digits, underscores or dashes");
            return wrong(field, what);
        }
        refuse_others(at, given(&self.others))
    }
}

/// The first field that is not null, which asks for nothing.
fn given(others: &Map<String, Value>) -> Option<(&String, &Value)> {
    others.iter().find(|(_, value)| !value.is_null())
}

/// Refuses a field of the object `at` that is not known.
fn refuse_others(at: &FieldPath, other: Option<(&String, &Value)>) -> Result<()> {
    match other {
        Some((name, _)) => wrong(at.key(name), "is not supported: leave it out"),
        None => Ok(()),
    }
}
