//! Error messages that quote the place in a schema.

use super::source::{GrammarSource, styled};
use crate::error::json_words;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Maximum number of subschemas that are tried, and the time after which no further one is: with its
/// definitions, each can take as long as the schema itself.
const MAX_TRIES: usize = 300;
const MAX_SEARCH: Duration = Duration::from_millis(500);
/// Maximum characters of the parser's message, and of the quoted part of a schema.
const MAX_MESSAGE_CHARS: usize = 600;
const MAX_QUOTED_CHARS: usize = 120;

/// What is wrong with a source that llguidance refuses with `error`, in words that follow the name of its
/// field. `check` is llguidance's error for another source.
pub fn describe(
    source: &GrammarSource,
    error: &anyhow::Error,
    check: impl Fn(TopLevelGrammar) -> Option<anyhow::Error>,
) -> String {
    let cause = cause(error);
    match source {
        GrammarSource::JsonSchema(schema) => {
            let mut search = Search {
                cause: &cause,
                check,
                schema,
                tries: 0,
                started: Instant::now(),
            };
            let (path, part) = search.deepest(String::new(), schema);
            let path = if path.is_empty() {
                "the schema".into()
            } else {
                format!("`#{path}`")
            };
            let quoted = cut(&part.to_string(), MAX_QUOTED_CHARS);
            format!("is not possible or not supported at {path}, {quoted}: {cause}")
        }
        _ => format!("is not a grammar that is supported: {cause}"),
    }
}

/// The bounds of numbers in a schema.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// Checks what llguidance computes with before it does: it overflows beyond 64-bit integers.
///
/// # Errors
/// What is wrong, and where, in words that follow the name of the field.
pub fn check_numbers(source: &GrammarSource) -> Result<(), String> {
    let GrammarSource::JsonSchema(schema) = source else {
        return Ok(());
    };
    let mut parts = vec![(String::new(), schema)];
    while let Some((path, part)) = parts.pop() {
        for name in BOUNDS {
            let bound = part.get(name).filter(|bound| bound.is_number());
            let Some(bound) = bound.filter(|bound| is_too_large(bound)) else {
                continue;
            };
            return Err(format!(
                "is not supported at `#{path}/{name}`: {bound} is beyond the integers of 64 bits"
            ));
        }
        let below = children(part).into_iter();
        parts.extend(below.map(|(name, child)| (format!("{path}{name}"), child)));
    }
    Ok(())
}

fn is_too_large(bound: &Value) -> bool {
    // The least integer has no opposite; its neighbours, which round to it, overflow as well.
    let (least, most) = (i64::MIN as f64, u64::MAX as f64);
    !bound
        .as_f64()
        .is_some_and(|bound| least < bound && bound <= most)
}

/// The innermost message of an error, without a backtrace.
fn cause(error: &anyhow::Error) -> String {
    let text = error.root_cause().to_string();
    let text = text.split("\n<backtrace>").next().unwrap_or_default();
    cut(&json_words(text.trim()), MAX_MESSAGE_CHARS)
}

fn cut(text: &str, chars: usize) -> String {
    let mut cut: String = text.chars().take(chars).collect();
    if cut.len() < text.len() {
        cut.push_str("...");
    }
    cut
}

/// A search for the smallest part of `schema` that is refused for the same cause.
struct Search<'a, F> {
    cause: &'a str,
    check: F,
    schema: &'a Value,
    tries: usize,
    started: Instant,
}

impl<'a, F: Fn(TopLevelGrammar) -> Option<anyhow::Error>> Search<'a, F> {
    /// The JSON pointer and the part, at or below `part`, which is at `path`.
    fn deepest(&mut self, path: String, part: &'a Value) -> (String, &'a Value) {
        for (below, child) in children(part) {
            if self.tries == MAX_TRIES || self.started.elapsed() > MAX_SEARCH {
                break;
            }
            self.tries += 1;
            if self.is_refused(child) {
                return self.deepest(path + &below, child);
            }
        }
        (path, part)
    }

    /// Whether `part` alone is refused for the cause. The schema's definitions go with it.
    fn is_refused(&self, part: &Value) -> bool {
        let Value::Object(keywords) = part else {
            return part == &Value::Bool(false) && self.refuses(&Map::new(), part);
        };
        let mut keywords = keywords.clone();
        for name in ["$schema", "$id", "$defs", "definitions", "x-guidance"] {
            if let Some(value) = self.schema.get(name) {
                keywords.entry(name).or_insert_with(|| value.clone());
            }
        }
        self.refuses(&keywords, part)
    }

    fn refuses(&self, keywords: &Map<String, Value>, part: &Value) -> bool {
        let schema = match part {
            Value::Object(_) => Value::Object(keywords.clone()),
            other => other.clone(),
        };
        let source = llguidance::api::GrammarWithLexer::from_json_schema(styled(&schema));
        let error = (self.check)(TopLevelGrammar::from_grammar(source));
        error.is_some_and(|error| cause(&error) == self.cause)
    }
}

/// The subschemas of `part`, each with the rest of its JSON pointer.
fn children(part: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (keyword, value) in part.as_object().into_iter().flatten() {
        let named = matches!(
            keyword.as_str(),
            "properties" | "patternProperties" | "$defs" | "definitions"
        );
        match value {
            Value::Object(map) if named => {
                found.extend(
                    map.iter()
                        .map(|(name, child)| (pointer(&[keyword, name]), child)),
                );
            }
            Value::Array(list) if keyword != "enum" => {
                let listed = list
                    .iter()
                    .enumerate()
                    .filter(|(_, child)| child.is_object());
                found.extend(listed.map(|(i, child)| (pointer(&[keyword, &i.to_string()]), child)));
            }
            Value::Object(_) if !matches!(keyword.as_str(), "const" | "default" | "x-guidance") => {
                found.push((pointer(&[keyword]), value));
            }
            _ => (),
        }
    }
    found
}

/// `/a/b~1c` of `a` and `b/c` (RFC 6901).
fn pointer(names: &[&str]) -> String {
    names.iter().fold(String::new(), |mut path, name| {
        let _ = write!(path, "/{}", name.replace('~', "~0").replace('/', "~1"));
        path
    })
}
