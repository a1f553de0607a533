//! The grammar of an answer with tool calls, reasoning or structured content, in llguidance's dialect of
//! Lark.

use super::grammar_parts::{Calls, MAX_PARALLEL, arguments, joined, literal};
use super::{ToolFormat, function, xml_grammar as xml};
use crate::harmony;
use crate::reasoning::ReasoningFormat;
use serde_json::Value;

/// The form of an answer: reasoning, and then calls or content.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// Whether the model reasons first: `None` = never, else whether it does so without saying so (see
    /// [`ReasoningFormat::begins_with_reasoning`]).
    pub reasoning: Option<bool>,
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
    let marker = |text: &str| match special(text) {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    };
    if answer.is_harmony {
        return harmony_grammar(answer, marker);
    }
    let begins = match answer.reasoning {
        None => "",
        Some(true) => "thought ",
        Some(false) => "thought? ",
    };
    let calls = match answer.calls {
        Some(calls) => Some(("calls", rules(calls, marker)?)),
        None => None,
    };
    let content = answer
        .content
        .map(|rule| ("content", format!("content: {rule}\n")));
    let thought = answer.reasoning.map(|unmarked| thought(unmarked, marker));
    let (names, rules): (Vec<_>, Vec<_>) = calls.into_iter().chain(content).unzip();
    let (names, rules) = (names.join(" | "), rules.concat());
    Some(format!(
        "start: {begins}({names})\n{}{rules}",
        thought.unwrap_or_default()
    ))
}

/// The rule `calls`, and those that it needs.
fn rules(calls: Calls<'_>, marker: impl Fn(&str) -> String) -> Option<String> {
    let format = calls.format;
    let is_xml = format == ToolFormat::Qwen3Coder;
    let more = |separator: &str, rule: &str| {
        if calls.parallel {
            format!(" ({} {rule}){{0,{}}}", literal(separator), MAX_PARALLEL - 1)
        } else {
            String::new()
        }
    };
    let start = marker(format.start());
    let list = match format {
        ToolFormat::Hermes | ToolFormat::Qwen3Coder => {
            let end = marker(format.end().unwrap_or_default());
            let more = more("\n", "call");
            let rule = if is_xml { "function" } else { "object" };
            format!("calls: call{more}\ncall: {start} \"\\n\" {rule} \"\\n\" {end}\n")
        }
        // Llama makes one call at a time, and its templates refuse messages with several calls.
        ToolFormat::Llama3Json => "calls: object\n".into(),
        // Harmony has rules of its own.
        ToolFormat::Harmony => String::new(),
        ToolFormat::Mistral => {
            let more = more(", ", "object");
            format!("calls: {start} \" [\" object{more} \"]\"\n")
        }
    };
    if is_xml {
        return Some(list + &xml::functions(calls.tools)?);
    }
    let object = |tool: &Value| {
        let function = function(tool);
        let (name, key) = (&function["name"], format.arguments_key());
        let head = literal(&format!("{{\"name\": {name}, \"{key}\": "));
        Some(format!("({head} {} \"}}\")", arguments(tool)))
    };
    let objects = joined(calls.tools.iter().map(object), "\n    | ")?;
    Some(format!("{list}object: {objects}\n"))
}

/// The grammar of an answer in Harmony: at most one message of reasoning, then a call or content.
fn harmony_grammar(answer: Answer<'_>, marker: impl Fn(&str) -> String) -> Option<String> {
    let part = |text: &str| {
        if harmony::MARKERS.contains(&text) {
            marker(text)
        } else {
            literal(text)
        }
    };
    let all = |parts: &[&str]| {
        parts
            .iter()
            .map(|text| part(text))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let [before, [end, after @ ..]] = harmony::THOUGHT;
    let call = |tool: &Value| {
        let name = function(tool)["name"].as_str().unwrap_or_default();
        let header = harmony::call_header(name);
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        Some(format!("({} {})", all(&header), arguments(tool)))
    };
    let calls = answer.calls.iter().flat_map(|calls| calls.tools).map(call);
    let last = answer
        .content
        .map(|_| Some(format!("({} content)", all(&harmony::FINAL))));
    let kinds = joined(calls.chain(last), "\n    | ")?;
    let content = answer.content.map(|rule| format!("content: {rule}\n"));
    Some(format!(
        "start: thought? message\n{}message: {kinds}\n{}",
        thinking(&all(&before), &part(end), &all(&after)),
        content.unwrap_or_default()
    ))
}

/// The rule of what the model thinks first.
fn thought(unmarked: bool, marker: impl Fn(&str) -> String) -> String {
    let [begin, end] = ReasoningFormat::MARKERS else {
        return String::new();
    };
    let begin = if unmarked {
        String::new()
    } else {
        marker(begin)
    };
    thinking(&begin, &marker(end), "\"\\n\\n\"")
}

/// The rule `thought` of any text between `before` and `end`, and then `after`.
fn thinking(before: &str, end: &str, after: &str) -> String {
    if end.starts_with('"') {
        // A text, which must not be read as a part of the thought.
        format!("thought: {before} thinking {after}\nthinking[suffix={end}]: /(?s:.*)/\n")
    } else {
        format!("thought: {before} /(?s:.*)/ {end} {after}\n")
    }
}
