//! `propertyNames`, which llguidance does not have, where other keywords say the same.

use super::schema::{ANNOTATIONS, Parts, children_mut, resolve};
use serde_json::{Map, Value};

/// The keyword.
const NAMES: &str = "propertyNames";
/// The keyword of the schema that the properties share.
const OTHERS: &str = "additionalProperties";
/// Maximum bytes of all properties that are declared in a schema. Many objects may refer to one list of names.
const MAX_DECLARED: usize = 64 << 10;

/// Leaves the keyword out where it allows every name, as those of Zod's records do, and declares the names where it
/// lists them. Where it says something else, it stays. Returns whether it changed something.
pub fn rewrite(schema: &mut Value) -> bool {
    if !Parts::of(schema).any(|(_, part)| part.get(NAMES).is_some()) {
        return false;
    }
    let mut references = Parts::of(schema).filter_map(|(_, part)| part.get("$ref")?.as_str());
    let is_referred = references.any(|reference| reference.contains(OTHERS));
    let root = schema.clone();
    let mut declarations = Declarations {
        root: &root,
        // What a reference leads to stays where it is.
        room: (!is_referred).then_some(MAX_DECLARED),
    };
    declarations.replace(schema)
}

/// The declarations of a whole schema.
struct Declarations<'a> {
    /// The schema as it was.
    root: &'a Value,
    /// Bytes that further ones may take; `None` = there may be none.
    room: Option<usize>,
}

impl Declarations<'_> {
    /// From the inside out, so that the copies of a schema have none to replace.
    fn replace(&mut self, part: &mut Value) -> bool {
        let mut changed = false;
        for child in children_mut(part) {
            changed |= self.replace(child);
        }
        if let Some(keywords) = part.as_object_mut() {
            changed |= self.leave_out(keywords);
        }
        changed
    }

    fn leave_out(&mut self, keywords: &mut Map<String, Value>) -> bool {
        let names = keywords.get(NAMES);
        let Some(names) = names.and_then(|names| referred(names, self.root)) else {
            return false;
        };
        if !allows_all(names) {
            let Some(properties) = self.properties(keywords, names) else {
                return false;
            };
            keywords.insert("properties".into(), properties.into());
            keywords.insert(OTHERS.into(), false.into());
        }
        keywords.shift_remove(NAMES);
        true
    }

    /// The properties of an object that has those of `names` alone, if they can be declared.
    fn properties(
        &mut self,
        keywords: &Map<String, Value>,
        names: &Value,
    ) -> Option<Map<String, Value>> {
        let has = |keyword: &str| keywords.contains_key(keyword);
        if has("properties") || has("patternProperties") {
            return None;
        }
        let room = self.room?;
        let names = listed(names)?;
        let any = Value::Bool(true);
        let schema = keywords.get(OTHERS).unwrap_or(&any);
        let each = schema.to_string().len();
        let declared: usize = names.iter().map(|name| name.len() + each).sum();
        self.room = Some(room.checked_sub(declared)?);
        let properties = names.into_iter();
        let properties = properties.map(|name| (name.to_owned(), schema.clone()));
        Some(properties.collect())
    }
}

/// The schema of names, or the one that it refers to.
fn referred<'a>(names: &'a Value, root: &'a Value) -> Option<&'a Value> {
    match names.get("$ref") {
        None => Some(names),
        Some(Value::String(reference)) if names.as_object()?.len() == 1 => resolve(root, reference),
        Some(_) => None,
    }
}

/// Whether a keyword says nothing of a name, which is a string anyway.
fn says_nothing(keyword: &str, value: &Value) -> bool {
    keyword == "type" && value == "string" || ANNOTATIONS.contains(&keyword)
}

fn allows_all(names: &Value) -> bool {
    match names {
        Value::Object(keywords) => keywords
            .iter()
            .all(|(name, value)| says_nothing(name, value)),
        names => *names == Value::Bool(true),
    }
}

/// The only names that there may be, if that is all that their schema says.
fn listed(names: &Value) -> Option<Vec<&str>> {
    let list: &[Value] = match (names.get("enum"), names.get("const")) {
        (Some(Value::Array(list)), None) => list,
        (None, Some(one)) => std::slice::from_ref(one),
        _ => return None,
    };
    let is_list = |name: &str| matches!(name, "enum" | "const");
    let mut keywords = names.as_object()?.iter();
    let is_all = keywords.all(|(name, value)| is_list(name) || says_nothing(name, value));
    list.iter()
        .map(Value::as_str)
        .collect::<Option<_>>()
        .filter(|_| is_all)
}
