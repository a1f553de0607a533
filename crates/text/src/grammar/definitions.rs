//! A part of a schema as a schema of its own.

use super::schema::{ANNOTATIONS, DEFINITIONS, Holds, decoded, holds, resolve};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// `part` of the schema `root` as a schema of its own, with the definitions that it reaches, each once, and
/// without annotations. `None` if a reference leads to another document or to an anchor.
pub fn standalone(part: &Value, root: &Value) -> Option<Value> {
    let mut copier = Copier {
        root,
        reached: Vec::new(),
        known: HashSet::new(),
        moved: HashMap::new(),
        count: 0,
    };
    let mut alone = copier.copied(part)?;
    let mut definitions = DEFINITIONS.map(|_| Map::new());
    let mut next = 0;
    while let Some(((keyword, name), schema)) = copier.reached.get(next).cloned() {
        definitions[keyword].insert(name, copier.copied(schema)?);
        next += 1;
    }
    let Some(keywords) = alone.as_object_mut() else {
        return Some(alone);
    };
    for name in ["$schema", "x-guidance"] {
        if let Some(value) = root.get(name) {
            keywords.entry(name).or_insert_with(|| value.clone());
        }
    }
    for (keyword, all) in DEFINITIONS.into_iter().zip(definitions) {
        if !all.is_empty() {
            keywords.insert(keyword.into(), all.into());
        }
    }
    Some(alone)
}

/// `schema` without the annotations of its own, not those of its parts.
pub fn without_annotations(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(keywords) = schema.as_object_mut() {
        keywords.retain(|keyword, _| !ANNOTATIONS.contains(&keyword.as_str()));
    }
    schema
}

/// The place of a definition: the index of its keyword in [`DEFINITIONS`], and its name.
type Place = (usize, String);

/// Copies parts of `root`.
struct Copier<'a> {
    root: &'a Value,
    /// The definitions that copies reach.
    reached: Vec<(Place, &'a Value)>,
    known: HashSet<Place>,
    /// The new names of schemas that are reached and are no definitions in `root`.
    moved: HashMap<*const Value, String>,
    /// Number of new names that were tried.
    count: usize,
}

impl<'a> Copier<'a> {
    /// `part` without annotations and definitions.
    fn copied(&mut self, part: &Value) -> Option<Value> {
        let Value::Object(keywords) = part else {
            return Some(part.clone());
        };
        let mut copy = Map::new();
        for (keyword, value) in keywords {
            let value = match keyword.as_str() {
                // References to anchors are not followed.
                "$anchor" => continue,
                name if ANNOTATIONS.contains(&name) || DEFINITIONS.contains(&name) => continue,
                "$id" if std::ptr::eq(part, self.root) => continue,
                // A document in the document, whose references start there.
                "$id" => return None,
                "$ref" => self.reference(value.as_str()?)?.into(),
                name => self.values(name, value)?,
            };
            copy.insert(keyword.clone(), value);
        }
        Some(copy.into())
    }

    /// Returns a copy of the value of `keyword`.
    fn values(&mut self, keyword: &str, value: &Value) -> Option<Value> {
        Some(match (holds(keyword, value), value) {
            (Holds::Named, Value::Object(named)) => {
                let named = named.iter();
                let copies = named.map(|(name, schema)| Some((name.clone(), self.copied(schema)?)));
                Value::Object(copies.collect::<Option<_>>()?)
            }
            (Holds::List, Value::Array(list)) => {
                let copies = list.iter().map(|schema| self.copied(schema));
                Value::Array(copies.collect::<Option<_>>()?)
            }
            (Holds::Schema, _) => self.copied(value)?,
            _ => value.clone(),
        })
    }

    /// The reference in a copy.
    fn reference(&mut self, reference: &str) -> Option<String> {
        let schema = resolve(self.root, reference)?;
        if let Some(place) = place(reference) {
            self.reach(place, schema);
            return Some(reference.to_owned());
        }
        let name = match self.moved.get(&std::ptr::from_ref(schema)) {
            Some(name) => name.clone(),
            None => {
                let name = self.new_name();
                self.moved.insert(schema, name.clone());
                self.reach((0, name.clone()), schema);
                name
            }
        };
        Some(format!("#/{}/{name}", DEFINITIONS[0]))
    }

