//! Harmony, the format of gpt-oss: an answer is several messages, each with a channel and perhaps a recipient
//! (<https://cookbook.openai.com/articles/openai-harmony>). What a model thinks is in the channel `analysis`, its answer
//! in `final`, and calls are messages to `functions.NAME`:
//!
//! ```text
//! <|channel|>analysis<|message|>Paris, I think.<|end|><|start|>assistant<|channel|>commentary to=functions.weather
//! <|constrain|>json<|message|>{"city": "Paris"}<|call|>
//! ```

use super::part::{Part, until_marker};
use serde_json::Value;
use std::sync::Arc;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
/// The markers that end a message. A call and the answer also end the text.
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

/// The markers of the format.
pub const MARKERS: &[&str] = &[
    START, CHANNEL, MESSAGE, CONSTRAIN, ENDS[0], ENDS[1], ENDS[2],
];

/// The prefix with which a message to a function names it.
const FUNCTIONS: &str = "functions.";
/// A longer text without a marker is no header.
const MAX_HEADER_BYTES: usize = 512;

/// Whether a chat template writes this format.
pub fn is_template(source: &str) -> bool {
    source.contains(CHANNEL) && source.contains(MESSAGE)
}

/// The messages of a chat as a template of this format reads them: it calls reasoning `thinking`. In a message with
/// calls, the template accepts either content or reasoning, and writes both alike. So the content is added to the
/// reasoning.
pub fn messages(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        let Some(thought) = message.remove("reasoning_content") else {
            continue;
        };
        let calls = message.contains_key("tool_calls");
        let content = message.get_mut("content").filter(|_| calls);
        let thought = match (&thought, content) {
            (Value::String(thought), Some(Value::String(content))) if !content.is_empty() => {
                format!("{thought}\n{}", std::mem::take(content)).into()
            }
            _ => thought,
        };
        message.entry("thinking").or_insert(thought);
    }
    messages
}

/// Splits a model's text into reasoning, content and calls, however it is cut into pieces.
#[derive(Debug)]
pub struct HarmonyParser {
    /// The functions that may be called.
    names: Arc<[String]>,
    /// Calls after which the text is complete.
    max_calls: usize,
    /// Calls that have begun.
    calls: usize,
    state: State,
    /// The text that is not certain yet: the header so far, or part of a marker.
    held: String,
    /// Whether a message of reasoning was shown before, and one of content: a line separates them.
    before: [bool; 2],
    /// Whether the model has ended its turn.
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the body of a message.
    Header,
    /// In the body of a message. `shown`: whether some of the body was passed on.
    Body { kind: Kind, shown: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Call,
}

impl HarmonyParser {
    /// The end of `prompt`, which begins the answer.
    pub fn beginning(prompt: &str) -> &str {
        prompt.rfind(START).map_or("", |at| &prompt[at..])
    }

    /// Reads the answer to `prompt`, whose end may have begun it, with calls of `names`; the text is complete after
    /// `max_calls` of them.
    pub fn new(prompt: &str, names: Arc<[String]>, max_calls: usize) -> Self {
        let mut parser = Self {
            names,
            max_calls,
            calls: 0,
            state: State::Header,
            held: String::new(),
            before: [false; 2],
            ended: false,
        };
        let beginning = Self::beginning(prompt);
        match beginning.split_once(MESSAGE) {
            None if beginning.contains(CHANNEL) => parser.held.push_str(beginning),
            Some((header, body)) if !ENDS.iter().any(|end| body.contains(end)) => {
                let (kind, shown) = (kind(header), true);
                parser.state = State::Body { kind, shown };
            }
            _ => {}
        }
        parser
    }

    /// Whether the turn has ended, or all calls that may be made are complete. What follows is not read.
    pub fn is_full(&self) -> bool {
        self.ended || self.calls >= self.max_calls && self.state == State::Header
    }

    /// Whether the model thinks.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Body { kind, .. } if kind == Kind::Reasoning)
    }

