//! What a schema says of a text, as expressions, for formats that write texts as they are.

use crate::grammar::resolve;
use regex_syntax::hir::{Hir, HirKind, Look};
use serde_json::Value;

/// References that are followed from one to the next.
const MAX_REFERENCES: usize = 8;
/// Maximum bytes of a pattern that is looked into.
const MAX_PATTERN_BYTES: usize = 4096;
/// The expression of any text.
pub const ANY: &str = "(?s:.*)";

/// `schema`, or the part of `root` that it refers to.
fn referred<'s>(schema: &'s Value, root: &'s Value) -> Option<&'s Value> {
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let Some(Value::String(reference)) = schema.get("$ref") else {
            break;
        };
        schema = resolve(root, reference)?;
    }
    Some(schema)
}

/// The only texts that a value may be.
pub fn choices<'s>(schema: &'s Value, root: &'s Value) -> Option<Vec<&'s str>> {
    let schema = referred(schema, root)?;
    if let Some(text) = schema["const"].as_str() {
        return Some(vec![text]);
    }
    let texts = schema["enum"].as_array()?.iter().map(Value::as_str);
    texts.collect()
}

/// The expressions that a text matches as a whole; none if the schema says nothing of it. An expression that cannot be
/// read stays what it is, so that its grammar tells what is wrong.
pub fn expressions(schema: &Value, root: &Value) -> Vec<String> {
    let Some(schema) = referred(schema, root) else {
        return Vec::new();
    };
    let pattern = schema["pattern"].as_str().map(|pattern| {
        let whole = (pattern.len() <= MAX_PATTERN_BYTES).then(|| searched(pattern));
        whole.flatten().unwrap_or_else(|| pattern.to_owned())
    });
    let length = |key: &str| schema[key].as_u64();
    let lengths = match (length("minLength"), length("maxLength")) {
        (None | Some(0), None) => None,
        (min, max) => {
            let max = max.map(|max| max.to_string()).unwrap_or_default();
            Some(format!("(?s:.{{{},{max}}})", min.unwrap_or(0)))
        }
    };
    pattern.into_iter().chain(lengths).collect()
}

/// The expression of whole texts in which `pattern` is found; `None` if it is none, or anchors stand within it.
fn searched(pattern: &str) -> Option<String> {
    let hir = regex_syntax::parse(pattern).ok()?;
    let alternatives = match hir.kind() {
        HirKind::Alternation(alternatives) => alternatives.as_slice(),
        _ => std::slice::from_ref(&hir),
    };
    let whole = alternatives.iter().map(|hir| {
        let parts = match hir.kind() {
            HirKind::Concat(parts) => parts.as_slice(),
            HirKind::Look(_) | HirKind::Empty => return Some(ANY.to_owned()),
            _ => std::slice::from_ref(hir),
        };
        let is = |part: Option<&Hir>, look| part.map(Hir::kind) == Some(&HirKind::Look(look));
        let (begins, ends) = (is(parts.first(), Look::Start), is(parts.last(), Look::End));
        let parts = &parts[usize::from(begins)..parts.len() - usize::from(ends)];
        let inner = Hir::concat(parts.to_vec());
        if !inner.properties().look_set().is_empty() {
            return None;
        }
        let [before, after] = [begins, ends].map(|is_anchored| if is_anchored { "" } else { ANY });
        Some(format!("{before}(?:{inner}){after}"))
    });
    let whole = whole.collect::<Option<Vec<_>>>()?;
    Some(format!("(?:{})", whole.join("|")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patterns_are_searched_for_and_texts_match_as_a_whole() {
        let whole = |pattern: &str, text: &str| {
            let found = expressions(&json!({"pattern": pattern}), &Value::Null);
            let expression = format!("^(?:{})$", found[0]);
            regex::Regex::new(&expression)
                .expect("an expression")
                .is_match(text)
        };
        for (pattern, texts, others) in [
            ("^[ab]+$", &["a", "ba"][..], &["", "ac", "a\nb"][..]),
            ("b", &["b", "a\nbc"], &["", "ac"]),
            ("^a", &["a", "ab\n"], &["ba"]),
            ("^a|b$", &["ax", "xb"], &["xax", "xbx"]),
            ("^(?:a|bc)$", &["a", "bc"], &["abc", "b"]),
            ("^$|x", &["", "x"], &[]),
        ] {
            for text in texts {
                assert!(whole(pattern, text), "{pattern}: {text:?}");
            }
            for text in others {
                assert!(!whole(pattern, text), "{pattern}: {text:?}");
            }
        }
    }

    #[test]
    fn what_a_schema_says_of_a_text_is_found() {
        let root = json!({"$defs": {"A": {"type": "string", "minLength": 2, "maxLength": 3}, "B": {"$ref": "#/$defs/A"}}});
        let of = |schema: Value| expressions(&schema, &root);
        assert_eq!(of(json!({"$ref": "#/$defs/B"})), ["(?s:.{2,3})"]);
        assert_eq!(of(json!({"minLength": 1})), ["(?s:.{1,})"]);
        assert_eq!(of(json!({"maxLength": 0})), ["(?s:.{0,0})"]);
        assert_eq!(of(json!({"minLength": 0})), [""; 0]);
        assert_eq!(
            of(json!({"pattern": "(", "maxLength": 4})),
            ["(", "(?s:.{0,4})"]
        );
        assert_eq!(of(json!({"pattern": r"a\bc"})), [r"a\bc"]);
        assert_eq!(choices(&json!({"const": "x"}), &root), Some(vec!["x"]));
        assert_eq!(choices(&json!({"enum": ["x", 1]}), &root), None);
    }
}
