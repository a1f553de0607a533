//! Error messages that quote the place in a schema.

use super::definitions::standalone;
use super::schema::{Step, children, pointer};
use super::source::{GrammarSource, styled};
use foretoken_core::error::{clipped, json_words};
use llguidance::api::TopLevelGrammar;
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
    let cause = cause(error);
    if let Some(message) = cause.strip_prefix("panic: ") {
        return panicked(message);
    }
    match source {
        GrammarSource::JsonSchema(schema) => {
            let mut search = Search {
                cause: &cause,
                check,
                schema,
                tries: 0,
                started: Instant::now(),
            };
            let (steps, part) = search.deepest();
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
    /// The smallest part, and the steps to it.
    fn deepest(&mut self) -> (Vec<Step<'a>>, &'a Value) {
        let (mut steps, mut part) = (Vec::new(), self.schema);
        while let Some((step, child)) = self.refused_child(part) {
            steps.push(step);
            part = child;
        }
        (steps, part)
    }

    fn refused_child(&mut self, part: &'a Value) -> Option<(Step<'a>, &'a Value)> {
        for (step, child) in children(part) {
            if self.tries == MAX_TRIES || self.started.elapsed() > MAX_SEARCH {
                return None;
            }
            self.tries += 1;
            if self.is_refused(child) {
                return Some((step, child));
            }
        }
        None
    }

    /// Whether `part` alone is refused for the cause. The definitions that it reaches go with it.
    fn is_refused(&self, part: &Value) -> bool {
        let schema = match part {
            Value::Object(_) => standalone(part, self.schema),
            Value::Bool(false) => Some(part.clone()),
            _ => None,
        };
        let Some(schema) = schema else { return false };
        let source = llguidance::api::GrammarWithLexer::from_json_schema(styled(schema));
        let error = (self.check)(TopLevelGrammar::from_grammar(source));
        error.is_some_and(|error| cause(&error) == self.cause)
    }
}
