//! What a schema says of a text, as expressions, for formats that write texts as they are.

use crate::grammar::resolve;
use regex_syntax::hir::{Hir, HirKind, Look};
use serde_json::Value;
use std::fmt::{self, Write};

/// References that are followed from one to the next.
const MAX_REFERENCES: usize = 8;
/// Maximum bytes of a pattern that is looked into.
const MAX_PATTERN_BYTES: usize = 4096;
/// Maximum bytes of a pattern's expression, in which classes are lists of ranges: `\w` has some thousands.
const MAX_EXPRESSION_BYTES: usize = 16 << 10;
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

/// The expressions that a text matches as a whole; none if the schema says nothing of it. A pattern that cannot be
/// written so (with lookarounds, anchors in its middle, or too long) is left out.
pub fn expressions(schema: &Value, root: &Value) -> Vec<String> {
    let Some(schema) = referred(schema, root) else {
        return Vec::new();
    };
    let pattern = schema["pattern"].as_str().and_then(|pattern| {
        let whole = (pattern.len() <= MAX_PATTERN_BYTES).then(|| searched(pattern));
        let whole = whole.flatten();
        if whole.is_none() {
            let bytes = pattern.len();
            tracing::debug!("a required call need not match a tool's pattern of {bytes} bytes");
        }
        whole
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

/// The expression of whole texts in which `pattern` is found; `None` if it is none, anchors stand within it, or the
/// expression is too long.
fn searched(pattern: &str) -> Option<String> {
    let hir = regex_syntax::parse(pattern).ok()?;
    if let Some(inner) = between_anchors(pattern, &hir) {
        return Some(inner);
    }
    let mut whole = Expression::default();
    whole.write_str("(?:").ok()?;
    write_whole(&hir, true, true, &mut whole).ok()?;
    whole.write_str(")").ok()?;
    Some(whole.0)
}

/// The expression of `pattern` as it is written, which is short, if it only has one anchor at each end.
fn between_anchors(pattern: &str, hir: &Hir) -> Option<String> {
    let inner = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let inner = format!("(?:{inner})");
    let HirKind::Concat(parts) = hir.kind() else {
        return None;
    };
    let [first, parts @ .., last] = parts.as_slice() else {
        return None;
    };
    let is = |part: &Hir, look| *part.kind() == HirKind::Look(look);
    let is_free = parts.iter().all(has_no_anchor);
    let is_anchored = is(first, Look::Start) && is(last, Look::End) && is_free;
    // The text may mean something else on its own.
    let is_same = || regex_syntax::parse(&inner).ok() == Some(Hir::concat(parts.to_vec()));
    (is_anchored && is_same()).then_some(inner)
}

fn has_no_anchor(hir: &Hir) -> bool {
    hir.properties().look_set().is_empty()
}

/// Writes the expression of whole texts in which `hir` is found. Other text may come before it if `is_first`, and after
/// it if `is_last`.
///
/// # Errors
/// If anchors stand where other text never comes, or if the expression is too long.
fn write_whole(hir: &Hir, is_first: bool, is_last: bool, to: &mut Expression) -> fmt::Result {
    let any = |is_there: bool| if is_there { ANY } else { "" };
    if has_no_anchor(hir) {
        return write!(to, "{}(?:{hir}){}", any(is_first), any(is_last));
    }
    match hir.kind() {
        HirKind::Look(Look::Start) if is_first => to.write_str(any(is_last)),
        HirKind::Look(Look::End) if is_last => to.write_str(any(is_first)),
        HirKind::Capture(capture) => write_whole(&capture.sub, is_first, is_last, to),
        HirKind::Concat(parts) => {
            let last = parts.len().saturating_sub(1);
            for (i, part) in parts.iter().enumerate() {
                write_whole(part, is_first && i == 0, is_last && i == last, to)?;
            }
            Ok(())
        }
        HirKind::Alternation(alternatives) => {
            for (i, alternative) in alternatives.iter().enumerate() {
                to.write_str(if i == 0 { "(?:" } else { "|" })?;
                write_whole(alternative, is_first, is_last, to)?;
            }
            to.write_str(")")
        }
        _ => Err(fmt::Error),
    }
}

/// An expression that is not written further than it may be long.
#[derive(Default)]
struct Expression(String);

impl Write for Expression {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MAX_EXPRESSION_BYTES {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
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
            ("^$|x", &["", "x"], &["y"]),
            (
                "^$|^https?://",
                &["", "http://", "https://a.b/c"],
                &["a", "xhttps://"],
            ),
            ("(^/|^~)", &["/", "/a\nb", "~a"], &["", "a/", "a~"]),
            ("(/|~)$", &["/", "a/", "b~"], &["", "/a"]),
            ("(?:^|x)y", &["y", "yz", "axyb"], &["", "ay"]),
            (r"^\$", &["$"], &["", "a"]),
            ("^a(?x) b #c$", &["ab", "abc"], &["a b"]),
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
        assert_eq!(of(json!({"pattern": "(", "maxLength": 4})), ["(?s:.{0,4})"]);
        // A class stays as it is written between anchors.
        assert_eq!(of(json!({"pattern": r"^\w+$"})), [r"(?:\w+)"]);
        assert_eq!(choices(&json!({"const": "x"}), &root), Some(vec!["x"]));
        assert_eq!(choices(&json!({"enum": ["x", 1]}), &root), None);
    }

    #[test]
    fn patterns_that_cannot_be_followed_are_left_out() {
        for pattern in [
            r"a\bc",
            "a?^b",
            "(?:^a)+",
            r"^(?!\.)(?!.*\.\.)[a-z]+@[a-z]+$",
            &"x".repeat(MAX_PATTERN_BYTES + 1),
            &r"\w".repeat(MAX_PATTERN_BYTES / 2),
        ] {
            let found = expressions(&json!({"pattern": pattern}), &Value::Null);
            assert_eq!(found, [""; 0], "{pattern}");
        }
    }
}
