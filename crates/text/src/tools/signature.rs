//! The facts about a function that are needed to read its calls.

use super::function;
use crate::grammar::resolve;
use serde_json::Value;

/// A function that may be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The function's name.
    pub name: String,
    /// The function's parameters, by name.
    parameters: Vec<(String, ValueKind)>,
}

/// How a format that has no quotes writes the value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// A text as it is; `null` is one unless the schema allows null.
    Text { or_null: bool },
    /// JSON.
    Json,
}

impl Signature {
    /// The signature of an entry of `tools`.
    pub fn of(tool: &Value) -> Self {
        let function = function(tool);
        let root = &function["parameters"];
        let parameters = root["properties"].as_object().into_iter().flatten();
        let mut kinds = Kinds::new(root);
        Self {
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            parameters: parameters
                .map(|(name, schema)| (name.clone(), kinds.of(schema)))
                .collect(),
        }
    }

    /// Returns the kind of the value of `parameter`. A parameter that the schema does not name is a text.
    pub fn kind(&self, parameter: &str) -> ValueKind {
        let known = self.parameters.iter().find(|(name, _)| name == parameter);
        known.map_or(ValueKind::Text { or_null: false }, |(_, kind)| *kind)
    }
}

/// Maximum number of schemas that are looked into for one parameter.
const MAX_LOOKED_INTO: usize = 256;
/// Maximum number of schemas that are looked into for all parameters of a tool, of which a request may have hundreds.
const MAX_OF_TOOL: usize = 1024;

/// Tells the kinds of the parameters of a tool, one after the other.
#[derive(Debug)]
pub struct Kinds<'s> {
    /// The schema that references are within.
    root: &'s Value,
    /// Schemas that may yet be looked into, besides those of the parameters themselves: they may refer to each other,
    /// and each to many others.
    left: usize,
}

impl<'s> Kinds<'s> {
    /// Prepares for schemas that may refer to parts of `root`.
    pub fn new(root: &'s Value) -> Self {
        let left = MAX_OF_TOOL;
        Self { root, left }
    }

    /// The kind of values under `schema`. A value that may be a text is written as one.
    pub fn of(&mut self, schema: &Value) -> ValueKind {
        if self.may_be("string", schema) {
            ValueKind::Text {
                or_null: self.may_be("null", schema),
            }
        } else {
            ValueKind::Json
        }
    }

    fn may_be(&mut self, kind: &str, schema: &Value) -> bool {
        let left = MAX_LOOKED_INTO.min(self.left);
        let mut unused = 1 + left;
        let allowed = allows(schema, kind, self.root, &mut unused);
        self.left -= left - unused;
        allowed
    }
}

