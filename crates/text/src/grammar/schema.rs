//! The parts of a JSON schema, and the ways to them.

use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashSet;

/// Keywords that change no text.
pub const ANNOTATIONS: [&str; 5] = ["title", "description", "default", "examples", "$comment"];
/// The keywords under which definitions stand.
pub const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// A step from a schema to one within it.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    Keyword(&'a str),
    Entry(&'a str, &'a str),
    Item(&'a str, usize),
    /// From anywhere to where a reference leads.
    Reference(&'a str),
}

impl<'a> Step<'a> {
    /// The keyword that is followed.
    pub fn keyword(self) -> &'a str {
        match self {
            Self::Keyword(keyword) | Self::Entry(keyword, _) | Self::Item(keyword, _) => keyword,
            Self::Reference(_) => "$ref",
        }
    }
}

/// The kind of a keyword's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Holds {
    /// Schemas by name.
    Named,
    List,
    Schema,
    /// No schema.
    Data,
}

/// Returns the kind of the value of `keyword`. Keywords that are not known may hold definitions.
pub fn holds(keyword: &str, value: &Value) -> Holds {
    match (keyword, value) {
        ("enum" | "const" | "default" | "examples" | "x-guidance", _) => Holds::Data,
        ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(_)) => {
            Holds::Named
        }
        (_, Value::Object(_)) => Holds::Schema,
        (_, Value::Array(_)) => Holds::List,
        _ => Holds::Data,
    }
}

/// The schemas directly within `part`.
pub fn children(part: &Value) -> Vec<(Step<'_>, &Value)> {
    let mut found = Vec::new();
    for (keyword, value) in part.as_object().into_iter().flatten() {
        match holds(keyword, value) {
            Holds::Named => {
                let named = value.as_object().into_iter().flatten();
                found.extend(named.map(|(name, child)| (Step::Entry(keyword, name), child)));
            }
            Holds::List => {
                let list = value.as_array().into_iter().flatten().enumerate();
                let list = list.filter(|(_, child)| child.is_object());
                found.extend(list.map(|(i, child)| (Step::Item(keyword, i), child)));
            }
            Holds::Schema => found.push((Step::Keyword(keyword), value)),
            Holds::Data => {}
        }
    }
    found
}

/// The schemas directly within `part`, as mutable references.
pub fn children_mut(part: &mut Value) -> Vec<&mut Value> {
    let mut found = Vec::new();
    for (keyword, value) in part.as_object_mut().into_iter().flatten() {
        match holds(keyword, value) {
            Holds::Named => {
                let named = value.as_object_mut().into_iter().flatten();
                found.extend(named.map(|(_, child)| child));
            }
            Holds::List => found.extend(value.as_array_mut().into_iter().flatten()),
            Holds::Schema => found.push(value),
            Holds::Data => {}
        }
    }
    found
}

/// A schema and all within it, each once: those below it, and those that its references lead to.
pub struct Parts<'a> {
    root: &'a Value,
    /// The parts, and for each but the root the index of the part in which it was found, and the step from there. Paths
    /// may be long, so they are not kept.
    found: Vec<(&'a Value, Option<(usize, Step<'a>)>)>,
    seen: HashSet<*const Value>,
    next: usize,
}

impl<'a> Parts<'a> {
    pub fn of(root: &'a Value) -> Self {
        Self {
            root,
            found: vec![(root, None)],
            seen: HashSet::from([std::ptr::from_ref(root)]),
            next: 0,
        }
    }

    /// The JSON pointer of the part with this index.
    pub fn pointer(&self, mut index: usize) -> String {
        let mut steps = Vec::new();
        while let Some((parent, step)) = self.found[index].1 {
            steps.push(step);
            if let Step::Reference(_) = step {
                break;
            }
            index = parent;
        }
        steps.reverse();
        pointer(&steps)
    }

    fn add(&mut self, from: usize, step: Step<'a>, schema: &'a Value) {
        if self.seen.insert(std::ptr::from_ref(schema)) {
            self.found.push((schema, Some((from, step))));
        }
    }
}

impl<'a> Iterator for Parts<'a> {
    /// The index of a part, and the part.
    type Item = (usize, &'a Value);

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next;
        let (schema, _) = *self.found.get(index)?;
        self.next += 1;
        for (step, child) in children(schema) {
            self.add(index, step, child);
        }
        if let Some(Value::String(reference)) = schema.get("$ref")
            && let Some(target) = resolve(self.root, reference)
        {
            self.add(index, Step::Reference(reference), target);
        }
        Some((index, schema))
    }
}

/// The part of `root` to which a reference within the document leads.
pub fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(&decoded(reference.strip_prefix('#')?)?)
}

/// Whether a value must fit several of the schemas that `part` has: its own keywords, those in lists, and the one
/// that it refers to.
pub fn meets(part: &Value) -> bool {
    let (mut schemas, mut has_own) = (0, false);
    for (keyword, value) in part.as_object().into_iter().flatten() {
        match keyword.as_str() {
            "allOf" => schemas += value.as_array().map_or(0, Vec::len),
            "anyOf" | "oneOf" | "$ref" => schemas += 1,
            "$schema" | "$id" | "$anchor" | "x-guidance" => {}
            name if ANNOTATIONS.contains(&name) || DEFINITIONS.contains(&name) => {}
            _ => has_own = true,
        }
    }
    let has = |keyword| part.get(keyword).is_some();
    schemas + usize::from(has_own) > 1 || has("patternProperties") && has("properties")
}

/// A fragment of a URI without its percent-encoding.
pub fn decoded(fragment: &str) -> Option<Cow<'_, str>> {
    if !fragment.contains('%') {
        return Some(fragment.into());
    }
    let (mut bytes, mut rest) = (Vec::new(), fragment.bytes());
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok().map(Cow::from)
}

/// `/a/b~1c` of `a` and `b/c` (RFC 6901).
pub fn pointer(steps: &[Step<'_>]) -> String {
    let mut path = String::new();
    for step in steps {
        match *step {
            Step::Keyword(keyword) => add(&mut path, keyword),
            Step::Entry(keyword, name) => {
                add(&mut path, keyword);
                add(&mut path, name);
            }
            Step::Item(keyword, index) => {
                add(&mut path, keyword);
                add(&mut path, &index.to_string());
            }
            Step::Reference(reference) => path = reference.trim_start_matches('#').to_owned(),
        }
    }
    path
}

fn add(path: &mut String, name: &str) {
    path.push('/');
    *path += &name.replace('~', "~0").replace('/', "~1");
}
