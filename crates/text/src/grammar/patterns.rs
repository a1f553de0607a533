//! `patternProperties` that llguidance reads wrongly.
//!
//! llguidance offers a property for each pattern, and then excludes the names that are declared. Where all names of a
//! pattern are declared, it offers a comma that nothing can follow.

use super::schema::{Parts, children_mut, meets};
use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The keyword.
const PATTERNS: &str = "patternProperties";
/// Maximum number of comparisons of a name with a pattern. What is not compared stays as it is.
const MAX_MATCHES: usize = 50_000;
/// Cost of a pattern, in comparisons.
const PATTERN_MATCHES: usize = 100;
/// Maximum bytes of the copies of a pattern's schema.
const MAX_COPIED: usize = 64 << 10;
/// llguidance's own limit where it compares patterns.
const FUEL: u64 = 10_000;

/// Writes patterns that have only declared names as properties, and says that there are no other names where patterns
/// forbid all. Returns whether it changed something.
pub fn rewrite(schema: &mut Value) -> bool {
    let mut has_patterns = false;
    let mut all = Declared::default();
    for (_, part) in Parts::of(schema) {
        has_patterns |= part.get(PATTERNS).is_some();
        all.meet |= meets(part);
        all.names.extend(names(part).map(str::to_owned));
    }
    has_patterns && all.rewrite(schema)
}

/// The names in `properties` and `required`.
fn names(part: &Value) -> impl Iterator<Item = &str> {
    let properties = part.get("properties").and_then(Value::as_object);
    let properties = properties.into_iter().flat_map(Map::keys);
    let required = part.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    properties.map(String::as_str).chain(required)
}

/// The declarations of a whole schema.
#[derive(Default)]
struct Declared {
    names: BTreeSet<String>,
    /// Whether a value must fit several schemas, so that names are declared elsewhere.
    meet: bool,
    /// Comparisons so far.
    matches: usize,
}

impl Declared {
    fn rewrite(&mut self, part: &mut Value) -> bool {
        let mut changed = false;
        if part.get(PATTERNS).is_some_and(Value::is_object) {
            let own: BTreeSet<String> = names(part).map(str::to_owned).collect();
            if let Some(keywords) = part.as_object_mut() {
                changed |= self.name(keywords, &own);
                changed |= self.close(keywords, &own);
            }
        }
        for child in children_mut(part) {
            changed |= self.rewrite(child);
        }
        changed
    }

    /// Names the properties of patterns that have only declared ones. `own` are those of this object.
    fn name(&mut self, keywords: &mut Map<String, Value>, own: &BTreeSet<String>) -> bool {
        let mut named: Vec<(String, Vec<String>)> = Vec::new();
        for (pattern, schema) in keywords[PATTERNS].as_object().into_iter().flatten() {
            // A pattern without anchors matches any number of names.
            if !(pattern.starts_with('^') && pattern.ends_with('$')) {
                continue;
            }
            self.matches += self.names.len() + PATTERN_MATCHES;
            if self.matches > MAX_MATCHES {
                break;
            }
            let Some(names) = self.matching(pattern) else {
                continue;
            };
            let bytes = || names.len() * schema.to_string().len();
            if (self.meet || names.iter().all(|name| own.contains(name)))
                && bytes() <= MAX_COPIED
                && is_covered(pattern, &names)
            {
                named.push((pattern.clone(), names));
            }
        }
        let mut seen = BTreeSet::new();
        if !named
            .iter()
            .flat_map(|(_, names)| names)
            .all(|name| seen.insert(name))
        {
            // Patterns that overlap are llguidance's own error.
            return false;
        }
        for (pattern, names) in &named {
            take(keywords, pattern, names);
        }
        !named.is_empty()
    }

    /// Forbids other names where no pattern allows one and together they have all.
    fn close(&mut self, keywords: &mut Map<String, Value>, own: &BTreeSet<String>) -> bool {
        let Some(Value::Object(patterns)) = keywords.get(PATTERNS) else {
            return false;
        };
        let is_closed = keywords.get("additionalProperties") == Some(&Value::Bool(false));
        if is_closed || patterns.is_empty() || patterns.values().any(|schema| schema != false) {
            return false;
        }
        self.matches += patterns.len() * PATTERN_MATCHES;
        let taken = patterns.keys().map(|pattern| searched(pattern));
        let taken = taken.chain(own.iter().cloned().map(RegexAst::Literal));
        let any = RegexAst::Regex("(?s:.*)".into());
        let all_taken = any.contained_in(&RegexAst::Or(taken.collect()));
        let closes = self.matches <= MAX_MATCHES && is_empty(&all_taken);
        if closes {
            keywords.insert("additionalProperties".into(), false.into());
        }
        closes
    }

    /// The declared names that match `pattern`.
    fn matching(&self, pattern: &str) -> Option<Vec<String>> {
        let mut builder = RegexBuilder::new();
        let pattern = builder.mk(&searched(pattern)).ok()?;
        let mut regex = builder.to_regex_limited(pattern, FUEL).ok()?;
        let names = self.names.iter().filter(|name| regex.is_match(name));
        Some(names.cloned().collect())
    }
}

/// Declares `names` in place of `pattern`.
fn take(keywords: &mut Map<String, Value>, pattern: &str, names: &[String]) {
    let Some(patterns) = keywords[PATTERNS].as_object_mut() else {
        return;
    };
    let schema = patterns.shift_remove(pattern).unwrap_or_default();
    let properties = keywords.entry("properties").or_insert(json!({}));
    let Some(properties) = properties.as_object_mut() else {
        return;
    };
    for name in names {
        let both = match properties.get(name) {
            None | Some(Value::Bool(true)) => schema.clone(),
            Some(own) => json!({"allOf": [own, schema]}),
        };
        properties.insert(name.clone(), both);
    }
}

/// Whether `pattern` matches no other names.
fn is_covered(pattern: &str, names: &[String]) -> bool {
    let names = names.iter().cloned().map(RegexAst::Literal).collect();
    is_empty(&searched(pattern).contained_in(&RegexAst::Or(names)))
}

/// A pattern as llguidance reads it.
fn searched(pattern: &str) -> RegexAst {
    RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))
}

/// Whether nothing matches; not if that would take long to know.
fn is_empty(regex: &RegexAst) -> bool {
    let mut builder = RegexBuilder::new();
    let regex = builder
        .mk(regex)
        .and_then(|regex| builder.to_regex_limited(regex, FUEL));
    regex.is_ok_and(|mut regex| regex.always_empty())
}
