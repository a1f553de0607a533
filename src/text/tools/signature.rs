//! What must be known of a function to read its calls.

use super::function;
use serde_json::Value;

/// A function that may be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    pub name: String,
    /// Its parameters by name.
    parameters: Vec<(String, ValueKind)>,
}

/// How the value of a parameter is written where a format has no quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// A text as it is; `null` is one unless the schema allows null.
    Text { or_null: bool },
    /// JSON.
    Json,
}

impl Signature {
    /// That of an entry of `tools`.
    pub fn of(tool: &Value) -> Self {
        let function = function(tool);
        let properties = function["parameters"]["properties"].as_object();
        let parameters = properties.into_iter().flatten();
        Self {
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            parameters: parameters
                .map(|(name, schema)| (name.clone(), ValueKind::of(schema)))
                .collect(),
        }
    }

    /// How the value of `parameter` is written. One that the schema does not name is a text.
    pub fn kind(&self, parameter: &str) -> ValueKind {
        let known = self.parameters.iter().find(|(name, _)| name == parameter);
        known.map_or(ValueKind::Text { or_null: false }, |(_, kind)| *kind)
    }
}

impl ValueKind {
    /// A value that may be a text is written as one.
    pub fn of(schema: &Value) -> Self {
        let may_be = |kind: &str| may_be(schema, kind, 0);
        if may_be("string") {
            Self::Text {
                or_null: may_be("null"),
            }
        } else {
            Self::Json
        }
    }
}

/// Schemas within one another that are looked into.
const MAX_DEPTH: usize = 4;

/// Whether `schema` allows a value of this type. One that says nothing of types allows texts alone: that is
/// what models write.
fn may_be(schema: &Value, kind: &str, depth: usize) -> bool {
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
    let choices = ["anyOf", "oneOf", "allOf"].iter();
    let mut choices = choices.flat_map(|key| schema[*key].as_array().into_iter().flatten());
    let mut any = choices.clone().peekable();
    if any.peek().is_some() {
        return depth < MAX_DEPTH && choices.any(|choice| may_be(choice, kind, depth + 1));
    }
    let is_object = ["properties", "items", "$ref"].iter();
    let is_object = is_object.clone().any(|key| schema.get(*key).is_some());
    kind == "string" && !is_object
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_may_be_a_text_is_one() {
        let text = ValueKind::Text { or_null: false };
        for (schema, kind) in [
            (json!({"type": "string"}), text),
            (json!({}), text),
            (json!({"description": "x"}), text),
            (json!({"enum": ["a", "b"]}), text),
            (json!({"const": "a"}), text),
            (
                json!({"type": ["string", "null"]}),
                ValueKind::Text { or_null: true },
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
                ValueKind::Text { or_null: true },
            ),
            (json!({"type": "integer"}), ValueKind::Json),
            (json!({"type": ["integer", "null"]}), ValueKind::Json),
            (json!({"enum": [1, 2]}), ValueKind::Json),
            (
                json!({"properties": {"a": {"type": "string"}}}),
                ValueKind::Json,
            ),
            (json!({"$ref": "#/$defs/a"}), ValueKind::Json),
        ] {
            assert_eq!(ValueKind::of(&schema), kind, "{schema}");
        }
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"n": {"type": "number"}}}}});
        let signature = Signature::of(&tool);
        assert_eq!(signature.name, "f");
        assert_eq!(signature.kind("n"), ValueKind::Json);
        assert_eq!(signature.kind("other"), text);
    }
}
