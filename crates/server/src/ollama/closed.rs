//! Schemas as Ollama reads them: an object has the properties that are listed.

use foretoken_text::close_object;
use serde_json::{Map, Value};

/// Forbids properties that are not listed, in all objects that list theirs and do not say whether there may be others.
pub(super) fn close(schema: &mut Map<String, Value>) {
    let is_list = schema.contains_key("properties");
    for (key, value) in schema.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                close_all(named.values_mut());
            }
            ("items" | "additionalProperties", Value::Object(schema)) => close(schema),
            ("items" | "prefixItems", Value::Array(list)) => close_all(list.iter_mut()),
            // Beside a list, alternatives add to it.
            ("anyOf" | "oneOf", Value::Array(list)) if !is_list => close_all(list.iter_mut()),
            _ => {}
        }
    }
    close_object(schema);
}

fn close_all<'a>(schemas: impl Iterator<Item = &'a mut Value>) {
    schemas.filter_map(Value::as_object_mut).for_each(close);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_have_the_properties_that_are_listed() {
        let listed = |key: &str| json!({"type": "object", "properties": {key: {"type": "string"}}});
        let closed_of = |key: &str| {
            let mut schema = listed(key);
            schema["additionalProperties"] = false.into();
            schema
        };
        for (schema, closed) in [
            (listed("a"), closed_of("a")),
            // A property may have the name of a key.
            (listed("properties"), closed_of("properties")),
            (
                json!({"type": "array", "items": listed("a")}),
                json!({"type": "array", "items": closed_of("a")}),
            ),
            (
                json!({"$ref": "#/$defs/p", "$defs": {"p": listed("a")}}),
                json!({"$ref": "#/$defs/p", "$defs": {"p": closed_of("a")}}),
            ),
            (
                json!({"anyOf": [listed("a"), {"type": "null"}]}),
                json!({"anyOf": [closed_of("a"), {"type": "null"}]}),
            ),
            (
                json!({"properties": {"a": listed("b")}, "additionalProperties": true}),
                json!({"properties": {"a": closed_of("b")}, "additionalProperties": true}),
            ),
            (
                json!({"properties": {}, "anyOf": [listed("a")]}),
                json!({"properties": {}, "anyOf": [listed("a")]}),
            ),
            (
                json!({"allOf": [listed("a")]}),
                json!({"allOf": [listed("a")]}),
            ),
            (json!({"type": "object"}), json!({"type": "object"})),
        ] {
            let Value::Object(mut changed) = schema else {
                panic!("no object")
            };
            close(&mut changed);
            assert_eq!(Value::from(changed), closed);
        }
    }
}