    fn reach(&mut self, place: Place, schema: &'a Value) {
        if self.known.insert(place.clone()) {
            self.reached.push((place, schema));
        }
    }

    /// A name that no definition has.
    fn new_name(&mut self) -> String {
        loop {
            let name = format!("part{}", self.count);
            self.count += 1;
            if self.root[DEFINITIONS[0]].get(&name).is_none() {
                return name;
            }
        }
    }
}

/// The definition that a reference names; `None` if it leads elsewhere.
fn place(reference: &str) -> Option<Place> {
    let pointer = decoded(reference.strip_prefix("#/")?)?;
    let (keyword, name) = pointer.split_once('/')?;
    let index = DEFINITIONS.iter().position(|known| *known == keyword)?;
    let name = (!name.contains('/')).then(|| name.replace("~1", "/").replace("~0", "~"));
    Some((index, name?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_part_comes_with_the_definitions_that_it_reaches() {
        let root = json!({
            "$id": "https://a.b/c",
            "$schema": "http://json-schema.org/draft-07/schema",
            "title": "All",
            "properties": {
                "a": {"$ref": "#/$defs/x", "description": "An x."},
                "title": {"items": {"$ref": "#/properties/a"}, "default": []},
                "b": {"anyOf": [{"$ref": "#/definitions/y%20z"}, {"enum": ["#/$defs/x"]}]},
                "all": {"$ref": "#"},
                "plain": {"type": "integer", "examples": [1]},
            },
            "$defs": {
                "x": {"properties": {"next": {"$ref": "#/$defs/x"}, "description": {"const": 1}}},
                "unused": {"type": "null"},
                "part0": true,
            },
            "definitions": {"y z": {"$ref": "#/$defs/x", "type": "object"}},
        });
        let draft = &root["$schema"];
        let x = json!({"properties": {"next": {"$ref": "#/$defs/x"}, "description": {"const": 1}}});
        let y = json!({"$ref": "#/$defs/x", "type": "object"});
        let of = |name: &str| standalone(&root["properties"][name], &root);
        assert_eq!(
            of("plain"),
            Some(json!({"type": "integer", "$schema": draft}))
        );
        assert_eq!(
            of("a"),
            Some(json!({"$ref": "#/$defs/x", "$schema": draft, "$defs": {"x": x}}))
        );
        assert_eq!(
            of("title"),
            Some(json!({
                "items": {"$ref": "#/$defs/part1"}, "$schema": draft,
                "$defs": {"part1": {"$ref": "#/$defs/x"}, "x": x},
            }))
        );
        assert_eq!(
            of("b"),
            Some(json!({
                "anyOf": [{"$ref": "#/definitions/y%20z"}, {"enum": ["#/$defs/x"]}], "$schema": draft,
                "$defs": {"x": x}, "definitions": {"y z": y},
            }))
        );
        // The whole is a definition that has no definitions.
        let all = of("all").expect("it is in the document");
        assert_eq!(all["$ref"], "#/$defs/part1");
        let whole = &all["$defs"]["part1"];
        assert_eq!(whole["properties"]["all"], json!({"$ref": "#/$defs/part1"}));
        assert_eq!(
            (whole.get("title"), whole.get("$id"), whole.get("$defs")),
            (None, None, None)
        );
        for elsewhere in ["#anchor", "other.json", "#/$defs/none", "#/properties/%zz"] {
            let part = json!({"items": {"$ref": elsewhere}});
            assert_eq!(standalone(&part, &root), None, "{elsewhere}");
        }
        let document = json!({"items": {"$id": "d", "$ref": "#/$defs/x"}});
        assert_eq!(standalone(&document, &root), None);
        assert_eq!(standalone(&json!(true), &root), Some(json!(true)));
    }
}