/// Whether `schema` allows values of the type `kind`, as far as `left` further schemas tell; references are within
/// `root`. A schema that says nothing of types allows texts alone: that is what models write.
fn allows(schema: &Value, kind: &str, root: &Value, left: &mut usize) -> bool {
    let Some(fewer) = left.checked_sub(1) else {
        return false;
    };
    *left = fewer;
    let is = |value: &Value| match value {
        Value::String(_) => kind == "string",
        Value::Null => kind == "null",
        _ => false,
    };
    if let Some(value) = schema.get("const") {
        return is(value);
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().any(is);
    }
    match &schema["type"] {
        Value::String(name) => return name == kind,
        Value::Array(names) => return names.iter().any(|name| name == kind),
        _ => {}
    }
    let reference = schema["$ref"].as_str();
    if let Some(referred) = reference.and_then(|reference| resolve(root, reference)) {
        return allows(referred, kind, root, left);
    }
    let lists = ["anyOf", "oneOf", "allOf"].map(|key| schema[key].as_array());
    let mut choices = lists.into_iter().flatten().flatten().peekable();
    if choices.peek().is_some() {
        return choices.any(|choice| allows(choice, kind, root, left));
    }
    let mut of_objects = ["properties", "items", "$ref"].iter();
    kind == "string" && !of_objects.any(|key| schema.get(*key).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Schemas, and what values of them are.
    const KINDS: &str = r##"
{"$ref": "#/$defs/Color"} | text
{"$ref": "#/definitions/Color", "description": "x"} | text
{"$ref": "#/$defs/a~1b"} | text
{"$ref": "#/properties/first"} | text
{"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"} | text
{"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]} | text or null
{"$ref": "#/$defs/Size"} | JSON
{"$ref": "#/$defs/Loop"} | JSON
{"$ref": "#"} | JSON
{"$ref": "https://example.com/x.json"} | JSON
{"type": "string"} | text
{} | text
{"description": "x"} | text
{"enum": ["a", "b"]} | text
{"const": "a"} | text
{"type": ["string", "null"]} | text or null
{"anyOf": [{"type": "string"}, {"type": "null"}]} | text or null
{"type": "integer"} | JSON
{"type": ["integer", "null"]} | JSON
{"enum": [1, 2]} | JSON
{"properties": {"a": {"type": "string"}}} | JSON
{"$ref": "#/$defs/none"} | JSON
"##;

    #[test]
    fn what_may_be_a_text_is_one() {
        let text = ValueKind::Text { or_null: false };
        let root = json!({
            "$defs": {"Color": {"enum": ["red", "1"]}, "Size": {"type": "integer"}, "a/b": {"$ref": "#/$defs/Color"},
                "Loop": {"$ref": "#/$defs/Loop"}},
            "definitions": {"Color": {"type": "string", "enum": ["red"]}},
            "properties": {"first": {"type": "string"}},
        });
        for row in KINDS.trim().lines() {
            let (schema, kind) = row.split_once(" | ").expect("two columns");
            let schema: Value = serde_json::from_str(schema).expect("JSON");
            let kind = match kind {
                "text" => text,
                "text or null" => ValueKind::Text { or_null: true },
                _ => ValueKind::Json,
            };
            assert_eq!(Kinds::new(&root).of(&schema), kind, "{row}");
        }
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"n": {"type": "number"}}}}});
        let signature = Signature::of(&tool);
        assert_eq!(signature.name, "f");
        assert_eq!(signature.kind("n"), ValueKind::Json);
        assert_eq!(signature.kind("other"), text);
    }

    /// Each definition refers four times to the next one.
    #[test]
    fn references_take_little_time() {
        let definition = |i: usize| {
            let next = json!({"$ref": format!("#/$defs/{}", i + 1)});
            (i.to_string(), json!({"anyOf": [next, next, next, next]}))
        };
        let definitions: serde_json::Map<String, Value> = (0..40).map(definition).collect();
        let root = json!({"$defs": definitions});
        let mut kinds = Kinds::new(&root);
        let schema = json!({"$ref": "#/$defs/0"});
        assert_eq!(kinds.of(&schema), ValueKind::Json);
        assert_eq!(kinds.left, MAX_OF_TOOL - MAX_LOOKED_INTO);
    }

    /// The last one needs none of what the others have used up.
    #[test]
    fn many_parameters_with_references_take_little_time() {
        let references = vec![json!({"$ref": "#/$defs/b"}); 256];
        let definitions = json!({"a": {"anyOf": references}, "b": {"type": "integer"}});
        let of_key = |i: usize| (format!("key{i}"), json!({"$ref": "#/$defs/a"}));
        let mut properties: serde_json::Map<String, Value> = (0..4000).map(of_key).collect();
        properties.insert("last".into(), json!({"type": "string"}));
        let root = json!({"$defs": definitions, "properties": properties});
        let begin = std::time::Instant::now();
        let signature = Signature::of(&json!({"name": "f", "parameters": root}));
        assert!(begin.elapsed().as_secs() < 30);
        assert_eq!(signature.kind("key3999"), ValueKind::Json);
        assert_eq!(signature.kind("last"), ValueKind::Text { or_null: false });
        let mut kinds = Kinds::new(&root);
        let properties = root["properties"].as_object().expect("an object");
        for schema in properties.values() {
            kinds.of(schema);
        }
        assert_eq!(kinds.left, 0);
    }
}
