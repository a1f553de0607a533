//! Estimates the size of a schema for llguidance. llguidance copies the target of a reference where a value must also
//! fit other schemas, and multiplies alternatives there. A kilobyte can become gigabytes.

use super::schema::{ANNOTATIONS, DEFINITIONS, Holds, Parts, children, holds, meets, resolve};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Maximum bytes of a schema with all copies, about a tenth of the memory that they take.
const MAX_BYTES: f64 = (16 << 20) as f64;
/// Maximum number of copies within each other.
const MAX_DEPTH: usize = 1000;
/// Maximum number of properties of an object, if the schema has no other.
const MAX_PROPERTIES: usize = 4000;
/// Bytes that a part takes besides its texts.
const PART_BYTES: f64 = 16.0;

/// Maximum bytes of the name of a property where names are compared with patterns, and of all names of an object. The
/// cost of a pattern grows with both.
const MAX_NAME_BYTES: usize = 256;
const MAX_NAMES_BYTES: usize = 64 << 10;

/// The share of its limits that the schemas of a source have taken.
#[derive(Default)]
pub struct Taken {
    bytes: f64,
    /// The sum of the squares of the numbers of properties of all objects.
    squares: usize,
}

impl Taken {
    /// Checks how large `schema` becomes, beside those before it.
    ///
    /// # Errors
    /// A text that names what is too large, in words that follow the name of the field.
    pub fn add(&mut self, schema: &Value) -> Result<(), String> {
        for (_, part) in Parts::of(schema) {
            self.add_properties(part)?;
        }
        let mut copies = Copies {
            root: schema,
            bytes: schema.to_string().len() as f64,
            known: HashMap::new(),
        };
        let references = Parts::of(schema).filter_map(|(_, part)| part.get("$ref")?.as_str());
        let targets = references.filter_map(|reference| resolve(schema, reference));
        let mut seen = HashSet::new();
        let roots = std::iter::once(schema).chain(targets);
        for root in roots.filter(|&root| seen.insert(std::ptr::from_ref(root))) {
            let size = copies.size(root, false, 0);
            self.bytes += size
                .ok_or("is not supported: its references are too deep in each other")?
                .bytes;
            if self.bytes > MAX_BYTES {
                return Err("is not supported: where references and alternatives must hold together, it becomes too large".into());
            }
        }
        Ok(())
    }

    /// llguidance takes time for an object that grows with the square of its properties: about a second for 3,000.
    fn add_properties(&mut self, part: &Value) -> Result<(), String> {
        let Some(properties) = part.get("properties").and_then(Value::as_object) else {
            return Ok(());
        };
        self.squares += properties.len() * properties.len();
        if self.squares > MAX_PROPERTIES * MAX_PROPERTIES {
            return Err(format!(
                "is not supported: it has too many properties, of which an object may have {MAX_PROPERTIES}, and several fewer"
            ));
        }
        let is_long = |name: &String| name.len() > MAX_NAME_BYTES;
        let all: usize = properties.keys().map(String::len).sum();
        if part.get("patternProperties").is_some()
            && (all > MAX_NAMES_BYTES || properties.keys().any(is_long))
        {
            return Err(format!(
                "is not supported: beside patternProperties, names may have {MAX_NAME_BYTES} bytes each and {MAX_NAMES_BYTES} together"
            ));
        }
        Ok(())
    }
}

/// The size of a schema, which may be a choice.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    alternatives: f64,
    /// Size of all alternatives together.
    bytes: f64,
}

impl Size {
    /// The size of a schema that is no choice.
    fn of_one(bytes: f64) -> Self {
        let alternatives = 1.0;
        Self {
            alternatives,
            bytes,
        }
    }
}

struct Copies<'a> {
    root: &'a Value,
    /// Size of the root.
    bytes: f64,
    /// Sizes that are known, by the part and by whether its values must also fit other schemas.
    known: HashMap<(*const Value, bool), Size>,
}

impl<'a> Copies<'a> {
    /// Returns the size of `part`; `is_met` says whether its values must also fit other schemas. `None` if `part` is
    /// too deep.
    fn size(&mut self, part: &'a Value, is_met: bool, depth: usize) -> Option<Size> {
        let key = (std::ptr::from_ref(part), is_met);
        if let Some(known) = self.known.get(&key) {
            return Some(*known);
        }
        if depth > MAX_DEPTH {
            return None;
        }
        // A reference that leads back here adds at most the whole schema. A schema that leads to nothing else is refused
        // by the parser itself.
        self.known.insert(key, Size::of_one(self.bytes));
        let is_met = is_met || meets(part);
        // The sizes of the schemas that must hold together.
        let mut all = vec![self.own(part, is_met, depth + 1)?];
        for (keyword, value) in part.as_object().into_iter().flatten() {
            let list = value.as_array().into_iter().flatten();
            match keyword.as_str() {
                "allOf" => {
                    for schema in list {
                        all.push(self.size(schema, is_met, depth + 1)?);
                    }
                }
                "anyOf" | "oneOf" => {
                    let mut any = Size::default();
                    for schema in list {
                        let size = self.size(schema, is_met, depth + 1)?;
                        any.alternatives += size.alternatives;
                        any.bytes += size.bytes;
                    }
                    all.push(any);
                }
                "enum" => all.push(Size {
                    alternatives: list.count() as f64,
                    bytes: value.to_string().len() as f64,
                }),
                "$ref" if is_met => {
                    let reference = value.as_str();
                    if let Some(target) = reference.and_then(|to| resolve(self.root, to)) {
                        all.push(self.size(target, true, depth + 1)?);
                    }
                }
                _ => {}
            }
        }
        let size = together(&all);
        self.known.insert(key, size);
        Some(size)
    }

    /// Returns the size of the other keywords of `part`, those besides `allOf`, `anyOf`, `oneOf`, `enum` and `$ref`,
    /// with the schemas in them.
    fn own(&mut self, part: &'a Value, is_met: bool, depth: usize) -> Option<Size> {
        let mut bytes = PART_BYTES;
        for (keyword, value) in part.as_object().into_iter().flatten() {
            let name = keyword.as_str();
            let is_other = ["allOf", "anyOf", "oneOf", "enum", "$ref"].contains(&name);
            if is_other || ANNOTATIONS.contains(&name) || DEFINITIONS.contains(&name) {
                continue;
            }
            if holds(keyword, value) == Holds::Data || keyword == "required" {
                bytes += value.to_string().len() as f64;
            }
        }
        let mut of_patterns = 0.0;
        for (step, child) in children(part) {
            let keyword = step.keyword();
            if ["allOf", "anyOf", "oneOf"].contains(&keyword) || DEFINITIONS.contains(&keyword) {
                continue;
            }
            let child = self.size(child, is_met, depth)?.bytes;
            bytes += child;
            if keyword == "patternProperties" {
                of_patterns += child;
            }
        }
        // A property has a copy of the pattern that its name matches.
        let properties = part.get("properties").and_then(Value::as_object);
        bytes += of_patterns * properties.map_or(0, serde_json::Map::len) as f64;
        Some(Size::of_one(bytes))
    }
}

/// Returns the size of a schema whose values fit all of `all`: each alternative of one is combined with each of the
/// others.
fn together(all: &[Size]) -> Size {
    let all = all.iter().filter(|size| size.alternatives > 0.0);
    let alternatives: f64 = all.clone().map(|size| size.alternatives).product();
    let of_one: f64 = all.map(|size| size.bytes / size.alternatives).sum();
    Size {
        alternatives,
        bytes: alternatives * of_one,
    }
}