    /// Adds text; appends what is certain to `parts`.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.held.push_str(text);
        while !self.is_full() && self.step(parts) {}
    }

    /// Ends the text.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            _ if self.is_full() => {}
            // A model that does not write the format, or one that was cut off.
            State::Header if !MARKERS.iter().any(|marker| rest.contains(marker)) => {
                self.show(Kind::Content, rest, parts);
            }
            State::Header => {}
            State::Body { kind, .. } => {
                self.show(kind, rest, parts);
                self.end(parts);
            }
        }
    }

    /// Reads a header, or what is certain of a body. Returns whether there may be more to read.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Header => {
                let found = self.held.find(MESSAGE);
                let Some(at) = found.filter(|&at| at <= MAX_HEADER_BYTES) else {
                    // However the text is cut, a header is one if its end is within the limit.
                    let is_open = self.held.len() < MAX_HEADER_BYTES + MESSAGE.len();
                    if is_open && found.is_none() {
                        return false;
                    }
                    // The marker at its beginning must not begin a header again.
                    if self.held.starts_with(START) {
                        self.held.drain(..START.len());
                    }
                    self.state = body(Kind::Content);
                    return true;
                };
                let rest = self.held.split_off(at + MESSAGE.len());
                let header = std::mem::replace(&mut self.held, rest);
                self.begin(&header[..at], parts);
                true
            }
            State::Body { kind, .. } => {
                let (end, marker) = until_marker(&self.held, &[ENDS[0], ENDS[1], ENDS[2], START]);
                let rest = self.held.split_off(end);
                let text = std::mem::replace(&mut self.held, rest);
                self.show(kind, text, parts);
                let Some(marker) = marker else { return false };
                self.end(parts);
                // The marker of a beginning is part of the next header.
                if marker != START {
                    self.held.drain(..marker.len());
                }
                self.ended = ENDS[1..].contains(&marker);
                true
            }
        }
    }

    /// Begins the body of a message with this header.
    fn begin(&mut self, header: &str, parts: &mut Vec<Part>) {
        // The recipient stands after the role or after the channel.
        let recipient = word_after(header, "to=");
        let called = recipient.map(|to| to.strip_prefix(FUNCTIONS).unwrap_or(to));
        let kind = match called {
            Some(name) if self.names.iter().any(|known| known == name) => {
                self.calls += 1;
                parts.push(Part::CallStart(name.to_owned()));
                Kind::Call
            }
            _ => kind(header),
        };
        self.state = body(kind);
    }

    fn show(&mut self, kind: Kind, text: String, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let was_shown = matches!(self.state, State::Body { shown: true, .. });
        self.state = State::Body { kind, shown: true };
        let mut separated = |index: usize, text: String| {
            let before = std::mem::replace(&mut self.before[index], true);
            if before && !was_shown {
                format!("\n{text}")
            } else {
                text
            }
        };
        parts.push(match kind {
            Kind::Reasoning => Part::Reasoning(separated(0, text)),
            Kind::Content => Part::Content(separated(1, text)),
            Kind::Call => Part::Arguments(text),
        });
    }

    /// Ends a message.
    fn end(&mut self, parts: &mut Vec<Part>) {
        if self.state == body(Kind::Call) {
            parts.push(Part::Arguments("{}".into()));
        }
        self.state = State::Header;
    }
}

fn body(kind: Kind) -> State {
    State::Body { kind, shown: false }
}

/// The kind of a message that calls no function, by its channel.
fn kind(header: &str) -> Kind {
    match word_after(header, CHANNEL) {
        Some("analysis") => Kind::Reasoning,
        _ => Kind::Content,
    }
}

/// Returns the part of `header` after `label` and before the next space or marker, if it is not empty.
fn word_after<'h>(header: &'h str, label: &str) -> Option<&'h str> {
    let (_, rest) = header.split_once(label)?;
    let word = rest.split(|c: char| c.is_whitespace() || c == '<').next();
    word.filter(|word| !word.is_empty())
}

/// The header of a message with the answer.
pub const FINAL: [&str; 3] = [CHANNEL, "final", MESSAGE];
/// The texts before and after the text of a message of reasoning: its header, and the beginning of the next message.
pub const THOUGHT: [[&str; 3]; 2] = [
    [CHANNEL, "analysis", MESSAGE],
    [ENDS[0], START, "assistant"],
];

/// The texts of which any begins, and those of which any ends what the model thinks before its answer. The first of each
/// is written. One message of reasoning may follow another, so only the header of another message ends it.
pub const THOUGHT_MARKS: (&[&str], &[&str]) = (
    &["<|channel|>analysis<|message|>"],
    &[
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>final ",
        "<|end|><|start|>assistant<|channel|>final<|constrain|>",
        "<|end|><|start|>assistant<|channel|>commentary",
        "<|end|><|start|>assistant to=",
    ],
);

