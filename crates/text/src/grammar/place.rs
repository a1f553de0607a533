//! Error messages that quote the place in a schema.

use super::definitions::standalone;
use super::schema::{Step, children, pointer};
use super::source::{GrammarSource, styled};
use foretoken_core::error::{clipped, json_words};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Maximum number of subschemas that are tried, and the time after which no further one is: with its
/// definitions, each can take as long as the schema itself.
const MAX_TRIES: usize = 300;
const MAX_SEARCH: Duration = Duration::from_millis(500);
/// Maximum characters of the parser's message, and of the quoted part of a schema.
const MAX_MESSAGE_CHARS: usize = 600;
const MAX_QUOTED_CHARS: usize = 120;

/// Describes what is wrong with a source that llguidance refuses with `error`, in words that follow the name of its
/// field. `check` is llguidance's error for another source.
pub fn describe(
    source: &GrammarSource,
    error: &anyhow::Error,
    check: impl Fn(TopLevelGrammar) -> Option<anyhow::Error>,
) -> String {
    let cause = innermost(error);
    if let Some(message) = cause.strip_prefix("panic: ") {
        return panicked(message);
    }
    match source {
        GrammarSource::JsonSchema(schema) => {
            let (steps, part) = deepest(schema, &cause, check);
            let path = match &steps[..] {
                [] => "the schema".into(),
                steps => format!("`#{}`", clipped(&pointer(steps))),
            };
            let quoted = cut(&part.to_string(), MAX_QUOTED_CHARS);
            format!("is not possible or not supported at {path}, {quoted}: {cause}")
        }
        _ => format!("is not a grammar that is supported: {cause}"),
    }
}

/// Describes what is wrong with a source on which llguidance panicked with `message`, in words that follow the name
/// of its field.
pub fn panicked(message: &str) -> String {
    if message.starts_with("attempt to ") && message.ends_with(" overflow") {
        return "is not supported: its numbers are too large to compute with".into();
    }
    format!("is not supported: {message}")
}

/// The innermost message of an error, without a backtrace.
fn innermost(error: &anyhow::Error) -> String {
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

/// The smallest part of `schema` that `check` refuses for the same `cause`, and the steps to it.
fn deepest<'a>(
    schema: &'a Value,
    cause: &str,
    check: impl Fn(TopLevelGrammar) -> Option<anyhow::Error>,
) -> (Vec<Step<'a>>, &'a Value) {
    // A part is checked with the definitions that it reaches.
    let is_refused = |part: &Value| {
        let alone = match part {
            Value::Object(_) => standalone(part, schema),
            Value::Bool(false) => Some(part.clone()),
            _ => None,
        };
        alone.is_some_and(|alone| {
            let source = GrammarWithLexer::from_json_schema(styled(alone));
            let error = check(TopLevelGrammar::from_grammar(source));
            error.is_some_and(|error| innermost(&error) == cause)
        })
    };
    let (mut tries, started) = (0, Instant::now());
    let mut may_try = |_: &_| {
        tries += 1;
        tries <= MAX_TRIES && started.elapsed() <= MAX_SEARCH
    };
    let (mut steps, mut part) = (Vec::new(), schema);
    while let Some((step, child)) = (children(part).into_iter())
        .take_while(&mut may_try)
        .find(|(_, child)| is_refused(child))
    {
        steps.push(step);
        part = child;
    }
    (steps, part)
}
