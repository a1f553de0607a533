//! The grammar of an answer with tool calls, reasoning or structured content, in llguidance's dialect of
//! Lark.

use super::arguments_grammar::{Listed, PYTHON, listed, tagged};
use super::function;
use super::grammar_parts::{Calls, MAX_PARALLEL, OR, Spelling, arguments, joined, literal};
use super::syntax::{Body, Keys, Named};
use crate::harmony;
use crate::reasoning::ReasoningFormat;
use serde_json::Value;

/// The form of an answer: reasoning, and then calls or content.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// How the model marks reasoning: `None` = it does not reason, else also whether it does so without saying so
    /// (see [`ReasoningFormat::begins_with_reasoning`]).
    pub reasoning: Option<(ReasoningFormat, bool)>,
    /// Whether it is written in messages with channels, of which each may be preceded by reasoning.
    pub is_harmony: bool,
    /// The calls that the answer may have; `None` = it has none.
    pub calls: Option<Calls<'a>>,
    /// The right side of a rule.
    pub content: Option<&'a str>,
}

/// The grammar of `answer`, which has calls or content. `special` returns the id of a marker that is a
/// special token, which no text can stand for. `None` if the calls need a grammar that is longer than one may be.
pub fn answer_grammar(answer: Answer<'_>, special: impl Fn(&str) -> Option<u32>) -> Option<String> {
    if answer.is_harmony {
        return harmony_grammar(answer, &special);
    }
    let begins = match answer.reasoning {
        None => "",
        Some((_, true)) => "thought ",
        Some((_, false)) => "thought? ",
    };
    let calls = match answer.calls {
        Some(calls) => Some(("calls", rules(calls, &special)?)),
        None => None,
    };
    let content = answer
        .content
        .map(|rule| ("content", format!("content: {rule}\n")));
    let thought = answer
        .reasoning
        .map(|(format, unmarked)| thought(format, unmarked, &special));
    let (names, rules): (Vec<_>, Vec<_>) = calls.into_iter().chain(content).unzip();
    let (names, rules) = (names.join(" | "), rules.concat());
    Some(format!(
        "start: {begins}({names})\n{}{rules}",
        thought.unwrap_or_default()
    ))
}

/// The rule `calls`, and those that it needs.
fn rules(calls: Calls<'_>, special: &dyn Fn(&str) -> Option<u32>) -> Option<String> {
    let syntax = calls.format.syntax();
    let spelling = Spelling {
        markers: syntax.markers,
        special,
    };
    let [before, after] = syntax.written;
    let separator = spelling.text(syntax.separator);
    // A literal that begins as the separator does would be read in its place.
    let (line, after) = match after.strip_prefix(syntax.separator) {
        Some(rest) => (separator.as_str(), rest),
        None => ("", after),
    };
    let (before, after) = (spelling.text(before), spelling.text(after));
    let more = if calls.parallel && !syntax.single {
        format!(" ({separator} call){{0,{}}}", MAX_PARALLEL - 1)
    } else {
        String::new()
    };
    let (list, name) = if syntax.each {
        (
            format!("calls: call{more}\ncall: {before} one {line} {after}\n"),
            "one",
        )
    } else {
        (
            format!("calls: {before} call{more} {line} {after}\n"),
            "call",
        )
    };
    let call = match &syntax.body {
        Body::Object(keys) => objects(name, keys, calls.tools),
        Body::Named(named) => named_calls(name, named, calls.tools, spelling),
        Body::Tags(tags) => tagged(name, tags, calls, spelling),
        Body::Python => listed(name, PYTHON, calls, spelling),
        Body::Braces(quote) => listed(name, Listed::braces(quote), calls, spelling),
        // Harmony has rules of its own.
        Body::Harmony => Some(String::new()),
    };
    Some(list + &call?)
}

/// The rule `rule` of a call that is an object.
fn objects(rule: &str, keys: &Keys, tools: &[Value]) -> Option<String> {
    let number = keys.number.map(|key| {
        let (before, after) = (literal(&format!("{{\"{key}\": \"")), literal("\", "));
        format!("{before} /[0-9]+/ {after}")
    });
    let object = |tool: &Value| {
        let name = &function(tool)["name"];
        let brace = if number.is_some() { "" } else { "{" };
        let head = format!("{brace}\"{}\": {name}, \"{}\": ", keys.name, keys.arguments);
        let (number, head) = (number.as_deref().unwrap_or_default(), literal(&head));
        Some(format!("({number} {head} {} \"}}\")", arguments(tool)))
    };
    let objects = joined(tools.iter().map(object), OR)?;
    Some(format!("{rule}: {objects}\n"))
}

/// The rule `rule` of a call whose name stands before its arguments.
fn named_calls(
    rule: &str,
    named: &Named,
    tools: &[Value],
    spelling: Spelling<'_>,
) -> Option<String> {
    let call = |tool: &Value| {
        let name = function(tool)["name"].as_str().unwrap_or_default();
        let before = spelling.text(&format!("{}{name}", named.before));
        let number = if named.numbered { "\":\" /[0-9]+/" } else { "" };
        let (between, after) = (spelling.text(named.between), spelling.text(named.after));
        Some(format!(
            "({before} {number} {between} {} {after})",
            arguments(tool)
        ))
    };
    let calls = joined(tools.iter().map(call), OR)?;
    Some(format!("{rule}: {calls}\n"))
}

/// The grammar of an answer in Harmony: at most one message of reasoning, then a call or content.
fn harmony_grammar(answer: Answer<'_>, special: &dyn Fn(&str) -> Option<u32>) -> Option<String> {
    let spelling = Spelling {
        markers: harmony::MARKERS,
        special,
    };
    let part = |text: &str| spelling.text(text);
    let all = |parts: &[&str]| part(&parts.concat());
    let [before, [end, after @ ..]] = harmony::THOUGHT;
    let call = |tool: &Value| {
        let name = function(tool)["name"].as_str().unwrap_or_default();
        let header = part(&harmony::call_header(name).concat());
        Some(format!("({header} {})", arguments(tool)))
    };
    let calls = answer.calls.iter().flat_map(|calls| calls.tools).map(call);
    let last = answer
        .content
        .map(|_| Some(format!("({} content)", all(&harmony::FINAL))));
    let kinds = joined(calls.chain(last), OR)?;
    let content = answer.content.map(|rule| format!("content: {rule}\n"));
    Some(format!(
        "start: thought? message\n{}message: {kinds}\n{}",
        spelling.until("thought", &all(&before), end, &all(&after)),
        content.unwrap_or_default()
    ))
}

/// The rule of what the model thinks first; `unmarked`: without saying so.
fn thought(
    format: ReasoningFormat,
    unmarked: bool,
    special: &dyn Fn(&str) -> Option<u32>,
) -> String {
    let spelling = Spelling {
        markers: format.markers(),
        special,
    };
    let ([begin, ..], [end, ..]) = format.marks_of_thoughts() else {
        return String::new();
    };
    let begin = if unmarked {
        String::new()
    } else {
        spelling.text(begin)
    };
    spelling.until("thought", &begin, end, "\"\\n\\n\"")
}