/// The header of a call of the function `name`.
pub fn call_header(name: &str) -> [String; 5] {
    [
        CHANNEL.into(),
        format!("commentary to={FUNCTIONS}{name} "),
        CONSTRAIN.into(),
        "json".into(),
        MESSAGE.into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::{Joined, joined, pieces};
    use proptest::prelude::*;

    /// A text that is no header if it stands twice.
    const LONG: &str = "a text that is as long as half a header: ................................................................................................................................................................................................................................";
    const PROMPT: &str = "<|start|>user<|message|>Hi<|end|><|start|>assistant";

    /// Reads a text that comes in pieces of these sizes.
    fn read(prompt: &str, text: &str, sizes: &[usize]) -> Joined {
        let names: Arc<[String]> = ["weather".to_owned(), "time".to_owned()].into();
        let mut parser = HarmonyParser::new(prompt, names, usize::MAX);
        let mut parts = Vec::new();
        pieces(text, sizes).for_each(|piece| parser.push(&piece, &mut parts));
        parser.finish(&mut parts);
        joined(parts)
    }

    /// Texts, their reasoning, their content and their calls.
    const MESSAGES: &str = r#"
<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Hi *you* | Hm.  | Hi *you*
<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|> | a |  | weather {"city": "Paris"}
// The recipient may come with the role, and a preamble before the call.
<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.time<|channel|>commentary json<|message|> |  | I look. | time {}
// A function that there is not, and tools of the model itself.
<|channel|>commentary to=functions.no<|message|>{}<|call|> |  | {}
<|channel|>analysis to=browser.search code<|message|>q<|call|><|start|>assistant<|channel|>analysis<|message|>r | q
// A message that does not end before the next one begins, which is cut off.
<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|start|>assistant | a\nb
plain text |  | plain text
<|channel|>ana
<|channel|>final<|message|>a <|en |  | a <|en
"#;

    #[test]
    fn channels_and_recipients_are_told_apart() {
        for row in (MESSAGES.trim().lines()).filter(|row| !row.starts_with("//")) {
            let mut columns = row.split(" | ");
            let mut next = || columns.next().unwrap_or_default().to_owned();
            let (text, reasoning, content) = (next(), next().replace("\\n", "\n"), next());
            let calls = columns.map(|call| call.split_once(' ').expect("a name and arguments"));
            let calls = calls.map(|(name, arguments)| (name.to_owned(), arguments.to_owned()));
            let want: Joined = (reasoning, content, calls.collect());
            for sizes in [&[10_000][..], &[1], &[3, 2]] {
                assert_eq!(read(PROMPT, &text, sizes), want, "{text}");
            }
        }
        // A header that is too long is none, however it comes.
        let long = "no header ".repeat(60);
        for text in [long.clone(), format!("{long}<|message|>a")] {
            for sizes in [&[10_000][..], &[7], &[1, 300]] {
                assert_eq!(read(PROMPT, &text, sizes).1, text);
            }
        }
    }

    #[test]
    fn a_thought_beside_content_and_calls_is_kept() {
        let read = |message: Value| messages(&[message]).remove(0);
        let call = serde_json::json!([{"function": {"name": "time", "arguments": {}}}]);
        let both = serde_json::json!({"content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": call});
        let joined =
            serde_json::json!({"content": "", "thinking": "Hm.\nLet me look.", "tool_calls": call});
        assert_eq!(read(both), joined);
        let answer = serde_json::json!({"content": "Yes.", "reasoning_content": "Hm."});
        let separate = serde_json::json!({"content": "Yes.", "thinking": "Hm."});
        assert_eq!(read(answer), separate);
    }

    #[test]
    fn an_answer_may_have_begun_in_the_prompt() {
        let begun = format!("{PROMPT}<|channel|>final<|message|>Once");
        assert_eq!(read(&begun, " upon", &[2]).1, " upon");
        let in_header = format!("{PROMPT}<|channel|>analysis");
        assert_eq!(read(&in_header, "<|message|>a", &[2]).0, "a");
        let thinks = format!("{PROMPT}<|channel|>analysis<|message|>");
        let text = "a<|end|><|start|>assistant<|channel|>final<|message|>b";
        assert_eq!(read(&thinks, text, &[4]), ("a".into(), "b".into(), vec![]));
    }

    #[test]
    fn nothing_is_read_after_the_last_call() {
        let names: Arc<[String]> = ["weather".to_owned()].into();
        let mut parser = HarmonyParser::new(PROMPT, names, 1);
        let mut parts = Vec::new();
        let call = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>";
        parser.push(&call.repeat(2), &mut parts);
        assert!(parser.is_full());
        assert_eq!(parts.len(), 2, "{parts:?}");
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(
            parts in prop::collection::vec(prop::sample::select(vec![
                "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "<|constrain|>json", "analysis",
                "final", "commentary", " to=functions.weather", "{\"a\": 1}", " ", "<|", "é", "\n", LONG,
            ]), 0..16),
            sizes in prop::collection::vec(1usize..6, 1..5),
        ) {
            let text = parts.concat();
            let whole = read(PROMPT, &text, &[text.len() + 1]);
            prop_assert_eq!(read(PROMPT, &text, &sizes), whole);
        }
    }
}
